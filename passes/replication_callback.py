"""Call a function for each copy of each module of a replicated program, and edit their operators in it.

In what order, and with what: :mod:`.callbacks`. What it may edit: :mod:`.replica`.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from graphir.ir.program import Program

from .base import OptionError, Pass, build, register
from .callbacks import Callback, OnReplica, with_callbacks
from .standing import Order

__all__ = ["ReplicationCallback", "replication_callback"]


@register
class ReplicationCallback(Pass):
    """See :func:`replication_callback`."""

    name: ClassVar[str] = "replication_callback"
    only_behind: ClassVar[Order] = {"replicated": "it calls a function for each copy of a module"}

    on_replica: OnReplica

    @field_validator("on_replica")
    @classmethod
    def _given(cls, on_replica: object) -> object:
        if on_replica is None:
            raise OptionError("None is no callback", fix="give a callable f(ctx, copy_id, replica)")
        return on_replica

    def rewrite(self, program: Program) -> Program:
        return with_callbacks(program, self.on_replica.required(self.name), self.name, own=False)


def replication_callback(program: Program, on_replica: Callback) -> Program:
    """Call ``on_replica(ctx, copy_id, replica)`` for every copy of every module of a replicated program.

    The modules come in the order of ``modules()``, containers included, and all of the master copy (0) before any of
    another one. ``ctx`` is one object for each module, shared by its copies; ``replica`` is a
    :class:`~graphir.passes.Replica`.

    The result's history names the callable, and a text holds no more of it: to run the history again, pass the callable
    again.

    Raises:
        PassError: the program is not replicated, or was loaded and has no module; the callable raises (the message says
            for which module and copy), or what it edits cannot be. Nothing has changed then.
        VerifyError: what it edits breaks an invariant.
    """
    return build(ReplicationCallback, on_replica=on_replica)(program)
