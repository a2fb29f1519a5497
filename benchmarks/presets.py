"""Real models as shapes: presets/*.toml, each number with its source."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).with_name("presets")

Family = Literal["model", "sweep", "irregular"]
Method = Literal["lora", "full"]


class PresetError(ValueError):
    """A preset that does not say what it should; names the file and the field."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Shape `[in, out]` of one expert's matrix, and its name in keys."""

    name: str
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise PresetError(f"{self.name}: shape is [{self.rows}, {self.columns}]; expected 1 or more each")

    def factors(self, lora_rank: int) -> tuple[Matrix, Matrix]:
        """Return the LoRA factors A `[in, rank]` and B `[rank, out]`, as the trainer keeps them."""
        return (
            Matrix(f"{self.name}.lora_A", self.rows, lora_rank),
            Matrix(f"{self.name}.lora_B", lora_rank, self.columns),
        )


@dataclass(frozen=True, slots=True)
class Sweep:
    """Slice sizes to try, as float32 bytes of one expert, and how many experts each gets."""

    slice_bytes: tuple[int, ...]
    state_bytes: int
    fewest_experts: int
    most_experts: int

    def experts(self, slice_bytes: int) -> int:
        """Return as many experts as make one state `state_bytes` long, within the bounds."""
        return min(max(self.state_bytes // slice_bytes, self.fewest_experts), self.most_experts)


@dataclass(frozen=True, slots=True)
class Preset:
    """One file of presets/.

    Attributes:
        key: name of one expert's module, with `{layer}` and `{expert}`.
        layers, experts: of the whole model; 1 and 0 in a sweep.
        matrices: by method, the matrices of one expert.
        layouts: of the exports that cases are made for.
        sources: name of a number to where it was read.
        digest: of the file's content as TOML values: comments do not count.
    """

    name: str
    model: str
    family: Family
    key: str
    layers: int
    experts: int
    matrices: Mapping[Method, tuple[Matrix, ...]]
    layouts: tuple[str, ...]
    sources: Mapping[str, str]
    digest: str
    sweep: Sweep | None = None


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_preset(name: str) -> Preset:
    """Read one preset.

    Raises:
        PresetError: no such preset, or it does not say what it should.
    """
    path = FOLDER / f"{name}.toml"
    if name not in preset_names():
        raise PresetError(f"preset is {name!r}; expected one of {', '.join(preset_names())}")
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return _preset(name, content)
    except KeyError as error:
        raise PresetError(f"{path.name}: has no {error}") from None
    except PresetError as error:
        raise PresetError(f"{path.name}: {error}") from None


def _preset(name: str, content: Mapping[str, Any]) -> Preset:
    if content["name"] != name:
        raise PresetError(f"name is {content['name']!r}; expected the file's own")
    numbers = {field: _number(field, entry) for field, entry in content.get("numbers", {}).items()}
    sweep = content.get("sweep")
    return Preset(
        name=name,
        model=content["model"],
        family=content["family"],
        key=content["key"],
        layers=1 if sweep else numbers["layers"],
        experts=0 if sweep else numbers["experts"],
        matrices={method: _matrices(content.get(method, ()), numbers) for method in ("lora", "full")},
        layouts=tuple(content.get("layouts", ("regular",))),
        sources={field: entry["source"] for field, entry in content.get("numbers", {}).items()},
        digest=_digest(content),
        sweep=_sweep(sweep) if sweep else None,
    )


def _number(field: str, entry: Mapping[str, Any]) -> int:
    value = entry["value"]
    if not isinstance(value, int) or value < 1:
        raise PresetError(f"numbers.{field} is {value!r}; expected a whole number, 1 or more")
    if not entry["source"]:
        raise PresetError(f"numbers.{field} has no source; say where it was read")
    return value


def _matrices(entries: Any, numbers: Mapping[str, int]) -> tuple[Matrix, ...]:
    def extent(side: Mapping[str, Any]) -> int:
        return numbers[side["of"]] * int(side.get("times", 1))

    return tuple(Matrix(entry["name"], extent(entry["in"]), extent(entry["out"])) for entry in entries)


def _sweep(entry: Mapping[str, Any]) -> Sweep:
    sweep = Sweep(
        slice_bytes=tuple(entry["slice_bytes"]),
        state_bytes=entry["state_bytes"],
        fewest_experts=entry["fewest_experts"],
        most_experts=entry["most_experts"],
    )
    wrong = [size for size in sweep.slice_bytes if size < 4 or size & (size - 1)]
    if wrong:
        raise PresetError(f"sweep.slice_bytes holds {wrong}; expected powers of two, 4 or more")
    return sweep


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(repr(_sorted(content)).encode(), digest_size=32).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return [_sorted(item) for item in value] if isinstance(value, list) else value
