"""Which rank's tensor goes into the checkpoint, and how the shards of one key are joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from packckpt.errors import ExportError, SaveError
from packckpt.exports import Shard, block_of, named
from packckpt.snapshot import Entry
from packckpt.tensorfile import TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a key."""

    rank: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class MergedKey:
    """One tensor of the checkpoint and the parts it is made of, in shard order.

    Attributes:
        key, dtype, shape: of the whole tensor.
        step: the step count that all parts agree on, or None where no optimizer is saved.
        parts: one, or one for each shard.
        duplicates: parts of the same key and shard on higher ranks, which are not taken.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, int]
    step: int | None
    parts: tuple[Part, ...]
    duplicates: tuple[Part, ...]

    @property
    def block(self) -> str:
        """The layer block of the key."""
        return block_of(self.key)

    def spec(self, dtype: torch.dtype) -> TensorSpec:
        """Return the tensor's place in a file, in the given dtype."""
        return TensorSpec(self.key, dtype, self.shape)


def merge_entries(entries_by_rank: Sequence[Iterable[Entry]]) -> list[MergedKey]:
    """Merge what the ranks export; returns the keys in string order.

    Of exports with the same key and shard rank on several ranks, the lowest rank's is taken.

    Raises:
        SaveError: shards of a key do not fit together, or nothing is exported at all; names key and ranks.
    """
    parts: dict[str, list[Part]] = {}
    for rank, entries in enumerate(entries_by_rank):
        for entry in entries:
            parts.setdefault(entry.key, []).append(Part(rank, entry))
    if not parts:
        raise SaveError("no rank exports anything; there is nothing to save")
    return [_merge_key(key, parts[key]) for key in sorted(parts)]


def blocks_of(merged: Iterable[MergedKey]) -> dict[str, list[MergedKey]]:
    """Group merged keys by block: blocks in string order, keys in string order."""
    blocks: dict[str, list[MergedKey]] = {}
    for item in merged:
        blocks.setdefault(item.block, []).append(item)
    return {name: blocks[name] for name in sorted(blocks)}


def join_parts(item: MergedKey, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the parts of a key, given in shard order, each of its part's shape."""
    shard = item.parts[0].entry.shard
    if shard is None or len(tensors) == 1:
        return tensors[0]
    local_sizes = shard.local_component_sizes
    if local_sizes is None:
        return torch.cat(list(tensors), dim=shard.dim)
    components = zip(*(torch.split(tensor, list(local_sizes), dim=shard.dim) for tensor in tensors), strict=True)
    return torch.cat([torch.cat(pieces, dim=shard.dim) for pieces in components], dim=shard.dim)


def cut_shard(key: str, whole: torch.Tensor, shard: Shard | None, shape: tuple[int, int]) -> torch.Tensor:
    """Return one rank's part of a whole tensor: the inverse of `join_parts`.

    Parts without components may be uneven as `torch.chunk` makes them: all of one size but for the last ones.

    Args:
        key: names the tensor in errors.
        whole: the tensor of the checkpoint, `[..., out, in]`: one, or many of one shape.
        shard: the part that is wanted, or None for all of it.
        shape: the shape that the part must have.

    Raises:
        ExportError: the whole does not split into parts of that shape.
    """
    if shard is None:
        return _expect_shape(key, whole, shape)
    local_sizes, sizes, dim = shard.local_component_sizes, shard.component_sizes, shard.dim - 2
    if local_sizes is not None and sizes is not None:
        if sum(sizes) != whole.shape[dim]:
            raise ExportError(
                f"{key}: shape {list(whole.shape[-2:])} is not the sum of component_sizes {sizes} on axis {shard.dim}"
            )
        pieces = [
            piece.narrow(dim, shard.rank * size, size)
            for piece, size in zip(torch.split(whole, list(sizes), dim=dim), local_sizes, strict=True)
        ]
        return _expect_shape(key, torch.cat(pieces, dim=dim), shape)
    chunk = -(-whole.shape[dim] // shard.world_size)
    start = min(shard.rank * chunk, whole.shape[dim])
    return _expect_shape(key, whole.narrow(dim, start, min(chunk, whole.shape[dim] - start)), shape)


def _expect_shape(key: str, part: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    found = tuple(part.shape[-2:])
    if found != shape:
        raise ExportError(f"{key}: the checkpoint has shape {list(found)} for it, the export {list(shape)}")
    return part


def _merge_key(key: str, parts: Sequence[Part]) -> MergedKey:
    taken, duplicates = _lowest_ranks(parts)
    first = taken[0]
    for part in [*taken, *duplicates]:
        _expect_alike(key, first, part)
    _expect_shards(key, taken)
    for part in duplicates:
        twin = next(t for t in taken if _shard_rank(t) == _shard_rank(part))
        if part.entry.shape != twin.entry.shape:
            raise SaveError(
                f"{key}: rank {part.rank} exports it with shape {list(part.entry.shape)}, rank {twin.rank} with "
                f"{list(twin.entry.shape)}; expected one shape for one shard"
            )
    steps = {part.entry.step for part in taken}
    if len(steps) > 1:
        found = ", ".join(f"rank {part.rank}: {part.entry.step}" for part in taken)
        raise SaveError(f"{key}: its shards have different steps ({found}); expected one step for a key")
    return MergedKey(key, first.entry.dtype, _whole_shape(taken), first.entry.step, tuple(taken), tuple(duplicates))


def _lowest_ranks(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    # Parts come in rank order, so the first of a shard is the lowest rank's.
    taken: dict[int, Part] = {}
    duplicates = []
    for part in parts:
        if taken.setdefault(_shard_rank(part), part) is not part:
            duplicates.append(part)
    return [taken[rank] for rank in sorted(taken)], duplicates


def _expect_shards(key: str, taken: Sequence[Part]) -> None:
    shard = taken[0].entry.shard
    expected = [0] if shard is None else list(range(shard.world_size))
    found = [_shard_rank(part) for part in taken]
    if found != expected:
        missing = named([str(rank) for rank in sorted(set(expected) - set(found))])
        raise SaveError(f"{key}: found shards {found} of {len(expected)}; no rank exports shard {missing}")


def _expect_alike(key: str, first: Part, part: Part) -> None:
    for what, ours, theirs in (
        ("shards", _layout(first.entry), _layout(part.entry)),
        ("dtype", first.entry.dtype, part.entry.dtype),
        ("size across the shard axis", _cross_extent(first.entry), _cross_extent(part.entry)),
    ):
        if ours != theirs:
            raise SaveError(
                f"{key}: ranks {first.rank} and {part.rank} export it with different {what}: {ours} and {theirs}"
            )


def _layout(entry: Entry) -> tuple[object, ...] | None:
    shard = entry.shard
    return None if shard is None else (shard.world_size, shard.dim, shard.component_sizes)


def _cross_extent(entry: Entry) -> object:
    return entry.shape if entry.shard is None else entry.shape[1 - entry.shard.dim]


def _shard_rank(part: Part) -> int:
    return 0 if part.entry.shard is None else part.entry.shard.rank


def _whole_shape(taken: Sequence[Part]) -> tuple[int, int]:
    first = taken[0].entry
    if first.shard is None:
        return first.shape
    extent = sum(part.entry.shape[first.shard.dim] for part in taken)
    other = first.shape[1 - first.shard.dim]
    return (extent, other) if first.shard.dim == 0 else (other, extent)
