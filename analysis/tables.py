"""Tables that read well in a terminal of 80 columns and on GitHub, and the rows that a report opens with."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.decision import ratio_of
from analysis.evidence import CaseEvidence, PathEvidence
from analysis.missing import Missing
from analysis.policy import Policy
from analysis.rounds import by_round
from analysis.statistics import Interval, median_interval
from analysis.units import number, span

COLUMNS = 80
MOST_ROWS = 15
# Longer names are cut in tables; the legend has them whole.
PATH_LETTERS = 9
SHORT_NAMES = {"default-stager": "stager"}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells that are text already.

    Attributes:
        head: of each column.
        rows: cells.
        left: how many columns, from the left, hold words; the others hold numbers, set to the right.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 2

    def markdown(self) -> str:
        """Return the table for GitHub, its columns aligned for a terminal; no blanks are spent on the bars."""
        if not self.rows:
            return "(nothing was measured)"
        rows = [self.head, *(tuple(cell.replace("|", "\\|") for cell in row) for row in self.rows)]
        widths = [max(2, *(len(row[column]) for row in rows)) for column in range(len(self.head))]
        rule = ["-" * width if column < self.left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
        return "\n".join(_line(row, widths, self.left) for row in (rows[0], rule, *rows[1:]))


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    """Return one line. Without blanks beside the bars, the widest table still fits a terminal."""
    padded = (
        cell.ljust(width) if column < left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"|{'|'.join(padded)}|"


@dataclass
class Notes:
    """Reasons for what is not in a table, each under a letter."""

    reasons: dict[str, str] = field(default_factory=dict)

    def mark(self, missing: Missing) -> str:
        """Return the letter that stands for a reason."""
        letter = self.reasons.setdefault(missing.reason, _letter(len(self.reasons)))
        return f"({letter})"

    def lines(self) -> list[str]:
        """Return what each letter stands for."""
        return [f"({letter}) {reason}" for reason, letter in self.reasons.items()]


def _letter(place: int) -> str:
    letters = string.ascii_lowercase
    return (
        letters[place]
        if place < len(letters)
        else f"{_letter(place // len(letters) - 1)}{letters[place % len(letters)]}"
    )


def path_label(path: str) -> str:
    """Return a path's name, short enough for a column."""
    name = SHORT_NAMES.get(path, path)
    return name if len(name) <= PATH_LETTERS else f"{name[: PATH_LETTERS - 1]}…"


@dataclass(frozen=True, slots=True)
class NumberedCase:
    """A case under the number that stands for it in tables and plots."""

    number: int
    evidence: CaseEvidence


def numbered(cases: Sequence[CaseEvidence]) -> list[NumberedCase]:
    """Number cases in the order of the run."""
    return [NumberedCase(place, evidence) for place, evidence in enumerate(cases, start=1)]


def worst_first(cases: Sequence[NumberedCase], policy: Policy, most: int) -> list[NumberedCase]:
    """Return all cases, or those that a rule chooses where there are more than `most`: the worst for the candidate.

    Cases whose ratio cannot be told come first, then the largest ratios; the answer is in the order of the run.
    """
    if len(cases) <= most:
        return list(cases)

    def badness(case: NumberedCase) -> float:
        ratio = ratio_of(case.evidence, policy.paths.candidate, policy)
        return float("inf") if isinstance(ratio, Missing) else ratio.high

    chosen = sorted(cases, key=lambda case: (-badness(case), case.number))[:most]
    return sorted(chosen, key=lambda case: case.number)


HEAD = ("#", "path", "copies", "MB", "fence ms", "ratio", "+host", "+dev", "pinned")


def legend(policy: Policy) -> str:
    """Say what the columns of the first table are."""
    share = f"{policy.statistics.confidence:.0%}"
    return (
        "copies, MB: transfers from device to host of one save, optimizer state and weights, all ranks together. "
        f"fence ms: how long the trainer stands still, median of steady saves [{share} interval], slowest rank. "
        f"ratio: of that to {policy.paths.baseline}'s, paired [{share} interval]. "
        "+host, +dev: peak memory in MB over what was resident, of all ranks together, of the worst rank's device. "
        "pinned: share of this machine's pinned bandwidth."
    )


def summary_table(cases: Sequence[NumberedCase], policy: Policy, notes: Notes) -> Table:
    """Return one row a case and path."""
    return Table(
        HEAD, tuple(_row(case, path, policy, notes) for case in cases for path in case.evidence.paths.values())
    )


def _row(case: NumberedCase, path: PathEvidence, policy: Policy, notes: Notes) -> tuple[str, ...]:
    evidence = case.evidence
    name = path_label(path.path)
    if not path.good and path.troubles:
        return (str(case.number), name, notes.mark(path.why_nothing), *[""] * (len(HEAD) - 3))
    count = path.count("all", "logged")
    is_baseline = path.path == policy.paths.baseline
    ratio = "1" if is_baseline else _ratio_cell(evidence, path.path, policy, notes)
    return (
        str(case.number),
        name,
        notes.mark(count) if isinstance(count, Missing) else number(count.calls, "calls"),
        notes.mark(count) if isinstance(count, Missing) else number(count.bytes, "bytes"),
        _fence_cell(path, policy, notes),
        ratio,
        cell(path.figure("host_peak_bytes"), "bytes", notes),
        cell(path.figure("device_peak_allocated_bytes"), "bytes", notes),
        cell(evidence.ceiling_share(path.path), "share", notes, "%"),
    )


def fence_of(path: PathEvidence, policy: Policy) -> Interval | Missing:
    """Return the median fence of steady saves with its interval."""
    steady = path.steady()
    if isinstance(steady, Missing):
        return steady
    if policy.bootstrap in path.memo:
        known: Interval | Missing = path.memo[policy.bootstrap]
        return known
    found = median_interval(list(by_round(steady).values()), policy.bootstrap)
    path.memo[policy.bootstrap] = found
    return found


def cell(value: float | Missing, unit: str, notes: Notes, symbol: str = "") -> str:
    """Return a figure, or the letter of the reason why there is none."""
    return notes.mark(value) if isinstance(value, Missing) else f"{number(value, unit)}{symbol}"


def _ratio_cell(evidence: CaseEvidence, path: str, policy: Policy, notes: Notes) -> str:
    """Return ratio and interval; the ratio alone, and why, where there are too few pairs for an interval."""
    ratio, pairs = ratio_of(evidence, path, policy), evidence.pairs(policy.paths.baseline, path)
    if isinstance(ratio, Missing) and not isinstance(pairs, Missing):
        medians = [float(np.median(np.concatenate(side))) for side in pairs[:2]]
        if medians[1] > 0:
            return f"{number(medians[0] / medians[1], 'ratio')} {notes.mark(ratio)}"
    return _interval_cell(ratio, "ratio", notes)


def _fence_cell(path: PathEvidence, policy: Policy, notes: Notes) -> str:
    """Return median and interval; the median alone, and why, where there are too few samples for an interval."""
    fence, steady = fence_of(path, policy), path.steady()
    if isinstance(fence, Missing) and not isinstance(steady, Missing):
        return f"{number(float(steady.median()), 'seconds')} {notes.mark(fence)}"
    return _interval_cell(fence, "seconds", notes)


def _interval_cell(value: Interval | Missing, unit: str, notes: Notes) -> str:
    return notes.mark(value) if isinstance(value, Missing) else span(value.value, value.low, value.high, unit)


def wrap(text: str, indent: str = "") -> str:
    """Break a paragraph for 80 columns; commands and names stay whole."""
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
