"""Pairs: under torchrun, under Slurm, and by the driver's own launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launcher import LocalLauncher
from benchmarks.ranks import Place, find_place
from benchmarks.record import Record, expected_identities, read_records, read_run
from benchmarks.scrub import ROOT
from benchmarks.settings import SettingsError
from tests.benchmarks.orders import TINY, make_order

PAIR = (
    "run", "--case", TINY, "--ranks", "2", "--path", "coalesced", "--repeats", "1", "--rounds", "1", "--device", "cpu",
    "--no-reference",
)  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, Place(1, 2, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, Place(3, 4, 1)),
        ({"SLURM_NTASKS": "4"}, None),
    ],
)
def test_a_process_finds_its_place(environment: dict[str, str], place: Place | None) -> None:
    assert find_place(environment) == place


def test_half_a_place_is_refused() -> None:
    with pytest.raises(SettingsError, match="WORLD_SIZE and SLURM_NTASKS are not set"):
        find_place({"RANK": "0"})
    with pytest.raises(SettingsError, match="RANK is 2; expected 0 to 1"):
        find_place({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def kinds(records: list[Record]) -> dict[Any, Any]:
    """What each record says, without what is measured."""
    return {
        record.identity: (
            record.implementation,
            record.status,
            record.digest,
            record.transfers,
            [sorted(sample) for sample in record.samples],
            sorted(record.reasons),
        )
        for record in records
    }


@pytest.mark.slow
def test_torchrun_and_the_own_launcher_give_the_same_kinds_of_records(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = {}
    for name, start in (("own", [sys.executable]), ("torchrun", torchrun)):
        done = subprocess.run(
            [*start, "-m", "benchmarks", *PAIR, "--out", str(tmp_path / name)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=115,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("[1/") == 1, "one rank speaks"
        (folder,) = (tmp_path / name).iterdir()
        records = read_records(folder)
        assert [record.identity for record in records] == expected_identities(read_run(folder))
        assert {record.identity.rank for record in records if record.identity.case_id} == {0, 1}
        assert {record.identity.concurrency for record in records} == {"together", "alone"}
        found[name] = kinds(records)
    assert found["own"] == found["torchrun"]


def test_two_ranks_start_together_and_share_a_digest(tmp_path: Path) -> None:
    case_id = TINY.replace("ep8", "ep2")
    order = make_order(tmp_path, "slice", ("timing", "observe"), case_id=case_id, world_size=2, saves=2)
    results = LocalLauncher().run(order, 100)
    outcomes = [results[rank]["outcomes"] for rank in (0, 1)]
    assert [o["timing"]["status"] for o in outcomes] == ["ok", "ok"], outcomes
    assert len({o[what]["digest"] for o in outcomes for what in ("timing", "observe")}) == 1
    assert [o["observe"]["transfers"]["optimizer"]["observed"]["calls"] for o in outcomes] == [32 * 6 * 3] * 2


def test_a_rank_that_dies_fails_both_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_PATH", "gone")
    monkeypatch.setenv("FAULT_PASS", "timing")
    order = make_order(tmp_path, "slice", ("timing",), path="gone", imports=("tests.benchmarks.faults",))
    results = LocalLauncher().run(order, 60)
    assert results[0]["failure"]["type"] == "WorkerKilled"


def test_a_launch_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    results = LocalLauncher().run(make_order(tmp_path, "slice", ("timing",)), 0.3)
    assert results[0]["failure"]["type"] == "TimeLimit"
    assert "limit for one launch" in results[0]["failure"]["message"]
