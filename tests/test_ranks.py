"""The conversation among ranks: verdicts, failures, silence, interruptions, and what ranks must agree on."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from packckpt import CheckpointSaver, SaveError, Shard
from packckpt.ranks import describe, open_ranks, uninterrupted
from packckpt.tensorfile import tensor_bytes
from tests.processes import Failure, attempt, on_ranks, outcomes_on_ranks
from tests.sharded import CONFIG, Site, assert_holds, build, names

# -- one rank ----------------------------------------------------------------------------------------------


def test_one_rank_needs_no_group() -> None:
    (ranks,) = open_ranks(None, 5, 1)
    assert (ranks.rank, ranks.size, ranks.is_coordinator) == (0, 1, True)
    assert ranks.settle("x", lambda: {"a": 1}, lambda messages: {"got": messages}) == {"got": [{"a": 1}]}
    error = KeyboardInterrupt()

    def fail() -> dict[str, Any]:
        raise error

    with pytest.raises(KeyboardInterrupt) as caught:
        ranks.settle("x", fail)
    assert caught.value is error
    with pytest.raises(SaveError, match=r"^not so$"):
        ranks.settle("x", dict, lambda messages: _refuse("not so"))


def _refuse(text: str) -> dict[str, Any]:
    raise SaveError(text)


def test_describe() -> None:
    assert describe(ValueError("a b")) == "ValueError: a b"
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


# -- work that nothing cuts short --------------------------------------------------------------------------


def test_uninterrupted_returns_and_raises_what_the_work_did() -> None:
    outcome, interruption = uninterrupted(lambda: threading.current_thread().name)
    assert outcome() == "packckpt-exchange"
    assert interruption is None

    error = SaveError("no")

    def fail() -> None:
        raise error

    outcome, interruption = uninterrupted(fail)
    with pytest.raises(SaveError) as caught:
        outcome()
    assert caught.value is error
    assert interruption is None


def test_a_signal_waits_until_the_work_is_done() -> None:
    ran: list[int] = []

    def work() -> int:
        ran.append(1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return 7

    outcome, interruption = uninterrupted(work)
    assert isinstance(interruption, KeyboardInterrupt)
    assert outcome() == 7
    assert ran == [1]


class _Struck(BaseException):
    """What the signal handler below raises."""


def _strike(_: int, frame: FrameType | None) -> None:
    """Raise in whatever `uninterrupted` calls on this thread: the start of a thread, or the wait for it."""
    if frame is None or frame.f_code is uninterrupted.__code__:
        return
    while frame is not None:
        if frame.f_code is uninterrupted.__code__:
            raise _Struck
        frame = frame.f_back


def test_a_signal_at_any_moment_runs_the_work_once() -> None:
    """Signals also fall into the start of the thread, of which nobody can say whether it happened."""
    before = signal.signal(signal.SIGUSR2, _strike)
    interrupted = 0
    try:
        for number in range(300):
            ran: list[int] = []
            timer = threading.Timer(0.00001 * (number % 30), os.kill, (os.getpid(), signal.SIGUSR2))
            timer.start()
            outcome, interruption = uninterrupted(lambda ran=ran: ran.append(1) or time.sleep(0.0005) or len(ran))  # type: ignore[misc]
            timer.join()
            interrupted += interruption is not None
            assert outcome() == 1
            assert ran == [1]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert interrupted > 30


# -- conversations of real processes -----------------------------------------------------------------------


def _conversation(rank: int) -> dict[str, Any]:
    ranks, other = open_ranks(None, 20, 2)
    found: dict[str, Any] = {"place": (ranks.rank, ranks.size)}
    judged = ranks.settle("sum", lambda: {"n": 10 + rank}, lambda ms: {"sum": sum(m["n"] for m in ms), "of": len(ms)})
    found["judged"] = judged
    # Two conversations at a time do not mix.
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(other.settle("o", lambda: {"o": rank}, lambda ms: {"o": ms}) for _ in range(20))
    )
    thread.start()
    found["these"] = [ranks.settle("t", lambda: {"t": rank}, lambda ms: {"t": ms}) for _ in range(20)]
    thread.join()
    found["others"] = results
    found["refused"] = attempt(lambda: ranks.settle("x", dict, lambda ms: _refuse("judged wrong")))
    found["broken judge"] = attempt(lambda: ranks.settle("judge it", dict, lambda ms: {"a": ms[5]}))

    def fail_on(*who: int) -> Callable[[], dict[str, Any]]:
        return lambda: {} if rank not in who else (_ for _ in ()).throw(ValueError(f"bad {rank}"))

    found["one fails"] = attempt(lambda: ranks.settle("work", fail_on(1)))
    found["two fail"] = attempt(lambda: ranks.settle("work", fail_on(0, 2)))
    found["after"] = ranks.settle("x", dict, lambda ms: {"ok": len(ms)})
    text = {"ä": "\u2603" * 3, "long": "x" * 200_000}
    found["long"] = ranks.settle("x", lambda: text, lambda ms: ms[-1]) == text
    return found


def test_three_ranks_agree_and_fail_together() -> None:
    by_rank = on_ranks(3, _conversation)
    for rank, found in enumerate(by_rank):
        assert found["place"] == (rank, 3)
        assert found["judged"] == {"sum": 33, "of": 3}
        assert found["these"] == [{"t": [{"t": 0}, {"t": 1}, {"t": 2}]}] * 20
        assert found["others"] == [{"o": [{"o": 0}, {"o": 1}, {"o": 2}]}] * 20
        assert (found["refused"].kind, found["refused"].text) == ("SaveError", "judged wrong")
        assert found["broken judge"].kind == "SaveError"
        assert found["broken judge"].text.startswith("judge it: IndexError: ")
        for name, ranks in (("one fails", (1,)), ("two fail", (0, 2))):
            failure = found[name]
            if rank in ranks:
                assert (failure.kind, failure.text) == ("ValueError", f"bad {rank}")
            else:
                assert (failure.kind, failure.ranks) == ("RankError", ranks)
                assert failure.text == "work: " + "; ".join(f"rank {r}: ValueError: bad {r}" for r in ranks)
        assert found["after"] == {"ok": 3}
        assert found["long"]


def _fetching(rank: int) -> Any:
    """Rank 0 fetches; the pieces are small, and the sizes odd, none or more than one piece."""
    from packckpt import ranks as module

    module._PIECE_BYTES, before = 1000, module._PIECE_BYTES
    try:
        (ranks,) = open_ranks(None, 20, 1)
        held = {"a": torch.arange(0), "b": torch.arange(3, dtype=torch.int8), "c": torch.arange(999.0) + rank}

        def read(component: str, keys: Any) -> list[memoryview]:
            if component == "broken":
                raise OSError(5, "Input/output error", f"file-{rank}")
            return [tensor_bytes(held[key]) for key in keys]

        if rank:
            return attempt(lambda: ranks.serve(read)), ranks.settle("x", dict)
        found: list[Any] = [
            bytes(ranks.fetch(who, "lora", keys)) == b"".join(bytes(p) for p in read("lora", keys)) or who
            for who, keys in ((1, "a"), (1, "ab"), (2, "b"), (1, "b"))
        ]
        values = torch.frombuffer(bytearray(ranks.fetch(2, "lora", "abc"))[3:], dtype=torch.float32)
        found.append(torch.equal(values, torch.arange(999.0) + 2))
        found.append(attempt(lambda: ranks.fetch(1, "broken", "a")))
        ranks.dismiss({"value": {"done": 7}})
        return found, ranks.settle("x", dict)
    finally:
        module._PIECE_BYTES = before


def test_fetching_tensors() -> None:
    (found, after), *others = on_ranks(3, _fetching)
    assert found[:5] == [True] * 5
    assert (found[5].kind, found[5].ranks) == ("RankError", (1,))
    assert found[5].text == "finalize: rank 1: OSError: [Errno 5] Input/output error: 'file-1'"
    assert after == {}
    # Rank 1 raises what it raised while it read; rank 2 has the verdict.
    assert others[1] == ({"done": 7}, {})


def _reader_fails(rank: int) -> Any:
    (ranks,) = open_ranks(None, 20, 1)
    if rank == 0:
        failure = attempt(lambda: ranks.fetch(1, "lora", ["a"]))
        ranks.dismiss({"error": "given up", "ranks": [1]})
    else:
        failure = attempt(lambda: ranks.serve(_fail_to_read))
    return failure, ranks.settle("x", dict, lambda ms: {"ranks": len(ms)})


def _fail_to_read(component: str, keys: Any) -> list[memoryview]:
    raise ZeroDivisionError(component)


def test_a_reader_that_fails_tells_everybody_and_stays_in_step() -> None:
    by_rank = on_ranks(3, _reader_fails)
    assert [failure.kind for failure, _ in by_rank] == ["RankError", "ZeroDivisionError", "RankError"]
    assert by_rank[0][0].text == "finalize: rank 1: ZeroDivisionError: lora"
    assert (by_rank[2][0].text, by_rank[2][0].ranks) == ("given up", (1,))
    assert [after for _, after in by_rank] == [{"ranks": 3}] * 3


# -- silence -----------------------------------------------------------------------------------------------


def _silent(rank: int, who: int, seconds: float) -> Any:
    (ranks,) = open_ranks(None, seconds, 1)
    ranks.settle("before", dict)
    if rank == who:
        time.sleep(seconds * 1.5)
        return "woke up"
    started = time.monotonic()
    first = attempt(lambda: ranks.settle("work", dict))
    took = time.monotonic() - started
    started = time.monotonic()
    second = attempt(lambda: ranks.settle("more work", dict))
    return first, took, second, time.monotonic() - started


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_silent_rank_is_named_to_all_in_time(who: int) -> None:
    seconds = 2.5
    by_rank = on_ranks(3, _silent, who, seconds)
    assert by_rank[who] == "woke up"
    for rank, found in enumerate(by_rank):
        if rank == who:
            continue
        first, took, second, second_took = found
        assert (first.kind, first.ranks) == ("RankError", (who,))
        assert re.match(rf"work: rank {who} did not answer within \d s, or is gone \(", first.text)
        assert took < seconds + 1
        assert (second.kind, second.ranks) == ("RankError", (who,))
        assert "contact was lost earlier" in second.text
        assert "make a new CheckpointSaver on a group of live ranks" in second.text
        assert second_took < 0.5


def _gone(rank: int, who: int) -> Any:
    (ranks,) = open_ranks(None, 20, 1)
    ranks.settle("before", dict)
    if rank == who:
        os._exit(7)
    started = time.monotonic()
    return attempt(lambda: ranks.settle("work", dict)), time.monotonic() - started


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_gone_is_named_at_once(who: int) -> None:
    outcomes = outcomes_on_ranks(3, _gone, who)
    assert outcomes[who].exit_status == 7
    for rank in {0, 1, 2} - {who}:
        failure, seconds = outcomes[rank].value
        assert (failure.kind, failure.ranks) == ("RankError", (who,))
        assert f"work: rank {who} did not answer" in failure.text
        assert seconds < 10


def _never_came(rank: int) -> Any:
    if rank == 1:
        time.sleep(4)
        return None
    started = time.monotonic()
    return attempt(lambda: open_ranks(None, 2, 2)), time.monotonic() - started


def test_a_rank_that_never_connects_is_named() -> None:
    by_rank = on_ranks(3, _never_came)
    for rank in (0, 2):
        failure, seconds = by_rank[rank]
        assert (failure.kind, failure.ranks) == ("RankError", (1,))
        assert re.match(r"prepare: no connection to ranks \[1\] within 2 s", failure.text)
        assert seconds < 4


def _interrupted_twice(rank: int) -> Any:
    """Rank 1 is interrupted while it waits in an exchange; the next exchange tells."""
    (ranks,) = open_ranks(None, 20, 1)

    def slow() -> dict[str, Any]:
        time.sleep(0.4 if rank == 0 else 0)
        return {}

    if rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    first = ranks.settle("first", slow, lambda ms: {"ok": True})
    second = attempt(lambda: ranks.settle("second", dict))
    third = ranks.settle("third", dict, lambda ms: {"ok": True})
    return first, second, third


def test_an_interruption_of_an_exchange_is_told_in_the_next() -> None:
    by_rank = on_ranks(2, _interrupted_twice)
    assert [(first, third) for first, _, third in by_rank] == [({"ok": True}, {"ok": True})] * 2
    assert by_rank[1][1].kind == "KeyboardInterrupt"
    assert (by_rank[0][1].kind, by_rank[0][1].ranks) == ("RankError", (1,))
    assert by_rank[0][1].text == "second: rank 1: KeyboardInterrupt"


# -- opening and closing -----------------------------------------------------------------------------------


def _opened_again(rank: int, root: Path) -> list[str]:
    """Close and use again; savers closed on one rank only; the trainer's groups differ in number."""
    exports, state, _ = build(SITES[rank])
    digests = []
    first = CheckpointSaver(durable=False, timeout_seconds=15)
    for number in range(3):
        digests.append(first.save(root / f"again-{number}", exports, state, CONFIG))
        first.close()
    second, third = (CheckpointSaver(durable=False, timeout_seconds=15) for _ in range(2))
    digests.append(second.save(root / "second", exports, state, CONFIG))
    if rank == 0:
        second.close()
        dist.new_group([0], use_local_synchronization=True)
    digests.append(third.save(root / "third", exports, state, CONFIG))
    return digests


