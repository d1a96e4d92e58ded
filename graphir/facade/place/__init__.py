"""A placed module, under a loop that is not graphir's.

::

    model(x) ──▶ a plan for such a call? ──no──▶ capture, place, split ─┐
                        │ yes                                          │
                        ▼                                              ▼
    outputs  ◀── forward plan ── saved values, of each call its own ──▶ backward plan ──▶ gradients

The model stays what it is: its class becomes a subclass of the same name, whose ``forward`` runs plans on the model's
own parameters. A call that no plan can stand for runs the class's own ``forward``.

``swapped`` makes the class, ``homes`` says where the model's state is, ``held`` what devices hold beside plans and
``reserve`` what stays free there. ``call`` reads a call, ``calls`` finds its plans, ``captured`` captures one for them
with ``eager``, the modules inside whose own code runs as operators; ``plans`` makes and runs them, ``placement`` is
what users are told.
"""

from .door import place

__all__ = ["place"]
