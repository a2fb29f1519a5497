"""How a file's wanted tensors are cut into chunks: each once, in file order, within the bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packckpt import Export
from packckpt.fillings import FileLayout, Filling, Portion

SHAPES = [(2, 3), (1, 5), (0, 4), (3, 1)]


def filling(offsets: list[int], rows: list[int], shape: tuple[int, int] = (2, 3)) -> Filling:
    parameter = torch.zeros(64, shape[1], shape[0])
    export = Export("k", parameter, expert=0)
    return Filling(
        parameter.transpose(1, 2), export, torch.float32, shape, np.array(offsets, np.int64), np.array(rows, np.int64)
    )


def held(portions: tuple[Portion, ...]) -> list[tuple[Filling, int, int]]:
    """Return what a chunk holds: whose, the row, the place; in the order of the places."""
    each = [(p.filling, int(row), int(place)) for p in portions for row, place in zip(p.rows, p.places, strict=True)]
    return sorted(each, key=lambda item: item[2])


def test_neighbours_are_one_span_and_a_gap_makes_two() -> None:
    layout = FileLayout([filling([100, 172], [4, 1]), filling([124, 148, 300], [7, 2, 3])])

    chunk = layout.chunk(layout.tensors)

    assert chunk.spans == ((100, 196), (300, 324))
    assert chunk.bytes == 120
    assert [(row, place) for _, row, place in held(chunk.portions)] == [(4, 0), (7, 24), (2, 48), (1, 72), (3, 96)]


def test_a_tensor_larger_than_the_bound_is_a_chunk_of_its_own() -> None:
    layout = FileLayout([filling([0, 24], [0, 1]), filling([48], [0], shape=(20, 20)), filling([1648], [2])])

    assert list(layout.split(layout.tensors, 64)) == [range(0, 2), range(2, 3), range(3, 4)]


@pytest.mark.parametrize("fillings", [[], [filling([], [])], [filling([8, 8], [0, 1], shape=(0, 4))]])
def test_nothing_is_wanted(fillings: list[Filling]) -> None:
    layout = FileLayout(fillings)

    assert layout.tensors == range(0)
    assert list(layout.split(layout.tensors, 1)) == []


@given(
    wanted=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=40),
    task_bytes=st.integers(1, 400),
    chunk_bytes=st.integers(1, 200),
)
def test_any_file(wanted: list[tuple[int, int]], task_bytes: int, chunk_bytes: int) -> None:
    """Tensors of four shapes stand with gaps of any size between them, and go to rows in any order."""
    offsets: dict[int, list[int]] = {kind: [] for kind in range(4)}
    where: dict[int, tuple[int, int]] = {}
    at = 16
    for kind, gap in wanted:
        at += gap
        offsets[kind].append(at)
        size = 4 * SHAPES[kind][0] * SHAPES[kind][1]
        if size:
            where[at] = (kind, at + size)
        at += size
    fillings = [filling(found, list(range(len(found)))[::-1], SHAPES[kind]) for kind, found in offsets.items()]
    layout = FileLayout(fillings)

    seen: list[int] = []
    for task in layout.split(layout.tensors, task_bytes):
        for tensors in layout.split(task, chunk_bytes):
            chunk = layout.chunk(tensors)
            assert chunk.bytes <= chunk_bytes or len(tensors) == 1
            read = [byte for begin, end in chunk.spans for byte in range(begin, end)]
            assert len(read) == chunk.bytes
            for portion in chunk.portions:
                assert portion.even == (len(set(np.diff(portion.places))) < 2)
            for owner, row, place in held(chunk.portions):
                kind, end = where[read[place]]
                assert owner is fillings[kind]
                assert owner.offsets[list(owner.rows).index(row)] == read[place]
                assert read[place : place + owner.tensor_bytes] == list(range(read[place], end))
                seen.append(read[place])
    assert seen == sorted(where)
