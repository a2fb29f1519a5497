"""Save Mixture-of-Experts optimizer state: one device-to-host copy for each packed parameter and state.

    saver = CheckpointSaver()
    saver.prepare("runs/step-100", exports, AdamState.from_optimizer(optimizer), config)
    ...                                          # the trainer goes on
    saver.finalize("runs/step-100")

The checkpoint format is the one that the trainer reads already; see README.md for what is promised.
"""

from packckpt.checkpoint import Checkpoint, load_checkpoint, restore_checkpoint
from packckpt.errors import (
    CheckpointError,
    ExportError,
    OptimizerError,
    PackckptError,
    RankError,
    SaveError,
)
from packckpt.exports import Export, Shard
from packckpt.optimizer import AdamState, Hyperparameters
from packckpt.peaks import Peaks, predicted_peaks
from packckpt.plan import PATHS, TransferPlan, plan_transfers
from packckpt.saver import CheckpointSaver
from packckpt.transfer import TransferLog
from packckpt.verify import verify_checkpoint

__version__ = "0.1.0"

__all__ = [
    "AdamState",
    "Checkpoint",
    "CheckpointError",
    "CheckpointSaver",
    "Export",
    "ExportError",
    "Hyperparameters",
    "OptimizerError",
    "PATHS",
    "PackckptError",
    "Peaks",
    "RankError",
    "SaveError",
    "Shard",
    "TransferLog",
    "TransferPlan",
    "load_checkpoint",
    "plan_transfers",
    "predicted_peaks",
    "restore_checkpoint",
    "verify_checkpoint",
]
