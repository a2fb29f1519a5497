"""The save transaction: prepare under the fence, then finalize or abort, in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from packckpt.commit import Commit, WholeFile, expect_free, owners_of_files
from packckpt.descriptions import KeyGroup, group_keys
from packckpt.errors import PackckptError, SaveError, warn_caller
from packckpt.exports import Export, expect_data, named
from packckpt.manifest import portable_config
from packckpt.merge import Merged, merge_keys
from packckpt.optimizer import AdamState, Hyperparameters
from packckpt.plan import PATHS, PathName, TransferPlan, Unit, plan_transfers
from packckpt.ranks import Message, Ranks, describe, open_ranks
from packckpt.reservation import Reservation, reserve
from packckpt.snapshot import BlockSnapshot, Snapshot, SnapshotReader
from packckpt.staged import StagedSnapshot
from packckpt.staging import Stager
from packckpt.transfer import TransferLog, path_named, read_steps, synchronize
from packckpt.turns import Turns
from packckpt.windows import DEFAULT_BUFFER_BYTES, expect_rows_fit, stored_dtype

if TYPE_CHECKING:
    import torch.distributed as dist

# The longest sibling is `.<name>.snapshot-r<rank>-<16 hex digits>`; file systems hold names of 255 bytes.
_LONGEST_NAME_BYTES = 255 - len(".") - len(".snapshot-r000000-") - 16


@dataclass(slots=True)
class _Local:
    """What this rank found out before anything was written."""

    destination: Path
    config: dict[str, Any]
    plan: TransferPlan
    hyperparameters: Hyperparameters | None
    step_of: dict[int, int] | None
    groups: list[KeyGroup]

    def message(self, number: int) -> Message:
        optimizer = None if self.hyperparameters is None else self.hyperparameters.as_dict()
        return {
            "number": number,
            "destination": str(self.destination),
            "config": self.config,
            "optimizer": optimizer,
            "exports": [group.to_json() for group in self.groups],
        }


@dataclass(slots=True)
class _Prepared:
    """A save that was prepared and waits to be finalized or aborted; it holds no tensor of the trainer.

    Attributes:
        merged: the tensors of the checkpoint, on the coordinator; None elsewhere.
        reservation: held by the coordinator once the destination is reserved.
    """

    number: int
    destination: Path
    config: dict[str, Any]
    hyperparameters: Hyperparameters | None
    merged: Merged | None
    snapshot: Snapshot
    reservation: Reservation | None = None

    def clean_up(self, *, keep_parents: bool) -> None:
        try:
            self.snapshot.remove()
        finally:
            # Also where a second Ctrl-C cuts the removal short: a reservation that stays blocks the destination.
            if self.reservation is not None:
                self.reservation.release(keep_parents=keep_parents)


class CheckpointSaver:
    """Saves packed-expert parameters and their optimizer state, without a change to the checkpoint format.

    Args:
        path: "coalesced" copies each complete packed parameter once; "slice" copies every expert by itself;
            "staged" brings everything through a ring of two buffers, gathered on the device, and writes it once.
        group: a `torch.distributed` group whose ranks save together; None means the default group where one is
            initialised when the first save begins, else one process. The group itself is never used: two gloo
            groups of the same ranks are made at the first prepare, which is collective.
        durable: sync files and directories, so that a power cut after finalize loses nothing. Turn it off on
            scratch disks.
        timeout_seconds: how long a rank waits for another. It has to be longer than a whole commit takes, disk
            syncs included, since the other ranks hear nothing of the coordinator meanwhile. A Ctrl-C that comes
            while ranks wait for one another is raised when they have done so.
        strict_duplicates: where several ranks export one key, compare their values and refuse to save different
            ones. By default the lowest rank's is taken, unseen.
        buffer_bytes: staged only: size of each of the ring's two buffers, a power of two (pinned memory is
            rounded up to one). At least one row of an exported tensor.
        async_write: staged only: prepare returns once everything is on the host, of which the last two buffers
            are still being written. What goes wrong there is raised by finalize.

    Prepare may be called from several threads, whose saves keep the order in which they began, and finalize from
    another thread than prepare, on all ranks alike. Host memory during prepare: what the path states for the
    largest layer block; during finalize: see `Commit.write`.

    Raises:
        PackckptError: an unknown path, or a time-out that is not positive.
    """

    def __init__(
        self,
        path: PathName = "coalesced",
        group: dist.ProcessGroup | None = None,
        durable: bool = True,
        *,
        timeout_seconds: float = 1800.0,
        strict_duplicates: bool = False,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        async_write: bool = False,
    ) -> None:
        if path not in PATHS:
            raise PackckptError(f"CheckpointSaver path is {path!r}; expected one of {', '.join(PATHS)}")
        if not timeout_seconds > 0:
            raise PackckptError(f"CheckpointSaver timeout_seconds is {timeout_seconds!r}; expected more than 0")
        if buffer_bytes < 1:
            raise PackckptError(f"CheckpointSaver buffer_bytes is {buffer_bytes!r}; expected 1 or more")
        if async_write and path != "staged":
            raise PackckptError(f"CheckpointSaver async_write goes with path='staged', not {path!r}")
        self._path: PathName = path
        self._group = group
        self._durable = durable
        self._timeout_seconds = timeout_seconds
        self._strict_duplicates = strict_duplicates
        self._async_write = async_write
        self._told_left_out = False
        self._stager = Stager(buffer_bytes)
        self._conversations: list[Ranks] = []
        self._preparing = Turns()
        self._ending = Turns()
        self._guard = threading.Lock()
        self._pending: deque[_Prepared] = deque()
        self._ended: dict[Path, str | None] = {}
        self._number = 0

    def save(
        self,
        destination: str | os.PathLike[str],
        exports: Iterable[Export],
        state: AdamState | None,
        config: Mapping[str, Any],
    ) -> str:
        """Prepare and finalize in one call; return the checkpoint's digest."""
        self.prepare(destination, exports, state, config)
        return self.finalize(destination)

    def prepare(
        self,
        destination: str | os.PathLike[str],
        exports: Iterable[Export],
        state: AdamState | None,
        config: Mapping[str, Any],
    ) -> TransferLog:
        """Take a snapshot; when this returns, the trainer may change every parameter and moment.

        Collective over the ranks of the saver.

        Args:
            destination: the checkpoint directory to be; missing parents are made.
            exports: what leaves this rank, in order; may be empty where other ranks export.
            state: the optimizer's state, or None to save the exported values alone. All ranks alike: one that
                exports nothing brings the same hyper-parameters.
            config: the adapter configuration, JSON values (sets and tuples become lists);
                needs `base_model_name_or_path`.

        Returns:
            what left the device: calls and bytes of weights, optimizer state and steps.

        Raises:
            ExportError, OptimizerError: input that cannot be saved; nothing was written.
            SaveError: the destination is taken, or ranks disagree.
            RankError: another rank failed; names it.
            OSError: the disk refused; what was made is removed.
        """
        with self._preparing:
            return self._prepare(destination, exports, state, config)

    def _prepare(
        self,
        destination: str | os.PathLike[str],
        exports: Iterable[Export],
        state: AdamState | None,
        config: Mapping[str, Any],
    ) -> TransferLog:
        ranks, _ = self._open()
        with ranks.interruption_last():
            log = TransferLog()
            local: list[_Local] = []
            merged: Merged | None = None

            def look() -> Message:
                found = self._look(destination, exports, state, config, log)
                local.append(found)
                return found.message(self._number + 1)

            def judge(messages: list[Message]) -> Message:
                nonlocal merged
                _expect_agreement(messages)
                merged = merge_keys([[KeyGroup.from_json(fields) for fields in m["exports"]] for m in messages])
                return _file_plan(merged, has_state=messages[0]["optimizer"] is not None)

            verdict = ranks.settle("prepare", look, judge)
            where, found = local[0].destination, local[0]
            snapshot, write = self._snapshot(found, ranks.rank, verdict, log)
            prepared = _Prepared(self._number + 1, where, found.config, found.hyperparameters, merged, snapshot)
            self._take(prepared, write, ranks)
            return log

    def finalize(self, destination: str | os.PathLike[str]) -> str:
        """Merge the ranks' snapshots, commit the checkpoint and return its digest.

        Collective over the ranks of the saver. Saves end in the order in which they were prepared. Finalizing
        once more does nothing and returns the digest again. A finalize that fails counts as an abort.

        Raises:
            SaveError: never prepared, aborted, out of order, or something else is at the destination.
            RankError: another rank failed, aborted or is gone; names it.
            OSError: the disk refused; nothing was committed.
        """
        where = _absolute(destination)
        with self._ending:
            with self._guard:
                prepared = self._next(where)
                if prepared is None:
                    return self._digest_of_ended(where)
            digest: str | None = None
            try:
                with self._open()[1].interruption_last():
                    digest = self._commit(prepared)
                return digest
            finally:
                self._end(prepared, digest)

    def abort(self, destination: str | os.PathLike[str]) -> None:
        """Give up a prepared save and remove what was made for it.

        Collective over the ranks of the saver; a rank that is gone is no error. Aborting what was never
        prepared, or ended already, does nothing.

        Raises:
            SaveError: an earlier save was neither finalized nor aborted yet.
        """
        where = _absolute(destination)
        with self._ending:
            with self._guard:
                prepared = self._next(where)
            if prepared is None:
                return
            self._end(prepared, None)
            _, ranks = self._open()
            # A rank that is gone is no error; one that wanted to finalize is told.
            with ranks.interruption_last(), suppress(SaveError):
                self._agree_to_end(ranks, prepared, "abort")

    def release_buffers(self) -> None:
        """Give the staged path's ring back, which is kept from save to save; the next save makes a new one."""
        with self._preparing:
            self._stager.drop_ring()

    def close(self) -> None:
        """Drop what is still prepared, on this rank alone, and give back the saver's process groups.

        Not collective. The saver can be used again; it then makes new groups, which is collective.
        """
        with self._preparing, self._ending:
            for prepared in list(self._pending):
                self._end(prepared, None)
            conversations, self._conversations = self._conversations, []
            for ranks in conversations:
                ranks.close()
            self._stager.drop_ring()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Ranks, Ranks]:
        """Return the conversation of prepare and that of finalize, which may go on at the same time."""
        if not self._conversations:
            self._conversations = open_ranks(self._group, self._timeout_seconds, 2)
        preparing, ending = self._conversations
        return preparing, ending

    def _look(
        self,
        destination: str | os.PathLike[str],
        exports: Iterable[Export],
        state: AdamState | None,
        config: Mapping[str, Any],
        log: TransferLog,
    ) -> _Local:
        """Check everything that can be checked before a file or a copy is made."""
        where = _absolute(destination)
        self._expect_not_pending(where)
        expect_free(where)
        portable = portable_config(config)
        plan = plan_transfers(exports, state, self._path, self._stager.buffer_bytes)
        units = _one_unit_each(plan)
        for unit in units:
            expect_data(unit.exports[0].key, unit.tensors)
        _warn_narrowed(plan)
        if self._path == "staged":
            expect_rows_fit(plan.files, plan.buffer_bytes)
        synchronize(_devices(units))
        hyperparameters = None if state is None else state.hyperparameters()
        self._warn_left_out(units, state)
        step_of = None if state is None else _steps(units, log)
        exported = (export for block in plan.blocks for export in block.exports)
        return _Local(where, portable, plan, hyperparameters, step_of, group_keys(exported, step_of))

    def _warn_left_out(self, units: Sequence[Unit], state: AdamState | None) -> None:
        """Say once what the optimizer steps and no export names: a resume would go on from other values of it."""
        if state is None or self._told_left_out or not units:
            return
        if left_out := state.stepped_but_not(unit.parameter for unit in units):
            warn_caller(
                f"the optimizer also steps what no export of this rank names: {named(left_out, 4)}. Unless another "
                "rank exports it, the checkpoint will not hold it: save it another way, or export it"
            )
            self._told_left_out = True

    def _snapshot(
        self, local: _Local, rank: int, verdict: Message, log: TransferLog
    ) -> tuple[Snapshot, Callable[[], None]]:
        """Return the snapshot to be, and the function that writes it."""
        where, plan = local.destination, local.plan
        if self._path == "staged":
            own = [name for name, owner in verdict["owners"].items() if owner == rank]
            numbers = {name: number for number, name in enumerate(verdict["blocks"])}
            staged = StagedSnapshot(where, rank, numbers, own)
            wait = not self._async_write
            return staged, lambda: staged.write(plan.files, self._stager, log, wait=wait)
        blocks = BlockSnapshot(where, rank)
        return blocks, lambda: blocks.write(plan, path_named(self._path), local.step_of, log)

    def _take(self, prepared: _Prepared, write: Callable[[], None], ranks: Ranks) -> None:
        """Reserve the destination and write the snapshot, or leave nothing behind."""

        def hold() -> Message:
            if ranks.is_coordinator:
                prepared.reservation = reserve(prepared.destination)
                expect_free(prepared.destination)
            return {}

        def snapshot() -> Message:
            write()
            return {}

        try:
            ranks.settle("reserve", hold)
            ranks.settle("snapshot", snapshot)
            # Tells what interrupted a rank while it waited for a slower one.
            ranks.settle("prepare", lambda: {})
            with self._guard:
                self._number = prepared.number
                self._pending.append(prepared)
                self._ended.pop(prepared.destination, None)
        except BaseException:
            with self._guard:
                if prepared in self._pending:
                    self._pending.remove(prepared)
            prepared.clean_up(keep_parents=False)
            raise

    def _commit(self, prepared: _Prepared) -> str:
        _, ranks = self._open()
        whole_files = self._agree_to_end(ranks, prepared, "finalize")
        with prepared.snapshot.reader() as reader:
            if not ranks.is_coordinator:
                return str(ranks.serve(reader)["digest"])
            assert prepared.merged is not None
            commit = Commit(
                prepared.destination,
                prepared.config,
                prepared.hyperparameters,
                prepared.merged,
                self._durable,
                self._strict_duplicates,
                new_parents=() if prepared.reservation is None else prepared.reservation.created_parents,
                whole_files=whole_files,
            )
            verdict: Message = {"error": "finalize: rank 0 was interrupted", "ranks": [0]}
            try:
                ranks.raise_interruption()
                digest = commit.write(_Fetcher(ranks, reader, prepared.merged))
                verdict = {"value": {"digest": digest}}
                return digest
            except BaseException as error:
                at_fault = getattr(error, "ranks", None) or ([] if isinstance(error, SaveError) else [0])
                text = str(error) if isinstance(error, SaveError) else f"finalize: rank 0: {describe(error)}"
                verdict = {"error": text, "ranks": list(at_fault)}
                raise
            finally:
                ranks.dismiss(verdict)

    def _agree_to_end(self, ranks: Ranks, prepared: _Prepared, intent: str) -> dict[str, WholeFile]:
        """Agree that the save ends now and how; return, on the coordinator, the files that are whole already."""
        whole_files: dict[str, WholeFile] = {}

        def tell() -> Message:
            if intent == "finalize":
                prepared.snapshot.complete(durable=self._durable)
            return {
                "ends": [prepared.number, str(prepared.destination), intent],
                "directory": str(prepared.snapshot.directory),
                "whole": prepared.snapshot.whole_files if intent == "finalize" else {},
            }

        def judge(messages: list[Message]) -> Message:
            _expect_one_end(messages)
            for message in messages:
                root = Path(message["directory"])
                whole_files.update({n: WholeFile(root / n, digest) for n, digest in message["whole"].items()})
            return {}

        ranks.settle(intent, tell, judge)
        return whole_files

    def _next(self, where: Path) -> _Prepared | None:
        """Return the oldest prepared save if it is that of `where`, None if `where` has none."""
        for position, prepared in enumerate(self._pending):
            if prepared.destination != where:
                continue
            if position:
                first = self._pending[0].destination
                raise SaveError(
                    f"{where}: out of order; {first} was prepared before it and is neither finalized nor aborted: "
                    "end that one first"
                )
            return prepared
        return None

    def _digest_of_ended(self, where: Path) -> str:
        if where not in self._ended:
            raise SaveError(f"{where}: was never prepared; call prepare first")
        digest = self._ended[where]
        if digest is None:
            raise SaveError(f"{where}: was aborted, or its finalize failed; prepare it again")
        return digest

    def _end(self, prepared: _Prepared, digest: str | None) -> None:
        """Forget a save and remove what was made for it; a digest says that it was committed."""
        try:
            with self._guard:
                self._pending.remove(prepared)
                self._ended[prepared.destination] = digest
        finally:
            prepared.clean_up(keep_parents=digest is not None)

    def _expect_not_pending(self, where: Path) -> None:
        with self._guard:
            if any(prepared.destination == where for prepared in self._pending):
                raise SaveError(f"{where}: is prepared already; finalize or abort it before preparing it again")