SITES = [
    [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (0, 1)), Site("a.layers.1.w", 5, (2, 2))],
    [Site("a.layers.0.experts.{expert}.w", 10, (3, 2), (2, 3)), Site("a.layers.1.w", 5, (2, 2))],
]


def test_a_saver_connects_again(tmp_path: Path) -> None:
    digests = on_ranks(2, _opened_again, tmp_path)
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 1
    assert names(tmp_path) == ["again-0", "again-1", "again-2", "second", "third"]


def _world_of_one(rank: int) -> Any:
    ranks, other = open_ranks(None, 5, 2)
    return ranks.size, other.size, ranks.settle("x", lambda: {"a": 1}, lambda ms: {"got": len(ms)})


def test_a_group_of_one_rank() -> None:
    assert on_ranks(1, _world_of_one) == [(1, 1, {"got": 1})]


# -- what the ranks of a save must agree on ----------------------------------------------------------------

DENSE = "a.layers.1.w"


def _plain(rank: int) -> dict[str, Any]:
    return {"sites": SITES[rank], "config": CONFIG, "name": "step-1", "optimizer": True, "lr": 1e-3, "extra": 0}


def _shard(rank: int, size: int, dim: int = 0, shape: tuple[int, int] = (4, 2), **rest: Any) -> list[Site]:
    return [Site(DENSE, 3, shape, shard=Shard(rank, size, dim, rest.pop("sizes", None)), **rest)]


