"""Before and after: what may be compared, what became worse, and what cannot be told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.compare import compare, differences
from analysis.load import load_run
from analysis.policy import load_policy
from tests.analysis.golden import Made
from tests.analysis.variants import committed, scale_time

POLICY = load_policy()
AFTER = "20260309-intel-xeon-64cpu-gpux2-fedcba9"


def pair(tmp_path: Path, change: Callable[[Made], Any] = lambda _: None) -> tuple[Path, Path]:
    before, after = committed("adopt"), committed("adopt")
    after.info["run_id"] = AFTER
    change(after)
    return before.write(tmp_path), after.write(tmp_path)


def compared(tmp_path: Path, change: Callable[[Made], Any] = lambda _: None) -> Any:
    before, after = (load_run(folder) for folder in pair(tmp_path, change))
    return compare(before, after, POLICY)


def test_a_run_and_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pair(tmp_path)
    assert main(["compare", str(before), str(after), "--gate"]) == 0
    text = capsys.readouterr().out
    assert "Regressions (beyond 3% of fence time with its whole interval): none." in text
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 80


def test_a_slower_fence_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pair(tmp_path, lambda made: scale_time(made, "coalesced", 1.2))
    assert main(["compare", str(before), str(after)]) == 0
    assert main(["compare", str(before), str(after), "--gate"]) == 3
    found = compare(load_run(before), load_run(after), POLICY).regressions
    assert len(found) == 1
    assert "coalesced: fence_seconds is 1.2" in found[0]


def test_noise_is_no_regression(tmp_path: Path) -> None:
    assert compared(tmp_path, lambda made: scale_time(made, "coalesced", 1.02)).regressions == ()


def test_more_copies_and_more_memory_are_named(tmp_path: Path) -> None:
    def change(made: Made) -> None:
        for line in made.chosen(path="coalesced"):
            count = line["transfers"]["all"]["logged"]
            if count:
                line["transfers"]["all"]["logged"] = {**count, "calls": count["calls"] + 1}
        for line in made.chosen("memory", "slice"):
            for sample in line["samples"]:
                sample["host_peak_bytes"] += 80_000_000

    found = compared(tmp_path, change).regressions
    assert len(found) == 2
    assert "slice: host_peak_bytes rose" in found[0]
    assert "coalesced: copies rose from 1,608 to 1,610" in found[1]


def test_changed_bytes_are_a_remark(tmp_path: Path) -> None:
    def change(made: Made) -> None:
        for line in made.lines:
            line["digest"] = line["digest"] and "11" * 32

    assert any("bytes changed" in words for words in compared(tmp_path, change).remarks)


def test_what_is_missing_cannot_be_told(tmp_path: Path) -> None:
    def change(made: Made) -> None:
        made.lines[:] = [line for line in made.lines if line["path"] != "coalesced"]

    before, after = pair(tmp_path, change)
    assert main(["compare", str(before), str(after), "--gate"]) == 4
    unknown = compare(load_run(before), load_run(after), POLICY).unknown
    assert any("coalesced: fence_seconds: the second run: the run did not get to it" in words for words in unknown)


def _set(*keys: Any, value: Any) -> Callable[[Made], None]:
    def change(made: Made) -> None:
        holder: Any = made.info
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value

    return change


START = ("environment", "start")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_set(*START, "gpus", 0, "name", value="NVIDIA A100"), "environment.start.gpus[0].name"),
        (_set(*START, "gpus", 1, "uuid_hash", value="99" * 8), "environment.start.gpus[1].uuid_hash"),
        (_set(*START, "gpu_driver", value="570.1"), "environment.start.gpu_driver"),
        (_set(*START, "software", "packages", "torch", value="2.14.0"), "environment.start.software.packages.torch"),
        (_set(*START, "cpu", "model", value="AMD"), "environment.start.cpu.model"),
        (_set("settings", "ranks", value=[1]), "settings.ranks"),
        (_set("settings", "rounds", value=9), "settings.rounds"),
    ],
)
def test_other_machines_and_settings_are_refused(
    change: Callable[[Made], None], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = pair(tmp_path, change)
    assert main(["compare", str(before), str(after), "--gate"]) == 2
    assert field in capsys.readouterr().err
    assert main(["compare", str(before), str(after), "--side-by-side"]) == 0
    text = capsys.readouterr().out
    assert "no ratios" in text
    assert "fence ratio" not in text


def test_another_policy_is_refused(tmp_path: Path) -> None:
    before, after = pair(tmp_path)
    assert main(["report", str(before), str(after)]) == 0
    assert differences(load_run(before), load_run(after)) == []
    other = after / "decision.json"
    other.write_text(other.read_text(encoding="utf-8").replace(POLICY.digest, "0" * 12), encoding="utf-8")
    assert any(words.startswith("policy: ") for words in differences(load_run(before), load_run(after)))


def test_code_may_differ(tmp_path: Path) -> None:
    def change(made: Made) -> None:
        for when in ("start", "end"):
            made.info["environment"][when]["git"] = {"commit": "f" * 40, "dirty": False}
            made.info["environment"][when]["code_digests"] = {"packckpt": "1a" * 32, "benchmarks": "2b" * 32}

    assert compared(tmp_path, change).differences == ()


def test_a_bad_record_is_an_error_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = pair(tmp_path, lambda made: made.lines.append(copy.deepcopy(made.lines[-1])))
    assert main(["compare", str(before), str(after)]) == 1
    assert "records.jsonl line 44" in capsys.readouterr().err
