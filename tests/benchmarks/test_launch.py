"""Launch files are tried as far as they can be without the service; the gate fails closed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.launch import gate
from benchmarks.scrub import ROOT

LAUNCH = ROOT / "benchmarks" / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_slurm_script_runs_against_a_fake_cluster(tmp_path: Path) -> None:
    for name, body in {
        "scontrol": "echo node1; echo node2",
        "srun": 'echo "$MASTER_ADDR $MASTER_PORT $*"',
    }.items():
        fake = tmp_path / name
        fake.write_text(f"#!/bin/sh\n{body}\n")
        fake.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "41",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "PYTHON": "python3",
    }
    script = [shutil.which("bash") or "bash", str(LAUNCH / "slurm.sh"), "--preset", "sweep"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("node1 20041 --kill-on-bad-exit=1 python3 -m benchmarks run --scratch ")
    assert done.stdout.rstrip().endswith("--preset sweep")
    assert not (tmp_path / ".bench-scratch-41").exists()


@pytest.mark.parametrize(
    ("event", "head", "expected"),
    [
        ("push", "", True),
        ("pull_request", "o/r", True),
        ("pull_request", "fork/r", False),
        ("pull_request", "", False),
        ("x", "", False),
    ],
)
def test_forks_are_never_trusted(event: str, head: str, expected: bool) -> None:
    assert gate.trusted(event, "o/r", head) is expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["packckpt/plan.py"], True),
        (["benchmarks/presets/sweep.toml"], True),
        (["README.md", "docs/x.txt"], False),
        (["benchmarks/README.md"], False),
        ([], False),
        (None, True),
    ],
)
def test_changed_paths_decide(changed: list[str] | None, expected: bool) -> None:
    assert gate.needed("push", changed) is expected


@pytest.mark.parametrize(
    ("decided", "wanted", "trusted", "measured", "passes", "why"),
    [
        ("success", "false", "true", "skipped", True, "nothing that is measured"),
        ("success", "true", "true", "success", True, "measured"),
        ("success", "true", "true", "failure", False, "failed"),
        ("success", "true", "true", "cancelled", False, "not enough data"),
        ("success", "true", "true", "skipped", False, "not enough data"),
        ("success", "true", "true", "", False, "not enough data"),
        ("success", "true", "false", "skipped", False, "not enough data"),
        ("success", "", "", "", False, "not enough data"),
        ("failure", "", "", "skipped", False, "not enough data"),
        ("", "", "", "", False, "not enough data"),
    ],
)
def test_the_gate_is_never_green_by_silence(
    decided: str, wanted: str, trusted: str, measured: str, passes: bool, why: str
) -> None:
    found = gate.verdict({"DECIDED": decided, "NEEDED": wanted, "TRUSTED": trusted, "MEASURED": measured})
    assert found[0] is passes
    assert why in found[1]


def test_without_a_gpu_the_check_says_not_enough_data() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        [str(LAUNCH / "gpu_check.sh")], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 3
    assert "not enough data" in done.stderr
