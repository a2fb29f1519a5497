"""Windows of the staged path: cut by column, shared by files that are alike, few objects for many exports."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import CheckpointSaver, plan_transfers
from packckpt import windows as windows_module
from packckpt.windows import FilePlan
from tests import emulated
from tests.builders import CONFIG, Trainer, assert_same_content, eight_experts, expected_content, read_content

emulated.install_or_skip()


def files_of(trainer: Trainer) -> dict[tuple[str, str | None], FilePlan]:
    plan = plan_transfers(trainer.exports, trainer.state, "staged")
    return {(file.component, file.block): file for file in plan.files}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class TestSharing:
    def test_components_that_are_alike_share_their_windows(self) -> None:
        trainer = eight_experts()
        _, *components = files_of(trainer).values()
        windows = [file.windows(100) for file in components]
        assert len(windows) == 3
        assert windows[0] is windows[1] is windows[2]
        sources = {id(file.source(0)) for file in components}
        assert len(sources) == 3

    def test_a_missing_moment_has_windows_of_its_own(self) -> None:
        trainer = eight_experts(missing=("exp_avg",))
        _, master, exp_avg, exp_avg_sq = (file.windows(1 << 20) for file in files_of(trainer).values())
        assert master is exp_avg_sq
        assert [window.copies for window in exp_avg] == [()]
        assert [window.parts for window in exp_avg] == [((None, master[0].bytes),)]

    def test_objects_do_not_grow_with_the_exports(self) -> None:
        """Two packed parameters: what the garbage collector looks at is for windows and parameters."""

        def objects(experts: int) -> int:
            gc.collect()
            trainer = Trainer()
            for name in ("a", "b"):
                trainer.packed(name, experts=experts, rows=2, columns=2)
            plan = plan_transfers(trainer.exports, trainer.state, "staged")
            windows = [file.windows(1 << 20) for file in plan.files]
            assert len(windows) == 4
            # Other objects come and go with whatever ran before; these are made by the plan alone.
            kinds = {kind for kind in vars(windows_module).values() if isinstance(kind, type)}
            kinds = {kind for kind in kinds if kind.__module__ == windows_module.__name__}
            return sum(type(each) in kinds for each in gc.get_objects())

        few = objects(10)
        assert objects(1000) == few > 0


class TestCuts:
    def test_rows_and_places_of_a_window(self) -> None:
        """Twelve rows in string order, `0, 1, 10, 11, 2, ...`: ascending rows of the source, in two slices."""
        trainer = Trainer()
        trainer.packed("a", experts=12, rows=3, columns=2)
        weights = files_of(trainer)["lora", None]
        (window,) = weights.windows(1 << 20)
        (copy,) = window.copies
        (run,) = copy.runs
        placed = {row: place for rows, places in run.segments for row, place in zip(rows, places, strict=True)}
        order = sorted(range(12), key=str)
        assert placed == {row: 6 * order.index(row) for row in range(12)}
        assert len(run.segments) < 6
        assert (run.start, run.stop, run.columns, run.numel) == (0, 2, 3, 72)
        assert window.parts == ((0, 144),)

    def test_a_tensor_larger_than_a_window_is_cut_by_rows_and_the_next_joins_its_rest(self) -> None:
        trainer = Trainer()
        trainer.dense("a", 4, 5, dtype=torch.float32)
        trainer.dense("b", 4, 1, dtype=torch.float32)
        weights = files_of(trainer)["lora", None]
        # Rows of 16 bytes, two in a window: 2, 2, then one of `a` and the only one of `b`.
        found = [
            [(run.number, run.start, run.stop) for copy in window.copies for run in copy.runs]
            for window in weights.windows(32)
        ]
        assert found == [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 5), (1, 0, 1)]]

    def test_zeros_and_two_devices_in_one_window_keep_the_order_of_the_file(self) -> None:
        trainer = Trainer()
        trainer.packed("a", experts=2, rows=1, columns=2)
        trainer.packed("b", experts=2, rows=1, columns=3, missing=("exp_avg",))
        trainer.place = emulated.to_device
        trainer.packed("c", experts=2, rows=1, columns=1)
        (exp_avg,) = [file for file in files_of(trainer).values() if file.component == "exp_avg"]
        (window,) = exp_avg.windows(1 << 20)
        # By expert, then a, b, c: 8 bytes, 12 of zeros and 4.
        sizes = [size for _, size in window.parts]
        assert sizes == [8, 12, 4, 8, 12, 4]
        assert [at is None for at, _ in window.parts] == [False, True, False] * 2
        taken = sorted((at, size) for at, size in window.parts if at is not None)
        assert [at for at, _ in taken] == [0, 8, 16, 20]
        assert window.bytes == 24


class TestOnTheCpu:
    @pytest.mark.parametrize("place", [on_host, emulated.to_device], ids=["host", "device"])
    def test_its_windows_are_small_and_the_plan_counts_them(
        self, place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(windows_module, "CPU_WINDOW_BYTES", 200)
        trainer = eight_experts(place)
        trainer.export_rows("again", trainer.parameters[0], [3, 1])
        plan = plan_transfers(trainer.exports, trainer.state, "staged")
        with CheckpointSaver("staged", durable=False) as saver:
            log = saver.prepare(tmp_path / "c", trainer.exports, trainer.state, CONFIG)
            saver.finalize(tmp_path / "c")
        assert (log.weight.calls, log.weight.bytes) == (plan.weight_calls, plan.weight_bytes)
        assert (log.optimizer.calls, log.optimizer.bytes) == (plan.optimizer_calls, plan.optimizer_bytes)
        largest = max(window.bytes for file in plan.files for window in file.windows(plan.buffer_bytes))
        assert (largest <= 200) == (place is on_host)
        assert (plan.optimizer_calls == 3) == (place is not on_host)
        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))
