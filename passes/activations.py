"""Which blobs are activations: what one can shift, park or recompute.

The definition is Caffe2's ``data_parallel_model_utils.GetActivationBlobs``: an output of the first replica that is
read, is not a parameter, and whose gradient is read. Captured programs know each gradient; views move no bytes and
are not activations.
"""

from __future__ import annotations

from graphir.ir.program import Program
from graphir.ir.verify import blamed

from .base import require_program

__all__ = ["activation_names", "find_activations"]


def find_activations(program: Program) -> list[str]:
    """The activations of a program, without prefix, in program order, each once.

    A forward-only program has no gradients. Of a captured one, every value that depends on an input and is read counts.
    A forward-only Caffe2 net has no activations, as in ``GetActivationBlobs``.
    """
    require_program(program, "find_activations")
    with blamed(program):
        prefix = program.replicas[0]
        names = activation_names(program)
    made = dict.fromkeys([name for op in program.step.ops for name in op.outputs])
    return [name[len(prefix) :] for name in made if name in names]


def activation_names(program: Program) -> dict[str, None]:
    """The activations of a program, prefix included."""
    step, prefix = program.step, program.replicas[0]
    blobs, gradients, read = step.blobs, step.gradients, step.read
    if gradients or step.dialect.workspace:
        params = {name for name in step.external_inputs if blobs[name].role == "param"}
        params.update(filter(step.dialect.is_gradient, gradients))
        return {
            name: None
            for name, grad in gradients.items()
            if name.startswith(prefix) and name in read and grad in read and name not in params
        }
    forward = [name for op in step.ops if op.phase == "forward" for name in op.outputs if name in read]
    return {
        name: None
        for name in forward
        if name.startswith(prefix) and blobs[name].role == "activation" and not blobs[name].is_view
    }
