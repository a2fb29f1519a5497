"""Makes runs as `python -m benchmarks` would leave them on two H200, with figures of a known shape.

The figures are invented: they show what the analysis does with such records, and are evidence of nothing.
`python -m tests.analysis.golden` writes the two that are committed under data/; the other cases are those two with one
thing changed, see `test_golden.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

Json = dict[str, Any]

DATA = Path(__file__).with_name("data")
START = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)
DIGEST = "5c" * 32
GPU_HASHES = ("a1" * 8, "b2" * 8, "c3" * 8, "d4" * 8)
NO_GPU = "no GPU: the tensors are in host memory"
OUTSIDE_PROFILER = "the profiler cannot tell optimizer state from weights"
TIMING = ("timing",)
WATCHING = ("memory", "timeline", "observe", "profile")


@dataclass(frozen=True)
class Shape:
    """A case: sizes of one rank's share.

    Attributes:
        slice_seconds: fence of the slice path on one rank.
        ratio: of the coalesced fence to it.
    """

    id: str = "qwen3-30b-a3b/lora8/ep2/l2/bfloat16-bfloat16"
    family: str = "model"
    preset: str = "qwen3-30b-a3b"
    method: str = "lora"
    slice_bytes: int = 65_536
    exports: int = 768
    parameters: int = 12
    layers: int = 2
    slice_seconds: float = 0.200
    ratio: float = 0.62

    @property
    def state_bytes(self) -> int:
        """Bytes of master and moments of one rank, as float32."""
        return 3 * self.exports * self.slice_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the 16-bit weights of one rank."""
        return self.exports * self.slice_bytes // 2

    def calls(self, path: str) -> int:
        """Optimizer transfers of one rank."""
        return 3 * (self.exports if path == "slice" else self.parameters)

    def fence(self, path: str) -> float:
        """Seconds."""
        return self.slice_seconds * {"slice": 1.0, "staged": 0.8 * self.ratio}.get(path, self.ratio)

    def device_peak(self, path: str) -> int:
        """Bytes of the temporary that a cast needs."""
        rows = 1 if path == "slice" else self.exports // self.parameters
        return rows * self.slice_bytes


@dataclass(frozen=True)
class Plan:
    """What to make."""

    run_id: str = "20260302-intel-xeon-64cpu-gpux2-0123abc"
    gpu: str | None = "NVIDIA H200"
    ranks: tuple[int, ...] = (2,)
    shapes: tuple[Shape, ...] = (Shape(),)
    paths: tuple[str, ...] = ("slice", "coalesced")
    rounds: int = 5
    saves: int = 5
    reference: bool = True
    noise: float = 0.02
    seed: int = 7
    started: datetime = field(default=START)


ADOPT = Plan()
CPU = Plan(run_id="20260302-intel-xeon-2cpu-cpux1-0123abc", gpu=None, ranks=(1,), rounds=2, saves=5, seed=11)


@dataclass
class Made:
    """A run in memory, to be changed and written."""

    info: Json
    lines: list[Json]

    def write(self, parent: Path) -> Path:
        """Write it under its own name; NaN and infinity too, as a broken driver would."""
        folder = parent / str(self.info["run_id"])
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(self.info, indent=1) + "\n", encoding="utf-8")
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in self.lines)
        (folder / "records.jsonl").write_text(text, encoding="utf-8")
        return folder

    def chosen(self, pass_: str | None = None, path: str | None = None, rank: int | None = None) -> list[Json]:
        """Return the lines of a pass, path and rank."""
        return [
            line
            for line in self.lines
            if pass_ in (None, line["pass"]) and path in (None, line["path"]) and rank in (None, line["rank"])
        ]


