"""What a checkpoint holds, block by block, without reading its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from packckpt.checkpoint import Checkpoint
from packckpt.dtypes import STATE_DTYPE, plain_name
from packckpt.exports import block_of
from packckpt.optimizer import COMPONENTS
from packckpt.tensorfile import TensorSpec


@dataclass(frozen=True, slots=True)
class BlockSummary:
    """One layer block of a checkpoint.

    Attributes:
        name: of the block.
        keys: number of exported keys.
        dtypes: of the exported values.
        weight_bytes, optimizer_bytes: sizes of the exported values and of master and moments.
        steps: the step counts that occur.
    """

    name: str
    keys: int
    dtypes: tuple[str, ...]
    weight_bytes: int
    optimizer_bytes: int
    steps: tuple[int, ...]


def summarize(checkpoint: Checkpoint) -> list[BlockSummary]:
    """Return one entry a block, in block order."""
    blocks: dict[str, list[str]] = {}
    for key in checkpoint.keys:
        blocks.setdefault(block_of(key), []).append(key)
    return [_summarize_block(checkpoint, name, blocks[name]) for name in sorted(blocks)]


def as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything that the manifest and the headers say, as JSON."""
    optimizer = checkpoint.optimizer
    return {
        "path": str(checkpoint.path),
        "digest": checkpoint.digest,
        "config": checkpoint.config,
        "optimizer": None if optimizer is None else optimizer.as_dict(),
        "blocks": [asdict(block) for block in summarize(checkpoint)],
        "keys": [_key_json(checkpoint, key) for key in checkpoint.keys],
    }


def format_bytes(count: int) -> str:
    """Return a size for people: `512 B`, `1.5 KiB`, `3.0 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _key_json(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    spec = checkpoint.spec(key)
    return {
        "key": key,
        "block": block_of(key),
        "dtype": plain_name(spec.dtype),
        "shape": list(spec.shape),
        "bytes": spec.bytes,
        "step": None if checkpoint.optimizer is None else checkpoint.step(key),
    }


def _summarize_block(checkpoint: Checkpoint, name: str, keys: list[str]) -> BlockSummary:
    specs = [checkpoint.spec(key) for key in keys]
    has_state = checkpoint.optimizer is not None
    return BlockSummary(
        name=name,
        keys=len(keys),
        dtypes=tuple(sorted({plain_name(spec.dtype) for spec in specs})),
        weight_bytes=sum(spec.bytes for spec in specs),
        optimizer_bytes=sum(_state_bytes(spec) for spec in specs) if has_state else 0,
        steps=tuple(sorted({checkpoint.step(key) for key in keys})) if has_state else (),
    )


def _state_bytes(spec: TensorSpec) -> int:
    return len(COMPONENTS) * TensorSpec(STATE_DTYPE, spec.shape).bytes
