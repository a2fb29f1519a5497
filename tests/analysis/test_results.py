"""The folder of results: index, decision records, and the check that all of it is what the records give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.charts import Chart
from analysis.policy import load_policy
from analysis.results import Results, check, index_text
from tests.analysis.variants import written

POLICY = load_policy()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two reported runs, a decision record and an index."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.report.png", picture)
        folders = [written(name, folder / "runs") for name in ("adopt", "cpu-only")]
        root = ["--results", str(folder)]
        assert main([*root, "report", *map(str, folders)]) == 0
        assert main([*root, "decide", str(folders[0]), "--record", "--date", "2026-03-04"]) == 0
        assert main([*root, "index"]) == 0
    return folder


def picture(chart: Chart) -> bytes:
    """Stand in for the drawing, which takes a second a run and has tests of its own."""
    return "\n".join(table.markdown() for table in chart.tables).encode()


@pytest.fixture
def results(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the template, to be spoilt."""
    monkeypatch.setattr("analysis.report.png", picture)
    shutil.copytree(template, tmp_path / "results")
    return tmp_path / "results"


def wrong(results: Path) -> list[str]:
    return list(check(Results(results), POLICY))


def test_what_was_just_made_is_right(results: Path) -> None:
    assert wrong(results) == []
    assert main(["--results", str(results), "check"]) == 0


def test_the_index_has_one_line_a_run_with_its_decision(results: Path) -> None:
    lines = [line for line in (results / "README.md").read_text(encoding="utf-8").splitlines() if "/summary.md" in line]
    assert len(lines) == 2
    assert any("**adopt: " in line and "NVIDIA H200" in line for line in lines)
    assert any("**not enough data: no GPU was measured" in line for line in lines)


def test_the_index_is_newest_first(results: Path) -> None:
    later = written("not-enough-few-rounds", results / "elsewhere")
    target = results / "runs" / later.name.replace("20260302", "20260401")
    later.rename(target)
    text = (target / "run.json").read_text(encoding="utf-8").replace("2026-03-02", "2026-04-01")
    (target / "run.json").write_text(text.replace("20260302", "20260401"), encoding="utf-8")
    assert Results(results).runs()[0] == target
    assert "README.md is not what the runs give" in " ".join(wrong(results))


def test_a_run_without_a_report_is_named(results: Path) -> None:
    (results / "runs" / "20260302-intel-xeon-2cpu-cpux1-0123abc" / "summary.md").unlink()
    assert any("summary.md is missing: python -m analysis report" in words for words in wrong(results))
    assert main(["--results", str(results), "check"]) == 1


@pytest.mark.parametrize("name", ["summary.md", "decision.json", "plots/fence.png"])
def test_a_changed_file_is_named(results: Path, name: str) -> None:
    path = results / "runs" / "20260302-intel-xeon-64cpu-gpux2-0123abc" / name
    path.write_bytes(path.read_bytes() + b" ")
    assert any(f"{name} is not what the records give" in words for words in wrong(results))


def test_a_plot_that_nothing_made_is_named(results: Path) -> None:
    (results / "runs" / "20260302-intel-xeon-64cpu-gpux2-0123abc" / "plots" / "better.png").write_bytes(b"")
    assert any("better.png is not made from the records" in words for words in wrong(results))


def test_changed_records_spoil_report_and_decision(results: Path) -> None:
    path = results / "runs" / "20260302-intel-xeon-64cpu-gpux2-0123abc" / "records.jsonl"
    path.write_text("\n".join(path.read_text(encoding="utf-8").splitlines()[:-1]) + "\n", encoding="utf-8")
    found = wrong(results)
    assert any("summary.md is not what the records give" in words for words in found)
    assert any("are not those that it was made from" in words for words in found)


def test_a_decision_record_holds_what_it_rests_on(results: Path) -> None:
    (path,) = (results / "decisions").glob("*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "2026-03-04-coalesced-1.json"
    assert (content["date"], content["outcome"], content["policy_digest"]) == ("2026-03-04", "adopt", POLICY.digest)
    assert content["runs"][0]["run"] == "20260302-intel-xeon-64cpu-gpux2-0123abc"
    path.write_text(path.read_text(encoding="utf-8").replace('"adopt"', '"hold"'), encoding="utf-8")
    assert any("is not what its runs give by this policy" in words for words in wrong(results))


def test_a_decision_by_an_older_policy_stands(results: Path) -> None:
    (path,) = (results / "decisions").glob("*.json")
    path.write_text(path.read_text(encoding="utf-8").replace(POLICY.digest, "0" * 12), encoding="utf-8")
    assert not any("decisions/" in words for words in wrong(results))


def test_a_second_decision_of_a_day_does_not_replace_the_first(results: Path) -> None:
    folder = str(results / "runs" / "20260302-intel-xeon-64cpu-gpux2-0123abc")
    assert main(["--results", str(results), "decide", folder, "--record", "--date", "2026-03-04"]) == 0
    assert len(list((results / "decisions").glob("*.json"))) == 2


def test_a_faulty_run_stands_in_the_index_and_fails_the_check(results: Path) -> None:
    run = results / "runs" / "20260302-intel-xeon-64cpu-gpux2-0123abc"
    (run / "records.jsonl").write_text("{}\n", encoding="utf-8")
    assert "records.jsonl line 1" in index_text(Results(results), POLICY) or "no GPU" in index_text(
        Results(results), POLICY
    )
    assert any("records.jsonl line 1" in words for words in wrong(results))


def test_no_results_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No run yet." in index_text(Results(tmp_path), POLICY)
    assert main(["--results", str(tmp_path), "report"]) == 1
    assert "python -m benchmarks run" in capsys.readouterr().err
