"""A rank that fails, is gone or hangs, and a disk that is full: who hears of it, what is left, and what goes on."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import packckpt.saver as saver_module
from packckpt import CheckpointSaver, transfer, verify_checkpoint
from packckpt.snapshot import SnapshotReader
from tests.processes import Failure, Outcome, attempt, on_ranks, outcomes_on_ranks
from tests.sharded import CONFIG, Site, assert_holds, build, names

SITES = [
    [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1)), Site("a.layers.1.w", 5, (2, 2))],
    [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (2, 3)), Site("a.layers.1.v", 6, (2, 2))],
    [Site("a.layers.2.experts.{expert}.w", 30, (3, 2), (4,))],
]

# -- faults, put in where a rank works ---------------------------------------------------------------------

Fault = Callable[[], None]


@contextmanager
def _replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _fault_at(place: str, fault: Fault) -> Iterator[None]:
    """Call `fault` at a place of a save: before prepare looks, in the second copy, while a snapshot is read."""
    owner, name = {
        "prepare": (saver_module, "plan_transfers"),
        "write": (transfer, "_to_host"),
        "finalize": (CheckpointSaver, "_commit"),
        "merge": (SnapshotReader, "__call__"),
    }[place]
    count, before = itertools.count(1), getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(count) == (2 if place == "write" else 1):
            fault()
        return before(*args, **kwargs)

    with _replaced(owner, name, faulty):
        yield


def _raising(error: BaseException) -> Fault:
    def fault() -> None:
        raise error

    return fault


def _save(saver: CheckpointSaver, destination: Path, rank: int) -> str:
    exports, state, _ = build(SITES[rank])
    return saver.save(destination, exports, state, CONFIG)


# -- a rank that raises ------------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("the kernel failed"),
    "MemoryError": MemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
}


# The merge is served on a thread, where no signal is raised.
RAISED = [
    ("prepare", "RuntimeError"),
    ("prepare", "KeyboardInterrupt"),
    *(("write", name) for name in ERRORS),
    ("merge", "RuntimeError"),
    ("merge", "MemoryError"),
]


def _one_raises(rank: int, root: Path, victim: int) -> dict[tuple[str, str], Any]:
    saver = CheckpointSaver(durable=False, timeout_seconds=20)
    _save(saver, root / "before", rank)
    found = {}
    for place, name in RAISED:
        error = ERRORS[name]()
        started = time.monotonic()
        with _fault_at(place, _raising(error) if rank == victim else lambda: None):
            failure = attempt(lambda: _save(saver, root / "new" / "step-1", rank))
        seconds = time.monotonic() - started
        after = _save(saver, root / f"after-{place}-{name}", rank)
        # Whoever takes part in the next save has cleaned up after this one.
        found[place, name] = (failure, seconds, names(root), after)
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_raises(tmp_path: Path, victim: int) -> None:
    by_rank = on_ranks(2, _one_raises, tmp_path, victim)
    assert list(by_rank[0]) == list(by_rank[1]) == RAISED
    digest = verify_checkpoint(tmp_path / "before")
    for (place, name), (failure, seconds, _, after) in by_rank[victim].items():
        expected = ERRORS[name]()
        assert (failure.kind, failure.text) == (type(expected).__name__, str(expected)), (place, name)
        assert after == digest
        assert seconds < 10
    for (place, name), (failure, seconds, left, after) in by_rank[1 - victim].items():
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.ranks) == ("RankError", (victim,)), (place, name)
        assert f"rank {victim}: {name}" in failure.text
        assert after == digest
        assert seconds < 10
        # Nothing of the failed save: neither checkpoint, nor parents, nor anything hidden in them.
        assert "new" not in left, (place, name)
    assert sorted(names(tmp_path)) == sorted(["before", *(f"after-{p}-{n}" for p, n in by_rank[0])])


def _third_hears(rank: int, root: Path) -> Any:
    saver = CheckpointSaver(durable=False, timeout_seconds=20)
    with _fault_at("write", _raising(ValueError("bad copy")) if rank == 1 else lambda: None):
        failure = attempt(lambda: _save(saver, root / "step-1", rank))
    with _fault_at("merge", _raising(ValueError("bad read")) if rank == 1 else lambda: None):
        merging = attempt(lambda: _save(saver, root / "step-1", rank))
    return failure, merging, _save(saver, root / "step-1", rank)


def test_every_other_rank_hears_of_it(tmp_path: Path) -> None:
    by_rank = on_ranks(3, _third_hears, tmp_path)
    for rank in (0, 2):
        failure, merging, _ = by_rank[rank]
        assert (failure.ranks, failure.text) == ((1,), "snapshot: rank 1: ValueError: bad copy")
        assert (merging.ranks, merging.text) == ((1,), "finalize: rank 1: ValueError: bad read")
    assert names(tmp_path) == ["step-1"]
    assert_holds(tmp_path / "step-1", SITES)


def _snapshot_is_damaged(rank: int, root: Path) -> Any:
    """What another process did to rank 1's snapshot between prepare and finalize."""
    exports, state, _ = build(SITES[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=20)
    saver.prepare(root / "step-1", exports, state, CONFIG)
    if rank == 1:
        (snapshot,) = root.glob(".step-1.snapshot-r1-*")
        (snapshot / "block-000001.safetensors").unlink()
    failure = attempt(lambda: saver.finalize(root / "step-1"))
    return failure, _save(saver, root / "step-1", rank)


def test_a_snapshot_that_went_away(tmp_path: Path) -> None:
    by_rank = on_ranks(2, _snapshot_is_damaged, tmp_path)
    assert by_rank[1][0].kind == "FileNotFoundError"
    assert (by_rank[0][0].kind, by_rank[0][0].ranks) == ("RankError", (1,))
    assert re.search(r"rank 1: FileNotFoundError: .*step-1\.snapshot-r1-.*block-000001", by_rank[0][0].text)
    assert by_rank[0][1] == by_rank[1][1] == verify_checkpoint(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


# -- a rank that is gone -----------------------------------------------------------------------------------

TIMEOUT_SECONDS = 20.0


def _one_is_gone(rank: int, root: Path, victim: int, place: str) -> Any:
    saver = CheckpointSaver(durable=False, timeout_seconds=TIMEOUT_SECONDS)
    _save(saver, root / "before", rank)
    started = time.monotonic()
    with _fault_at(place, (lambda: os._exit(9)) if rank == victim else lambda: None):
        failure = attempt(lambda: _save(saver, root / "step-1", rank))
    seconds = time.monotonic() - started
    again = attempt(lambda: _save(saver, root / "step-2", rank))
    aborted = attempt(lambda: saver.abort(root / "step-1"))
    return failure, seconds, again, aborted


@pytest.mark.parametrize(
    ("size", "victim", "place"),
    [(2, 1, "prepare"), (3, 1, "write"), (2, 1, "finalize"), (3, 1, "merge"), (2, 0, "write"), (3, 0, "finalize")],
)
def test_one_rank_is_gone(tmp_path: Path, size: int, victim: int, place: str) -> None:
    outcomes = outcomes_on_ranks(size, _one_is_gone, tmp_path, victim, place)
    assert outcomes[victim] == Outcome(exit_status=9)
    for rank in set(range(size)) - {victim}:
        assert outcomes[rank].failure is None, outcomes[rank].failure
        failure, seconds, again, aborted = outcomes[rank].value
        assert (failure.kind, failure.ranks) == ("RankError", (victim,)), failure
        assert f"rank {victim} did not answer" in failure.text
        assert seconds < TIMEOUT_SECONDS
        assert (again.kind, again.ranks) == ("RankError", (victim,))
        # Prepare and finalize talk apart: the other one notices by itself, and as quickly.
        assert re.search("contact was lost earlier" if place in ("prepare", "write") else "did not answer", again.text)
        assert aborted is None
    assert verify_checkpoint(tmp_path / "before")
    if victim:
        # The coordinator removed what the dead rank left.
        assert names(tmp_path) == ["before"]
    else:
        assert "step-1" not in names(tmp_path)
    # A new saver with live ranks goes on, and what the dead left is taken over.
    exports, state, _ = build(SITES[0])
    CheckpointSaver(durable=False).save(tmp_path / "step-1", exports, state, CONFIG)
    assert names(tmp_path) == ["before", "step-1"]


# -- a rank that hangs -------------------------------------------------------------------------------------


def _one_hangs(rank: int, root: Path, victim: int, place: str, timeout_seconds: float) -> Any:
    saver = CheckpointSaver(durable=False, timeout_seconds=timeout_seconds)
    _save(saver, root / "before", rank)
    started = time.monotonic()
    with _fault_at(place, lambda: time.sleep(1.6 * timeout_seconds if rank == victim else 0)):
        failure = attempt(lambda: _save(saver, root / "step-1", rank))
    return failure, time.monotonic() - started


@pytest.mark.parametrize(("victim", "place"), [(1, "write"), (2, "merge"), (0, "write")])
def test_one_rank_hangs(tmp_path: Path, victim: int, place: str) -> None:
    timeout_seconds = 2.5
    by_rank = on_ranks(3, _one_hangs, tmp_path, victim, place, timeout_seconds)
    for rank in {0, 1, 2} - {victim}:
        failure, seconds = by_rank[rank]
        assert (failure.kind, failure.ranks) == ("RankError", (victim,)), failure
        assert f"rank {victim} did not answer within" in failure.text
        assert seconds < timeout_seconds + 1
    assert by_rank[victim][0].kind in ("RankError", "FileNotFoundError")
    # When it wakes up it cleans up too.
    assert names(tmp_path) == ["before"]


# -- a disk that is full -----------------------------------------------------------------------------------

# About 64 KiB an expert and state on rank 1, so that the limit is met half way through its snapshot.
LARGE = [
    [Site("a.layers.0.w", 1, (4, 4))],
    [Site("a.layers.0.experts.{expert}.v", 500, (128, 128), (0, 1))],
]
WIDE_CONFIG = {**CONFIG, "notes": "x" * 600_000}


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    """Make every write beyond that size of a file fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _disk_full(rank: int, root: Path, victim: int, phase: str, limit: int, config: dict[str, Any]) -> Any:
    exports, state, _ = build(LARGE[rank])
    saver = CheckpointSaver(timeout_seconds=20)
    saver.save(root / "before", exports, state, CONFIG)
    destination = root / "new" / "step-1"
    started = time.monotonic()
    if phase == "finalize":
        saver.prepare(destination, exports, state, config)
    with _file_size_limit(limit if rank == victim else resource.RLIM_INFINITY):
        if phase == "prepare":
            failure = attempt(lambda: saver.prepare(destination, exports, state, config))
        else:
            failure = attempt(lambda: saver.finalize(destination))
    seconds = time.monotonic() - started
    committed = destination.exists()
    return failure, seconds, committed, saver.save(destination, exports, state, config)


@pytest.mark.parametrize(
    ("victim", "phase", "limit", "file"),
    [
        (1, "prepare", 300_000, r"\.step-1\.snapshot-r1-\w+/block-000000\.safetensors"),
        (0, "finalize", 100_000, r"\.step-1\.tmp-\w+/adapter_model\.safetensors"),
        (0, "finalize", 500_000, r"\.step-1\.tmp-\w+/adapter_config\.json"),
    ],
)
def test_a_full_disk_on_one_rank(tmp_path: Path, victim: int, phase: str, limit: int, file: str) -> None:
    config = WIDE_CONFIG if "config" in file else CONFIG
    by_rank = on_ranks(2, _disk_full, tmp_path, victim, phase, limit, config)
    path = rf"{re.escape(str(tmp_path))}/new/{file}"
    for rank, (failure, seconds, committed, _) in enumerate(by_rank):
        assert isinstance(failure, Failure)
        if rank == victim:
            assert failure.kind == "OSError"
            assert re.fullmatch(rf"\[Errno {errno.EFBIG}\] File too large: '{path}'", failure.text)
        else:
            assert (failure.kind, failure.ranks) == ("RankError", (victim,))
            assert re.search(rf"rank {victim}: OSError: \[Errno {errno.EFBIG}\] .*: '{path}'", failure.text)
        assert not committed
        assert seconds < 15
    assert verify_checkpoint(tmp_path / "before")
    assert {saved[3] for saved in by_rank} == {verify_checkpoint(tmp_path / "new" / "step-1")}
    assert names(tmp_path / "new") == ["step-1"]
    assert_holds(tmp_path / "new" / "step-1", LARGE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        # Detached at once, gone with its last user: an exception that a test holds may still hold a mapped file.
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _really_full(rank: int, disk: Path, ballast: int) -> Any:
    exports, state, _ = build(LARGE[rank])
    saver = CheckpointSaver(timeout_seconds=20)
    if rank == 0:
        (disk / "ballast").write_bytes(b"x" * ballast)
    # Rank 0 needs little and is first.
    with _fault_at("write", lambda: time.sleep(0.4 * rank)):
        first = attempt(lambda: saver.prepare(disk / "step-1", exports, state, CONFIG))
    if not isinstance(first, Failure):
        first = attempt(lambda: saver.finalize(disk / "step-1"))
    committed = (disk / "step-1").exists()
    if rank == 0:
        (disk / "ballast").unlink()
    # The snapshot of half a MiB and the merged checkpoint do not fit on a disk of one MiB, the values alone do.
    return first, committed, saver.save(disk / "step-1", exports, None, CONFIG)


@pytest.mark.parametrize(
    ("ballast", "victim", "what"),
    [(700_000, 1, "snapshot-r1"), (300_000, 0, "tmp")],
)
def test_a_disk_that_is_really_full(small_disk: Path, ballast: int, victim: int, what: str) -> None:
    by_rank = on_ranks(2, _really_full, small_disk, ballast)
    for rank, (failure, committed, _) in enumerate(by_rank):
        assert isinstance(failure, Failure)
        assert failure.kind == ("OSError" if rank == victim else "RankError")
        assert f"[Errno {errno.ENOSPC}] No space left on device: '{small_disk}/.step-1.{what}-" in failure.text
        if rank != victim:
            assert failure.ranks == (victim,)
            assert f"rank {victim}: OSError" in failure.text
        assert not committed
    assert names(small_disk) == ["step-1"]
    assert by_rank[0][2] == by_rank[1][2] == verify_checkpoint(small_disk / "step-1")


@pytest.mark.parametrize("limit", [1, 2_000, 70_000])
def test_a_full_disk_on_one_process(tmp_path: Path, limit: int) -> None:
    exports, state, _ = build(LARGE[1])
    saver = CheckpointSaver(durable=False)
    saver.save(tmp_path / "before", exports, state, CONFIG)
    with _file_size_limit(limit), pytest.raises(OSError, match=r"File too large: '.*/\.step-1\..*'"):
        saver.save(tmp_path / "step-1", exports, state, CONFIG)
    assert names(tmp_path) == ["before"]
    saver.save(tmp_path / "step-1", exports, state, CONFIG)
    assert verify_checkpoint(tmp_path / "before") == verify_checkpoint(tmp_path / "step-1")


# -- experts over ranks ------------------------------------------------------------------------------------


def _two_experts_each(rank: int, root: Path) -> str:
    """Same local names and rows on both ranks; every value is the global id of its expert."""
    ids = (2 * rank, 2 * rank + 1)
    parameter = torch.nn.Parameter(torch.stack([torch.full((3, 2), float(number)) for number in ids]))
    exports = [
        saver_module.Export(f"layers.0.experts.{number}.w", parameter, expert=row) for row, number in enumerate(ids)
    ]
    return CheckpointSaver(durable=False, timeout_seconds=20).save(root / "step-1", exports, None, CONFIG)


def test_four_experts_on_two_ranks_keep_their_global_ids(tmp_path: Path) -> None:
    from packckpt import load_checkpoint

    on_ranks(2, _two_experts_each, tmp_path)
    with load_checkpoint(tmp_path / "step-1") as checkpoint:
        assert checkpoint.keys == tuple(f"layers.0.experts.{number}.w" for number in range(4))
        for number in range(4):
            expected = torch.full((2, 3), float(number))
            assert torch.equal(checkpoint.exported(f"layers.0.experts.{number}.w"), expected)
