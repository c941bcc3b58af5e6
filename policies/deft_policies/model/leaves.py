"""The tensors inside of values: frozen dataclasses and tuples, however deep. Knows no model."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from deft_policies.model.layout import Tensors

T = TypeVar("T")


def leaves(value: object) -> Tensors:
    """The tensors of a value, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, note)
    return tuple(found)


def with_leaves(value: T, tensors: Tensors) -> T:
    """The same value with other tensors; nothing it has worked out from its own is kept."""
    left: Iterator[Tensor] = iter(tensors)
    return cast(T, _mapped(value, lambda _: next(left)))


def shapes_of(value: object) -> Hashable:
    """The value with shapes in the place of its tensors."""
    return _mapped(value, lambda tensor: (tensor.shape, tensor.dtype))


def copy_together(kept: Tensors, given: Tensors) -> None:
    """Copy tensors to where they are read, those of one format in one launch.

    Those given may be some of those kept: all are read before anything is written.
    """
    places = {_address(one) for one in kept}
    given = tuple(one.clone() if _address(one) in places else one for one in given)
    for dtype in {tensor.dtype for tensor in kept}:
        pairs = [pair for pair in zip(kept, given, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])


def _mapped(value: object, change: Callable[[Tensor], object]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(one, change) for one in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {one.name: _mapped(getattr(value, one.name), change) for one in fields(value)}
    is_same = all(part is getattr(value, name) for name, part in parts.items())
    return value if is_same else replace(value, **parts)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
