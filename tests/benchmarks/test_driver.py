"""Runs that are killed, interrupted, resumed and refused: what was measured is kept, no worker is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import Record, expected_identities, read_records, read_run
from benchmarks.schema import validate
from benchmarks.scrub import ROOT
from tests.benchmarks.orders import TINY

SMALL = ("--case", TINY, "--ranks", "1", "--repeats", "1", "--rounds", "1", "--no-reference", "--device", "cpu")
WAIT_SECONDS = 110


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=WAIT_SECONDS)
    return process.returncode, out, err


def only_run(parent: Path) -> Path:
    (folder,) = parent.iterdir()
    return folder


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def measured(parent: Path) -> int:
    folders = list(parent.iterdir()) if parent.exists() else []
    return len(read_records(folders[0])) if folders and (folders[0] / "records.jsonl").exists() else 0


def workers_of(driver: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == driver:
            found.append(int(status.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def expect_whole(folder: Path) -> dict[tuple[str, str], Record]:
    """The run holds each record that it owes, once, in order; all fit the schema, and no path is wrong."""
    content, records = read_run(folder), read_records(folder)
    assert validate(content)
    assert all(validate(record.to_json()) for record in records)
    assert [record.identity for record in records] == expected_identities(content)
    assert [record.sequence for record in records] == sorted(record.sequence for record in records)
    assert str(ROOT) not in (folder / "records.jsonl").read_text()
    return {(record.identity.path, record.identity.pass_): record for record in records}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """One run whose driver is killed, whose last line is torn, and which is then gone on with."""
    out = tmp_path_factory.mktemp("killed")
    driver = start("run", *SMALL, "--out", str(out))
    wait_until(lambda: measured(out) >= 2 and bool(workers_of(driver.pid)), "no second record came")
    children = workers_of(driver.pid)
    driver.kill()
    driver.communicate()
    wait_until(lambda: not any(map(alive, children)), "a worker outlived its driver")
    folder = only_run(out)
    with open(folder / "records.jsonl", "ab") as file:
        file.write(b'{"kind":"record","schema_ver')
    status = read_run(folder)["status"]
    code, table, messages = run("resume", str(folder))
    return {"folder": folder, "status": status, "code": code, "table": table, "messages": messages}


def test_a_killed_driver_can_be_resumed_and_the_records_are_those_of_a_whole_run(resumed: Mapping[str, Any]) -> None:
    assert resumed["status"] == "running", "it was killed and could not say so"
    assert resumed["code"] == 0, resumed["messages"]
    found = expect_whole(resumed["folder"])
    digests = {record.digest for (_, what), record in found.items() if what in ("timing", "memory", "observe")}
    assert len(digests) == 1
    assert None not in digests, "equal bytes on both paths"
    content = read_run(resumed["folder"])
    assert content["status"] == "complete"
    assert [session["status"] for session in content["sessions"]] == ["interrupted", "complete"]
    assert content["environment"]["end"] is not None


def test_the_table_tells_both_paths_and_why_there_is_no_device_memory(resumed: Mapping[str, Any]) -> None:
    rows = [line.split() for line in resumed["table"].splitlines()]
    assert ["slice", "1", "144"] in [row[:3] for row in rows]
    assert ["coalesced", "1", "18"] in [row[:3] for row in rows]
    assert "no device peak allocated bytes: no GPU: the tensors are in host memory" in resumed["table"]
    assert "checkpoints of all paths, 1 rank: equal" in resumed["table"]
    assert (resumed["folder"] / "fence.png").stat().st_size > 1000


def test_progress_is_plain_where_stderr_is_no_terminal(resumed: Mapping[str, Any]) -> None:
    assert "[1/" in resumed["messages"]
    assert "\r" not in resumed["messages"]
    assert "left)" in resumed["messages"]


def test_a_record_names_no_host_and_explains_each_null(resumed: Mapping[str, Any]) -> None:
    for record in read_records(resumed["folder"]):
        for sample in record.samples:
            for name, value in sample.items():
                assert value is not None or record.reasons[name]


def test_the_timeline_has_its_marks(resumed: Mapping[str, Any]) -> None:
    timeline = expect_whole(resumed["folder"])["slice", "timeline"].timeline
    assert timeline is not None
    assert len({len(column) for name, column in timeline.items() if name != "marks"}) == 1
    assert [mark["name"] for mark in timeline["marks"]] == ["prepare", "finalize"]
    assert timeline["marks"][0]["end_seconds"] == timeline["marks"][1]["start_seconds"]


def test_a_complete_run_is_not_resumed(resumed: Mapping[str, Any]) -> None:
    code, _, messages = run("resume", str(resumed["folder"]))
    assert code == 2
    assert "is complete; start a new run" in messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: run["environment"]["start"]["code_digests"].update(packckpt="0" * 64),
            "code of packckpt was 0000",
        ),
        (lambda run: run["environment"]["start"]["cpu"].update(model="abacus"), "cpu.model was 'abacus'"),
        (lambda run: run["cases"][0].update(preset_digest="0" * 64), "preset olmoe-1b-7b has other numbers now"),
        (
            lambda run: run["environment"]["start"]["software"]["packages"].update(torch="1.0"),
            "version of torch was 1.0",
        ),
        (lambda run: run["jobs"].pop(), "the list of jobs is another one"),
    ],
)
def test_resume_refuses_what_changed(
    resumed: Mapping[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    from benchmarks.cases import parse_case
    from benchmarks.resume import expect_same
    from benchmarks.runfolder import RunError
    from benchmarks.schedule import tasks_of
    from benchmarks.settings import Settings

    content = json.loads((resumed["folder"] / "run.json").read_text())
    now = json.loads(json.dumps(content["environment"]["start"]))
    content["status"] = "interrupted"
    tasks = tasks_of(Settings.from_json(content["settings"]))
    expect_same(content, [parse_case(TINY)], tasks, now)
    change(content)
    with pytest.raises(RunError, match=message):
        expect_same(content, [parse_case(TINY)], tasks, now)


def test_a_killed_worker_is_a_failed_record_and_the_rest_goes_on(tmp_path: Path) -> None:
    code, table, messages = run(
        "run", *SMALL, "--path", "slice", "--import", "tests.benchmarks.faults", "--out", str(tmp_path / "runs"),
        FAULT_PATH="slice", FAULT_PASS="timing",
    )  # fmt: skip
    assert code == 1, messages
    found = expect_whole(only_run(tmp_path / "runs"))
    failed = {key for key, record in found.items() if record.status == "failed"}
    assert failed == {("slice", "timing")}
    error = found["slice", "timing"].error
    assert error is not None
    assert (error.type, error.message) == ("WorkerKilled", "rank 0 was ended by signal 9 (SIGKILL)")
    assert found["slice", "memory"].status == "ok"
    assert "FAILED" in table


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_ends_its_children_and_keeps_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "runs"
    (tmp_path / "scratch").mkdir()
    driver = start("run", *SMALL, "--out", str(out), "--scratch", str(tmp_path / "scratch"))
    wait_until(lambda: measured(out) >= 1 and bool(workers_of(driver.pid)), "no record came")
    children = workers_of(driver.pid)
    driver.send_signal(number)
    _, messages = driver.communicate(timeout=WAIT_SECONDS)
    assert driver.returncode == 130, messages
    assert not any(map(alive, children))
    content = read_run(only_run(out))
    assert (content["status"], content["sessions"][-1]["status"]) == ("interrupted", "interrupted")
    assert read_records(only_run(out))
    assert not list((tmp_path / "scratch").iterdir()), "scratch folders are removed"
    assert "python -m benchmarks resume" in messages
