"""Read a run, strictly: whatever is no record is named with file and line, and nothing of it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.missing import Missing
from benchmarks.record import (
    FIGURES,
    PREDICTED,
    RECORDS_FILE,
    RUN_FILE,
    Identity,
    Record,
    expected_identities,
    read_run,
)

Json = Mapping[str, Any]

# Counts: a fraction of one is a mistake.
_WHOLE = ("_bytes", "_faults", "_calls")
_PHASES = ("first", "steady")


class RunError(ValueError):
    """No run, or one with faults; each is named."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a run left behind.

    Attributes:
        folder: where it lies; only its name is ever shown.
        info: `run.json`; empty where that could not be read.
        records: the good lines of `records.jsonl`.
        expected: every record that the run set out to write.
        faults: what is wrong with its files, each with file and line. A run with faults is never evidence.
        notes: what a reader should know and is no fault.
    """

    folder: Path
    info: Json
    records: tuple[Record, ...]
    expected: tuple[Identity, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """The folder's name, which is the run's."""
        return self.folder.name

    @property
    def status(self) -> str:
        """How the run ended, or that its file does not say."""
        return str(self.info.get("status", "unknown"))

    def setting(self, *keys: str) -> Any:
        """Return what `run.json` says at `keys`, or Missing."""
        value: Any = self.info
        for key in keys:
            if not isinstance(value, Mapping) or value.get(key) is None:
                return Missing(f"{RUN_FILE} has no {'.'.join(keys)}")
            value = value[key]
        return value

    def absent(self) -> list[Identity]:
        """Return the identity of each record that the run set out to write and did not."""
        written = {record.identity for record in self.records}
        return [identity for identity in self.expected if identity not in written]


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, or what is left of one."""
    return any((folder / name).exists() for name in (RUN_FILE, RECORDS_FILE))