# What each rank does otherwise than `_plain`, and what is said of it on every rank.
DISAGREEMENTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "destination": (
        [{}, {"name": "step-2"}],
        r"ranks 0 and 1 disagree on the destination: '.*step-1' and '.*step-2'; expected one value on every rank",
    ),
    "configuration": (
        [{}, {"config": {**CONFIG, "r": 3}}],
        r"ranks 0 and 1 disagree on the config: .*'r': 2.* and .*'r': 3",
    ),
    "hyper-parameters": (
        [{}, {"lr": 2e-3}],
        r"ranks 0 and 1 disagree on the optimizer hyper-parameters: .*0\.001.* and .*0\.002",
    ),
    "with and without an optimizer": (
        [{}, {"optimizer": False}],
        r"ranks 0 and 1 disagree on the optimizer hyper-parameters: .* and None",
    ),
    "running number": (
        [{}, {"extra": 1}],
        r"ranks 0 and 1 disagree on the running number of the save: 1 and 2; expected one value on every rank",
    ),
    "a shard is missing": (
        [{"sites": _shard(0, 2)}, {"sites": _shard(0, 2)}],
        r"a\.layers\.1\.w: found shards \[0\] of 2; no rank exports shard 1",
    ),
    "shards of two layouts": (
        [{"sites": _shard(0, 2)}, {"sites": _shard(1, 2, 1)}],
        r"a\.layers\.1\.w: ranks 0 and 1 export it with different shards: \(2, 0, None\) and \(2, 1, None\)",
    ),
    "shards of two component sizes": (
        [{"sites": _shard(0, 2, sizes=(2, 2))}, {"sites": _shard(1, 2)}],
        r"a\.layers\.1\.w: ranks 0 and 1 export it with different shards",
    ),
    "whole here, a shard there": (
        [{"sites": [Site(DENSE, 3, (4, 2))]}, {"sites": _shard(1, 2)}],
        r"a\.layers\.1\.w: ranks 0 and 1 export it with different shards: None and",
    ),
    "steps": (
        [{"sites": _shard(0, 2)}, {"sites": _shard(1, 2, step=8)}],
        r"a\.layers\.1\.w: its shards have different steps \(rank 0: 7, rank 1: 8\)",
    ),
    "dtypes": (
        [{"sites": _shard(0, 2)}, {"sites": _shard(1, 2, dtype=torch.bfloat16)}],
        r"a\.layers\.1\.w: ranks 0 and 1 export it with different dtype: torch\.float32 and torch\.bfloat16",
    ),
    "sizes across the shard axis": (
        [{"sites": _shard(0, 2)}, {"sites": _shard(1, 2, shape=(4, 3))}],
        r"a\.layers\.1\.w: ranks 0 and 1 export it with different size across the shard axis: 2 and 3",
    ),
    "copies of two shapes": (
        [{"sites": [Site(DENSE, 3, (4, 2))]}, {"sites": [Site(DENSE, 3, (2, 2))]}],
        r"a\.layers\.1\.w: ranks 0 and 1 export it with different size",
    ),
    "nothing to save": ([{"sites": []}, {"sites": []}], "no rank exports anything; there is nothing to save"),
}


