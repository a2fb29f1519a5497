"""Trainers whose every element differs, and what plain torch says that a checkpoint of them must hold.

`expected_content` and `read_content` know nothing of packckpt's plan, transfer, commit or reader.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from packckpt import AdamState, CheckpointSaver, Export, Shard
from tests import emulated

CONFIG = {"base_model_name_or_path": "example/moe-tiny", "r": 4}
PREFIX = "base_model.model.model"
COMPONENTS = ("master", "exp_avg", "exp_avg_sq")
MOMENTS = ("exp_avg", "exp_avg_sq")
PATHS: tuple[Literal["slice", "coalesced", "staged"], ...] = ("slice", "coalesced", "staged")
# Those that capture a layer block at a time, by `packckpt.transfer.Path`.
BLOCK_PATHS: tuple[Literal["slice", "coalesced"], ...] = ("slice", "coalesced")
# What the optimizer may not hold yet.
MISSING = {"none": (), "exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "both": MOMENTS}

Content = dict[str, torch.Tensor]
Place = Callable[[torch.Tensor], torch.Tensor]


def arange(*shape: int, dtype: torch.dtype = torch.float32, start: float = 1, scale: float = 1) -> torch.Tensor:
    """start, start + 1, ... times scale: the elements differ, so a wrong slice cannot pass."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.float64) + start) * scale).reshape(shape).to(dtype)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view whose last two axes are swapped in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as `w[..., :half]`, with other values in the gaps."""
    half = tensor.shape[-1]
    wide = torch.cat([tensor, tensor + 1], dim=-1).contiguous()
    return wide[..., :half]


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the first axis innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


STRIDES: dict[str, Place] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "gapped": gapped,
    "permuted": permuted,
}


