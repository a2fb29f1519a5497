"""Adam state as the checkpoint needs it, read without touching the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from packckpt.dtypes import NAME_OF_DTYPE, plain_name, supported_names
from packckpt.errors import OptimizerError

COMPONENTS = ("master", "exp_avg", "exp_avg_sq")
MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE_KEYS = frozenset({"step", *MOMENTS})
_GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")
# A float64, which is what JSON readers use, holds every whole number up to here.
LARGEST_STEP = 2**53


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The one set of AdamW hyper-parameters that the format has a place for."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def as_dict(self) -> dict[str, float]:
        """Return the five values under the names that the manifest uses."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterState:
    """What the optimizer holds for one parameter, by reference.

    Attributes:
        master: the tensor that the optimizer steps; the parameter itself where there is no master copy.
        exp_avg, exp_avg_sq: the moments, or None where the optimizer holds none yet.
        step: the step count as it was found (a number or a one-element tensor), or None.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    step: object | None

    def component(self, name: str) -> torch.Tensor | None:
        """Return master, exp_avg or exp_avg_sq by name."""
        value: torch.Tensor | None = getattr(self, name)
        return value

    @property
    def held(self) -> list[torch.Tensor]:
        """Master and moments, as far as the optimizer holds them."""
        found = (self.component(name) for name in COMPONENTS)
        return [tensor for tensor in found if tensor is not None]


class AdamState:
    """A live view of an Adam-like optimizer: every read sees the optimizer as it is at that moment.

    One view may serve a whole training run. Nothing is copied, and nothing is inserted into
    `optimizer.state` (reading `optimizer.state[p]` would).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[int, torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._masters = masters

    @classmethod
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> AdamState:
        """View the state of `optimizer`.

        Args:
            optimizer: `torch.optim.Adam`, `AdamW`, or one with the same state (`step`, `exp_avg`,
                `exp_avg_sq`) and the same parameter-group entries.
            masters: pairs `(parameter, master)` where the optimizer steps a float32 copy of a trained
                parameter. None: the parameters are their own masters.

        Raises:
            OptimizerError: state that the format has no place for (another optimizer, amsgrad, an 8-bit
                state), or groups that differ in one of the five hyper-parameters.
        """
        view = cls(optimizer, _masters_by_id(masters))
        view.hyperparameters()
        for name, parameter in view._named_parameters():
            _check_keys(type(optimizer).__name__, name, optimizer.state.get(parameter, {}))
        if isinstance(optimizer, torch.optim.NAdam | torch.optim.Adamax):
            # Their state differs from Adam's only once they have stepped.
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps state that the checkpoint format has no place for; it holds step, "
                "exp_avg and exp_avg_sq, as Adam and AdamW do: save this optimizer another way"
            )
        return view

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that is viewed."""
        return self._optimizer

    def hyperparameters(self) -> Hyperparameters:
        """Return learning rate, betas, eps and weight decay, which all groups must share.

        Raises:
            OptimizerError: groups differ, lack an entry, or use amsgrad; names group and entry.
        """
        optimizer_name = type(self._optimizer).__name__
        # A group without parameters decides nothing.
        groups = [(i, g) for i, g in enumerate(self._optimizer.param_groups) if g["params"]]
        if not groups:
            raise OptimizerError(f"{optimizer_name} holds no parameters; there is no state to save")
        found = [(index, self._group_hyperparameters(index, group)) for index, group in groups]
        first_index, first = found[0]
        for index, other in found[1:]:
            for field, value in first.as_dict().items():
                if other.as_dict()[field] != value:
                    raise OptimizerError(
                        f"{optimizer_name}: parameter groups {first_index} and {index} differ in {field} "
                        f"({value!r} and {other.as_dict()[field]!r}); the checkpoint format has one set of "
                        "hyper-parameters: use one value, or one optimizer for each set"
                    )
        return first

    def master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the optimizer steps for `parameter`."""
        return self._masters.get(id(parameter), parameter)

    def stepped_but_not(self, exported: Iterable[torch.Tensor]) -> list[str]:
        """Return what the optimizer has stepped for none of these parameters: no checkpoint of them holds it."""
        saved = {id(self.master_of(parameter)) for parameter in exported}
        return [
            name
            for name, parameter in self._named_parameters()
            if id(parameter) not in saved and self._optimizer.state.get(parameter)
        ]

    def reader(self) -> StateReader:
        """Return a reader that looks parameters up in constant time; make one for each save."""
        return StateReader(self)

    def _group_hyperparameters(self, index: int, group: Mapping[str, Any]) -> Hyperparameters:
        optimizer_name = type(self._optimizer).__name__
        missing = [key for key in _GROUP_KEYS if key not in group]
        if missing:
            states = sorted({str(k) for _, p in self._named_parameters() for k in self._optimizer.state.get(p, {})})
            name = next((n for n, p in self._named_parameters() if p is group["params"][0]), "its parameters")
            raise OptimizerError(
                f"{optimizer_name}: parameter group {index} ({name}) has no {', '.join(missing)}; found "
                f"{', '.join(sorted(map(str, group)))} and state {', '.join(states) or 'none'}. The checkpoint "
                "format holds Adam state only (step, exp_avg, exp_avg_sq): save this optimizer another way"
            )
        if group.get("amsgrad"):
            raise OptimizerError(
                f"{optimizer_name}: parameter group {index} uses amsgrad; the checkpoint format has no place "
                "for max_exp_avg_sq, and dropping it would change training: turn amsgrad off or save it apart"
            )
        if "step" in group:
            # Saved as step 0 it would restart the bias correction of a warm optimizer.
            raise OptimizerError(
                f"{optimizer_name}: parameter group {index} keeps the step count itself; the checkpoint holds "
                "one for each parameter: use an optimizer that keeps state[parameter]['step']"
            )
        return _hyperparameters(f"{optimizer_name}: parameter group {index}", group)

    def _named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        for group_index, group in enumerate(self._optimizer.param_groups):
            names = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                given = f"{names[position]}, " if names else ""
                yield (
                    f"parameter {position} of group {group_index} ({given}shape {list(parameter.shape)})",
                    parameter,
                )


