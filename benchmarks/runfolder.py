"""The folder of a run: made once, never overwritten, always readable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clock import now
from benchmarks.record import (
    RECORDS_FILE,
    RUN_FILE,
    SCHEMA_VERSION,
    Record,
    RunStatus,
    append_records,
    read_records,
    read_run,
    truncate_records,
    write_run,
)
from benchmarks.schema import validate
from benchmarks.scrub import scrub_command
from benchmarks.settings import Settings
from benchmarks.task import Task


class RunError(ValueError):
    """A run that cannot be made or gone on with."""


class RunFolder:
    """`run.json` and `records.jsonl` of one run."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    @classmethod
    def create(
        cls,
        parent: Path,
        name: str,
        *,
        command: Sequence[str],
        settings: Settings,
        cases: Sequence[dict[str, Any]],
        tasks: Sequence[Task],
        environment: dict[str, Any],
        doubts: Sequence[dict[str, Any]],
    ) -> RunFolder:
        """Make the folder; another number is put behind the name where there is one already."""
        path = _make_new(parent, name)
        folder = cls(
            path,
            {
                "kind": "run",
                "schema_version": SCHEMA_VERSION,
                "run_id": path.name,
                "status": "running",
                "command": scrub_command(command),
                "settings": settings.to_json(),
                "cases": list(cases),
                "jobs": [job for task in tasks for job in task.jobs()],
                "sessions": [{"started_at": now(), "ended_at": None, "status": "running"}],
                "environment": {"start": environment, "end": None},
                "doubts": list(doubts),
            },
        )
        folder._write()
        (path / RECORDS_FILE).touch()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier sitting.

        Raises:
            RunError: no run.
        """
        if not (path / RUN_FILE).is_file():
            raise RunError(f"{path}: no run; expected a folder with {RUN_FILE}")
        return cls(path, read_run(path))

    def records(self) -> list[Record]:
        """Return what was measured so far."""
        return read_records(self.path)

    def append(self, records: Sequence[Record]) -> None:
        """Add the records of one task in one write, validated."""
        for record in records:
            validate(record.to_json())
        append_records(self.path, records)

    def start_session(self) -> None:
        """Note another sitting."""
        for session in self.content["sessions"]:
            if session["status"] == "running":  # it was killed, and could not say so
                session["status"] = "interrupted"
        self.content["sessions"].append({"started_at": now(), "ended_at": None, "status": "running"})
        self.content["status"] = "running"
        self._write()

    def end_session(self, status: RunStatus, environment: dict[str, Any]) -> None:
        """Note how the sitting ended, and the machine as it is then."""
        self.content["sessions"][-1].update(ended_at=now(), status=status)
        self.content["status"] = status
        self.content["environment"]["end"] = environment
        self._write()

    def drop_unfinished(self, tasks: Sequence[Task]) -> set[int]:
        """Drop what a crash left of a task that did not get whole; return the numbers of the tasks that are done."""
        records = self.records()
        present = {record.identity for record in records}
        done = {task.sequence for task in tasks if present.issuperset(task.identities())}
        whole = 0
        while whole < len(records) and records[whole].sequence in done:
            whole += 1
        truncate_records(self.path, whole)
        return done

    def _write(self) -> None:
        validate(self.content)
        write_run(self.path, self.content)


def _make_new(parent: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise RunError(f"{parent / name}: 999 runs of that name are there; move some away")
