"""Draw charts: Agg, the same bytes for the same numbers, legible without colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from analysis.charts import Bar, Chart, Curve, Dots, Growth, Row, Series
from analysis.missing import Missing
from analysis.statistics import Interval
from analysis.tables import path_label
from analysis.units import UNITS, number, ranks_text, size

DOTS_PER_INCH = 100
WIDTH_INCHES = 8.0
LINE_INCHES = 0.21
# Of a palette: the plots have a handful of colours and their edges' greys, and a palette halves the file.
COLOURS = 64
NAME_LETTERS = 84
# Fonts come with matplotlib; nothing is taken from the machine or its settings.
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
}


@contextmanager
def _style() -> Iterator[None]:
    """Draw with matplotlib's own defaults and STYLE, whatever the user's settings file says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)  # type: ignore[arg-type]  # stubs want each key as a literal
        yield


class Look:
    """How a path is told from the others: by lightness, hatch, marker and line, so that grey paper will do."""

    def __init__(self, colour: str, hatch: str, marker: str, line: str, outline: str | None = None) -> None:
        self.colour = colour
        # Of marks that are not filled: a light colour would be lost.
        self.outline = outline or colour
        self.hatch = hatch
        self.marker = marker
        self.line = line


_LOOKS = {
    "slice": Look("#222222", "", "o", "-"),
    "coalesced": Look("#1f78b4", "///", "s", "--"),
    "staged": Look("#d98c1f", "...", "D", "-."),
    "default-stager": Look("#b8b8b8", "xxx", "v", ":", outline="#808080"),
}
_OTHERS = (
    Look("#7b3294", "\\\\\\", "P", (0, (5, 1))),  # type: ignore[arg-type]  # a dash pattern is a line style too
    Look("#66a61e", "ooo", "X", (0, (1, 1))),  # type: ignore[arg-type]
)


def look(path: str) -> Look:
    """Return the look of a path; the same in every plot."""
    return _LOOKS.get(path) or _OTHERS[sum(path.encode()) % len(_OTHERS)]


def png(chart: Chart) -> bytes:
    """Return the plot as a PNG file."""
    figure = draw(chart)
    raw = io.BytesIO()
    with _style():
        # "Software" would hold matplotlib's version; the report names it once.
        figure.savefig(raw, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    raw.seek(0)
    small = io.BytesIO()
    with Image.open(raw) as image:
        image.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            small, format="png", optimize=True
        )
    return small.getvalue()


def draw(chart: Chart) -> Figure:
    """Return the plot as a figure, for `png` and for tests."""
    drawing: dict[str, Callable[[Chart], Figure]] = {
        "transfers": _transfers,
        "fence": _fence,
        "memory": _memory,
        "growth": _growth,
        "timeline": _timeline,
        "crossover": _crossover,
        "ceiling": _ceiling,
        "contention": _fence,
    }
    with _style():
        return drawing[chart.slug](chart)