def make(plan: Plan = ADOPT) -> Made:
    """Return the run of a plan."""
    lines = list(_lines(plan))
    jobs: dict[tuple[Any, ...], Json] = {}
    names = ("case_id", "path", "implementation", "pass", "round", "world_size", "concurrency")
    for line in lines:
        alone = line["rank"] if line["concurrency"] == "alone" else None
        job = jobs.setdefault(
            (*(line[name] for name in names), alone), {**{name: line[name] for name in names}, "ranks": []}
        )
        job["ranks"].append(line["rank"])
    end = plan.started + timedelta(seconds=60 + 8 * len(lines))
    info: Json = {
        "kind": "run",
        "schema_version": 1,
        "run_id": plan.run_id,
        "status": "complete",
        "command": ["python", "-m", "benchmarks", "run", "--preset", plan.shapes[0].preset],
        "settings": {"rounds": plan.rounds, "repeats": plan.saves - 1, "durable": True, "ranks": list(plan.ranks)},
        "cases": [_case(shape) for shape in plan.shapes],
        "jobs": list(jobs.values()),
        "sessions": [{"started_at": _instant(plan.started), "ended_at": _instant(end), "status": "complete"}],
        "environment": {"start": _environment(plan, plan.started), "end": _environment(plan, end)},
        "doubts": [
            {
                "what": "free memory",
                "found": 2**38,
                "limit": 2**33,
                "unit": "bytes",
                "ok": True,
                "remedy": "close what needs memory, or lower --memory-budget",
            }
        ],
    }
    return Made(info, lines)


def _lines(plan: Plan) -> Iterator[Json]:
    chance = random.Random(plan.seed)
    sequence = 0
    yield _line(plan, None, "ceiling", "ceiling", 0, 1, 0, "together", 0, [_ceiling(plan)])
    for shape in plan.shapes:
        for world_size in plan.ranks:
            for what, path, number, ranks, concurrency in _tasks(plan, world_size):
                sequence += 1
                passes = WATCHING if what == "watching" else (what,)
                for pass_ in passes:
                    for rank in ranks:
                        samples = _samples(plan, chance, shape, path, pass_, rank, world_size, concurrency)
                        yield _line(plan, shape, path, pass_, number, world_size, rank, concurrency, sequence, samples)


def _tasks(plan: Plan, world_size: int) -> Iterator[tuple[str, str, int, list[int], str]]:
    everyone = list(range(world_size))
    for number in range(plan.rounds):
        for path in plan.paths if number % 2 == 0 else plan.paths[::-1]:
            yield "timing", path, number, everyone, "together"
    for path in plan.paths:
        yield "watching", path, 0, everyone, "together"
    if plan.reference:
        yield "reference", "default-stager", 0, everyone, "together"
    if world_size > 1:
        for path in plan.paths:
            for rank in everyone:
                yield "timing", path, 0, [rank], "alone"


def _samples(
    plan: Plan,
    chance: random.Random,
    shape: Shape,
    path: str,
    pass_: str,
    rank: int,
    world_size: int,
    concurrency: str,
) -> list[Json]:
    on_gpu = plan.gpu is not None
    count = {"timing": plan.saves, "memory": 2, "reference": 3, "timeline": 0}.get(pass_, 1)
    found = []
    for save in range(count):
        sample: Json = {"save": save, "phase": "steady" if save else "first"}
        if pass_ in ("timing", "reference"):
            seconds = shape.fence(path) * (1.3 if pass_ == "reference" else 1.0)
            seconds *= chance.gauss(1, plan.noise) * (1.7 if save == 0 else 1) * (0.9 if concurrency == "alone" else 1)
            sample |= {
                "fence_seconds": round(seconds, 6),
                "prepare_seconds": round(seconds * 0.99, 6),
                "device_seconds": round(seconds * 0.4, 6) if on_gpu else None,
                "prepare_minor_faults": 30_000 if save == 0 else 1_200,
            }
        if pass_ == "timing":
            sample |= {
                "finalize_seconds": round(seconds * 2.5, 6),
                "finalize_minor_faults": 900,
                "energy_joules": round(seconds * 120, 3) if on_gpu else None,
            }
        if pass_ == "memory":
            sample |= _memory(plan, chance, shape, path, rank, world_size)
        if pass_ == "observe":
            sample |= {"synchronize_calls": 2 if on_gpu else None, "item_calls": 0}
        if pass_ == "profile":
            sample |= {
                "memcpy_seconds": round(shape.fence(path) * 0.35, 6) if on_gpu else None,
                "synchronize_calls": 2 if on_gpu else None,
            }
        found.append(sample)
    return found


