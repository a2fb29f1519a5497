"""`python -m analysis report | decide | compare | index | check`.

Exit codes: 0 fine or adopt, 1 an error or a file that is not what it should be, 2 usage, 3 hold or a regression,
4 not enough data, 5 a correctness mismatch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from analysis.compare import compare, comparison_text
from analysis.decision import EXIT_CODES, Outcome, decide
from analysis.github import comment_body, write_job_summary
from analysis.load import Run, RunError, holds_run, load_run, load_sound_run
from analysis.policy import POLICY_FILE, Policy, PolicyError, load_policy
from analysis.report import make_report, terminal_screen
from analysis.results import (
    INDEX_FILE,
    RESULTS,
    Results,
    check,
    decision_record,
    index_text,
    write_decision_record,
    write_report,
)
from analysis.words import decision_json, decision_text
from benchmarks.record import RUN_FILE

FINE, WRONG, USAGE = 0, 1, 2
HOLD, NOT_ENOUGH = EXIT_CODES[Outcome.HOLD], EXIT_CODES[Outcome.NOT_ENOUGH]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        policy = load_policy(given.policy)
    except (OSError, PolicyError) as error:
        parser.error(str(error))
    commands = {"report": _report, "decide": _decide, "compare": _compare, "index": _index, "check": _check}
    try:
        return commands[given.command](given, policy)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="From records to a decision.")
    parser.add_argument(
        "--policy", type=Path, default=POLICY_FILE, metavar="FILE", help="default: analysis/policy.toml"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: results/")
    commands = parser.add_subparsers(dest="command", required=True, metavar="report | decide | compare | index | check")

    report = commands.add_parser("report", help="write summary.md, decision.json and plots/ into runs")
    report.add_argument("runs", nargs="*", type=_run_folder, metavar="RUN", help="folders; default: the newest run")
    report.add_argument("--github", action="store_true", help="also write the job's summary and a comment's body")
    report.add_argument(
        "--comment", type=Path, default=Path("report-comment.md"), metavar="FILE", help="of --github (%(default)s)"
    )

    decided = commands.add_parser("decide", help="adopt (0), hold (3), not enough data (4), mismatch (5)")
    decided.add_argument("runs", nargs="+", type=_run_folder, metavar="RUN")
    decided.add_argument("--path", metavar="PATH", help="what would be turned on; default: the policy's candidate")
    decided.add_argument("--json", action="store_true", help="for machines")
    decided.add_argument("--record", action="store_true", help="keep it under results/decisions/")
    decided.add_argument("--date", type=_day, metavar="YYYY-MM-DD", help="of --record; default: today, UTC")

    compared = commands.add_parser("compare", help="before and after, on the same machine")
    compared.add_argument("before", type=_run_folder, metavar="RUN_A")
    compared.add_argument("after", type=_run_folder, metavar="RUN_B")
    exclusive = compared.add_mutually_exclusive_group()
    exclusive.add_argument("--gate", action="store_true", help="3 on a regression, 4 where one cannot tell")
    exclusive.add_argument(
        "--side-by-side", action="store_true", help="show runs that cannot be compared, without ratios"
    )

    commands.add_parser("index", help="write results/README.md")
    commands.add_parser("check", help="fail when a derived file is not what the records give")
    return parser


def _report(given: argparse.Namespace, policy: Policy) -> int:
    folders = given.runs or Results(given.results).runs()[:1]
    if not folders:
        raise RunError(f"{given.results.name}/ has no run; measure one: python -m benchmarks run")
    summaries = []
    for folder in folders:
        run = load_sound_run(folder)
        report = make_report(run, policy)
        write_report(run, report)
        summaries.append((run.run_id, report.summary))
        print(terminal_screen(run, policy))
        print(report.decision.headline)
    if given.github:
        given.comment.write_text(comment_body(summaries), encoding="utf-8")
        if write_job_summary(summaries) is None:
            print("no job summary: not in a GitHub job", file=sys.stderr)
    return FINE


def _decide(given: argparse.Namespace, policy: Policy) -> int:
    runs: list[Run] = []
    try:
        runs += [load_run(folder) for folder in given.runs]
        if unknown := _unknown_path(given.path, runs, policy):
            print(f"error: {unknown}", file=sys.stderr)
            return USAGE
        decision = decide(runs, policy, given.path)
        code = decision.exit_code
        shown = json.dumps(decision_json(decision), indent=1) + "\n" if given.json else decision_text(decision)
        if given.record:
            day = given.date or datetime.now(UTC).date()
            path = write_decision_record(Results(given.results), decision_record(runs, decision, day))
            print(f"kept as {path.name}", file=sys.stderr)
    except Exception as error:  # whatever went wrong, it is no yes
        print(f"{Outcome.NOT_ENOUGH}: it could not be decided: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_ENOUGH
    print(shown, end="")
    return code


def _unknown_path(path: str | None, runs: Sequence[Run], policy: Policy) -> str | None:
    """Return what is wrong with the name of a path, or None: a mistyped one is no missing measurement."""
    measured = {r.identity.path for run in runs for r in run.records if r.identity.pass_ == "timing"} - {
        policy.paths.baseline
    }
    if path is None or not measured or path in measured:
        return None
    return f"--path is {path!r}; the runs measured {', '.join(sorted(measured))}"


def _compare(given: argparse.Namespace, policy: Policy) -> int:
    before, after = load_sound_run(given.before), load_sound_run(given.after)
    comparison = compare(before, after, policy)
    if comparison.differences and not given.side_by_side:
        print("error: these runs cannot be compared; they differ in", file=sys.stderr)
        for each in comparison.differences:
            print(f"  {each}", file=sys.stderr)
        print("--side-by-side shows them, without ratios", file=sys.stderr)
        return USAGE
    print(comparison_text(before, after, comparison, policy), end="")
    if not given.gate:
        return FINE
    if comparison.regressions:
        return HOLD
    return NOT_ENOUGH if comparison.unknown or not comparison.table.rows else FINE


def _index(given: argparse.Namespace, policy: Policy) -> int:
    results = Results(given.results)
    results.folder.mkdir(parents=True, exist_ok=True)
    (results.folder / INDEX_FILE).write_text(index_text(results, policy), encoding="utf-8")
    return FINE


def _check(given: argparse.Namespace, policy: Policy) -> int:
    wrong = list(check(Results(given.results), policy))
    for words in wrong:
        print(words, file=sys.stderr)
    return WRONG if wrong else FINE


def _run_folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; expected a run such as results/runs/<run>")
    if not holds_run(path):
        raise argparse.ArgumentTypeError(f"{text!r} holds no {RUN_FILE}; expected a run such as results/runs/<run>")
    return path


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date; expected YYYY-MM-DD") from None


if __name__ == "__main__":
    sys.exit(main())
