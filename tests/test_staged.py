"""The staged path: a ring, files as they will stand, and the same checkpoint."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import CheckpointSaver, ExportError, PackckptError, load_checkpoint, plan_transfers, predicted_peaks
from packckpt import staging as staging_module
from packckpt.gathering import HostGather
from packckpt.progressions import progressions
from packckpt.ring import Ring, Slot
from packckpt.staging import Arrival, Stager
from packckpt.strands import Strands
from packckpt.tensorfile import TensorFileWriter
from tests import emulated
from tests.builders import (
    CONFIG,
    STRIDES,
    Trainer,
    assert_same_content,
    eight_experts,
    expected_content,
    names_in,
    read_content,
    save,
)

emulated.install_or_skip()


def staged(**options: Any) -> CheckpointSaver:
    return CheckpointSaver("staged", durable=False, **options)


class TestCalls:
    def test_eight_experts_are_four_copies(self, tmp_path: Path) -> None:
        """Weights, master, exp_avg and exp_avg_sq: one window each, where the slice path needs 64 copies."""
        trainer = eight_experts(emulated.to_device)
        with emulated.observe() as ledger, staged() as saver:
            log = saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.finalize(tmp_path / "c")
        assert (log.weight.calls, log.optimizer.calls) == (1, 3)
        assert ledger.d2h_calls == 4
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    @pytest.mark.parametrize("strides", STRIDES)
    @pytest.mark.parametrize(
        "rows",
        [range(8), range(7, -1, -1), (0, 2, 4, 6), (3, 0, 7, 1), (5,), (0, 1, 5, 7, 2)],
        ids=lambda rows: " ".join(map(str, rows)),
    )
    def test_irregular_rows_need_no_more_copies(self, tmp_path: Path, rows: Any, strides: str) -> None:
        trainer = Trainer(emulated.to_device)
        packed = [trainer.parameter(8, 4, 6, strides=STRIDES[strides]) for _ in range(2)]
        for row in rows:
            for number, parameter in enumerate(packed):
                trainer.export_rows(f"p{number}", parameter, [row])
        emulated.reset_peak()
        before = emulated.memory_allocated()
        plan = plan_transfers(trainer.exports, trainer.state, "staged")
        with emulated.observe() as ledger, staged() as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert ledger.d2h_calls == 4
        assert emulated.max_memory_allocated() - before == predicted_peaks(plan).device_bytes
        assert predicted_peaks(plan).device_bytes == 2 * len(rows) * 24 * 4
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_missing_moments_are_not_transferred(self, tmp_path: Path) -> None:
        trainer = eight_experts(emulated.to_device, missing=("exp_avg", "exp_avg_sq"), step=None)
        with emulated.observe() as ledger, staged() as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert ledger.d2h_calls == 2
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
    @pytest.mark.filterwarnings("ignore:optimizer state is float64")
    def test_state_is_converted_once_on_its_device(self, tmp_path: Path, dtype: torch.dtype) -> None:
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", experts=4, rows=4, columns=6, state_dtype=dtype, dtype=torch.float32)
        with emulated.observe() as ledger, staged() as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert [event.source_dtype for event in ledger.d2h] == [torch.float32] * 4
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_weights_of_two_dtypes_are_two_copies(self, tmp_path: Path) -> None:
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", experts=3, rows=1, columns=1, dtype=torch.bfloat16)
        trainer.packed("b", experts=3, rows=3, columns=5, dtype=torch.float32)
        trainer.dense("c", 5, 1, dtype=torch.float64)
        with staged() as saver:
            log = saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.finalize(tmp_path / "c")
        assert log.weight.calls == 3
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))


class TestBounds:
    def test_a_tensor_larger_than_a_buffer_is_cut(self, tmp_path: Path) -> None:
        trainer = eight_experts(emulated.to_device)
        largest_row_bytes = 4 * 4
        with emulated.observe() as ledger, staged(buffer_bytes=largest_row_bytes) as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert max(event.nbytes for event in ledger.d2h) == largest_row_bytes
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_a_buffer_that_holds_no_row_is_refused_by_key(self, tmp_path: Path) -> None:
        trainer = eight_experts()
        with (
            staged(buffer_bytes=15) as saver,
            pytest.raises(ExportError, match=r"experts\.0\.gate_up.*16 bytes.*holds 15"),
        ):
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert names_in(tmp_path) == []

    def test_the_ring_is_made_once_and_never_refilled_too_early(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A recording writer: what it gets must not change between the copy and the end of the write."""
        made: list[Ring] = []
        make_ring = staging_module.make_ring

        def recording(size_bytes: int, device: torch.device) -> tuple[Ring, str | None]:
            ring, reason = make_ring(size_bytes, device)
            made.append(ring)
            return ring, reason

        write = TensorFileWriter.append

        def slow(self: TensorFileWriter, *parts: memoryview) -> None:
            seen = [bytes(part) for part in parts]
            write(self, *parts)
            threading.Event().wait(0.002)
            assert [bytes(part) for part in parts] == seen, "a slot was refilled while it was being written"

        monkeypatch.setattr(staging_module, "make_ring", recording)
        monkeypatch.setattr(TensorFileWriter, "append", slow)
        trainer = eight_experts(emulated.to_device)
        with staged(buffer_bytes=128) as saver:
            for number in range(3):
                saver.save(tmp_path / str(number), trainer.exports, trainer.state, CONFIG)
                assert_same_content(read_content(tmp_path / str(number)), expected_content(trainer))
        assert [len(ring.memory) for ring in made] == [256]

    def test_a_slot_that_is_released_too_early_is_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The test above can fail: a ring that gives memory out twice writes wrong bytes."""
        monkeypatch.setattr(Ring, "acquire", lambda self, count: Slot(self, self.memory[:count], 0, count))
        monkeypatch.setattr(Ring, "release", lambda self, slot: None)
        write = TensorFileWriter.append

        def slow(self: TensorFileWriter, *parts: memoryview) -> None:
            threading.Event().wait(0.005)
            write(self, *parts)

        monkeypatch.setattr(TensorFileWriter, "append", slow)
        trainer = eight_experts(emulated.to_device)
        with staged(buffer_bytes=128) as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        with pytest.raises(AssertionError):
            assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_zeros_between_full_windows_move_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Never-stepped parameters, a window each in a ring that is always full, and writers slower than the copies."""
        trainer = Trainer(emulated.to_device)
        for layer in range(12):
            trainer.packed("a", experts=4, rows=4, columns=4, layer=layer, missing=("exp_avg", "exp_avg_sq"), step=None)
        write = TensorFileWriter.append

        def slow(self: TensorFileWriter, *parts: memoryview) -> None:
            threading.Event().wait(0.01)
            write(self, *parts)

        monkeypatch.setattr(TensorFileWriter, "append", slow)
        with staged(buffer_bytes=4 * 16 * 4) as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_zeros_take_no_memory(self) -> None:
        def resident_bytes() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

        stager, before = Stager(), resident_bytes()
        zeros = stager._zero_bytes(256 << 20)
        assert len(zeros) == 256 << 20
        assert resident_bytes() - before < 64 << 20

    def test_an_interrupted_save_leaves_a_ring_that_the_next_can_use(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The slot of the window that was cut short is never released; its ring is not used again."""
        trainer = eight_experts(emulated.to_device)
        with staged(buffer_bytes=128) as saver:
            with monkeypatch.context() as patch:
                patch.setattr(Slot, "release", lambda self: None)
                with emulated.fail_at(2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
                    saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_the_ring_is_given_back_when_asked_and_made_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []
        make_ring = staging_module.make_ring

        def recording(size_bytes: int, device: torch.device) -> tuple[Ring, str | None]:
            made.append(size_bytes)
            return make_ring(size_bytes, device)

        monkeypatch.setattr(staging_module, "make_ring", recording)
        trainer = eight_experts()
        with staged(buffer_bytes=256) as saver:
            for number in range(3):
                saver.save(tmp_path / str(number), trainer.exports, trainer.state, CONFIG)
                if number == 1:
                    saver.release_buffers()
        assert made == [512, 512]


class TestWholeFiles:
    def test_bytes_are_written_once_and_moved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = eight_experts()
        opened: list[str] = []
        begin = TensorFileWriter.__init__

        def recording(self: TensorFileWriter, path: Any, *arguments: Any, **options: Any) -> None:
            opened.append(str(path))
            begin(self, path, *arguments, **options)

        monkeypatch.setattr(TensorFileWriter, "__init__", recording)
        with staged() as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            (snapshot,) = tmp_path.glob(".c.snapshot-r0-*")
            inode = (snapshot / "adapter_model.safetensors").stat().st_ino
            saver.finalize(tmp_path / "c")
        assert len(opened) == 4
        assert (tmp_path / "c" / "adapter_model.safetensors").stat().st_ino == inode

    def test_a_snapshot_on_another_disk_is_read_instead(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = eight_experts()
        rename = os.rename

        def elsewhere(source: Any, destination: Any) -> None:
            if ".snapshot-" in str(source):
                raise FileNotFoundError(2, "No such file or directory", str(source))
            rename(source, destination)

        with staged() as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            monkeypatch.setattr(os, "rename", elsewhere)
            saver.finalize(tmp_path / "c")
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))


class TestFallBacks:
    def test_no_pinned_memory_is_said_once_and_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        trainer = eight_experts(emulated.to_device)
        with caplog.at_level(logging.WARNING, "packckpt"), staged() as saver:
            logs = []
            for number in range(2):
                logs.append(saver.prepare(tmp_path / str(number), trainer.exports, trainer.state, CONFIG))
                saver.finalize(tmp_path / str(number))
        assert [message for message in caplog.messages if "no pinned memory" in message] == caplog.messages
        assert len(caplog.messages) == 1
        assert all("no pinned memory" in log.notes[0] for log in logs)

    def test_no_device_memory_copies_row_by_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = eight_experts(emulated.to_device)
        empty = torch.empty

        def full(*shape: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device", "cpu")).startswith("emu"):
                raise torch.OutOfMemoryError("out of memory")
            return empty(*shape, **options)

        monkeypatch.setattr(torch, "empty", full)
        before = emulated.memory_allocated()
        emulated.reset_peak()
        with emulated.observe() as ledger, staged() as saver:
            log = saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.finalize(tmp_path / "c")
        assert (log.weight.calls, log.optimizer.calls) == (16, 48)
        assert ledger.d2h_calls == 64
        assert emulated.max_memory_allocated() == before
        assert any("rows are copied one by one" in note for note in log.notes)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_the_cpu_gathers_by_itself(self, tmp_path: Path) -> None:
        trainer = eight_experts()
        plan = plan_transfers(trainer.exports, trainer.state, "staged")
        with staged() as saver:
            log = saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.finalize(tmp_path / "c")
        assert (log.weight.calls, log.optimizer.calls) == (plan.weight_calls, plan.optimizer_calls) == (2, 6)
        assert any("on the CPU" in note for note in log.notes)

    def test_moments_on_the_host_and_weights_on_the_device(self, tmp_path: Path) -> None:
        trainer = eight_experts(emulated.to_device)
        for _, master in trainer.masters:
            held = trainer.optimizer.state[master]
            for name in ("exp_avg", "exp_avg_sq"):
                trainer._states[master][name] = held[name] = emulated.to_host(held[name]).clone()
        with emulated.observe() as ledger, staged() as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert ledger.d2h_calls == 2
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))


def held_up_writer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no window be written before the event."""
    go = threading.Event()
    write = TensorFileWriter.append

    def held_up(self: TensorFileWriter, *parts: memoryview) -> None:
        assert go.wait(20)
        write(self, *parts)

    monkeypatch.setattr(TensorFileWriter, "append", held_up)
    return go


class TestAsyncWrite:
    def test_the_trainer_goes_on_while_the_rest_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = eight_experts(emulated.to_device)
        expected = expected_content(trainer)
        go = held_up_writer(monkeypatch)
        with staged(async_write=True) as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            with torch.no_grad():
                for tensor in trainer.tensors():
                    tensor.zero_()
            go.set()
            saver.finalize(tmp_path / "c")
        assert_same_content(read_content(tmp_path / "c"), expected)

    def test_prepare_waits_for_every_copy_that_does_not_block(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The writer is still at its first window: nobody else has waited for the other three."""
        waited: list[str] = []
        monkeypatch.setattr(
            staging_module, "departure", lambda device: lambda: waited.append(threading.current_thread().name)
        )
        go = held_up_writer(monkeypatch)
        trainer = eight_experts(emulated.to_device)
        with staged(async_write=True) as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            assert len(waited) == 4
            go.set()
            saver.finalize(tmp_path / "c")
        assert len(waited) == 4

    def test_what_fails_behind_its_back_is_raised_by_finalize(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = eight_experts()

        prepared = threading.Event()

        def full(self: TensorFileWriter, *parts: memoryview) -> None:
            assert prepared.wait(20)
            raise OSError(28, "No space left on device")

        with staged(async_write=True) as saver:
            with monkeypatch.context() as patch:
                patch.setattr(TensorFileWriter, "append", full)
                saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
                prepared.set()
                with pytest.raises(OSError, match="No space left"):
                    saver.finalize(tmp_path / "c")
            assert names_in(tmp_path) == []
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)

    def test_abort_joins_the_writer(self, tmp_path: Path) -> None:
        trainer = eight_experts()
        with staged(async_write=True) as saver:
            before = threading.active_count()
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.abort(tmp_path / "c")
            assert threading.active_count() == before
        assert names_in(tmp_path) == []

    def test_it_goes_with_the_staged_path_alone(self) -> None:
        with pytest.raises(PackckptError, match="async_write goes with path='staged', not 'coalesced'"):
            CheckpointSaver("coalesced", async_write=True)


def gathers_slowly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hold every gather up; return the names of the threads that gathered, as they come."""
    gather = HostGather.__call__
    names: list[str] = []

    def slow(self: HostGather) -> None:
        threading.Event().wait(0.01)
        gather(self)
        names.append(threading.current_thread().name)

    monkeypatch.setattr(HostGather, "__call__", slow)
    return names


class TestGatheredByWriters:
    """Tensors on the CPU: the threads that write gather them too, and have done so when prepare returns."""

    @pytest.mark.parametrize("buffer_bytes", [128, 1 << 20])
    def test_each_window_once_and_none_by_the_thread_that_saves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
    ) -> None:
        names = gathers_slowly(monkeypatch)
        trainer = eight_experts()
        plan = plan_transfers(trainer.exports, trainer.state, "staged", buffer_bytes)
        with staged(buffer_bytes=buffer_bytes) as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        windows = [window for file in plan.files for window in file.windows(buffer_bytes)]
        assert len(names) == len(windows) >= 4
        assert all(name.startswith("packckpt-write-") for name in names)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    @pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("async_write", [False, True])
    @pytest.mark.parametrize("buffer_bytes", [128, 1 << 20])
    def test_the_trainer_changes_everything_at_once_and_over_and_over(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        buffer_bytes: int,
        async_write: bool,
        state_dtype: torch.dtype,
    ) -> None:
        gathers_slowly(monkeypatch)
        trainer = eight_experts(state_dtype=state_dtype)
        expected = expected_content(trainer)
        done = threading.Event()

        def change() -> None:
            with torch.no_grad():
                for tensor in trainer.tensors():
                    tensor.add_(1)

        def keep_changing() -> None:
            while not done.is_set():
                change()

        with staged(async_write=async_write, buffer_bytes=buffer_bytes) as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            change()
            thread = threading.Thread(target=keep_changing)
            thread.start()
            try:
                saver.finalize(tmp_path / "c")
            finally:
                done.set()
                thread.join()
        assert_same_content(read_content(tmp_path / "c"), expected)

    @pytest.mark.parametrize("buffer_bytes", [16, 40, 64])
    def test_a_tensor_larger_than_a_buffer_is_cut(self, tmp_path: Path, buffer_bytes: int) -> None:
        trainer = eight_experts()
        with staged(buffer_bytes=buffer_bytes) as saver:
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_with_one_writer_the_thread_that_saves_gathers_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Window after window: the ring may be full when the next one comes, and then it could only wait."""
        names = gathers_slowly(monkeypatch)
        gathered: list[int] = []
        capture = Stager.capture

        def recording(self: Stager, *arguments: Any) -> Arrival:
            gathered.append(len(names))
            return capture(self, *arguments)

        monkeypatch.setattr(Stager, "capture", recording)
        trainer = eight_experts()
        expected = expected_content(trainer)
        go = held_up_writer(monkeypatch)
        with staged(async_write=True) as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            # The writer has not got beyond its first window.
            assert gathered == [0, 1, 2, 3]
            assert names.count(threading.current_thread().name) >= 3
            go.set()
            saver.finalize(tmp_path / "c")
        assert_same_content(read_content(tmp_path / "c"), expected)

    @pytest.mark.parametrize("async_write", [False, True])
    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_an_error_is_raised_by_prepare_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, async_write: bool
    ) -> None:
        trainer = eight_experts()
        gather = HostGather.__call__
        count = iter(range(100))

        def lost(self: HostGather) -> None:
            if next(count) == number:
                raise RuntimeError("lost a page")
            gather(self)

        threads = threading.active_count()
        with staged(async_write=async_write) as saver:
            with monkeypatch.context() as patch:
                patch.setattr(HostGather, "__call__", lost)
                with pytest.raises(RuntimeError, match="lost a page"):
                    saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            assert names_in(tmp_path) == []
            assert threading.active_count() == threads
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    @pytest.mark.parametrize("async_write", [False, True])
    def test_no_tensor_of_the_trainer_is_held_after_prepare(self, tmp_path: Path, async_write: bool) -> None:
        trainer = eight_experts()
        gone = [weakref.ref(tensor) for tensor in trainer.tensors()]
        with staged(async_write=async_write) as saver:
            saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            del trainer
            gc.collect()
            assert [each() for each in gone] == [None] * len(gone)
            saver.finalize(tmp_path / "c")

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_the_mode_of_the_thread_that_saves_does_not_matter(self, tmp_path: Path, mode: Callable[[], Any]) -> None:
        with staged() as saver:
            for number, made_in in enumerate((mode, torch.enable_grad, mode)):
                with made_in():
                    trainer = eight_experts(state_dtype=torch.bfloat16)
                with mode():
                    saver.save(tmp_path / str(number), trainer.exports, trainer.state, CONFIG)
                    assert_same_content(read_content(tmp_path / str(number)), expected_content(trainer))


class TestFailures:
    @pytest.mark.parametrize("number", [1, 2, 4])
    @pytest.mark.parametrize("error", [RuntimeError("the device is lost"), KeyboardInterrupt(), SystemExit(3)])
    def test_an_error_inside_a_copy_travels_and_leaves_nothing(
        self, tmp_path: Path, number: int, error: BaseException
    ) -> None:
        trainer = eight_experts(emulated.to_device)
        threads = threading.active_count()
        with staged() as saver:
            with emulated.fail_at(number, error), pytest.raises(type(error)) as raised:
                saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            assert raised.value is error
            assert names_in(tmp_path) == []
            assert threading.active_count() == threads
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))

    def test_a_full_disk_in_a_writer_is_raised_by_prepare(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = eight_experts(emulated.to_device)
        write = TensorFileWriter.append
        count = iter(range(100))

        def full(self: TensorFileWriter, *parts: memoryview) -> None:
            if next(count) == 5:
                raise OSError(28, "No space left on device")
            write(self, *parts)

        with staged(buffer_bytes=128) as saver:
            with monkeypatch.context() as patch:
                patch.setattr(TensorFileWriter, "append", full)
                with pytest.raises(OSError, match="No space left"):
                    saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            assert names_in(tmp_path) == []
            saver.save(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            load_checkpoint(tmp_path / "c").close()


@pytest.mark.parametrize(
    ("rows", "slices"),
    [
        ([0, 1, 2, 3], [range(0, 4, 1)]),
        ([0, 2, 4], [range(0, 5, 2)]),
        ([0, 1, 5, 7], [range(0, 2, 1), range(5, 8, 2)]),
        ([3], [range(3, 4, 1)]),
        ([2, 2], [range(2, 3, 1), range(2, 3, 1)]),
        ([0, 3, 4, 5], [range(0, 4, 3), range(4, 6, 1)]),
    ],
)
def test_progressions(rows: list[int], slices: list[range]) -> None:
    assert progressions(rows) == slices
    assert [row for each in slices for row in each] == rows


@pytest.mark.parametrize("place", [lambda tensor: tensor, emulated.to_device], ids=["host", "device"])
def test_200_saves_leak_nothing(tmp_path: Path, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
    trainer = eight_experts(place)
    with staged() as saver:
        saver.save(tmp_path / "first", trainer.exports, trainer.state, CONFIG)
        gc.collect()
        before = (threading.active_count(), len(os.listdir("/proc/self/fd")), emulated.memory_allocated())
        for number in range(200):
            saver.save(tmp_path / str(number), trainer.exports, trainer.state, CONFIG)
        gc.collect()
        assert (threading.active_count(), len(os.listdir("/proc/self/fd")), emulated.memory_allocated()) == before
    assert len(names_in(tmp_path)) == 201


def test_only_what_the_cpu_gathers_is_done_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a device would be missing elsewhere."""
    ahead: dict[str, list[bool]] = {"host": [], "device": []}
    submit = Strands.submit
    places = {"host": lambda tensor: tensor, "device": emulated.to_device}
    for name, place in places.items():
        trainer = Trainer(place)
        trainer.packed("a")

        def recording_submit(self: Strands, strand: Any, work: Any, *rest: Any, name: str = name) -> None:
            if rest:
                ahead[name].append(rest[2] is not None)
            submit(self, strand, work, *rest)

        monkeypatch.setattr(Strands, "submit", recording_submit)
        save(tmp_path / name, trainer, "staged")
    assert ahead == {"host": [True] * 4, "device": [False] * 4}
