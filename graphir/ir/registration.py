"""Registration of a user's own operators, and the checks that an operator must pass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch._library import custom_ops
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import GraphirError
from .opset import NAMESPACES, is_composite
from .optypes.record import OperatorType
from .optypes.table import add_registered, registered_types
from .optypes.trial import disagreement

__all__ = ["register_operator"]

Kernels: TypeAlias = "Callable[..., Any] | Mapping[str, Callable[..., Any]]"

_RESERVED: Final = NAMESPACES | {"graphir", "prim"}
_KEYS: Final[Mapping[str, str]] = {"cpu": "CPU", "cuda": "CUDA"}
_TENSORS: Final = frozenset({"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"})
_REACHES: Final = re.compile(r"Storage|Stream|Any|Future|__torch__|Dict|Tuple|complex")
_FIX_SCHEMA: Final = "write it as torch does: 'mylib::scale(Tensor x, float by=2.0) -> Tensor'"
_FIX_FAKE: Final = (
    "pass fake=, a function that returns tensors like the results: fake=lambda x, by=2.0: torch.empty_like(x)"
)

_libraries: Final[list[torch.library.Library]] = []
"""The libraries that have defined operators and kernels. Torch drops operators and kernels with their library."""

_has_kernel: Final = torch._C._dispatch_has_kernel_for_dispatch_key


def register_operator(
    operator: str | OpOverload | OpOverloadPacket | custom_ops.CustomOpDef,
    *,
    kernel: Kernels | None = None,
    fake: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    scratch: Callable[..., int | None] | None = None,
    nondeterministic: str = "",
    only_elements: bool = False,
    example: Sequence[Any] | None = None,
) -> OpOverload:
    """Let programs have an operator of your own, in this process: from capture to run, in text and in files.

    The type of ``torch.ops.mylib.scale`` is ``mylib.scale.default``. The schema says what the operator overwrites and
    aliases. Proofs assume that the operator does just that, and say so. Its gradient is the one that
    ``torch.library.register_autograd`` gives it. An operator of yours that the gradient calls must be registered too.

    Args:
        operator: one that torch has, as ``torch.ops.mylib.scale``, its name, ``"mylib::scale"``, or what
            ``torch.library.custom_op`` returned; or the schema of one that torch is to have from now on,
            ``"mylib::scale(Tensor x, float by=2.0) -> Tensor"``.
        kernel: the function that computes an operator that has no kernel yet, for any device, or functions by kind,
            ``{"cpu": f, "cuda": g}``. They take the schema's parameters.
        fake: the fake of an operator that has none yet, as ``torch.library.register_fake`` takes it. From tensors
            without data it returns tensors of the results' shapes, strides and element types.
        flops: the floating-point operations of a call, given a ``SizedOperator``. By default none are counted, and a
            prediction follows from the bytes that the call reads and writes.
        scratch: the workspace of a call, given a ``SizedOperator``: the bytes that it allocates beside operands and
            results, and has freed when it returns. None if not known, as by default.
        nondeterministic: why two calls on the same values may give different bits, as certificates say it.
        only_elements: its kernels read only the elements of their operands, with any strides. So only the part of a
            storage that an operand shows is copied to another device.
        example: positional arguments for two calls of the operator now, on the host, which check that it does what its
            schema and fake say.

    Returns:
        The operator, to be called in modules.

    Raises:
        GraphirError: the schema cannot be read, or has what programs do not; the name or its namespace is taken; there
            is no kernel or no fake; a function takes other arguments than the schema; on the *example*, it overwrites
            or aliases an operand without declaring it, its results are not as the fake says, or two calls give
            different bits.
    """
    _check_options(flops, scratch, nondeterministic, only_elements, example)
    if isinstance(operator, str) and not operator.isascii():
        raise GraphirError(f"{operator!a} is neither the name nor the schema of an operator", fix=_FIX_SCHEMA)
    libraries: list[torch.library.Library] = []
    try:
        if isinstance(operator, str) and "(" in operator:
            found = _defined(operator, kernel, fake, libraries)
        else:
            found = _existing(operator, kernel, fake, libraries)
        wrong = None if example is None else disagreement(found, example, bool(nondeterministic))
        if wrong is not None:
            raise GraphirError(f"{found.name()} {wrong.what}", fix=wrong.fix)
    except BaseException:
        for library in libraries:
            library._destroy()
        raise
    _libraries.extend(libraries)
    type = f"{found.namespace}.{found._opname}.{found._overloadname}"
    known = OperatorType(
        type,
        registered=True,
        only_elements=only_elements,
        nondeterministic=nondeterministic,
        flops=flops,
        scratch=scratch,
    )
    add_registered(known)
    return found


def _defined(
    text: str, kernel: Kernels | None, fake: Callable[..., Any] | None, libraries: list[torch.library.Library]
) -> OpOverload:
    """The operator that torch has from now on by this schema."""
    try:
        schema = torch._C.parse_schema(text)
    except RuntimeError as e:
        why = next((line for line in str(e).splitlines() if line.strip()), "")
        raise GraphirError(f"{text!r} is not a schema: {why.strip()}", fix=_FIX_SCHEMA) from None
    namespace, colons, name = schema.name.partition("::")
    if not colons:
        raise GraphirError(f"{text!r} names no namespace", fix=_FIX_SCHEMA)
    qualified = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    _check(schema, qualified)
    if torch._C._get_operation_overload(schema.name, schema.overload_name) is not None:
        raise GraphirError(
            f"torch has an operator {qualified} already",
            fix=f"choose another name, or register that one: graphir.register_operator({qualified!r})",
        )
    if kernel is None:
        raise GraphirError(f"{qualified} has no kernel", fix="pass the function that computes it as kernel=")
    if fake is None:
        raise GraphirError(f"{qualified} has no fake", fix=_FIX_FAKE)
    _check_functions(schema, qualified, kernel, fake)
    library = torch.library.Library(namespace, "FRAGMENT")
    libraries.append(library)
    library.define(text.partition("::")[2])
    _implement(library, qualified, kernel, fake)
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
    return found


def _check_options(
    flops: object, scratch: object, nondeterministic: object, only_elements: object, example: object
) -> None:
    """Refuse wrong options now, not only when a prediction or a certificate reads them."""
    wrong = {
        "flops": (flops, flops is None or callable(flops), "a function of a SizedOperator"),
        "scratch": (scratch, scratch is None or callable(scratch), "a function of a SizedOperator"),
        "nondeterministic": (nondeterministic, isinstance(nondeterministic, str), "the reason, as text"),
        "only_elements": (only_elements, isinstance(only_elements, bool), "True or False"),
        "example": (example, example is None or isinstance(example, list | tuple), "a list of arguments"),
    }
    for name, (given, fits, wanted) in wrong.items():
        if not fits:
            raise GraphirError(f"register_operator: {name} is {given!r:.40}", fix=f"give {wanted}")


def _existing(
    operator: object, kernel: Kernels | None, fake: Callable[..., Any] | None, libraries: list[torch.library.Library]
) -> OpOverload:
    """An operator that torch has, with the kernel and fake that it lacks."""
    found = _found(operator)
    name = found.name()
    _check(found._schema, name)
    if torch.Tag.nondeterministic_seeded in found.tags and all(a.name != "generator" for a in found._schema.arguments):
        raise GraphirError(
            f"{name} draws random numbers, but not from a generator that it is given",
            fix="let it take 'Generator? generator=None', or the random numbers as an operand",
        )
    if _has_kernel(name, "CompositeImplicitAutograd") and is_composite(found):
        raise GraphirError(
            f"{name} consists of other operators, which a capture records in its place",
            fix="register those of them that are your own",
        )
    if kernel is None and not any(_has_kernel(name, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd")):
        raise GraphirError(f"{name} has no kernel", fix="pass the function that computes it as kernel=")
    if fake is None and not _has_fake(found):
        raise GraphirError(f"{name} has no fake", fix=_FIX_FAKE)
    _check_functions(found._schema, name, kernel, fake)
    if kernel is not None or fake is not None:
        libraries.append(torch.library.Library(found.namespace, "FRAGMENT"))
        try:
            _implement(libraries[-1], name, kernel, fake)
        except RuntimeError as e:  # torch refuses to replace what is there
            raise GraphirError(
                f"{name}: {str(e).partition(chr(10))[0]}", fix="leave out the kernels that the operator has"
            ) from None
    return found


def _found(operator: object) -> OpOverload:
    """The operator that *operator* names or is.

    Raises:
        GraphirError: there is none, or there are several.
    """
    if isinstance(operator, custom_ops.CustomOpDef):
        operator = operator._opoverload
    if isinstance(operator, str):
        namespace, _, rest = operator.partition("::")
        name, _, variant = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace, None), name, None) if name else None
        operator = getattr(packet, variant, None) if variant else packet
        if operator is None:
            raise GraphirError(
                f"torch has no operator {namespace}::{rest}",
                fix="define the operator first, with torch.library.custom_op, or give its schema: " + _FIX_SCHEMA,
            )
    if isinstance(operator, OpOverloadPacket):
        variants = operator.overloads()
        if len(variants) > 1:
            raise GraphirError(
                f"{operator} has several overloads: {', '.join(variants)}",
                fix=f"register one: {operator}.{variants[0]}",
            )
        operator = getattr(operator, variants[0])
    if not isinstance(operator, OpOverload):
        raise GraphirError(
            f"register_operator takes an operator or its schema, not a {type(operator).__name__}",
            fix="pass torch.ops.mylib.scale, or what torch.library.custom_op returned",
        )
    return operator


def _check(schema: Any, name: str) -> None:
    """Raise where programs cannot have an operator of this schema and name."""
    namespace, _, rest = name.partition("::")
    if namespace in _RESERVED or not namespace.isidentifier():
        raise GraphirError(
            f"{name} is in the namespace {namespace!r}, which is not for operators of your own",
            fix="choose a namespace for them, as in 'mylib::scale'",
        )
    if f"{namespace}.{rest if '.' in rest else f'{rest}.default'}" in registered_types():
        raise GraphirError(f"{name} is registered already", fix="register an operator once in a process")
    fix = "programs hold tensors, lists of tensors, numbers, texts and torch's constants"
    for argument in schema.arguments:
        kind = str(argument.real_type)
        if ("Tensor" in kind and kind not in _TENSORS) or _REACHES.search(kind):
            raise GraphirError(f"{name} takes {argument.name}, a {kind}", fix=fix)
    for result in schema.returns:
        if str(result.real_type) not in ("Tensor", "List[Tensor]"):
            raise GraphirError(f"{name} returns a {result.real_type}", fix="let it return tensors, or lists of tensors")
    if not schema.returns and not schema.is_mutable:
        raise GraphirError(f"{name} returns nothing, and overwrites nothing", fix="let it return a tensor")


def _has_fake(found: OpOverload) -> bool:
    made = custom_ops.OPDEFS.get(found.name())
    if made is not None:  # torch makes a fake of an operator that returns nothing; all others get one that raises
        return made._abstract_fn is not None or not found._schema.returns
    return _has_kernel(found.name(), "Meta") or _has_kernel(found.name(), "CompositeExplicitAutograd")


def _check_functions(schema: Any, name: str, kernel: Kernels | None, fake: Callable[..., Any] | None) -> None:
    """Raise where a function does not take every parameter of the schema, or requires one that has a default there:
    torch leaves out arguments that equal their defaults."""
    given = {} if kernel is None else kernel if isinstance(kernel, Mapping) else {"": kernel}
    for kind in given:
        if kind and kind not in _KEYS:
            raise GraphirError(f"a kernel of {name} is for {kind!r}", fix=f"kinds of devices: {', '.join(_KEYS)}")
    for what, function in (*((f"{kind} kernel".strip(), f) for kind, f in given.items()), ("fake", fake)):
        if function is None:
            continue
        if not callable(function):
            raise GraphirError(f"the {what} of {name} is a {type(function).__name__}", fix="pass a function")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function in C without a signature
            continue
        for arguments in (schema.arguments, [a for a in schema.arguments if not a.has_default_value()]):
            try:
                signature.bind(
                    *[None for a in arguments if not a.kwarg_only], **{a.name: None for a in arguments if a.kwarg_only}
                )
            except TypeError as e:
                names = ", ".join(
                    f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name for a in schema.arguments
                )
                raise GraphirError(
                    f"the {what} of {name}: {e}", fix=f"let the function take the arguments of the schema: {names}"
                ) from None


def _implement(
    library: torch.library.Library, name: str, kernel: Kernels | None, fake: Callable[..., Any] | None
) -> None:
    kernels = {} if kernel is None else kernel if isinstance(kernel, Mapping) else {"": kernel}
    for kind, function in kernels.items():
        library.impl(name, function, _KEYS.get(kind, "CompositeExplicitAutograd"))
    if fake is not None:
        torch.library.register_fake(name, fake, lib=library)
