"""The golden runs: the committed adopt and CPU runs, and each of them with one thing changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.analysis.golden import ADOPT, DATA, Json, Made, Shape, make


def committed(name: str) -> Made:
    """Return a committed run, to be changed."""
    (folder,) = (path for path in (DATA / name).iterdir() if path.is_dir())
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    return Made(info, lines)


def scale_time(made: Made, path: str, factor: float, rank: int | None = None) -> None:
    """Make every save of a path that much longer."""
    for line in made.chosen("timing", path, rank):
        for sample in line["samples"]:
            for name in ("fence_seconds", "prepare_seconds", "device_seconds"):
                sample[name] = sample[name] and round(sample[name] * factor, 6)


def _hold_by_time() -> Made:
    made = committed("adopt")
    scale_time(made, "coalesced", 1.7)
    return made


def _hold_by_no_gain() -> Made:
    """Near the threshold, and known so well that more samples would not help."""
    made = committed("adopt")
    scale_time(made, "coalesced", 0.95 / 0.6215)
    return made


def _cannot_tell() -> Made:
    return make(replace(ADOPT, noise=0.14, seed=3, shapes=(Shape(ratio=0.93),)))


def _hold_by_host_memory() -> Made:
    made = committed("adopt")
    _add(made, "host_peak_finalize_bytes", 150_000_000)
    return made


def _hold_by_device_memory() -> Made:
    made = committed("adopt")
    _add(made, "device_peak_allocated_bytes", 400_000_000)
    for line in made.chosen(path="coalesced"):
        if line["predicted"]["device_peak_bytes"] is not None:
            line["predicted"]["device_peak_bytes"] += 400_000_000  # the plan says so, too
    return made


def _add(made: Made, name: str, more_bytes: int) -> None:
    for line in made.chosen("memory", "coalesced"):
        for sample in line["samples"]:
            sample[name] += more_bytes
            sample["host_peak_bytes"] = max(sample["host_peak_prepare_bytes"], sample["host_peak_finalize_bytes"])


def _hold_by_mismatch() -> Made:
    made = committed("adopt")
    for line in made.chosen(path="coalesced"):
        if line["concurrency"] == "together" and line["digest"]:
            line["digest"] = "77" * 32
    return made


def _hold_by_transfers() -> Made:
    made = committed("adopt")
    for line in made.chosen("observe", "coalesced", 0):
        line["transfers"]["all"]["observed"]["calls"] += 1
    return made


def _few_rounds() -> Made:
    return make(replace(ADOPT, rounds=2))


def _other_gpu() -> Made:
    return make(replace(ADOPT, gpu="NVIDIA A100-SXM4-80GB"))


def _shared_gpu() -> Made:
    made = committed("adopt")
    for line in made.lines:
        line["device"] |= {"uuid_hash": "a1" * 8, "index": 0, "shared": True}
    return made


def _mig() -> Made:
    made = committed("adopt")
    for when in ("start", "end"):
        for gpu in made.info["environment"][when]["gpus"]:
            gpu["mig"] = True
    return made


def _dirty() -> Made:
    made = committed("adopt")
    made.info["environment"]["start"]["git"]["dirty"] = True
    return made


def _busy_gpu() -> Made:
    made = committed("adopt")
    made.info["doubts"].append(
        {
            "what": "GPU 1: other processes",
            "found": 2,
            "limit": 0,
            "unit": "",
            "ok": False,
            "remedy": "wait or take another GPU",
        }
    )
    return made


def _no_device_memory() -> Made:
    """NVML and the allocator gave nothing: null, and a reason."""
    made = committed("adopt")
    for line in made.chosen("memory"):
        line["reasons"]["device_peak_allocated_bytes"] = "the allocator keeps no peaks in this build"
        for sample in line["samples"]:
            sample["device_peak_allocated_bytes"] = None
    return made


def _too_good() -> Made:
    made = committed("adopt")
    scale_time(made, "coalesced", 1 / 60)
    return made


def _drifting() -> Made:
    made = committed("adopt")
    for line in made.chosen("timing", "coalesced"):
        for sample in line["samples"]:
            for name in ("fence_seconds", "prepare_seconds", "device_seconds"):
                sample[name] = round(sample[name] * (1 + 0.1 * line["round"]), 6)
    return made


def _other_preset() -> Made:
    return make(replace(ADOPT, shapes=(Shape(id="olmoe-1b-7b/lora8/ep2/l2/bfloat16", preset="olmoe-1b-7b"),)))


def _missing_path() -> Made:
    made = committed("adopt")
    _drop(made, lambda line: line["path"] == "slice")
    made.info["jobs"] = [job for job in made.info["jobs"] if job["path"] != "slice"]
    return made


def _one_rank_missing() -> Made:
    made = committed("adopt")
    _drop(made, lambda line: line["rank"] == 1)
    return made


def _interrupted() -> Made:
    made = committed("adopt")
    del made.lines[len(made.lines) // 2 :]
    made.info["status"] = "interrupted"
    made.info["sessions"][-1]["status"] = "interrupted"
    return made


def _failed_case() -> Made:
    made = committed("adopt")
    for line in made.chosen("timing", "coalesced"):
        line |= {
            "status": "failed",
            "samples": [],
            "digest": None,
            "error": {
                "type": "OutOfMemoryError",
                "message": "CUDA out of memory",
                "traceback": "Traceback (most recent call last):\n  ...",
            },
        }
    return made


def _no_records() -> Made:
    made = committed("adopt")
    made.lines.clear()
    return made


def _drop(made: Made, which: Callable[[Json], bool]) -> None:
    made.lines[:] = [line for line in made.lines if not which(line)]


VARIANTS: dict[str, Callable[[], Made]] = {
    "adopt": lambda: committed("adopt"),
    "cpu-only": lambda: committed("cpu"),
    "hold-by-time": _hold_by_time,
    "hold-by-no-gain": _hold_by_no_gain,
    "hold-by-host-memory": _hold_by_host_memory,
    "hold-by-device-memory": _hold_by_device_memory,
    "hold-by-mismatch": _hold_by_mismatch,
    "hold-by-transfers": _hold_by_transfers,
    "not-enough-cannot-tell": _cannot_tell,
    "not-enough-few-rounds": _few_rounds,
    "not-enough-other-gpu": _other_gpu,
    "not-enough-shared-gpu": _shared_gpu,
    "not-enough-mig": _mig,
    "not-enough-dirty": _dirty,
    "not-enough-busy-gpu": _busy_gpu,
    "not-enough-no-device-memory": _no_device_memory,
    "not-enough-too-good": _too_good,
    "not-enough-drifting": _drifting,
    "not-enough-other-preset": _other_preset,
    "not-enough-missing-path": _missing_path,
    "not-enough-one-rank-missing": _one_rank_missing,
    "not-enough-interrupted": _interrupted,
    "not-enough-failed-case": _failed_case,
    "not-enough-no-records": _no_records,
}


def written(name: str, parent: Path) -> Path:
    """Write a golden run and return its folder."""
    return VARIANTS[name]().write(parent)
