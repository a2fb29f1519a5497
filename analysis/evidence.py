"""What a run's records say about each case and path, before anything is judged.

A save of several ranks is as long as its slowest rank's, moves what all of them move, and needs the host memory of
all of them together; each has a device of its own, so device memory is the worst rank's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import Run
from analysis.missing import Missing
from analysis.rounds import by_round
from analysis.statistics import Array
from analysis.units import ranks_text
from benchmarks.record import COUNTED, COUNTERS, Count, Identity, Record

CAPTURE_ONLY = "reference"
CEILING = "ceiling"
_TIMED = ("timing", CAPTURE_ONLY)
# Which pass a counter's figure comes from; the other two stand in every record of a save.
_COUNTED_IN = {"observed": "observe", "profiled": "profile"}
_FENCE = "fence_seconds"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One thing that was found in more than one way, and the ways differ.

    Attributes:
        figure: its name in a record.
        found: who found what.
    """

    figure: str
    found: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.figure}: {'; '.join(self.found)}"


@dataclass(frozen=True, eq=False)
class PathEvidence:
    """What the records say about one path in one case.

    Attributes:
        path, implementation: the name it is compared under, and what ran.
        world_size: ranks of the save.
        records: of all ranks at once.
        alone: of single ranks that saved while the others stood still.
        absent: what the run set out to write and did not.
        memo: what was worked out already, since table, plots and decision ask for the same.
    """

    path: str
    implementation: str
    world_size: int
    records: tuple[Record, ...]
    alone: tuple[Record, ...]
    absent: tuple[Identity, ...]
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def capture_only(self) -> bool:
        """Whether it copies to the host and writes nothing, as torch's stager does."""
        return any(record.identity.pass_ == CAPTURE_ONLY for record in (*self.records,)) or any(
            identity.pass_ == CAPTURE_ONLY for identity in self.absent
        )

    @cached_property
    def good(self) -> tuple[Record, ...]:
        """The records that went well."""
        return tuple(record for record in self.records if record.status == "ok")

    @cached_property
    def saved(self) -> tuple[Record, ...]:
        """The good records of passes that saved: without a GPU the profile pass has nothing to watch, and does not."""
        return tuple(
            record
            for record in self.good
            if record.identity.pass_ != "profile" or (record.device is not None and record.device.kind == "cuda")
        )

    @cached_property
    def troubles(self) -> tuple[str, ...]:
        """What failed, was skipped or is absent, in words; empty where all is there."""
        bad = [record for record in (*self.records, *self.alone) if record.status != "ok"]
        return (*_failures(bad), *_absences(self.absent))

    @cached_property
    def why_nothing(self) -> Missing:
        """Why there is no figure at all, in few words."""
        for record in self.records:
            if record.status != "ok":
                return Missing(f"{record.status}: {_why(record)}")
        return Missing("the run did not get to it" if self.absent else "not measured")

    @cached_property
    def timing(self) -> pd.DataFrame:
        """One row a rank and save, of all ranks at once."""
        return _frame(record for record in self.good if record.identity.pass_ in _TIMED)

    @cached_property
    def timing_alone(self) -> pd.DataFrame:
        """The same, of single ranks."""
        return _frame(record for record in self.alone if record.status == "ok" and record.identity.pass_ in _TIMED)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """One row a rank and save of the memory pass."""
        return _frame(record for record in self.good if record.identity.pass_ == "memory")

    def figure(self, name: str) -> float | Missing:
        """Return one figure, or why there is none; names as in benchmarks/README.md.

        Seconds: the median of steady saves. Peaks: the worst save, of all ranks or of the worst one.
        Transfers: the bytes of all ranks. `digest`: 1 where there is one.
        """
        if name == "digest":
            return self.digest if isinstance(self.digest, Missing) else 1.0
        if name.startswith("transfers."):
            _, what, who = name.split(".")
            count = self.count(what, who)
            return count if isinstance(count, Missing) else float(count.bytes)
        if name.startswith("predicted."):
            return _total(self.predicted(name.removeprefix("predicted.")))
        if name.endswith("_seconds"):
            seconds, first = self.steady(name), self.first(name)
            if isinstance(seconds, Missing):
                return seconds
            return first if isinstance(first, Missing) else float(seconds.median())
        by_rank = self.peaks(name)
        return _worst(by_rank) if name.startswith("device_") else _total(by_rank)

    def steady(self, name: str = _FENCE) -> pd.Series[float] | Missing:
        """Return seconds of steady saves by (round, save); of the slowest rank."""
        return self._seconds(name, "steady")

    def first(self, name: str = _FENCE) -> pd.Series[float] | Missing:
        """Return seconds of the first save of each process by (round, save); of the slowest rank."""
        return self._seconds(name, "first")

    def by_rank(
        self, name: str = _FENCE, alone: bool = False, phases: Sequence[str] = ("steady",)
    ) -> Mapping[int, Array]:
        """Return seconds of the saves of each rank, in the order of the run."""
        frame = self.timing_alone if alone else self.timing
        if frame.empty or name not in frame:
            return {}
        chosen = frame[frame["phase"].isin(phases) & frame[name].notna()].sort_values(["round", "save"])
        return {int(str(rank)): rows[name].to_numpy(float) for rank, rows in chosen.groupby("rank")}

    def _seconds(self, name: str, phase: str) -> pd.Series[float] | Missing:
        if (name, phase) not in self.memo:
            self.memo[name, phase] = self._find_seconds(name, phase)
        found: pd.Series[float] | Missing = self.memo[name, phase]
        return found

    def _find_seconds(self, name: str, phase: str) -> pd.Series[float] | Missing:
        frame = self.timing
        if frame.empty:
            return self.why_nothing
        chosen = frame[frame["phase"] == phase]
        if chosen.empty:
            return Missing(f"no {phase} save was timed")
        if name not in chosen:
            return Missing("a capture measures no such figure")
        if chosen[name].isna().any():
            return Missing(_reason(self.good, name, _TIMED))
        # One table a phase: a column a rank, so that a missing rank is a hole.
        by_save = chosen.pivot(index=["round", "save"], columns="rank", values=name)
        lacking = int((by_save.notna().sum(axis=1) < self.world_size).sum())
        if lacking:
            ranks = sorted(set(range(self.world_size)) - set(chosen["rank"]))
            who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
            return Missing(f"{who} of {self.world_size} is missing in {lacking} of {len(by_save)} saves")
        return by_save.max(axis=1)

    def peaks(self, name: str) -> Mapping[int, int | Missing]:
        """Return a figure of the memory pass, the largest of all saves, by rank."""
        if name not in self.memo:
            self.memo[name] = self._find_peaks(name)
        found: Mapping[int, int | Missing] = self.memo[name]
        return found

    def _find_peaks(self, name: str) -> Mapping[int, int | Missing]:
        frame = self.memory
        found: dict[int, int | Missing] = {}
        for rank in range(self.world_size):
            rows = frame[frame["rank"] == rank] if not frame.empty else frame
            if rows.empty:
                absent = f"not measured: no memory pass of rank {rank}"
                found[rank] = Missing("a capture has no memory pass" if self.capture_only else absent)
            elif name not in rows or rows[name].isna().any():
                found[rank] = Missing(_reason(self.good, name, ("memory",)))
            else:
                found[rank] = int(rows[name].max())
        return found

    def predicted(self, name: str) -> Mapping[int, int | Missing]:
        """Return a predicted figure by rank."""
        found: dict[int, int | Missing] = {}
        for rank in range(self.world_size):
            records = [record for record in self.good if record.identity.rank == rank]
            values = {record.predicted.get(name) for record in records}
            if not records:
                found[rank] = Missing(f"no record of rank {rank}")
            elif None in values:
                found[rank] = Missing(_reason(records, f"predicted.{name}"))
            elif len(values) > 1:
                found[rank] = Missing(f"records of rank {rank} differ: {', '.join(map(str, sorted(values, key=str)))}")
            else:
                found[rank] = next(value for value in values if value is not None)
        return found

    def count(self, what: str, who: str, rank: int | None = None) -> Count | Missing:
        """Return the transfers of one save, of one rank or of all; `what` and `who` as in a record."""
        ranks = range(self.world_size) if rank is None else (rank,)
        counts = [self._count(what, who, each) for each in ranks]
        good = [count for count in counts if isinstance(count, Count)]
        for count in counts:
            if isinstance(count, Missing):
                return count
        return Count(sum(count.calls for count in good), sum(count.bytes for count in good))

    def _count(self, what: str, who: str, rank: int) -> Count | Missing:
        name = f"transfers.{what}.{who}"
        wanted = _COUNTED_IN.get(who)
        records = [
            record
            for record in (self.good if wanted else self.saved)
            if record.identity.rank == rank and wanted in (None, record.identity.pass_)
        ]
        found = [record.transfers.get(what, {}).get(who) for record in records]
        if not records:
            return Missing(f"not counted: no {wanted or 'record'} pass of rank {rank}")
        if None in found:
            return Missing(_reason(records, name))
        counts = list(dict.fromkeys(count for count in found if count is not None))
        if len(counts) > 1:
            return Missing(f"differs between records: {', '.join(map(_count_words, counts))}")
        return counts[0]

    @cached_property
    def transfer_disagreements(self) -> tuple[Disagreement, ...]:
        """Where plan, transfer module, observer and profiler do not agree, rank by rank."""
        found = []
        for what in COUNTED:
            for rank in range(self.world_size):
                seen: dict[Count, list[str]] = defaultdict(list)
                for record in self.good:
                    for who in COUNTERS:
                        count = record.transfers.get(what, {}).get(who)
                        if count is not None and record.identity.rank == rank:
                            seen[count].append(who)
                if len(seen) > 1:
                    words = tuple(
                        f"{'/'.join(dict.fromkeys(who))} {_count_words(count)}" for count, who in seen.items()
                    )
                    names = ".".join(("transfers", what))
                    found.append(Disagreement(f"{names} of {self.path}, rank {rank}", words))
        return tuple(found)

    @cached_property
    def digests(self) -> frozenset[str]:
        """Every digest that its saves left."""
        return frozenset(record.digest for record in self.good if record.digest is not None)

    @cached_property
    def digest(self) -> str | Missing:
        """The digest of its checkpoints."""
        if self.capture_only:
            return Missing("a capture writes no checkpoint")
        if not self.saved or any(record.digest is None for record in self.saved):
            return Missing(_reason(self.saved, "digest"))
        if len(self.digests) > 1:
            return Missing(f"{len(self.digests)} different digests")
        return next(iter(self.digests))

    def timeline(self, rank: int = 0) -> Mapping[str, Any] | Missing:
        """Return the memory timeline of one save of one rank."""
        for record in self.good:
            if record.identity.pass_ == "timeline" and record.identity.rank == rank:
                return record.timeline or Missing(_reason([record], "timeline"))
        return Missing("no timeline was recorded")