def _memory(plan: Plan, chance: random.Random, shape: Shape, path: str, rank: int, world_size: int) -> Json:
    planned = _predicted(plan, shape, path, rank, world_size)
    prepare, finalize = (
        int(planned[f"host_peak_{when}_bytes"] * chance.uniform(1.01, 1.05)) for when in ("prepare", "finalize")
    )
    on_gpu = plan.gpu is not None
    return {
        "host_resident_bytes": 912_000_000 + 4096 * chance.randrange(1000),
        "host_peak_bytes": max(prepare, finalize),
        "host_peak_prepare_bytes": prepare,
        "host_peak_finalize_bytes": finalize,
        "host_peak_anonymous_bytes": int(prepare * 0.97),
        "host_peak_shared_bytes": 0,
        "host_peak_pinned_bytes": 0 if on_gpu else None,
        "device_resident_bytes": shape.state_bytes if on_gpu else None,
        "device_peak_allocated_bytes": planned["device_peak_bytes"] + 512 if on_gpu else None,
        "device_peak_reserved_bytes": 2 * 2**20 if on_gpu else None,
        "device_peak_nvml_bytes": 2 * 2**20 if on_gpu else None,
    }


def _ceiling(plan: Plan) -> Json:
    return {
        "save": 0,
        "phase": "first",
        "pinned_bytes_per_second": 52.1e9 if plan.gpu else None,
        "pageable_warm_bytes_per_second": 13.9e9 if plan.gpu else 8.2e9,
        "pageable_fresh_bytes_per_second": 2.2e9 if plan.gpu else 1.9e9,
        "small_copy_seconds": 9.1e-6,
        "digest_bytes_per_second": 1.02e9,
        "disk_write_bytes_per_second": 1.9e9,
    }


def _predicted(plan: Plan, shape: Shape, path: str, rank: int, world_size: int) -> Json:
    own = shape.state_bytes + shape.weight_bytes
    prepare = own // 2 + shape.slice_bytes
    finalize = own + (min(2 * 64 * 2**20, own) if rank == 0 and world_size > 1 else 0)
    return {
        "host_peak_bytes": max(prepare, finalize),
        "host_peak_prepare_bytes": prepare,
        "host_peak_finalize_bytes": finalize,
        "device_peak_bytes": shape.device_peak(path) if plan.gpu else 0,
        "disk_bytes": own * (1 + (world_size if rank == 0 else 0)),
    }


def _line(
    plan: Plan,
    shape: Shape | None,
    path: str,
    pass_: str,
    number: int,
    world_size: int,
    rank: int,
    concurrency: str,
    sequence: int,
    samples: list[Json],
) -> Json:
    reasons: dict[str, str] = {}
    for sample in samples:
        reasons |= {name: NO_GPU for name, value in sample.items() if value is None}
    counted = shape is not None and pass_ != "reference"
    saved = counted and (pass_ != "profile" or plan.gpu is not None)
    transfers = _transfers(plan, shape if counted else None, path, pass_)
    predicted = dict.fromkeys(
        ("host_peak_bytes", "host_peak_prepare_bytes", "host_peak_finalize_bytes", "device_peak_bytes", "disk_bytes")
    )
    if counted and shape is not None:
        predicted = _predicted(plan, shape, path, rank, world_size)
    if shape is not None:
        for what, counters in transfers.items():
            reasons |= {
                f"transfers.{what}.{who}": _why_no_count(plan, what, who, pass_)
                for who, count in counters.items()
                if count is None
            }
        reasons |= {f"predicted.{name}": "a reference plans nothing" for name, v in predicted.items() if v is None}
        if not counted:
            reasons["digest"] = "a capture writes no checkpoint"
        elif not saved:
            reasons["digest"] = "nothing was saved: there was no GPU to profile"
    timeline = _timeline(plan, shape, path) if shape is not None and pass_ == "timeline" else None
    if timeline is not None and plan.gpu is None:
        reasons["timeline.device_allocated_bytes"] = NO_GPU
    return {
        "kind": "record",
        "schema_version": 1,
        "case_id": shape.id if shape else None,
        "path": path,
        "pass": pass_,
        "round": number,
        "world_size": world_size,
        "rank": rank,
        "concurrency": concurrency,
        "implementation": path,
        "sequence": sequence,
        "started_at": _instant(plan.started + timedelta(seconds=8 * sequence)),
        "elapsed_seconds": 7.25,
        "status": "ok",
        "error": None,
        "case": _case(shape) if shape else None,
        "device": {
            "kind": "cuda" if plan.gpu else "cpu",
            "name": plan.gpu or "Intel Xeon",
            "index": rank if plan.gpu else None,
            "uuid_hash": GPU_HASHES[rank] if plan.gpu else None,
            "shared": False,
        },
        "digest": (DIGEST if concurrency == "together" else f"{rank}e" * 32) if saved else None,
        "transfers": transfers,
        "predicted": predicted,
        "samples": samples,
        "timeline": timeline,
        "reasons": reasons,
        "command": ["python", "-m", "benchmarks", "run", "--case", shape.id, "--path", path] if shape else [],
    }


