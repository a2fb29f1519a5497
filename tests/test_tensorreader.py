"""Views of a tensor file: one tensor, or many that lie evenly as one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from packckpt.tensorfile import write_tensors
from packckpt.tensorreader import TensorFileReader, spec_of


def experts(count: int, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors of a packed layer: for each expert, two of one shape and one of another."""
    tensors = {}
    for expert in range(count):
        for part, shape in (("up.a", (2, 3)), ("up.b", (5, 2)), ("down.a", (2, 3))):
            start = 1000 * len(tensors)
            size = shape[0] * shape[1]
            tensors[f"experts.{expert}.{part}"] = torch.arange(start, start + size).to(dtype).reshape(shape)
    return tensors


def expect_same(reader: TensorFileReader, names: list[str], tensors: dict[str, torch.Tensor]) -> list[int]:
    """Hold stacks against the tensors that were written; return their lengths, ascending."""
    seen: list[int] = []
    lengths = []
    for positions, stack in reader.stacks(names):
        assert len(positions) == len(stack)
        lengths.append(len(stack))
        seen += positions
        for position, tensor in zip(positions, stack, strict=True):
            wanted = tensors[names[position]]
            assert tensor.dtype is wanted.dtype
            assert torch.equal(tensor, wanted)
    assert sorted(seen) == list(range(len(names)))
    return sorted(lengths)


def only_tensor(reader: TensorFileReader) -> torch.Tensor:
    ((_, stack),) = reader.stacks(list(reader.entries))
    return stack[0]


def test_experts_in_string_order_are_one_stack(tmp_path: Path) -> None:
    tensors = experts(12)
    write_tensors(tmp_path / "f", tensors)
    reader = TensorFileReader(tmp_path / "f")
    names = [f"experts.{expert}.up.a" for expert in range(12)]

    ((positions, stack),) = reader.stacks(names)

    # 0, 1, 10, 11, 2, ...: the file's order, not the experts'
    assert positions == sorted(range(12), key=str)
    assert stack.shape == (12, 2, 3)
    assert expect_same(reader, names, tensors) == [12]


def test_a_gap_in_the_experts_makes_two_stacks(tmp_path: Path) -> None:
    tensors = experts(9)
    write_tensors(tmp_path / "f", tensors)
    names = [f"experts.{expert}.up.b" for expert in (7, 0, 1, 2, 8)]

    assert expect_same(TensorFileReader(tmp_path / "f"), names, tensors) == [2, 3]


def test_tensors_of_two_shapes_are_stacks_of_their_own(tmp_path: Path) -> None:
    tensors = experts(5)
    write_tensors(tmp_path / "f", tensors)
    reader = TensorFileReader(tmp_path / "f")
    names = [name for name in tensors if "up" in name]

    assert expect_same(reader, names, tensors) == [5, 5]
    assert sorted(tuple(stack.shape) for _, stack in reader.stacks(names)) == [(5, 2, 3), (5, 5, 2)]


@pytest.mark.parametrize("odd_bytes", [1, 2, 3])
def test_what_is_not_aligned_is_copied_one_by_one(tmp_path: Path, odd_bytes: int) -> None:
    tensors = {**experts(4), "a": torch.ones(odd_bytes).to(torch.float8_e4m3fn)}
    # packckpt writes keys in string order, so a short tensor shifts all that follow it
    write_tensors(tmp_path / "f", tensors)
    names = [name for name in tensors if name != "a"]

    assert expect_same(TensorFileReader(tmp_path / "f"), names, tensors) == [1] * len(names)


def test_empty_tensors_and_empty_lists(tmp_path: Path) -> None:
    tensors = {f"k{number}": torch.zeros(0, 3) for number in range(3)}
    write_tensors(tmp_path / "f", {**tensors, "z": torch.ones(2)})
    reader = TensorFileReader(tmp_path / "f")

    assert expect_same(reader, list(tensors), tensors) == [1, 1, 1]
    assert list(reader.stacks([])) == []


def test_a_header_is_parsed_once_for_files_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or parse(text, **options))
    headers: dict[bytes, dict[str, tuple[str, tuple[int, ...], int, int]]] = {}
    for name, factor in (("a", 1), ("b", 2)):
        write_tensors(tmp_path / name, {"k": factor * torch.arange(6.0).reshape(2, 3)})
    write_tensors(tmp_path / "c", {"k": torch.arange(3.0)})

    readers = [TensorFileReader(tmp_path / name, headers) for name in "abc"]

    assert len(parsed) == 2
    assert [only_tensor(reader).flatten()[1].item() for reader in readers] == [1, 2, 1]


def test_a_path_need_not_be_unicode(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    write_tensors(folder / "f", {"k": torch.arange(3.0)})

    assert only_tensor(TensorFileReader(folder / "f")).tolist() == [0, 1, 2]


def test_names_of_a_header_may_be_words_of_the_format(tmp_path: Path) -> None:
    tensors = {"data_offsets": torch.arange(4.0), "dtype": torch.arange(2.0), "shape": torch.arange(3.0)}
    save_file(tensors, tmp_path / "f", metadata={"data_offsets": "no"})
    reader = TensorFileReader(tmp_path / "f")

    assert set(reader.entries) == set(tensors)
    assert expect_same(reader, list(tensors), tensors) == [1, 1, 1]
    assert spec_of(reader.entries["shape"]).shape == (3,)


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
            st.sampled_from([(2, 3), (1, 5), (3, 1), (0, 2)]),
        ),
        min_size=1,
        max_size=30,
    ),
    chosen=st.data(),
)
def test_any_choice_of_any_file(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[torch.dtype, tuple[int, int]]],
    chosen: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("reader") / "f"
    tensors = {
        f"k{number}": (torch.arange(shape[0] * shape[1]) + 7 * number).to(dtype).reshape(shape)
        for number, (dtype, shape) in enumerate(kinds)
    }
    write_tensors(path, tensors)
    names = chosen.draw(st.lists(st.sampled_from(list(tensors)), unique=True))

    expect_same(TensorFileReader(path), names, tensors)
