"""NVML, one GPU at a time, chosen by UUID; whatever it does not tell is missing with a reason."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.missing import Missing

_INVALID_INDEX = re.compile(r"-\d+")


class VisibleDeviceError(ValueError):
    """CUDA_VISIBLE_DEVICES names what is not there."""


class Library:
    """NVML, opened; `module` is pynvml or a fake of it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        module.nvmlInit()

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return NVML's answer, or why there is none. Never raises for what NVML refuses."""
        call = getattr(self._module, function, None)
        if call is None:
            return Missing(f"this pynvml has no {function}")
        try:
            answer = call(*arguments)
        except self._module.NVMLError as error:
            return Missing(f"{function}: {_plain(error)}")
        return Missing(f"{function}: NVML answers nothing here") if answer is None else answer

    def constant(self, name: str) -> Any:
        """Return one of pynvml's constants, or None."""
        return getattr(self._module, name, None)

    def handles(self) -> list[Any] | Missing:
        """Return the handles of all GPUs, in NVML's order (by PCI bus)."""
        count = self.ask("nvmlDeviceGetCount")
        if isinstance(count, Missing):
            return count
        found = [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        return [handle for handle in found if not isinstance(handle, Missing)]


class Gpu:
    """One GPU (or MIG instance)."""

    def __init__(self, library: Library, handle: Any) -> None:
        self.library = library
        self.handle = handle

    def ask(self, function: str, *arguments: Any) -> Any:
        """Ask NVML about this GPU; see `Library.ask`."""
        return self.library.ask(function, self.handle, *arguments)

    @property
    def uuid(self) -> str | Missing:
        """The UUID as NVML writes it: `GPU-...` or `MIG-...`."""
        answer = self.ask("nvmlDeviceGetUUID")
        return answer if isinstance(answer, Missing) else _text(answer)

    def used_bytes(self) -> int | Missing:
        """Return the memory in use on the whole GPU. Per process it would be wrong in containers, absent under MIG."""
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        if isinstance(memory, Missing):
            return memory
        used = getattr(memory, "used", None)
        return Missing("nvmlDeviceGetMemoryInfo: tells no used memory") if used is None else int(used)

    def energy_joules(self) -> float | Missing:
        """Return the energy since the driver was loaded."""
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return millijoules if isinstance(millijoules, Missing) else millijoules / 1000

    def other_processes(self, own: Sequence[int] = ()) -> int | Missing:
        """Return how many processes compute on the GPU, this one and its children not counted."""
        found = self.ask("nvmlDeviceGetComputeRunningProcesses")
        return found if isinstance(found, Missing) else sum(process.pid not in own for process in found)


def load() -> Library | Missing:
    """Open NVML, or say why it cannot be."""
    try:
        with warnings.catch_warnings():
            # The package of the same name that nvidia-ml-py replaced says so at import; it works as well.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml
    except ImportError:
        return Missing("nvidia-ml-py is not installed")
    return open_library(pynvml)


def open_library(module: Any) -> Library | Missing:
    """Open NVML through a module that looks like pynvml."""
    try:
        return Library(module)
    except module.NVMLError as error:
        return Missing(f"NVML cannot be opened: {_plain(error)}")


def open_gpu(uuid: str | Missing, library: Library | Missing | None = None) -> Gpu | Missing:
    """Return the GPU of that UUID. NVML's index is not CUDA's: an index would find another GPU."""
    if isinstance(uuid, Missing):
        return uuid
    library = load() if library is None else library
    if isinstance(library, Missing):
        return library
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    answer: Any = Missing("no UUID")
    for name in names:
        answer = library.ask("nvmlDeviceGetHandleByUUID", name)
        if not isinstance(answer, Missing):
            return Gpu(library, answer)
    return Missing(f"NVML does not know the GPU that CUDA uses: {answer.reason}")


def used_bytes(gpu: Gpu | Missing) -> int | Missing:
    """Return the memory in use on a GPU that may be missing."""
    return gpu if isinstance(gpu, Missing) else gpu.used_bytes()


def visible_uuids(visible: str | None, installed: Sequence[str], instances: Sequence[str] = ()) -> list[str]:
    """Return the UUIDs that CUDA_VISIBLE_DEVICES leaves to a process, in CUDA's order.

    Args:
        visible: the variable's value; None: not set, everything is visible.
        installed: UUIDs of the GPUs in PCI order (CUDA_DEVICE_ORDER=PCI_BUS_ID).
        instances: UUIDs of MIG instances.

    Raises:
        VisibleDeviceError: an entry that is no device; CUDA would silently leave it and all after it out.
    """
    if visible is None:
        return list(installed)
    chosen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or _INVALID_INDEX.fullmatch(entry):
            break  # CUDA stops here, on purpose: `-1` and an empty value hide everything
        chosen.append(_uuid_of(entry, installed, instances))
    return chosen


def _uuid_of(entry: str, installed: Sequence[str], instances: Sequence[str]) -> str:
    if entry.isdigit():
        if int(entry) < len(installed):
            return installed[int(entry)]
        raise VisibleDeviceError(
            f"CUDA_VISIBLE_DEVICES holds {entry}; expected 0 to {len(installed) - 1}, or a UUID of `nvidia-smi -L`"
        )
    found = [uuid for uuid in (*installed, *instances) if uuid.lower().startswith(entry.lower())]
    if len(found) == 1 and entry.upper().startswith(("GPU-", "MIG-")):
        return found[0]
    what = "which several devices match" if len(found) > 1 else "which no device matches"
    raise VisibleDeviceError(f"CUDA_VISIBLE_DEVICES holds {entry}, {what}; see `nvidia-smi -L`")


def hash_uuid(uuid: str) -> str:
    """Return a name for a GPU by which it is known again and from which its UUID cannot be told."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
    return hashlib.blake2b(bare.encode(), digest_size=8, person=b"packckpt-gpu").hexdigest()


def each(gpu: Gpu, questions: dict[str, Callable[[Gpu], Any]]) -> dict[str, Any]:
    """Ask several questions of one GPU."""
    return {name: question(gpu) for name, question in questions.items()}


def _plain(error: BaseException) -> str:
    return f"{type(error).__name__.removeprefix('NVMLError_')}: {error}"


def _text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)
