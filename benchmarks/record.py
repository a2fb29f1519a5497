"""What a run leaves behind: `run.json` and `records.jsonl`. Standard library only, so that the analysis can import it.

One line of `records.jsonl` is what one rank's process measured: one case, path, rank and pass. Every missing figure is
null, and `reasons` says why. `record.schema.json` beside this file says the same in JSON Schema; README.md in words.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

SCHEMA_VERSION = 1
RUN_FILE = "run.json"
RECORDS_FILE = "records.jsonl"
SCHEMA_FILE = Path(__file__).with_name("record.schema.json")

Pass = Literal["timing", "memory", "observe", "profile", "timeline", "ceiling", "reference"]
Status = Literal["ok", "failed", "skipped"]
RunStatus = Literal["running", "complete", "interrupted"]
Concurrency = Literal["together", "alone"]
PASSES: tuple[Pass, ...] = get_args(Pass)
STATUSES: tuple[Status, ...] = get_args(Status)
RUN_STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)

# What each sample of a pass holds beside `save` and `phase`: a number, or null with a reason.
FIGURES: Mapping[Pass, tuple[str, ...]] = {
    "timing": (
        "fence_seconds",
        "prepare_seconds",
        "finalize_seconds",
        "device_seconds",
        "prepare_minor_faults",
        "finalize_minor_faults",
        "energy_joules",
    ),
    "memory": (
        "host_resident_bytes",
        "host_peak_bytes",
        "host_peak_prepare_bytes",
        "host_peak_finalize_bytes",
        "host_peak_anonymous_bytes",
        "host_peak_shared_bytes",
        "host_peak_pinned_bytes",
        "device_resident_bytes",
        "device_peak_allocated_bytes",
        "device_peak_reserved_bytes",
        "device_peak_nvml_bytes",
    ),
    "observe": ("synchronize_calls", "item_calls"),
    "profile": ("memcpy_seconds", "synchronize_calls"),
    "timeline": (),
    "ceiling": (
        "pinned_bytes_per_second",
        "pageable_warm_bytes_per_second",
        "pageable_fresh_bytes_per_second",
        "small_copy_seconds",
        "digest_bytes_per_second",
        "disk_write_bytes_per_second",
    ),
    "reference": ("fence_seconds", "prepare_seconds", "device_seconds", "prepare_minor_faults"),
}
# Who counted, and what was counted.
COUNTERS = ("predicted", "logged", "observed", "profiled")
COUNTED = ("optimizer", "all")
PREDICTED = (
    "host_peak_bytes",
    "host_peak_prepare_bytes",
    "host_peak_finalize_bytes",
    "device_peak_bytes",
    "disk_bytes",
)

Json = dict[str, Any]
Sample = dict[str, Any]
Reasons = dict[str, str]


@dataclass(frozen=True, slots=True)
class Count:
    """Number of transfers from device to host, and the bytes that arrived."""

    calls: int
    bytes: int

    def __post_init__(self) -> None:
        for name in ("calls", "bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"Count.{name} is {value!r}; expected a whole number, 0 or more")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker failed: the exception's type and message, and its traceback without machine paths."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Device:
    """Where the trainer's tensors were.

    Attributes:
        kind: "cpu", "cuda", or the name of another torch device.
        name: model of the GPU or CPU.
        index: as torch counts it in that process; None on the CPU.
        uuid_hash: hashed UUID of the GPU, or None.
        shared: several ranks were put on this one GPU (`--share-device`); such figures are no evidence for two GPUs.
    """

    kind: str
    name: str | None
    index: int | None
    uuid_hash: str | None
    shared: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a line of `records.jsonl` unique.

    Attributes:
        case_id: id of the case, or None for the ceiling, which belongs to the machine.
        path: the name under which it is compared; two names may stand for one implementation (A against A).
        pass_: what was measured; in JSON `pass`.
        round: which of the alternating fresh processes, from 0.
        world_size, rank: of the save.
        concurrency: "together": all ranks saved at once; "alone": this rank saved while the others stood still.
    """

    case_id: str | None
    path: str
    pass_: Pass
    round: int
    world_size: int
    rank: int
    concurrency: Concurrency

    def __post_init__(self) -> None:
        _expect_one_of("pass", self.pass_, PASSES)
        _expect_one_of("concurrency", self.concurrency, get_args(Concurrency))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}; expected 0 to {self.world_size - 1}")
        if self.round < 0:
            raise ValueError(f"round is {self.round}; expected 0 or more")
        if (self.case_id is None) != (self.pass_ == "ceiling"):
            raise ValueError(f"case_id is {self.case_id!r} in a {self.pass_} pass; only the ceiling has no case")

    def to_json(self) -> Json:
        """Return the identity under the names that the record uses."""
        content = asdict(self)
        content["pass"] = content.pop("pass_")
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Identity:
        """Return the identity of a record or of an expected one."""
        return cls(**{f.name: content[f.name.rstrip("_")] for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class Record:
    """One line of `records.jsonl`; see README.md for every field.

    Attributes:
        identity: what makes it unique; its fields are at the top level of the JSON.
        implementation: what ran under the name `path`: a path of `CheckpointSaver`, or a reference.
        sequence: position in the run's order of processes, to see drift.
        started_at: UTC, ISO 8601.
        elapsed_seconds: of the whole process, start-up included; None where it did not start.
        status: "failed" has an `error`, "skipped" a reason under `reasons["status"]`.
        case: the case in full (`cases.Case.to_json`), or None for the ceiling.
        device: where the tensors were, or None where the process never got so far.
        digest: of the checkpoint that the saves wrote; equal digests mean equal bytes.
        transfers: COUNTED -> COUNTERS -> Count or None; of one save of this rank.
        predicted: PREDICTED -> bytes or None; of this rank.
        samples: one for each save: `save`, `phase` ("first" or "steady") and the FIGURES of the pass.
        timeline: columns of equal length, and marks; None outside the timeline pass.
        reasons: dotted name of every figure that is null (once, not for each sample) -> why.
        command: what to type to measure this again.
    """

    identity: Identity
    implementation: str
    sequence: int
    started_at: str
    elapsed_seconds: float | None
    status: Status
    error: Failure | None = None
    case: Json | None = None
    device: Device | None = None
    digest: str | None = None
    transfers: Mapping[str, Mapping[str, Count | None]] = field(default_factory=dict)
    predicted: Mapping[str, int | None] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    timeline: Json | None = None
    reasons: Reasons = field(default_factory=dict)
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        _expect_one_of("status", self.status, STATUSES)
        if (self.status == "failed") != (self.error is not None):
            raise ValueError(f"status is {self.status!r} and error is {self.error!r}; a failed record has an error")
        if self.status == "skipped" and "status" not in self.reasons:
            raise ValueError("a skipped record says why under reasons['status']")
        unexplained = [name for name in self._missing() if name not in self.reasons]
        if unexplained:
            raise ValueError(f"null without a reason: {', '.join(unexplained)}")

    def to_json(self) -> Json:
        """Return the line as JSON values, every key present."""
        content = self.identity.to_json()
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "identity"}
        rest["error"] = None if self.error is None else asdict(self.error)
        rest["device"] = None if self.device is None else asdict(self.device)
        rest["transfers"] = {
            what: {who: None if (n := counts.get(who)) is None else asdict(n) for who in COUNTERS}
            for what in COUNTED
            for counts in [self.transfers.get(what, {})]
        }
        rest["predicted"] = {name: self.predicted.get(name) for name in PREDICTED}
        rest["samples"] = list(self.samples)
        rest["command"] = list(self.command)
        return {"kind": "record", "schema_version": SCHEMA_VERSION, **content, **rest}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Record:
        """Return the record of one line.

        Raises:
            ValueError, KeyError: not a record of this version.
        """
        _expect_version(content)
        rest = {f.name: content[f.name] for f in fields(cls) if f.name != "identity"}
        rest["error"] = None if content["error"] is None else Failure(**content["error"])
        rest["device"] = None if content["device"] is None else Device(**content["device"])
        rest["transfers"] = {
            what: {who: None if n is None else Count(**n) for who, n in counts.items()}
            for what, counts in content["transfers"].items()
        }
        return cls(identity=Identity.from_json(content), **rest)

    def _missing(self) -> Iterator[str]:
        """Yield the dotted names of what is null in a record that went well."""
        if self.status != "ok":
            return
        names = FIGURES[self.identity.pass_]
        for name in names:
            if any(sample[name] is None for sample in self.samples):
                yield name
        if self.identity.pass_ == "ceiling":
            return
        for what in COUNTED:
            for who in COUNTERS:
                if self.transfers.get(what, {}).get(who) is None:
                    yield f"transfers.{what}.{who}"
        for name in PREDICTED:
            if self.predicted.get(name) is None:
                yield f"predicted.{name}"
        if self.digest is None:
            yield "digest"
        if self.timeline is None and self.identity.pass_ == "timeline":
            yield "timeline"


def append_records(run: Path, records: Sequence[Record]) -> None:
    """Add the records of one task in one write, and wait until the disk has them."""
    lines = "".join(json.dumps(r.to_json(), allow_nan=False, separators=(",", ":")) + "\n" for r in records)
    with open(run / RECORDS_FILE, "ab") as file:
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(run: Path) -> list[Record]:
    """Read the records of a run; a last line that a crash cut short is left out.

    Raises:
        ValueError: a line that is no record; names it.
    """
    path = run / RECORDS_FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    # Whatever follows the last newline was never finished.
    return [_read_line(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def truncate_records(run: Path, count: int) -> None:
    """Keep the first `count` records: what a crash left unfinished is measured again."""
    path = run / RECORDS_FILE
    lines = path.read_bytes().split(b"\n")[:count]
    size = sum(len(line) + 1 for line in lines)
    if size != path.stat().st_size:
        os.truncate(path, size)


def read_run(run: Path) -> Json:
    """Read `run.json`.

    Raises:
        ValueError: not a run of this version.
    """
    content: Json = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
    _expect_version(content)
    return content


def write_run(run: Path, content: Mapping[str, Any]) -> None:
    """Replace `run.json` in one step: a reader sees the old one or the new one."""
    temporary = run / f".{RUN_FILE}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, run / RUN_FILE)


def expected_identities(run: Mapping[str, Any]) -> list[Identity]:
    """Return the identity of every record that the run set out to write: those of `run.json`'s jobs, by rank."""
    return [Identity.from_json({**job, "rank": rank}) for job in run["jobs"] for rank in job["ranks"]]


def _read_line(path: Path, number: int, line: bytes) -> Record:
    try:
        return Record.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} line {number}: no record: {type(error).__name__}: {error}") from None


def _expect_version(content: Mapping[str, Any]) -> None:
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {content.get('schema_version')!r}; this code reads {SCHEMA_VERSION}")


def _expect_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(allowed)}")
