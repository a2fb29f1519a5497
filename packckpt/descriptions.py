"""What the ranks tell one another of their exports before a byte moves: keys, grouped by what is true of them.

Thousands of rows of packed parameters share a handful of descriptions. An object for each key would start a full
garbage collection of the trainer's objects in the middle of a save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from packckpt.dtypes import DTYPE_OF_NAME, NAME_OF_DTYPE
from packckpt.exports import Export, Shard


@dataclass(frozen=True, slots=True)
class Description:
    """What the other ranks need to know of an export besides its key, without its bytes.

    Attributes:
        dtype, shape, shard: of the exported value on this rank; shape is `(out, in)`.
        step: the step count, or None where no optimizer is saved.
    """

    dtype: torch.dtype
    shape: tuple[int, int]
    shard: Shard | None
    step: int | None

    def size_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the tensor in the given dtype."""
        return self.shape[0] * self.shape[1] * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """The keys of one rank that share a description, in the order of their exports."""

    description: Description
    keys: Sequence[str]

    def to_json(self) -> list[Any]:
        """Return the group as JSON."""
        of_all = self.description
        shard = None if of_all.shard is None else asdict(of_all.shard)
        return [NAME_OF_DTYPE[of_all.dtype], list(of_all.shape), shard, of_all.step, self.keys]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> KeyGroup:
        """Return the group that `to_json` made."""
        dtype, shape, shard, step, keys = fields
        made = Description(DTYPE_OF_NAME[dtype], (shape[0], shape[1]), None if shard is None else Shard(**shard), step)
        return cls(made, keys)


def group_keys(exports: Iterable[Export], step_of: Mapping[int, int] | None) -> list[KeyGroup]:
    """Describe exports.

    Args:
        exports: of one rank.
        step_of: step count by the id of the parameter, or None where no optimizer is saved.
    """
    keys_of: dict[Description, list[str]] = {}
    # Hashing a description takes longer than anything else that is done for a key.
    seen: dict[tuple[int, int], list[str]] = {}
    for export in exports:
        source = id(export.parameter), id(export.shard)
        if (keys := seen.get(source)) is None:
            step = None if step_of is None else step_of[id(export.parameter)]
            description = Description(export.parameter.dtype, export.shape, export.shard, step)
            keys = seen[source] = keys_of.setdefault(description, [])
        keys.append(export.key)
    return [KeyGroup(description, keys) for description, keys in keys_of.items()]
