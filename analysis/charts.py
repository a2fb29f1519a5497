"""What each plot shows, as the table that stands beneath it: a plot draws these numbers and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.decision import ratio_of
from analysis.evidence import PathEvidence
from analysis.missing import Missing
from analysis.policy import Policy
from analysis.rounds import by_round
from analysis.statistics import Array, Interval
from analysis.tables import Notes, NumberedCase, Table, cell, fence_of, path_label, worst_first
from analysis.units import number, ranks_text, size, span

# More points than a plot of this width can show, and more rows than anyone reads.
TIMELINE_POINTS = 40
# Lines of a plot that has one for each case and path; where there are more, `worst_first` chooses the cases.
MOST_LINES = 60
_LAYERS = re.compile(r"/l\d+(?=/)")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a plot that has a line for each case and path.

    Attributes:
        case: whose number and name head the line.
        label: what stands at its left.
        path: decides its look.
    """

    case: NumberedCase
    label: str
    path: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A row with one or two quantities, the second on top of the first; in stored units."""

    row: Row
    parts: tuple[float | Missing, ...]


@dataclass(frozen=True, slots=True)
class Dots:
    """A row with samples, in seconds."""

    row: Row
    first: tuple[float, ...]
    steady: tuple[float, ...]
    middle: Interval | float | Missing


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory of one path over one save.

    Attributes:
        seconds: since the save began.
        host_bytes, device_bytes: over what the first point had.
        marks: name, start and end in seconds.
    """

    path: str
    seconds: tuple[float, ...]
    host_bytes: tuple[float, ...]
    device_bytes: tuple[float, ...] | Missing
    marks: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """The ratio of one case against its slice size."""

    slice_bytes: int
    ratio: Interval
    is_sweep: bool


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one path and number of ranks, by slice size.

    Attributes:
        crossover: between which two sizes of the sweep the gain ends, in bytes; or why there is none.
    """

    path: str
    world_size: int
    points: tuple[Point, ...]
    crossover: tuple[int, int] | Missing


@dataclass(frozen=True, slots=True)
class Growth:
    """Peak host memory of one path as the model grows, in bytes over what was resident before the save.

    Attributes:
        layers: of each case, ascending.
        prepare_bytes, save_bytes: while `prepare` ran, and while the whole save did.
    """

    path: str
    layers: tuple[int, ...]
    prepare_bytes: tuple[float, ...]
    save_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot before it is drawn.

    Attributes:
        slug: its file's name.
        title: what it shows, and over which axis.
        hardware: on what; says so where that was no GPU.
        content: what is drawn: rows, curves or series, by kind.
        tables: the numbers.
        words: how to read it.
    """

    slug: str
    title: str
    hardware: str
    content: tuple[Any, ...]
    tables: tuple[Table, ...]
    words: str


@dataclass(frozen=True, slots=True)
class NoChart:
    """A plot that cannot be drawn, and why."""

    slug: str
    title: str
    reason: str


