"""Case 17: what pytest-benchmark reports is what ran, and a run without measurements is not green."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.paths import SAVER_PATHS
from benchmarks.scrub import ROOT

SUITE = "benchmarks/test_host.py"
RAISES = "def test_raises(benchmark):\n    benchmark(lambda: 1 / 0)\n"


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def test_the_number_of_saves_is_the_rounds_and_warm_ups_reported(tmp_path: Path) -> None:
    done = suite(SUITE, "-k", "prepare or commit", f"--benchmark-json={tmp_path / 'out.json'}")
    assert done.returncode == 0, done.stdout
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["benchmarks"]) == 2 * len(SAVER_PATHS)
    for bench in content["benchmarks"]:
        rounds = bench["stats"]["rounds"]
        assert (rounds, bench["stats"]["iterations"]) == (5, 1)
        assert bench["extra_info"]["saves"] == rounds + 1, "one warm-up, and no hidden call"
        if "commit" in bench["name"]:
            assert bench["extra_info"]["digests"] == 1
    # 16 experts, 6 packed parameters, 3 states: the paths differ in nothing else.
    calls = {b["params"]["path"]: b["extra_info"] for b in content["benchmarks"] if "prepare" in b["name"]}
    assert (calls["slice"]["optimizer_calls"], calls["coalesced"]["optimizer_calls"]) == (16 * 6 * 3, 6 * 3)
    assert calls["slice"]["optimizer_bytes"] == calls["coalesced"]["optimizer_bytes"]
    assert "node" not in content["machine_info"]
    assert "author_name" not in content["commit_info"]


@pytest.mark.parametrize("switch", ["--benchmark-disable", "--benchmark-skip"])
def test_where_nothing_is_timed_the_exit_is_not_zero(switch: str) -> None:
    done = suite(SUITE, "-k", "digest", switch)
    assert done.returncode != 0
    assert "no measurements" in done.stdout


def test_a_body_that_raises_is_no_measurement(tmp_path: Path) -> None:
    body = tmp_path / "test_raises.py"
    body.write_text(RAISES)
    done = suite("-p", "benchmarks.conftest", str(body))
    assert done.returncode != 0
    assert "no measurements: 0 of 1 benchmarks were timed" in done.stdout


def test_distributed_over_processes_there_is_no_measurement() -> None:
    if importlib.util.find_spec("xdist") is None:
        pytest.skip("pytest-xdist is not installed here; pytest-benchmark turns itself off under it")
    done = suite(SUITE, "-k", "digest", "-n", "2")
    assert done.returncode != 0
    assert "no measurements" in done.stdout
