"""Talk to the other ranks: agree, fetch, raise everywhere.

Every exchange is a star: each rank sends to the coordinator (rank 0 of the group), which answers each. A rank
that is gone is then known by name, which a collective cannot tell, and a rank that failed still takes part in
the exchange, so that the next one finds everybody in step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from packckpt.errors import PackckptError, RankError, SaveError
from packckpt.tensorfile import host_bytes

T = TypeVar("T")
Message = dict[str, Any]
# The coordinator gives up on a silent rank first, so that its verdict still reaches those who wait for it.
_COORDINATOR_SHARE = 0.8
_PIECE_BYTES = 64 << 20


class Reader(Protocol):
    """Answers the coordinator's request for tensors: their bytes, one after another."""

    def __call__(self, component: str, keys: Sequence[str]) -> list[memoryview]:
        """Return the bytes of one component of the keys."""
        ...


class Group(Protocol):
    """What is used of a gloo process group; its type stub leaves these out."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Begin to send to a rank of the group."""
        ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Begin to receive from a rank of the group."""
        ...


class Ranks:
    """One conversation among the ranks of a save. Without a process group there is one rank.

    Args:
        process_group: gloo, of its own: nothing else talks over it. None for a single process.
        timeout_seconds: how long a rank waits for another.
        rank, size: this rank's place in the group.
    """

    def __init__(self, process_group: Group | None, timeout_seconds: float, rank: int = 0, size: int = 1) -> None:
        self._group = process_group
        self._timeout_seconds = timeout_seconds
        self._lost: dict[int, str] = {}
        self._interruption: BaseException | None = None
        self.rank = rank
        self.size = size

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank gathers, judges and writes."""
        return self.rank == 0

    def close(self) -> None:
        """Let the process group go; the conversation is over."""
        self._group = None

    @contextmanager
    def interruption_last(self) -> Iterator[None]:
        """Raise what interrupted an exchange when the block is left, in place of any other error.

        Every exchange in the block runs to its end, so that the ranks stay in step; the next one tells the
        others about the interruption.
        """
        try:
            yield
        finally:
            self.raise_interruption()

    def raise_interruption(self) -> None:
        """Raise what interrupted an earlier exchange, once."""
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption

    def settle(
        self,
        what: str,
        work: Callable[[], Message],
        judge: Callable[[list[Message]], Message] = lambda messages: {},
    ) -> Message:
        """Do a piece of work on every rank, and go on only where all succeeded and the coordinator agrees.

        Args:
            what: names the piece of work in errors.
            work: runs on every rank; returns what the coordinator needs to know, as JSON.
            judge: runs on the coordinator over all answers, by rank; returns what every rank gets back.

        Raises:
            RankError: another rank failed or is gone; names it.
            SaveError: the coordinator's judgement.
            BaseException: what `work` raised on this rank, or what interrupted the exchange before, unchanged.
        """
        self._expect_contact(what)
        error: BaseException | None = None
        message: Message
        try:
            self.raise_interruption()
            message = {"value": work()}
        except BaseException as caught:
            error = caught
            message = {"error": describe(caught)}
        try:
            verdict = self._run(lambda: self._exchange(what, message, judge))
        except PackckptError as lost:
            if error is None:
                raise
            error.add_note(f"{what}: {lost}")
            raise error from None
        if error is not None:
            self._lost.update(_lost_of(verdict))
            raise error
        return self._open(verdict)

    def serve(self, read: Reader) -> Message:
        """Answer the coordinator's requests until it ends them; return its verdict.

        Raises:
            RankError, SaveError: the coordinator's verdict, or it is gone.
            BaseException: what `read` raised on this rank, after the coordinator was told.
        """
        failure: list[BaseException] = []

        def answer_all() -> Message:
            while "component" in (request := self._receive(0, "finalize", self._timeout_seconds)):
                try:
                    parts = read(request["component"], request["keys"])
                    header: Message = {"bytes": sum(len(part) for part in parts)}
                except Exception as error:
                    failure.append(error)
                    parts, header = [], {"error": describe(error)}
                self._send(0, "finalize", header)
                self._send_parts(parts)
            return request

        verdict = self._run(answer_all)
        if failure:
            raise failure[0]
        return self._open(verdict)

    def fetch(self, rank: int, component: str, keys: Sequence[str]) -> memoryview:
        """Ask a rank for tensors, by the coordinator; return their bytes one after another.

        Memory: the tensors asked for.

        Raises:
            RankError: the rank could not read them, or is gone.
        """

        def ask() -> memoryview:
            self._send(rank, "finalize", {"component": component, "keys": list(keys)})
            header = self._receive(rank, "finalize", self._timeout_seconds * _COORDINATOR_SHARE)
            if "error" in header:
                raise RankError(f"finalize: rank {rank}: {header['error']}", [rank])
            data = torch.empty(int(header["bytes"]), dtype=torch.uint8)
            for piece in _pieces(data):
                self._receive_tensor(rank, "finalize", piece, self._timeout_seconds * _COORDINATOR_SHARE)
            return host_bytes(data)

        arrived = self._run(ask)
        self.raise_interruption()
        return arrived

    def dismiss(self, verdict: Message) -> None:
        """End the requests: send every other rank the verdict, by the coordinator. Never raises."""

        def send_all() -> None:
            for rank in set(range(1, self.size)) - set(self._lost):
                with suppress(PackckptError):  # it is gone; the error that is on its way says so
                    self._send(rank, "finalize", {**verdict, "lost": self._lost})

        self._run(send_all)

    def _run(self, exchange: Callable[[], T]) -> T:
        if self.size == 1:
            return exchange()
        result, interruption = uninterrupted(exchange)
        self._interruption = self._interruption or interruption
        return result()

    def _exchange(self, what: str, message: Message, judge: Callable[[list[Message]], Message]) -> Message:
        if not self.is_coordinator:
            self._send(0, what, message)
            return self._receive(0, what, self._timeout_seconds)
        messages, gone = self._collect(what, message)
        verdict = _judged(what, messages, gone, judge)
        for rank in range(1, self.size):
            if rank not in gone:
                # It answered and may have gone since: the others have their verdict, the next exchange tells.
                with suppress(PackckptError):
                    self._send(rank, what, verdict)
        return verdict

    def _collect(self, what: str, own: Message) -> tuple[dict[int, Message], dict[int, str]]:
        deadline = time.monotonic() + self._timeout_seconds * _COORDINATOR_SHARE
        messages, gone = {0: own}, {}
        for rank in range(1, self.size):
            try:
                # One silent rank uses up the time; the others have had as long, so a moment is enough for them.
                messages[rank] = self._receive(rank, what, max(deadline - time.monotonic(), 1.0))
            except PackckptError as error:
                gone[rank] = str(error)
        return messages, gone

    def _open(self, verdict: Message) -> Message:
        self._lost.update(_lost_of(verdict))
        if "error" not in verdict:
            value: Message = verdict.get("value", {})
            return value
        if verdict.get("ranks"):
            raise RankError(verdict["error"], verdict["ranks"])
        raise SaveError(verdict["error"])

    def _expect_contact(self, what: str) -> None:
        if self._lost:
            raise RankError(
                f"{what}: contact was lost earlier ({'; '.join(self._lost.values())}); make a new CheckpointSaver on "
                "a group of live ranks",
                list(self._lost),
            )

    def _send(self, rank: int, what: str, message: Message) -> None:
        data = bytearray(json.dumps(message).encode())
        self._send_tensor(rank, what, torch.tensor([len(data)], dtype=torch.int64))
        self._send_tensor(rank, what, torch.frombuffer(data, dtype=torch.uint8))

    def _send_parts(self, parts: Sequence[memoryview]) -> None:
        data = torch.empty(sum(len(part) for part in parts), dtype=torch.uint8)
        target, offset = host_bytes(data), 0
        for part in parts:
            target[offset : offset + len(part)] = part
            offset += len(part)
        for piece in _pieces(data):
            self._send_tensor(0, "finalize", piece)

    def _receive(self, rank: int, what: str, seconds: float) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_tensor(rank, what, length, seconds)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive_tensor(rank, what, data, seconds)
        message: Message = json.loads(data.numpy().tobytes())
        return message

    def _send_tensor(self, rank: int, what: str, tensor: torch.Tensor) -> None:
        with self._noticing(rank, what, self._timeout_seconds) as group:
            group.send([tensor], rank, 0).wait(timedelta(seconds=self._timeout_seconds))

    def _receive_tensor(self, rank: int, what: str, tensor: torch.Tensor, seconds: float) -> None:
        with self._noticing(rank, what, seconds) as group:
            work = group.recv([tensor], rank, 0)
            if self.is_coordinator:
                # When gloo gives up on one rank it hangs up on all, so there must be time to tell the others.
                _wait_beyond(work, seconds, max(self._timeout_seconds * (1 - _COORDINATOR_SHARE), 1.0))
            else:
                work.wait(timedelta(seconds=seconds))

    @contextmanager
    def _noticing(self, rank: int, what: str, seconds: float) -> Iterator[Group]:
        """Hand out the group; turn its error into one that names the rank, and remember it."""
        if self._group is None:
            raise SaveError(f"{what}: the saver was closed meanwhile")
        try:
            yield self._group
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            message = f"{what}: rank {rank} did not answer within {seconds:.0f} s, or is gone ({reason})"
            self._lost.setdefault(rank, message)
            raise RankError(message, [rank]) from None