def load_run(folder: Path) -> Run:
    """Read a run; its faults are part of the answer.

    Raises:
        RunError: there is no such folder, or it holds neither of a run's files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder; expected a run such as results/runs/<run>")
    if not holds_run(folder):
        raise RunError(f"{folder} holds neither {RUN_FILE} nor {RECORDS_FILE}; expected a run")
    faults: list[str] = []
    notes: list[str] = []
    info = _read_info(folder.resolve(), faults)
    expected = _read_expected(info, faults)
    records = tuple(_read_lines(folder, info, frozenset(expected), faults, notes))
    return Run(folder.resolve(), info, records, expected, tuple(faults), tuple(notes))


def load_sound_run(folder: Path) -> Run:
    """Read a run that has no faults.

    Raises:
        RunError: no run, or a bad record; names file and line of each.
    """
    run = load_run(folder)
    if run.faults:
        raise RunError(f"{run.run_id}: " + "; ".join(run.faults))
    return run


def _read_info(folder: Path, faults: list[str]) -> Json:
    try:
        info = read_run(folder)
        if info["kind"] != "run":
            raise ValueError(f"kind is {info['kind']!r}; expected 'run'")
        if info["run_id"] != folder.name:
            raise ValueError(f"run_id is {info['run_id']!r} in the folder {folder.name!r}; expected the folder's name")
        for name, kind in (("status", str), ("cases", list), ("jobs", list), ("doubts", list), ("environment", dict)):
            if not isinstance(info[name], kind):
                raise ValueError(f"{name} is no {kind.__name__}")
        for name, kind in (("gpus", list), ("git", dict), ("software", dict), ("cpu", dict), ("memory", dict)):
            if not isinstance(info["environment"]["start"][name], kind):
                raise ValueError(f"environment.start.{name} is no {kind.__name__}")
        _session_bounds(info)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        faults.append(f"{RUN_FILE}: {_words(error)}")
        return {}
    return info


def _read_expected(info: Json, faults: list[str]) -> tuple[Identity, ...]:
    try:
        return tuple(expected_identities(info)) if info else ()
    except (ValueError, KeyError, TypeError) as error:
        faults.append(f"{RUN_FILE}: jobs: {_words(error)}")
        return ()


def _read_lines(
    folder: Path, info: Json, expected: frozenset[Identity], faults: list[str], notes: list[str]
) -> Iterator[Record]:
    path = folder / RECORDS_FILE
    content = path.read_bytes() if path.exists() else b""
    *lines, rest = content.split(b"\n")
    if not lines:
        faults.append(f"{RECORDS_FILE}: holds no record")
    if rest:
        notes.append(f"{RECORDS_FILE}: the last line was cut short and is left out")
    seen: dict[Identity, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            _check_counts(content)
            record = Record.from_json(content)
            _check(record)
            _check_belongs(record, info, expected)
            if record.identity in seen:
                raise ValueError(f"the same case, path, pass, round and rank as line {seen[record.identity]}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            faults.append(f"{RECORDS_FILE} line {number}: {_words(error)}")
        else:
            seen[record.identity] = number
            yield record


def _check_counts(content: Any) -> None:
    """Name the count that is no number; the record itself knows only that it is a count."""
    for what, counters in content["transfers"].items():
        for who, count in counters.items():
            for part in ("calls", "bytes") if count is not None else ():
                _check_number(f"transfers.{what}.{who}.{part}", count[part], whole=True)


def _check(record: Record) -> None:
    """Refuse a figure that is no number, or cannot be one."""
    figures = FIGURES[record.identity.pass_]
    for place, sample in enumerate(record.samples):
        if sample["phase"] not in _PHASES:
            raise ValueError(f"samples[{place}].phase is {sample['phase']!r}; expected one of {', '.join(_PHASES)}")
        _check_number(f"samples[{place}].save", sample["save"], whole=True)
        for name in figures:
            _check_figure(f"samples[{place}].{name}", sample[name], whole=name.endswith(_WHOLE))
    if record.status == "ok" and not record.samples and record.identity.pass_ in ("timing", "memory", "reference"):
        raise ValueError("samples is empty in a record that went well")
    for name in PREDICTED:
        _check_figure(f"predicted.{name}", record.predicted.get(name), whole=True)
    _check_figure("elapsed_seconds", record.elapsed_seconds, whole=False)
    if record.timeline is not None:
        _check_timeline(record.timeline)
    if record.case is not None and record.case["id"] != record.identity.case_id:
        raise ValueError(f"case.id is {record.case['id']!r}; expected case_id, {record.identity.case_id!r}")
    if record.case is not None:
        _check_number("case.slice_bytes.median", record.case["slice_bytes"]["median"], whole=True)
        for name in ("family", "preset", "method"):
            if not isinstance(record.case[name], str):
                raise ValueError(f"case.{name} is {record.case[name]!r}; expected a name")
    elif record.identity.case_id is not None:
        raise ValueError("case is null outside the ceiling pass")


def _check_timeline(timeline: Json) -> None:
    columns = [name for name in timeline if name != "marks"]
    lengths = {len(timeline[name]) for name in columns}
    if len(lengths) != 1:
        raise ValueError("timeline has columns of different lengths")
    for name in columns:
        for place, value in enumerate(timeline[name]):
            # The clock starts at the save; samples from before it are negative.
            if name == "seconds":
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(f"timeline.seconds[{place}] is {value!r}; expected a finite number")
            else:
                _check_figure(f"timeline.{name}[{place}]", value, whole=True)
    for mark in timeline["marks"]:
        if not math.isfinite(mark["start_seconds"]) or not math.isfinite(mark["end_seconds"]):
            raise ValueError(f"timeline mark {mark['name']!r} is not finite")


def _check_belongs(record: Record, info: Json, expected: frozenset[Identity]) -> None:
    """Refuse a record of another run: one that this run did not set out to write, or from another time."""
    if not info:
        return
    if record.identity not in expected:
        raise ValueError("not among the jobs of run.json: a record of another run?")
    first, last = _session_bounds(info)
    started = datetime.fromisoformat(record.started_at)
    if started < first or (last is not None and started > last):
        raise ValueError(f"started at {record.started_at}, outside the run's sessions: a record of another run?")


def _session_bounds(info: Json) -> tuple[datetime, datetime | None]:
    sessions = info["sessions"]
    if not sessions:
        raise ValueError("sessions is empty")
    end = sessions[-1]["ended_at"]
    return datetime.fromisoformat(sessions[0]["started_at"]), None if end is None else datetime.fromisoformat(end)


def _check_figure(name: str, value: Any, whole: bool) -> None:
    if value is not None:
        _check_number(name, value, whole)


def _check_number(name: str, value: Any, whole: bool) -> None:
    right = isinstance(value, int) or (isinstance(value, float) and not whole)
    if not right or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected a {'whole' if whole else 'finite'} number, 0 or more")


def _words(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"has no {error}"
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}"
