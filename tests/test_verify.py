"""Verification finds every kind of damage and names the file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from packckpt import CheckpointError, Export, load_checkpoint, verify_checkpoint
from packckpt.manifest import config_bytes, file_digest, manifest_bytes
from packckpt.verify import unlisted_files, verified_contents
from tests.builders import CONFIG, Trainer, arange, file_bytes, key_of, save
from tests.test_manifest import digest_of

ADAPTER = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
FILES = [
    ADAPTER,
    CONFIG_FILE,
    *(f"optimizer/{part}-{n:06d}.safetensors" for part in ("master", "exp_avg", "exp_avg_sq") for n in (0, 1)),
]
KEY = key_of("a", 0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = Trainer()
    trainer.packed("a", experts=2)
    trainer.dense("b", layer=1)
    save(tmp_path / "c", trainer)
    return tmp_path / "c"


def reseal(root: Path) -> None:
    """Give every listed file and the manifest their right digests, as a hostile writer would."""
    manifest = json.loads((root / "checkpoint.json").read_text())
    manifest["files"] = {name: file_digest(root / name) for name in manifest["files"]}
    manifest["digest"] = digest_of(manifest)
    (root / "checkpoint.json").write_text(json.dumps(manifest))


def problems(root: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(root)
    assert str(caught.value) == "\n".join(caught.value.problems)
    with pytest.raises(CheckpointError):
        load_checkpoint(root)
    return caught.value.problems


def header_and_data(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_raw(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def test_returns_the_digest_and_changes_nothing(saved: Path) -> None:
    before = file_bytes(saved)

    assert verify_checkpoint(saved) == json.loads((saved / "checkpoint.json").read_text())["digest"]
    assert verify_checkpoint(str(saved)) == load_checkpoint(saved).digest
    assert file_bytes(saved) == before


def test_the_fixture_has_these_files(saved: Path) -> None:
    assert sorted(file_bytes(saved)) == sorted([*FILES, "checkpoint.json"])


@pytest.mark.parametrize("name", FILES)
class TestOneFile:
    @pytest.mark.parametrize("where", ["first", "middle", "last"])
    def test_one_flipped_bit(self, name: str, where: str, saved: Path) -> None:
        content = bytearray((saved / name).read_bytes())
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[where]] ^= 1
        (saved / name).write_bytes(content)

        (problem,) = problems(saved)
        assert problem.startswith(f"{saved / name}: has digest ")
        assert problem.endswith("; the file was changed")

    @pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: c + b"\0", lambda c: b""])
    def test_another_length(self, name: str, change: Callable[[bytes], bytes], saved: Path) -> None:
        (saved / name).write_bytes(change((saved / name).read_bytes()))

        assert problems(saved)[0].startswith(f"{saved / name}: has digest ")

    def test_missing(self, name: str, saved: Path) -> None:
        (saved / name).unlink()

        assert problems(saved) == (f"{saved / name}: missing; the manifest lists it",)

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
    def test_no_regular_file(self, name: str, make: Callable[[Path], None], saved: Path) -> None:
        (saved / name).unlink()
        make(saved / name)

        assert problems(saved) == (f"{saved / name}: not a regular file",)

    def test_a_link_out(self, name: str, saved: Path, tmp_path: Path) -> None:
        (saved / name).rename(tmp_path / "outside")
        (saved / name).symlink_to(tmp_path / "outside")

        assert problems(saved) == (
            f"{saved / name}: a link that leads out of the checkpoint, to {tmp_path / 'outside'}",
        )

    def test_a_link_to_nothing(self, name: str, saved: Path) -> None:
        (saved / name).unlink()
        (saved / name).symlink_to(saved / "nothing")

        assert problems(saved) == (f"{saved / name}: missing; the manifest lists it",)

    def test_a_link_to_itself(self, name: str, saved: Path) -> None:
        (saved / name).unlink()
        (saved / name).symlink_to(saved / name)

        assert problems(saved)[0].startswith(f"{saved / name}: cannot be opened: ")


def test_the_directory_of_the_optimizer_is_a_link_out(saved: Path, tmp_path: Path) -> None:
    (saved / "optimizer").rename(tmp_path / "elsewhere")
    (saved / "optimizer").symlink_to(tmp_path / "elsewhere")

    found = problems(saved)
    assert len(found) == 6
    assert all("leads out of the checkpoint" in problem for problem in found)


def test_a_checkpoint_reached_through_a_link_is_fine(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved)

    assert verify_checkpoint(tmp_path / "latest") == verify_checkpoint(saved)


def test_every_fault_is_told(saved: Path) -> None:
    (saved / FILES[2]).unlink()
    (saved / CONFIG_FILE).write_text("{}")
    (saved / ADAPTER).write_bytes(b"")

    assert sorted(problem.split(": ")[0] for problem in problems(saved)) == sorted(
        str(saved / name) for name in (FILES[2], CONFIG_FILE, ADAPTER)
    )


class TestRightDigestsAroundWrongContent:
    """A writer whose digests are right and whose content is not."""

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"base_model_name_or_path": "other"}, "base_model_name_or_path is 'other', the manifest has 'example/moe"),
            ({"art_lora_format": "x"}, "art_lora_format is 'x'; expected 'art-trainer-rank-v1'"),
            ({"art_lora_format": None}, "art_lora_format is None; expected"),
        ],
    )
    def test_configuration(self, config: dict[str, Any], message: str, saved: Path) -> None:
        content = json.loads((saved / CONFIG_FILE).read_text())
        (saved / CONFIG_FILE).write_text(json.dumps({**content, **config}))
        reseal(saved)

        (problem,) = problems(saved)
        assert problem.startswith(f"{saved / CONFIG_FILE}: {message}")

    def test_configuration_that_is_no_json(self, saved: Path) -> None:
        (saved / CONFIG_FILE).write_text('{"a": 1, "a": 2}')
        reseal(saved)

        assert problems(saved)[0].startswith(f"{saved / CONFIG_FILE}: cannot be read as JSON: the name 'a'")

    @pytest.mark.parametrize("name", [ADAPTER, FILES[2], FILES[7]])
    def test_truncated_tensor_file(self, name: str, saved: Path) -> None:
        (saved / name).write_bytes((saved / name).read_bytes()[:-4])
        reseal(saved)

        assert problems(saved)[0].startswith(f"{saved / name}: not a safetensors file: ")

    @pytest.mark.parametrize(
        "content",
        [b"", b"\0" * 7, (10**12).to_bytes(8, "little") + b"{}", b"\xff" * 16, (4).to_bytes(8, "little") + b"nope"],
        ids=["empty", "short", "header too long", "header length huge", "header no JSON"],
    )
    def test_no_tensor_file(self, content: bytes, saved: Path) -> None:
        (saved / ADAPTER).write_bytes(content)
        reseal(saved)

        assert problems(saved)[0].startswith(f"{saved / ADAPTER}: not a safetensors file: ")

    @pytest.mark.parametrize(
        "lie", ["beyond the end", "overlap", "backwards", "gap", "negative", "wrong size", "huge shape"]
    )
    def test_offsets_that_lie(self, lie: str, saved: Path) -> None:
        header, data = header_and_data(saved / ADAPTER)
        first, second, last = sorted(header)
        begin, end = header[last]["data_offsets"]
        if lie == "beyond the end":
            header[last]["data_offsets"] = [begin, end + 4096]
        elif lie == "overlap":
            header[second]["data_offsets"] = header[first]["data_offsets"]
        elif lie == "backwards":
            header[last]["data_offsets"] = [end, begin]
        elif lie == "gap":
            header[last]["data_offsets"] = [begin + 4, end + 4]
            data += b"\0" * 4
        elif lie == "negative":
            header[first]["data_offsets"] = [-12, 0]
        elif lie == "wrong size":
            header[last]["shape"] = [1, 1]
        else:
            header[last]["shape"] = [2**62, 2**62]
        write_raw(saved / ADAPTER, json.dumps(header), data)
        reseal(saved)

        assert problems(saved)[0].startswith(f"{saved / ADAPTER}: not a safetensors file: ")

    def test_dtype_that_no_export_has(self, saved: Path) -> None:
        tensors = load_file(saved / ADAPTER)
        tensors[KEY] = torch.zeros(2, 3, dtype=torch.int64)
        save_file(tensors, saved / ADAPTER)
        reseal(saved)

        assert problems(saved)[0].startswith(f"{saved / ADAPTER}: {KEY} has dtype I64; expected one of F64, F32")

    def test_value_with_three_axes(self, saved: Path) -> None:
        tensors = load_file(saved / ADAPTER)
        tensors[KEY] = tensors[KEY][None].contiguous()
        save_file(tensors, saved / ADAPTER)
        reseal(saved)

        assert f"{saved / ADAPTER}: {KEY} has shape [1, 2, 3]; expected two axes" in problems(saved)

    def test_key_in_the_adapter_alone(self, saved: Path) -> None:
        save_file({**load_file(saved / ADAPTER), "z": arange(2, 3)}, saved / ADAPTER)
        reseal(saved)

        assert problems(saved) == (f"{saved}: z is in {ADAPTER} and not in the manifest",)

    def test_key_in_the_manifest_alone(self, saved: Path) -> None:
        tensors = load_file(saved / ADAPTER)
        del tensors[KEY]
        save_file(tensors, saved / ADAPTER)
        reseal(saved)

        assert problems(saved) == (f"{saved}: {KEY} is in the manifest and not in {ADAPTER}",)

    @pytest.mark.parametrize("name", [FILES[2], FILES[4], FILES[6]])
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(KEY), f"has no tensor {KEY}, which the manifest looks for there"),
            (lambda t: t.update(z=arange(2, 3)), "holds z, which the manifest does not look for there"),
            (lambda t: t.update({KEY: t[KEY].double()}), f"{KEY} has dtype F64; expected F32"),
            (lambda t: t.update({KEY: t[KEY].T.contiguous()}), f"{KEY} has shape [3, 2], the adapter [2, 3]"),
        ],
        ids=["missing", "extra", "dtype", "shape"],
    )
    def test_optimizer_file(self, name: str, change: Callable[[Any], Any], message: str, saved: Path) -> None:
        tensors = load_file(saved / name)
        change(tensors)
        save_file(tensors, saved / name)
        reseal(saved)

        assert problems(saved) == (f"{saved / name}: {message}",)

    def test_three_files_with_one_wrong_header(self, saved: Path) -> None:
        names = FILES[2:8:2]
        for name in names:
            tensors = load_file(saved / name)
            save_file({**tensors, KEY: tensors[KEY].T.contiguous()}, saved / name)
        reseal(saved)

        assert len({(saved / name).read_bytes()[:80] for name in names}) == 1
        assert set(problems(saved)) == {f"{saved / name}: {KEY} has shape [3, 2], the adapter [2, 3]" for name in names}

    @pytest.mark.parametrize("name", [ADAPTER, CONFIG_FILE])
    def test_another_file_as_an_optimizer_file(self, name: str, saved: Path) -> None:
        manifest = json.loads((saved / "checkpoint.json").read_text())
        for names in manifest["parameters"].values():
            names[0] = name
        manifest["files"] = {n: d for n, d in manifest["files"].items() if "master" not in n}
        (saved / "checkpoint.json").write_text(json.dumps(manifest))
        reseal(saved)

        assert problems(saved)[0] == f"{saved}: {min(manifest['parameters'])}: {name} is listed as an optimizer file"

    def test_reseal_alone_breaks_nothing(self, saved: Path) -> None:
        reseal(saved)

        assert verify_checkpoint(saved) == load_checkpoint(saved).digest


def test_unlisted_files_are_named_and_not_looked_at(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "optimizer" / "x").symlink_to("/nowhere")
    contents = verified_contents(saved)

    assert unlisted_files(saved, contents.manifest) == ["notes.txt", "optimizer/x"]


def test_without_an_optimizer(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.packed("a", experts=2)
    save(tmp_path / "c", trainer, with_state=False)

    assert sorted(file_bytes(tmp_path / "c")) == [CONFIG_FILE, ADAPTER, "checkpoint.json"]
    assert verify_checkpoint(tmp_path / "c") == load_checkpoint(tmp_path / "c").digest


def test_a_copy_verifies_with_the_same_digest(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")

    assert verify_checkpoint(tmp_path / "copy") == verify_checkpoint(saved)


def sealed_adapter(root: Path, header: str) -> Path:
    """Write a checkpoint without optimizer around a header, with right digests; safetensors accepts the header."""
    root.mkdir()
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % 8)
    files = {ADAPTER: len(encoded).to_bytes(8, "little") + encoded + bytes(16), CONFIG_FILE: config_bytes(CONFIG)}
    for name, content in files.items():
        (root / name).write_bytes(content)
    digests = {name: hashlib.blake2b(content, digest_size=32).hexdigest() for name, content in files.items()}
    (root / "checkpoint.json").write_bytes(manifest_bytes(CONFIG["base_model_name_or_path"], None, {}, {}, digests)[0])
    return root


PLAIN = '{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'


@pytest.mark.parametrize(
    "header",
    [
        '{"k":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16],"x":{"data_offsets":[]}}}',
        '{"k":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16],"x":{"dtype":"F32","shape":3,"data_offsets":[1]}}}',
        '{"k":["F32",[2,2],[0,16]]}',
        '{"data_offsets":["F32",[2,2],[0,16]]}',
        '{"k":{"dtype":{"F32":null},"shape":[2,2],"data_offsets":[0,16]}}',
        f'{{"k":{{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}},"m":{PLAIN}}}',
    ],
)
@pytest.mark.parametrize("read", [verify_checkpoint, load_checkpoint])
def test_headers_that_safetensors_takes_and_the_format_does_not_know(read: Any, header: str, tmp_path: Path) -> None:
    root = sealed_adapter(tmp_path / "c", header)
    with safe_open(root / ADAPTER, framework="pt"):
        pass

    with pytest.raises(CheckpointError, match=r"a header that packckpt does not read: (k|data_offsets) is desc"):
        read(root)
    load_checkpoint(sealed_adapter(tmp_path / "plain", f'{{"k":{PLAIN}}}')).close()


def test_a_checkpoint_of_many_files_holds_no_descriptors(tmp_path: Path) -> None:
    trainer = Trainer()
    for layer in range(40):
        trainer.packed(f"layer{layer}", experts=1)
    trainer.exports = [
        Export(f"m.layers.{layer}.{export.key}", export.parameter, export.expert)
        for layer, export in enumerate(trainer.exports)
    ]
    save(tmp_path / "c", trainer)
    before = len(os.listdir("/proc/self/fd"))

    with load_checkpoint(tmp_path / "c") as checkpoint:
        assert len(list((tmp_path / "c" / "optimizer").iterdir())) == 120
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(checkpoint.keys) == 40


def test_a_file_that_cannot_be_opened_is_a_problem(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("packckpt.verify.TensorFileReader", no_more)
    with pytest.raises(CheckpointError, match=r"cannot be opened: .*Too many open files"):
        verify_checkpoint(saved)
