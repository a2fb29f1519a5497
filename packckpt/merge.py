"""Which rank's tensor goes into the checkpoint, and how the shards of one key are joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from packckpt.descriptions import Description, KeyGroup
from packckpt.errors import ExportError, SaveError
from packckpt.exports import Shard, blocks_of, named
from packckpt.tensorfile import TensorSpec
from packckpt.windows import stored_dtype


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a key."""

    rank: int
    description: Description


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """What a tensor of the checkpoint is made of; keys that every rank describes alike share one.

    Attributes:
        dtype, shape: of the whole tensor.
        step: the step count that all parts agree on, or None where no optimizer is saved.
        parts: in shard order: one, or one for each shard.
        duplicates: parts of the same shard on higher ranks, which are not taken.
    """

    dtype: torch.dtype
    shape: tuple[int, int]
    step: int | None
    parts: tuple[Part, ...]
    duplicates: tuple[Part, ...]

    @property
    def only_rank(self) -> int | None:
        """The rank that alone has the tensor, and all of it; None where there is no such rank."""
        return self.parts[0].rank if len(self.parts) == 1 and not self.duplicates else None

    def part_of(self, rank: int) -> Part:
        """Return what a rank has of the tensor."""
        return next(part for part in (*self.parts, *self.duplicates) if part.rank == rank)

    def spec(self, component: str) -> TensorSpec:
        """Return how one component of the whole tensor stands in a file."""
        return TensorSpec(stored_dtype(component, self.dtype), self.shape)


@dataclass(frozen=True, slots=True)
class Merged:
    """The tensors of a checkpoint.

    Attributes:
        compositions: by key, in string order.
        blocks: the keys of each layer block: blocks in string order, keys in string order.
    """

    compositions: Mapping[str, Composition]
    blocks: Mapping[str, Sequence[str]]


def merge_keys(groups_by_rank: Sequence[Iterable[KeyGroup]]) -> Merged:
    """Merge what the ranks export.

    Of exports with the same key and shard rank on several ranks, the lowest rank's is taken. What fits together is
    decided once for all keys that every rank describes alike.

    Raises:
        SaveError: shards of a key do not fit together, or nothing is exported at all; names key and ranks.
    """
    parts, number_of = _parts_by_key(groups_by_rank)
    if not number_of:
        raise SaveError("no rank exports anything; there is nothing to save")
    made: dict[int, Composition] = {}
    compositions: dict[str, Composition] = {}
    for key in sorted(number_of):
        number = number_of[key]
        if number not in made:
            made[number] = _compose(key, parts[number])
        compositions[key] = made[number]
    blocks: dict[str, list[str]] = {}
    for key, block in zip(compositions, blocks_of(compositions), strict=True):
        blocks.setdefault(block, []).append(key)
    return Merged(compositions, {block: blocks[block] for block in sorted(blocks)})


def join_parts(composition: Composition, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the parts of a key, given in shard order, each of its part's shape."""
    shard = composition.parts[0].description.shard
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


def _parts_by_key(groups_by_rank: Sequence[Iterable[KeyGroup]]) -> tuple[list[tuple[Part, ...]], dict[str, int]]:
    """Return the different things that keys are made of, in rank order, and for each key which of them it is."""
    parts: list[tuple[Part, ...]] = [()]
    number_of: dict[str, int] = {}
    for rank, groups in enumerate(groups_by_rank):
        for group in groups:
            part = Part(rank, group.description)
            grown: dict[int, int] = {}
            for key in group.keys:
                before = number_of.get(key, 0)
                if before not in grown:
                    grown[before] = len(parts)
                    parts.append((*parts[before], part))
                number_of[key] = grown[before]
    return parts, number_of


def _compose(key: str, parts: Sequence[Part]) -> Composition:
    taken, duplicates = _lowest_ranks(parts)
    first = taken[0]
    for part in [*taken, *duplicates]:
        _expect_alike(key, first, part)
    _expect_shards(key, taken)
    for part in duplicates:
        twin = next(t for t in taken if _shard_rank(t) == _shard_rank(part))
        if part.description.shape != twin.description.shape:
            raise SaveError(
                f"{key}: rank {part.rank} exports it with shape {list(part.description.shape)}, rank {twin.rank} with "
                f"{list(twin.description.shape)}; expected one shape for one shard"
            )
    steps = {part.description.step for part in taken}
    if len(steps) > 1:
        found = ", ".join(f"rank {part.rank}: {part.description.step}" for part in taken)
        raise SaveError(f"{key}: its shards have different steps ({found}); expected one step for a key")
    of_all = first.description
    return Composition(of_all.dtype, _whole_shape(taken), of_all.step, tuple(taken), tuple(duplicates))


def _lowest_ranks(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    # Parts come in rank order, so the first of a shard is the lowest rank's.
    taken: dict[int, Part] = {}
    duplicates = []
    for part in parts:
        if taken.setdefault(_shard_rank(part), part) is not part:
            duplicates.append(part)
    return [taken[rank] for rank in sorted(taken)], duplicates


def _expect_shards(key: str, taken: Sequence[Part]) -> None:
    shard = taken[0].description.shard
    expected = [0] if shard is None else list(range(shard.world_size))
    found = [_shard_rank(part) for part in taken]
    if found != expected:
        missing = named([str(rank) for rank in sorted(set(expected) - set(found))])
        raise SaveError(f"{key}: found shards {found} of {len(expected)}; no rank exports shard {missing}")


def _expect_alike(key: str, first: Part, part: Part) -> None:
    for what, ours, theirs in (
        ("shards", _split(first.description), _split(part.description)),
        ("dtype", first.description.dtype, part.description.dtype),
        ("size across the shard axis", _cross_extent(first.description), _cross_extent(part.description)),
    ):
        if ours != theirs:
            raise SaveError(
                f"{key}: ranks {first.rank} and {part.rank} export it with different {what}: {ours} and {theirs}"
            )


def _split(description: Description) -> tuple[object, ...] | None:
    shard = description.shard
    return None if shard is None else (shard.world_size, shard.dim, shard.component_sizes)


def _cross_extent(description: Description) -> object:
    shard = description.shard
    return description.shape if shard is None else description.shape[1 - shard.dim]


def _shard_rank(part: Part) -> int:
    return 0 if part.description.shard is None else part.description.shard.rank


def _whole_shape(taken: Sequence[Part]) -> tuple[int, int]:
    first = taken[0].description
    if first.shard is None:
        return first.shape
    extent = sum(part.description.shape[first.shard.dim] for part in taken)
    other = first.shape[1 - first.shard.dim]
    return (extent, other) if first.shard.dim == 0 else (other, extent)