class Trainer:
    """Parameters with hand-made optimizer state, and the exports cut from them.

    Args:
        place: puts each tensor where it shall live, as `emulated.to_device` does.
        hyper: arguments of AdamW.
    """

    def __init__(self, place: Place = lambda tensor: tensor, **hyper: Any) -> None:
        self.place = place
        self.exports: list[Export] = []
        self.masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.parameters: list[torch.nn.Parameter] = []
        self._states: dict[torch.Tensor, dict[str, Any]] = {}
        self._hyper = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, **hyper}
        self._optimizer: torch.optim.AdamW | None = None

    def parameter(
        self,
        *shape: int,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        missing: Sequence[str] = (),
        step: Any = 7,
        own_master: bool = False,
        strides: Place = contiguous,
    ) -> torch.nn.Parameter:
        """Make a parameter, its master and its moments; no two of their tensors are alike."""
        start = 1 + len(self.parameters)
        made = torch.nn.Parameter(self._tensor(shape, dtype, start, 1, strides))
        master = made
        if not own_master:
            master = torch.nn.Parameter(self._tensor(shape, state_dtype, start, -1, strides))
            self.masters.append((made, master))
        held = {
            name: self._tensor(shape, state_dtype, start, scale, strides)
            for name, scale in (("exp_avg", 0.125), ("exp_avg_sq", 8))
            if name not in missing
        }
        self._states[master] = held if step is None else {**held, "step": step}
        self.parameters.append(made)
        self._optimizer = None
        return made

    def packed(
        self, name: str, experts: int = 4, rows: int = 3, columns: int = 2, *, layer: int | None = 0, **kwargs: Any
    ) -> torch.nn.Parameter:
        """Make a packed parameter and export all its rows, in order."""
        made = self.parameter(experts, rows, columns, **kwargs)
        self.export_rows(name, made, range(experts), layer=layer)
        return made

    def dense(
        self, name: str, rows: int = 3, columns: int = 2, *, layer: int | None = 0, **kwargs: Any
    ) -> torch.nn.Parameter:
        """Make a two-dimensional parameter and export it."""
        made = self.parameter(rows, columns, **kwargs)
        self.exports.append(Export(key_of(name, layer=layer), made))
        return made

    def export_rows(
        self,
        name: str,
        parameter: torch.Tensor,
        rows: Iterable[int],
        *,
        layer: int | None = 0,
        shard: Shard | None = None,
    ) -> None:
        self.exports.extend(Export(key_of(name, row, layer=layer), parameter, expert=row, shard=shard) for row in rows)

    @property
    def optimizer(self) -> torch.optim.AdamW:
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(list(self._states), **self._hyper)
            self._optimizer.state.update({master: held for master, held in self._states.items() if held})
        return self._optimizer

    @property
    def state(self) -> AdamState:
        return AdamState.from_optimizer(self.optimizer, self.masters)

    def held(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return what the optimizer holds for a parameter, with its master."""
        master = next((m for p, m in self.masters if p is parameter), parameter)
        return {"master": master, **self._states[master]}

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that a training step changes, each once."""
        held = [self.held(parameter) for parameter in self.parameters]
        all_ = [*self.parameters, *(v for h in held for v in h.values() if isinstance(v, torch.Tensor))]
        return list({id(tensor): tensor for tensor in all_}.values())

    def _tensor(
        self, shape: Sequence[int], dtype: torch.dtype, start: int, scale: float, strides: Place
    ) -> torch.Tensor:
        return self.place(strides(arange(*shape, dtype=dtype, start=start, scale=scale)))


def key_of(name: str, expert: int | None = None, *, layer: int | None = 0) -> str:
    where = f"{PREFIX}.layers.{layer}." if layer is not None else f"{PREFIX}."
    return f"{where}{name}.lora_A.weight" if expert is None else f"{where}mlp.experts.{expert}.{name}.lora_A.weight"


def expected_content(trainer: Trainer) -> Content:
    """Return what the format says that the exports hold, by plain torch on the host."""
    content: Content = {}
    for export in trainer.exports:
        held = trainer.held(export.parameter)
        value = emulated.to_host(export.parameter)
        content[f"lora/{export.key}"] = _exported(value, export.expert)
        for component in COMPONENTS:
            tensor = emulated.to_host(held[component]) if component in held else torch.zeros(value.shape)
            content[f"{component}/{export.key}"] = _exported(tensor, export.expert).to(torch.float32)
        step = held.get("step", 0)
        step = emulated.to_host(step).item() if isinstance(step, torch.Tensor) else step
        content[f"step/{export.key}"] = torch.tensor(float(step), dtype=torch.float64)
    return content


def _exported(tensor: torch.Tensor, expert: int | None) -> torch.Tensor:
    return (tensor if expert is None else tensor[expert]).T.contiguous()


def read_content(root: Path) -> Content:
    """Read a checkpoint by its manifest with json and safetensors alone."""
    manifest = json.loads((root / "checkpoint.json").read_text())
    content = {f"lora/{key}": value for key, value in load_file(root / "adapter_model.safetensors").items()}
    files = {name: load_file(root / name) for names in manifest["parameters"].values() for name in names}
    for key, names in manifest["parameters"].items():
        content.update({f"{part}/{key}": files[name][key] for part, name in zip(COMPONENTS, names, strict=True)})
        content[f"step/{key}"] = torch.tensor(manifest["steps"][key], dtype=torch.float64)
    return content


def assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Dtype, shape and every byte, so that NaN and -0.0 count too."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    assert bytes_of(actual) == bytes_of(expected), f"{name}: {actual} is not {expected}"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in logical order, wherever it lives; no copy is counted."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(emulated.to_host(tensor))
    return copy.view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_content(actual: Content, expected: Content) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert_same_tensor(actual[name], value, name)


def allocated_on_device() -> int:
    """Return the bytes alive on the emulated device, without what waits to be collected."""
    gc.collect()
    return emulated.memory_allocated()


def file_bytes(root: Path) -> dict[str, bytes]:
    """Return every file below a directory: relative path to content."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(
    destination: Path,
    trainer: Trainer,
    path: Literal["slice", "coalesced", "staged"] = "coalesced",
    *,
    with_state: bool = True,
    config: dict[str, Any] = CONFIG,
) -> str:
    """Save and return the digest; nothing is synced to disk."""
    with CheckpointSaver(path, durable=False) as saver:
        return saver.save(destination, trainer.exports, trainer.state if with_state else None, config)


def eight_experts(place: Place = lambda tensor: tensor, **kwargs: Any) -> Trainer:
    """The reference case: two packed parameters of eight experts."""
    trainer = Trainer(place)
    trainer.packed("gate_up_proj", experts=8, rows=4, columns=6, **kwargs)
    trainer.packed("down_proj", experts=8, rows=3, columns=4, **kwargs)
    return trainer