@dataclass(frozen=True, eq=False)
class CaseEvidence:
    """One case at one world size: every path of it.

    Attributes:
        run: where it was measured.
        case: the case in full, as a record has it.
        paths: by name, in the order of the run.
        memo: what was worked out already.
    """

    run: Run
    case_id: str
    world_size: int
    case: Mapping[str, Any]
    paths: Mapping[str, PathEvidence]
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """Of all paths and ranks, alone and together."""
        return tuple(record for path in self.paths.values() for record in (*path.records, *path.alone))

    @property
    def scope(self) -> str:
        """What a decision is made for: preset and method."""
        return f"{self.case['preset']} {self.case['method']}"

    @property
    def title(self) -> str:
        """Name for people: the case, and on how many ranks."""
        return f"{self.case_id}, {ranks_text(self.world_size)}"

    @cached_property
    def device_words(self) -> str:
        """On what it was measured."""
        found = {
            f"{device.name or device.kind}{' (shared)' if device.shared else ''}" if device.kind != "cpu" else "CPU"
            for record in self.records
            if (device := record.device) is not None
        }
        return ", ".join(sorted(found))

    @cached_property
    def on_gpu(self) -> bool:
        """Whether every record with a device had a GPU."""
        kinds = {record.device.kind for record in self.records if record.device is not None}
        return kinds == {"cuda"}

    def pairs(self, baseline: str, candidate: str) -> tuple[list[Array], list[Array], int] | Missing:
        """Return fence seconds of candidate and baseline, paired by round and save, and how many have no partner."""
        sides = []
        for name in (candidate, baseline):
            if name not in self.paths:
                return Missing(f"path {name} was not measured")
            steady = self.paths[name].steady()
            if isinstance(steady, Missing):
                return Missing(f"{name}: {steady}")
            sides.append(steady)
        both = pd.concat(sides, axis=1, join="inner", keys=["above", "below"]).sort_index()
        if both.empty:
            return Missing("no save of one path has a partner of the other in its round")
        return (
            list(by_round(both["above"]).values()),
            list(by_round(both["below"]).values()),
            sum(len(side) for side in sides) - 2 * len(both),
        )

    def ceiling(self) -> float | Missing:
        """Return the pinned bandwidth of this machine, bytes a second: the best that was seen."""
        records = _ceiling_records(self.run)
        if not records:
            return Missing("no ceiling was measured")
        values = [sample["pinned_bytes_per_second"] for record in records for sample in record.samples]
        if not values or None in values:
            return Missing(_reason(records, "pinned_bytes_per_second"))
        best = float(max(values))
        return best if best > 0 else Missing("pinned_bytes_per_second is 0")

    def ceiling_share(self, path: str) -> float | Missing:
        """Return which share of the pinned ceiling the median fence reaches; of the rank that reaches least."""
        return self._share(path, np.median, min, _FENCE, ("steady",))

    def best_ceiling_share(self, path: str, name: str = _FENCE) -> float | Missing:
        """Return the largest share that any save of any rank reaches: more than 1 cannot be."""
        return self._share(path, np.min, max, name, ("first", "steady"))

    def _share(self, path: str, of_saves: Any, of_ranks: Any, name: str, phases: Sequence[str]) -> float | Missing:
        ceiling = self.ceiling()
        if isinstance(ceiling, Missing):
            return ceiling
        evidence = self.paths[path]
        shares = []
        for rank, seconds in evidence.by_rank(name, phases=phases).items():
            count = evidence.count("all", "logged", rank)
            if isinstance(count, Missing):
                return count
            if (seconds <= 0).any():
                return Missing(f"{name} is 0")
            shares.append(count.bytes / float(of_saves(seconds)) / ceiling)
        return float(of_ranks(shares)) if shares else Missing("not timed")


