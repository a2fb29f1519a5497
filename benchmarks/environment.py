"""The machine and the software, as they are when a run starts and when it ends. No host names, no user names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpus
from benchmarks.clock import now
from benchmarks.codestate import git_commit, git_dirty, package_digest
from benchmarks.devices import cpu_model
from benchmarks.missing import Missing, split

# What decides how torch takes memory.
_ALLOCATOR_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
)
_CGROUP_UNLIMITED = 1 << 60


def capture(scratch: Path) -> dict[str, Any]:
    """Return the environment as `run.json` holds it."""
    reasons: dict[str, str] = {}

    def section(name: str, values: dict[str, Any]) -> dict[str, Any]:
        found, why = split(values)
        reasons.update({f"{name}.{key}": reason for key, reason in why.items()})
        return found

    library = gpus.library()
    driver = gpus.driver_version(library)
    cuda: Any = torch.version.cuda or Missing("this torch was built without CUDA")
    listed = gpus.describe_all(library)
    top, why = split({"gpu_driver": driver, "cuda": cuda, "gpus": listed})
    reasons.update(why)
    return {
        "captured_at": now(),
        "gpus": top["gpus"] or [],
        "gpu_driver": top["gpu_driver"],
        "cuda": top["cuda"],
        "cpu": section("cpu", cpu_facts()),
        "memory": section("memory", memory_facts(scratch)),
        "limits": section("limits", limit_facts()),
        "software": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "packages": installed_packages(),
        },
        "allocator": {
            **{name: os.environ.get(name) for name in _ALLOCATOR_VARIABLES},
            "torch_threads": str(torch.get_num_threads()),
        },
        "git": section("git", {"commit": git_commit(), "dirty": git_dirty()}),
        "code_digests": {name: package_digest(name) for name in ("packckpt", "benchmarks")},
        "reasons": reasons,
    }


def machine_slug() -> str:
    """Return a short name for the kind of machine: the GPU's, or the CPU's with its cores."""
    if torch.cuda.is_available():
        return _slug(torch.cuda.get_device_name(0))
    return f"{_slug(cpu_model() or platform.machine())}-{usable_cpus()}cpu"


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | Missing:
    """Return the memory that can be had without swapping, within the control group's limit."""
    meminfo = _meminfo("MemAvailable")
    limit, used = _cgroup_bytes("memory.max", "memory/memory.limit_in_bytes"), _cgroup_used_bytes()
    if isinstance(limit, Missing) or isinstance(used, Missing):
        return meminfo
    return limit - used if isinstance(meminfo, Missing) else min(meminfo, limit - used)


def cpu_facts() -> dict[str, Any]:
    """Return what is known of the CPU."""
    return {
        "model": cpu_model() or Missing("/proc/cpuinfo names no model"),
        "architecture": platform.machine(),
        "cores": _psutil(lambda psutil: psutil.cpu_count(logical=False)),
        "logical": os.cpu_count(),
        "usable": usable_cpus(),
        "sockets": _sockets(),
        "mhz": _psutil(lambda psutil: psutil.cpu_freq().current),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_1_minute": os.getloadavg()[0],
    }


def memory_facts(scratch: Path) -> dict[str, Any]:
    """Return what is known of memory and of the disk that checkpoints go to."""
    swap_total, swap_free = _meminfo("SwapTotal"), _meminfo("SwapFree")
    disk = os.statvfs(scratch)
    return {
        "total_bytes": _meminfo("MemTotal"),
        "available_bytes": available_bytes(),
        "swap_total_bytes": swap_total,
        "swap_used_bytes": _used(swap_total, swap_free),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "free_scratch_bytes": disk.f_bavail * disk.f_frsize,
        "scratch_filesystem": _filesystem(scratch),
    }


def limit_facts() -> dict[str, Any]:
    """Return what this process may use."""
    return {
        "cgroup_memory_bytes": _cgroup_bytes("memory.max", "memory/memory.limit_in_bytes"),
        "cgroup_cpus": _cgroup_cpus(),
        "memory_lock_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "container": _in_container(),
    }


def installed_packages() -> dict[str, str]:
    """Return every installed distribution with its version."""
    found = ((dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions())
    return dict(sorted({name: version for name, version in found if name}.items(), key=lambda item: item[0].lower()))


def _psutil(ask: Callable[[Any], Any]) -> Any:
    try:
        import psutil
    except ImportError:
        return Missing("psutil is not installed")
    try:
        answer = ask(psutil)
    except (OSError, AttributeError, NotImplementedError) as error:
        return Missing(f"psutil cannot tell: {type(error).__name__}")
    return Missing("psutil cannot tell") if answer is None else answer


def _used(total: int | Missing, free: int | Missing) -> int | Missing:
    if isinstance(total, Missing) or isinstance(free, Missing):
        return total if isinstance(total, Missing) else free
    return total - free


def _meminfo(name: str) -> int | Missing:
    content = _read("/proc/meminfo")
    if isinstance(content, Missing):
        return content
    found = re.search(rf"^{name}:\s+(\d+) kB", content, re.MULTILINE)
    return int(found[1]) * 1024 if found else Missing(f"/proc/meminfo has no {name}")


def _sockets() -> int | Missing:
    content = _read("/proc/cpuinfo")
    if isinstance(content, Missing):
        return content
    found = set(re.findall(r"^physical id\s*:\s*(\d+)", content, re.MULTILINE))
    return len(found) or Missing("/proc/cpuinfo names no sockets")


def _cgroup_bytes(*names: str) -> int | Missing:
    for name in names:
        content = _read(f"/sys/fs/cgroup/{name}")
        if not isinstance(content, Missing):
            unlimited = content == "max" or int(content) >= _CGROUP_UNLIMITED
            return Missing("the control group sets no memory limit") if unlimited else int(content)
    return Missing("no memory control group is mounted")


def _cgroup_used_bytes() -> int | Missing:
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        content = _read(f"/sys/fs/cgroup/{name}")
        if not isinstance(content, Missing):
            return int(content)
    return Missing("no memory control group is mounted")


def _cgroup_cpus() -> float | Missing:
    content = _read("/sys/fs/cgroup/cpu.max")
    if isinstance(content, Missing):
        return Missing("no CPU control group is mounted")
    quota, _, period = content.partition(" ")
    return Missing("the control group sets no CPU limit") if quota == "max" else int(quota) / int(period or 100000)


def _limit(what: int) -> int | Missing:
    soft, _ = resource.getrlimit(what)
    return Missing("unlimited") if soft == resource.RLIM_INFINITY else soft


def _in_container() -> bool | Missing:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    content = _read("/proc/1/cgroup")
    if isinstance(content, Missing):
        return content
    return any(word in content for word in ("docker", "kubepods", "containerd", "libpod", "lxc"))


def _filesystem(path: Path) -> str | Missing:
    """Return the type of the file system, not where it is mounted."""
    content = _read("/proc/self/mounts")
    if isinstance(content, Missing):
        return content
    resolved = str(path.resolve())
    mounts = [line.split()[1:3] for line in content.splitlines()]
    holding = [(point, kind) for point, kind in mounts if (resolved + "/").startswith(point.rstrip("/") + "/")]
    return max(holding, key=lambda item: len(item[0]))[1] if holding else Missing("no mount holds the scratch folder")


def _read(path: str) -> str | Missing:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        return Missing(f"{path}: {error.strerror}")


def _slug(text: str) -> str:
    plain = re.sub(r"\((r|tm)\)", "", text.lower())
    plain = re.sub(r"@.*|\b(cpu|processor|core|gen)\b", " ", plain)
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:32].strip("-")
