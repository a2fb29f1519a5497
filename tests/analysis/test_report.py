"""The report: its first screen, its figures, its size, and GitHub's limits."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.github import COMMENT_LETTERS, MARK, comment_body, cut, write_job_summary
from analysis.load import load_run
from analysis.policy import load_policy
from analysis.report import DECISION_FILE, SUMMARY_FILE, Report, make_report
from analysis.tables import COLUMNS
from tests.analysis.golden import ADOPT, Plan, make, many_cases
from tests.analysis.variants import written

POLICY = load_policy()
SECTIONS = ("Decision", "Plots", "Doubts", "Hardware and software", "What was run", "What was not measured")


def report_of(folder: Path) -> Report:
    return make_report(load_run(folder), POLICY)


@pytest.fixture(scope="module")
def adopt(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(written("adopt", tmp_path_factory.mktemp("adopt")))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(make(many_cases(10)).write(tmp_path_factory.mktemp("many")))


def first_table(summary: str) -> list[str]:
    lines = summary.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|"))
    end = next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))
    return lines[start:end]


def test_sections_come_in_their_order(adopt: Report) -> None:
    places = [adopt.summary.index(f"\n## {name}\n") for name in SECTIONS]
    assert places == sorted(places)
    assert adopt.summary.index(first_table(adopt.summary)[0]) < places[0]


def test_files_and_their_sizes(adopt: Report, many: Report) -> None:
    for report in (adopt, many):
        plots = {name: len(content) for name, content in report.files.items() if name.startswith("plots/")}
        assert max(plots.values()) <= 100_000, plots
        assert sum(plots.values()) <= 1_000_000
        assert {SUMMARY_FILE, DECISION_FILE} < set(report.files)
    assert "plots/crossover.png" in many.files
    assert "plots/crossover.png" not in adopt.files
    assert "Not drawn: needs ratios at two slice sizes" in adopt.summary


def test_the_first_table_has_at_most_fifteen_rows_and_fits_a_terminal(adopt: Report, many: Report) -> None:
    for report in (adopt, many):
        table = first_table(report.summary)
        assert len(table) - 2 <= 15
        assert max(map(len, table)) <= COLUMNS
    assert "worst of 10 cases" in many.summary
    assert "## All cases" in many.summary
    # The rule puts the largest ratios first: case 10, of the sweep, is the worst.
    assert any(line.startswith("|10|coalesced|") for line in first_table(many.summary))


def test_every_picture_is_there_and_has_its_numbers(adopt: Report) -> None:
    pictures = re.findall(r"!\[[^\]]*\]\((plots/[a-z]+\.png)\)", adopt.summary)
    assert set(pictures) == {name for name in adopt.files if name.startswith("plots/")}
    for section in adopt.summary.split("\n### ")[1:]:
        assert "Not drawn" in section or "|#" in section or "|path" in section


def test_the_same_records_give_the_same_bytes(tmp_path: Path, adopt: Report) -> None:
    assert report_of(written("adopt", tmp_path)).files == adopt.files


def test_no_path_of_this_machine(adopt: Report, many: Report) -> None:
    for report in (adopt, many):
        for content in report.files.values():
            assert str(Path.cwd()).encode() not in content
            assert b"/tmp/" not in content
            assert b"/home/" not in content


def test_a_device_that_was_no_gpu_is_named(tmp_path: Path) -> None:
    summary = report_of(written("cpu-only", tmp_path)).summary
    assert "NO GPU: measured on CPU" in summary.split("## Decision")[0]
    assert summary.split("\n")[2].startswith("**not enough data: no GPU was measured")


def test_failed_and_missing_figures_are_shown_with_their_reason(tmp_path: Path) -> None:
    summary = report_of(written("not-enough-failed-case", tmp_path)).summary
    row = next(line for line in first_table(summary) if "coalesced" in line)
    assert re.search(r"\(\w\)", row)
    assert "failed: OutOfMemoryError: CUDA out of memory" in summary.split("## Decision")[0]
    assert "failed: timing pass of coalesced, ranks 0, 1, rounds 0, 1, 2, 3, 4" in " ".join(
        summary.split("## What was not measured")[1].split()
    )


def test_a_table_cell_cannot_break_the_table(tmp_path: Path) -> None:
    made = make(replace(ADOPT, paths=("slice", "coalesced", "a|b")))
    for line in made.lines:
        line["implementation"] = line["implementation"].replace("a|b", "slice")
    summary = report_of(made.write(tmp_path)).summary
    assert "a\\|b" in first_table(summary)[4]


def test_ten_thousand_records_in_twenty_seconds(tmp_path: Path) -> None:
    plan: Plan = replace(many_cases(10), rounds=170, saves=3)
    made = make(plan)
    assert len(made.lines) >= 10_000
    folder = made.write(tmp_path)
    start = time.process_time()
    report_of(folder)
    # Time of this process: other processes of the machine do not count.
    assert time.process_time() - start < 20


def test_a_comment_fits_githubs_limit(many: Report) -> None:
    body = comment_body([(f"run-{n}", many.summary) for n in range(3)])
    assert len(body) <= COMMENT_LETTERS
    assert body.startswith(MARK)
    assert body.count("Cut here: the whole is results/runs/run-") == 3
    assert body.count("<details>") == body.count("</details>")
    assert "![" not in body


def test_cut_keeps_whole_lines() -> None:
    text = "\n".join(["<details>", "```sh", *(f"line {n}" for n in range(200)), "```", "</details>"])
    short = cut(text, 400, "there")
    assert len(short) <= 400
    assert short.count("```") == 2
    assert short.rstrip().endswith("Cut here: the whole is there.")
    assert cut("short", 400, "there") == "short"


def test_the_job_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopt: Report) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert write_job_summary([("run", adopt.summary)]) is None
    file = tmp_path / "summary"
    file.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    assert write_job_summary([("run", adopt.summary)]) == file
    assert file.read_text(encoding="utf-8").startswith("before\n# 2026")
