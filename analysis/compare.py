"""Before and after: two runs of the same machine, figure by figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.evidence import PathEvidence, collect
from analysis.load import Run
from analysis.missing import Missing
from analysis.policy import Policy
from analysis.report import DECISION_FILE
from analysis.rounds import by_round
from analysis.statistics import Array, Interval, independent_ratio
from analysis.tables import Notes, Table, path_label, wrap
from analysis.units import number, span, text

# What must be the same, as dotted names in run.json. The code may differ: that is what is compared.
SAME = (
    "environment.start.gpus",
    "environment.start.gpu_driver",
    "environment.start.cuda",
    "environment.start.cpu.model",
    "environment.start.cpu.usable",
    "environment.start.memory.total_bytes",
    "environment.start.limits.cgroup_memory_bytes",
    "environment.start.limits.cgroup_cpus",
    "environment.start.software.python",
    "environment.start.software.kernel",
    *(f"environment.start.software.packages.{name}" for name in ("torch", "numpy", "safetensors", "triton")),
    "environment.start.allocator",
    "settings.ranks",
    "settings.device",
    "settings.share_device",
    "settings.durable",
    "settings.repeats",
    "settings.rounds",
)
# Of a GPU: which one it is, and how it is set up; not its clocks, which change from minute to minute.
SAME_OF_GPU = ("name", "uuid_hash", "memory_bytes", "power_limit_watts", "max_link_generation", "max_link_width", "mig")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs say about each other.

    Attributes:
        differences: fields that differ and must not.
        table: side by side; with ratios only where the runs can be compared.
        regressions: what became worse beyond the noise.
        unknown: what cannot be told.
        remarks: what else changed.
    """

    differences: tuple[str, ...]
    table: Table
    regressions: tuple[str, ...]
    unknown: tuple[str, ...]
    remarks: tuple[str, ...]
    notes: tuple[str, ...]


def differences(before: Run, after: Run) -> list[str]:
    """Return the fields in which two runs differ and must not."""
    found = []
    for name in SAME:
        left, right = (_at(run.info, name) for run in (before, after))
        if name.endswith(".gpus"):
            left, right = ([{key: gpu.get(key) for key in SAME_OF_GPU} for gpu in gpus or ()] for gpus in (left, right))
        found += list(_unlike(name, left, right))
    policies = [_policy_digest(run) for run in (before, after)]
    if None not in policies and policies[0] != policies[1]:
        found.append(f"policy: {policies[0]} and {policies[1]}; report both again")
    return found


