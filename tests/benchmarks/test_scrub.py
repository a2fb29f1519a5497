"""No path of the machine gets into a record by way of the command line."""

from __future__ import annotations

from benchmarks.scrub import ROOT, scrub_command


def test_paths_of_a_command_are_taken_out_and_the_rest_stays() -> None:
    given = ["run", "--out", f"{ROOT}/results/runs", "--scratch", "/mnt/fast disk/x", "--out=/a/b", "--path", "a=slice"]
    wanted = ["run", "--out", "<repo>/results/runs", "--scratch", "<path>", "--out=<path>", "--path", "a=slice"]
    assert scrub_command([*given, "--case", "sweep/4096B/ep1", "mine/out"]) == [
        *wanted,
        "--case",
        "sweep/4096B/ep1",
        "mine/out",
    ]