class Lines:
    """Places for the rows of a plot: a line with the case's name, then one for each row of it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.places: list[float] = []
        self.heads: list[tuple[float, str]] = []
        place, case = 0.0, None
        for row in rows:
            if row.case.number != case:
                case = row.case.number
                self.heads.append((place + 0.1, f"{case}  {middle_cut(row.case.evidence.title, NAME_LETTERS)}"))
                place += 1
            self.places.append(place)
            place += 1
        self.count = place
        self.labels = [row.label for row in rows]

    @property
    def inches(self) -> float:
        """Height that the lines need."""
        return self.count * LINE_INCHES

    def apply(self, axes: Axes, labels: bool = True) -> None:
        """Label the rows and head the cases."""
        axes.set_ylim(self.count - 0.4, -0.6)
        axes.set_yticks(self.places, self.labels if labels else [""] * len(self.places))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        if labels:
            # Over a neighbour on the right, into which a long name reaches.
            axes.set_zorder(1)
            axes.patch.set_visible(False)
            for place, text in self.heads:
                # In the figure's left margin, not in the axes' data: it cannot lie over a mark.
                axes.annotate(
                    text,
                    (0, place),
                    xycoords=("figure fraction", "data"),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    fontweight="bold",
                    annotation_clip=False,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )


def middle_cut(text: str, letters: int) -> str:
    """Return a name of at most that many letters: its ends tell cases apart, its middle does not."""
    if len(text) <= letters:
        return text
    front = (letters - 1) // 2
    return f"{text[:front]}…{text[-(letters - 1 - front) :]}"


def _canvas(chart: Chart, content_inches: float, left_inches: float, foot_inches: float = 0.55) -> Figure:
    """Return a figure whose margins are the same in inches, however tall it is."""
    head_inches = 0.62
    height = head_inches + content_inches + foot_inches
    figure = Figure(figsize=(WIDTH_INCHES, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=left_inches / WIDTH_INCHES,
        right=1 - 0.25 / WIDTH_INCHES,
        top=1 - head_inches / height,
        bottom=foot_inches / height,
    )
    figure.text(6 / 72 / WIDTH_INCHES, 1 - 0.09 / height, chart.title, va="top", fontsize=10, fontweight="bold")
    figure.text(
        6 / 72 / WIDTH_INCHES, 1 - 0.30 / height, middle_cut(chart.hardware, 110), va="top", fontsize=8, color="#444444"
    )
    return figure


def _absent(axes: Axes, place: float) -> None:
    """Say in a row that it has no figure; the table has the reason."""
    axes.text(
        0.01, place, "not measured", transform=axes.get_yaxis_transform(), va="center", style="italic", color="#666666"
    )


def _bars(chart: Chart) -> tuple[list[Bar], Lines]:
    bars = [item for item in chart.content if isinstance(item, Bar)]
    return bars, Lines([bar.row for bar in bars])


def _left_inches(lines: Lines) -> float:
    """Margin that the longest label needs, at about 0.065 inches a letter."""
    return 0.3 + 0.068 * max(len(label) for label in lines.labels)


def _transfers(chart: Chart) -> Figure:
    bars, lines = _bars(chart)
    figure = _canvas(chart, lines.inches, _left_inches(lines))
    axes = figure.add_subplot()
    largest = max(part for bar in bars for part in bar.parts if not isinstance(part, Missing))
    for bar, place in zip(bars, lines.places, strict=True):
        everything, optimizer = bar.parts
        if isinstance(everything, Missing) or isinstance(optimizer, Missing):
            _absent(axes, place)
            continue
        style = look(bar.row.path)
        axes.barh(place, everything, 0.78, color="#f0f0f0", edgecolor=style.colour, linewidth=1.0)
        axes.barh(place, optimizer, 0.30, color=style.colour, edgecolor="white", linewidth=0.5)
        label = f"{number(everything, 'calls')} ({number(optimizer, 'calls')} of optimizer state)"
        axes.text(max(everything, 1) * 1.08, place, label, va="center")
    axes.set_xscale("log")
    # Room for the label behind the longest bar.
    axes.set_xlim(1, max(10.0, largest ** (1 / 0.68)))
    axes.xaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("copies a save (logarithmic)")
    lines.apply(axes)
    return figure


def _fence(chart: Chart) -> Figure:
    rows = [item for item in chart.content if isinstance(item, Dots)]
    lines = Lines([dots.row for dots in rows])
    figure = _canvas(chart, lines.inches, _left_inches(lines), foot_inches=0.75)
    axes = figure.add_subplot()
    scale = UNITS["seconds"].per_base
    values = [value for dots in rows for value in (*dots.first, *dots.steady)]
    positive = [value for value in values if value > 0]
    logarithmic = bool(positive) and len(positive) == len(values) and max(positive) > 20 * min(positive)
    for dots, place in zip(rows, lines.places, strict=True):
        if not dots.steady:
            _absent(axes, place)
            continue
        _draw_dots(axes, dots, place, scale)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(min(positive) * scale / 1.3, max(positive) * scale * 1.3)
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(0, max(values, default=1.0) * scale * 1.06)
    axes.set_xlabel(f"fence time in {UNITS['seconds'].symbol}{' (logarithmic)' if logarithmic else ''}")
    lines.apply(axes)
    _key(
        figure,
        axes,
        has_first=any(dots.first for dots in rows),
        has_interval=any(isinstance(d.middle, Interval) for d in rows),
    )
    return figure


def _draw_dots(axes: Axes, dots: Dots, place: float, scale: float) -> None:
    style = look(dots.row.path)
    # Spread over the line's height, so that every sample can be seen.
    spread = [place - 0.25 + 0.5 * (n % 5) / 4 for n in range(len(dots.steady))]
    axes.scatter(
        [each * scale for each in dots.steady],
        spread,
        11,
        color=style.colour,
        marker=style.marker,
        edgecolors=style.outline,
        linewidths=0.4,
        zorder=3,
    )
    axes.scatter(
        [each * scale for each in dots.first],
        [place] * len(dots.first),
        20,
        facecolors="none",
        edgecolors=style.outline,
        marker="^",
        linewidths=0.8,
        zorder=3,
    )
    if isinstance(dots.middle, Missing):
        return
    middle = dots.middle.value if isinstance(dots.middle, Interval) else dots.middle
    axes.plot([middle * scale] * 2, [place - 0.42, place + 0.42], color="black", linewidth=1.4, zorder=4)
    if isinstance(dots.middle, Interval):
        ends = [dots.middle.low * scale, dots.middle.high * scale]
        axes.plot(ends, [place] * 2, color="black", linewidth=1.0, marker="|", markersize=5, zorder=4)


def _key(figure: Figure, axes: Axes, has_first: bool, has_interval: bool) -> None:
    """Explain the marks below the axis, where nothing else is."""
    marks = [axes.scatter([], [], 11, color="#555555", marker="o", label="one save")]
    if has_first:
        marks.append(
            axes.scatter(
                [], [], 20, facecolors="none", edgecolors="#555555", marker="^", label="first save of a process"
            )
        )
    (median,) = axes.plot(
        [],
        [],
        color="black",
        marker="|",
        markersize=8,
        linewidth=1.0,
        label=f"median{' and its interval' if has_interval else ''}",
    )
    figure.legend(handles=[*marks, median], loc="lower center", ncols=3, fontsize=8, borderaxespad=0.3)


def _memory(chart: Chart) -> Figure:
    bars, lines = _bars(chart)
    has_device = any(not isinstance(bar.parts[3], Missing) for bar in bars)
    figure = _canvas(chart, lines.inches, _left_inches(lines), foot_inches=0.75)
    axes = figure.subplots(1, 2 if has_device else 1, sharey=True, squeeze=False)[0]
    figure.subplots_adjust(wspace=0.06)
    for panel, name in enumerate(("host", "device")[: len(axes)]):
        _memory_panel(axes[panel], bars, lines, panel * 2)
        axes[panel].set_xlabel(f"{name} memory in {UNITS['bytes'].symbol}")
        lines.apply(axes[panel], labels=panel == 0)
    axes[0].set_yticks(lines.places, lines.labels)
    resident = axes[0].barh([0], [0], color="#d9d9d9", edgecolor="#888888", label="resident before the save")
    added = axes[0].barh([0], [0], color="#555555", edgecolor="white", label="added at its peak (number)")
    figure.legend(handles=[resident, added], loc="lower center", ncols=2, fontsize=8, borderaxespad=0.3)
    return figure


def _memory_panel(axes: Axes, bars: Sequence[Bar], lines: Lines, first_part: int) -> None:
    scale = UNITS["bytes"].per_base
    largest = 0.0
    for bar, place in zip(bars, lines.places, strict=True):
        resident, added = bar.parts[first_part : first_part + 2]
        if isinstance(resident, Missing) or isinstance(added, Missing):
            _absent(axes, place)
            continue
        style = look(bar.row.path)
        axes.barh(place, resident * scale, 0.72, color="#d9d9d9", edgecolor="#888888", linewidth=0.5)
        axes.barh(
            place,
            added * scale,
            0.72,
            left=resident * scale,
            color=style.colour,
            edgecolor="white" if style.hatch else style.colour,
            hatch=style.hatch,
            linewidth=0.5,
        )
        axes.text((resident + added) * scale, place, f" +{number(added, 'bytes')}", va="center")
        largest = max(largest, (resident + added) * scale)
    axes.set_xlim(0, largest * 1.28 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _line(axes: Axes, path: str, across: Sequence[float], up: Sequence[float], marker_size: float) -> None:
    """Draw a quantity of one path as a line with the path's look."""
    style = look(path)
    axes.plot(
        across,
        up,
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markersize=marker_size,
        linewidth=1.2,
        label=path_label(path),
    )


