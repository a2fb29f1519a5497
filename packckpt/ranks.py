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
from datetime import timedelta
from typing import Any, Protocol, TypeVar

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


class Ranks:
    """One conversation among the ranks of a save. Without a process group there is one rank.

    Args:
        process_group: a gloo group that nothing else uses, or None for a single process.
        timeout_seconds: how long a rank waits for another.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        self._group = process_group
        self._timeout_seconds = timeout_seconds
        self._members = [0] if process_group is None else dist.get_process_group_ranks(process_group)
        self._lost: str | None = None
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = len(self._members)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank gathers, judges and writes."""
        return self.rank == 0

    def close(self) -> None:
        """Give the process group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

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
            BaseException: what `work` raised on this rank, unchanged.
        """
        error: BaseException | None = None
        message: Message
        try:
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
        self._send(rank, "finalize", {"component": component, "keys": list(keys)})
        header = self._receive(rank, "finalize", self._timeout_seconds * _COORDINATOR_SHARE)
        if "error" in header:
            raise RankError(f"finalize: rank {rank}: {header['error']}", [rank])
        data = torch.empty(int(header["bytes"]), dtype=torch.uint8)
        for piece in _pieces(data):
            self._receive_tensor(rank, "finalize", piece, self._timeout_seconds * _COORDINATOR_SHARE)
        return host_bytes(data)

    def dismiss(self, verdict: Message) -> None:
        """End the requests: send every other rank the verdict, by the coordinator. Never raises."""
        for rank in range(1, self.size):
            try:
                self._send(rank, "finalize", verdict)
            except PackckptError:
                continue  # it is gone; the error that is on its way says so

    def _run(self, exchange: Callable[[], Message]) -> Message:
        return exchange() if self.size == 1 else uninterrupted(exchange)

    def _exchange(self, what: str, message: Message, judge: Callable[[list[Message]], Message]) -> Message:
        if not self.is_coordinator:
            self._send(0, what, message)
            return self._receive(0, what, self._timeout_seconds)
        messages, gone = self._collect(what, message)
        verdict = _judged(what, messages, gone, judge)
        for rank in range(1, self.size):
            if rank in gone:
                continue
            try:
                self._send(rank, what, verdict)
            except PackckptError as error:
                # It answered and then went: the others have their verdict already, the next exchange tells.
                verdict.setdefault("unreached", str(error))
        return verdict

    def _collect(self, what: str, own: Message) -> tuple[dict[int, Message], dict[int, str]]:
        deadline = time.monotonic() + self._timeout_seconds * _COORDINATOR_SHARE
        messages, gone = {0: own}, {}
        for rank in range(1, self.size):
            try:
                # One silent rank uses up the time; the others have had as long, so a moment is enough for them.
                messages[rank] = self._receive(rank, what, max(deadline - time.monotonic(), 1.0), check=False)
            except PackckptError as error:
                gone[rank] = str(error)
        return messages, gone

    def _open(self, verdict: Message) -> Message:
        if "error" not in verdict:
            value: Message = verdict.get("value", {})
            return value
        if verdict.get("ranks"):
            raise RankError(verdict["error"], verdict["ranks"])
        raise SaveError(verdict["error"])

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

    def _receive(self, rank: int, what: str, seconds: float, check: bool = True) -> Message:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_tensor(rank, what, length, seconds, check)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive_tensor(rank, what, data, seconds, check)
        message: Message = json.loads(data.numpy().tobytes())
        return message

    def _send_tensor(self, rank: int, what: str, tensor: torch.Tensor) -> None:
        self._transfer(dist.isend, rank, what, tensor, self._timeout_seconds)

    def _receive_tensor(self, rank: int, what: str, tensor: torch.Tensor, seconds: float, check: bool = True) -> None:
        self._transfer(dist.irecv, rank, what, tensor, seconds, check)

    def _transfer(
        self,
        operation: Callable[..., dist.Work | None],
        rank: int,
        what: str,
        tensor: torch.Tensor,
        seconds: float,
        check: bool = True,
    ) -> None:
        if check and self._lost is not None:
            raise RankError(
                f"{what}: contact was lost earlier ({self._lost}); make a new CheckpointSaver on a group of live ranks",
                [rank],
            )
        try:
            work = operation(tensor, self._members[rank], group=self._group)
            if work is not None:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            message = f"{what}: rank {rank} did not answer within {seconds:.0f} s, or is gone ({reason})"
            self._lost = self._lost or message
            raise RankError(message, [rank]) from None


def _pieces(data: torch.Tensor) -> Iterator[torch.Tensor]:
    return (data[start : start + _PIECE_BYTES] for start in range(0, data.numel(), _PIECE_BYTES))


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def uninterrupted(work: Callable[[], T]) -> T:
    """Run `work` to its end on a thread of its own; what interrupts the caller meanwhile is raised after it.

    A Ctrl-C in the middle of an exchange would leave the ranks out of step for the rest of the run.
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="packckpt-exchange")
    interruption: BaseException | None = None
    thread.start()
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            interruption = interruption or error
    if interruption is not None:
        raise interruption
    if failure:
        raise failure[0]
    return result[0]


def _judged(
    what: str,
    messages: dict[int, Message],
    gone: dict[int, str],
    judge: Callable[[list[Message]], Message],
) -> Message:
    failed = {rank: message["error"] for rank, message in messages.items() if "error" in message}
    if failed or gone:
        told = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
        return {"error": f"{what}: " + "; ".join([*told, *gone.values()]), "ranks": sorted({*failed, *gone})}
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
    return [Ranks(_new_group(members, timeout_seconds), timeout_seconds) for _ in range(conversations)]


def _new_group(members: list[int], timeout_seconds: float) -> dist.ProcessGroup:
    made = dist.new_group(
        members, timeout=timedelta(seconds=timeout_seconds), backend="gloo", use_local_synchronization=True
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
