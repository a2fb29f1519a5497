"""What really leaves the device: values, copies, bytes and temporaries, on host and emulated accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import CheckpointSaver, Export, plan_transfers
from packckpt.transfer import TransferLog, path_named
from tests import emulated
from tests.builders import (
    BLOCK_PATHS,
    COMPONENTS,
    CONFIG,
    MISSING,
    STRIDES,
    Content,
    Trainer,
    allocated_on_device,
    arange,
    assert_same_content,
    eight_experts,
    expected_content,
    key_of,
    read_content,
    save,
)
from tests.observer import CopyObserver
from tests.test_plan import LAYOUTS, interleaved

emulated.install_or_skip()

STATE_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BLOCK_BYTES = 3 * 8 * (24 + 12) * 4


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def capture(trainer: Trainer, path: Any) -> tuple[Content, TransferLog]:
    """Capture all blocks and nothing else."""
    log = TransferLog()
    captured: Content = {}
    for block in plan_transfers(trainer.exports, trainer.state, path).blocks:
        captured.update(path_named(path).capture(block, log))
    return captured, log


def without_steps(content: Content) -> Content:
    return {name: value for name, value in content.items() if not name.startswith("step/")}


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("path", BLOCK_PATHS)
class TestMatrix:
    """{four dtypes of masters and moments} x {LoRA rank 1, 3} x {no moment, one, the other, both missing}."""

    def trainer(self, dtype: torch.dtype, rank: int, missing: str, place: Any) -> Trainer:
        trainer = Trainer(place)
        held = {"state_dtype": dtype, "missing": MISSING[missing]}
        # A LoRA factor A is [experts, in, rank], a factor B [experts, rank, out].
        trainer.packed("down_proj", experts=4, rows=5, columns=rank, **held)
        trainer.packed("gate_up_proj", experts=4, rows=rank, columns=6, **held)
        return trainer

    @pytest.mark.parametrize("place", [host, emulated.to_device], ids=["host", "device"])
    def test_values_are_those_of_plain_torch(
        self, path: Any, dtype: torch.dtype, rank: int, missing: str, place: Any
    ) -> None:
        trainer = self.trainer(dtype, rank, missing, place)
        captured, log = capture(trainer, path)

        assert_same_content(captured, without_steps(expected_content(trainer)))
        assert log.optimizer.calls == (24 if path == "slice" else 6)
        assert log.optimizer.bytes == 3 * 4 * (5 * rank + rank * 6) * 4
        assert (log.weight.calls, log.weight.bytes) == (8, 4 * (5 * rank + rank * 6) * 2)

    @pytest.mark.filterwarnings("ignore:optimizer state is float64")
    def test_the_checkpoint_holds_them(
        self, path: Any, dtype: torch.dtype, rank: int, missing: str, tmp_path: Path
    ) -> None:
        trainer = self.trainer(dtype, rank, missing, host)
        expected = expected_content(trainer)
        save(tmp_path / "c", trainer, path)

        assert_same_content(read_content(tmp_path / "c"), expected)


@pytest.mark.parametrize("path", BLOCK_PATHS)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("place", [host, emulated.to_device], ids=["host", "device"])
def test_every_row_comes_out_in_logical_order(path: Any, strides: str, place: Any) -> None:
    trainer = Trainer(place)
    trainer.packed("a", experts=4, rows=3, columns=5, strides=STRIDES[strides])
    trainer.dense("b", rows=3, columns=5, strides=STRIDES[strides])
    if strides != "contiguous":
        assert not trainer.parameters[0].is_contiguous()
    captured, _ = capture(trainer, path)

    assert_same_content(captured, without_steps(expected_content(trainer)))


@pytest.mark.parametrize("path", BLOCK_PATHS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_widened_exactly(path: Any, dtype: torch.dtype) -> None:
    trainer = Trainer()
    p = torch.nn.Parameter((arange(4, 3, 2) - 9).to(dtype), requires_grad=False)
    trainer.parameters.append(p)
    trainer._states[p] = {"step": 1, "exp_avg": (arange(4, 3, 2) / 8).to(dtype), "exp_avg_sq": arange(4, 3, 2)}
    trainer.export_rows("a", p, range(4))
    captured, _ = capture(trainer, path)

    assert_same_content(captured, without_steps(expected_content(trainer)))
    assert captured[f"master/{key_of('a', 2)}"].dtype is torch.float32
    assert captured[f"lora/{key_of('a', 2)}"].dtype is dtype


@pytest.mark.parametrize("path", BLOCK_PATHS)
def test_nothing_captured_shares_memory_with_the_trainer(path: Any) -> None:
    """Where state is float32, contiguous and on the host, `.cpu()`, `.float()` and `.contiguous()` return it."""
    trainer = Trainer()
    trainer.packed("a", dtype=torch.float32, own_master=True)
    trainer.packed("b", dtype=torch.float32, strides=STRIDES["transposed"])
    trainer.dense("c", dtype=torch.float32, own_master=True)
    captured, _ = capture(trainer, path)

    owned = {tensor.untyped_storage().data_ptr() for tensor in trainer.tensors()}
    assert not owned & {tensor.untyped_storage().data_ptr() for tensor in captured.values()}
    assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in captured.values())


class TestCountsOnTheDevice:
    """Plan, log, the ledger of the device and the observer of torch's dispatcher: none knows the others."""

    @pytest.mark.parametrize("name", LAYOUTS)
    @pytest.mark.parametrize("path", BLOCK_PATHS)
    def test_every_layout(self, name: str, path: Any) -> None:
        trainer = LAYOUTS[name][0]()
        for parameter in trainer.parameters:
            move_state(trainer, parameter)
        plan = plan_transfers(trainer.exports, trainer.state, path)
        with emulated.observe() as ledger, CopyObserver() as seen:
            captured, log = capture(trainer, path)

        counts = [(e.source_dtype, e.nbytes) for e in ledger.d2h]
        assert [(e.source_dtype, e.source_bytes) for e in seen.from_device] == counts
        optimizer = [nbytes for dtype, nbytes in counts if dtype is torch.float32]
        assert (len(optimizer), sum(optimizer)) == (log.optimizer.calls, log.optimizer.bytes)
        assert (len(optimizer), sum(optimizer)) == (plan.optimizer_calls, plan.optimizer_bytes)
        assert len(counts) - len(optimizer) == log.weight.calls == plan.weight_calls
        assert_same_content(captured, without_steps(expected_content(trainer)))

    def test_eight_experts_are_48_and_6(self) -> None:
        found = {}
        for path in BLOCK_PATHS:
            trainer = eight_experts(emulated.to_device)
            with emulated.observe() as ledger:
                capture(trainer, path)
            state = [e for e in ledger.d2h if e.source_dtype is torch.float32]
            found[path] = (len(state), sum(e.nbytes for e in state), len(ledger.d2h) - len(state), ledger.item_calls)

        assert found == {"slice": (48, BLOCK_BYTES, 16, 0), "coalesced": (6, BLOCK_BYTES, 16, 0)}

    def test_each_state_is_one_copy_of_the_whole_parameter(self) -> None:
        trainer = eight_experts(emulated.to_device)
        with emulated.observe() as ledger:
            capture(trainer, "coalesced")

        shapes = [e.shape for e in ledger.d2h if e.source_dtype is torch.float32]
        assert shapes == [(8, 4, 6)] * 3 + [(8, 3, 4)] * 3

    def test_interleaved_rows_end_under_their_own_keys(self) -> None:
        trainer = interleaved()
        captured, log = capture(trainer, "coalesced")

        assert log.optimizer.calls == 24
        assert_same_content(captured, without_steps(expected_content(trainer)))


