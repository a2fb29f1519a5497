"""Figures that cannot be true: too good for the hardware, or at odds with another figure of the same records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from analysis.evidence import CaseEvidence, PathEvidence
from analysis.missing import Missing
from analysis.policy import Believable, Policy
from analysis.statistics import Interval
from analysis.units import text

# The part, and the whole that it cannot be longer than.
_PARTS = (("prepare_seconds", "fence_seconds"), ("device_seconds", "fence_seconds"))
# Measured peak, and the plan's.
_PEAKS = (("host_peak_bytes", "host_peak_bytes"), ("device_peak_allocated_bytes", "device_peak_bytes"))
Doubt = tuple[str, str]


def doubts(
    evidence: CaseEvidence, paths: Sequence[PathEvidence], ratio: Interval | Missing, policy: Policy
) -> Iterator[Doubt]:
    """Yield figure and words.

    Args:
        paths: baseline and candidate.
    """
    limits = policy.believable
    yield from _ceiling(evidence, limits)
    if not isinstance(ratio, Missing) and ratio.value < limits.fence_ratio_at_least:
        yield "fence_seconds", f"a ratio of {ratio.value:.4f}, expected at least {limits.fence_ratio_at_least}"
    yield from _resident(evidence, paths, limits)
    for path in paths:
        yield from ((figure, f"{path.path}: {words}") for figure, words in _path(evidence, path, limits))


def _ceiling(evidence: CaseEvidence, limits: Believable) -> Iterator[Doubt]:
    ceiling = evidence.ceiling()
    low, high = limits.pinned_bytes_per_second_between
    if not isinstance(ceiling, Missing) and not low <= ceiling <= high:
        unit = "bytes_per_second"
        words = f"{text(ceiling, unit)}, expected {text(low, unit)} to {text(high, unit)}"
        yield "pinned_bytes_per_second", words


def _path(evidence: CaseEvidence, path: PathEvidence, limits: Believable) -> Iterator[Doubt]:
    for name in ("fence_seconds", "device_seconds"):
        share = evidence.best_ceiling_share(path.path, name)
        if not isinstance(share, Missing) and share > limits.ceiling_share_at_most:
            words = f"{share:.0%} of the pinned ceiling, expected at most {limits.ceiling_share_at_most:.0%}"
            yield name, words
    for part, whole in _PARTS:
        yield from _part(path.timing, part, whole, limits)
    yield from _lost_events(path.timing, limits)
    yield from _largest(path.memory)
    for measured, planned in _PEAKS:
        yield from _peak(path, measured, planned, limits)


def _part(frame: pd.DataFrame, part: str, whole: str, limits: Believable) -> Iterator[Doubt]:
    if frame.empty or part not in frame:
        return
    zero = int((frame[[part, whole]] == 0).any(axis=1).sum())
    if zero:
        yield (part if (frame[part] == 0).any() else whole), f"0 in {zero} of {len(frame)} saves"
    if part == "prepare_seconds":
        shorter = frame[frame[part] < frame[whole] * limits.prepare_share_at_least]
        if not shorter.empty:
            row = shorter.iloc[0]
            lengths = f"{text(row[part], 'seconds')} of {text(row[whole], 'seconds')}"
            yield f"{part} or {whole}", f"{part} is only {lengths}, in {len(shorter)} of {len(frame)} saves"
    longer = frame[frame[part] > frame[whole] * limits.part_share_at_most]
    if not longer.empty:
        row = longer.iloc[0]
        lengths = f"{text(row[part], 'seconds')} of {text(row[whole], 'seconds')}"
        yield f"{whole} or {part}", f"{part} is {lengths}, in {len(longer)} of {len(frame)} saves"


def _lost_events(frame: pd.DataFrame, limits: Believable) -> Iterator[Doubt]:
    if frame.empty or "device_seconds" not in frame:
        return
    for rank, rows in frame.groupby("rank"):
        seconds = rows["device_seconds"]
        median = float(seconds.median())
        if seconds.min() < median * limits.device_seconds_share_at_least:
            words = (
                f"rank {rank}: {text(float(seconds.min()), 'seconds')} in one save, median {text(median, 'seconds')}"
            )
            yield "device_seconds", words


def _largest(frame: pd.DataFrame) -> Iterator[Doubt]:
    if frame.empty:
        return
    parts = frame[["host_peak_prepare_bytes", "host_peak_finalize_bytes"]]
    wrong = frame[parts.notna().all(axis=1) & (frame["host_peak_bytes"] != parts.max(axis=1))]
    if not wrong.empty:
        words = f"it is not the larger of prepare's and finalize's in {len(wrong)} of {len(frame)} saves"
        yield "host_peak_bytes", words


def _peak(path: PathEvidence, measured: str, planned: str, limits: Believable) -> Iterator[Doubt]:
    on_device = measured.startswith("device")
    noise = limits.device_peak_noise_bytes if on_device else limits.host_peak_noise_bytes
    highest, lowest, predicted = path.peaks(measured), _lowest(path, measured), path.predicted(planned)
    for rank in highest:
        peak, plan = highest[rank], predicted[rank]
        if isinstance(peak, Missing) or isinstance(plan, Missing):
            continue
        # The host's later saves may find their pages there already; the device's allocator counts every save alike.
        least = lowest.get(rank, 0) if on_device else peak
        too_high = peak > max(plan * limits.peak_ratio_at_most, plan + noise)
        if least < plan * limits.peak_ratio_at_least or too_high:
            found = peak if too_high else least
            words = f"rank {rank} measured {text(found, 'bytes')}, the plan predicts {text(plan, 'bytes')}"
            yield f"{measured} or predicted.{planned}", words


def _resident(evidence: CaseEvidence, paths: Sequence[PathEvidence], limits: Believable) -> Iterator[Doubt]:
    """One trainer stands behind both paths: what it keeps resident cannot differ much, nor be less than it moves."""
    for name in ("host_resident_bytes", "device_resident_bytes"):
        by_path = [path.peaks(name) for path in paths]
        lowest = [_lowest(path, name) for path in paths]
        for rank in range(evidence.world_size):
            values = [found[rank] for found in by_path]
            known = [value for value in values if not isinstance(value, Missing)]
            if len(known) < len(values):
                continue
            least = min(low.get(rank, 0) for low in lowest)
            if least <= 0 or max(known) > least * limits.resident_ratio_at_most:
                unlike = " and ".join(text(value, "bytes") for value in (max(known), least))
                yield name, f"rank {rank} had {unlike} resident in one and the same trainer"
            moved = paths[0].count("all", "logged", rank)
            if name.startswith("device") and not isinstance(moved, Missing):
                share = least / moved.bytes if moved.bytes else 1.0
                if share < limits.device_resident_share_at_least:
                    words = f"rank {rank} moved {text(moved.bytes, 'bytes')} and had {text(least, 'bytes')} there"
                    yield name, words


def _lowest(path: PathEvidence, name: str) -> dict[int, int]:
    frame = path.memory
    if frame.empty or name not in frame or frame[name].isna().any():
        return {}
    return {int(str(rank)): int(value) for rank, value in frame.groupby("rank")[name].min().items()}