def _disagreeing(rank: int, root: Path) -> dict[str, tuple[Any, list[str]]]:
    found = {}
    for case, (changes, _) in DISAGREEMENTS.items():
        with CheckpointSaver(durable=False, timeout_seconds=15) as saver:
            what = {**_plain(rank), **changes[rank]}
            exports, state, _ = build(what["sites"])
            for group in state.optimizer.param_groups:
                group["lr"] = what["lr"]
            saver._number += what["extra"]
            failure = attempt(
                lambda saver=saver, what=what, exports=exports, state=state: saver.prepare(  # type: ignore[misc]
                    root / what["name"], exports, state if what["optimizer"] else None, what["config"]
                )
            )
            left = names(root)
            # The next save on the same saver works.
            saver._number = 0
            exports, state, _ = build(SITES[rank])
            saver.prepare(root / "step-1", exports, state, CONFIG)
            saver.abort(root / "step-1")
            found[case] = (failure, left)
    return found


def test_any_disagreement_is_an_error_on_every_rank(tmp_path: Path) -> None:
    by_rank = on_ranks(2, _disagreeing, tmp_path)
    for case, (_, text) in DISAGREEMENTS.items():
        for found in by_rank:
            failure, left = found[case]
            assert isinstance(failure, Failure), case
            assert failure.kind == SaveError.__name__, case
            assert re.search(text, failure.text), (case, failure.text)
            assert left == [], case


