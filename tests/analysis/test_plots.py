"""Plots: every number of a plot is in its table, nothing overlaps, nothing is cut, and the bytes stay the same."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from analysis.charts import Chart, Curve, Dots, Growth, NoChart, Series, charts
from analysis.evidence import collect
from analysis.load import load_run
from analysis.plots import WIDTH_INCHES, _style, draw, look, middle_cut, png
from analysis.policy import load_policy
from analysis.tables import Notes, numbered
from analysis.units import number, size
from tests.analysis.golden import ADOPT, CPU, Plan, Shape, make, many_cases
from tests.analysis.variants import VARIANTS

POLICY = load_policy()
KINDS = ("transfers", "fence", "memory", "growth", "timeline", "crossover", "ceiling", "contention")
SWEEP = tuple(
    Shape(id=f"sweep/{1024 * 4**n}B/ep2/l1/bfloat16", family="sweep", preset="sweep", slice_bytes=1024 * 4**n, ratio=r)
    for n, r in enumerate((0.5, 0.7, 0.9, 1.1, 1.2))
)
PLANS: dict[str, Plan] = {
    "one case, two ranks": ADOPT,
    "one case, one rank, no GPU": CPU,
    "twenty cases, long names": many_cases(),
    "a crossover, four paths": replace(ADOPT, shapes=SWEEP, paths=("slice", "coalesced", "staged")),
    "one rank and two": replace(ADOPT, ranks=(1, 2)),
}


def charts_of(folder: Path) -> list[Chart | NoChart]:
    return charts(numbered(collect(load_run(folder))), POLICY, Notes())


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Chart | NoChart]]:
    found = {name: charts_of(make(plan).write(tmp_path_factory.mktemp("run"))) for name, plan in PLANS.items()}
    for name in ("not-enough-failed-case", "not-enough-interrupted", "not-enough-one-rank-missing"):
        found[name] = charts_of(VARIANTS[name]().write(tmp_path_factory.mktemp("run")))
    return found


FIGURES: dict[int, Figure] = {}


def figure_of(chart: Chart) -> Figure:
    """Return a chart's figure; drawn once, since it takes longer than all that is asked of it."""
    if id(chart) not in FIGURES:
        FIGURES[id(chart)] = draw(chart)
    return FIGURES[id(chart)]


def real(charts: list[Chart | NoChart]) -> Iterator[Chart]:
    yield from (chart for chart in charts if isinstance(chart, Chart))


def test_every_kind_is_drawn_or_says_why_not(drawn: dict[str, list[Chart | NoChart]]) -> None:
    for name, found in drawn.items():
        assert tuple(chart.slug for chart in found) == KINDS, name
        assert all(chart.reason for chart in found if isinstance(chart, NoChart))
    assert {chart.slug for chart in real(drawn["twenty cases, long names"])} == set(KINDS)


def test_nothing_overlaps_and_nothing_is_cut(drawn: dict[str, list[Chart | NoChart]]) -> None:
    for name, found in drawn.items():
        for chart in real(found):
            figure = figure_of(chart)
            with _style():
                FigureCanvasAgg(figure).draw()
            texts, boxes = zip(*_text_boxes(figure), strict=True)
            left, bottom, right, top = np.array(boxes).T
            cut = (left < -1) | (bottom < -1) | (right > figure.bbox.x1 + 1) | (top > figure.bbox.y1 + 1)
            assert not cut.any(), f"{name}, {chart.slug}: {texts[int(cut.argmax())]!r} is cut"
            wide = np.minimum(right[:, None], right) - np.maximum(left[:, None], left)
            high = np.minimum(top[:, None], top) - np.maximum(bottom[:, None], bottom)
            # Neighbouring lines may touch by the blank that a font keeps above its letters.
            over = np.argwhere(np.triu((wide > 1) & (high > 3), 1))
            assert not len(over), (
                f"{name}, {chart.slug}: {[[texts[n] for n in pair] for pair in over]} lie over each other"
            )


def _text_boxes(figure: Figure) -> Iterator[tuple[str, tuple[float, float, float, float]]]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    for artist in figure.findobj(Text):
        assert isinstance(artist, Text)
        if artist.get_visible() and artist.get_text().strip() and _is_shown(artist, figure):
            box = artist.get_window_extent(renderer)
            yield artist.get_text(), (box.x0, box.y0, box.x1, box.y1)


def _is_shown(artist: Text, figure: Figure) -> bool:
    """Tick labels beyond the axis' ends exist and are not drawn."""
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if artist is tick.label2:
                    return False
                if artist is tick.label1:
                    low, high = sorted(limits)
                    return bool(low <= float(tick.get_loc()) <= high)
    return True


def test_every_number_in_a_plot_is_in_the_table(drawn: dict[str, list[Chart | NoChart]]) -> None:
    for name, found in drawn.items():
        for chart in real(found):
            table = "\n".join(table.markdown() for table in chart.tables)
            words = set(re.split(r"[|\s\[\]]+|(?<=\d)-(?=\d)", table))
            for shown in _numbers(chart):
                assert shown in words, f"{name}, {chart.slug}: {shown} is in no table"
            for label in _labels(chart):
                assert label in words, f"{name}, {chart.slug}: label {label} is in no table"


