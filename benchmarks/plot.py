"""One picture of a run: how long the trainer stands still, by path, every sample shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.missing import Missing
from benchmarks.record import Record
from benchmarks.table import samples

FILE = "fence.png"
_DPI = 100


def plot_fence(records: Sequence[Record], folder: Path) -> Path | Missing:
    """Draw the steady and first fences of the first case that has any."""
    try:
        import matplotlib
    except ImportError:
        return Missing("matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [r for r in records if r.identity.pass_ == "timing" and r.identity.concurrency == "together" and r.samples]
    if not timed:
        return Missing("nothing was timed")
    case_ids = list(dict.fromkeys(f"{r.identity.case_id} x{r.identity.world_size}" for r in timed))
    figure, axes = pyplot.subplots(1, len(case_ids), figsize=(1 + 3.2 * len(case_ids), 3.6), squeeze=False)
    for axis, case_id in zip(axes[0], case_ids, strict=True):
        own = [r for r in timed if f"{r.identity.case_id} x{r.identity.world_size}" == case_id]
        paths = list(dict.fromkeys(r.identity.path for r in own))
        for place, path in enumerate(paths):
            for phase, marker in (("first", "x"), ("steady", "o")):
                of_path = [r for r in own if r.identity.path == path]
                values = samples(of_path, "timing", "fence_seconds", phase)
                colour = "tab:red" if phase == "first" else "tab:blue"
                axis.plot([place] * len(values), values, marker, color=colour, alpha=0.6, label=phase)
        axis.set_xticks(range(len(paths)), paths)
        axis.set_xlim(-0.5, len(paths) - 0.5)
        axis.set_ylim(bottom=0)
        axis.set_title(case_id.replace("/", " "), fontsize=8)
        axis.set_ylabel("fence, seconds")
    handles, labels = axes[0][0].get_legend_handles_labels()
    axes[0][0].legend(*zip(*dict(zip(labels, zip(handles, labels, strict=True), strict=True)).values(), strict=True))
    figure.tight_layout()
    picture = folder / FILE
    figure.savefig(picture, dpi=_DPI)
    pyplot.close(figure)
    return picture
