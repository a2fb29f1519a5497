"""What goes as one copy, what goes slice by slice, and why: counts, bytes and words."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from packckpt import Export, OptimizerError, PackckptError, plan_transfers
from packckpt.plan import TransferPlan
from tests import emulated
from tests.builders import Trainer, allocated_on_device, eight_experts, key_of
from tests.observer import CopyObserver


def one(rows: list[int], experts: int = 4) -> Trainer:
    trainer = Trainer()
    trainer.export_rows("a", trainer.parameter(experts, 3, 2), rows)
    return trainer


def interleaved() -> Trainer:
    trainer = Trainer()
    a, b = trainer.parameter(4, 3, 2), trainer.parameter(4, 3, 2)
    for row in range(4):
        trainer.export_rows("a", a, [row])
        trainer.export_rows("b", b, [row])
    return trainer


def repeated() -> Trainer:
    trainer = one([0, 1, 2, 3])
    trainer.exports.append(Export(key_of("again", 1), trainer.parameters[0], expert=1))
    return trainer


def repeated_instead() -> Trainer:
    """As many exports as rows, but one row twice and one not at all."""
    trainer = one([0, 1, 3])
    trainer.exports.append(Export(key_of("again", 1), trainer.parameters[0], expert=1))
    return trainer


def two_blocks() -> Trainer:
    trainer = one([0, 1])
    trainer.export_rows("a", trainer.parameters[0], [2, 3], layer=1)
    return trainer


def other_expert_axis() -> Trainer:
    """The optimizer holds more rows than are trained."""
    trainer = one([0, 1, 2, 3])
    master = trainer.held(trainer.parameters[0])["master"]
    trainer._states[master]["exp_avg"] = torch.arange(30.0).reshape(5, 3, 2)
    return trainer


def one_expert() -> Trainer:
    return one([0], experts=1)


def dense() -> Trainer:
    trainer = Trainer()
    trainer.dense("q_proj")
    return trainer


# name: (trainer, coalesced, copies on the coalesced path, exports, reason)
LAYOUTS: dict[str, tuple[Callable[[], Trainer], bool, int, int, str]] = {
    "full": (lambda: one([0, 1, 2, 3]), True, 3, 4, "rows 0 to 3, complete and in order"),
    "one expert": (one_expert, True, 3, 1, "rows 0 to 0, complete and in order"),
    "sparse": (lambda: one([0, 2, 4], 8), False, 9, 3, "sparse: rows 0, 2, 4 of 8"),
    "subset": (lambda: one([0, 1, 2]), False, 9, 3, "sparse: rows 0, 1, 2 of 4"),
    "subset, long": (
        lambda: one(list(range(9)), 10), False, 27, 9, "sparse: rows 0, 1, 2, 3, 4, 5, 6, 7, ... of 10",
    ),
    "reversed": (lambda: one([3, 2, 1, 0]), False, 12, 4, "reordered: rows 3, 2, 1, 0"),
    "swapped": (lambda: one([0, 2, 1, 3]), False, 12, 4, "reordered: rows 0, 2, 1, 3"),
    "repeated": (repeated, False, 15, 5, "repeated: row 1 is exported more than once"),
    "repeated instead": (repeated_instead, False, 12, 4, "repeated: row 1 is exported more than once"),
    "two blocks": (
        two_blocks, False, 12, 4,
        "spans the blocks base_model.model.model.layers.0 and base_model.model.model.layers.1",
    ),
    "shape mismatch": (other_expert_axis, False, 12, 4, "exp_avg has shape [5, 3, 2], the parameter [4, 3, 2]"),
    "dense": (dense, False, 3, 1, "whole parameter: one copy a state"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
class TestLayouts:
    def test_coalesced(self, name: str) -> None:
        make, coalesced, calls, exports, reason = LAYOUTS[name]
        trainer = make()
        (decision,) = plan_transfers(trainer.exports, trainer.state).parameters

        assert (decision.coalesced, decision.optimizer_calls, decision.reason) == (coalesced, calls, reason)
        assert decision.exports == exports
        assert decision.optimizer_bytes == 3 * exports * 6 * 4

    def test_slice(self, name: str) -> None:
        make, _, _, exports, _ = LAYOUTS[name]
        trainer = make()
        plan = plan_transfers(trainer.exports, trainer.state, "slice")

        assert plan.optimizer_calls == 3 * exports
        assert plan.optimizer_bytes == plan_transfers(trainer.exports, trainer.state).optimizer_bytes
        assert not any(decision.coalesced for decision in plan.parameters)
        assert not any(unit.coalesced for block in plan.blocks for unit in block.units)
        assert [export for block in plan.blocks for export in block.exports] == trainer.exports

    def test_without_an_optimizer_nothing_of_it_is_copied(self, name: str) -> None:
        trainer = LAYOUTS[name][0]()
        plan = plan_transfers(trainer.exports, None)

        assert (plan.optimizer_calls, plan.optimizer_bytes) == (0, 0)
        assert (plan.weight_calls, plan.weight_bytes) == (len(trainer.exports), len(trainer.exports) * 6 * 2)


class TestSeveralParameters:
    def test_interleaved_names_what_stands_between(self) -> None:
        trainer = interleaved()
        plan = plan_transfers(trainer.exports, trainer.state)

        assert plan.optimizer_calls == 24
        assert [p.reason for p in plan.parameters] == [
            f"interleaved with {key_of('b', 0)}",
            f"interleaved with {key_of('a', 1)}",
        ]

    def test_a_dense_export_between_two_rows_is_enough(self) -> None:
        trainer = Trainer()
        a = trainer.parameter(4, 3, 2)
        trainer.export_rows("a", a, [0, 1])
        trainer.dense("router")
        trainer.export_rows("a", a, [2, 3])
        plan = plan_transfers(trainer.exports, trainer.state)

        assert plan.parameters[0].reason == f"interleaved with {key_of('router')}"
        assert plan.optimizer_calls == 12 + 3

    def test_eight_experts_and_two_parameters_are_48_and_6_copies_of_equal_bytes(self) -> None:
        trainer = eight_experts()
        plans = [plan_transfers(trainer.exports, trainer.state, path) for path in ("slice", "coalesced")]

        assert [plan.optimizer_calls for plan in plans] == [48, 6]
        assert [plan.optimizer_bytes for plan in plans] == [3 * 8 * (24 + 12) * 4] * 2
        assert [plan.weight_calls for plan in plans] == [16, 16]

    def test_missing_moments_count_like_those_that_are_there(self) -> None:
        trainer = eight_experts(missing=("exp_avg", "exp_avg_sq"), step=None)

        assert plan_transfers(trainer.exports, trainer.state, "slice").optimizer_calls == 48
        assert plan_transfers(trainer.exports, trainer.state).optimizer_calls == 6

    def test_blocks_come_in_string_order_and_units_in_export_order(self) -> None:
        trainer = Trainer()
        for layer in (2, 10, None, 1):
            trainer.dense("b", layer=layer)
            trainer.packed("a", layer=layer)
        plan = plan_transfers(trainer.exports, trainer.state)

        assert [block.name.rpartition(".")[2] for block in plan.blocks] == ["__global__", "1", "10", "2"]
        assert plan.blocks[3].name == "base_model.model.model.layers.2"
        for block in plan.blocks:
            assert list(block.exports) == [e for e in trainer.exports if e.block == block.name]
            assert [unit.coalesced for unit in block.units] == [False, True]

    def test_float64_state_is_named(self) -> None:
        trainer = Trainer()
        trainer.packed("a", experts=2, state_dtype=torch.float64)
        trainer.packed("b", experts=2)

        assert plan_transfers(trainer.exports, trainer.state).narrowed_keys == (key_of("a", 0), key_of("a", 1))

    def test_an_empty_list_is_an_empty_plan(self) -> None:
        plan = plan_transfers([], None)

        assert (plan.blocks, plan.parameters, plan.optimizer_calls, plan.weight_calls) == ((), (), 0, 0)
        assert plan.explain() == "coalesced: 0 optimizer copies, 0 bytes"


def test_explain_is_a_line_a_parameter_and_a_total() -> None:
    trainer = one([0, 1, 2, 3])
    trainer.export_rows("b", trainer.parameter(8, 3, 2), [0, 2, 4])

    assert plan_transfers(trainer.exports, trainer.state).explain().splitlines() == [
        f"coalesced       3 copies  [4, 3, 2]  {key_of('a', 0)} (+3): rows 0 to 3, complete and in order",
        f"slice           9 copies  [8, 3, 2]  {key_of('b', 0)} (+2): sparse: rows 0, 2, 4 of 8",
        "coalesced: 12 optimizer copies, 504 bytes",
    ]


def test_an_optimizer_in_place_of_its_state_is_refused() -> None:
    trainer = eight_experts()
    with pytest.raises(OptimizerError, match=r"state is a AdamW; expected AdamState\.from_optimizer"):
        plan_transfers(trainer.exports, trainer.optimizer, "slice")  # type: ignore[arg-type]


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(PackckptError, match="path is 'both'; expected one of slice, coalesced, staged"):
        plan_transfers([], None, "both")  # type: ignore[arg-type]


def test_planning_reads_and_allocates_nothing() -> None:
    emulated.install_or_skip()
    trainer = eight_experts(emulated.to_device)
    state = trainer.state
    before = allocated_on_device()
    emulated.reset_peak()
    with emulated.observe() as ledger, CopyObserver() as seen:
        plan_transfers(trainer.exports, state)

    assert (ledger.events, seen.events) == ([], [])
    assert emulated.max_memory_allocated() == before


class _Tally:
    """Counts the Python calls that a function makes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