class StateReader:
    """Looks up the state of parameters for one save."""

    def __init__(self, state: AdamState) -> None:
        optimizer = state.optimizer
        self._state = state
        self._optimizer_name = type(optimizer).__name__
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def read(self, key: str, parameter: torch.Tensor) -> ParameterState:
        """Return what the optimizer holds for `parameter`; `key` names it in errors.

        Raises:
            OptimizerError: the optimizer does not hold the parameter (or its master), or holds tensors
                that cannot be exported like it.
        """
        master = self._state.master_of(parameter)
        if id(master) not in self._group_of:
            what = "its master" if master is not parameter else "the parameter"
            if master is not parameter and id(parameter) in self._group_of:
                raise OptimizerError(
                    f"{key}: {self._optimizer_name} steps the first tensor of its pair in `masters` and does not hold "
                    "the second; expected (parameter, master): is the pair the wrong way round?"
                )
            raise OptimizerError(
                f"{key}: {self._optimizer_name} does not hold {what} (shape {list(master.shape)}); pass "
                "`masters=[(parameter, master), ...]` where the optimizer steps copies, or leave the export out"
            )
        held = self._state.optimizer.state.get(master, {})
        _check_keys(self._optimizer_name, key, held)
        found = ParameterState(master, held.get("exp_avg"), held.get("exp_avg_sq"), held.get("step"))
        for component in COMPONENTS:
            _check_tensor(f"{key}: {self._optimizer_name} {component}", found.component(component), parameter)
        return found

    def group_of(self, master: torch.Tensor) -> Mapping[str, Any]:
        """Return the parameter group that holds a master which `read` returned."""
        return self._group_of[id(master)]


def step_number(key: str, value: object) -> int:
    """Return a step count, given as any real number, as a whole one.

    Raises:
        OptimizerError: not finite, negative, fractional or too large to be exact; names the key.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptimizerError(f"{key}: step is a {type(value).__name__} ({value!r}); expected a number of steps")
    # An int is finite, and may be too large to ask as a float.
    if not (isinstance(value, int) or math.isfinite(value)) or value < 0 or value != int(value):
        raise OptimizerError(f"{key}: step is {value!r}; expected a finite whole number, 0 or more")
    if value > LARGEST_STEP:
        raise OptimizerError(f"{key}: step is {value!r}; the format holds steps up to 2**53 exactly")
    return int(value)


def _masters_by_id(masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None) -> dict[int, torch.Tensor]:
    by_id: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []
    for position, pair in enumerate(masters or ()):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(t, torch.Tensor) for t in pair)):
            raise OptimizerError(f"masters[{position}] is {type(pair).__name__}; expected (parameter, master)")
        parameter, master = pair
        if by_id.setdefault(id(parameter), master) is not master:
            raise OptimizerError(
                f"masters[{position}]: the parameter of shape {list(parameter.shape)} has two different masters"
            )
        kept.append(parameter)
    return _Masters(by_id, kept)


class _Masters(dict[int, torch.Tensor]):
    """Masters by the id of their parameter; holds the parameters too, so that no id is used again."""

    def __init__(self, by_id: dict[int, torch.Tensor], parameters: list[torch.Tensor]) -> None:
        super().__init__(by_id)
        self.parameters = parameters


def _check_keys(optimizer_name: str, parameter_name: str, held: Mapping[Any, Any]) -> None:
    extra = sorted(str(key) for key in held if key not in _STATE_KEYS)
    if extra:
        raise OptimizerError(
            f"{optimizer_name}: {parameter_name} has state {', '.join(sorted(map(str, held)))}; the checkpoint "
            f"format holds step, exp_avg and exp_avg_sq, and has no place for {', '.join(extra)}"
        )


def _check_tensor(name: str, value: object, parameter: torch.Tensor) -> None:
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise OptimizerError(f"{name} is a {type(value).__name__}; expected a tensor")
    if hasattr(value, "to_local"):
        raise OptimizerError(
            f"{name} is a {type(value).__name__}, which packckpt does not read: it saves optimizers of local tensors"
        )
    if value.layout is not torch.strided or value.dtype not in NAME_OF_DTYPE:
        raise OptimizerError(
            f"{name} has dtype {plain_name(value.dtype)} and layout {value.layout}; expected a dense tensor "
            f"of one of {supported_names()}"
        )
    # The expert axis alone may be longer or shorter (then rows are cut one by one).
    same_rows = value.dim() == parameter.dim() and value.shape[-2:] == parameter.shape[-2:]
    if not same_rows or (parameter.dim() == 2 and value.shape != parameter.shape):
        raise OptimizerError(
            f"{name} has shape {list(value.shape)}; expected that of the parameter, {list(parameter.shape)}"
        )


def _hyperparameters(name: str, group: Mapping[str, Any]) -> Hyperparameters:
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise OptimizerError(f"{name} has betas {betas!r}; expected two numbers")
    values = {
        "learning_rate": group["lr"],
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }
    return Hyperparameters(**{field: _finite(f"{name}: {field}", value) for field, value in values.items()})


def _finite(name: str, value: object) -> float:
    # `capturable` optimizers keep the rate in a one-element tensor, maybe on the device.
    try:
        number = float(value)  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise OptimizerError(f"{name} is {value!r}; expected a finite number") from None
    if not math.isfinite(number):
        raise OptimizerError(f"{name} is {number!r}; expected a finite number")
    return number