def _growth(chart: Chart) -> Figure:
    lines = [item for item in chart.content if isinstance(item, Growth)]
    figure = _canvas(chart, 3.0, left_inches=0.7, foot_inches=0.85)
    axes = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    figure.subplots_adjust(wspace=0.06)
    scale = UNITS["bytes"].per_base
    for panel, name in zip(axes, ("prepare", "whole save"), strict=True):
        for each in lines:
            values = each.prepare_bytes if name == "prepare" else each.save_bytes
            _line(panel, each.path, each.layers, [value * scale for value in values], marker_size=5)
        panel.set_title(name, loc="left", fontsize=8, pad=3)
        panel.set_xlabel("layers")
        panel.set_xticks(sorted({layers for each in lines for layers in each.layers}))
        panel.set_xlim(left=0)
        panel.grid(True, axis="y")
    axes[0].set_ylim(0, max(value for each in lines for value in each.save_bytes) * scale * 1.1 or 1)
    axes[0].set_ylabel(f"peak host memory in {UNITS['bytes'].symbol}, over resident")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, borderaxespad=0.3)
    return figure


def _timeline(chart: Chart) -> Figure:
    curves = [item for item in chart.content if isinstance(item, Curve)]
    has_device = any(not isinstance(curve.device_bytes, Missing) for curve in curves)
    strip = 0.3 + 0.2 * len(curves)
    figure = _canvas(chart, strip + (3.9 if has_device else 2.3), left_inches=0.95)
    ratios = [strip, *([1.8, 1.8] if has_device else [2.0])]
    axes = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    figure.subplots_adjust(hspace=0.18)
    seconds = UNITS["seconds"].per_base
    _phases(axes[0], curves, seconds)
    panels = [("host", axes[1]), *([("device", axes[2])] if has_device else [])]
    for name, panel in panels:
        for curve in curves:
            values = curve.host_bytes if name == "host" else curve.device_bytes
            if isinstance(values, Missing):
                continue
            across = [each * seconds for each in curve.seconds]
            _line(panel, curve.path, across, [each * UNITS["bytes"].per_base for each in values], marker_size=2.5)
        panel.set_ylabel(f"{name}, {UNITS['bytes'].symbol} over start")
        panel.grid(True, axis="y")
        panel.margins(y=0.08)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=8, borderaxespad=0.4)
    axes[-1].set_xlabel(f"{UNITS['seconds'].symbol} since the save began")
    return figure


