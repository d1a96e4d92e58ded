"""What must hold of a plan before it runs.

:mod:`.proof.check` proves that it runs right in any interleaving of its lanes: :mod:`.proof.ordering` that uses of a
storage are ordered, :mod:`.proof.progress` that every lane gets to its end. :mod:`.proof.admission` is what a session
asks.

Reads plans and runs nothing. Of the other rooms it imports ``kernels``, to know for what there is one.
"""
