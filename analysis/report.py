"""A run's report: summary.md, decision.json and plots/, made from its records and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from analysis.charts import Chart, NoChart, charts, hardware_words
from analysis.decision import Decision, decide
from analysis.evidence import CaseEvidence, collect
from analysis.instability import instabilities
from analysis.load import Run
from analysis.missing import Missing
from analysis.plots import png
from analysis.policy import Policy
from analysis.tables import (
    COLUMNS,
    MOST_ROWS,
    Notes,
    NumberedCase,
    Table,
    legend,
    numbered,
    path_label,
    summary_table,
    worst_first,
    wrap,
)
from analysis.words import decision_json, decision_text

SUMMARY_FILE = "summary.md"
DECISION_FILE = "decision.json"
PLOTS_FOLDER = "plots"
# Longer tables of numbers are folded away on GitHub.
MOST_OPEN_ROWS = 12
# What draws and computes: other versions may draw other bytes.
TOOLS = ("matplotlib", "numpy", "pandas", "pillow")


@dataclass(frozen=True, slots=True)
class Report:
    """Every file that a report puts into its run, by relative name, and the decision behind them."""

    files: Mapping[str, bytes]
    decision: Decision

    @property
    def summary(self) -> str:
        """The text of summary.md."""
        return self.files[SUMMARY_FILE].decode()


def make_report(run: Run, policy: Policy) -> Report:
    """Return the report of a run without faults."""
    cases = numbered(collect(run))
    decision = decide([run], policy)
    notes = Notes()
    found = charts(cases, policy, notes)
    summary = "\n".join(_summary(run, cases, decision, found, notes, policy)).rstrip() + "\n"
    pictures = {f"{PLOTS_FOLDER}/{chart.slug}.png": png(chart) for chart in found if isinstance(chart, Chart)}
    machine = json.dumps(decision_json(decision), indent=1, ensure_ascii=False) + "\n"
    return Report({SUMMARY_FILE: summary.encode(), DECISION_FILE: machine.encode(), **pictures}, decision)


def first_screen(run: Run, cases: Sequence[NumberedCase], policy: Policy) -> list[str]:
    """Return the headline table, at most 15 rows, with its legend and the reasons for what is missing."""
    paths = max((len(case.evidence.paths) for case in cases), default=1)
    shown = worst_first(cases, policy, max(MOST_ROWS // paths, 1))
    notes = Notes()
    table = summary_table(shown, policy, notes).markdown()
    lines = [wrap(f"{hardware_words(cases)}. The run is {run.status}."), ""]
    if len(shown) < len(cases):
        rule = "those whose ratio cannot be told first, then the largest ratios; the others are below"
        lines += [wrap(f"The {len(shown)} worst of {len(cases)} cases: {rule}."), ""]
    lines += [table, ""]
    lines += [wrap(f"{case.number}: {case.evidence.title}, on {_device(case.evidence)}", "- ") for case in shown]
    lines += ["", wrap(legend(policy))]
    lines += ["", *(wrap(line, "- ") for line in notes.lines())] if notes.reasons else []
    return [*lines, ""]


def _summary(
    run: Run,
    cases: Sequence[NumberedCase],
    decision: Decision,
    found: Sequence[Chart | NoChart],
    notes: Notes,
    policy: Policy,
) -> Iterator[str]:
    yield from (f"# {run.run_id}", "", wrap(f"**{decision.headline}**"), "")
    yield from first_screen(run, cases, policy)
    yield from ("## Decision", "", decision_text(decision))
    yield from _other_paths(run, cases, policy)
    yield from ("## Plots", "")
    for chart in found:
        yield from _chart(chart, len(cases))
    yield from (
        notes.reasons and ["Reasons in these tables:", "", *(wrap(each, "- ") for each in notes.lines()), ""]
    ) or []
    yield from _all_cases(cases, policy)
    yield from ("## Doubts", "", *_doubts(run, cases, policy), "")
    yield from ("## Hardware and software", "", *_hardware(run), "")
    yield from ("## What was run", "", *_what_was_run(run), "")
    yield from ("## What was not measured", "", *_not_measured(run, cases), "")
    tools = ", ".join(f"{name} {version(name)}" for name in TOOLS)
    yield wrap(f"Made by `python -m analysis report` from records.jsonl and run.json; do not edit. {tools}.")


def _device(evidence: CaseEvidence) -> str:
    return evidence.device_words or "no device that a record names"


def _other_paths(run: Run, cases: Sequence[NumberedCase], policy: Policy) -> Iterator[str]:
    """Say what the same rule gives for the paths that are not the candidate."""
    judged = {policy.paths.baseline, policy.paths.candidate}
    others = dict.fromkeys(
        name
        for case in cases
        for name, path in case.evidence.paths.items()
        if name not in judged and not path.capture_only
    )
    for name in others:
        yield wrap(f"By the same rule, {name}: {decide([run], policy, name).headline}")
        yield ""


def _chart(chart: Chart | NoChart, cases: int) -> Iterator[str]:
    yield f"### {chart.title}"
    yield ""
    if isinstance(chart, NoChart):
        yield from (wrap(f"Not drawn: {chart.reason}."), "")
        return
    yield f"![{chart.title}; {chart.hardware}]({PLOTS_FOLDER}/{chart.slug}.png)"
    yield ""
    shown = {item.row.case.number for item in chart.content if hasattr(item, "row")}
    rule = f" {len(shown)} of {cases} cases, the worst first." if shown and len(shown) < cases else ""
    yield wrap(chart.words + rule)
    yield ""
    for table in chart.tables:
        yield from _numbers(table)


def _numbers(table: Table) -> Iterator[str]:
    if len(table.rows) <= MOST_OPEN_ROWS:
        yield from (table.markdown(), "")
        return
    yield from (f"<details><summary>{len(table.rows)} rows of numbers</summary>", "", table.markdown(), "")
    yield from ("</details>", "")


def _all_cases(cases: Sequence[NumberedCase], policy: Policy) -> Iterator[str]:
    """Give every case in one table, where the first screen had a part of them."""
    paths = max((len(case.evidence.paths) for case in cases), default=1)
    if len(cases) * paths <= MOST_ROWS:
        return
    notes = Notes()
    yield from ("## All cases", "")
    yield from _numbers(summary_table(cases, policy, notes))
    yield from (wrap(f"{case.number}: {case.evidence.title}", "- ") for case in cases)
    yield from ("", *(wrap(each, "- ") for each in notes.lines()), "")


def _doubts(run: Run, cases: Sequence[NumberedCase], policy: Policy) -> Iterator[str]:
    found = []
    for doubt in run.info["doubts"]:
        if doubt["ok"] is not True:
            doubtful = "doubt" if doubt["ok"] is False else "not known"
            unit = f" {doubt['unit']}" if doubt["unit"] else ""
            numbers = f"{_value(doubt['found'])}{unit}, limit {_value(doubt['limit'])}{unit}"
            found.append(f"{doubtful}: {doubt['what']}: {numbers}: {doubt['remedy']}")
    for case in cases:
        for path in case.evidence.paths.values():
            steady = path.steady()
            if not isinstance(steady, Missing):
                unstable = instabilities(path.path, steady, policy.instability)
                found += [f"unstable: case {case.number}, {each}" for each in unstable]
    yield from (wrap(words, "- ") for words in found) if found else ["None."]


def _hardware(run: Run) -> Iterator[str]:
    start = run.info["environment"]["start"]
    rows = [
        *((f"GPU {gpu['index']}", _gpu_words(gpu)) for gpu in start["gpus"]),
        ("GPU driver, CUDA", f"{start['gpu_driver'] or 'none'}, {start['cuda'] or 'none'}"),
        ("CPU", f"{start['cpu']['model']}, {start['cpu']['usable']} of {start['cpu']['logical']} usable"),
        ("memory", f"{start['memory']['total_bytes']} bytes" if start["memory"]["total_bytes"] else "not known"),
        ("disk", f"{start['memory']['scratch_filesystem'] or 'not known'}"),
        ("Python, kernel", f"{start['software']['python']}, {start['software']['kernel']}"),
        *(
            (name, start["software"]["packages"][name])
            for name in ("torch", "numpy", "safetensors")
            if name in start["software"]["packages"]
        ),
    ]
    if not start["gpus"]:
        rows.insert(0, ("GPU", "none"))
    yield Table(("what", "found"), tuple((name, str(value)) for name, value in rows)).markdown()


def _gpu_words(gpu: Mapping[str, Any]) -> str:
    link = f"PCIe {_value(gpu['link_generation'])} x{_value(gpu['link_width'])}"
    return f"{gpu['name']}, {link}, MIG {_flag(gpu['mig'])}"


def _flag(value: bool | None) -> str:
    return {True: "on", False: "off", None: "not known"}[value]


def _value(value: Any) -> str:
    return "not known" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _what_was_run(run: Run) -> Iterator[str]:
    git = run.setting("environment", "start", "git", "commit")
    dirty = run.setting("environment", "start", "git", "dirty")
    words = " (clean or not: not known)"
    if isinstance(dirty, bool):
        words = " with changes on top" if dirty else ""
    yield f"- commit {git}{words}"
    for name in ("packckpt", "benchmarks"):
        yield wrap(f"digest of {name}/: {run.setting('environment', 'start', 'code_digests', name)}", "- ")
    yield from ("", "```sh", shlex.join(run.info["command"]), "```")


def _not_measured(run: Run, cases: Sequence[NumberedCase]) -> Iterator[str]:
    lines = list(run.notes)
    if run.status != "complete":
        lines.append(f"the run is {run.status}: python -m benchmarks resume results/runs/{run.run_id}")
    for case in cases:
        for path in case.evidence.paths.values():
            lines += [f"case {case.number}, {path_label(path.path)}: {trouble}" for trouble in path.troubles]
    missing: dict[str, list[str]] = {}
    for record in run.records:
        for name, reason in record.reasons.items():
            if name != "status" and record.identity.pass_ in ("timing", "memory", "ceiling"):
                missing.setdefault(reason, []).append(name.split(".", 1)[0] if name.startswith("transfers") else name)
    for reason, names in missing.items():
        lines.append(f"{', '.join(sorted(set(names)))}: {reason}")
    lines += [f"{name}: {reason}" for name, reason in run.info["environment"]["start"]["reasons"].items()]
    yield from (wrap(line, "- ") for line in dict.fromkeys(lines)) if lines else ["Nothing is missing."]


def terminal_screen(run: Run, policy: Policy) -> str:
    """Return what `report` prints: the summary's first screen, for a terminal of 80 columns."""
    cases = numbered(collect(run))
    lines = [run.run_id[:COLUMNS], *first_screen(run, cases, policy)]
    return "\n".join(lines).rstrip() + "\n"