def _pieces(data: torch.Tensor) -> Iterator[torch.Tensor]:
    return (data[start : start + _PIECE_BYTES] for start in range(0, data.numel(), _PIECE_BYTES))


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def uninterrupted(work: Callable[[], T]) -> tuple[Callable[[], T], BaseException | None]:
    """Run `work` to its end on a thread of its own, whatever interrupts the caller meanwhile.

    A Ctrl-C in the middle of an exchange would leave the ranks out of step for the rest of the run.

    Returns:
        a function that returns or raises what `work` did, and what interrupted the caller or None.
    """
    result: list[T] = []
    failure: list[BaseException] = []
    interruption: BaseException | None = None
    started, done = threading.Lock(), threading.Event()

    def run() -> None:
        if not started.acquire(blocking=False):
            return
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            done.set()

    def outcome() -> T:
        if failure:
            raise failure[0]
        return result[0]

    while not done.is_set():
        try:
            # Whether an interrupted start has started a thread is unknown: a second one finds the first and ends.
            threading.Thread(target=run, name="packckpt-exchange").start()
            done.wait()
        except BaseException as error:
            interruption = interruption or error
    return outcome, interruption


def _wait_beyond(work: dist.Work, seconds: float, grace_seconds: float) -> None:
    """Wait for a transfer, give up after `seconds`, and let gloo notice only after the grace.

    Raises:
        TimeoutError: time is up.
        RuntimeError: what gloo says.
    """
    failure: list[RuntimeError] = []
    done = threading.Event()

    def wait() -> None:
        try:
            work.wait(timedelta(seconds=seconds + grace_seconds))
        except RuntimeError as error:
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=wait, name="packckpt-wait", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError("timed out")
    if failure:
        raise failure[0]


