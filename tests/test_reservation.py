"""One save at a time to a destination: who is refused, who takes over, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packckpt import CheckpointSaver, SaveError, reservation, verify_checkpoint
from packckpt.reservation import reservation_of, reserve
from tests.processes import ROOT
from tests.sharded import CONFIG, Site, build, names

SITES = [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1))]


class _Other:
    """Another process that imports the library and runs a few lines; it says when it is ready, and waits."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()  # without waiting for its end: a forked child may hold it


@pytest.fixture
def other() -> Iterator[Callable[..., _Other]]:
    started: list[_Other] = []

    def start(code: str, *arguments: object) -> _Other:
        started.append(_Other(code, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


HOLD = """
import sys
from pathlib import Path
from packckpt.reservation import reserve
held = reserve(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
held.release(keep_parents=False)
print("released", flush=True)
sys.stdin.readline()
"""

PREPARE = """
import sys
from packckpt import CheckpointSaver
from tests.sharded import CONFIG, build
from tests.test_reservation import SITES
exports, state, _ = build(SITES)
saver = CheckpointSaver()
saver.prepare(sys.argv[1], exports, state, CONFIG)
print("prepared", flush=True)
sys.stdin.readline()
"""


def _save(destination: Path) -> str:
    exports, state, _ = build(SITES)
    return CheckpointSaver(durable=False).save(destination, exports, state, CONFIG)


def test_a_live_owner_elsewhere_refuses(tmp_path: Path, other: Callable[..., _Other]) -> None:
    destination = tmp_path / "step-1"
    owner = other(HOLD, destination)
    assert owner.line() == "held"
    with pytest.raises(SaveError, match=rf"step-1: reserved by process {owner.pid} on .* since .*, which is alive"):
        _save(destination)
    assert names(tmp_path) == [".step-1.reserved"]
    owner.tell()
    assert owner.line() == "released"
    assert names(tmp_path) == []
    assert _save(destination) == verify_checkpoint(destination)


def test_a_live_owner_in_this_process_refuses(tmp_path: Path) -> None:
    first = reserve(tmp_path / "step-1")
    with pytest.raises(SaveError, match=rf"reserved by process {os.getpid()} .* alive"):
        reserve(tmp_path / "step-1")
    reserve(tmp_path / "step-2").release(keep_parents=False)
    first.release(keep_parents=False)
    first.release(keep_parents=False)
    assert names(tmp_path) == []


def test_a_dead_owner_is_taken_over_with_its_leftovers(tmp_path: Path, other: Callable[..., _Other]) -> None:
    destination = tmp_path / "step-1"
    owner = other(PREPARE, destination)
    assert owner.line() == "prepared"
    left = names(tmp_path)
    assert len(left) == 2
    assert re.fullmatch(r"\.step-1\.snapshot-r0-[0-9a-f]{16}", left[1])
    with pytest.raises(SaveError, match=f"reserved by process {owner.pid} "):
        _save(destination)
    assert names(tmp_path) == left
    owner.kill()
    # A commit that was cut short, and a rank's snapshot.
    (tmp_path / ".step-1.tmp-0123456789abcdef" / "optimizer").mkdir(parents=True)
    (tmp_path / ".step-1.snapshot-r12-0123456789abcdef").mkdir()
    # Nothing of these is ours.
    others = [
        ".step-1.tmp-mine",
        ".step-1.snapshot-r0-0123456789abcdef.bak",
        ".step-10.tmp-0123456789abcdef",
        ".step-1x.snapshot-r0-0123456789abcdef",
        "step-1.tmp-0123456789abcdef",
        ".step-1.snapshot-rx-0123456789abcdef",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    assert _save(destination) == verify_checkpoint(destination)
    assert names(tmp_path) == sorted([*others, "step-1"])


def test_leftovers_without_a_reservation_go_too(tmp_path: Path) -> None:
    (tmp_path / ".step-1.snapshot-r1-0123456789abcdef").mkdir()
    _save(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("note", [None, "", "{", "[]", '"x"'])
def test_an_owner_that_died_before_it_wrote_its_note(tmp_path: Path, note: str | None) -> None:
    reserved = reservation_of(tmp_path / "step-1")
    reserved.mkdir()
    if note is not None:
        (reserved / "owner.json").write_text(note)
    _save(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


def test_an_owner_elsewhere_is_never_taken_over(tmp_path: Path) -> None:
    reserved = reservation_of(tmp_path / "step-1")
    reserved.mkdir()
    owner = {"boot": "another", "host": "node-7", "process": 4242, "since": "2025-01-02T03:04:05Z"}
    (reserved / "owner.json").write_text(json.dumps(owner))
    (tmp_path / ".step-1.tmp-0123456789abcdef").mkdir()
    text = (
        "reserved by process 4242 on node-7 since 2025-01-02T03:04:05Z, another machine or an earlier start of this "
        f"one. Wait for that save; where its process is gone for good, remove {reserved}"
    )
    with pytest.raises(SaveError, match=re.escape(text)):
        _save(tmp_path / "step-1")
    assert names(tmp_path) == [".step-1.reserved", ".step-1.tmp-0123456789abcdef"]
    assert json.loads((reserved / "owner.json").read_text()) == owner
    # What the message says to do helps.
    (reserved / "owner.json").unlink()
    reserved.rmdir()
    _save(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


RACE = """
import os, sys
from pathlib import Path
from packckpt import SaveError
from packckpt.reservation import reserve
print("ready", flush=True)
for line in sys.stdin:
    destination = Path(line.strip())
    try:
        held = reserve(destination)
    except SaveError:
        print("refused", flush=True)
        sys.stdin.readline()
    else:
        print("won", flush=True)
        sys.stdin.readline()
        held.release(keep_parents=False)
    print("done", flush=True)
"""


@pytest.mark.parametrize("dead_owner", [False, True])
def test_of_two_that_race_exactly_one_wins(tmp_path: Path, other: Callable[..., _Other], dead_owner: bool) -> None:
    racers = [other(RACE), other(RACE)]
    assert [racer.line() for racer in racers] == ["ready"] * 2
    winners = set()
    for number in range(60):
        destination = tmp_path / f"step-{number}"
        if dead_owner:
            reservation_of(destination).mkdir()
        order = racers if number % 2 else racers[::-1]
        for racer in order:
            racer.tell(str(destination))
        said = [racer.line() for racer in racers]
        assert sorted(said) == ["refused", "won"], number
        winners.add(said.index("won"))
        for racer in racers:
            racer.tell()
        assert [racer.line() for racer in racers] == ["done"] * 2
        assert names(tmp_path) == []
    assert winners == {0, 1}


FORK = """
import os, signal, sys
from pathlib import Path
from packckpt.reservation import reserve
held = reserve(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    # What a forked worker does must not touch its parent's reservation.
    held.release(keep_parents=False)
    os.write(1, b"forked\\n")
    signal.pause()
    os._exit(0)
os.write(1, f"{child}\\n".encode())  # at once, as the child does: the lines must not mix
sys.stdin.readline()
"""


def test_a_forked_child_neither_keeps_nor_ends_its_parents_reservation(
    tmp_path: Path, other: Callable[..., _Other]
) -> None:
    parent = other(FORK, tmp_path / "step-1")
    lines = {parent.line(), parent.line()}
    child = int((lines - {"forked"}).pop())
    try:
        with pytest.raises(SaveError, match=rf"reserved by process {parent.pid} .* alive"):
            reserve(tmp_path / "step-1")
        parent.process.kill()
        parent.process.wait()
        os.kill(child, 0)  # it outlives its parent
        reserve(tmp_path / "step-1").release(keep_parents=False)
        assert names(tmp_path) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_parents_are_kept_on_success_and_removed_on_failure(tmp_path: Path) -> None:
    destination = tmp_path / "a" / "b" / "step-1"
    exports, state, _ = build(SITES)
    saver = CheckpointSaver(durable=False)
    saver.prepare(destination, exports, state, CONFIG)
    saver.abort(destination)
    assert names(tmp_path) == []
    saver.save(destination, exports, state, CONFIG)
    assert names(tmp_path / "a" / "b") == ["step-1"]
    # Parents that were there before stay.
    (tmp_path / "kept").mkdir()
    saver.prepare(tmp_path / "kept" / "c" / "step-1", exports, state, CONFIG)
    saver.abort(tmp_path / "kept" / "c" / "step-1")
    assert names(tmp_path) == ["a", "kept"]
    assert names(tmp_path / "kept") == []
    # So do those in which somebody else put something.
    saver.prepare(tmp_path / "kept" / "c" / "step-1", exports, state, CONFIG)
    (tmp_path / "kept" / "c" / "notes").write_text("x")
    saver.abort(tmp_path / "kept" / "c" / "step-1")
    assert names(tmp_path / "kept" / "c") == ["notes"]


def test_parents_of_a_directory_that_cannot_be_made_are_removed(tmp_path: Path) -> None:
    exports, state, _ = build(SITES)
    with pytest.raises(OSError, match="File name too long"):
        CheckpointSaver().prepare(tmp_path / "a" / ("x" * 300) / "step-1", exports, state, CONFIG)
    assert names(tmp_path) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        CheckpointSaver().prepare(tmp_path / "file" / "a" / "step-1", exports, state, CONFIG)
    assert names(tmp_path) == ["file"]


def test_a_note_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(reservation.os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*\.step-1\.reserved/owner\.json'"):
            _save(tmp_path / "deep" / "step-1")
    assert names(tmp_path) == []
    _save(tmp_path / "deep" / "step-1")
    assert names(tmp_path / "deep") == ["step-1"]
