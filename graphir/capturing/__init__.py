"""From a PyTorch module to a program: a whole training step, recorded on fake tensors as PyTorch runs it.

The rooms, in the order in which a step passes through. A room imports rooms above it in this table and the IR::

    words      where a step was refused, and remedies that several refusals give
    intake     what a step is given and starts from: arguments, dimensions, options, optimizers, state
    isolate    what recording replaces and puts back: torch's attributes, fakes in the module, settings, random states
    record     operators that the dispatcher sees, as calls on values; sizes that the step's Python is told
    step       one run: forward, loss and backward of each micro-batch, and what happens to the gradients
    sizes      runs at several sizes, fitted; guards
    program    names, the update, the program
    capture, seeded, witness
               the public functions, and one more recording at a size that a session meets
"""
