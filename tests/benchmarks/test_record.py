"""The contract with whoever reads the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import record as records
from benchmarks.cases import parse_case
from benchmarks.record import FIGURES, PASSES, Count, Failure, Identity, Pass, Record
from benchmarks.schema import SchemaError, validate

CASE = parse_case("sweep/4096B/ep1/l1/bfloat16")
SCHEMA = json.loads(records.SCHEMA_FILE.read_text(encoding="utf-8"))


def make(what: Pass = "timing", **changes: Any) -> Record:
    case = None if what == "ceiling" else CASE.to_json()
    figures = dict.fromkeys(FIGURES[what])
    missing = [*figures, "digest", "timeline", *(f"predicted.{name}" for name in records.PREDICTED)]
    missing += [f"transfers.{a}.{b}" for a in records.COUNTED for b in records.COUNTERS]
    values: dict[str, Any] = {
        "identity": Identity(None if case is None else CASE.id, "slice", what, 0, 1, 0, "together"),
        "implementation": "slice",
        "sequence": 0,
        "started_at": "2026-01-02T03:04:05.678+00:00",
        "elapsed_seconds": 1.5,
        "status": "ok",
        "case": case,
        "samples": [{"save": 0, "phase": "first", **figures}],
        "reasons": dict.fromkeys(missing, "not measured in this test"),
    }
    return Record(**{**values, **changes})


@pytest.mark.parametrize("what", PASSES)
def test_every_pass_fits_the_schema_and_comes_back(what: Pass) -> None:
    record = make(what)
    content = json.loads(json.dumps(record.to_json()))
    assert validate(content)
    assert Record.from_json(content).to_json() == content


@pytest.mark.parametrize("what", PASSES)
def test_code_and_schema_name_the_same_figures(what: Pass) -> None:
    described = SCHEMA["$defs"][f"{what}_sample"]["properties"]
    assert set(described) - {"save", "phase"} == set(FIGURES[what])
    with pytest.raises(SchemaError, match="samples"):
        validate({**make(what).to_json(), "samples": [{"save": 0, "phase": "first", "no_such_figure": 1}]})


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == records.SCHEMA_VERSION


@pytest.mark.parametrize("name", ["fence_seconds", "digest", "transfers.all.profiled", "predicted.disk_bytes"])
def test_a_null_without_a_reason_is_refused(name: str) -> None:
    reasons = make().reasons
    with pytest.raises(ValueError, match=f"null without a reason: {name}"):
        make(reasons={key: why for key, why in reasons.items() if key != name})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a failed record has an error"):
        make(status="failed")
    with pytest.raises(ValueError, match="skipped record says why"):
        make(status="skipped", reasons={})
    with pytest.raises(ValueError, match="rank is 1; expected 0 to 0"):
        Identity("x", "slice", "timing", 0, 1, 1, "together")
    with pytest.raises(ValueError, match="only the ceiling has no case"):
        Identity(None, "slice", "timing", 0, 1, 0, "together")
    with pytest.raises(ValueError, match=r"Count\.bytes is -1"):
        Count(1, -1)


def test_failed_and_skipped_fit_the_schema() -> None:
    assert validate(make(status="failed", error=Failure("E", "m", "t"), samples=[]).to_json())
    assert validate(make(status="skipped", samples=[], reasons={"status": "no time"}).to_json())
    with pytest.raises(SchemaError):
        validate({**make().to_json(), "error": {"type": "E", "message": "m", "traceback": "t"}})


def test_lines_are_appended_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    records.append_records(tmp_path, [make(), make("memory")])
    with open(tmp_path / records.RECORDS_FILE, "ab") as file:
        file.write(b'{"kind":"rec')
    assert [r.identity.pass_ for r in records.read_records(tmp_path)] == ["timing", "memory"]
    records.truncate_records(tmp_path, 1)
    records.append_records(tmp_path, [make("observe")])
    assert [r.identity.pass_ for r in records.read_records(tmp_path)] == ["timing", "observe"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / records.RECORDS_FILE).write_text('{"kind":"record","schema_version":99}\n')
    with pytest.raises(ValueError, match=r"records.jsonl line 1: no record: ValueError: schema_version is 99"):
        records.read_records(tmp_path)


def test_jobs_name_every_record_that_a_run_owes() -> None:
    job = {
        "case_id": "c",
        "path": "slice",
        "implementation": "slice",
        "pass": "timing",
        "round": 1,
        "world_size": 2,
        "ranks": [0, 1],
        "concurrency": "together",
    }
    assert records.expected_identities({"jobs": [job]}) == [
        Identity("c", "slice", "timing", 1, 2, rank, "together") for rank in (0, 1)
    ]