def _numbers(chart: Chart) -> Iterator[str]:
    """Return every quantity that is drawn, as its unit writes it."""
    for item in chart.content:
        if isinstance(item, Dots):
            yield from (number(each, "seconds") for each in (*item.first, *item.steady))
        elif isinstance(item, Curve):
            yield from (number(each, "seconds") for each in item.seconds)
            yield from (number(each, "bytes") for each in item.host_bytes)
            yield from (number(each, "seconds") for _, start, end in item.marks for each in (start, end))
        elif isinstance(item, Growth):
            yield from (str(each) for each in item.layers)
            yield from (number(each, "bytes") for each in (*item.prepare_bytes, *item.save_bytes))
        elif isinstance(item, Series):
            for point in item.points:
                yield from (number(each, "ratio") for each in (point.ratio.value, point.ratio.low, point.ratio.high))
                yield size(point.slice_bytes).split()[0]


def _labels(chart: Chart) -> Iterator[str]:
    """Return every number that is written behind a bar."""
    for artist in [text for axes in figure_of(chart).axes for text in axes.texts]:
        text = artist.get_text().strip()
        if text and text[0] in "+0123456789<" and "/" not in text:
            yield from re.findall(r"<?\d[\d.,]*", text.lstrip("+"))


def test_crossover_lies_where_the_gain_ends(drawn: dict[str, list[Chart | NoChart]]) -> None:
    (chart,) = (each for each in real(drawn["a crossover, four paths"]) if each.slug == "crossover")
    ends = {each.path: each.crossover for each in chart.content}
    assert ends["coalesced"] == (16_384, 65_536)
    assert "between 16 KiB and 64 KiB" in chart.tables[1].markdown()
    assert "pays at every size" in str(ends["staged"])


def test_growth_is_of_one_family_and_says_by_how_much(drawn: dict[str, list[Chart | NoChart]]) -> None:
    (chart,) = (each for each in real(drawn["twenty cases, long names"]) if each.slug == "growth")
    assert [each.path for each in chart.content] == ["slice", "coalesced", "staged"]
    for each in chart.content:
        assert each.layers == (2, 4, 8)
        assert all(prepare <= save for prepare, save in zip(each.prepare_bytes, each.save_bytes, strict=True))
        factor = number(each.prepare_bytes[-1] / each.prepare_bytes[0], "ratio")
        assert ["2 to 8", factor] in [list(row[1:3]) for row in chart.tables[1].rows]
    assert "qwen3-30b-a3b/lora1/ep2/l*/bfloat16-bfloat16, 2 ranks" in chart.words
    for axes in figure_of(chart).axes:
        for line in axes.get_lines():
            assert max(line.get_ydata()) <= axes.get_ylim()[1]
            assert axes.get_ylim()[0] == 0


def test_no_gpu_stands_in_the_title(drawn: dict[str, list[Chart | NoChart]]) -> None:
    for chart in real(drawn["one case, one rank, no GPU"]):
        texts = [text.get_text() for text in figure_of(chart).texts]
        assert any("NO GPU" in text for text in texts), chart.slug
    for chart in real(drawn["one case, two ranks"]):
        assert not any("NO GPU" in text.get_text() for text in figure_of(chart).texts)


def test_every_sample_is_drawn(drawn: dict[str, list[Chart | NoChart]]) -> None:
    (chart,) = (each for each in real(drawn["one case, two ranks"]) if each.slug == "fence")
    collections = figure_of(chart).axes[0].collections
    drawn_samples = sum(np.asarray(each.get_offsets()).shape[0] for each in collections)
    samples = sum(len(dots.first) + len(dots.steady) for dots in chart.content)
    assert samples == 2 * 5 * 5 + 3
    assert drawn_samples >= samples


def test_same_bytes_whatever_the_users_settings(
    drawn: dict[str, list[Chart | NoChart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib as mpl

    chart = next(real(drawn["one case, two ranks"]))
    before = png(chart)
    monkeypatch.setitem(mpl.rcParams, "font.size", 20)
    monkeypatch.setitem(mpl.rcParams, "axes.facecolor", "red")
    assert png(chart) == before
    assert b"matplotlib" not in before.lower()


def test_paths_differ_without_colour() -> None:
    names = ("slice", "coalesced", "staged", "default-stager")

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    greys = sorted(grey(look(name).colour) for name in names)
    assert min(right - left for left, right in pairwise(greys)) > 15
    assert len({look(name).marker for name in names}) == len({look(name).hatch for name in names}) == len(names)


def test_pictures_are_as_wide_as_a_page(drawn: dict[str, list[Chart | NoChart]]) -> None:
    with Image.open(io.BytesIO(png(next(real(drawn["one case, two ranks"]))))) as image:
        assert image.width == WIDTH_INCHES * 100


def test_long_names_keep_both_ends() -> None:
    assert middle_cut("short", 9) == "short"
    assert middle_cut("a-long-name-2", 9) == "a-lo…me-2"