def _transfers(plan: Plan, shape: Shape | None, path: str, pass_: str) -> Json:
    empty: Json = dict.fromkeys(("predicted", "logged", "observed", "profiled"))
    if shape is None:
        return {"optimizer": dict(empty), "all": dict(empty)}
    optimizer = {"calls": shape.calls(path), "bytes": shape.state_bytes}
    everything = {"calls": shape.calls(path) + shape.exports, "bytes": shape.state_bytes + shape.weight_bytes}
    seen = (
        {"predicted"}
        | (set() if pass_ == "profile" and plan.gpu is None else {"logged"})
        | ({"observed"} if pass_ == "observe" else set())
    )
    profiled = {"profiled"} if pass_ == "profile" and plan.gpu else set()
    return {
        "optimizer": {who: optimizer if who in seen else None for who in empty},
        "all": {who: everything if who in seen | profiled else None for who in empty},
    }


def _why_no_count(plan: Plan, what: str, who: str, pass_: str) -> str:
    if pass_ == "reference":
        return "a capture counts nothing"
    if pass_ == "profile" and plan.gpu is None:
        return "packckpt's log of a save is in the other passes" if who == "logged" else NO_GPU
    if who == "profiled" and plan.gpu is None:
        return NO_GPU
    if who == "profiled" and what == "optimizer":
        return OUTSIDE_PROFILER
    return f"counted in the {'observe' if who == 'observed' else 'profile'} pass"


def _timeline(plan: Plan, shape: Shape, path: str) -> Json:
    own = shape.state_bytes + shape.weight_bytes
    prepare, finalize = shape.fence(path), shape.fence(path) * 2.5
    points = 24
    seconds = [round((prepare + finalize) * 1.05 * n / (points - 1) - 0.01, 6) for n in range(points)]
    shares = [
        0.0 if second < 0 else 0.5 if second < prepare else 1.0 if second < prepare + finalize else 0.05
        for second in seconds
    ]
    host = [912_000_000 + int(own * share) for share in shares]
    return {
        "seconds": seconds,
        "host_resident_bytes": host,
        "host_anonymous_bytes": [value - 300_000_000 for value in host],
        "host_shared_bytes": [0] * points,
        "device_allocated_bytes": [
            shape.state_bytes + (shape.device_peak(path) if 0 <= second < prepare else 0) if plan.gpu else None
            for second in seconds
        ],
        "marks": [
            {"name": "prepare", "start_seconds": 0.0, "end_seconds": round(prepare, 6)},
            {"name": "finalize", "start_seconds": round(prepare, 6), "end_seconds": round(prepare + finalize, 6)},
        ],
    }


def _case(shape: Shape) -> Json:
    return {
        "id": shape.id,
        "family": shape.family,
        "preset": shape.preset,
        "preset_digest": "7d" * 32,
        "model": shape.preset,
        "method": shape.method,
        "lora_rank": 8 if shape.method == "lora" else None,
        "expert_parallel": 2,
        "layers": shape.layers,
        "experts": 128,
        "local_experts": 64,
        "layout": "regular",
        "dtype": "bfloat16",
        "state_dtype": "bfloat16",
        "slice_bytes": {"smallest": shape.slice_bytes, "median": shape.slice_bytes, "largest": shape.slice_bytes},
        "exports": shape.exports,
        "seed": 0,
    }


