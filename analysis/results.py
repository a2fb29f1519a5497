"""The folder `results/`: its runs, its index, its decision records, and whether all of it is what the records give."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis.charts import hardware_words
from analysis.decision import Decision, decide
from analysis.evidence import collect
from analysis.load import Run, RunError, load_run
from analysis.policy import Policy
from analysis.report import PLOTS_FOLDER, SUMMARY_FILE, TOOLS, Report, make_report
from analysis.tables import numbered, wrap
from benchmarks.record import RECORDS_FILE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
INDEX_FILE = "README.md"
RUNS_FOLDER = "runs"
DECISIONS_FOLDER = "decisions"


@dataclass(frozen=True, slots=True)
class Results:
    """Where everything lies."""

    folder: Path = RESULTS

    def runs(self) -> list[Path]:
        """Return the folders of all runs, newest first."""
        parent = self.folder / RUNS_FOLDER
        found = [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
        return sorted(found, key=lambda path: _age(path), reverse=True)

    def decisions(self) -> list[Path]:
        """Return the files of all decision records, newest first."""
        return sorted((self.folder / DECISIONS_FOLDER).glob("*.json"), reverse=True)


def _age(folder: Path) -> tuple[str, str]:
    """Return when a run started, and its name: two runs of one day are in order too."""
    try:
        started = str(load_run(folder).info["sessions"][0]["started_at"])
    except (RunError, KeyError, IndexError, TypeError):
        started = folder.name[:8]
    return started.replace("-", ""), folder.name


def index_text(results: Results, policy: Policy) -> str:
    """Return results/README.md."""
    lines = ["# Results", ""]
    lines += [
        wrap(
            "Runs of `python -m benchmarks`, newest first: raw records, never changed, and beside them what "
            "`python -m analysis report` makes of them. Figures of different machines or days are not to be compared."
        ),
        "",
        wrap(
            f"Decisions are by policy {policy.digest} (analysis/policy.toml), of {policy.paths.candidate} "
            f"instead of {policy.paths.baseline}."
        ),
        "",
    ]
    lines += [_run_line(folder, policy) for folder in results.runs()] or ["No run yet."]
    lines += ["", "## Decision records", ""]
    lines += [_decision_line(path) for path in results.decisions()] or ["None yet."]
    lines += ["", wrap("Made by `python -m analysis index`; do not edit.")]
    return "\n".join(lines) + "\n"


def _run_line(folder: Path, policy: Policy) -> str:
    """Return one line, however long: a run is found by it with grep."""
    link = f"- [{folder.name}]({RUNS_FOLDER}/{folder.name}/{SUMMARY_FILE})"
    try:
        run = load_run(folder)
    except RunError as error:
        return f"{link}: not a run: {error}"
    cases = numbered(collect(run)) if run.info else []
    count = f"{len(cases)} case{'' if len(cases) == 1 else 's'}"
    return f"{link}: {hardware_words(cases)}, {count}: **{decide([run], policy).headline}**"


def _decision_line(path: Path) -> str:
    link = f"- [{path.stem}]({DECISIONS_FOLDER}/{path.name})"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return f"{link}: {content['path']}, policy {content['policy_digest']}: **{content['headline']}**"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{link}: not a decision record: {error}"


def decision_record(runs: Sequence[Run], decision: Decision, day: date) -> dict[str, Any]:
    """Return what is kept of a decision: enough to make it again from the records, or to see that they changed."""
    return {
        "date": day.isoformat(),
        "path": decision.path,
        "baseline": decision.baseline,
        "outcome": str(decision.outcome),
        "mismatch": decision.mismatch,
        "headline": decision.headline,
        "policy_digest": decision.policy_digest,
        "runs": [{"run": run.run_id, "records_digest": _records_digest(run.folder)} for run in runs],
        "reasons": [f"{reason.kind}: {reason}" for reason in decision.all_reasons],
    }


def write_decision_record(results: Results, record: dict[str, Any]) -> Path:
    """Add a decision record; those that are there are never replaced."""
    folder = results.folder / DECISIONS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (path := folder / f"{record['date']}-{record['path']}-{number}.json").exists():
        number += 1
    path.write_text(_record_text(record), encoding="utf-8")
    return path


def _record_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _records_digest(folder: Path) -> str:
    path = folder / RECORDS_FILE
    return hashlib.blake2b(path.read_bytes() if path.exists() else b"", digest_size=32).hexdigest()


def write_report(run: Run, report: Report) -> None:
    """Write a report into its run; plots that it does not have any more are removed."""
    folder = run.folder / PLOTS_FOLDER
    if folder.is_dir():
        for path in folder.glob("*.png"):
            path.unlink()
    for name, content in report.files.items():
        path = run.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def check(results: Results, policy: Policy) -> Iterator[str]:
    """Yield every derived file that is not what the records give, byte for byte."""
    for folder in results.runs():
        yield from _check_run(folder, policy)
    index = results.folder / INDEX_FILE
    if not index.exists() or index.read_text(encoding="utf-8") != index_text(results, policy):
        yield f"{INDEX_FILE} is not what the runs give: python -m analysis index"
    for path in results.decisions():
        yield from (f"{DECISIONS_FOLDER}/{path.name}: {words}" for words in _check_decision(path, results, policy))


def _check_run(folder: Path, policy: Policy) -> Iterator[str]:
    try:
        run = load_run(folder)
    except RunError as error:
        yield f"{folder.name}: {error}"
        return
    if run.faults:
        yield from (f"{folder.name}: {fault}" for fault in run.faults)
        return
    remedy = f"python -m analysis report {RESULTS.name}/{RUNS_FOLDER}/{folder.name}"
    wanted = make_report(run, policy).files
    for name, content in wanted.items():
        path = folder / name
        if not path.exists():
            yield f"{folder.name}/{name} is missing: {remedy}"
        elif path.read_bytes() != content:
            yield f"{folder.name}/{name} is not what the records give: {remedy}{_other_tools(folder)}"
    plots = folder / PLOTS_FOLDER
    for path in sorted(plots.iterdir()) if plots.is_dir() else ():
        if f"{PLOTS_FOLDER}/{path.name}" not in wanted:
            yield f"{folder.name}/{PLOTS_FOLDER}/{path.name} is not made from the records: remove it"


def _other_tools(folder: Path) -> str:
    """Say that other versions made the report, where that may be all."""
    summary = folder / SUMMARY_FILE
    text = summary.read_text(encoding="utf-8") if summary.exists() else ""
    here = [f"{name} {version(name)}" for name in TOOLS]
    unlike = [each for each in here if each not in text.replace("\n", " ")]
    return f" (here is {', '.join(unlike)}, and it was made with another)" if unlike else ""


def _check_decision(path: Path, results: Results, policy: Policy) -> Iterator[str]:
    """Yield what is wrong with a decision record. One by an older policy stands, as long as its records are there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        day = date.fromisoformat(content["date"])
        folders = [results.folder / RUNS_FOLDER / entry["run"] for entry in content["runs"]]
        digests = [entry["records_digest"] for entry in content["runs"]]
        digest, candidate = content["policy_digest"], content["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"not a decision record: {type(error).__name__}: {error}"
        return
    for folder, wanted in zip(folders, digests, strict=True):
        if not folder.is_dir():
            yield f"run {folder.name} is not here any more"
            return
        if _records_digest(folder) != wanted:
            yield f"the records of {folder.name} are not those that it was made from"
            return
    if digest == policy.digest:
        runs = [load_run(folder) for folder in folders]
        again = decision_record(runs, decide(runs, policy, candidate), day)
        if _record_text(again) != path.read_text(encoding="utf-8"):
            yield "is not what its runs give by this policy"
