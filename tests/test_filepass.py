"""One reading of a file: the parts that are wanted, and a digest of every byte."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packckpt import filepass
from packckpt.filepass import FilePass
from packckpt.tensorfile import write_tensors
from packckpt.tensorreader import TensorFileReader


def written(path: Path, elements: int = 40) -> bytes:
    write_tensors(path, {"k": torch.arange(float(elements))})
    return path.read_bytes()


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filepass, "READ_BYTES", 7)


@given(cuts=st.lists(st.integers(0, 160), max_size=12), digested=st.booleans())
def test_any_parts(tmp_path_factory: pytest.TempPathFactory, cuts: list[int], digested: bool) -> None:
    """Every second stretch between the cuts is read, the others are passed over."""
    path = tmp_path_factory.mktemp("pass") / "f"
    content = written(path)
    reader = TensorFileReader(path)
    places = sorted(len(reader.head) + cut for cut in cuts)
    with FilePass(reader, digested=digested) as file:
        for begin, end in zip(places[::2], places[1::2], strict=False):
            memory = bytearray(end - begin)
            file.read(begin, end, memoryview(memory))
            assert bytes(memory) == content[begin:end]
        assert file.finish() == (digest_of(content) if digested else "")


def test_what_is_not_wanted_is_read_for_the_digest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(tmp_path / "f")
    reader = TensorFileReader(tmp_path / "f")
    filled: list[int] = []
    fill = FilePass._fill
    monkeypatch.setattr(FilePass, "_fill", lambda self, at, piece: filled.append(len(piece)) or fill(self, at, piece))
    begin = len(content) - 20
    for digested, expected in ((False, 12), (True, len(content) - len(reader.head))):
        filled.clear()
        with FilePass(reader, digested=digested) as file:
            file.read(begin, begin + 12, memoryview(bytearray(12)))
            file.finish()
        assert sum(filled) == expected


@pytest.mark.parametrize("replaced", ["by nothing", "by another file", "by a named pipe"])
def test_a_file_that_was_removed_is_still_read(replaced: str, tmp_path: Path) -> None:
    content = written(tmp_path / "f")
    reader = TensorFileReader(tmp_path / "f")
    os.rename(tmp_path / "f", tmp_path / "away")
    if replaced == "by another file":
        (tmp_path / "f").write_bytes(content[::-1])
    elif replaced == "by a named pipe":
        os.mkfifo(tmp_path / "f")
    (tmp_path / "away").unlink()
    memory = bytearray(30)
    with FilePass(reader, digested=True) as file:
        file.read(len(content) - 50, len(content) - 20, memoryview(memory))
        assert file.finish() == digest_of(content)
    assert bytes(memory) == content[-50:-20]


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    content = written(tmp_path / "f")
    reader = TensorFileReader(tmp_path / "f")
    os.truncate(tmp_path / "f", len(content) - 10)
    with (
        FilePass(reader, digested=True) as file,
        pytest.raises(OSError, match=f"ends at byte {len(content) - 10}, had {len(content)} bytes when it was opened"),
    ):
        file.finish()


def test_a_header_that_changed_since_it_was_parsed_does_not_pass(tmp_path: Path) -> None:
    """The digest is of the header that said where the tensors are."""
    content = written(tmp_path / "f")
    (tmp_path / "f").write_bytes(content.replace(b'"k"', b'"j"'))
    reader = TensorFileReader(tmp_path / "f")
    with open(tmp_path / "f", "r+b") as file:
        file.write(content)
    with FilePass(reader, digested=True) as again:
        assert again.finish() == digest_of(content.replace(b'"k"', b'"j"'))


def test_it_gives_up_between_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "f")
    filled: list[int] = []
    fill = FilePass._fill
    monkeypatch.setattr(FilePass, "_fill", lambda self, at, piece: fill(self, at, piece) or filled.append(at))
    with (
        FilePass(TensorFileReader(tmp_path / "f"), digested=True, stopped=lambda: len(filled) == 2) as file,
        pytest.raises(InterruptedError, match="reading was given up"),
    ):
        file.finish()
    assert len(filled) == 2
