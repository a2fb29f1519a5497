"""Presets and cases, for people."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import cases_of
from benchmarks.presets import Preset
from benchmarks.units import format_bytes


def render_list(presets: Sequence[Preset]) -> str:
    """Return every preset with its numbers, their sources and its cases."""
    lines: list[str] = []
    for preset in presets:
        lines.append(f"{preset.name}  {preset.model}")
        if preset.sweep is None:
            lines.append(f"  {preset.layers} layers x {preset.experts} experts")
        lines += [f"  {number}: {source}" for number, source in preset.sources.items()]
        for case in cases_of(preset):
            sizes = case.to_json()["slice_bytes"]
            smallest, largest = format_bytes(sizes["smallest"]), format_bytes(sizes["largest"])
            slices = smallest if smallest == largest else f"{smallest} to {largest}"
            lines.append(f"    {case.id}  {case.exports(0)} exports, slices of {slices}")
        lines.append("")
    lines.append("--preset NAME measures all cases of a preset, --case ID one of them.")
    return "\n".join(lines) + "\n"
