"""Build what a trainer holds for a case: packed parameters, masters, AdamW state, and the exports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.cases import Case
from benchmarks.presets import Matrix
from packckpt import AdamState, Export

HYPERPARAMETERS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 100


@dataclass(frozen=True)
class Trainer:
    """What one rank would hand to the saver.

    Attributes:
        optimizer_tensors: masters (where they are not the parameters) and moments.
        parameter_tensors: what the weights are cut from.
    """

    exports: list[Export]
    state: AdamState
    config: dict[str, Any]
    parameter_tensors: list[torch.Tensor]
    optimizer_tensors: list[torch.Tensor]


class Tensors(Protocol):
    """Makes the tensors of a trainer. The seam that lets `plan` describe terabytes without allocating a page."""

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, gapped: bool) -> torch.Tensor:
        """Return a tensor of that shape; `gapped`: a view that leaves out half of a wider one."""
        ...

    def derived(self, source: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """Return `source * factor` in another dtype, with the layout of the source."""
        ...


class RealTensors:
    """Seeded random values on a device. Every tensor has other values, so that a wrong row cannot pass unseen."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        torch.manual_seed(seed)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, gapped: bool) -> torch.Tensor:
        """Return normal values."""
        wide = (*shape[:-1], 2 * shape[-1]) if gapped else shape
        made = torch.empty(wide, dtype=torch.float32, device=self._device).normal_().to(dtype)
        return made[..., : shape[-1]]

    def derived(self, source: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """Return scaled values; a gapped source gives a gapped result."""
        # As an optimizer makes its moments: `zeros_like` keeps the strides of a dense tensor only.
        made = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=self._device)
        return made.copy_(source).mul_(factor)


class ShadowTensors:
    """Tensors of the right shape without data: planning reads shapes, dtypes and devices, never values.

    On the CPU they are one element, expanded; for an accelerator they are on the meta device, which a plan takes
    for one.
    """

    def __init__(self, device_kind: str = "cpu") -> None:
        self._device = "cpu" if device_kind == "cpu" else "meta"

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, gapped: bool) -> torch.Tensor:
        """Return one element, expanded."""
        return torch.empty(1, dtype=dtype, device=self._device).expand(shape)

    def derived(self, source: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
        """Return one element, expanded to the shape of the source."""
        return torch.empty(1, dtype=dtype, device=self._device).expand(source.shape)


def build(case: Case, rank: int, tensors: Tensors) -> Trainer:
    """Build the trainer of one rank. Memory: as the case's dtypes say, for its share of the experts."""
    exports: list[Export] = []
    parameters: list[torch.Tensor] = []
    masters: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(case.layers):
        packed = [_packed(case, matrix, rank, tensors) for matrix in case.matrices]
        parameters += packed
        masters += [(parameter, _master(parameter, tensors)) for parameter in packed]
        exports += _layer_exports(case, rank, layer, packed)
    optimizer = torch.optim.AdamW([master for _, master in masters], **HYPERPARAMETERS)  # type: ignore[arg-type]  # lr and betas differ in type
    for _, master in masters:
        optimizer.state[master] = _moments(case, master.detach(), tensors)
    own_masters = [(parameter, master) for parameter, master in masters if parameter is not master]
    return Trainer(
        exports=exports,
        state=AdamState.from_optimizer(optimizer, own_masters),
        config={"base_model_name_or_path": case.preset.model, "peft_type": "LORA", "r": case.lora_rank},
        parameter_tensors=parameters,
        optimizer_tensors=[
            *(master for _, master in own_masters),
            *(value for held in optimizer.state.values() for value in (held["exp_avg"], held["exp_avg_sq"])),
        ],
    )


def _packed(case: Case, matrix: Matrix, rank: int, tensors: Tensors) -> torch.Tensor:
    shape = (len(case.local_experts(rank)), matrix.rows, matrix.columns)
    return torch.nn.Parameter(tensors.values(shape, getattr(torch, case.dtype), case.layout == "gapped"))


def _master(parameter: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    if parameter.dtype is torch.float32:
        return parameter
    return torch.nn.Parameter(tensors.derived(parameter.detach(), 1.0, torch.float32))


def _moments(case: Case, master: torch.Tensor, tensors: Tensors) -> dict[str, Any]:
    dtype = getattr(torch, case.state_dtype)
    return {
        "step": torch.tensor(float(STEP)),
        "exp_avg": tensors.derived(master, 0.1, dtype),
        "exp_avg_sq": tensors.derived(master, 0.01, dtype),
    }


def _layer_exports(case: Case, rank: int, layer: int, packed: list[torch.Tensor]) -> Iterator[Export]:
    experts = case.local_experts(rank)
    pairs = [(parameter, matrix) for parameter, matrix in zip(packed, case.matrices, strict=True)]
    rows = case.exported_rows(rank)
    if case.layout == "interleaved":
        order = [(row, parameter, matrix) for row in rows for parameter, matrix in pairs]
    else:
        order = [(row, parameter, matrix) for parameter, matrix in pairs for row in rows]
    for row, parameter, matrix in order:
        module = case.preset.key.format(layer=layer, expert=experts[row])
        suffix = "" if matrix.name == "weight" else ".weight"
        yield Export(f"base_model.model.{module}.{matrix.name}{suffix}", parameter, expert=row)
