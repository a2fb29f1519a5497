"""Make records of what the workers told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.cases import parse_case
from benchmarks.missing import Missing
from benchmarks.paths import REFERENCE
from benchmarks.predict import Prediction, predict
from benchmarks.record import COUNTED, COUNTERS, PREDICTED, Count, Device, Failure, Identity, Record
from benchmarks.settings import Settings
from benchmarks.task import Task

_WHERE = {
    "logged": "packckpt's log of a save is in the other passes",
    "observed": "counted in the observe pass",
    "profiled": "counted in the profile pass",
}


class Assembler:
    """Turns results of workers into records; predicts each case and path once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._predictions: dict[tuple[str, str, int, int], Prediction] = {}

    def prediction(self, task: Task, rank: int) -> Prediction | Missing:
        """Return what a save of the task costs on a rank."""
        if task.case_id is None or task.implementation == REFERENCE:
            return Missing("packckpt plans its own paths only")
        world_size = 1 if task.concurrency == "alone" else task.world_size
        key = (task.case_id, task.implementation, rank, world_size)
        if key not in self._predictions:
            case = parse_case(task.case_id)
            # A rank alone is the coordinator of its own save.
            self._predictions[key] = predict(case, task.implementation, rank, world_size, self._settings.device)
        return self._predictions[key]

    def records(
        self, task: Task, results: Mapping[int, Mapping[str, Any]], started_at: str, elapsed_seconds: float
    ) -> list[Record]:
        """Return the records of a task that ran, in the order of `task.identities()`."""
        return [
            self._record(task, identity, results[identity.rank], started_at, elapsed_seconds)
            for identity in task.identities()
        ]

    def skipped(self, task: Task, reason: str, now: str) -> list[Record]:
        """Return the records of a task that was not started."""
        return [
            Record(
                identity=identity,
                implementation=task.implementation,
                sequence=task.sequence,
                started_at=now,
                elapsed_seconds=None,
                status="skipped",
                case=_case(task),
                reasons={"status": reason},
                command=self.command(task),
            )
            for identity in task.identities()
        ]

    def command(self, task: Task) -> list[str]:
        """Return what to type to measure this case and path again."""
        start = ["python", "-m", "benchmarks", "run", "--device", self._settings.device]
        if task.case_id is None:
            return start
        arm = [] if task.implementation == REFERENCE else ["--path", f"{task.path}={task.implementation}"]
        repeats = ["--repeats", str(self._settings.repeats), "--rounds", str(self._settings.rounds)]
        shared = ["--share-device"] if self._settings.share_device else []
        return [*start, "--case", task.case_id, *arm, "--ranks", str(task.world_size), *repeats, *shared]

    def _record(
        self, task: Task, identity: Identity, result: Mapping[str, Any], started_at: str, elapsed_seconds: float
    ) -> Record:
        outcome = _outcome(result, identity)
        failed = outcome["status"] == "failed"
        transfers = {
            what: {who: Count(**count) for who, count in counted.items()}
            for what, counted in outcome["transfers"].items()
        }
        predicted: dict[str, int | None] = {}
        reasons = dict(outcome["reasons"])
        prediction = self.prediction(task, identity.rank)
        if isinstance(prediction, Missing):
            for name in (*(f"transfers.{what}.predicted" for what in COUNTED), *(f"predicted.{n}" for n in PREDICTED)):
                reasons.setdefault(name, prediction.reason)
        else:
            transfers.setdefault("optimizer", {})["predicted"] = prediction.optimizer
            transfers.setdefault("all", {})["predicted"] = prediction.all
            predicted = prediction.to_record()
        if task.case_id is not None:
            _explain(transfers, reasons)
        return Record(
            identity=identity,
            implementation=task.implementation,
            sequence=task.sequence,
            started_at=started_at,
            elapsed_seconds=elapsed_seconds,
            status="failed" if failed else "ok",
            error=Failure(**outcome["error"]) if failed else None,
            case=_case(task),
            device=None if result["device"] is None else Device(**result["device"]),
            digest=outcome["digest"],
            transfers=transfers,
            predicted=predicted,
            samples=outcome["samples"],
            timeline=outcome["timeline"],
            reasons=reasons,
            command=self.command(task),
        )


def _outcome(result: Mapping[str, Any], identity: Identity) -> Mapping[str, Any]:
    if "failure" in result:
        nothing: dict[str, Any] = {"digest": None, "samples": [], "transfers": {}, "timeline": None, "reasons": {}}
        return {"status": "failed", "error": result["failure"], **nothing}
    outcome: Mapping[str, Any] = result["outcomes"][identity.pass_]
    return outcome


def _case(task: Task) -> dict[str, Any] | None:
    return None if task.case_id is None else parse_case(task.case_id).to_json()


def _explain(transfers: Mapping[str, Mapping[str, Count]], reasons: dict[str, str]) -> None:
    """Say where the counts are that another pass makes."""
    for what in COUNTED:
        for who in COUNTERS:
            if who in _WHERE and who not in transfers.get(what, {}):
                reasons.setdefault(f"transfers.{what}.{who}", _WHERE[who])
