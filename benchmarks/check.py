"""Is this machine fit to measure? Each doubt with its number, its limit and what to do. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.units import format_bytes

LEAST_MEMORY_BYTES = 8 << 30
LEAST_DISK_BYTES = 8 << 30
LEAST_LOCK_BYTES = 4 << 30
MOST_SWAP_BYTES = 0
MOST_LOAD_PER_CPU = 0.5
LEAST_CLOCK_SHARE = 0.5
GOOD_GOVERNORS = ("performance", "schedutil")

Doubt = dict[str, Any]


def doubts_of(environment: Mapping[str, Any]) -> list[Doubt]:
    """Judge a captured environment; `ok` is None where something could not be read."""
    return [*_host(environment), *_gpus(environment)]


def render_doubts(doubts: Sequence[Doubt]) -> str:
    """Return one line a doubt, and what to do about those that are not fine."""
    words = {True: "fine   ", False: "DOUBT  ", None: "unknown"}
    lines = []
    for doubt in doubts:
        found, limit = (_shown(doubt[key], doubt["unit"]) for key in ("found", "limit"))
        lines.append(f"{words[doubt['ok']]}  {doubt['what']}: {found} (limit {limit})")
        if doubt["ok"] is not True:
            lines.append(f"         {doubt['remedy']}")
    return "\n".join(lines) + "\n"


def _host(environment: Mapping[str, Any]) -> Iterator[Doubt]:
    memory, limits, cpu = environment["memory"], environment["limits"], environment["cpu"]
    why = environment["reasons"]
    yield _at_least(
        "free memory",
        memory["available_bytes"],
        LEAST_MEMORY_BYTES,
        "bytes",
        why.get("memory.available_bytes") or "close what needs memory, or lower --memory-budget",
    )
    yield _at_least(
        "free scratch disk",
        memory["free_scratch_bytes"],
        LEAST_DISK_BYTES,
        "bytes",
        why.get("memory.free_scratch_bytes") or "make room, or point --scratch at another disk",
    )
    yield _at_most(
        "swap in use",
        memory["swap_used_bytes"],
        MOST_SWAP_BYTES,
        "bytes",
        why.get("memory.swap_used_bytes") or "a swapped page costs a save milliseconds: free memory, then swapoff",
    )
    unlimited = why.get("limits.memory_lock_bytes") == "unlimited"
    yield {
        **_at_least(
            "memory lock limit",
            limits["memory_lock_bytes"],
            LEAST_LOCK_BYTES,
            "bytes",
            "pinning fails beyond it and falls back to pageable memory: ulimit -l unlimited, or --ulimit memlock=-1",
        ),
        **({"found": "unlimited", "ok": True} if unlimited else {}),
    }
    yield _at_most(
        "load of the last minute for each CPU",
        _share(cpu["load_1_minute"], cpu["usable"]),
        MOST_LOAD_PER_CPU,
        "",
        "something else is running: wait for it, or give the run CPUs of its own",
    )
    governor = cpu["governor"]
    yield _doubt(
        "CPU frequency governor",
        governor,
        " or ".join(GOOD_GOVERNORS),
        "",
        None if governor is None else governor in GOOD_GOVERNORS,
        why.get("cpu.governor") or "cpupower frequency-set -g performance, where you may",
    )


def _gpus(environment: Mapping[str, Any]) -> Iterator[Doubt]:
    gpus = environment["gpus"]
    if not gpus:
        why = environment["reasons"].get("gpus") or "NVML shows none to this process"
        yield _doubt("GPUs", 0, 1, "", None, f"nothing can be said of a GPU: {why}")
    for gpu in gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Mapping[str, Any]) -> Iterator[Doubt]:
    name, why = f"GPU {gpu['index']}", gpu["reasons"]
    yield _at_most(
        f"{name}: other processes",
        gpu["other_processes"],
        0,
        "",
        why.get("other_processes")
        or "they share its memory and its link: see nvidia-smi, and wait or take another GPU",
    )
    reasons = gpu["throttle_reasons"]
    yield _doubt(
        f"{name}: throttling",
        None if reasons is None else ", ".join(reasons) or "none",
        "none",
        "",
        None if reasons is None else not reasons,
        why.get("throttle_reasons") or "let it cool, or raise the power limit; then measure again",
    )
    for what, unit in (("generation", ""), ("width", "lanes")):
        yield _link(gpu, name, what, unit)
    yield _at_least(
        f"{name}: clock",
        gpu["sm_clock_mhz"],
        _scaled(gpu["max_sm_clock_mhz"], LEAST_CLOCK_SHARE),
        "MHz",
        why.get("sm_clock_mhz") or "an idle GPU clocks down; where it stays low under load, look at its power limit",
    )


def _link(gpu: Mapping[str, Any], name: str, what: str, unit: str) -> Doubt:
    found, limit = gpu[f"link_{what}"], gpu[f"max_link_{what}"]
    doubt = _at_least(
        f"{name}: PCIe link {what}",
        found,
        limit,
        unit,
        gpu["reasons"].get(f"link_{what}") or "the slot, a riser or another device halves it: see nvidia-smi topo -m",
    )
    if not gpu["link_under_load"] and doubt["ok"] is False:
        # An idle link sleeps at generation 1.
        return {
            **doubt,
            "ok": None,
            "remedy": "read while idle, when the link sleeps: run again where torch sees the GPU",
        }
    return doubt


def _at_least(what: str, found: Any, limit: Any, unit: str, remedy: str) -> Doubt:
    return _doubt(what, found, limit, unit, None if found is None or limit is None else found >= limit, remedy)


def _at_most(what: str, found: Any, limit: Any, unit: str, remedy: str) -> Doubt:
    return _doubt(what, found, limit, unit, None if found is None or limit is None else found <= limit, remedy)


def _doubt(what: str, found: Any, limit: Any, unit: str, ok: bool | None, remedy: str) -> Doubt:
    return {"what": what, "found": found, "limit": limit, "unit": unit, "ok": ok, "remedy": remedy}


def _share(load: float | None, cpus: int | None) -> float | None:
    return None if load is None or not cpus else round(load / cpus, 2)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _shown(value: Any, unit: str) -> str:
    if value is None:
        return "not known"
    return format_bytes(value) if unit == "bytes" and not isinstance(value, str) else f"{value} {unit}".strip()
