"""In which keys and bytes two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from packckpt.checkpoint import Checkpoint
from packckpt.dtypes import plain_name
from packckpt.optimizer import COMPONENTS
from packckpt.windows import WEIGHTS


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        where: `config`, `optimizer`, or a key.
        what: which entry or component differs, and how.
        bytes: how many bytes of the tensor differ; 0 where the difference is not in a tensor's data.
    """

    where: str
    what: str
    bytes: int = 0


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Compare two verified checkpoints; one tensor of each is in memory at a time."""
    if first.digest == second.digest:
        return
    yield from _mappings("config", first.config, second.config)
    optimizers: list[dict[str, object]] = [{**c.optimizer.as_dict()} if c.optimizer else {} for c in (first, second)]
    yield from _mappings("optimizer", *optimizers)
    ours, theirs = set(first.keys), set(second.keys)
    for key in sorted(ours | theirs):
        if key not in ours or key not in theirs:
            yield Difference(key, f"only in {(first if key in ours else second).path}")
        else:
            yield from _key(key, first, second)


def _mappings(where: str, first: dict[str, object], second: dict[str, object]) -> Iterator[Difference]:
    for name in sorted({*first, *second}):
        missing = "(absent)"
        ours, theirs = first.get(name, missing), second.get(name, missing)
        if ours != theirs:
            yield Difference(where, f"{name}: {ours!r} and {theirs!r}")


def _key(key: str, first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    yield from _tensors(key, "value", first.view(WEIGHTS, key), second.view(WEIGHTS, key))
    if first.optimizer is None or second.optimizer is None:
        return
    if first.step(key) != second.step(key):
        yield Difference(key, f"step: {first.step(key)} and {second.step(key)}")
    for component in COMPONENTS:
        yield from _tensors(key, component, first.view(component, key), second.view(component, key))


def _tensors(key: str, component: str, first: torch.Tensor, second: torch.Tensor) -> Iterator[Difference]:
    if first.dtype is not second.dtype or first.shape != second.shape:
        kinds = [f"{plain_name(tensor.dtype)} {list(tensor.shape)}" for tensor in (first, second)]
        yield Difference(key, f"{component}: {kinds[0]} and {kinds[1]}")
        return
    bytes_of = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    unequal = bytes_of[0] != bytes_of[1]
    count = int(unequal.sum())
    if count:
        at = int(unequal.nonzero()[0])
        yield Difference(key, f"{component}: {count} of {unequal.numel()} bytes differ, the first at byte {at}", count)
