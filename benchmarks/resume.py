"""May a run be gone on with? Only with the code, the machine and the presets that it began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import Case
from benchmarks.runfolder import RunError
from benchmarks.task import Task

_SAME_MACHINE = (("cpu", "model"), ("cpu", "usable"), ("memory", "total_bytes"), ("gpu_driver",), ("cuda",))
_SAME_SOFTWARE = ("torch", "numpy", "safetensors")


def expect_same(run: Mapping[str, Any], cases: Sequence[Case], tasks: Sequence[Task], now: Mapping[str, Any]) -> None:
    """Refuse to go on where figures of one run would come from two different things.

    Raises:
        RunError: what changed, from what to what.
    """
    if run["status"] == "complete":
        raise RunError(f"{run['run_id']}: is complete; start a new run")
    start = run["environment"]["start"]
    changes = [
        *_changes("code of", start["code_digests"], now["code_digests"], ("packckpt", "benchmarks")),
        *(
            f"{'.'.join(keys)} was {_at(start, keys)!r} and is {_at(now, keys)!r}"
            for keys in _SAME_MACHINE
            if _at(start, keys) != _at(now, keys)
        ),
        *_changes("version of", start["software"]["packages"], now["software"]["packages"], _SAME_SOFTWARE),
        *_gpu_changes(start["gpus"], now["gpus"]),
        *_preset_changes(run["cases"], cases),
    ]
    if not changes and run["jobs"] != [job for task in tasks for job in task.jobs()]:
        changes = ["the list of jobs is another one"]
    if changes:
        raise RunError(f"{run['run_id']}: cannot go on: {'; '.join(changes)}. Start a new run")


def _changes(what: str, before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [
        f"{what} {name} was {str(before.get(name))[:12]} and is {str(after.get(name))[:12]}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _gpu_changes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    old, new = ([(gpu["name"], gpu["uuid_hash"]) for gpu in gpus] for gpus in (before, after))
    return [] if old == new else [f"the GPUs were {old} and are {new}"]


def _preset_changes(before: Sequence[Mapping[str, Any]], after: Sequence[Case]) -> list[str]:
    digests = {case["preset"]: case["preset_digest"] for case in before}
    return [
        f"preset {case.preset.name} has other numbers now"
        for case in {case.preset.name: case for case in after}.values()
        if digests.get(case.preset.name) != case.preset.digest
    ]


def _at(content: Mapping[str, Any], keys: Sequence[str]) -> Any:
    value: Any = content
    for key in keys:
        value = value[key]
    return value