def _ending_apart(rank: int, root: Path, who_aborts: int) -> tuple[Any, Any, str]:
    exports, state, _ = build(SITES[rank])
    saver = CheckpointSaver(durable=False, timeout_seconds=15)
    saver.prepare(root / "step-1", exports, state, CONFIG)
    end = saver.abort if rank == who_aborts else saver.finalize
    ended = attempt(lambda: end(root / "step-1"))
    again = attempt(lambda: saver.finalize(root / "step-1"))
    return ended, again, saver.save(root / "step-2", exports, state, CONFIG)


@pytest.mark.parametrize("who_aborts", [0, 1])
def test_one_rank_finalizes_while_another_aborts(tmp_path: Path, who_aborts: int) -> None:
    by_rank = on_ranks(2, _ending_apart, tmp_path, who_aborts)
    for rank, (ended, again, _) in enumerate(by_rank):
        if rank == who_aborts:
            assert ended is None
        else:
            assert ended.kind == SaveError.__name__
            intents = ["finalize", "finalize"]
            intents[who_aborts] = "abort"
            told = "; ".join(f"rank {r}: {intent} .*step-1" for r, intent in enumerate(intents))
            assert re.search(rf"ranks disagree on how the save ends \({told}\); it is aborted on every", ended.text)
        assert "step-1: was aborted, or its finalize failed" in again.text
    assert names(tmp_path) == ["step-2"]
    assert_holds(tmp_path / "step-2", SITES)
