"""Prepare, finalize, abort: in order, once, from several threads, interrupted, on one process and on two ranks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import packckpt.saver as saver_module
from packckpt import CheckpointSaver, Export, SaveError, load_checkpoint, transfer, verify_checkpoint
from packckpt.plan import PATHS, BlockPlan, PathName
from packckpt.transfer import TransferLog
from packckpt.turns import Turns
from tests.processes import Failure, attempt, on_ranks
from tests.sharded import CONFIG, Site, assert_holds, build, names

SITES = [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1)), Site("a.layers.1.w", 5, (2, 2))]
TWO_RANKS = [
    [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1)), Site("a.layers.1.w", 5, (2, 2))],
    [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (2, 3, 4)), Site("a.layers.1.w", 5, (2, 2))],
]


class _One:
    """A saver on one process, and the same save again and again."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.saver = CheckpointSaver(durable=False, **options)

    def prepare(self, name: str, base: int = 10) -> TransferLog:
        exports, state, _ = build([Site("a.layers.0.experts.{expert}.w", base, (3, 2), (0, 1))])
        return self.saver.prepare(self.root / name, exports, state, CONFIG)

    def finalize(self, name: str) -> str:
        return self.saver.finalize(self.root / name)

    def abort(self, name: str) -> None:
        self.saver.abort(self.root / name)


@pytest.fixture
def one(tmp_path: Path) -> _One:
    return _One(tmp_path)


# -- order and idempotence, one process --------------------------------------------------------------------


