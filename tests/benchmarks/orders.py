"""Orders for workers that run inside the test process or in a process of their own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import Concurrency, Pass
from benchmarks.task import Order, Task

TINY = "olmoe-1b-7b/lora1/ep8/l1/bfloat16"  # 8 experts, 6 packed parameters, 48 exports


def make_order(
    scratch: Path,
    implementation: str,
    passes: tuple[Pass, ...],
    *,
    case_id: str = TINY,
    path: str | None = None,
    device: str = "cpu",
    saves: int = 3,
    world_size: int = 1,
    ranks: tuple[int, ...] | None = None,
    concurrency: Concurrency = "together",
    imports: tuple[str, ...] = (),
) -> Order:
    everyone = tuple(range(world_size)) if ranks is None else ranks
    task = Task(case_id, path or implementation, implementation, passes, 0, world_size, everyone, concurrency, 0)
    return Order(
        task=task,
        device=device,
        share_device=False,
        saves=saves,
        memory_saves=2,
        touch_bytes=0,
        durable=False,
        scratch=str(scratch),
        imports=imports,
        threads=1,
        timeout_seconds=60,
    )
