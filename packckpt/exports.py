"""What leaves the trainer: one `Export` is one 2-D tensor of the checkpoint."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from packckpt.dtypes import NAME_OF_DTYPE, plain_name, supported_names
from packckpt.errors import ExportError

GLOBAL_BLOCK = "__global__"
_LAYER_BLOCK = re.compile(r"^(.*\.layers\.\d+)\.")


def block_of(key: str) -> str:
    """Return the layer block of a key: its longest prefix that ends in `.layers.<number>`.

    Keys outside any layer belong to the block `__global__`. Blocks are ordered as strings.
    """
    match = _LAYER_BLOCK.match(key)
    return match.group(1) if match else GLOBAL_BLOCK


def blocks_of(keys: Iterable[str]) -> Iterator[str]:
    """Yield the layer block of each key; where keys of one block follow one another, it is looked for once."""
    block, prefix = GLOBAL_BLOCK, f"{GLOBAL_BLOCK}."
    for key in keys:
        # A longer prefix of this kind would hold one more `.layers.`.
        if not key.startswith(prefix) or key.find(".layers.", len(prefix) - 1) >= 0:
            block = block_of(key)
            prefix = f"{block}."
        yield block


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a tensor that tensor parallelism splits.

    Args:
        rank: position of this part, 0 to `world_size - 1`.
        world_size: number of parts.
        dim: the axis of the *exported* 2-D tensor that is split, 0 or 1. The exported tensor is the
            transpose of the parameter: an axis `in` of the parameter is axis 1 of the export.
        component_sizes: sizes, along `dim` of the whole tensor, of components that are split each on its
            own (gate and up of a fused projection, say). Each must be divisible by `world_size`. None
            where the tensor is split as one.

    Raises:
        ExportError: a value is not of that kind.
    """

    rank: int
    world_size: int
    dim: int
    component_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "dim"):
            object.__setattr__(self, name, _whole(getattr(self, name), f"Shard.{name}"))
        if self.world_size < 1:
            raise ExportError(f"Shard.world_size is {self.world_size}; expected 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ExportError(f"Shard.rank is {self.rank}; expected 0 to {self.world_size - 1}")
        if self.dim not in (0, 1):
            raise ExportError(
                f"Shard.dim is {self.dim}; expected 0 or 1, the axis of the exported tensor "
                "(the transpose of the parameter)"
            )
        if self.component_sizes is None:
            return
        sizes = tuple(_whole(size, "Shard.component_sizes") for size in self.component_sizes)
        if not sizes or any(size < 1 or size % self.world_size for size in sizes):
            raise ExportError(
                f"Shard.component_sizes is {sizes}; expected sizes of the whole tensor, each divisible "
                f"by world_size {self.world_size}"
            )
        object.__setattr__(self, "component_sizes", sizes)

    @property
    def local_component_sizes(self) -> tuple[int, ...] | None:
        """Sizes of the components in one part, or None where there are no components."""
        if self.component_sizes is None:
            return None
        return tuple(size // self.world_size for size in self.component_sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """One tensor that leaves the trainer; the exported value is `parameter[expert].T` or `parameter.T`.

    Args:
        key: the tensor's name in the checkpoint.
        parameter: the trained parameter, floating point: `[experts, in, out]` with `expert`,
            `[in, out]` without. Any strides, any device; one on the meta device can be planned, not saved.
        expert: the row of a packed parameter, or None for the whole parameter.
        shard: this rank's part of a tensor-parallel tensor, or None.

    Raises:
        ExportError: the key cannot be a tensor name, or parameter and expert do not fit.
    """

    key: str
    parameter: torch.Tensor
    expert: int | None = None
    shard: Shard | None = None

    def __post_init__(self) -> None:
        _check_key(self.key)
        _check_parameter(self.key, self.parameter)
        if self.shard is not None and not isinstance(self.shard, Shard):
            raise ExportError(f"{self.key}: shard is a {type(self.shard).__name__}; expected a Shard or None")
        if self.expert is not None:
            object.__setattr__(self, "expert", _whole(self.expert, f"{self.key}: expert"))
        _check_row(self.key, self.parameter, self.expert)
        if self.shard is not None:
            _check_components(self.key, self.shape, self.shard)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape `(out, in)` of the exported tensor on this rank."""
        shape = self.parameter.shape
        return shape[-1], shape[-2]

    @property
    def block(self) -> str:
        """The layer block that the key belongs to."""
        return block_of(self.key)


def check_exports(exports: Iterable[Export]) -> list[Export]:
    """Return the exports as a list; refuse what is not an `Export`, and repeated keys.

    Raises:
        ExportError: names the key and the positions.
    """
    checked = list(exports)
    position_of: dict[str, int] = {}
    for position, export in enumerate(checked):
        if not isinstance(export, Export):
            raise ExportError(f"exports[{position}] is a {type(export).__name__}; expected an Export")
        first = position_of.setdefault(export.key, position)
        if first != position:
            raise ExportError(
                f"{export.key}: exported twice, at positions {first} and {position} of the list; "
                "one rank exports a key once"
            )
    return checked


def expect_data(key: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a parameter, or what an optimizer holds for it, that is on the meta device.

    Raises:
        ExportError: names the key.
    """
    if any(tensor.is_meta for tensor in tensors):
        raise ExportError(
            f"{key}: the parameter, or what the optimizer holds for it, is on the meta device and has no data; "
            "expected tensors with data"
        )


def named(keys: Sequence[str], limit: int = 8) -> str:
    """Return the first keys as a phrase: `a, b, ... (12 in all)`."""
    shown = ", ".join(keys[:limit])
    return shown if len(keys) <= limit else f"{shown}, ... ({len(keys)} in all)"


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool):
        raise ExportError(f"{name} is {value!r}; expected a whole number")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # what is no index raises TypeError
    except TypeError:
        raise ExportError(f"{name} is {value!r}; expected a whole number") from None


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise ExportError(f"export key is {key!r}; expected a non-empty string")
    if key == "__metadata__":
        raise ExportError("export key is '__metadata__', a reserved name in a safetensors file; choose another name")
    if "\0" in key:
        raise ExportError(f"export key {key!r} contains a NUL byte; choose a name without one")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ExportError(f"export key {key!r} is not valid Unicode; choose a name that encodes as UTF-8") from None


def _check_parameter(key: str, parameter: object) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise ExportError(f"{key}: parameter is a {type(parameter).__name__}; expected a torch.Tensor")
    if hasattr(parameter, "to_local"):
        raise ExportError(
            f"{key}: parameter is a {type(parameter).__name__}; export its local rows "
            "(`parameter.to_local()`) under their global expert ids"
        )
    if parameter.layout is not torch.strided or parameter.is_quantized:
        what = "quantized" if parameter.is_quantized else str(parameter.layout)
        raise ExportError(f"{key}: parameter is a {what} tensor; expected a dense tensor with data")
    if parameter.dtype not in NAME_OF_DTYPE:
        raise ExportError(
            f"{key}: parameter has dtype {plain_name(parameter.dtype)}; expected one of {supported_names()}"
        )


def _check_row(key: str, parameter: torch.Tensor, expert: int | None) -> None:
    shape = tuple(parameter.shape)
    if expert is None:
        if len(shape) < 2:
            raise ExportError(
                f"{key}: parameter has shape {list(shape)}; the format holds tensors of two axes: "
                "save norms and biases another way"
            )
        if len(shape) != 2:
            raise ExportError(
                f"{key}: parameter has shape {list(shape)}; expected [in, out] for an export without an "
                "expert (give `expert=` to export a row of a packed parameter)"
            )
        return
    if len(shape) != 3:
        raise ExportError(f"{key}: parameter has shape {list(shape)}; expected [experts, in, out] with an expert")
    if not 0 <= expert < shape[0]:
        raise ExportError(f"{key}: expert is {expert}; the parameter holds rows 0 to {shape[0] - 1}")


def _check_components(key: str, shape: tuple[int, int], shard: Shard) -> None:
    local = shard.local_component_sizes
    if local is not None and sum(local) != shape[shard.dim]:
        raise ExportError(
            f"{key}: component_sizes {shard.component_sizes} over {shard.world_size} ranks make "
            f"{sum(local)} on axis {shard.dim}; the exported part has shape {list(shape)}"
        )
