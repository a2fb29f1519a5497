"""Something at the destination is refused and left as it was; the same checkpoint there is a success."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packckpt import CheckpointSaver, SaveError, verify_checkpoint
from tests.builders import CONFIG, Trainer, file_bytes, names_in, save


@pytest.fixture
def trainer() -> Trainer:
    made = Trainer()
    made.packed("a", experts=2)
    return made


def snapshot_of(path: Path) -> Any:
    """Everything about a path that a save must not change."""
    status = path.lstat()
    kept = (status.st_ino, stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), status.st_mtime_ns)
    if path.is_symlink():
        return kept, os.readlink(path)
    return kept, file_bytes(path) if path.is_dir() else path.read_bytes()


def empty_directory(path: Path) -> None:
    path.mkdir()


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


def link_to_directory(path: Path) -> None:
    (path.parent / "target").mkdir()
    path.symlink_to(path.parent / "target")


def link_to_checkpoint(path: Path) -> None:
    other = Trainer()
    other.packed("a", experts=2)
    save(path.parent / "target", other)
    path.symlink_to("target")


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


IN_THE_WAY: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty directory": (empty_directory, "an empty directory is in the way"),
    "full directory": (full_directory, "a directory without checkpoint.json is in the way"),
    "file": (a_file, "a file is in the way"),
    "link to a directory": (link_to_directory, "a symbolic link is in the way"),
    "link to the same checkpoint": (link_to_checkpoint, "a symbolic link is in the way"),
    "dangling link": (dangling_link, "a symbolic link is in the way"),
}


@pytest.mark.parametrize("kind", IN_THE_WAY)
class TestInTheWay:
    def test_before_prepare(self, kind: str, trainer: Trainer, tmp_path: Path) -> None:
        make, message = IN_THE_WAY[kind]
        make(tmp_path / "c")
        before, around = snapshot_of(tmp_path / "c"), names_in(tmp_path)

        with pytest.raises(SaveError, match=f"^{tmp_path}/c: {message}; remove it or choose another"):
            save(tmp_path / "c", trainer)
        assert (snapshot_of(tmp_path / "c"), names_in(tmp_path)) == (before, around)

    def test_between_prepare_and_finalize(self, kind: str, trainer: Trainer, tmp_path: Path) -> None:
        """A rename onto an empty directory would succeed silently."""
        make, message = IN_THE_WAY[kind]
        saver = CheckpointSaver(durable=False)
        saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        make(tmp_path / "c")
        before = snapshot_of(tmp_path / "c")
        around = [name for name in names_in(tmp_path) if not name.startswith(".c.")]

        with pytest.raises(SaveError, match=f"^{tmp_path}/c: {message}"):
            saver.finalize(tmp_path / "c")
        assert (snapshot_of(tmp_path / "c"), names_in(tmp_path)) == (before, around)
        saver.save(tmp_path / "d", trainer.exports, trainer.state, CONFIG)
        assert verify_checkpoint(tmp_path / "d")


class TestAnotherCheckpoint:
    def test_the_same_is_a_success_and_stays(self, trainer: Trainer, tmp_path: Path) -> None:
        digest = save(tmp_path / "c", trainer)
        before = snapshot_of(tmp_path / "c")

        assert save(tmp_path / "c", trainer) == digest
        assert (snapshot_of(tmp_path / "c"), names_in(tmp_path)) == (before, ["c"])

    def test_a_different_one_is_refused_and_stays(self, trainer: Trainer, tmp_path: Path) -> None:
        save(tmp_path / "c", trainer)
        before = snapshot_of(tmp_path / "c")

        with pytest.raises(SaveError, match=r"c: a checkpoint with digest .* is in the way, this save has .* as it is"):
            save(tmp_path / "c", trainer, config={**CONFIG, "r": 8})
        assert (snapshot_of(tmp_path / "c"), names_in(tmp_path)) == (before, ["c"])

    def test_a_damaged_one_is_refused_and_stays(self, trainer: Trainer, tmp_path: Path) -> None:
        """The manifest still has the right digest; the content has not."""
        save(tmp_path / "c", trainer)
        content = bytearray((tmp_path / "c" / "adapter_model.safetensors").read_bytes())
        content[-1] ^= 1
        (tmp_path / "c" / "adapter_model.safetensors").write_bytes(content)
        before = snapshot_of(tmp_path / "c")

        with pytest.raises(SaveError, match=r"c: a damaged checkpoint is in the way .*adapter_model.safetensors: has"):
            save(tmp_path / "c", trainer)
        assert (snapshot_of(tmp_path / "c"), names_in(tmp_path)) == (before, ["c"])


class TestOtherFileSystem:
    def test_a_mount_point_is_named(self, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "c").mkdir()
        real = os.path.ismount
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "c" or real(path))

        with pytest.raises(SaveError, match=r"c: another file system's mount point \(a checkpoint is renamed"):
            save(tmp_path / "c", trainer)
        assert (names_in(tmp_path), names_in(tmp_path / "c")) == (["c"], [])

    @pytest.mark.skipif(not os.path.ismount("/proc"), reason="/proc is no mount point here")
    def test_a_real_mount_point(self, trainer: Trainer) -> None:
        before = names_in(Path("/"))

        with pytest.raises(SaveError, match=r"^/proc: another file system's mount point"):
            save(Path("/proc"), trainer)
        assert names_in(Path("/")) == before


class TestNames:
    @pytest.mark.parametrize(
        ("destination", "message"),
        [
            ("", "destination is ''; expected a path"),
            ("a\0b", "destination is .*; expected a path"),
            (b"bytes", "destination is b'bytes'; expected a path"),
            ("/", "destination is '/'; expected the name of a directory to be"),
            ("x" * 250, "destination name 'x*' is too long; expected at most 220 bytes"),
            ("é" * 120, "destination name 'é*' is too long"),
        ],
    )
    def test_refused(
        self, destination: Any, message: str, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SaveError, match=message):
            save(destination, trainer)
        assert names_in(tmp_path) == []

    @pytest.mark.parametrize("name", ["x" * 220, "with space", "ünï", ".hidden", "new\nline", "a", "-r"])
    def test_saved(self, name: str, trainer: Trainer, tmp_path: Path) -> None:
        save(tmp_path / name, trainer)

        assert verify_checkpoint(tmp_path / name)
        assert names_in(tmp_path) == [name]

    def test_missing_parents_are_made(self, trainer: Trainer, tmp_path: Path) -> None:
        save(tmp_path / "a" / "b" / "c", trainer)

        assert verify_checkpoint(tmp_path / "a" / "b" / "c")
        assert names_in(tmp_path / "a" / "b") == ["c"]

    def test_missing_parents_are_removed_by_abort(self, trainer: Trainer, tmp_path: Path) -> None:
        saver = CheckpointSaver(durable=False)
        saver.prepare(tmp_path / "a" / "b" / "c", trainer.exports, trainer.state, CONFIG)
        assert len(names_in(tmp_path / "a" / "b")) == 2
        saver.abort(tmp_path / "a" / "b" / "c")

        assert names_in(tmp_path) == []

    def test_a_relative_destination_survives_a_chdir(
        self, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        saver = CheckpointSaver(durable=False)
        saver.prepare("c", trainer.exports, trainer.state, CONFIG)
        monkeypatch.chdir(tmp_path / "elsewhere")
        saver.finalize(tmp_path / "c")

        assert verify_checkpoint(tmp_path / "c")

    def test_a_file_as_parent_is_an_error_that_leaves_it(self, trainer: Trainer, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("mine")

        with pytest.raises(OSError, match="f"):
            save(tmp_path / "f" / "c", trainer)
        assert (names_in(tmp_path), (tmp_path / "f").read_text()) == (["f"], "mine")


@pytest.mark.parametrize(("umask", "directory", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_modes_follow_the_umask(umask: int, directory: int, file: int, trainer: Trainer, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "c", trainer)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]}

    assert {path.name for path in modes} >= {"c", "optimizer", "checkpoint.json", "master-000000.safetensors"}
    assert all(mode == (directory if path.is_dir() else file) for path, mode in modes.items())
