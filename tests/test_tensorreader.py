"""Views of a tensor file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from packckpt import tensorreader
from packckpt.tensorfile import tensor_bytes, write_tensors
from packckpt.tensorreader import Headers, TensorFileReader, spec_of
from tests.builders import arange, assert_same_tensor


def expect_same(reader: TensorFileReader, names: Iterable[str], tensors: dict[str, torch.Tensor]) -> None:
    """Hold what a reader gives against the tensors that were written."""
    for name in names:
        assert_same_tensor(reader.tensor(name), tensors[name])
        assert reader.bytes(name) == tensor_bytes(tensors[name])


@pytest.mark.parametrize("odd_bytes", [1, 2, 3])
def test_what_is_not_aligned_is_copied(tmp_path: Path, odd_bytes: int) -> None:
    # packckpt writes keys in string order, so a short tensor shifts all that follow it
    tensors = {"a": torch.ones(odd_bytes).to(torch.float8_e4m3fn), "b": arange(2, 3), "c": arange(3, 1, start=9)}
    write_tensors(tmp_path / "f", tensors)

    expect_same(TensorFileReader(tmp_path / "f"), "bc", tensors)


def test_what_is_aligned_is_not_copied(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"k": arange(2, 3)})
    reader = TensorFileReader(tmp_path / "f")

    assert reader.tensor("k").data_ptr() == reader.data(len(reader.head), reader.size_bytes).data_ptr()


def head_of(path: Path) -> bytes:
    return TensorFileReader(path).head


@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
        st.lists(st.integers(0, 3), max_size=3),
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
def test_a_header_says_the_same_either_way(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], metadata: dict[str, str] | None
) -> None:
    path = tmp_path_factory.mktemp("head") / "f"
    # Without tensors safetensors writes metadata that is no JSON.
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path, metadata=metadata if shapes else None)
    head = head_of(path)
    plain = tensorreader._parse_plain(head)

    assert plain in (None, tensorreader._parse_json(head))
    if shapes and metadata is None and "\\" not in head[8:].decode():
        assert plain is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(":[2,3]", ": [2,3]"),
        lambda text: text.replace('"b"', '"\\u0062"'),
        lambda text: text.replace("{", '{"__metadata__":{"a":"b"},', 1),
        lambda text: text.replace('"dtype":"F32","shape":[2,3]', '"shape":[2,3],"dtype":"F32"', 1),
    ],
)
def test_other_headers_are_left_to_json(change: Callable[[str], str], tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"a": arange(2, 3), "b": arange(2, 3)})
    text = head_of(tmp_path / "f")[8:].decode().rstrip()
    changed = change(text)
    assert changed != text

    assert tensorreader._parse_plain(b"\0" * 8 + text.encode()) is not None
    assert tensorreader._parse_plain(b"\0" * 8 + changed.encode()) is None
    assert set(tensorreader._parse_json(b"\0" * 8 + changed.encode())) == {"a", "b"}


def test_a_header_is_parsed_once_for_files_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = tensorreader._parse
    monkeypatch.setattr(tensorreader, "_parse", lambda head: parsed.append(head) or parse(head))
    headers, checked = Headers(), []
    for name, factor in (("a", 1), ("b", 2)):
        write_tensors(tmp_path / name, {"k": factor * torch.arange(6.0).reshape(2, 3)})
    write_tensors(tmp_path / "c", {"k": torch.arange(3.0)})

    readers = [TensorFileReader(tmp_path / name, headers, partial(checked.append, name)) for name in "abc"]

    assert (len(parsed), checked) == (2, ["a", "c"])
    assert [reader.tensor("k").flatten()[1].item() for reader in readers] == [1, 2, 1]


def test_a_longer_file_with_the_same_header_is_checked_again(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"k": torch.arange(6.0)})
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes() + b"more")
    headers, checked = Headers(), []

    for name in "ab":
        TensorFileReader(tmp_path / name, headers, partial(checked.append, name))
    assert checked == ["a", "b"]


def test_a_path_need_not_be_unicode(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    write_tensors(folder / "f", {"k": torch.arange(3.0)})

    assert TensorFileReader(folder / "f").tensor("k").tolist() == [0, 1, 2]


def test_names_of_a_header_may_be_words_of_the_format(tmp_path: Path) -> None:
    tensors = {"data_offsets": torch.arange(4.0), "dtype": torch.arange(2.0), "shape": torch.arange(3.0)}
    save_file(tensors, tmp_path / "f", metadata={"data_offsets": "no"})
    reader = TensorFileReader(tmp_path / "f")

    assert set(reader.entries) == set(tensors)
    expect_same(reader, tensors, tensors)
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
)
def test_any_file(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[torch.dtype, tuple[int, int]]],
) -> None:
    path = tmp_path_factory.mktemp("reader") / "f"
    tensors = {
        f"k{number}": (torch.arange(shape[0] * shape[1]) + 7 * number).to(dtype).reshape(shape)
        for number, (dtype, shape) in enumerate(kinds)
    }
    write_tensors(path, tensors)

    expect_same(TensorFileReader(path), tensors, tensors)


@pytest.mark.parametrize("length", [10**6, 200_000_000, 2**63])
def test_a_length_that_cannot_be_is_not_read(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is as long as its damaged header says, and takes no memory."""
    with open(tmp_path / "f", "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(min(length, 300_000_000) + 7)
    heads: list[int] = []
    known = Headers.known
    monkeypatch.setattr(Headers, "known", lambda self, head, *rest: heads.append(len(head)) or known(self, head, *rest))

    with pytest.raises(ValueError, match="Expecting value"):
        TensorFileReader(tmp_path / "f")
    assert heads == [8]


def test_readers_share_the_bytes_of_a_header(tmp_path: Path) -> None:
    for name in "ab":
        write_tensors(tmp_path / name, {"k": torch.arange(6.0)})
    headers = Headers()
    first, second = (TensorFileReader(tmp_path / name, headers) for name in "ab")

    assert first.head is second.head
    assert first.entries is second.entries
