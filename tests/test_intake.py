"""Files go into tensors of the trainer through bounded memory: nothing waits for ever, no slot is filled too early."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packckpt import Export, intake
from packckpt.dtypes import DTYPE_OF_NAME
from packckpt.filepass import FilePass
from packckpt.fillings import Chunk, FileLayout, Filling, Portion
from packckpt.intake import Intake, Task
from packckpt.placing import place_on_host
from packckpt.ring import Slot
from packckpt.tensorfile import write_tensors
from packckpt.tensorreader import TensorFileReader
from tests import emulated
from tests.builders import arange, assert_same_tensor

emulated.install_or_skip()

SHAPES = [(8, 1, 2), (8, 4, 4), (3, 2, 2), (8, 4, 4), (5, 4, 4), (1, 4, 4), (8, 1, 1), (8, 4, 4)]
PLACES = {"host": lambda tensor: tensor, "device": emulated.to_device}


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


class Files:
    """Packed tensors in files of their own, and targets for them."""

    def __init__(self, folder: Path, places: Iterable[str]) -> None:
        self.wanted = [arange(*shape, start=100 * number) for number, shape in enumerate(SHAPES)]
        self.paths = [folder / f"{number}.safetensors" for number in range(len(SHAPES))]
        for path, source in zip(self.paths, self.wanted, strict=True):
            write_tensors(path, {str(row): tensor for row, tensor in enumerate(source.transpose(1, 2).contiguous())})
        names = list(places)
        self.targets = [PLACES[names[n % len(names)]](torch.zeros(shape)) for n, shape in enumerate(SHAPES)]

    def tasks(self, *, digested: bool) -> Iterator[Task]:
        for path, target in zip(self.paths, self.targets, strict=True):
            digest = hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()
            reader = TensorFileReader(path)
            dtype_name, shape, *_ = reader.entries["0"]
            rows = sorted(reader.entries, key=lambda name: reader.entries[name][2])
            offsets = np.array([reader.entries[name][2] for name in rows])
            export = Export("k", target, expert=0)
            layout = FileLayout(
                [
                    Filling(
                        target.transpose(1, 2), export, DTYPE_OF_NAME[dtype_name], shape, offsets, np.array(rows, int)
                    )
                ]
            )
            yield Task(reader, layout, layout.tensors, digest if digested else None)

    def run(self, *, digested: bool = True, buffer_bytes: int = 64) -> list[str]:
        """Read the files through a ring that holds two of the largest tensors."""
        return list(Intake(self.tasks(digested=digested), buffer_bytes).run().values())

    def expect_filled(self) -> None:
        for target, source in zip(self.targets, self.wanted, strict=True):
            assert_same_tensor(emulated.to_host(target) if target.device.type != "cpu" else target, source)


@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize("buffer_bytes", [8, 64, 96, 200, 1 << 20])
@pytest.mark.parametrize("places", [["host"], ["device"], ["host", "device"]], ids=str)
def test_tensors_of_many_sizes(
    places: list[str], buffer_bytes: int, digested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, a tensor that is larger than a thread's memory is looked at in its file."""
    monkeypatch.setattr(intake, "_HOST_CHUNK_BYTES", 48)
    monkeypatch.setattr(intake, "TASK_BYTES", 200)
    files = Files(tmp_path, places)

    assert files.run(digested=digested, buffer_bytes=buffer_bytes) == []
    files.expect_filled()


def test_one_chunk_for_a_parameter_on_the_host_and_one_on_a_device(tmp_path: Path) -> None:
    tensors = {name: arange(2, 3, start=10 * number) for number, name in enumerate("abcd")}
    write_tensors(tmp_path / "f", tensors)
    reader = TensorFileReader(tmp_path / "f")
    targets = [torch.zeros(2, 3, 2), emulated.to_device(torch.zeros(2, 3, 2))]
    fillings = [
        Filling(
            target.transpose(1, 2), Export("k", target, expert=0), torch.float32, (2, 3),
            np.array([reader.entries[name][2] for name in names]), np.array([0, 1]),
        )
        for target, names in zip(targets, ("ac", "bd"), strict=True)
    ]  # fmt: skip
    layout = FileLayout(fillings)
    with emulated.observe() as ledger:
        assert Intake([Task(reader, layout, layout.tensors, None)]).run() == {}

    assert [event.shape for event in ledger.h2d] == [(4 * 24,)]
    for target, names in zip(targets, ("ac", "bd"), strict=True):
        found = emulated.to_host(target) if target.device.type != "cpu" else target
        assert_same_tensor(found, torch.stack([tensors[name].T for name in names]).contiguous())