def move_state(trainer: Trainer, parameter: torch.nn.Parameter) -> None:
    """Put master and moments of a trainer that was built on the host onto the device."""
    master = trainer.held(parameter)["master"]
    moved = torch.nn.Parameter(emulated.to_device(master))
    held = trainer._states.pop(master)
    trainer._states[moved] = {k: emulated.to_device(v) if isinstance(v, torch.Tensor) else v for k, v in held.items()}
    on_device = torch.nn.Parameter(emulated.to_device(parameter))
    trainer.masters = [pair for pair in trainer.masters if pair[0] is not parameter] + [(on_device, moved)]
    trainer.parameters = [on_device if p is parameter else p for p in trainer.parameters]
    trainer.exports = [
        Export(e.key, on_device, expert=e.expert) if e.parameter is parameter else e for e in trainer.exports
    ]
    trainer._optimizer = None


class TestDeviceMemory:
    """What the docstrings of the two paths state."""

    def peak(self, path: Any, **kwargs: Any) -> tuple[int, int, int]:
        """Return peak above what was resident, bytes of one packed float32 state, and of one expert of it."""
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", experts=8, rows=4, columns=6, **kwargs)
        state = trainer.state
        (block,) = plan_transfers(trainer.exports, state, path).blocks
        before = allocated_on_device()
        emulated.reset_peak()
        with emulated.observe() as ledger:
            path_named(path).capture(block, TransferLog())
        assert allocated_on_device() == before
        assert ledger.d2h_calls > 0
        return emulated.max_memory_allocated() - before, 8 * 4 * 6 * 4, 4 * 6 * 4

    @pytest.mark.parametrize("path", BLOCK_PATHS)
    @pytest.mark.parametrize("strides", ["contiguous", "transposed", "permuted"])
    def test_dense_float32_state_needs_none(self, path: Any, strides: str) -> None:
        peak, _, expert = self.peak(path, strides=STRIDES[strides])

        # Rows of a parameter whose experts lie innermost are gapped, whoever cuts them.
        assert peak <= (expert if strides == "permuted" else 0)

    @pytest.mark.parametrize("why", ["bfloat16", "float64", "gapped", "missing"])
    def test_coalesced_needs_at_most_one_packed_parameter(self, why: str) -> None:
        kwargs: dict[str, dict[str, Any]] = {
            "bfloat16": {"state_dtype": torch.bfloat16},
            "float64": {"state_dtype": torch.float64},
            "gapped": {"strides": STRIDES["gapped"]},
            "missing": {"missing": MISSING["both"]},
        }
        peak, whole, _ = self.peak("coalesced", **kwargs[why])

        assert peak == whole

    @pytest.mark.parametrize("why", ["bfloat16", "float64", "gapped", "missing"])
    def test_slice_needs_at_most_one_expert(self, why: str) -> None:
        kwargs: dict[str, dict[str, Any]] = {
            "bfloat16": {"state_dtype": torch.bfloat16},
            "float64": {"state_dtype": torch.float64},
            "gapped": {"strides": STRIDES["gapped"]},
            "missing": {"missing": MISSING["both"]},
        }
        peak, _, expert = self.peak("slice", **kwargs[why])

        assert peak == expert


