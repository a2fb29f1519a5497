"""What a run found, as a table for people; every figure comes from the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.record import Record
from benchmarks.units import format_bytes

# Copies and bytes are of optimizer state. Times are medians in milliseconds, with the smallest and the largest.
HEADER = ("path", "ranks", "copies", "bytes", "first ms", "fence ms", "finalize ms", "ceiling", "host peak", "device")


@dataclass(frozen=True, slots=True)
class Group:
    """The records of one case, path, world size and concurrency."""

    case_id: str
    path: str
    world_size: int
    label: str
    records: tuple[Record, ...]


def render(records: Sequence[Record]) -> str:
    """Return one table a case, its notes, and what failed or was skipped."""
    lines: list[str] = []
    ceiling = _ceiling(records)
    if ceiling is not None:
        lines += [f"ceiling, device to host: {format_bytes(ceiling)}/s", ""]
    groups = _groups(records)
    for case_id in dict.fromkeys(group.case_id for group in groups):
        own = [group for group in groups if group.case_id == case_id]
        first = own[0].records[0].device
        lines.append(f"{case_id}  on {'?' if first is None else f'{first.kind}: {first.name}'}")
        lines += _aligned([HEADER, *(_row(group, ceiling) for group in own)])
        lines += [f"  {note}" for note in _notes(own)]
        lines.append("")
    lines += _problems(records)
    return "\n".join(lines).rstrip() + "\n"


def spread(values: Sequence[float]) -> str:
    """Return the median of seconds in milliseconds, with the smallest and the largest value."""
    if not values:
        return "-"
    middle = _milliseconds(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_milliseconds(min(values))}-{_milliseconds(max(values))})"


def _milliseconds(seconds: float) -> str:
    scaled = seconds * 1e3
    return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


def samples(records: Iterable[Record], what: str, figure: str, phase: str | None = None) -> list[float]:
    """Return one figure of every sample of a pass that has it; of one phase, or of all."""
    return [
        sample[figure]
        for record in records
        if record.identity.pass_ == what and record.status == "ok"
        for sample in record.samples
        if phase in (None, sample["phase"]) and sample[figure] is not None
    ]


def _groups(records: Sequence[Record]) -> list[Group]:
    found: dict[tuple[str, str, int, str], list[Record]] = {}
    for record in records:
        identity = record.identity
        if identity.case_id is None or record.status != "ok":
            continue
        alone = f"{identity.rank} alone" if identity.concurrency == "alone" else ""
        shared = ", shared" if record.device is not None and record.device.shared else ""
        label = (alone or str(identity.world_size)) + shared
        found.setdefault((identity.case_id, identity.path, identity.world_size, label), []).append(record)
    return [Group(*key, tuple(own)) for key, own in found.items()]


def _row(group: Group, ceiling: float | None) -> tuple[str, ...]:
    timing = "reference" if any(r.identity.pass_ == "reference" for r in group.records) else "timing"
    fences = samples(group.records, timing, "fence_seconds", "steady")
    first = samples(group.records, timing, "fence_seconds", "first")
    first_milliseconds = _milliseconds(statistics.median(first)) if first else "-"
    return (
        group.path,
        group.label,
        _total(group, "calls"),
        _total(group, "bytes"),
        first_milliseconds,
        spread(fences),
        spread(samples(group.records, timing, "finalize_seconds", "steady")) if timing == "timing" else "-",
        _share(group, fences, ceiling),
        _peak(group, "host_peak_bytes"),
        _peak(group, "device_peak_allocated_bytes"),
    )


def _total(group: Group, unit: str) -> str:
    """Sum the logged optimizer transfers over the ranks."""
    by_rank = {
        record.identity.rank: count
        for record in group.records
        if (count := record.transfers["optimizer"]["logged"]) is not None
    }
    if not by_rank:
        return "-"
    total = sum(getattr(count, unit) for count in by_rank.values())
    return str(total) if unit == "calls" else format_bytes(total)


def _share(group: Group, fences: Sequence[float], ceiling: float | None) -> str:
    """All bytes of one rank over the fence, as a share of the ceiling."""
    counts = [count for record in group.records if (count := record.transfers["all"]["logged"]) is not None]
    if not counts or not fences or ceiling is None:
        return "-"
    return f"{counts[0].bytes / statistics.median(fences) / ceiling:.1%}"


def _peak(group: Group, figure: str) -> str:
    """Return the peak of the worst save, summed over the ranks, as the report does."""
    by_rank: dict[int, float] = {}
    for record in group.records:
        found = samples([record], "memory", figure)
        if found:
            by_rank[record.identity.rank] = max(*found, by_rank.get(record.identity.rank, 0))
    return format_bytes(sum(by_rank.values())) if by_rank else "-"


def _notes(groups: Sequence[Group]) -> list[str]:
    """Say why a column is empty, once, and whether the checkpoints are equal."""
    notes: dict[str, None] = {}
    for group in groups:
        for record in group.records:
            for figure in ("device_peak_allocated_bytes", "device_seconds"):
                if figure in record.reasons:
                    notes[f"no {figure.replace('_', ' ')}: {record.reasons[figure]}"] = None
    digests: dict[int, set[str]] = {}
    for group in groups:
        for record in group.records:
            if record.digest is not None and record.identity.concurrency == "together":
                digests.setdefault(group.world_size, set()).add(record.digest)
    for world_size, found in digests.items():
        word = "equal" if len(found) == 1 else f"DIFFERENT ({len(found)} digests)"
        notes[f"checkpoints of all paths, {world_size} rank{'s' * (world_size > 1)}: {word}"] = None
    return list(notes)


def _problems(records: Sequence[Record]) -> list[str]:
    lines: dict[str, None] = {}
    for record in records:
        who = f"{record.identity.case_id or 'this machine'}, {record.identity.path}, {record.identity.world_size} ranks"
        if record.error is not None:
            lines[f"FAILED  {who}: {record.identity.pass_}: {record.error.type}: {record.error.message}"] = None
        elif record.status == "skipped":
            lines[f"skipped {who}: {record.reasons['status']}"] = None
    return list(lines)


def _ceiling(records: Sequence[Record]) -> float | None:
    for record in records:
        if record.identity.pass_ == "ceiling" and record.status == "ok":
            sample = record.samples[0]
            found = [
                sample[name] for name in ("pinned_bytes_per_second", "pageable_warm_bytes_per_second") if sample[name]
            ]
            return max(found, default=None)
    return None


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