def test_saves_end_in_the_order_in_which_they_were_prepared(one: _One, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        one.prepare(name)
    text = r"second: out of order; .*first was prepared before it and is neither finalized nor aborted: end that one"
    with pytest.raises(SaveError, match=text):
        one.finalize("second")
    with pytest.raises(SaveError, match=text.replace("second", "third")):
        one.abort("third")
    one.finalize("first")
    with pytest.raises(SaveError, match=r"third: out of order; .*second was"):
        one.finalize("third")
    one.abort("second")
    one.finalize("third")
    assert names(tmp_path) == ["first", "third"]


def test_finalizing_twice_returns_the_digest_again(one: _One, tmp_path: Path) -> None:
    one.prepare("first")
    digest = one.finalize("first")
    inode = os.stat(tmp_path / "first").st_ino
    one.prepare("second")
    assert one.finalize("first") == digest == verify_checkpoint(tmp_path / "first")
    assert os.stat(tmp_path / "first").st_ino == inode
    one.finalize("second")
    assert one.finalize("first") == digest


def test_aborting_what_is_not_prepared_does_nothing(one: _One, tmp_path: Path) -> None:
    one.abort("never")
    one.prepare("first")
    one.abort("never")
    one.abort("first")
    one.abort("first")
    assert names(tmp_path) == []
    one.prepare("second")
    digest = one.finalize("second")
    one.abort("second")
    assert names(tmp_path) == ["second"]
    assert one.finalize("second") == digest == verify_checkpoint(tmp_path / "second")


def test_finalizing_what_is_not_prepared_is_an_error(one: _One, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="never: was never prepared; call prepare first"):
        one.finalize("never")
    one.prepare("first")
    one.abort("first")
    with pytest.raises(SaveError, match="first: was aborted, or its finalize failed; prepare it again"):
        one.finalize("first")
    one.prepare("first")
    assert one.finalize("first") == verify_checkpoint(tmp_path / "first")


def test_what_is_prepared_cannot_be_prepared_again(one: _One, tmp_path: Path) -> None:
    one.prepare("first")
    before = names(tmp_path)
    with pytest.raises(SaveError, match="first: is prepared already; finalize or abort it before preparing it again"):
        one.prepare("first")
    # Under another spelling it is the same place.
    with pytest.raises(SaveError, match="is prepared already"):
        one.prepare("../" + tmp_path.name + "/./first")
    assert names(tmp_path) == before
    one.finalize("first")
    assert names(tmp_path) == ["first"]


def test_a_failed_finalize_counts_as_an_abort(one: _One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one.prepare("first")
    one.prepare("second")
    with monkeypatch.context() as patch:
        patch.setattr("packckpt.commit.rename_new", _raise(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            one.finalize("first")
    with pytest.raises(SaveError, match="first: was aborted, or its finalize failed"):
        one.finalize("first")
    one.abort("first")
    one.finalize("second")
    assert names(tmp_path) == ["second"]
    one.prepare("first")
    one.finalize("first")
    assert names(tmp_path) == ["first", "second"]


def test_closing_drops_what_is_prepared_and_the_saver_goes_on(one: _One, tmp_path: Path) -> None:
    with one.saver:
        one.prepare("kept")
        one.finalize("kept")
        one.prepare("first")
        one.prepare("second")
    assert names(tmp_path) == ["kept"]
    one.prepare("first")
    one.finalize("first")
    assert names(tmp_path) == ["first", "kept"]


def test_a_destination_stays_the_same_place_after_chdir(
    one: _One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    exports, state, _ = build(SITES)
    monkeypatch.chdir(tmp_path / "here")
    one.saver.prepare("step-1", exports, state, CONFIG)
    monkeypatch.chdir(tmp_path / "there")
    one.saver.finalize(tmp_path / "here" / "step-1")
    assert names(tmp_path / "here") == ["step-1"]
    assert names(tmp_path / "there") == []


def _raise(error: BaseException) -> Callable[..., Any]:
    def raising(*_: object, **__: object) -> Any:
        raise error

    return raising


# -- threads -----------------------------------------------------------------------------------------------


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    """With a plain lock, whoever lets go and asks again at once is quicker than who waits."""
    turns, order = Turns(), []
    asked = threading.Event()

    def wait() -> None:
        asked.set()
        with turns:
            order.append("waited")

    for _ in range(50):
        with turns:
            thread = threading.Thread(target=wait)
            thread.start()
            asked.wait()
            _until(lambda: len(turns._waiting) == 2)
        with turns:
            order.append("asked again")
        thread.join()
        asked.clear()
    assert order == ["waited", "asked again"] * 50


def test_who_is_interrupted_while_waiting_gives_up_its_turn() -> None:
    turns = Turns()
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            assert let_go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), turns:
        pytest.fail("it was not our turn")
    let_go.set()
    thread.join()
    with turns:
        assert len(turns._waiting) == 1
    assert not turns._waiting


def _until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class _SlowPath(transfer.CoalescedPath):
    """Captures slowly, the first time most."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self._seconds = seconds

    def capture(self, block: BlockPlan, log: TransferLog) -> dict[str, torch.Tensor]:
        time.sleep(next(self._seconds))
        return super().capture(block, log)


def test_concurrent_prepares_keep_their_order(one: _One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.chain([0.2], itertools.repeat(0.002))
    monkeypatch.setattr(saver_module, "path_named", lambda _: _SlowPath(seconds))
    order = [f"step-{number}" for number in range(12)]
    with ThreadPoolExecutor(len(order)) as threads:
        futures = []
        for position, name in enumerate(order):
            futures.append(threads.submit(one.prepare, name, 10 + position))
            _until(lambda at=position: len(one.saver._preparing._waiting) + len(one.saver._pending) > at)  # type: ignore[misc]
        for future in futures:
            future.result()
    assert [prepared.destination.name for prepared in one.saver._pending] == order
    for position, name in enumerate(order):
        one.finalize(name)
        assert_holds(tmp_path / name, [[Site("a.layers.0.experts.{expert}.w", 10 + position, (3, 2), (0, 1))]])


def test_finalize_goes_on_while_the_next_is_prepared(
    one: _One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepare does not wait for a slow finalize, nor finalize for a slow prepare."""
    inside, go_on = threading.Event(), threading.Event()
    write = saver_module.Commit.write

    def slow(self: Any, fetch: Any) -> str:
        inside.set()
        assert go_on.wait(10)
        return write(self, fetch)

    monkeypatch.setattr(saver_module.Commit, "write", slow)
    one.prepare("first")
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(one.finalize, "first")
        assert inside.wait(10)
        one.prepare("second")
        assert not future.done()
        go_on.set()
        future.result()
    one.finalize("second")
    assert names(tmp_path) == ["first", "second"]


# -- interrupted -------------------------------------------------------------------------------------------

INTERRUPTIONS = [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit, MemoryError, RuntimeError]


@contextmanager
def _failing_copy(number: int, error: BaseException, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise in the middle of the n-th copy to the host."""
    add, count = TransferLog.add_bytes, itertools.count(1)

    def failing(self: TransferLog, kind: Any, count_bytes: int) -> None:
        add(self, kind, count_bytes)
        if next(count) == number:
            raise error

    with patch.context() as context:
        context.setattr(TransferLog, "add_bytes", failing)
        yield


@pytest.mark.parametrize("kind", INTERRUPTIONS)
@pytest.mark.parametrize("copy", [1, 4, 7])
@pytest.mark.parametrize("path", PATHS)
def test_an_interrupted_copy_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: PathName, copy: int, kind: type[BaseException]
) -> None:
    exports, state, _ = build(SITES)
    saver = CheckpointSaver(path, durable=False)
    saver.prepare(tmp_path / "before", exports, state, CONFIG)
    left = names(tmp_path)
    error = kind("from the copy")
    with _failing_copy(copy, error, monkeypatch), pytest.raises(kind) as caught:
        saver.prepare(tmp_path / "new" / "step-1", exports, state, CONFIG)
    assert caught.value is error
    assert names(tmp_path) == left
    saver.prepare(tmp_path / "new" / "step-1", exports, state, CONFIG)
    saver.finalize(tmp_path / "before")
    saver.finalize(tmp_path / "new" / "step-1")
    assert_holds(tmp_path / "new" / "step-1", [SITES])
    assert names(tmp_path) == ["before", "new"]
    assert names(tmp_path / "new") == ["step-1"]


@pytest.mark.parametrize("kind", INTERRUPTIONS)
@pytest.mark.parametrize("where", ["mkdir", "new_digest", "manifest_bytes", "rename_new"])
def test_an_interrupted_finalize_leaves_nothing(
    one: _One, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
) -> None:
    one.prepare("first")
    one.prepare("second")
    error = kind("from the disk")
    with monkeypatch.context() as patch:
        patch.setattr(f"packckpt.commit.{'os.' if where == 'mkdir' else ''}{where}", _raise(error))
        with pytest.raises(kind) as caught:
            one.finalize("first")
    assert caught.value is error
    one.finalize("second")
    assert names(tmp_path) == ["second"]


class _Interrupting(torch.Tensor):
    """A parameter whose read raises, as a hook in somebody's tensor subclass may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            raise KeyboardInterrupt("from the tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_interruption_from_a_tensor_travels_unchanged(one: _One, tmp_path: Path) -> None:
    parameter = torch.arange(6.0).reshape(3, 2).as_subclass(_Interrupting)
    with pytest.raises(KeyboardInterrupt, match="from the tensor"):
        one.saver.prepare(tmp_path / "step-1", [Export("w", parameter)], None, CONFIG)
    assert names(tmp_path) == []
    one.prepare("step-1")
    one.finalize("step-1")
    assert names(tmp_path) == ["step-1"]


# -- two ranks ---------------------------------------------------------------------------------------------


def _order_on_two(rank: int, root: Path) -> dict[str, Any]:
    exports, state, _ = build(TWO_RANKS[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=30)
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        saver.prepare(root / name, exports, state, CONFIG)
    found["out of order"] = attempt(lambda: saver.finalize(root / "second"))
    found["prepared twice"] = attempt(lambda: saver.prepare(root / "first", exports, state, CONFIG))
    found["digest"] = saver.finalize(root / "first")
    found["digest again"] = saver.finalize(root / "first")
    saver.abort(root / "second")
    saver.abort(root / "second")
    saver.abort(root / "never")
    found["finalize aborted"] = attempt(lambda: saver.finalize(root / "second"))
    found["finalize never"] = attempt(lambda: saver.finalize(root / "never"))
    # Prepared again, it can be finalized; what is there already is success for all.
    found["same"] = saver.save(root / "first", exports, state, CONFIG)
    found["left"] = names(root)
    other = [Export("another", torch.ones(2, 2))] if rank == 0 else []
    saver.prepare(root / "first", other, None, CONFIG)
    found["another"] = attempt(lambda: saver.finalize(root / "first"))
    found["third"] = saver.save(root / "third", exports, state, CONFIG)
    return found


def test_order_and_idempotence_on_two_ranks(tmp_path: Path) -> None:
    texts = {
        "out of order": "second: out of order",
        "prepared twice": "first: is prepared already",
        "finalize aborted": "second: was aborted",
        "finalize never": "never: was never prepared",
        "another": "is in the way, this save has",
    }
    by_rank = on_ranks(2, _order_on_two, tmp_path)
    digest = verify_checkpoint(tmp_path / "first")
    for found in by_rank:
        assert {found[name] for name in ("digest", "digest again", "same", "third")} == {digest}
        for name, text in texts.items():
            assert isinstance(found[name], Failure), name
            assert text in found[name].text, name
    assert by_rank[0]["left"] == ["first"]
    assert names(tmp_path) == ["first", "third"]
    assert_holds(tmp_path / "third", TWO_RANKS)


ROUNDS = 25


def _interleaved(rank: int, root: Path) -> list[str]:
    """Finalize on a thread while the trainer trains and prepares; every save has values of its own."""
    exports, state, read = build(TWO_RANKS[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=30)
    with ThreadPoolExecutor(1) as thread:
        futures = []
        for number in range(ROUNDS):
            destination = root / f"step-{number}"
            saver.prepare(destination, exports, state, CONFIG)
            with torch.no_grad():
                for tensor in read:
                    tensor += 1000.0 if tensor.dim() else 1.0
            if number % 7 == 5:
                futures.append(thread.submit(lambda d=destination: saver.abort(d) or "aborted"))
            else:
                futures.append(thread.submit(saver.finalize, destination))
        return [future.result() for future in futures]


def test_finalize_on_a_thread_while_the_next_is_prepared(tmp_path: Path) -> None:
    digests = on_ranks(2, _interleaved, tmp_path)
    assert digests[0] == digests[1]
    kept = [number for number in range(ROUNDS) if number % 7 != 5]
    assert names(tmp_path) == sorted(f"step-{number}" for number in kept)
    for number in kept:
        destination = tmp_path / f"step-{number}"
        assert verify_checkpoint(destination) == digests[0][number]
        moved = [
            [Site(s.name, s.base + number, s.shape, s.experts, step=7 + number) for s in sites] for sites in TWO_RANKS
        ]
        assert_holds(destination, moved)


def _threads_on_two(rank: int, root: Path) -> list[str]:
    """Prepare from several threads, in one order on both ranks; rank 1 is slow."""
    exports, state, _ = build(TWO_RANKS[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=30)
    seconds = itertools.chain([0.1 + 0.1 * rank], itertools.repeat(0.005 * rank))
    saver_module.path_named, before = (lambda _: _SlowPath(seconds)), saver_module.path_named  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(6) as threads:
            futures = []
            for number in range(6):
                futures.append(threads.submit(saver.prepare, root / f"step-{number}", exports, state, CONFIG))
                _until(lambda at=number: len(saver._preparing._waiting) + len(saver._pending) > at)  # type: ignore[misc]
            for future in futures:
                future.result()
    finally:
        saver_module.path_named = before
    order = [prepared.destination.name for prepared in saver._pending]
    for name in order:
        saver.finalize(root / name)
    return order


def test_concurrent_prepares_on_two_ranks(tmp_path: Path) -> None:
    expected = [f"step-{number}" for number in range(6)]
    assert on_ranks(2, _threads_on_two, tmp_path) == [expected, expected]
    assert names(tmp_path) == expected
    assert_holds(tmp_path / "step-5", TWO_RANKS)


# -- a real Ctrl-C -----------------------------------------------------------------------------------------


def _interrupted(rank: int, root: Path, victim: int, phase: str) -> dict[str, Any]:
    """Deliver SIGINT to one rank while it waits for the other, which is slow in that phase."""
    exports, state, _ = build(TWO_RANKS[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=20)
    saver.save(root / "before", exports, state, CONFIG)
    started = time.monotonic()
    if rank == victim:
        timer = threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
    slow = _SlowPhase(phase) if rank != victim else _SlowPhase("")
    with slow:
        found = attempt(lambda: saver.prepare(root / "step-1", exports, state, CONFIG))
        if not isinstance(found, Failure):
            found = attempt(lambda: saver.finalize(root / "step-1"))
    seconds = time.monotonic() - started
    ended = attempt(lambda: saver.abort(root / "step-1"))
    return {
        "found": found,
        "seconds": seconds,
        "abort": ended,
        "next": saver.save(root / "next", exports, state, CONFIG),
        "exists": (root / "step-1").exists(),
    }


class _SlowPhase:
    """Sleeps once in a phase of the save, so that the other rank waits in an exchange."""

    PLACES: ClassVar = {
        "look": "plan_transfers",
        "write": "path_named",
        "commit": "Commit",
        "end": "_expect_one_end",
    }

    def __init__(self, phase: str) -> None:
        self._name = self.PLACES.get(phase)

    def __enter__(self) -> None:
        if self._name is None:
            return
        self._before = getattr(saver_module, self._name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.6)
            return self._before(*args, **kwargs)

        setattr(saver_module, self._name, slow)

    def __exit__(self, *_: object) -> None:
        if self._name is not None:
            setattr(saver_module, self._name, self._before)


@pytest.mark.parametrize(
    ("victim", "phase"),
    [(0, "look"), (1, "look"), (0, "write"), (1, "write"), (1, "commit"), (1, "end")],
)
def test_a_real_ctrl_c_in_an_exchange_leaves_the_ranks_in_step(tmp_path: Path, victim: int, phase: str) -> None:
    by_rank = on_ranks(2, _interrupted, tmp_path, victim, phase, timeout_seconds=60)
    hit, other = by_rank[victim]["found"], by_rank[1 - victim]["found"]
    assert isinstance(hit, Failure)
    assert hit.kind == "KeyboardInterrupt"
    if phase in ("look", "write"):
        # In prepare, nobody has the save.
        assert isinstance(other, Failure)
        assert other.kind == "RankError"
        assert other.ranks == (victim,)
        assert re.search(rf"rank {victim}: KeyboardInterrupt", other.text)
        assert not by_rank[0]["exists"]
    else:
        # Rank 1 only waits for the verdict: the save was committed, and rank 1 raises once it is.
        assert other == verify_checkpoint(tmp_path / "step-1")
    assert max(found["seconds"] for found in by_rank) < 10
    assert [found["abort"] for found in by_rank] == [None, None]
    assert len({found["next"] for found in by_rank}) == 1
    assert_holds(tmp_path / "next", TWO_RANKS)
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


# -- the trainer's group -----------------------------------------------------------------------------------


class _Refusing(dist.ProcessGroup):
    """The trainer's group: whoever sends anything over it is found out."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise AssertionError("the trainer's own group was used")

    allgather = allgather_into_tensor_coalesced = allreduce = allreduce_coalesced = _refuse
    alltoall = alltoall_base = barrier = broadcast = gather = reduce = _refuse
    reduce_scatter = scatter = send = recv = recv_anysource = _allgather_base = _reduce_scatter_base = _refuse

    def getBackendName(self) -> str:
        return "refusing"


def _make_refusing(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return _Refusing(rank, size)


def _with_a_refusing_group(rank: int, root: Path, given: bool) -> tuple[str, Any]:
    if not hasattr(dist.Backend, "REFUSING"):
        dist.Backend.register_backend("refusing", _make_refusing, devices=["cpu"])
    store = dist.FileStore(str(root / f".meeting-{given}"), 2)
    dist.init_process_group("refusing", store=store, rank=rank, world_size=2)
    refused = attempt(lambda: dist.barrier())
    exports, state, _ = build(TWO_RANKS[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=20, group=dist.group.WORLD if given else None)
    saver.prepare(root / "step-1", exports, state, CONFIG)
    saver.finalize(root / "step-1")
    saver.prepare(root / "aborted", exports, state, CONFIG)
    saver.abort(root / "aborted")
    saver.close()
    return saver.save(root / "step-2", exports, state, CONFIG), refused


@pytest.mark.parametrize("given", [False, True])
def test_the_trainers_own_group_is_never_used(tmp_path: Path, given: bool) -> None:
    for digest, refused in on_ranks(2, _with_a_refusing_group, tmp_path, given, group=False):
        assert digest == verify_checkpoint(tmp_path / "step-2")
        assert isinstance(refused, Failure)
        assert refused.text == "the trainer's own group was used"
    assert_holds(tmp_path / "step-1", TWO_RANKS)


def _subgroup(rank: int, root: Path) -> str:
    """Ranks 2 and 0 save, rank 1 does not; members are in order of their global ranks."""
    group = dist.new_group([0, 2])
    if rank == 1:
        outside = attempt(lambda: CheckpointSaver(group=group).save(root / "x", [], None, CONFIG))
        return outside.text
    exports, state, _ = build(TWO_RANKS[rank // 2])
    saver = CheckpointSaver(durable=False, timeout_seconds=20, group=group)
    return saver.save(root / "step-1", exports, state, CONFIG)


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    first, outside, third = on_ranks(3, _subgroup, tmp_path)
    assert first == third == verify_checkpoint(tmp_path / "step-1")
    assert_holds(tmp_path / "step-1", TWO_RANKS)
    assert names(tmp_path) == ["step-1"]
    assert outside


# -- many saves --------------------------------------------------------------------------------------------


def _resources() -> tuple[int, int]:
    """Open files and threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SAVES = 200


def _many_saves(rank: int, root: Path, sites: list[list[Site]], saves: int) -> dict[str, Any]:
    exports, state, _ = build(sites[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=30)
    for number in range(10):  # whatever is made once is made now
        saver.save(root / f"warm-{number}", exports, state, CONFIG)
    before, resident = _resources(), _resident_bytes()
    for number in range(saves):
        saver.prepare(root / f"step-{number}", exports, state, CONFIG)
        if number % 10 == 3:
            saver.abort(root / f"step-{number}")
        else:
            saver.finalize(root / f"step-{number}")
    return {"before": before, "after": _resources(), "grown": _resident_bytes() - resident}


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_saves_leak_nothing(tmp_path: Path, ranks: int) -> None:
    # A save holds 640 KiB on a rank: were one in four kept, memory would grow by more than 8 MiB.
    wide = [
        Site("a.layers.0.experts.{expert}.w", 1, (64, 128), tuple(range(4 * rank, 4 * rank + 4)), moments=())
        for rank in range(2)
    ]
    sites = [[site, Site("a.layers.1.w", 500, (64, 128))] for site in wide]
    saves = SAVES if ranks == 1 else 60
    for found in on_ranks(ranks, _many_saves, tmp_path, sites, saves):
        # Fewer is fine: the sockets of an earlier group go when they go.
        assert found["after"][0] <= found["before"][0]
        assert found["after"][1] <= found["before"][1]
        assert found["grown"] < 8 << 20, found["grown"]
    kept = [f"step-{number}" for number in range(saves) if number % 10 != 3]
    assert names(tmp_path) == sorted([*kept, *(f"warm-{number}" for number in range(10))])
    assert_holds(tmp_path / kept[-1], sites[:ranks])
    with load_checkpoint(tmp_path / kept[0]) as checkpoint:
        assert len(checkpoint.keys) == 1 + 4 * ranks
