"""A case is everything that decides which bytes leave the device, except the path they take."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from benchmarks.presets import Matrix, Method, Preset, load_preset, preset_names

Layout = Literal["regular", "sparse", "reordered", "interleaved", "vacant", "gapped"]
DtypeName = Literal["bfloat16", "float16", "float32"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)
STATE_ITEM_BYTES = 4  # the checkpoint holds optimizer state as float32
LORA_RANKS = (1, 8, 32)
EXPERT_PARALLEL = (1, 2, 8)
# One expert in this many is not held by the trainer in the "vacant" layout.
VACANT_EVERY = 8

_ID = re.compile(
    r"(?P<preset>[a-z0-9.-]+)/(?P<variant>full|lora\d+|\d+B)(/(?P<layout>[a-z]+))?/ep(?P<ep>\d+)/l(?P<layers>\d+)"
    r"/(?P<dtype>[a-z]+\d+)(-(?P<state>[a-z]+\d+))?(/seed(?P<seed>\d+))?"
)


class CaseError(ValueError):
    """A case that cannot be: field, value, what is allowed."""


@dataclass(frozen=True)
class Case:
    """One shape of trainer.

    Attributes:
        preset: whose numbers.
        method: LoRA factors or full matrices.
        lora_rank: with LoRA.
        slice_bytes: with a sweep: float32 bytes of one expert.
        expert_parallel: number of ranks that the experts are split over; a save may have fewer of them.
        layers: how many of the model's layers; a pair of ranks holds its share of the experts of each.
        layout: order and completeness of the exports.
        dtype: of the parameters. Masters are float32 where it is shorter.
        state_dtype: of the moments.
        seed: of the values.
    """

    preset: Preset
    method: Method
    lora_rank: int | None = None
    slice_bytes: int | None = None
    expert_parallel: int = 1
    layers: int = 1
    layout: Layout = "regular"
    dtype: DtypeName = "bfloat16"
    state_dtype: DtypeName = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        _expect(self.layout, "layout", LAYOUTS)
        _expect(self.dtype, "dtype", DTYPES)
        _expect(self.state_dtype, "state dtype", DTYPES)
        _expect_between(self.layers, "layers", 1, self.preset.layers)
        _expect_between(self.seed, "seed", 0, 2**31 - 1)
        if self.preset.sweep is not None:
            _expect(self.slice_bytes, "slice bytes", self.preset.sweep.slice_bytes)
        if self.method == "lora":
            _expect_between(self.lora_rank, "LoRA rank", 1, 4096)
        elif self.lora_rank is not None:
            raise CaseError(f"LoRA rank is {self.lora_rank} for full fine-tuning; expected none")
        if not self.matrices:
            raise CaseError(f"preset {self.preset.name} has no {self.method} matrices")
        _expect_between(self.expert_parallel, "expert-parallel size", 1, self.experts)

    @cached_property
    def experts(self) -> int:
        """Experts of one layer, over all ranks."""
        if self.preset.sweep is None:
            return self.preset.experts
        return self.preset.sweep.experts(self.slice_bytes or 0)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The packed parameters of one layer, as the matrix of one expert."""
        if self.preset.sweep is not None:
            elements = (self.slice_bytes or 0) // STATE_ITEM_BYTES
            rows = 1 << (elements.bit_length() // 2)
            return (Matrix("weight", rows, elements // rows),)
        whole = self.preset.matrices[self.method]
        if self.lora_rank is None:
            return whole
        return tuple(factor for matrix in whole for factor in matrix.factors(self.lora_rank))

    def local_experts(self, rank: int) -> range:
        """Return the global ids of the experts that a rank holds: uneven where they do not divide."""
        return range(
            rank * self.experts // self.expert_parallel,
            (rank + 1) * self.experts // self.expert_parallel,
        )

    def exported_rows(self, rank: int) -> list[int]:
        """Return the rows of a packed parameter that are exported, in order."""
        rows = list(range(len(self.local_experts(rank))))
        if self.layout == "sparse":
            return rows[::2]
        if self.layout == "reordered":
            return rows[::-1]
        if self.layout == "vacant":
            return [row for row in rows if row % VACANT_EVERY != VACANT_EVERY - 1] if len(rows) > 1 else rows
        return rows

    def exports(self, rank: int) -> int:
        """Return the number of tensors that a rank exports."""
        return self.layers * len(self.matrices) * len(self.exported_rows(rank))

    def with_ranks(self, world_size: int) -> Case:
        """Return the case with its experts split over at least as many ranks as save."""
        if world_size <= self.expert_parallel:
            return self
        return Case(**{**self._fields(), "expert_parallel": world_size})

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a parameter."""
        return 4 if self.dtype == "float32" else 2

    @property
    def id(self) -> str:
        """The name from which `parse_case` makes the same case."""
        variant = f"lora{self.lora_rank}" if self.method == "lora" else "full"
        parts = [
            self.preset.name,
            variant if self.slice_bytes is None else f"{self.slice_bytes}B",
            *([] if self.layout == "regular" else [self.layout]),
            f"ep{self.expert_parallel}",
            f"l{self.layers}",
            self.dtype if self.state_dtype == "float32" else f"{self.dtype}-{self.state_dtype}",
            *([f"seed{self.seed}"] if self.seed else []),
        ]
        return "/".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return what a record says about the case."""
        sizes = sorted(matrix.rows * matrix.columns * STATE_ITEM_BYTES for matrix in self.matrices)
        return {
            "id": self.id,
            "family": self.preset.family,
            "preset": self.preset.name,
            "preset_digest": self.preset.digest,
            "model": self.preset.model,
            "method": self.method,
            "lora_rank": self.lora_rank,
            "expert_parallel": self.expert_parallel,
            "layers": self.layers,
            "experts": self.experts,
            "local_experts": len(self.local_experts(0)),
            "layout": self.layout,
            "dtype": self.dtype,
            "state_dtype": self.state_dtype,
            "slice_bytes": {
                "smallest": sizes[0],
                "median": int(statistics.median_low(sizes)),
                "largest": sizes[-1],
            },
            "exports": self.exports(0),
            "seed": self.seed,
        }

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def parse_case(text: str) -> Case:
    """Return the case of an id.

    Raises:
        CaseError, PresetError: not an id of a case that can be.
    """
    found = _ID.fullmatch(text)
    if found is None:
        raise CaseError(
            f"case is {text!r}; expected PRESET/full|loraN|NB[/LAYOUT]/epN/lN/DTYPE[-STATE_DTYPE][/seedN], "
            "as `python -m benchmarks list` prints them"
        )
    variant = found["variant"]
    return Case(
        preset=load_preset(found["preset"]),
        method="lora" if variant.startswith("lora") else "full",
        lora_rank=int(variant[4:]) if variant.startswith("lora") else None,
        slice_bytes=int(variant[:-1]) if variant.endswith("B") else None,
        expert_parallel=int(found["ep"]),
        layers=int(found["layers"]),
        layout=_layout(found["layout"] or "regular"),
        dtype=_dtype(found["dtype"]),
        state_dtype=_dtype(found["state"] or "float32"),
        seed=int(found["seed"] or 0),
    )


def cases_of(preset: Preset, layers: int | None = None, dtype: DtypeName = "bfloat16") -> list[Case]:
    """Return the cases of a preset, most telling first.

    A model: LoRA ranks 8, 1, 32 and full fine-tuning at expert-parallel sizes 1, 2 and 8. Full fine-tuning comes with
    one layer where the number is not given: a layer of it is hundreds of times a LoRA layer.
    """
    if preset.sweep is not None:
        return [Case(preset, "full", slice_bytes=size, dtype=dtype) for size in _middle_first(preset.sweep.slice_bytes)]
    lora_layers = min(layers or 2, preset.layers)
    if preset.family == "irregular":
        return [
            Case(preset, "lora", lora_rank=8, layers=lora_layers, layout=_layout(layout), dtype=dtype)
            for layout in preset.layouts
        ]
    sizes = [size for size in EXPERT_PARALLEL if size <= preset.experts]
    lora = [
        Case(preset, "lora", lora_rank=rank, expert_parallel=size, layers=lora_layers, dtype=dtype)
        for size in sizes
        for rank in sorted(LORA_RANKS, key=lambda rank: (rank != 8, rank))
    ]
    full = [
        Case(preset, "full", expert_parallel=size, layers=min(layers or 1, preset.layers), dtype=dtype)
        for size in reversed(sizes)
    ]
    return [lora[0], full[0], *lora[1:], *full[1:]]


def all_cases() -> list[Case]:
    """Return the cases of every preset."""
    return [case for name in preset_names() for case in cases_of(load_preset(name))]


def _middle_first(sizes: tuple[int, ...]) -> list[int]:
    """The ends tell the most, then whatever halves the largest gap: a short run still shows the whole range."""
    ordered: list[int] = []
    gaps = [(0, len(sizes) - 1)]
    for end in (0, len(sizes) - 1):
        if sizes[end] not in ordered:
            ordered.append(sizes[end])
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            ordered.append(sizes[middle])
            gaps += [(low, middle), (middle, high)]
    return ordered


def _layout(name: str) -> Layout:
    for layout in LAYOUTS:
        if layout == name:
            return layout
    raise CaseError(f"layout is {name!r}; expected one of {', '.join(LAYOUTS)}")


def _dtype(name: str) -> DtypeName:
    for dtype in DTYPES:
        if dtype == name:
            return dtype
    raise CaseError(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")


def _expect(value: object, name: str, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise CaseError(f"{name} is {value!r}; expected one of {', '.join(map(str, allowed))}")


def _expect_between(value: int | None, name: str, low: int, high: int) -> None:
    if value is None or not low <= value <= high:
        raise CaseError(f"{name} is {value!r}; expected {low} to {high}")