@lru_cache(maxsize=4)
def _ceiling_records(run: Run) -> tuple[Record, ...]:
    return tuple(record for record in run.records if record.identity.pass_ == CEILING and record.status == "ok")


def digest_disagreement(paths: Iterable[PathEvidence]) -> Disagreement | None:
    """Return which paths left different bytes, if any did."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for digest in path.digests:
            found[digest].append(path.path)
    if len(found) <= 1:
        return None
    words = tuple(f"{', '.join(dict.fromkeys(who))} wrote {digest[:12]}" for digest, who in sorted(found.items()))
    return Disagreement("digest", words)


# Table, plots and decision ask for the same; what they worked out stays with it.
@lru_cache(maxsize=4)
def collect(run: Run) -> tuple[CaseEvidence, ...]:
    """Return the evidence of a run: by case and world size, in the order in which the run set out to measure them."""
    records: dict[tuple[str, int], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    absent: dict[tuple[str, int], dict[str, list[Identity]]] = defaultdict(lambda: defaultdict(list))
    planned = {(i.case_id, i.world_size, i.path): None for i in run.expected if i.case_id is not None}
    for record in run.records:
        identity = record.identity
        if identity.case_id is not None:
            records[identity.case_id, identity.world_size][identity.path].append(record)
            planned.setdefault((identity.case_id, identity.world_size, identity.path), None)
    for identity in run.absent():
        if identity.case_id is not None:
            absent[identity.case_id, identity.world_size][identity.path].append(identity)
    names = {job["path"]: job["implementation"] for job in run.info.get("jobs", ())}
    described = {case["id"]: case for case in run.info.get("cases", ()) if isinstance(case, dict) and "id" in case}
    found = []
    for case_id, world_size in dict.fromkeys((case_id, world_size) for case_id, world_size, _ in planned):
        assert case_id is not None
        key = (case_id, world_size)
        paths = {
            path: _path_evidence(path, names.get(path, path), world_size, records[key][path], absent[key][path])
            for id_, size, path in planned
            if (id_, size) == key
        }
        case = _case(case_id, [r for path in paths.values() for r in path.records], described)
        found.append(CaseEvidence(run, case_id, world_size, case, paths))
    return tuple(found)


def _path_evidence(
    path: str, implementation: str, world_size: int, records: Sequence[Record], absent: Sequence[Identity]
) -> PathEvidence:
    return PathEvidence(
        path,
        implementation,
        world_size,
        tuple(record for record in records if record.identity.concurrency == "together"),
        tuple(record for record in records if record.identity.concurrency == "alone"),
        tuple(absent),
    )


def _case(case_id: str, records: Sequence[Record], described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the case in full; with neither a record nor an entry in run.json it is known by its id alone."""
    for record in records:
        if record.case is not None:
            return record.case
    unknown = {"id": case_id, "family": "model", "preset": case_id.split("/")[0], "method": "unknown"}
    case: Mapping[str, Any] = described.get(case_id, unknown)
    return case


