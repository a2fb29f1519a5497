"""Optimizer state is read by reference, without a trace; what the format cannot hold is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from packckpt import AdamState, CheckpointSaver, Export, Hyperparameters, OptimizerError, plan_transfers
from packckpt.optimizer import step_number
from packckpt.transfer import TransferLog, read_steps
from tests import emulated
from tests.builders import (
    CONFIG,
    MOMENTS,
    PATHS,
    Trainer,
    arange,
    assert_same_content,
    expected_content,
    names_in,
    read_content,
    save,
)


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(arange(*(shape or (4, 3, 2))))


class TestReading:
    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
    def test_by_reference(self, kind: type[torch.optim.Optimizer]) -> None:
        p = parameter()
        optimizer = stepped(kind([p]))
        held = AdamState.from_optimizer(optimizer).reader().read("k", p)

        assert held.master is p
        assert held.exp_avg is optimizer.state[p]["exp_avg"]
        assert held.exp_avg_sq is optimizer.state[p]["exp_avg_sq"]
        assert held.step is optimizer.state[p]["step"]

    def test_one_view_serves_a_whole_run(self) -> None:
        p = parameter()
        optimizer = torch.optim.AdamW([p], lr=1e-3)
        state = AdamState.from_optimizer(optimizer)
        before = state.reader().read("k", p)
        stepped(optimizer)
        optimizer.param_groups[0]["lr"] = 0.5

        assert (before.exp_avg, before.step) == (None, None)
        assert state.reader().read("k", p).step == torch.tensor(1.0)
        assert state.hyperparameters().learning_rate == 0.5

    def test_masters_are_found_by_their_parameter(self) -> None:
        p, q, master = parameter(), parameter(), parameter()
        state = AdamState.from_optimizer(torch.optim.AdamW([master, q]), iter([(p, master)]))

        assert state.reader().read("k", p).master is master
        assert state.reader().read("k", q).master is q
        assert state.master_of(p) is master

    def test_inserts_nothing_into_the_optimizer(self, tmp_path: Path) -> None:
        """Reading `optimizer.state[p]` would insert an entry."""
        p, q = parameter(), parameter()
        optimizer = torch.optim.AdamW([p, q])
        p.grad = torch.ones_like(p)
        optimizer.step()
        before = optimizer.state_dict()
        exports = [Export(f"{name}.{row}", t, expert=row) for name, t in (("p", p), ("q", q)) for row in range(4)]
        CheckpointSaver(durable=False).save(tmp_path / "c", exports, AdamState.from_optimizer(optimizer), CONFIG)

        assert list(optimizer.state) == [p]
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state_dict()["state"].keys() == before["state"].keys()
        content = read_content(tmp_path / "c")
        assert [content[f"step/{e.key}"].item() for e in exports] == [1.0] * 4 + [0.0] * 4
        for row in range(4):
            assert torch.equal(content[f"master/q.{row}"], q.detach()[row].T)
            for moment in MOMENTS:
                assert torch.equal(content[f"{moment}/q.{row}"], torch.zeros(2, 3))
                assert torch.equal(content[f"{moment}/p.{row}"], optimizer.state[p][moment][row].T)

    def test_names_a_parameter_that_the_optimizer_does_not_hold(self) -> None:
        p, q, master = parameter(), parameter(2, 3), parameter(2, 3)
        state = AdamState.from_optimizer(torch.optim.AdamW([p]), [(q, master)])

        with pytest.raises(OptimizerError, match=r"^k: AdamW does not hold its master \(shape \[2, 3\]\); pass `mas"):
            plan_transfers([Export("k", q)], state)
        with pytest.raises(OptimizerError, match=r"^k: AdamW does not hold the parameter"):
            plan_transfers([Export("k", parameter(2, 3))], state)

    @pytest.mark.parametrize(
        ("masters", "message"),
        [
            ([3], r"masters\[0\] is int; expected \(parameter, master\)"),
            ([(arange(2, 3),)], r"masters\[0\] is tuple; expected"),
            ([(arange(2, 3), None)], r"masters\[0\] is tuple; expected"),
        ],
    )
    def test_refuses_masters_that_are_no_pairs(self, masters: Any, message: str) -> None:
        with pytest.raises(OptimizerError, match=message):
            AdamState.from_optimizer(torch.optim.AdamW([parameter()]), masters)

    def test_refuses_two_masters_of_one_parameter(self) -> None:
        p, first, second = parameter(), parameter(), parameter()
        optimizer = torch.optim.AdamW([first, second])

        with pytest.raises(OptimizerError, match=r"masters\[1\]: the parameter of shape \[4, 3, 2\] has two different"):
            AdamState.from_optimizer(optimizer, [(p, first), (p, second)])
        AdamState.from_optimizer(optimizer, [(p, first), (p, first)])


def test_a_pair_the_wrong_way_round_is_told(tmp_path: Path) -> None:
    trained, master = parameter(), parameter()
    state = AdamState.from_optimizer(torch.optim.AdamW([master]), [(master, trained)])

    with pytest.raises(OptimizerError, match=r"k: AdamW steps the first tensor of its pair .*the wrong way round"):
        CheckpointSaver().prepare(tmp_path / "c", [Export("k", master, expert=0)], state, CONFIG)
    assert names_in(tmp_path) == []


class TestHyperparameters:
    def test_are_plain_floats(self) -> None:
        optimizer = torch.optim.AdamW([parameter()], lr=torch.tensor(0.25), betas=(0.5, 0.75), eps=1, weight_decay=0)
        found = AdamState.from_optimizer(optimizer).hyperparameters()

        assert found == Hyperparameters(0.25, 0.5, 0.75, 1.0, 0.0)
        assert all(type(value) is float for value in found.as_dict().values())

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"lr": 2e-3}, r"AdamW: parameter groups 0 and 1 differ in learning_rate \(0.001 and 0.002\); .* one set"),
            ({"betas": (0.8, 0.999)}, r"groups 0 and 1 differ in beta1 \(0.9 and 0.8\)"),
            ({"betas": (0.9, 0.9)}, r"groups 0 and 1 differ in beta2 \(0.999 and 0.9\)"),
            ({"eps": 1e-6}, r"groups 0 and 1 differ in eps"),
            ({"weight_decay": 0.5}, r"groups 0 and 1 differ in weight_decay"),
        ],
    )
    def test_groups_that_differ_are_refused_by_name(self, setting: dict[str, Any], message: str) -> None:
        groups = [{"params": [parameter()]}, {"params": [parameter()], **setting}]

        with pytest.raises(OptimizerError, match=message):
            AdamState.from_optimizer(torch.optim.AdamW(groups))

    def test_are_checked_again_at_the_save(self, tmp_path: Path) -> None:
        p, q = parameter(), parameter()
        optimizer = torch.optim.AdamW([{"params": [p]}, {"params": [q]}])
        state = AdamState.from_optimizer(optimizer)
        optimizer.param_groups[1]["lr"] = 0.5

        with pytest.raises(OptimizerError, match="differ in learning_rate"):
            CheckpointSaver().prepare(tmp_path / "c", [Export("k", p, expert=0)], state, CONFIG)
        assert names_in(tmp_path) == []

    def test_other_entries_may_differ_and_an_empty_group_decides_nothing(self) -> None:
        optimizer = torch.optim.AdamW([{"params": [parameter()]}, {"params": [parameter()], "foreach": True}])
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": 9.0})

        assert AdamState.from_optimizer(optimizer).hyperparameters().learning_rate == 1e-3

    @pytest.mark.parametrize("value", [math.nan, math.inf, "much", torch.tensor([1.0, 2.0]), None, 10**400])
    def test_what_is_no_finite_number_is_refused(self, value: Any) -> None:
        optimizer = torch.optim.AdamW([parameter()])
        optimizer.param_groups[0]["lr"] = value
        with pytest.raises(OptimizerError, match=r"AdamW: parameter group 0: learning_rate is .*; expected a finite"):
            AdamState.from_optimizer(optimizer)


class EightBit(torch.optim.AdamW):
    """Holds its state as an 8-bit optimizer does."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            codes = torch.zeros(p.shape, dtype=torch.uint8)
            self.state[p] = {"step": 1, "state1": codes, "state2": codes.clone(), "absmax1": torch.ones(1)}