def _environment(plan: Plan, when: datetime) -> Json:
    gpus = [_gpu(index, plan.gpu) for index in range(max(plan.ranks))] if plan.gpu else []
    return {
        "captured_at": _instant(when),
        "gpus": gpus,
        "gpu_driver": "580.82.07" if plan.gpu else None,
        "cuda": "13.0" if plan.gpu else None,
        "cpu": {
            "model": "Intel Xeon",
            "architecture": "x86_64",
            "cores": 32 if plan.gpu else 2,
            "logical": 64 if plan.gpu else 2,
            "usable": 64 if plan.gpu else 2,
            "sockets": 2 if plan.gpu else 1,
            "mhz": 3100.0,
            "governor": "performance",
            "load_1_minute": 0.4,
        },
        "memory": {
            "total_bytes": 2**40 if plan.gpu else 24 * 2**30,
            "available_bytes": 2**39 if plan.gpu else 20 * 2**30,
            "swap_total_bytes": 0,
            "swap_used_bytes": 0,
            "huge_pages": "madvise",
            "free_scratch_bytes": 2**40,
            "scratch_filesystem": "ext4",
        },
        "limits": {
            "cgroup_memory_bytes": 2**40,
            "cgroup_cpus": 64.0,
            "memory_lock_bytes": 2**40,
            "open_files": 65_536,
            "container": True,
        },
        "software": {
            "python": "3.11.9",
            "kernel": "6.8.0",
            "packages": {"torch": "2.13.0", "numpy": "2.4.6", "safetensors": "0.7.0"},
        },
        "allocator": {"PYTORCH_CUDA_ALLOC_CONF": None},
        "git": {"commit": "0123abc" + "0" * 33, "dirty": False},
        "code_digests": {"packckpt": "9f" * 32, "benchmarks": "8e" * 32},
        "reasons": {"allocator.PYTORCH_CUDA_ALLOC_CONF": "not set"} | ({} if plan.gpu else {"gpus": NO_GPU}),
    }


def _gpu(index: int, name: str | None) -> Json:
    return {
        "index": index,
        "name": name,
        "uuid_hash": GPU_HASHES[index],
        "memory_bytes": 150_754_820_096,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "max_sm_clock_mhz": 1980,
        "throttle_reasons": [],
        "power_limit_watts": 700.0,
        "link_generation": 5,
        "link_width": 16,
        "max_link_generation": 5,
        "max_link_width": 16,
        "link_under_load": True,
        "mig": False,
        "ecc": True,
        "numa_node": index,
        "cpu_affinity": "0-31" if index == 0 else "32-63",
        "other_processes": 0,
        "reasons": {},
    }


def _instant(when: datetime) -> str:
    return when.isoformat(timespec="seconds")


def many_cases(count: int = 20) -> Plan:
    """Return a plan with a sweep, LoRA and full fine-tuning cases, one with a very long name."""
    sweep = [
        Shape(
            id=f"sweep/{size}B/ep2/l1/bfloat16-bfloat16",
            family="sweep",
            preset="sweep",
            method="full",
            slice_bytes=size,
            exports=max(4, 2**25 // size),
            parameters=1,
            slice_seconds=0.05 + 0.02 * number,
            ratio=0.3 + 0.1 * number,
        )
        for number, size in enumerate(4**power for power in range(6, 14))
    ]
    long = Shape(id="deepseek-v3-with-a-name-that-goes-on/lora32/interleaved/ep8/l58/bfloat16-float32/seed1234567")
    models = [replace(Shape(), id=f"qwen3-30b-a3b/lora{n}/ep2/l2/bfloat16-bfloat16") for n in range(1, count - 7)]
    deep = {2: 4, 4: 8}  # place among the models: layers, of what the first one has two of
    models = [
        replace(
            model,
            id=f"qwen3-30b-a3b/lora1/ep2/l{deep[place]}/bfloat16-bfloat16",
            layers=deep[place],
            exports=model.exports * deep[place] // 2,
        )
        if place in deep
        else model
        for place, model in enumerate(models)
    ]
    return replace(
        ADOPT,
        run_id="20260303-intel-xeon-64cpu-gpux2-0123abc",
        shapes=(long, *models, *sweep)[:count],
        paths=("slice", "coalesced", "staged"),
    )


def main() -> None:
    """Write the committed runs."""
    for name, plan in (("adopt", ADOPT), ("cpu", CPU)):
        made = make(plan)
        folder = DATA / name / str(made.info["run_id"])
        if folder.exists():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        made.write(DATA / name)


if __name__ == "__main__":
    main()
