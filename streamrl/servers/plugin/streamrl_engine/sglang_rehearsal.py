"""Checks whether a model takes a set of weights without touching it: its own loader runs over shapes alone.

SGLang ignores names that it does not know and accepts half a fused matrix. Here every write is recorded: a name that
writes nothing is unknown, and a parameter that is not filled lacks a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .files import BadVersion, Head, torch_dtype

_LISTED = 4
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]


def rehearse(model: Any, heads: Mapping[str, Head]) -> list[int]:
    """Check that `model.load_weights` would fill every parameter with these tensors, and use each of them.

    Returns how many values of each tensor this rank copies, for `check_used`.
    """
    writes = _Writes()
    with _hollow(model) as parameters, torch.no_grad(), writes:
        writes.watch(parameters)
        try:
            model.load_weights(writes.announced(heads))
        except BadVersion:
            raise
        except Exception as error:
            # Whatever a loader raises over a tensor that it cannot use: AssertionError, RuntimeError, KeyError, ...
            raise BadVersion(f"the model cannot take {writes.last}: {error or type(error).__name__}") from error
    unknown = [name for name in heads if name not in writes.used]
    if unknown:
        raise BadVersion(f"the model has no {_some(unknown)}")
    present = dict(model.named_parameters())
    unfilled = [name for name, twin in parameters.items() if not writes.filled(twin, present[name])]
    if unfilled:
        raise BadVersion(f"tensors are missing or too small: nothing fills {_some(unfilled)} whole")
    return [writes.copied(name) for name in heads]


def check_used(heads: Mapping[str, Head], copied: Sequence[int]) -> None:
    """`BadVersion`: all ranks together copy a part only of a tensor, which is too large then."""
    cut = [name for (name, head), count in zip(heads.items(), copied, strict=True) if count < math.prod(head.shape)]
    if cut:
        raise BadVersion(f"the model would use a part only of {_some(cut)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


@contextmanager
def _hollow(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Give the model parameters and buffers without storage for a while; yields the parameters by name.

    All attributes of a module are put back at the end: some loaders keep tensors that they derive from the weights.
    """
    kept = [(module, dict(module.__dict__)) for module in model.modules()]
    twins: dict[int, torch.Tensor] = {}
    for module, state in kept:
        for table in ("_parameters", "_buffers"):
            module.__dict__[table] = {name: _twin(tensor, twins) for name, tensor in state[table].items()}
    try:
        yield dict(model.named_parameters())
    finally:
        for module, state in kept:
            module.__dict__.clear()
            module.__dict__.update(state)


def _twin(tensor: torch.Tensor | None, twins: dict[int, torch.Tensor]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in twins:
        bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        # The type and the attributes carry the loaders.
        twin = torch.Tensor._make_subclass(type(tensor), bare, tensor.requires_grad)  # noqa: SLF001 - keeps type and class
        twin.__dict__.update(tensor.__dict__)
        twins[id(tensor)] = twin
    return twins[id(tensor)]


class _Writes(TorchDispatchMode):
    """Records which region of which parameter is written, and with what part of which tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[str] = set()
        self.last = "nothing"
        self._copied: dict[int, set[_Region]] = {}
        self._filled: dict[int, set[_Region]] = {}
        self._taken: dict[str, set[_Region]] = {}
        self._announced: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def watch(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for parameter in parameters.values():
            self._copied[_storage(parameter)], self._filled[_storage(parameter)] = set(), set()

    def announced(self, heads: Mapping[str, Head]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, head in heads.items():
            tensor = torch.empty(head.shape, dtype=torch_dtype(head.dtype), device="meta")
            self._tensors[name] = tensor  # kept, so that no other tensor gets its identity
            self._announced[_storage(tensor)] = name
            self._taken[name] = set()
            self.last = name
            yield name, tensor

    def filled(self, twin: torch.Tensor, present: torch.Tensor) -> bool:
        """Whether every value of a parameter is copied; what is set to a constant instead must be padding."""
        copied = self._copied.get(_storage(twin))
        if copied is None or twin.numel() == 1:  # replaced by its loader; a scale that a checkpoint need not have
            return True
        if _count(copied) >= twin.numel():
            return True
        missing = _without(torch.ones_like(twin, dtype=torch.bool, device="cpu"), copied)
        if _without(missing.clone(), self._filled[_storage(twin)]).any():
            return False
        # Padding is zero already; rows that hold something were to be filled.
        return not present.detach().cpu()[missing].any()

    def copied(self, name: str) -> int:
        """How many values of a tensor are copied; all of one that was converted on the way."""
        return _count(self._taken[name]) if self._taken[name] else self._tensors[name].numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.__name__.split(".")[0].endswith("_") and args and isinstance(args[0], torch.Tensor):
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any) -> None:
        target = args[0]
        place = _storage(target)
        if place not in self._copied:
            return
        if func is not torch.ops.aten.copy_.default or _storage(args[1]) == place:
            self._filled[place].add(_region(target))
            return
        source = args[1]
        # Transposed or converted on the way: then it is the one that was handed out last.
        name = self._announced.get(_storage(source), self.last)
        if source.shape != target.shape and source.numel() != target.numel():
            raise BadVersion(f"{name} is of shape {tuple(source.shape)}, its place of shape {tuple(target.shape)}")
        self._copied[place].add(_region(target))
        self.used.add(name)
        if _storage(source) in self._announced:
            self._taken[name].add(_region(source))


def _region(tensor: torch.Tensor) -> _Region:
    return int(tensor.storage_offset()), tuple(tensor.size()), tuple(tensor.stride())


def _count(regions: set[_Region]) -> int:
    return sum(torch.Size(size).numel() for _, size, _ in regions)


def _without(mask: torch.Tensor, regions: set[_Region]) -> torch.Tensor:
    """Return a copy of `mask`, which has the tensor's shape, with these regions cleared."""
    for offset, size, stride in regions:
        mask.as_strided(size, stride, offset).fill_(False)
    return mask


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - without memory there is no address
