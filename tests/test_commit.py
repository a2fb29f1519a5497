"""Writing one checkpoint: how tensors are asked for, what may stand at the destination, and what is left."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from packckpt import CheckpointSaver, Hyperparameters, SaveError, Shard, commit, load_checkpoint, verify_checkpoint
from packckpt.commit import Commit
from packckpt.descriptions import Description, KeyGroup
from packckpt.merge import merge_keys
from packckpt.tensorfile import tensor_bytes
from tests.sharded import CONFIG, Site, build, names, tree

OPTIMIZER = Hyperparameters(1e-3, 0.9, 0.95, 1e-9, 0.1)
SITES = [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1)), Site("head.w", 3, (2, 2))]

Held = dict[tuple[int, str], dict[str, torch.Tensor]]


def _rank_tensors(base: float, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    values = torch.arange(float(shape[0] * shape[1])).reshape(shape) + base
    return {
        "lora": values.to(dtype),
        "master": values + 0.25,
        "exp_avg": values + 0.5,
        "exp_avg_sq": values + 0.75,
    }


class _Fetch:
    """Hands out what each rank holds, in one buffer a call, as it arrives over a wire; notes every call."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.calls: list[tuple[int, str, tuple[str, ...]]] = []

    def __call__(self, rank: int, component: str, keys: Sequence[str]) -> list[memoryview]:
        self.calls.append((rank, component, tuple(keys)))
        parts = [bytes(tensor_bytes(self.held[rank, key][component])) for key in keys]
        buffer, offset, views = memoryview(bytearray(b"".join(parts))), 0, []
        for part in parts:
            views.append(buffer[offset : offset + len(part)])
            offset += len(part)
        return views


def _three_ranks() -> tuple[Held, list[list[KeyGroup]]]:
    """Odd sizes and two dtypes, so that what follows in a window is not aligned."""
    held: Held = {
        (0, "a.layers.0.w"): _rank_tensors(100, (3, 1), torch.bfloat16),
        (0, "a.layers.0.x"): _rank_tensors(200, (1, 5)),
        (1, "a.layers.0.w"): _rank_tensors(150, (3, 2), torch.bfloat16),
        (1, "b"): _rank_tensors(300, (2, 2), torch.float64),
        (2, "a.layers.0.x"): _rank_tensors(900, (1, 5)),
        (2, "a.layers.1.y"): _rank_tensors(400, (1, 1), torch.float16),
    }
    shards = {(0, "a.layers.0.w"): Shard(0, 2, 1), (1, "a.layers.0.w"): Shard(1, 2, 1)}
    groups: list[list[KeyGroup]] = [[], [], []]
    for (rank, key), tensors in held.items():
        shape = (tensors["lora"].shape[0], tensors["lora"].shape[1])
        description = Description(tensors["lora"].dtype, shape, shards.get((rank, key)), 7)
        groups[rank].append(KeyGroup(description, [key]))
    return held, groups


def _commit(destination: Path, *, strict: bool = False) -> tuple[str, _Fetch]:
    held, groups = _three_ranks()
    fetch = _Fetch(held)
    made = Commit(destination, dict(CONFIG), OPTIMIZER, merge_keys(groups), False, strict)
    return made.write(fetch), fetch


def _assert_three_ranks(destination: Path) -> None:
    held, _ = _three_ranks()
    with load_checkpoint(destination) as checkpoint:
        assert checkpoint.keys == ("a.layers.0.w", "a.layers.0.x", "a.layers.1.y", "b")
        for key, rank in (("a.layers.0.x", 0), ("a.layers.1.y", 2), ("b", 1)):
            assert torch.equal(checkpoint.exported(key), held[rank, key]["lora"])
            for component in ("master", "exp_avg", "exp_avg_sq"):
                assert torch.equal(checkpoint.component(key, component), held[rank, key][component])
        parts = [held[rank, "a.layers.0.w"] for rank in (0, 1)]
        assert torch.equal(checkpoint.exported("a.layers.0.w"), torch.cat([part["lora"] for part in parts], 1))
        assert torch.equal(checkpoint.state("a.layers.0.w").exp_avg, torch.cat([part["exp_avg"] for part in parts], 1))


@pytest.mark.parametrize("window_bytes", [1, 30, 64 << 20])
def test_windows_change_nothing_but_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    whole, fetch = _commit(tmp_path / "whole")
    # One window a file here: each rank is asked once for each file in which it has something.
    assert fetch.calls[:3] == [
        (0, "lora", ("a.layers.0.w", "a.layers.0.x")),
        (1, "lora", ("a.layers.0.w", "b")),
        (2, "lora", ("a.layers.1.y",)),
    ]
    assert len(fetch.calls) == 3 + 3 * 4
    monkeypatch.setattr(commit, "WINDOW_BYTES", window_bytes)
    cut, cut_fetch = _commit(tmp_path / "cut")
    assert cut == whole
    assert tree(tmp_path / "cut") == tree(tmp_path / "whole")
    assert (len(cut_fetch.calls) > len(fetch.calls)) is (window_bytes < 1000)
    _assert_three_ranks(tmp_path / "cut")


