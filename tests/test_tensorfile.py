"""The writer makes the very bytes of safetensors, refuses to finish half a file, and names the file in errors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from packckpt import commit, staged
from packckpt.dtypes import NAME_OF_DTYPE
from packckpt.tensorfile import Header, TensorFileWriter, TensorSpec, header_of, tensor_bytes, write_tensors
from tests.builders import (
    STRIDES,
    Trainer,
    arange,
    assert_same_content,
    expected_content,
    read_content,
    save,
    transposed,
)

# Everything that encodes as UTF-8, but for NUL, which no export key holds.
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
    lambda key: key != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3)


def write(path: Path, tensors: dict[str, torch.Tensor], *, ascii_header: bool = False) -> str:
    specs = [(name, TensorSpec(tensors[name].dtype, tuple(tensors[name].shape))) for name in sorted(tensors)]
    with TensorFileWriter(path, header_of(specs, ascii_header=ascii_header)) as writer:
        for name, _ in specs:
            writer.append(tensor_bytes(tensors[name]))
        return writer.finish()


def header_in(path: Path) -> str:
    content = path.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")].decode()


class TestBytes:
    @given(shapes=st.dictionaries(KEYS, SHAPES, max_size=6))
    def test_are_those_of_save_file(
        self, shapes: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        directory = tmp_path_factory.mktemp("files")
        tensors = {key: arange(*shape, start=n) for n, (key, shape) in enumerate(shapes.items())}
        digest = write(directory / "ours", tensors)
        save_file(tensors, directory / "theirs")

        theirs = (directory / "theirs").read_bytes()
        assert (directory / "ours").read_bytes() == theirs
        assert digest == hashlib.blake2b(theirs, digest_size=32).hexdigest()

    @pytest.mark.parametrize("key", ["plain", "é", "\x01\x1f\x7f", '"\\/', "\u2028", "🗝", "a\nb\tc\b\f\r", "k" * 300])
    def test_of_awkward_keys(self, key: str, tmp_path: Path) -> None:
        write(tmp_path / "ours", {key: arange(3)})
        save_file({key: arange(3)}, tmp_path / "theirs")

        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()

    @pytest.mark.parametrize("dtype", NAME_OF_DTYPE, ids=str)
    def test_every_dtype_reads_back(self, dtype: torch.dtype, tmp_path: Path) -> None:
        tensors = {"b": arange(3, 2, dtype=dtype), "a": arange(5, dtype=torch.float16), "c": torch.zeros(0, 2)}
        write(tmp_path / "f", tensors, ascii_header=True)

        assert_same_content(load_file(tmp_path / "f"), tensors)

    @pytest.mark.parametrize("strides", STRIDES)
    def test_are_in_logical_order(self, strides: str, tmp_path: Path) -> None:
        tensor = STRIDES[strides](arange(4, 3, 5))
        write_tensors(tmp_path / "f", {"a": tensor})

        assert_same_content(load_file(tmp_path / "f"), {"a": arange(4, 3, 5)})

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_of_one_element_with_any_strides(self, dtype: torch.dtype, tmp_path: Path) -> None:
        """Torch calls it contiguous, and cannot view it as bytes."""
        one = arange(2, 4, dtype=dtype)[1:, 2:3]
        assert (one.is_contiguous(), one.stride()) == (True, (4, 1))
        odd = arange(4, dtype=dtype).as_strided((1,), (2,), 3)
        write_tensors(tmp_path / "f", {"a": one, "b": one.T, "c": odd})

        assert_same_content(load_file(tmp_path / "f"), {"a": one, "b": one, "c": arange(1, start=4, dtype=dtype)})

    def test_of_a_contiguous_tensor_are_not_copied(self) -> None:
        tensor = arange(4, 3)
        view = tensor_bytes(tensor)
        tensor[0, 0] = 77

        assert bytes(view[:4]) == torch.tensor(77.0).numpy().tobytes()
        assert len(view) == 48


class TestHeader:
    def test_of_the_adapter_is_ascii_compact_and_padded(self, tmp_path: Path) -> None:
        for length in range(1, 9):
            key = "é" * length
            write(tmp_path / str(length), {key: arange(3, 2, dtype=torch.bfloat16), "ü": arange(1)}, ascii_header=True)
            header = header_in(tmp_path / str(length))

            assert len(header) % 8 == 0
            assert header.isascii()
            assert header.rstrip(" ") == (
                '{"'
                + "\\u00e9" * length
                + '":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},'
                + '"\\u00fc":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}'
            )

    def test_keys_come_in_string_order(self, tmp_path: Path) -> None:
        write(tmp_path / "f", {key: arange(1) for key in ("layers.2", "layers.10", "Z", "é", "a")}, ascii_header=True)

        assert list(json.loads(header_in(tmp_path / "f"))) == ["Z", "a", "layers.10", "layers.2", "é"]

    @pytest.mark.parametrize("path", ["staged", "coalesced"])
    def test_is_made_once_for_the_components_of_a_block(
        self, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a snapshot that is laid out as the checkpoint, and of a checkpoint that is merged."""
        trainer = Trainer()
        for layer in range(3):
            trainer.packed("a", layer=layer, rows=3 + layer)
        made: list[bool] = []

        def recording(tensors: Iterable[tuple[str, TensorSpec]], *, ascii_header: bool = False) -> Header:
            made.append(ascii_header)
            return header_of(tensors, ascii_header=ascii_header)

        monkeypatch.setattr(staged, "header_of", recording)
        monkeypatch.setattr(commit, "header_of", recording)
        save(tmp_path / "c", trainer, path)

        assert sorted(made) == [False, False, False, True]
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))