def _frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return one row a sample; a null is NaN, which `load` has kept out of the records themselves."""
    rows = [
        {"round": record.identity.round, "rank": record.identity.rank, **sample}
        for record in records
        for sample in record.samples
    ]
    frame = pd.DataFrame(rows)
    for name in frame.columns.difference(["phase"]):
        frame[name] = pd.to_numeric(frame[name])
    return frame


def _reason(records: Iterable[Record], name: str, passes: Sequence[str] | None = None) -> str:
    for record in records:
        if (passes is None or record.identity.pass_ in passes) and name in record.reasons:
            return record.reasons[name]
    return f"{name} is not there, and no record says why"


def _total(by_rank: Mapping[int, int | Missing]) -> float | Missing:
    values = [value for value in by_rank.values() if not isinstance(value, Missing)]
    if len(values) < len(by_rank):
        return next(value for value in by_rank.values() if isinstance(value, Missing))
    return float(sum(values))


def _worst(by_rank: Mapping[int, int | Missing]) -> float | Missing:
    total = _total(by_rank)
    if isinstance(total, Missing):
        return total
    return float(max(value for value in by_rank.values() if not isinstance(value, Missing)))


def _count_words(count: Count) -> str:
    return f"{count.calls:,} copies of {count.bytes:,} bytes"


def _failures(records: Iterable[Record]) -> list[str]:
    """Return one line a path, pass and kind of trouble, in the words of the first that had it."""
    found: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        kind = record.status if record.error is None else f"{record.error.type}: {record.error.message}"
        found[record.identity.path, record.identity.pass_, kind].append(record)
    lines = []
    for (path, pass_, _), alike in found.items():
        first, who = alike[0], _places([record.identity for record in alike])
        lines.append(f"{first.status}: {pass_} pass of {path}, {who}: {_why(first)}")
    return lines


def _why(record: Record) -> str:
    return record.reasons["status"] if record.error is None else f"{record.error.type}: {record.error.message}"


def _absences(identities: Iterable[Identity]) -> list[str]:
    """Return one line a path, ranks and rounds."""
    by_pass: dict[tuple[str, str], list[Identity]] = defaultdict(list)
    for identity in identities:
        by_pass[identity.path, identity.pass_].append(identity)
    passes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (path, pass_), alike in by_pass.items():
        passes[path, _places(alike)].append(pass_)
    return [f"absent: {', '.join(names)} pass of {path}, {places}" for (path, places), names in passes.items()]


def _places(identities: Sequence[Identity]) -> str:
    """Return which ranks and rounds: `rank 1, rounds 0, 1, 2`."""
    words = []
    for name, values in (("rank", {i.rank for i in identities}), ("round", {i.round for i in identities})):
        words.append(f"{name}{'s' if len(values) > 1 else ''} {', '.join(map(str, sorted(values)))}")
    alone = {identity.concurrency for identity in identities} == {"alone"}
    return ", ".join(words) + (", alone" if alone else "")