class TestWholeSave:
    """What crosses the boundary in a save is what the saver logs; nothing strays."""

    @pytest.mark.parametrize("path", BLOCK_PATHS)
    @pytest.mark.parametrize("device_steps", [False, True])
    def test_nothing_but_what_is_logged(self, path: Any, device_steps: bool, tmp_path: Path) -> None:
        def step(count: float) -> torch.Tensor:
            made = torch.tensor(count)
            return emulated.to_device(made) if device_steps else made

        trainer = Trainer(emulated.to_device)
        for layer in (2, 10):
            trainer.packed("gate_up_proj", experts=8, rows=4, columns=6, layer=layer, step=step(7.0 + layer))
            trainer.packed("down_proj", experts=8, rows=3, columns=4, layer=layer, step=step(70.0 + layer))
        trainer.dense("lm_head", layer=None, step=step(3.0))
        expected = expected_content(trainer)
        saver, state = CheckpointSaver(path, durable=False), trainer.state
        with emulated.observe() as ledger:
            log = saver.prepare(tmp_path / "c", trainer.exports, state, CONFIG)
            prepared = len(ledger.events)
            saver.finalize(tmp_path / "c")

        assert len(ledger.events) == prepared, "finalize touches no device"
        assert (ledger.item_calls, ledger.h2d_calls) == (0, 0)
        assert log.optimizer.calls == (2 * 48 + 3 if path == "slice" else 2 * 6 + 3)
        assert log.weight.calls == 2 * 16 + 1
        # Five steps in one copy.
        assert (log.step.calls, log.step.bytes) == ((1, 20) if device_steps else (0, 0))
        logged = (log.weight, log.optimizer, log.step)
        assert ledger.d2h_calls == sum(count.calls for count in logged)
        assert ledger.d2h_bytes == sum(count.bytes for count in logged)
        assert ledger.synchronizes == 1
        assert {event.thread for event in ledger.events} == {"MainThread"}
        assert_same_content(read_content(tmp_path / "c"), expected)

    @pytest.mark.parametrize("path", BLOCK_PATHS)
    def test_on_the_host_too_by_dtype(self, path: Any, tmp_path: Path) -> None:
        """Weights are bfloat16 and state is float32, so the observer can tell them apart."""
        trainer = eight_experts()
        with CopyObserver() as seen:
            save(tmp_path / "c", trainer, path)

        by_dtype = {dtype: [e for e in seen.copies if e.source_dtype is dtype] for dtype in STATE_DTYPES}
        assert len(by_dtype[torch.float32]) == (48 if path == "slice" else 6)
        assert sum(e.source_bytes for e in by_dtype[torch.float32]) == BLOCK_BYTES
        assert len(by_dtype[torch.bfloat16]) == 16
        assert len(seen.copies) == (64 if path == "slice" else 22)

    def test_a_second_save_takes_the_same_copies(self, tmp_path: Path) -> None:
        trainer = eight_experts(emulated.to_device)
        saver = CheckpointSaver(durable=False)
        with emulated.observe() as ledger:
            saver.save(tmp_path / "a", trainer.exports, trainer.state, CONFIG)
            first = ledger.d2h_calls
            saver.save(tmp_path / "b", trainer.exports, trainer.state, CONFIG)

        assert (first, ledger.d2h_calls) == (22, 44)

    def test_state_that_is_split_over_devices(self, tmp_path: Path) -> None:
        """Masters and moments on the host (offloaded), the parameter on the device."""
        trainer = Trainer()
        parameter = trainer.packed("a", dtype=torch.bfloat16)
        on_device = torch.nn.Parameter(emulated.to_device(parameter))
        expected = expected_content(trainer)
        trainer.masters = [(on_device, trainer.held(parameter)["master"])]
        trainer.exports = [Export(e.key, on_device, expert=e.expert) for e in trainer.exports]
        with emulated.observe() as ledger:
            save(tmp_path / "c", trainer)

        assert ledger.d2h_calls == 4
        assert_same_content(read_content(tmp_path / "c"), expected)


def test_components_are_those_of_the_format() -> None:
    assert COMPONENTS == ("master", "exp_avg", "exp_avg_sq")
