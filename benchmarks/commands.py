"""What each command of `python -m benchmarks` does."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, table
from benchmarks.check import doubts_of, render_doubts
from benchmarks.choose import chosen_cases, chosen_settings, memory_budget_bytes
from benchmarks.driver import Driver, run_name
from benchmarks.fit import OF_THE_TIME_BUDGET
from benchmarks.launcher import Launcher
from benchmarks.missing import Missing
from benchmarks.plot import plot_fence
from benchmarks.presets import load_preset, preset_names
from benchmarks.ranks import opened_launcher
from benchmarks.record import Record
from benchmarks.runfolder import RunError, RunFolder
from benchmarks.schedule import cases_of, tasks_of
from benchmarks.settings import Settings, SettingsError

FINE, INCOMPLETE, USAGE, INTERRUPTED = 0, 1, 2, 130


def list_command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Print presets, and the cases of each."""
    from benchmarks.listing import render_list

    names = [parsed.preset] if parsed.preset else preset_names()
    print(render_list([load_preset(name) for name in names]), end="")
    return FINE


def plan_command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Print what a run would cost."""
    from benchmarks.planning import render_plan

    print(render_plan(chosen_cases(parsed), parsed, memory_budget_bytes(parsed.memory_budget)), end="")
    return FINE


def floors_command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Print how near a save comes to what the machine can do."""
    from benchmarks.floors import measure, report

    print(report(*measure(parsed.case, parsed.rounds, _scratch(parsed))))
    return FINE


def check_command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Print whether this machine is fit to measure."""
    scratch = _scratch(parsed)
    doubts = doubts_of(environment.capture(scratch))
    print(render_doubts(doubts), end="")
    return INCOMPLETE if any(doubt["ok"] is False for doubt in doubts) else FINE


def run_command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Measure, or go on with a run."""
    if parsed.resume is not None:
        parsed.run = parsed.resume
        return resume_command(parsed, given)
    with opened_launcher() as (launcher, world_size):
        if launcher is None:
            return FINE  # another rank speaks
        settings = chosen_settings(parsed, world_size)
        tasks, scratch = tasks_of(settings), _scratch(parsed)
        start = environment.capture(scratch)
        doubts = doubts_of(start)
        try:
            folder = RunFolder.create(
                parsed.out,
                run_name(settings),
                command=["python", "-m", "benchmarks", *given],
                settings=settings,
                cases=[case.to_json() for case in cases_of(settings)],
                tasks=tasks,
                environment=start,
                doubts=doubts,
            )
        except OSError as error:
            raise SettingsError(
                f"--out is {str(parsed.out)!r}, and no run can be put there: {error.strerror}"
            ) from None
        _say_start(settings, folder, doubts)
        return _carry_out(folder, settings, launcher, scratch, set())


def resume_command(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Go on with an interrupted run."""
    from benchmarks.resume import expect_same

    with opened_launcher() as (launcher, _):
        if launcher is None:
            return FINE
        try:
            folder = RunFolder.open(parsed.run)
            settings = Settings.from_json(folder.content["settings"])
            tasks, scratch = tasks_of(settings), _scratch(parsed)
            expect_same(folder.content, cases_of(settings), tasks, environment.capture(scratch))
        except (RunError, ValueError) as error:
            print(f"resume: {error}", file=sys.stderr)
            return USAGE
        done = folder.drop_unfinished(tasks)
        folder.start_session()
        print(f"{len(done)} of {len(tasks)} tasks are done already", file=sys.stderr)
        return _carry_out(folder, settings, launcher, scratch, done)


def _carry_out(folder: RunFolder, settings: Settings, launcher: Launcher, scratch: Path, done: set[int]) -> int:
    status = Driver(folder, settings, launcher, tasks_of(settings), scratch).run(done)
    folder.end_session(status, environment.capture(scratch))
    records = folder.records()
    text = table.render(records)
    (folder.path / "table.txt").write_text(text, encoding="utf-8")
    print(text, end="")
    plotted = plot_fence(records, folder.path)
    print(f"no plot: {plotted.reason}" if isinstance(plotted, Missing) else f"plot: {plotted.name}", file=sys.stderr)
    print(f"run: {folder.path}", file=sys.stderr)
    if status == "interrupted":
        return INTERRUPTED
    timed = {r.identity.path for r in records if r.status == "ok" and r.identity.pass_ == "timing"}
    if untimed := {arm.name for arm in settings.arms} - timed:
        print(f"not measured at all: {', '.join(sorted(untimed))}", file=sys.stderr)
        return INCOMPLETE
    return INCOMPLETE if any(_is_missing(record) for record in records) else FINE


def _is_missing(record: Record) -> bool:
    """Whether something should have been measured and was not; what a time budget leaves out is as was asked."""
    return record.status != "ok" and OF_THE_TIME_BUDGET not in record.reasons.get("status", "")


def _say_start(settings: Settings, folder: RunFolder, doubts: Sequence[dict[str, Any]]) -> None:
    where = "a GPU" if settings.device == "cuda" else f"the {settings.device.upper()}"
    print(f"measuring on {where}; records go to {folder.path}", file=sys.stderr)
    for doubt in doubts:
        if doubt["ok"] is False:
            print(f"  doubt: {doubt['what']}: {doubt['found']} {doubt['unit']}: {doubt['remedy']}", file=sys.stderr)


def _scratch(parsed: argparse.Namespace) -> Path:
    """Return where checkpoints go; a folder that is not there is a mistyped one, maybe on another disk."""
    scratch = parsed.scratch or Path(tempfile.gettempdir())
    if not scratch.is_dir():
        raise SettingsError(
            f"--scratch is {str(scratch)!r}, and there is no such folder; make it, on the disk to measure"
        )
    try:
        with tempfile.TemporaryFile(dir=scratch):
            return Path(scratch)
    except OSError as error:
        raise SettingsError(f"--scratch is {str(scratch)!r}, and it cannot be written to: {error.strerror}") from None