def work_of_planning(layers: int, experts: int, layout: str) -> tuple[int, TransferPlan]:
    trainer = Trainer()
    for layer in range(layers):
        made = trainer.parameter(experts, 1, 1)
        rows = range(experts) if layout == "full" else range(experts - 1, -1, -1)
        trainer.export_rows("a", made, rows, layer=layer)
    state, tally = trainer.state, _Tally()
    sys.setprofile(tally)
    try:
        plan = plan_transfers(trainer.exports, state)
    finally:
        sys.setprofile(None)
    return tally.calls, plan


@pytest.mark.parametrize("layout", ["full", "reordered"])
@pytest.mark.parametrize(("few", "many"), [((4, 100), (20, 100)), ((4, 100), (4, 500))], ids=["layers", "experts"])
def test_work_grows_linearly(few: tuple[int, int], many: tuple[int, int], layout: str) -> None:
    """Five times the exports are at most five times the calls, whether layers or experts grow."""
    (few_calls, few_plan), (many_calls, many_plan) = (work_of_planning(*size, layout) for size in (few, many))

    assert (few_plan.weight_calls, many_plan.weight_calls) == (400, 2000)
    assert many_calls <= 5.2 * few_calls


@pytest.mark.slow
def test_time_grows_linearly_to_50000_exports() -> None:
    """A ratio of processor times within one run: loops that make no calls count here too.

    The collector is off: a full pass looks at every object of the process, whoever made it.
    """

    def seconds(layers: int) -> float:
        trainer = Trainer()
        for layer in range(layers):
            for name in ("gate_up_proj", "down_proj"):
                trainer.packed(name, experts=125, rows=1, columns=1, layer=layer)
        state = trainer.state
        times = []
        gc.disable()
        try:
            for _ in range(5):
                begin = time.process_time()
                plan = plan_transfers(trainer.exports, state)
                times.append(time.process_time() - begin)
        finally:
            gc.enable()
        assert plan.weight_calls == layers * 250
        return min(times)

    few, many = seconds(40), seconds(200)

    assert many < 3 * 5 * few, f"10,000 exports: {few:.3f} s; 50,000: {many:.3f} s"