def test_duplicates_are_asked_for_only_to_be_compared(tmp_path: Path) -> None:
    _, fetch = _commit(tmp_path / "lenient")
    assert not any(rank == 2 and "a.layers.0.x" in keys for rank, _, keys in fetch.calls)
    with pytest.raises(SaveError, match=r"^a\.layers\.0\.x: ranks 0 and 2 export it with different values"):
        _commit(tmp_path / "strict", strict=True)
    assert names(tmp_path) == ["lenient"]


@pytest.mark.parametrize("call", [1, 2, 8, 15])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt(), RuntimeError("lost")])
def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path, call: int, error: BaseException) -> None:
    held, groups = _three_ranks()
    fetch = _Fetch(held)

    def failing(rank: int, component: str, keys: Sequence[str]) -> list[memoryview]:
        parts = fetch(rank, component, keys)
        if len(fetch.calls) == call:
            assert len(names(tmp_path)) == 1  # the temporary directory, while it is written
            raise error
        return parts

    with pytest.raises(type(error)) as caught:
        Commit(tmp_path / "step-1", dict(CONFIG), OPTIMIZER, merge_keys(groups), False, False).write(failing)
    assert caught.value is error
    assert names(tmp_path) == []


# -- what stands at the destination ------------------------------------------------------------------------


def _save(destination: Path, base: int = 10) -> str:
    exports, state, _ = build([Site("a.layers.0.experts.{expert}.w", base, (3, 2), (0, 1))])
    return CheckpointSaver(durable=False).save(destination, exports, state, CONFIG)


def _identity(path: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of everything in a directory: what was left alone keeps both."""
    found = {str(item): os.lstat(item) for item in [path, *path.rglob("*")]}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def test_the_same_checkpoint_there_is_success(tmp_path: Path) -> None:
    first = _save(tmp_path / "step-1")
    before = _identity(tmp_path / "step-1")
    assert _save(tmp_path / "step-1") == first
    assert _identity(tmp_path / "step-1") == before
    assert names(tmp_path) == ["step-1"]


def test_another_checkpoint_there_is_refused(tmp_path: Path) -> None:
    first = _save(tmp_path / "step-1")
    before = _identity(tmp_path / "step-1")
    with pytest.raises(
        SaveError, match=rf"step-1: a checkpoint with digest {first} is in the way, this save has \w+; it was left"
    ):
        _save(tmp_path / "step-1", base=20)
    assert _identity(tmp_path / "step-1") == before
    assert verify_checkpoint(tmp_path / "step-1") == first
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    "damage", ["adapter_model.safetensors", "checkpoint.json", "optimizer/master-000000.safetensors"]
)
def test_a_damaged_checkpoint_there_is_refused(tmp_path: Path, damage: str) -> None:
    _save(tmp_path / "step-1")
    content = bytearray((tmp_path / "step-1" / damage).read_bytes())
    content[-3] ^= 1
    (tmp_path / "step-1" / damage).write_bytes(content)
    before = _identity(tmp_path / "step-1")
    with pytest.raises(
        SaveError, match=rf"step-1: a damaged checkpoint is in the way and was left as it is: .*{damage}"
    ):
        _save(tmp_path / "step-1")
    assert _identity(tmp_path / "step-1") == before
    assert names(tmp_path) == ["step-1"]


def _empty_directory(path: Path) -> None:
    path.mkdir()


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("mine")


def _file(path: Path) -> None:
    path.write_text("mine")


def _link(path: Path) -> None:
    _save(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


OBSTACLES = {
    "an empty directory": _empty_directory,
    "a directory without checkpoint.json": _full_directory,
    "a file": _file,
    "a symbolic link": _link,
    "a symbolic link to nothing": _dangling_link,
}


@pytest.mark.parametrize("when", ["before prepare", "before finalize"])
@pytest.mark.parametrize("what", OBSTACLES)
def test_what_is_in_the_way_is_refused_and_untouched(tmp_path: Path, what: str, when: str) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    exports, state, _ = build(SITES)
    saver = CheckpointSaver(durable=False)
    if when == "before finalize":
        saver.prepare(root / "step-1", exports, state, CONFIG)
    OBSTACLES[what](root / "step-1")
    before = (_identity(root / "step-1"), _visible(tmp_path))
    with pytest.raises(SaveError, match=re.escape(f"step-1: {what.removesuffix(' to nothing')} is in the way")):
        _end(saver, when, root / "step-1")
    assert (_identity(root / "step-1"), tree(tmp_path)) == before
    assert names(root) == ["step-1"]
    exports, state, _ = build(SITES)
    saver.save(root / "step-2", exports, state, CONFIG)
    assert names(root) == ["step-1", "step-2"]


def _end(saver: CheckpointSaver, when: str, destination: Path) -> None:
    if when == "before prepare":
        exports, state, _ = build(SITES)
        saver.prepare(destination, exports, state, CONFIG)
    else:
        saver.finalize(destination)


def _visible(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(root).items() if not name.startswith("runs/.")}


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-1").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "step-1"))
    with pytest.raises(SaveError, match="step-1: another file system's mount point"):
        _save(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]