class GroupStep(torch.optim.AdamW):
    """Keeps the step count in the group, as some fused optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["step"] = 3


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, amsgrad=True)


OTHERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[str, ...]]] = {
    "SGD": (momentum, ("SGD", r"shape \[3, 2\]", "betas, eps", "momentum_buffer")),
    "Muon": (torch.optim.Muon, ("Muon", r"shape \[3, 2\]", "betas", "momentum_buffer")),
    "Adafactor": (torch.optim.Adafactor, ("Adafactor", r"shape \[3, 2\]", "betas", "row_var", "col_var")),
    "8-bit": (EightBit, ("EightBit", r"shape \[3, 2\]", "absmax1, state1, state2, step", "no place for absmax1")),
    "amsgrad": (amsgrad, ("AdamW", "amsgrad", "max_exp_avg_sq")),
    "NAdam": (torch.optim.NAdam, ("NAdam", r"shape \[3, 2\]", "mu_product")),
    "Adamax": (torch.optim.Adamax, ("Adamax", r"shape \[3, 2\]", "exp_inf")),
    "step in the group": (GroupStep, ("GroupStep", "keeps the step count itself")),
}


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adamax])
def test_an_optimizer_whose_state_will_differ_is_refused_before_it_has_any(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(OptimizerError, match=f"{kind.__name__} keeps state that the checkpoint format has no place"):
        AdamState.from_optimizer(kind([parameter(3, 2)]))


@pytest.mark.parametrize("name", OTHERS)
class TestOtherOptimizers:
    def test_refused_with_optimizer_parameter_and_keys(self, name: str) -> None:
        make, words = OTHERS[name]
        optimizer = stepped(make([parameter(3, 2)]))

        with pytest.raises(OptimizerError) as caught:
            AdamState.from_optimizer(optimizer)
        for word in words:
            caught.match(word)

    def test_refused_at_the_save_before_a_file_exists(self, name: str, tmp_path: Path) -> None:
        """The view was made while nothing gave the optimizer away."""
        make, words = OTHERS[name]
        p = parameter(3, 2)
        optimizer = stepped(make([p]))
        state = AdamState.from_optimizer(torch.optim.AdamW([p]))
        state._optimizer = optimizer

        with pytest.raises(OptimizerError, match=words[0]):
            CheckpointSaver().prepare(tmp_path / "new" / "c", [Export("k", p)], state, CONFIG)
        assert names_in(tmp_path) == []


class TestStateThatDoesNotFit:
    @pytest.mark.parametrize(
        ("component", "value", "message"),
        [
            ("exp_avg", 3.0, "k.0: AdamW exp_avg is a float; expected a tensor"),
            ("exp_avg", torch.zeros(4, 3, 2, dtype=torch.int32), "k.0: AdamW exp_avg has dtype int32 and layout"),
            ("exp_avg_sq", torch.zeros(4, 3, 2).to_sparse(), "k.0: AdamW exp_avg_sq has dtype .*layout torch.sparse"),
            ("exp_avg", torch.zeros(4, 2, 3), r"exp_avg has shape \[4, 2, 3\]; expected that of the .* \[4, 3, 2\]"),
            ("exp_avg", torch.zeros(24), r"exp_avg has shape \[24\]; expected that of the parameter"),
            ("exp_avg", torch.zeros(3, 3, 2), r"k.3: exp_avg has shape \[3, 3, 2\] and no row 3; the parameter"),
        ],
    )
    def test_is_refused_before_a_file_exists(self, component: str, value: Any, message: str, tmp_path: Path) -> None:
        p = parameter()
        optimizer = stepped(torch.optim.AdamW([p]))
        optimizer.state[p][component] = value
        state = AdamState.from_optimizer(optimizer)
        exports = [Export(f"k.{row}", p, expert=row) for row in range(4)]

        for path in PATHS:
            with pytest.raises(OptimizerError, match=message):
                CheckpointSaver(path).prepare(tmp_path / "c", exports, state, CONFIG)
        assert names_in(tmp_path) == []

    def test_dense_state_must_have_the_very_shape(self) -> None:
        p = parameter(3, 2)
        optimizer = stepped(torch.optim.AdamW([p]))
        optimizer.state[p]["exp_avg"] = torch.zeros(2, 3)

        with pytest.raises(OptimizerError, match=r"k: AdamW exp_avg has shape \[2, 3\]"):
            plan_transfers([Export("k", p)], AdamState.from_optimizer(optimizer))


STEPS: dict[str, Any] = {
    "int": 7,
    "float": 7.0,
    "0-d float32": torch.tensor(7.0),
    "0-d int64": torch.tensor(7),
    "one element": torch.tensor([7.0]),
    "one element, two axes": torch.tensor([[7.0]]),
    "float64": torch.tensor(7.0, dtype=torch.float64),
    "bfloat16": torch.tensor(7.0, dtype=torch.bfloat16),
    "numpy float64": numpy.float64(7),
}


BAD_STEPS: dict[str, tuple[Any, str]] = {
    "NaN": (math.nan, "step is nan; expected a finite whole number, 0 or more"),
    "infinite": (math.inf, "step is inf; expected a finite"),
    "negative": (-1, "step is -1; expected a finite"),
    "fractional": (7.5, "step is 7.5; expected a finite"),
    "fractional tensor": (torch.tensor(7.5), "step is 7.5"),
    "NaN tensor": (torch.tensor(math.nan), "step is nan"),
    "two elements": (
        torch.tensor([7.0, 7.0]),
        r"step is a tensor of shape \[2\] and dtype torch.float32; expected one",
    ),
    "no elements": (torch.zeros(0), r"step is a tensor of shape \[0\]"),
    "bool tensor": (torch.tensor(True), "step is a tensor of shape .* torch.bool"),
    "complex tensor": (torch.tensor(7j), "step is a tensor of shape .* torch.complex64"),
    "text": ("7", r"step is a str \('7'\); expected a number of steps"),
    "bool": (True, r"step is a bool \(True\)"),
    "beyond float64": (2**53 + 1, r"step is 9007199254740993; the format holds steps up to 2\*\*53"),
    "beyond every float": (10**400, r"step is 10*; the format holds"),
}


class TestSteps:
    @pytest.mark.parametrize("form", STEPS)
    def test_every_form_is_the_same_step(self, form: str, tmp_path: Path) -> None:
        trainer = Trainer()
        trainer.packed("a", step=STEPS[form])
        save(tmp_path / "c", trainer)

        assert {v.item() for k, v in read_content(tmp_path / "c").items() if k.startswith("step/")} == {7.0}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_on_the_device(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        emulated.install_or_skip()
        steps = [emulated.to_device(torch.full(shape, step).to(dtype)) for step in (7, 9, 11)]
        log = TransferLog()
        with emulated.observe() as ledger:
            found = read_steps([("a", steps[0]), ("b", steps[1]), ("c", steps[2]), ("d", steps[0])], log)

        assert found == [7, 9, 11, 7]
        assert (ledger.d2h_calls, ledger.item_calls, log.step.calls) == (1, 0, 1)
        assert ledger.d2h_bytes == log.step.bytes == 3 * dtype.itemsize

    @pytest.mark.parametrize(
        "step", [2**24 + 1, torch.tensor(2**24 + 1), torch.tensor(2.0**24 + 1, dtype=torch.float64), 2**53]
    )
    def test_large_steps_are_exact(self, step: Any, tmp_path: Path) -> None:
        trainer = Trainer()
        trainer.dense("a", step=step)
        save(tmp_path / "c", trainer)

        assert read_content(tmp_path / "c")[f"step/{trainer.exports[0].key}"].item() == int(step)

    def test_a_missing_step_is_zero(self, tmp_path: Path) -> None:
        trainer = Trainer()
        trainer.packed("a", step=None)
        save(tmp_path / "c", trainer)

        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))
        assert read_content(tmp_path / "c")[f"step/{trainer.exports[0].key}"].item() == 0

    @pytest.mark.parametrize("step", BAD_STEPS)
    def test_refused_before_anything_is_written(self, step: str, tmp_path: Path) -> None:
        value, message = BAD_STEPS[step]
        self.expect_refused(value, message, tmp_path)

    @pytest.mark.parametrize("step", [name for name, (value, _) in BAD_STEPS.items() if hasattr(value, "dtype")])
    def test_refused_on_the_device(self, step: str, tmp_path: Path) -> None:
        emulated.install_or_skip()
        value, message = BAD_STEPS[step]
        self.expect_refused(emulated.to_device(value), message, tmp_path)

    def expect_refused(self, step: Any, message: str, directory: Path) -> None:
        trainer = Trainer()
        trainer.packed("good")
        trainer.packed("bad", step=step)

        with pytest.raises(OptimizerError, match=f"^{trainer.exports[4].key}: {message}"):
            save(directory / "new" / "c", trainer)
        assert names_in(directory) == []

    def test_step_number_returns_a_plain_int(self) -> None:
        assert type(step_number("k", 7.0)) is int

    def test_one_step_tensor_shared_by_three_parameters(self, tmp_path: Path) -> None:
        shared = torch.tensor(7.0)
        trainer = Trainer()
        for name in "abc":
            trainer.packed(name, step=shared)
        trainer.packed("d", step=torch.tensor(9.0))
        save(tmp_path / "c", trainer)

        assert_same_content(read_content(tmp_path / "c"), expected_content(trainer))