def charts(cases: Sequence[NumberedCase], policy: Policy, notes: Notes) -> list[Chart | NoChart]:
    """Return every plot of a report, in its order."""
    paths = max((len(case.evidence.paths) for case in cases), default=1)
    ranks = max((case.evidence.world_size for case in cases), default=1)
    shown = worst_first(cases, policy, max(MOST_LINES // paths, 1))
    # Each rank has a line alone and one together.
    apart = worst_first(
        [case for case in cases if case.evidence.world_size > 1], policy, max(MOST_LINES // (paths * ranks * 2), 1)
    )
    return [
        transfers(shown, notes),
        fences(shown, policy, notes),
        memory(shown, notes),
        growth(cases),
        timeline(cases),
        crossover(cases, policy),
        ceiling_share(shown, notes),
        contention(apart),
    ]


def hardware_words(cases: Sequence[NumberedCase]) -> str:
    """Say on what the cases were measured; loudly where it was no GPU."""
    devices = {case.evidence.device_words for case in cases if case.evidence.device_words}
    words = ", ".join(sorted(devices)) or "no device that a record names"
    if all(case.evidence.on_gpu for case in cases):
        return words
    return f"NO GPU: measured on {words}" if cases else "nothing was measured"


def transfers(cases: Sequence[NumberedCase], notes: Notes) -> Chart | NoChart:
    """Return the number of copies of one save by path."""
    title = "Copies from device to host in one save, by path"
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    for case, path in _each(cases):
        if path.capture_only:
            continue  # it keeps no log
        found = [path.count(what, "logged") for what in ("all", "optimizer")]
        calls = tuple(count if isinstance(count, Missing) else float(count.calls) for count in found)
        bars.append(Bar(Row(case, path_label(path.path), path.path), calls))
        moved = found[0] if isinstance(found[0], Missing) else float(found[0].bytes)
        texts = [cell(calls[0], "calls", notes), cell(calls[1], "calls", notes), cell(moved, "bytes", notes)]
        rows.append((str(case.number), path_label(path.path), *texts))
    if not _any_known(bars):
        return NoChart("transfers", title, "no transfer was counted")
    table = Table(("#", "path", "copies", "of optimizer state", "MB"), tuple(rows))
    words = "Wide bars: all copies; narrow bars: those of optimizer state. All ranks together; the axis is logarithmic."
    return Chart("transfers", title, hardware_words(cases), tuple(bars), (table,), words)


def fences(cases: Sequence[NumberedCase], policy: Policy, notes: Notes) -> Chart | NoChart:
    """Return every sample of the fence time by path."""
    title = "Fence time of each save, by path"
    dots: list[Dots] = []
    rows: list[tuple[str, ...]] = []
    for case, path in _each(cases):
        steady, first, middle = path.steady(), path.first(), fence_of(path, policy)
        label = path_label(path.path)
        if isinstance(steady, Missing):
            dots.append(Dots(Row(case, label, path.path), (), (), steady))
            rows.append((str(case.number), label, "", "", notes.mark(steady)))
            continue
        firsts = {} if isinstance(first, Missing) else by_round(first)
        for place, samples in by_round(steady).items():
            cells = [" ".join(number(each, "seconds") for each in some) for some in (firsts.get(place, ()), samples)]
            rows.append((str(case.number), label, str(place), *cells))
        median = float(steady.median())
        words = f"median {number(median, 'seconds')}"
        if isinstance(middle, Interval):
            words = f"median {span(middle.value, middle.low, middle.high, 'seconds')}"
        rows.append((str(case.number), label, "all", "", words))
        flat_first = tuple(float(each) for some in firsts.values() for each in some)
        shown = middle if isinstance(middle, Interval) else median
        dots.append(Dots(Row(case, label, path.path), flat_first, tuple(float(each) for each in steady), shown))
    if not any(each.steady for each in dots):
        return NoChart("fence", title, "no save was timed")
    table = Table(("#", "path", "round", "first ms", "steady ms"), tuple(rows))
    share = f"{policy.statistics.confidence:.0%}"
    words = (
        "Dots: steady saves; open triangles: the first save of each process, which pays page faults and pinning; "
        f"bar: median of the steady ones with its {share} interval (line `all` of the table). Slowest rank."
    )
    return Chart("fence", title, hardware_words(cases), tuple(dots), (table,), words)


def memory(cases: Sequence[NumberedCase], notes: Notes) -> Chart | NoChart:
    """Return peak memory by path: resident, and added by the save."""
    title = "Peak memory of one save, by path"
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    for case, path in _each(cases):
        if path.capture_only:
            continue  # it has no memory pass
        names = ("host_resident_bytes", "host_peak_bytes", "device_resident_bytes", "device_peak_allocated_bytes")
        found = tuple(path.figure(name) for name in names)
        bars.append(Bar(Row(case, path_label(path.path), path.path), found))
        rows.append((str(case.number), path_label(path.path), *(cell(each, "bytes", notes) for each in found)))
    if not _any_known(bars):
        return NoChart("memory", title, "no memory pass was measured")
    head = ("#", "path", "host resident MB", "host added MB", "device resident MB", "device added MB")
    words = "Light: resident before the save; dark: added by it at its peak. Host: all ranks; device: the worst rank."
    return Chart("memory", title, hardware_words(cases), tuple(bars), (Table(head, tuple(rows)),), words)


def growth(cases: Sequence[NumberedCase]) -> Chart | NoChart:
    """Return peak host memory against the number of layers, for the family of cases that has most of them."""
    title = "Peak host memory as layers are added"
    families: dict[tuple[str, int], list[NumberedCase]] = {}
    for case in cases:
        families.setdefault((_LAYERS.sub("/l*", case.evidence.case_id), case.evidence.world_size), []).append(case)
    found = [(family, grown) for family, group in families.items() if (grown := _grown(group))]
    if not found:
        return NoChart("growth", title, "needs one case at two numbers of layers at least (--case ID, several times)")
    (family, world_size), grown = max(found, key=lambda each: (max(len(g.layers) for g in each[1]), -each[0][1]))
    rows = [
        (path_label(each.path), str(layers), number(prepare, "bytes"), number(save, "bytes"))
        for each in grown
        for layers, prepare, save in zip(each.layers, each.prepare_bytes, each.save_bytes, strict=True)
    ]
    factors = [
        (
            path_label(each.path),
            f"{each.layers[0]} to {each.layers[-1]}",
            *(_factor(values) for values in (each.prepare_bytes, each.save_bytes)),
        )
        for each in grown
    ]
    tables = (
        Table(("path", "layers", "prepare MB", "save MB"), tuple(rows), left=1),
        Table(("path", "layers", "prepare ×", "save ×"), tuple(factors), left=2),
    )
    words = (
        f"{family}, {ranks_text(world_size)}: peak over what was resident, of all ranks, worst save. A line "
        "that is flat does not grow with the model."
    )
    hardware = hardware_words(families[family, world_size])
    return Chart("growth", title, hardware, grown, tables, words)


def _grown(cases: Sequence[NumberedCase]) -> tuple[Growth, ...]:
    """Return a line for each path that was measured at two numbers of layers or more."""
    points: dict[str, dict[int, tuple[float, float]]] = {}
    for case, path in _each(cases):
        if path.capture_only:
            continue  # it has no memory pass
        prepare, save = path.figure("host_peak_prepare_bytes"), path.figure("host_peak_bytes")
        if not isinstance(prepare, Missing) and not isinstance(save, Missing):
            points.setdefault(path.path, {})[int(case.evidence.case["layers"])] = (prepare, save)
    grown = []
    for name, by_layers in points.items():
        layers = tuple(sorted(by_layers))
        if len(layers) > 1:
            values = [by_layers[each] for each in layers]
            grown.append(Growth(name, layers, tuple(v[0] for v in values), tuple(v[1] for v in values)))
    return tuple(grown)


def _factor(values: Sequence[float]) -> str:
    return number(values[-1] / values[0], "ratio") if values[0] else "from 0"


def timeline(cases: Sequence[NumberedCase]) -> Chart | NoChart:
    """Return the memory of one save over time: of the case whose timelines show most paths, then of the largest."""
    title = "Memory during one save"
    found = [(case, curves) for case in cases if (curves := _curves(case))]
    if not found:
        return NoChart("timeline", title, "no timeline was recorded")
    case, curves = max(found, key=lambda each: (len(each[1]), _moved(each[0]), -each[0].number))
    marks = [
        (path_label(curve.path), name, number(start, "seconds"), number(end, "seconds"))
        for curve in curves
        for name, start, end in curve.marks
    ]
    rows = [
        (path_label(curve.path), number(second, "seconds"), number(host, "bytes"), _device_cell(curve, place))
        for curve in curves
        for place, (second, host) in enumerate(zip(curve.seconds, curve.host_bytes, strict=True))
    ]
    tables = (
        Table(("path", "phase", "from ms", "to ms"), tuple(marks)),
        Table(("path", "at ms", "host MB", "device MB"), tuple(rows), left=1),
    )
    words = (
        f"Case {case.number}, rank 0, over what the first point had; at most {TIMELINE_POINTS} points a path, "
        "each the largest of its stretch. The strip at the top shows the phases."
    )
    return Chart("timeline", f"{title}, case {case.number}", hardware_words([case]), curves, tables, words)


def crossover(cases: Sequence[NumberedCase], policy: Policy) -> Chart | NoChart:
    """Return the ratio to the baseline against the size of one expert's slice."""
    title = f"Fence time over {policy.paths.baseline}'s, by slice size"
    found: dict[tuple[str, int], list[Point]] = {}
    for case, path in _each(cases):
        ratio = ratio_of(case.evidence, path.path, policy)
        slice_bytes = case.evidence.case.get("slice_bytes")
        if path.path == policy.paths.baseline or path.capture_only or isinstance(ratio, Missing) or not slice_bytes:
            continue
        point = Point(int(slice_bytes["median"]), ratio, case.evidence.case["family"] == "sweep")
        found.setdefault((path.path, case.evidence.world_size), []).append(point)
    series = tuple(
        Series(path, world_size, tuple(sorted(points, key=lambda p: (p.slice_bytes, p.is_sweep))), _crossing(points))
        for (path, world_size), points in found.items()
    )
    if len({point.slice_bytes for each in series for point in each.points}) < 2:
        return NoChart("crossover", title, "needs ratios at two slice sizes at least (--preset sweep)")
    rows = [
        (
            path_label(each.path),
            size(point.slice_bytes),
            "sweep" if point.is_sweep else "model",
            str(each.world_size),
            span(point.ratio.value, point.ratio.low, point.ratio.high, "ratio"),
        )
        for each in series
        for point in each.points
    ]
    ends = [(path_label(each.path), str(each.world_size), _crossing_words(each.crossover)) for each in series]
    tables = (
        Table(("path", "slice", "case", "ranks", "ratio"), tuple(rows), left=3),
        Table(("path", "ranks", "the gain ends"), tuple(ends), left=3),
    )
    words = (
        "Below 1 it is faster. Lines: the sweep; single marks: models, at their median slice. The crossover lies in "
        "the shaded stretch, after the last size whose whole interval is below 1."
    )
    return Chart("crossover", title, hardware_words(cases), series, tables, words)


def ceiling_share(cases: Sequence[NumberedCase], notes: Notes) -> Chart | NoChart:
    """Return which share of the pinned bandwidth each path reaches."""
    title = "Share of the pinned bandwidth ceiling, by path"
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    for case, path in _each(cases):
        if path.capture_only:
            continue  # without a log, its bytes are not known
        share = case.evidence.ceiling_share(path.path)
        bars.append(Bar(Row(case, path_label(path.path), path.path), (share,)))
        rows.append((str(case.number), path_label(path.path), cell(share, "share", notes)))
    if not _any_known(bars):
        reason = next((str(bar.parts[0]) for bar in bars), "nothing was measured")
        return NoChart("ceiling", title, reason)
    ceiling = cases[0].evidence.ceiling()
    assert not isinstance(ceiling, Missing)
    words = (
        f"Of {number(ceiling, 'bytes_per_second')} GB/s, measured in the same run; bytes of a save over its fence "
        "time, which also holds the writing of the snapshot. The rank that reaches least."
    )
    table = Table(("#", "path", "% of pinned"), tuple(rows))
    return Chart("ceiling", title, hardware_words(cases), tuple(bars), (table,), words)


def contention(cases: Sequence[NumberedCase]) -> Chart | NoChart:
    """Return the fence time of each rank alone and with the others."""
    title = "Fence time of each rank, alone and together"
    dots: list[Dots] = []
    rows: list[tuple[str, ...]] = []
    for case, path in _each(cases):
        alone, together = path.by_rank(alone=True), path.by_rank()
        for rank in sorted(set(alone) & set(together)):
            medians = []
            for how, samples in (("alone", alone[rank]), ("together", together[rank])):
                if not len(samples):
                    continue
                median = float(np.median(samples))
                medians.append(median)
                label = f"{path_label(path.path)} r{rank} {how}"
                dots.append(Dots(Row(case, label, path.path), (), tuple(samples.tolist()), median))
                texts = (number(median, "seconds"), " ".join(number(each, "seconds") for each in samples))
                rows.append((str(case.number), path_label(path.path), f"{rank} {how}", *texts))
            if len(medians) == 2 and medians[0] > 0:
                ratio = number(medians[1] / medians[0], "ratio")
                rows.append((str(case.number), path_label(path.path), f"{rank} ratio", ratio, ""))
    if not dots:
        return NoChart("contention", title, "no rank was measured alone" if cases else "one rank has no neighbour")
    table = Table(("#", "path", "rank", "median ms", "steady ms"), tuple(rows), left=3)
    words = "Dots: steady saves; bar: their median. Apart where the ranks get in each other's way."
    return Chart("contention", title, hardware_words(cases), tuple(dots), (table,), words)


def _each(cases: Sequence[NumberedCase]) -> list[tuple[NumberedCase, PathEvidence]]:
    return [(case, path) for case in cases for path in case.evidence.paths.values()]


def _any_known(bars: Sequence[Bar]) -> bool:
    return any(not isinstance(part, Missing) for bar in bars for part in bar.parts)


def _moved(case: NumberedCase) -> int:
    counts = [path.count("all", "logged") for path in case.evidence.paths.values()]
    return max((count.bytes for count in counts if not isinstance(count, Missing)), default=0)


def _curves(case: NumberedCase) -> tuple[Curve, ...]:
    found = []
    for path in case.evidence.paths.values():
        raw = path.timeline()
        if not isinstance(raw, Missing) and len(raw["seconds"]) > 1:
            curve = _curve(path, raw)
            if curve is not None:
                found.append(curve)
    return tuple(found)


def _curve(path: PathEvidence, raw: Mapping[str, Any]) -> Curve | None:
    """Thin out a timeline: each stretch is shown by its largest value, so that no peak is lost."""
    if None in raw["host_resident_bytes"]:
        return None
    host = np.asarray(raw["host_resident_bytes"], dtype=np.float64)
    device: Array | None = None
    if None not in raw["device_allocated_bytes"]:
        device = np.asarray(raw["device_allocated_bytes"], dtype=np.float64)
    stretches = np.array_split(np.arange(len(host)), min(TIMELINE_POINTS, len(host)))
    peaks = [int(stretch[host[stretch].argmax()]) for stretch in stretches]
    device_bytes: tuple[float, ...] | Missing = Missing("the device's memory was not sampled")
    if device is not None:
        device_bytes = tuple(float(device[stretch].max() - device[0]) for stretch in stretches)
    return Curve(
        path.path,
        tuple(float(raw["seconds"][place]) for place in peaks),
        tuple(float(host[place] - host[0]) for place in peaks),
        device_bytes,
        tuple((mark["name"], mark["start_seconds"], mark["end_seconds"]) for mark in raw["marks"]),
    )


def _device_cell(curve: Curve, place: int) -> str:
    return "none" if isinstance(curve.device_bytes, Missing) else number(curve.device_bytes[place], "bytes")


def _crossing(points: Sequence[Point]) -> tuple[int, int] | Missing:
    """Return the two neighbouring sizes of the sweep between which the gain ends."""
    sweep = sorted((point for point in points if point.is_sweep), key=lambda point: point.slice_bytes)
    if len({point.slice_bytes for point in sweep}) < 2:
        return Missing("cannot tell: the sweep has fewer than two sizes")
    pays = [point.ratio.high < 1 for point in sweep]
    if all(pays):
        return Missing("nowhere in the sweep: it pays at every size")
    if not any(pays):
        return Missing("nowhere in the sweep: it pays at no size")
    changes = [
        (left.slice_bytes, right.slice_bytes)
        for (left, right), (before, after) in zip(pairwise(sweep), pairwise(pays), strict=True)
        if before and not after
    ]
    if len(changes) != 1 or not pays[0]:
        return Missing("cannot tell: it pays here and there")
    return changes[0]


def _crossing_words(crossing: tuple[int, int] | Missing) -> str:
    return str(crossing) if isinstance(crossing, Missing) else f"between {size(crossing[0])} and {size(crossing[1])}"
