"""Attributes of modules besides parameters and buffers: a step that changes one is noticed, and all are put back.

Compared are attributes of modules and of objects of users' classes, and the lists, dicts, sets, deques and tuples in
them. The contents of other objects stay as recordings leave them: a change shows if the next recording differs by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError, nearest
from ...ir.geometry import geometry_of
from ..words.libraries import Outside
from ..words.places import where
from .containers import CONTAINERS, PLAIN, altered_keys, fields, fill, has_tensor, is_untouched, items_of, named, same

__all__ = [
    "TABLES",
    "AllowedChanges",
    "Attributes",
    "Change",
    "names_of_attributes",
    "settled",
]

TABLES: Final = ("_parameters", "_buffers")
"""Attributes that hold the tensors of any module, and do not come from its author."""


class AllowedChanges:
    """Attributes that a step may change, because they only keep books: ``counter``, ``layers.0.counter``.

    Args:
        model: the module.
        names: of the attributes, after the paths of their modules.

    Attributes:
        changed: everything that the step has changed, whether it may or the next step is the same. The key of a
            module's attribute is its name; of an object's attribute, a dict's entry or a list's item, the holder's
            ``id`` with the name, key or position; of another container, its ``id``. The value is the holder, so that
            nothing else gets its ``id``.

    Raises:
        CaptureError: a name begins with no module of the model.
    """

    def __init__(self, model: torch.nn.Module, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise CaptureError("allow_changes is a str, not a tuple", fix=f"write allow_changes=({names!r},)")
        self._names = tuple(names)
        modules = dict(model.named_modules())
        self._known = names_of_attributes(model)
        self._unseen = [name for name in self._names if name not in self._known]
        self.changed: dict[Hashable, object] = {}
        for name in self._unseen:
            if name.rpartition(".")[0] not in modules:
                raise self._unknown(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def saw(self, name: str) -> None:
        """Note that the step made the attribute *name*."""
        self._unseen = [other for other in self._unseen if other != name]

    def check(self) -> None:
        """Raise if a name is of no attribute: none was there, and the step has made none.

        Raises:
            CaptureError: gives the nearest names.
        """
        for name in self._unseen:
            raise self._unknown(name)

    def _unknown(self, name: object) -> CaptureError:
        return CaptureError(
            f"allow_changes: {name!r} is no attribute that the step could change{nearest(name, self._known)}",
            fix="name plain attributes of modules by their paths, such as layers.0.counter",
        )


def names_of_attributes(model: torch.nn.Module) -> list[str]:
    """The names of the attributes that authors gave a model's modules, each after the path of its module."""
    plain = torch.nn.Module().__dict__
    modules = model.named_modules()
    return [f"{path}.{key}" if path else key for path, m in modules for key in m.__dict__ if key not in plain]


class Change(NamedTuple):
    """A change of an attribute that may be harmless: running the step once more shows whether it is.

    Attributes:
        attribute: its name, after the path of its module.
        complaint: the error to raise if the change is not harmless.
        left: whether the attribute holds tensors of the step now, as weight normalisation leaves its weight there.
        value: what the attribute holds now.
    """

    attribute: str
    complaint: CaptureError
    left: bool
    value: Any


