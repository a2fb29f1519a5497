"""What a save will cost, before a byte of it is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cases import STATE_ITEM_BYTES, Case
from benchmarks.record import Count
from benchmarks.workload import ShadowTensors, Trainer, build
from packckpt import TransferPlan, plan_transfers, predicted_peaks

if TYPE_CHECKING:
    from typing import Any as BlockPlan  # packckpt gives its blocks no public name

COMPONENTS = 3  # master, exp_avg, exp_avg_sq
# packckpt's commit merges that much at once; two such windows may wait to be written while a third is fetched.
WINDOW_BYTES = 32 << 20
WINDOWS_HELD = 3
# Python's and torch's own memory for one small tensor on the host, its name and its place in a dictionary.
TENSOR_OBJECT_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Prediction:
    """Costs of one save on one rank.

    Attributes:
        optimizer, all: transfers from device to host.
        host_peak_prepare_bytes: over what was resident: the captured block.
        host_peak_finalize_bytes: over what was resident: pages of mapped snapshot files count, since VmHWM counts them,
            though the system can take them back.
        device_peak_bytes: over what was allocated: temporaries of casts and of gapped views.
        disk_bytes: the snapshot, and on the coordinator the checkpoint of all ranks beside it.
        resident_host_bytes, resident_device_bytes: the trainer's own tensors.
    """

    optimizer: Count
    all: Count
    host_peak_prepare_bytes: int
    host_peak_finalize_bytes: int
    device_peak_bytes: int
    disk_bytes: int
    resident_host_bytes: int
    resident_device_bytes: int

    @property
    def host_peak_bytes(self) -> int:
        """The larger of the two host peaks."""
        return max(self.host_peak_prepare_bytes, self.host_peak_finalize_bytes)

    def to_record(self) -> dict[str, int | None]:
        """Return what a record holds under `predicted`."""
        return {
            "host_peak_bytes": self.host_peak_bytes,
            "host_peak_prepare_bytes": self.host_peak_prepare_bytes,
            "host_peak_finalize_bytes": self.host_peak_finalize_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "disk_bytes": self.disk_bytes,
        }


def predict(case: Case, implementation: str, rank: int, world_size: int, device_kind: str) -> Prediction:
    """Predict one save of one rank; the transfers are those of packckpt's own plan."""
    trainer = build(case, rank, ShadowTensors(device_kind))
    plan = plan_transfers(trainer.exports, trainer.state, implementation)  # type: ignore[arg-type]  # checked by Arm
    own = _snapshot_bytes(plan)
    shares = [own] if world_size == 1 else [_share_bytes(case, other) for other in range(world_size)]
    resident = _trainer_bytes(case, trainer)
    on_host = device_kind == "cpu"
    return Prediction(
        optimizer=Count(plan.optimizer_calls, plan.optimizer_bytes),
        all=Count(plan.optimizer_calls + plan.weight_calls, plan.optimizer_bytes + plan.weight_bytes),
        host_peak_prepare_bytes=_prepare_peak_bytes(case, plan, on_host),
        host_peak_finalize_bytes=_finalize_peak_bytes(case, plan, own, shares, rank),
        device_peak_bytes=0 if on_host else _device_peak_bytes(case, plan),
        # Staged, the files of a rank that saves alone are moved, and never stand twice.
        disk_bytes=own + (sum(shares) if rank == 0 and not (plan.path == "staged" and world_size == 1) else 0),
        resident_host_bytes=resident if on_host else 0,
        resident_device_bytes=0 if on_host else resident,
    )


def _snapshot_bytes(plan: TransferPlan) -> int:
    return plan.weight_bytes + plan.optimizer_bytes


def _share_bytes(case: Case, rank: int) -> int:
    """Bytes that another rank's snapshot holds."""
    elements = case.layers * len(case.exported_rows(rank)) * sum(m.rows * m.columns for m in case.matrices)
    return elements * (case.item_bytes + COMPONENTS * STATE_ITEM_BYTES)


def _trainer_bytes(case: Case, trainer: Trainer) -> int:
    """Bytes of parameters, masters and moments; a gapped one is a view of twice as much."""
    tensors = [*trainer.parameter_tensors, *trainer.optimizer_tensors]
    width = 2 if case.layout == "gapped" else 1
    return width * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _prepare_peak_bytes(case: Case, plan: TransferPlan, on_host: bool) -> int:
    """One block is captured, then written: a transposed row is packed one expert at a time.

    Staged, it is the ring, which the first save makes and later ones find resident.
    """
    if plan.path == "staged":
        return predicted_peaks(plan).host_bytes
    row = max(_row_elements(e.parameter.shape) * STATE_ITEM_BYTES for b in plan.blocks for e in b.exports)
    block = max(sum(_captured_sizes(case, block)) for block in plan.blocks)
    tensors = max((1 + COMPONENTS) * sum(1 for _ in block.exports) for block in plan.blocks)
    temporary = _device_peak_bytes(case, plan) if on_host else 0
    return block + row + temporary + tensors * TENSOR_OBJECT_BYTES


def _captured_sizes(case: Case, block: BlockPlan) -> Iterator[int]:
    """Sizes of the host tensors that a path makes of a block: weights by expert, state by expert or packed."""
    for unit in block.units:
        elements, rows = _row_elements(unit.parameter.shape), len(unit.exports)
        yield from (elements * case.item_bytes,) * rows
        state = (elements * STATE_ITEM_BYTES,) * rows if not unit.coalesced else (rows * elements * STATE_ITEM_BYTES,)
        yield from state * COMPONENTS


def _device_peak_bytes(case: Case, plan: TransferPlan) -> int:
    """Bytes of the largest temporary: a cast to float32, and a packed copy of a view with gaps.

    A temporary is one expert on the slice path, a packed parameter where it is coalesced.
    """
    if plan.path == "staged":
        return predicted_peaks(plan).device_bytes
    casts = case.state_dtype != "float32"
    gapped = case.layout == "gapped"
    if not casts and not gapped:
        return 0
    largest = 0
    for block in plan.blocks:
        for unit in block.units:
            rows = len(unit.exports) if unit.coalesced else 1
            largest = max(largest, rows * _row_elements(unit.parameter.shape) * STATE_ITEM_BYTES)
    return largest * (casts + gapped)


def _finalize_peak_bytes(case: Case, plan: TransferPlan, own: int, shares: list[int], rank: int) -> int:
    """Pages of the mapped snapshot; the coordinator holds a window of another rank's tensors besides.

    Staged, the files of a rank that saves alone are moved and not read.
    """
    ring = predicted_peaks(plan).host_bytes if plan.path == "staged" else 0
    if ring and len(shares) == 1:
        return ring
    if len(shares) == 1:
        return own
    # Of a window each rank sends its share, packed; what is the coordinator's own is mapped, not held.
    sent = [min(WINDOW_BYTES * share // sum(shares), share // ((1 + COMPONENTS) * case.layers)) for share in shares]
    return ring + own + WINDOWS_HELD * (sent[rank] if rank else sum(sent[1:]))


def _row_elements(shape: tuple[int, ...]) -> int:
    return shape[-1] * shape[-2]