def _phases(axes: Axes, curves: Sequence[Curve], scale: float) -> None:
    """Show the phases of each path as a strip of its own: prepare hatched, finalize plain."""
    for place, curve in enumerate(curves):
        for name, start, end in curve.marks:
            style = look(curve.path)
            plain = name != "prepare"
            axes.barh(
                place,
                (end - start) * scale,
                0.7,
                left=start * scale,
                color="#ffffff",
                edgecolor=style.colour,
                hatch="" if plain else "////",
                linewidth=1.0,
            )
    axes.set_ylim(len(curves) - 0.4, -0.6)
    axes.set_yticks(range(len(curves)), [path_label(curve.path) for curve in curves])
    axes.tick_params(axis="y", length=0)
    axes.set_title("hatched: prepare; plain: finalize", loc="left", fontsize=8, pad=3)


def _crossover(chart: Chart) -> Figure:
    series = [item for item in chart.content if isinstance(item, Series)]
    figure = _canvas(chart, 3.6, left_inches=0.7, foot_inches=0.85)
    axes = figure.add_subplot()
    axes.axhline(1, color="black", linewidth=0.9)
    for place, each in enumerate(series):
        _draw_series(axes, each, place, len(series))
    axes.set_xscale("log", base=2)
    sizes = sorted({point.slice_bytes for each in series for point in each.points})
    axes.set_xlim(sizes[0] / 1.7, sizes[-1] * 1.7)
    axes.xaxis.set_major_locator(LogLocator(4, numticks=12))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
    axes.set_ylim(bottom=0)
    axes.grid(True, axis="y")
    axes.set_xlabel("one expert's slice of one optimizer state, as float32 (logarithmic)")
    axes.set_ylabel("ratio of fence times")
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, borderaxespad=0.3)
    return figure