class _Fetcher:
    """Gets the bytes of tensors from whichever rank has them."""

    def __init__(self, ranks: Ranks, own: SnapshotReader, merged: Merged) -> None:
        self._ranks = ranks
        self._own = own
        self._compositions = merged.compositions

    def __call__(self, rank: int, component: str, keys: Sequence[str]) -> list[memoryview]:
        if rank == 0:
            return self._own(component, keys)
        data = self._ranks.fetch(rank, component, keys)
        parts, offset = [], 0
        for key in keys:
            held = self._compositions[key].part_of(rank).description
            size = held.size_bytes(stored_dtype(component, held.dtype))
            parts.append(data[offset : offset + size])
            offset += size
        return parts


def _absolute(destination: str | os.PathLike[str]) -> Path:
    """Return the destination with its parent resolved, so that it stays the same place after a chdir."""
    given = os.fspath(destination)
    if not isinstance(given, str) or not given or "\0" in given:
        raise SaveError(f"destination is {given!r}; expected a path")
    path = Path(os.path.abspath(given))
    if not path.name:
        raise SaveError(f"destination is {given!r}; expected the name of a directory to be")
    longest = _LONGEST_NAME_BYTES
    if len(os.fsencode(path.name)) > longest:
        raise SaveError(f"destination name {path.name!r} is too long; expected at most {longest} bytes")
    return Path(os.path.realpath(path.parent)) / path.name


