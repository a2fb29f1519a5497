"""Golden runs give pinned tables and decisions.

`python -m tests.analysis.test_golden` writes the pins anew; read the difference before it is committed.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest

from analysis.decision import Decision, Outcome, decide
from analysis.evidence import collect
from analysis.load import load_run
from analysis.policy import load_policy
from analysis.report import first_screen
from analysis.tables import COLUMNS, numbered
from analysis.words import decision_json, decision_text
from tests.analysis.golden import ADOPT, CPU, DATA, Plan, make
from tests.analysis.variants import VARIANTS, committed, written

EXPECTED = DATA / "expected"
POLICY = load_policy()


@cache
def judged(name: str) -> tuple[str, Decision]:
    """Return what is pinned of a golden run (exit code, first screen, decision), and the decision itself."""
    with tempfile.TemporaryDirectory() as parent:
        run = load_run(written(name, Path(parent)))
    decision = decide([run], POLICY)
    # The policy's digest changes with every word of its comments, and pins nothing here.
    text = decision_text(decision).replace(POLICY.digest, "<digest>")
    lines = [f"exit {decision.exit_code}", "", *first_screen(run, numbered(collect(run)), POLICY), text]
    return "\n".join(lines), decision


@pytest.mark.parametrize("name", VARIANTS)
def test_first_screen_and_decision(name: str) -> None:
    assert judged(name)[0] == (EXPECTED / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", VARIANTS)
def test_outcome_is_the_one_in_the_name(name: str) -> None:
    decision = judged(name)[1]
    if name == "adopt":
        assert (decision.outcome, decision.exit_code) == (Outcome.ADOPT, 0)
    elif name in ("hold-by-mismatch", "hold-by-transfers"):
        assert (decision.outcome, decision.exit_code, decision.mismatch) == (Outcome.HOLD, 5, True)
    elif name.startswith("hold"):
        assert (decision.outcome, decision.exit_code) == (Outcome.HOLD, 3)
    else:
        assert (decision.outcome, decision.exit_code) == (Outcome.NOT_ENOUGH, 4)
    assert decision_json(decision)["outcome"] == decision.outcome
    json.dumps(decision_json(decision), allow_nan=False)


def test_a_run_without_a_gpu_says_so_first() -> None:
    assert judged("cpu-only")[1].headline.startswith("not enough data: no GPU was measured")


@pytest.mark.parametrize("name", VARIANTS)
def test_tables_fit_a_terminal(name: str) -> None:
    tables = [line for line in judged(name)[0].splitlines() if line.startswith("|")]
    assert tables
    assert max(map(len, tables)) <= COLUMNS


def test_no_pin_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.md")} == set(VARIANTS)


@pytest.mark.parametrize(("name", "plan"), [("adopt", ADOPT), ("cpu", CPU)])
def test_committed_runs_are_what_their_generator_makes(name: str, plan: Plan) -> None:
    made, kept = make(plan), committed(name)
    assert made.info == kept.info
    assert made.lines == kept.lines


@pytest.mark.parametrize("name", VARIANTS)
def test_golden_runs_are_valid_records(name: str, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="only the benchmarks' environment has it")
    schema = json.loads((Path(__file__).parents[2] / "benchmarks" / "record.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    folder = written(name, tmp_path)
    validator.validate(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    # Each kind of record once: they come from one generator.
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in {(line["path"], line["pass"], line["concurrency"], line["rank"]): line for line in lines}.values():
        validator.validate(line)


def main() -> None:
    """Write every pin."""
    EXPECTED.mkdir(parents=True, exist_ok=True)
    for path in EXPECTED.glob("*.md"):
        path.unlink()
    for name in VARIANTS:
        (EXPECTED / f"{name}.md").write_text(judged(name)[0], encoding="utf-8")


if __name__ == "__main__":
    main()
