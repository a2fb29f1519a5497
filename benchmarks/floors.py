"""How near a save and a restore come to what the machine can do at all: hashing and writing the same bytes once.

`python -m benchmarks floors` alternates everything that it compares within one process, and prints ratios of medians:
no absolute time of a shared machine says anything by itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.cases import parse_case
from benchmarks.paths import SAVER_PATHS
from benchmarks.units import format_bytes
from benchmarks.workload import RealTensors, Trainer, build
from packckpt import CheckpointSaver, load_checkpoint, restore_checkpoint

T = TypeVar("T")
_PIECE_BYTES = 8 << 20
_READ_BYTES = 1 << 20  # the quickest of 256 KiB, 1 MiB and 8 MiB: still in the cache when it is hashed


@dataclass(slots=True)
class Samples:
    """Seconds of each thing that is compared, by name, one sample a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the time of the block to the samples of a name."""
        begin = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def median(self, name: str) -> float:
        """Return the median of a name's samples."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, *bases: str) -> float:
        """Return the ratio of a median to the sum of others."""
        return self.median(name) / sum(map(self.median, bases))


def measure(case: str, rounds: int, scratch: Path) -> tuple[Samples, int]:
    """Save on every path, restore, hash and write the same bytes, in turn; one round more goes before and is dropped.

    Returns:
        the samples, and the bytes of one checkpoint's tensor files.
    """
    trainer = build(parse_case(case), 0, RealTensors(torch.device("cpu"), 0))
    samples = Samples()
    root = Path(tempfile.mkdtemp(dir=scratch))
    savers = {path: CheckpointSaver(path, durable=False) for path in SAVER_PATHS}
    size_bytes = 0
    try:
        for number in range(rounds + 1):
            if number == 1:
                samples = Samples()
            # A B C, then C B A: a drift of the machine meets every path alike.
            for path in SAVER_PATHS if number % 2 else SAVER_PATHS[::-1]:
                _save(samples, savers[path], path, root / "save", trainer)
            data = _read(root / "save")
            size_bytes = sum(map(len, data.values()))
            _floors(samples, data, root / "plain", root / "save")
            del data
            _restore(samples, root / "save", trainer)
            shutil.rmtree(root / "save")
    finally:
        for saver in savers.values():
            saver.close()
        shutil.rmtree(root)
    return samples, size_bytes


def report(samples: Samples, size_bytes: int) -> str:
    """Return what was measured, as text: medians, then ratios: of what is wanted, and of all that has to be done.

    Hashing, transposing and a good part of writing are work for the CPU, so that a save can hardly be quicker than
    their sum, less what several cores do at once.
    """
    lines = [f"{format_bytes(size_bytes)} of tensors, {len(samples.seconds['hash'])} rounds, nothing synced", ""]
    lines += [
        f"  {name:<22} {samples.median(name):8.3f} s  ({min(values):.3f} to {max(values):.3f})"
        for name, values in samples.seconds.items()
    ]
    floor = max("hash", "write", key=samples.median)
    claims: list[tuple[str, tuple[str, ...], str]] = [
        ("staged save", ("slice save",), " (wanted: at most 0.33)"),
        ("staged save", (floor,), " (wanted: at most 2.00)"),
        ("staged save", ("hash", "write", "transpose"), ""),
        ("restore", ("read and hash",), " (wanted: at most 1.50)"),
        ("restore", ("read and hash", "transpose"), ""),
        ("load, then restore", ("read and hash",), ""),
    ]
    lines.append("")
    lines += [
        f"  {name} / {' + '.join(bases)}: {samples.ratio(name, *bases):.2f}{wanted}"
        for name, bases, wanted in claims
        if name in samples.seconds
    ]
    return "\n".join(lines)


def _save(samples: Samples, saver: CheckpointSaver, path: str, where: Path, trainer: Trainer) -> None:
    shutil.rmtree(where, ignore_errors=True)
    with samples.time(f"{path} save"):
        with samples.time(f"{path} prepare"):
            saver.prepare(where, trainer.exports, trainer.state, trainer.config)
        saver.finalize(where)


def _read(where: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(where.rglob("*.safetensors"))}


def _floors(samples: Samples, data: dict[Path, bytes], plain: Path, where: Path) -> None:
    with samples.time("hash"):
        _on_all_cores(lambda content: hashlib.blake2b(content, digest_size=32).digest(), _halves(list(data.values())))
    with samples.time("write"), open(plain, "wb", buffering=0) as file:
        for content in data.values():
            file.write(content)
    plain.unlink()
    with samples.time("read and hash"):
        _on_all_cores(_hash_file, list(data))
    pieces = [np.frombuffer(piece[: len(piece) // 64 * 64], np.int32) for piece in _halves(list(data.values()))]
    places = [(piece, np.zeros_like(piece)) for piece in pieces]
    with samples.time("transpose"):
        _on_all_cores(_transpose, places)


def _restore(samples: Samples, where: Path, trainer: Trainer) -> None:
    pairs = [(export.parameter, trainer.state.master_of(export.parameter)) for export in trainer.exports]
    masters = list({id(parameter): (parameter, master) for parameter, master in pairs}.values())
    with samples.time("restore"):
        restore_checkpoint(where, trainer.exports, trainer.state.optimizer, masters).close()
    with samples.time("load, then restore"), load_checkpoint(where) as checkpoint:
        checkpoint.restore(trainer.exports, trainer.state.optimizer, masters)


def _halves(contents: list[bytes]) -> list[memoryview]:
    """Cut into equal pieces, so that every core has as much to do."""
    pieces = [memoryview(content) for content in contents]
    return [piece[at : at + _PIECE_BYTES] for piece in pieces for at in range(0, len(piece), _PIECE_BYTES)]


def _transpose(place: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> None:
    """Copy the transposes of matrices like those of an adapter of rank 8."""
    source, destination = place
    rows = math.gcd(len(source), 8 * 2048) // 8
    np.copyto(destination.reshape(-1, rows, 8), source.reshape(-1, 8, rows).transpose(0, 2, 1))


def _on_all_cores(work: Callable[[T], object], items: list[T]) -> None:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(work, items))


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