def test_a_slot_is_not_filled_before_its_chunk_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Departures come late, and the slot must hold until then what it held when it was sent."""
    sent: list[Slot] = []
    departed = 0
    launch = Intake._launch

    def recording_launch(self: Intake, slot: Slot, chunk: Chunk) -> None:
        sent.append(slot)
        launch(self, slot, chunk)

    def late_departure(_: torch.device) -> Callable[[], None]:
        slot, content = sent[-1], sent[-1].memory.numpy().tobytes()

        def depart() -> None:
            nonlocal departed
            threading.Event().wait(0.002)
            assert not slot.released
            assert slot.memory.numpy().tobytes() == content
            departed += 1

        return depart

    monkeypatch.setattr(Intake, "_launch", recording_launch)
    monkeypatch.setattr(intake, "departure", late_departure)
    files = Files(tmp_path, ["device"])
    assert files.run() == []
    files.expect_filled()
    assert departed == len(sent) > 20
    assert all(slot.released for slot in sent)


@pytest.mark.parametrize("places", [["host"], ["device"]], ids=str)
class TestFailures:
    def test_another_digest_and_a_file_cut_short_are_told_and_the_rest_is_read(
        self, places: list[str], tmp_path: Path
    ) -> None:
        files = Files(tmp_path, places)
        tasks = list(files.tasks(digested=True))
        with open(files.paths[0], "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        os.truncate(files.paths[3], files.paths[3].stat().st_size - 100)

        problems = Intake(tasks, 64).run().values()

        assert len(problems) == 2
        assert any(f"{files.paths[0]}: has digest " in problem for problem in problems)
        assert any(f"{files.paths[3]}: cannot be read: ends at byte " in problem for problem in problems)
        files.wanted[0], files.wanted[3] = files.wanted[1], files.wanted[1]
        files.targets[0], files.targets[3] = files.targets[1], files.targets[1]
        files.expect_filled()

    def test_what_is_no_fault_of_a_file_is_raised(
        self, places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError("none left")

        read: list[int] = []
        fill = FilePass._fill
        monkeypatch.setattr(FilePass, "_fill", lambda self, at, piece: fill(self, at, piece) or read.append(at))
        monkeypatch.setattr(intake, "usable_cores", lambda: 1)
        monkeypatch.setattr(intake, f"place_on_{places[0]}", fail)
        with pytest.raises(MemoryError, match="none left"):
            Files(tmp_path, places).run()
        assert len(read) < len(SHAPES)  # what is left is not read


def test_a_file_in_several_tasks_is_told_once(tmp_path: Path) -> None:
    files = Files(tmp_path, ["host"])
    whole = next(task for task in files.tasks(digested=False) if task.reader.path == files.paths[1])
    tasks = [replace(whole, tensors=part) for part in whole.layout.split(whole.tensors, 64)]
    os.truncate(files.paths[1], len(whole.reader.head))

    problems = Intake(tasks).run()

    assert len(tasks) == 8
    assert [reader.path for reader in problems] == [files.paths[1]]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")], ids=repr)
def test_the_caller_is_cut_short_before_all_tasks_are_handed_out(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = 0
    submit = ThreadPoolExecutor.submit

    def failing_submit(self: ThreadPoolExecutor, *what: Any) -> Any:
        nonlocal submitted
        submitted += 1
        if submitted == 6:
            threading.Event().wait(0.2)  # until the ring is full, and a thread waits for it
            raise error
        return submit(self, *what)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", failing_submit)
    with pytest.raises(type(error)):
        Files(tmp_path, ["device"]).run()


def test_large_tensors_on_the_host_are_in_memory_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside an accelerator, whose chunks may be larger."""
    monkeypatch.setattr(intake, "_HOST_CHUNK_BYTES", 32)
    monkeypatch.setattr(intake, "_LARGE_TENSORS_BYTES", 130)
    monkeypatch.setattr(intake, "usable_cores", lambda: 6)
    now_bytes, most_bytes, lock = 0, 0, threading.Lock()

    def place(portion: Portion, memory: torch.Tensor) -> None:
        nonlocal now_bytes, most_bytes
        large_bytes = len(memory) if len(memory) > 32 else 0
        with lock:
            now_bytes += large_bytes
            most_bytes = max(most_bytes, now_bytes)
        threading.Event().wait(0.005)
        place_on_host(portion, memory)
        with lock:
            now_bytes -= large_bytes

    monkeypatch.setattr(intake, "place_on_host", place)
    files = Files(tmp_path, ["host", "host", "host", "device"])
    assert files.run(buffer_bytes=1 << 10) == []
    files.expect_filled()
    assert most_bytes == 128


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory for a chunk")], ids=repr)
def test_the_caller_is_cut_short_while_threads_wait_for_the_ring(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Slot] = []

    def launch(self: Intake, slot: Slot, chunk: Chunk) -> None:
        launched.append(slot)
        if len(launched) == 3:
            threading.Event().wait(0.2)  # until the ring is full, and a thread waits for it
            raise error  # and the slot is lost, as where Ctrl-C comes before it was noted
        slot.release()

    monkeypatch.setattr(Intake, "_launch", launch)
    with pytest.raises(type(error)):
        Files(tmp_path, ["device"]).run()
    assert len(launched) == 3