def _draw_series(axes: Axes, series: Series, place: int, count: int) -> None:
    style = look(series.path)
    # A little to the side, so that the bars of two paths at one size can be told apart.
    shift = 1.03 ** (place - (count - 1) / 2)
    for is_sweep in (True, False):
        points = [point for point in series.points if point.is_sweep is is_sweep]
        if not points:
            continue
        ratios = [point.ratio for point in points]
        ranks = ranks_text(series.world_size)
        axes.errorbar(
            [point.slice_bytes * shift for point in points],
            [ratio.value for ratio in ratios],
            yerr=[[r.value - r.low for r in ratios], [r.high - r.value for r in ratios]],
            color=style.colour,
            linestyle=style.line if is_sweep else "none",
            marker=style.marker,
            markersize=5 if is_sweep else 7,
            markerfacecolor=style.colour if is_sweep else "none",
            linewidth=1.2,
            capsize=3,
            label=f"{path_label(series.path)}, {ranks}{'' if is_sweep else ', models'}",
        )
    if not isinstance(series.crossover, Missing):
        low, high = series.crossover
        axes.axvspan(low * shift, high * shift, color=style.colour, alpha=0.12, linewidth=0)


def _ceiling(chart: Chart) -> Figure:
    bars, lines = _bars(chart)
    figure = _canvas(chart, lines.inches, _left_inches(lines))
    axes = figure.add_subplot()
    scale = UNITS["share"].per_base
    largest = max((bar.parts[0] * scale for bar in bars if not isinstance(bar.parts[0], Missing)), default=1.0)
    for bar, place in zip(bars, lines.places, strict=True):
        (share,) = bar.parts
        if isinstance(share, Missing):
            _absent(axes, place)
            continue
        style = look(bar.row.path)
        axes.barh(
            place,
            share * scale,
            0.72,
            color=style.colour,
            edgecolor="white" if style.hatch else style.colour,
            hatch=style.hatch,
        )
        axes.text(share * scale, place, f" {number(share, 'share')}", va="center")
    axes.set_xlim(0, largest * 1.15)
    if largest > 50:
        axes.axvline(100, color="black", linewidth=0.9)
        axes.set_xlim(0, max(largest * 1.15, 105))
    axes.set_xlabel("% of the pinned bandwidth from device to host")
    lines.apply(axes)
    return figure