def _lost_of(verdict: Message) -> dict[int, str]:
    # JSON has made the ranks text.
    return {int(rank): text for rank, text in verdict.get("lost", {}).items()}


def _judged(
    what: str,
    messages: dict[int, Message],
    gone: dict[int, str],
    judge: Callable[[list[Message]], Message],
) -> Message:
    failed = {rank: message["error"] for rank, message in messages.items() if "error" in message}
    if failed or gone:
        told = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
        text = "; ".join([*([f"{what}: {'; '.join(told)}"] if told else []), *gone.values()])
        return {"error": text, "ranks": sorted({*failed, *gone}), "lost": gone}
    try:
        return {"value": judge([messages[rank]["value"] for rank in sorted(messages)])}
    except PackckptError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{what}: {describe(error)}"}


def open_ranks(group: dist.ProcessGroup | None, timeout_seconds: float, conversations: int) -> list[Ranks]:
    """Make the conversations of a saver, each on a gloo group of its own; collective where there are ranks.

    Args:
        group: the trainer's group, which is asked for its members and never used; None means the default
            group where one is initialised, else one process.
        timeout_seconds: how long a rank waits for another.
        conversations: how many to make.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [Ranks(None, timeout_seconds) for _ in range(conversations)]
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if dist.get_rank() not in members:
        raise SaveError(f"rank {dist.get_rank()} is not in the saver's group of ranks {members}")
    if len(members) == 1:
        return [Ranks(None, timeout_seconds) for _ in range(conversations)]
    return [_connect(members, timeout_seconds) for _ in range(conversations)]


def _connect(members: list[int], timeout_seconds: float) -> Ranks:
    """Make a group that torch does not list among the trainer's.

    `new_group` names a group after the number of groups that this rank has, so a group that was destroyed and
    made again meets its own old addresses. Here the ranks count how often they have connected.
    """
    rank, size = members.index(dist.get_rank()), len(members)
    store = dist.distributed_c10d._get_default_store()
    name = f"packckpt/{'_'.join(map(str, members))}"
    number = store.add(f"{name}/connected/{rank}", 1)
    try:
        own_store = dist.distributed_c10d.PrefixStore(f"{name}/{number}", store)
        group = dist.ProcessGroupGloo(own_store, rank, size, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        absent = [r for r in range(size) if store.add(f"{name}/connected/{r}", 0) < number]
        text = f"prepare: no connection to ranks {absent or members} within {timeout_seconds:.0f} s ({error})"
        raise (RankError(text, absent) if absent else SaveError(text)) from None
    return Ranks(cast(Group, group), timeout_seconds, rank, size)