def compare(before: Run, after: Run, policy: Policy) -> Comparison:
    """Compare two runs; where they cannot be compared, only set them side by side."""
    unlike = differences(before, after)
    left, right = ({(case.case_id, case.world_size): case for case in collect(run)} for run in (before, after))
    notes = Notes()
    rows: list[tuple[str, ...]] = []
    regressions: list[str] = []
    unknown: list[str] = []
    remarks: list[str] = []
    for key in dict.fromkeys([*left, *right]):
        sides = (left.get(key), right.get(key))
        for name in dict.fromkeys(path for side in sides if side is not None for path in side.paths):
            pair = _Pair(name, *(None if side is None else side.paths.get(name) for side in sides))
            title = next(side.title for side in sides if side is not None)
            ratio = pair.fence_ratio(policy)
            rows.append(_row(title, pair, ratio, bool(unlike), notes))
            if not unlike:
                regressions += [f"{title}, {name}: {words}" for words in pair.regressions(ratio, policy)]
                unknown += [f"{title}, {name}: {words}" for words in pair.unknown(ratio)]
                remarks += [f"{title}, {name}: {words}" for words in pair.remarks()]
    head = ("case", "path", "copies", "fence ms", "+host MB", "+dev MB", *(() if unlike else ("fence ratio",)))
    found = (tuple(each) for each in (regressions, unknown, remarks, notes.lines()))
    return Comparison(tuple(unlike), Table(head, tuple(rows)), *found)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One path in one case, before and after."""

    path: str
    before: PathEvidence | None
    after: PathEvidence | None

    def figure(self, name: str) -> tuple[float | Missing, float | Missing]:
        """Return a figure of both sides."""
        absent = Missing("not in this run")
        return (
            absent if self.before is None else self.before.figure(name),
            absent if self.after is None else self.after.figure(name),
        )

    def calls(self) -> tuple[float | Missing, float | Missing]:
        """Return the number of copies of both sides."""
        found: list[float | Missing] = []
        for side in (self.before, self.after):
            count = Missing("not in this run") if side is None else side.count("all", "logged")
            found.append(count if isinstance(count, Missing) else float(count.calls))
        return found[0], found[1]

    def fence_ratio(self, policy: Policy) -> Interval | Missing:
        """Return fence time after over before."""
        rounds: list[list[Array]] = []
        for side, name in ((self.after, "the second run"), (self.before, "the first run")):
            steady = Missing("the path is not there") if side is None else side.steady()
            if isinstance(steady, Missing):
                return Missing(f"{name}: {steady}")
            rounds.append(list(by_round(steady).values()))
        return independent_ratio(rounds[0], rounds[1], policy.bootstrap)

    def regressions(self, ratio: Interval | Missing, policy: Policy) -> Iterator[str]:
        """Yield what became worse beyond the noise."""
        limits = policy.compare
        if not isinstance(ratio, Missing) and ratio.low > 1 + limits.fence_change_at_least:
            words = f"{ratio.value:.3f} [{ratio.low:.3f}-{ratio.high:.3f}] of before"
            yield f"fence_seconds is {words}, limit {1 + limits.fence_change_at_least:.2f}"
        before, after = self.calls()
        if not isinstance(before, Missing) and not isinstance(after, Missing) and after > before:
            yield f"copies rose from {number(before, 'calls')} to {number(after, 'calls')}"
        for name in ("host_peak_bytes", "device_peak_allocated_bytes"):
            before, after = self.figure(name)
            if isinstance(before, Missing) or isinstance(after, Missing):
                continue
            limit = before + max(before * limits.peak_change_at_least, limits.peak_change_bytes_at_least)
            if after > limit:
                words = f"from {text(before, 'bytes')} to {text(after, 'bytes')}"
                yield f"{name} rose {words}, limit {text(limit, 'bytes')}"

    def unknown(self, ratio: Interval | Missing) -> Iterator[str]:
        """Yield what cannot be told; a reference that only captures is not ours to tell about."""
        if any(side is not None and side.capture_only for side in (self.before, self.after)):
            return
        if isinstance(ratio, Missing):
            yield f"fence_seconds: {ratio}"
        if any(isinstance(value, Missing) for value in self.figure("host_peak_bytes")):
            yield "host_peak_bytes: not there on both sides"
        if any(isinstance(value, Missing) for value in self.calls()):
            yield "copies: not there on both sides"

    def remarks(self) -> Iterator[str]:
        """Yield what changed and is neither better nor worse."""
        if self.before is None or self.after is None:
            return
        if self.before.digests and self.after.digests and self.before.digests != self.after.digests:
            yield "the checkpoint's bytes changed"


def _row(title: str, pair: _Pair, ratio: Interval | Missing, unlike: bool, notes: Notes) -> tuple[str, ...]:
    def both(values: tuple[float | Missing, float | Missing], unit: str) -> str:
        return "→".join(notes.mark(each) if isinstance(each, Missing) else number(each, unit) for each in values)

    cells = (
        title,
        path_label(pair.path),
        both(pair.calls(), "calls"),
        both(pair.figure("fence_seconds"), "seconds"),
        both(pair.figure("host_peak_bytes"), "bytes"),
        both(pair.figure("device_peak_allocated_bytes"), "bytes"),
    )
    if unlike:
        return cells
    told = notes.mark(ratio) if isinstance(ratio, Missing) else span(ratio.value, ratio.low, ratio.high, "ratio")
    return (*cells, told)


def comparison_text(before: Run, after: Run, comparison: Comparison, policy: Policy) -> str:
    """Return a comparison for a terminal or GitHub."""
    titles = list(dict.fromkeys(row[0] for row in comparison.table.rows))
    rows = tuple((str(titles.index(row[0]) + 1), *row[1:]) for row in comparison.table.rows)
    lines = [f"# {before.run_id} → {after.run_id}", ""]
    if comparison.differences:
        lines += ["Not the same machine or measurement, so no ratios:", ""]
        lines += [*(wrap(each, "- ") for each in comparison.differences), ""]
    lines += [Table(comparison.table.head, rows).markdown(), ""]
    lines += [wrap(f"{place}: {title}", "- ") for place, title in enumerate(titles, start=1)]
    lines += [wrap(each, "- ") for each in comparison.notes]
    limit = f"beyond {policy.compare.fence_change_at_least:.0%} of fence time with its whole interval"
    if not comparison.differences:
        for name, found in (
            (f"Regressions ({limit})", comparison.regressions),
            ("Cannot tell", comparison.unknown),
            ("Also changed", comparison.remarks),
        ):
            lines += ["", f"{name}:" if found else f"{name}: none.", ""]
            lines += [wrap(each, "- ") for each in found]
    return "\n".join(lines).rstrip() + "\n"


def _at(info: Mapping[str, Any], name: str) -> Any:
    value: Any = info
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _unlike(name: str, left: Any, right: Any) -> Iterator[str]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted(set(left) | set(right)):
            yield from _unlike(f"{name}.{key}", left.get(key), right.get(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _unlike(f"{name}[{place}]", one, other)
    elif left != right:
        yield f"{name}: {json.dumps(left)} and {json.dumps(right)}"


def _policy_digest(run: Run) -> str | None:
    """Return the policy that the run was reported by, if it was."""
    path = run.folder / DECISION_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["policy_digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