def settled(first: Iterable[Change], second: Iterable[Change]) -> bool:
    """Whether the second step changed only attributes in which it left tensors, and left them as the first step did."""
    before = {change.attribute: change.value for change in first}
    return all(c.left and c.attribute in before and _alike(before[c.attribute], c.value) for c in second)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values have the same structure, tensors of the same geometry, and else equal leaves."""
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(
        geometry_of(x) == geometry_of(y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        else type(x) is type(y) and (x is y or (isinstance(x, PLAIN) and x == y))
        for x, y in zip(leaves, others, strict=True)
    )


class _Held(NamedTuple):
    """A container that an attribute holds, directly or through other objects, and its contents at that time.

    Attributes:
        attribute: the name of the module's attribute.
        private: whether that attribute is private, or an attribute of an object on the way to the container.
        holder: the container; or the object, if the container is the table of an object's attributes.
        container: the container.
        contents: as :func:`.containers.items_of` gives them.
    """

    attribute: str
    private: bool
    holder: Any
    container: Any
    contents: list[Any]


class Attributes:
    """The attributes of a model's modules, as the capture found them or the last recording left them.

    Args:
        model: the module.
        allowed: attributes that may change.
    """

    def __init__(self, model: torch.nn.Module, allowed: AllowedChanges) -> None:
        self._model, self._allowed = model, allowed
        self._now: Sequence[_OfModule] = self._looked_at()

    def _looked_at(self) -> Sequence[_OfModule]:
        return [_OfModule(path, module, self._allowed) for path, module in self._model.named_modules()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """At the end, put the attributes back as they are now, and forget them."""
        before = self._now
        try:
            yield
        finally:
            self._now = before
            self.put_back()
            self._now = ()

    @contextlib.contextmanager
    def restored_if_it_fails(self) -> Iterator[None]:
        """After an error, put the attributes back as they are now."""
        before = self._now
        try:
            yield
        except BaseException:
            self._now = before
            self.put_back()
            raise

    def put_back(self) -> None:
        """Undo what a recording has changed."""
        for kept in self._now:
            kept.restore()

    def keep(self) -> None:
        """Let the next recording start with the attributes that this one has left."""
        self._now = self._looked_at()

    def changed(self, fakes: Mapping[int, torch.Tensor]) -> list[Change]:
        """The changes of a recording that may be harmless.

        These are changes of private attributes, by which modules set themselves up (hooks are among them); of
        attributes of objects, if they are private or were None; and of attributes that now hold tensors of the step.

        Args:
            fakes: by the ``id`` of each tensor, the fake that stood for it in the step and counts as that tensor.

        Raises:
            CaptureError: any other attribute has, or holds, another value than before.
        """
        return [change for kept in self._now for change in kept.changed(fakes)]


class _OfModule:
    """The attributes of one module, with the contents of the containers among them."""

    def __init__(self, path: str, module: torch.nn.Module, allowed: AllowedChanges) -> None:
        self._path, self._table, self._allowed = path, module.__dict__, allowed
        self._before = dict(module.__dict__)
        seen: set[int] = set()
        self._held: list[_Held] = []
        for name, value in self._before.items():
            if isinstance(value, PLAIN) or name in TABLES:
                continue
            if isinstance(value, dict) and not value:  # as most are: the tables of hooks
                self._held.append(_Held(name, name.startswith("_"), value, value, []))
            else:
                self._held += _inside(name, name.startswith("_"), value, seen)

    def changed(self, fakes: Mapping[int, torch.Tensor]) -> list[Change]:
        """See :meth:`Attributes.changed`."""
        changes: list[Change] = []
        table = self._table
        before = {name: table.get(name) if name in TABLES else old for name, old in self._before.items()}
        names = () if is_untouched(table, items_of(before)) else dict.fromkeys([*before, *table])
        for name in names:
            old, new = before.get(name), table.get(name)
            if same(old, new, fakes):
                continue
            self._allowed.changed[self._whole(name)] = None
            if not self._may_change(name):
                private, left = name.startswith("_"), has_tensor(new)
                changes.append(self._change(f"the attribute {name!r}", name, new, private, left))
        for attribute, private, holder, container, contents in self._held:
            if is_untouched(container, contents):
                continue
            now = items_of(container)
            if same(contents, now, fakes):
                continue
            altered = altered_keys(container, contents, now, fakes)
            self._allowed.changed |= dict.fromkeys([(id(holder), key) for key in altered], holder)
            if not altered:
                self._allowed.changed[id(holder)] = holder
            if not self._may_change(attribute):
                if holder is not container:
                    old, new = named(contents), named(now)
                    private = private or all(key.startswith("_") or old.get(key, "") is None for key in altered)
                    now = [new[key] for key in altered if key in new]
                what = f"the contents of the attribute {attribute!r}"
                changes.append(self._change(what, attribute, now, private, left=False))
        return changes

    def _may_change(self, name: str) -> bool:
        whole = self._whole(name)
        self._allowed.saw(whole)
        return whole in self._allowed

    def _whole(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _change(self, what: str, name: str, value: Any, private: bool, left: bool) -> Change:
        whole = self._whole(name)
        refused = not left and (not private or has_tensor(value))
        error = CaptureError(
            f"the step changes {what}, which a program would not do",
            where=where(self._path),
            fix=Outside(
                "keep the value in a buffer and update the buffer in place, or don't store the value on the module; if "
                "only the first step changes the attribute, run one step before the capture; if nothing depends on the "
                f"attribute, pass allow_changes=({whole!r},)"
            ),
        )
        if refused:
            raise error
        return Change(whole, error, left, value)

    def restore(self) -> None:
        """Put everything back."""
        fill(self._table, items_of(self._before))
        for held in self._held:
            fill(held.container, held.contents)


def _inside(attribute: str, private: bool, value: Any, seen: set[int]) -> Iterator[_Held]:
    """*value*, if it is a container, and the containers that it holds, each once."""
    if isinstance(value, PLAIN) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        yield _Held(attribute, private, value, value, items_of(value))
    if isinstance(value, (*CONTAINERS, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(attribute, private, item, seen)
    table = fields(value)
    if table is not None and table is not value:
        yield _Held(attribute, private, value, table, items_of(table))
        for key, item in table.items():
            yield from _inside(attribute, private or key.startswith("_"), item, seen)