class TestWriter:
    def test_refuses_to_finish_before_all_is_written(self, tmp_path: Path) -> None:
        with TensorFileWriter(tmp_path / "f", header_of([("a", TensorSpec(torch.float32, (3,)))])) as writer:
            writer.append(b"12345678")
            with pytest.raises(RuntimeError, match="f: 8 of 12 bytes were written"):
                writer.finish()

    def test_refuses_a_file_that_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("mine")

        with pytest.raises(FileExistsError):
            TensorFileWriter(tmp_path / "f", header_of([])).finish()
        assert (tmp_path / "f").read_text() == "mine"

    def test_names_the_file_where_the_disk_is_full(self) -> None:
        """/dev/full takes nothing, and the error of `write` does not know the name."""
        writer = TensorFileWriter("/dev/full", header_of([]))
        writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        with pytest.raises(OSError, match="/dev/full") as caught, writer:
            writer.append(b"x")
        assert caught.value.errno == errno.ENOSPC
        assert writer._file.closed

    def test_many_under_way_hold_no_descriptor_before_they_write(self, tmp_path: Path) -> None:
        before = set(os.listdir("/proc/self/fd"))
        header = header_of([("a", TensorSpec(torch.float32, (3,)))])
        writers = [TensorFileWriter(tmp_path / str(number), header) for number in range(50)]
        assert not list(tmp_path.iterdir())
        assert set(os.listdir("/proc/self/fd")) == before
        for number, writer in enumerate(writers):
            writer.append(tensor_bytes(torch.arange(3.0) + number))
            writer.finish()
        assert set(os.listdir("/proc/self/fd")) == before
        assert load_file(tmp_path / "49")["a"].tolist() == [49, 50, 51]

    def test_undigested_gives_no_digest(self, tmp_path: Path) -> None:
        with TensorFileWriter(tmp_path / "f", header_of([]), digested=False) as writer:
            assert writer.finish() == ""

    def test_mode_follows_the_umask(self, tmp_path: Path) -> None:
        for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
            before = os.umask(umask)
            try:
                write(tmp_path / oct(umask), {"a": transposed(arange(2, 3))})
            finally:
                os.umask(before)
            assert stat.S_IMODE((tmp_path / oct(umask)).stat().st_mode) == mode
