"""`kill -9` at random moments of a save: what is at the destination, what came before it, and what the next save does.

The processes that are killed are forked by a helper process that has imported torch, has one thread and does nothing
else; so a hundred of them cost seconds.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from packckpt import CheckpointSaver, RankError, verify_checkpoint
from packckpt.reservation import reservation_of
from tests.processes import ROOT
from tests.sharded import CONFIG, Site, assert_holds, build, names

SEED = 20240607
KILLS = 100
KILLS_OF_RANKS = 12
# The exit status of a rank that blames another, plus that rank.
BLAMES = 40

# Several blocks and some data, so that a save has many moments.
BY_RANK = [
    [
        Site(f"a.layers.{layer}.experts.{{expert}}.w", 100 * layer, (16, 8), (4 * rank, 4 * rank + 1, 4 * rank + 2))
        for layer in range(3)
    ]
    for rank in range(2)
]


def _save_for_ever(root: Path, first: int, rank: int, size: int, durable: bool, told: int) -> None:
    """Save step after step, and tell which, until killed."""
    exports, state, _ = build(BY_RANK[rank])
    saver = CheckpointSaver("coalesced" if first % 2 else "slice", durable=durable, timeout_seconds=20)
    if size > 1:
        # The groups are made before the first step is told: the kills shall fall into saves.
        saver.prepare(root / f"warm-{first}", exports, state, CONFIG)
        saver.abort(root / f"warm-{first}")
    else:
        # A process's first save is slower, and most of that is before the first file: the kills would all fall there.
        saver.save(root / f"warm-{first}", exports, state, CONFIG)
    for step in range(first, first + 1000):
        if rank == 0:
            os.write(told, f"{step}\n".encode())
        saver.save(root / f"step-{step:06d}", exports, state, CONFIG)


def _fork_on_request(descriptor: int) -> None:
    """Fork ranks that save for ever; runs in a process that has one thread."""
    torch.set_num_threads(1)
    build(BY_RANK[0])  # what torch imports late is imported now, once
    connection = Connection(descriptor)
    while True:
        try:
            root, first, size, durable, meeting, told = connection.recv()
        except EOFError:
            return
        assert len(os.listdir("/proc/self/task")) == 1
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    connection.close()
                    if size > 1:
                        store = dist.FileStore(meeting, size)
                        dist.init_process_group(
                            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
                        )
                    _save_for_ever(Path(root), first, rank, size, durable, told)
                except RankError as error:
                    status = BLAMES + sum(error.ranks)
                finally:
                    os._exit(status)
            children.append(child)
        connection.send(children)
        # The parent kills one, then says that the dead can be collected.
        connection.recv()
        connection.send([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])


class _Forker:
    """The helper process, and the pipe through which the forked ones tell their steps."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self.steps, self._told = os.pipe()
        os.set_inheritable(self._told, True)
        os.set_blocking(self.steps, False)
        command = f"from tests.test_kill import _fork_on_request; _fork_on_request({theirs.fileno()})"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", command], cwd=ROOT, env=environment, pass_fds=[theirs.fileno(), self._told]
        )
        theirs.close()

    def start(self, root: Path, first: int, size: int, durable: bool, meeting: Path) -> list[int]:
        self._connection.send((str(root), first, size, durable, str(meeting), self._told))
        children: list[int] = self._connection.recv()
        return children

    def collect(self) -> list[int]:
        self._connection.send("collect")
        statuses: list[int] = self._connection.recv()
        return statuses

    def last_step(self, seconds: float = 20) -> int:
        """Wait until a step was told; return the newest."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                text = os.read(self.steps, 1 << 16)
            except BlockingIOError:
                assert time.monotonic() < deadline, "no save began"
                time.sleep(0.0005)
                continue
            return int(text.split()[-1])

    def newest_step(self, known: int) -> int:
        """Return the newest step that was told, `known` if there is none newer."""
        try:
            return int(os.read(self.steps, 1 << 16).split()[-1])
        except BlockingIOError:
            return known

    def close(self) -> None:
        self._connection.close()
        self._process.wait(20)
        os.close(self.steps)
        os.close(self._told)


@pytest.fixture(scope="module")
def forker() -> Iterator[_Forker]:
    made = _Forker()
    yield made
    made.close()


def _destination(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def _moment(root: Path, step: int) -> str:
    """Name the moment of a save that the dead process had reached."""
    prefix = f".step-{step:06d}."
    hidden = "".join(name.removeprefix(prefix) for name in names(root) if name.startswith(prefix))
    if _destination(root, step).exists():
        return "committed, not cleaned up" if hidden else "between saves"
    for what in ("tmp", "snapshot", "reserved"):
        if what in hidden:
            return what
    return "between saves"


def _assert_survived(root: Path, step: int, digest: str) -> None:
    """The destination is absent or verifies, and so does the checkpoint before it."""
    if _destination(root, step).exists():
        assert verify_checkpoint(_destination(root, step)) == digest
    if _destination(root, step - 1).exists():
        assert verify_checkpoint(_destination(root, step - 1)) == digest
    else:
        assert step == 0 or not any(name.startswith("step-") for name in names(root))


def _remove(root: Path, keep: Callable[[str], bool]) -> None:
    for name in names(root):
        if not keep(name):
            subprocess.run(["rm", "-rf", str(root / name)], check=True)


@pytest.mark.timeout(300)
def test_killed_at_random_moments(tmp_path: Path, forker: _Forker) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    root = tmp_path / "runs"
    root.mkdir()
    exports, state, _ = build(BY_RANK[0])
    digest = CheckpointSaver().save(_destination(root, 0), exports, state, CONFIG)
    took = {}
    for durable in (False, True):
        started = time.monotonic()
        CheckpointSaver(durable=durable).save(tmp_path / f"timed-{durable}", exports, state, CONFIG)
        took[durable] = time.monotonic() - started

    moments: Counter[str] = Counter()
    first = 1
    for number in range(KILLS):
        durable = number % 4 == 0  # waiting for the disk takes most of the time of such a save
        (child,) = forker.start(root, first, 1, durable, tmp_path / "unused")
        step = forker.last_step()
        time.sleep(chance.uniform(0, 3 * took[durable]))
        os.kill(child, signal.SIGKILL)
        assert forker.collect() == [-signal.SIGKILL], number
        step = forker.newest_step(step)
        moments[_moment(root, step)] += 1
        _assert_survived(root, step, digest)
        # The next save to the same place works, and cleans up what the dead process left.
        assert CheckpointSaver(durable=durable).save(_destination(root, step), exports, state, CONFIG) == digest
        assert verify_checkpoint(_destination(root, step)) == digest
        assert [name for name in names(root) if name.startswith(".")] == [], number
        assert not reservation_of(_destination(root, step)).exists()
        _remove(root, lambda name, step=step: name == f"step-{step:06d}")  # type: ignore[misc]
        first = step + 1
    print(dict(moments), took)
    assert_holds(_destination(root, first - 1), BY_RANK[:1])
    # The kills fell where it matters.
    assert sum(moments.values()) == KILLS
    assert moments["tmp"] >= 5
    assert moments["snapshot"] + moments["reserved"] >= 5


def test_one_of_two_ranks_is_killed_at_random_moments(tmp_path: Path, forker: _Forker) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    root = tmp_path / "runs"
    root.mkdir()
    moments: Counter[str] = Counter()
    digest = ""
    first = 0
    for number in range(KILLS_OF_RANKS):
        children = forker.start(root, first, 2, False, tmp_path / f"meeting-{number}")
        step = forker.last_step()
        time.sleep(chance.uniform(0, 0.1))
        victim = number % 2
        os.kill(children[victim], signal.SIGKILL)
        # The other rank raises an error that names it, and ends by itself.
        statuses = forker.collect()
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] == BLAMES + victim
        step = forker.newest_step(step)
        moments[_moment(root, step)] += 1
        for name in names(root):
            if re.fullmatch(r"step-\d{6}", name):
                digest = digest or verify_checkpoint(root / name)
                assert verify_checkpoint(root / name) == digest
        if victim == 1:
            # The coordinator lived, and left nothing.
            assert [name for name in names(root) if name.startswith(".")] == []
        exports, state, _ = build(BY_RANK[0])
        CheckpointSaver().save(_destination(root, step + 1), exports, state, CONFIG)
        # A save to the same place: what one process has to save is another checkpoint than what two have.
        if not _destination(root, step).exists():
            CheckpointSaver().save(_destination(root, step), exports, state, CONFIG)
            assert [name for name in names(root) if name.startswith(f".step-{step:06d}.")] == []
        _remove(root, lambda _: False)
        first = step + 1
    print(dict(moments))
    assert KILLS_OF_RANKS - moments["between saves"] >= 3
