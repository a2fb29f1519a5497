"""torch's `DefaultStager` on the per-expert views: what comes with torch, beside our paths. It captures only."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.devices import Device
from benchmarks.workload import Trainer
from packckpt import Export

COMPONENTS = ("exp_avg", "exp_avg_sq")


class StagerReference:
    """Stages the same views that the slice path copies, as float32 or as they are: the stager casts nothing."""

    def __init__(self, device: Device) -> None:
        # Imported here: it is slow to load, and no other pass needs it.
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on_gpu = device.kind == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    def stage(self, views: dict[str, torch.Tensor]) -> Any:
        """Copy the views to the host; storages are kept and used again."""
        return self._stager.stage(views)

    def close(self) -> None:
        """Give the staged memory back."""
        self._stager.close()


def views_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weight, master and moments of each export, as views."""
    views: dict[str, torch.Tensor] = {}
    optimizer = trainer.state.optimizer
    for export in trainer.exports:
        master = trainer.state.master_of(export.parameter)
        views[f"lora/{export.key}"] = _row(export, export.parameter)
        views[f"master/{export.key}"] = _row(export, master)
        for component in COMPONENTS:
            views[f"{component}/{export.key}"] = _row(export, optimizer.state[master][component])
    return views


def _row(export: Export, tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return (value if export.expert is None else value[export.expert]).T