def _devices(units: Iterable[Unit]) -> set[torch.device]:
    devices = set()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # What is on the host may still be on its way there from the device that the trainer uses.
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    devices.update(tensor.device for unit in units for tensor in unit.tensors)
    return devices


def _one_unit_each(plan: TransferPlan) -> list[Unit]:
    """Return the first unit of every parameter; its tensors are those of the others."""
    first: dict[int, Unit] = {}
    for block in plan.blocks:
        for unit in block.units:
            first.setdefault(id(unit.parameter), unit)
    return list(first.values())


def _steps(units: Sequence[Unit], log: TransferLog) -> dict[int, int]:
    """Return the step of every parameter, by its id; each is read once."""
    named_steps = [(unit.exports[0].key, unit.state.step if unit.state else None) for unit in units]
    return dict(zip((id(unit.parameter) for unit in units), read_steps(named_steps, log), strict=True))


def _warn_narrowed(plan: TransferPlan) -> None:
    if plan.narrowed_keys:
        warn_caller(f"optimizer state is float64 and is saved as float32, which rounds it: {named(plan.narrowed_keys)}")


def _expect_agreement(messages: Sequence[Message]) -> None:
    for field_name in ("number", "destination", "config", "optimizer"):
        ours = messages[0][field_name]
        for rank, message in enumerate(messages):
            if message[field_name] != ours:
                what = {"number": "running number of the save", "optimizer": "optimizer hyper-parameters"}
                raise SaveError(
                    f"prepare: ranks 0 and {rank} disagree on the {what.get(field_name, field_name)}: {ours!r} and "
                    f"{message[field_name]!r}; expected one value on every rank"
                )


def _file_plan(merged: Merged, *, has_state: bool) -> Message:
    """Return what every rank needs to lay its files out as the checkpoint will have them."""
    return {"blocks": list(merged.blocks), "owners": owners_of_files(merged, has_state)}


def _expect_one_end(messages: Sequence[Message]) -> None:
    if all(message["ends"] == messages[0]["ends"] for message in messages):
        return
    found = "; ".join(f"rank {r}: {m['ends'][2]} {m['ends'][1]}" for r, m in enumerate(messages))
    raise SaveError(f"ranks disagree on how the save ends ({found}); it is aborted on every rank")
