"""Which rank's tensor is taken, what does not fit together, and joining and cutting as inverses."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from packckpt import merge
from packckpt.descriptions import Description, KeyGroup
from packckpt.errors import ExportError, SaveError
from packckpt.exports import Shard
from packckpt.merge import Composition, Part, cut_shard, join_parts, merge_keys

KEY = "base.layers.3.q.lora_A.weight"


def _group(
    shape: tuple[int, int] = (4, 2),
    shard: Shard | None = None,
    *,
    key: str = KEY,
    step: int | None = 7,
    dtype: torch.dtype = torch.float32,
) -> KeyGroup:
    return KeyGroup(Description(dtype, shape, shard, step), [key])


def test_keys_come_in_string_order_with_their_ranks() -> None:
    first = [_group(key="b"), _group(key="a.10")]
    second = [_group(key="a.2"), _group(key="b", step=8)]
    merged = merge_keys([first, [], second]).compositions
    assert list(merged) == ["a.10", "a.2", "b"]
    assert [[part.rank for part in made_of.parts] for made_of in merged.values()] == [[0], [2], [0]]
    assert [[part.rank for part in made_of.duplicates] for made_of in merged.values()] == [[], [], [2]]
    assert merged["b"].step == 7


def test_the_lowest_rank_is_taken_for_each_shard() -> None:
    one, two = Shard(0, 2, 0), Shard(1, 2, 0)
    (merged,) = merge_keys(
        [[_group((3, 2), two)], [_group((1, 2), one)], [_group((1, 2), one)], [_group((3, 2), two)]]
    ).compositions.values()
    assert [part.rank for part in merged.parts] == [1, 0]
    assert [part.rank for part in merged.duplicates] == [2, 3]
    assert merged.shape == (4, 2)


def test_blocks_are_ordered_as_strings() -> None:
    keys = ["a.layers.2.w", "a.layers.10.w", "head", "a.layers.2.b"]
    blocks = merge_keys([[_group(key=key) for key in keys]]).blocks
    assert blocks == {
        "__global__": ["head"],
        "a.layers.10": ["a.layers.10.w"],
        "a.layers.2": ["a.layers.2.b", "a.layers.2.w"],
    }
    assert list(blocks) == ["__global__", "a.layers.10", "a.layers.2"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([[], []], "no rank exports anything"),
        ([[_group((2, 2), Shard(0, 2, 0))], []], r"found shards \[0\] of 2; no rank exports shard 1"),
        (
            [[_group((2, 2), Shard(0, 3, 0))], [_group((2, 2), Shard(0, 3, 0))], [_group((2, 2), Shard(2, 3, 0))]],
            r"found shards \[0, 2\] of 3; no rank exports shard 1",
        ),
        (
            [[_group((2, 2), Shard(0, 2, 0))], [_group((2, 2), Shard(1, 2, 0), step=8)]],
            r"different steps \(rank 0: 7, rank 1: 8\)",
        ),
        (
            [[_group((2, 2), Shard(0, 2, 0))], [_group((2, 2), Shard(1, 2, 0), dtype=torch.bfloat16)]],
            "ranks 0 and 1 export it with different dtype: torch.float32 and torch.bfloat16",
        ),
        (
            [[_group((2, 2), Shard(0, 2, 0))], [_group((2, 3), Shard(1, 2, 0))]],
            "ranks 0 and 1 export it with different size across the shard axis: 2 and 3",
        ),
        (
            [[_group((2, 2), Shard(0, 2, 0))], [_group((2, 2), Shard(1, 2, 1))]],
            "ranks 0 and 1 export it with different shards",
        ),
        (
            [[_group((2, 2), Shard(0, 2, 0))], [_group((2, 2), Shard(1, 2, 0, (2, 2)))]],
            "ranks 0 and 1 export it with different shards",
        ),
        ([[_group()], [_group((2, 2), Shard(1, 2, 0))]], "ranks 0 and 1 export it with different shards"),
        ([[_group((2, 2), Shard(0, 2, 0))], [_group((2, 2), Shard(1, 3, 0))]], "different shards"),
        ([[_group()], [_group((4, 3))]], "ranks 0 and 1 export it with different size"),
        ([[_group()], [_group(dtype=torch.float64)]], "ranks 0 and 1 export it with different dtype"),
        (
            [[_group((2, 2), Shard(0, 2, 0))], [_group((2, 2), Shard(1, 2, 0))], [_group((1, 2), Shard(1, 2, 0))]],
            r"rank 2 exports it with shape \[1, 2\], rank 1 with \[2, 2\]; expected one shape for one shard",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ranks: list[list[KeyGroup]], text: str) -> None:
    with pytest.raises(SaveError, match=text) as caught:
        merge_keys(ranks)
    if any(ranks):
        assert str(caught.value).startswith(f"{KEY}: ")


def test_keys_that_every_rank_describes_alike_are_decided_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[str] = []
    compose = merge._compose

    def recording(key: str, parts: Sequence[Part]) -> Composition:
        decided.append(key)
        return compose(key, parts)

    monkeypatch.setattr(merge, "_compose", recording)
    keys = [f"a.layers.{layer}.w.{row:02d}" for layer in (0, 1) for row in range(20)]
    wide, narrow = Description(torch.float32, (4, 2), None, 7), Description(torch.float32, (4, 2), None, 8)
    merged = merge_keys(
        [[KeyGroup(wide, keys[:30])], [KeyGroup(wide, keys[10:20]), KeyGroup(narrow, [*keys[:5], *keys[25:]])]]
    ).compositions
    # Rank 0 and rank 1's other step; rank 0 alone; rank 0 and rank 1; rank 1 alone.
    assert decided == [keys[0], keys[5], keys[10], keys[30]]
    assert list(merged) == keys
    assert merged[keys[0]] is merged[keys[4]] is merged[keys[25]]
    assert [part.rank for part in merged[keys[25]].duplicates] == [1]
    assert [(merged[key].only_rank, merged[key].step) for key in (keys[0], keys[5], keys[10], keys[30])] == [
        (None, 7), (0, 7), (None, 7), (1, 8),
    ]  # fmt: skip
    assert merged[keys[0]].part_of(1).description is narrow
    assert merged[keys[10]].part_of(1).description is wide


def test_an_error_names_the_first_key_of_those_that_it_concerns() -> None:
    groups = [
        [KeyGroup(Description(torch.float32, (4, 2), None, 7), ["c", "a", "b"])],
        [KeyGroup(Description(torch.bfloat16, (4, 2), None, 7), ["c", "b"])],
    ]
    with pytest.raises(SaveError, match=r"^b: ranks 0 and 1 export it with different dtype"):
        merge_keys(groups)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("components", [None, (6, 12), (6, 6, 6)])
def test_cutting_is_the_inverse_of_joining(dim: int, size: int, components: tuple[int, ...] | None) -> None:
    whole = torch.arange(18.0 * 5).reshape(18, 5)
    whole = whole if dim == 0 else whole.T
    shards = [Shard(rank, size, dim, components) for rank in range(size)]
    local = 18 // size
    shape = (local, 5) if dim == 0 else (5, local)
    parts = [cut_shard(KEY, whole, shard, shape) for shard in shards]
    # Shards arrive in any order of ranks.
    order = [*range(1, size), 0]
    (merged,) = merge_keys([[_group(shape, shards[rank])] for rank in order]).compositions.values()
    assert torch.equal(join_parts(merged, parts), whole)
    assert merged.shape == tuple(whole.shape)
    if components is not None and size > 1:
        # The first part begins each component.
        starts = [sum(components[:index]) for index in range(len(components))]
        first = torch.cat([whole.narrow(dim, s, c // size) for s, c in zip(starts, components, strict=True)], dim)
        assert torch.equal(parts[0], first)


def test_uneven_parts_are_cut_as_chunks() -> None:
    whole = torch.arange(14.0).reshape(7, 2)
    shapes = [(3, 2), (3, 2), (1, 2)]
    parts = [cut_shard(KEY, whole, Shard(rank, 3, 0), shape) for rank, shape in enumerate(shapes)]
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts, whole.chunk(3), strict=True))


@pytest.mark.parametrize(
    ("shard", "shape", "text"),
    [
        (None, (4, 3), "has shape [7, 2] for it, the export [4, 3]"),
        (Shard(0, 2, 0), (3, 2), "has shape [4, 2] for it, the export [3, 2]"),
        (Shard(0, 2, 0, (4, 4)), (4, 2), "shape [7, 2] is not the sum of component_sizes (4, 4) on axis 0"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(shard: Shard | None, shape: tuple[int, int], text: str) -> None:
    with pytest.raises(ExportError, match=re.escape(text)):
        cut_shard(KEY, torch.zeros(7, 2), shard, shape)
