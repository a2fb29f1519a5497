"""Slice and coalesced give one and the same finalized directory, from the host and from a device.

Each control is also held against plain torch, so that two paths that are wrong alike do not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import Export, PackckptError, SaveError, Shard, plan_transfers
from tests import emulated
from tests.builders import (
    MISSING,
    PATHS,
    STRIDES,
    Trainer,
    assert_same_content,
    expected_content,
    file_bytes,
    key_of,
    names_in,
    read_content,
    save,
)
from tests.test_plan import LAYOUTS, interleaved

emulated.install_or_skip()


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def packed(experts: int = 4, **kwargs: Any) -> Callable[[Any], Trainer]:
    """Two packed parameters and a dense one in each of the layers 2 and 10, and one outside any layer."""

    def make(place: Any) -> Trainer:
        trainer = Trainer(place)
        for layer in (2, 10, None):
            trainer.packed("gate_up_proj", experts, rows=2, columns=6, layer=layer, **kwargs)
            trainer.packed("down_proj", experts, layer=layer, **kwargs)
            trainer.dense("q_proj", layer=layer, **kwargs)
        return trainer

    return make


def rows(*wanted: int, experts: int = 6) -> Callable[[Any], Trainer]:
    def make(place: Any) -> Trainer:
        trainer = Trainer(place)
        for layer in (2, 10):
            trainer.export_rows("a", trainer.parameter(experts, 3, 2), wanted, layer=layer)
            trainer.packed("b", layer=layer)
        return trainer

    return make


def vacant(place: Any) -> Trainer:
    """Rows under global expert ids, some of them vacant, as a rank of expert parallelism exports them."""
    trainer = Trainer(place)
    for name in ("gate_up_proj", "down_proj"):
        made = trainer.parameter(6, 3, 2)
        for row, expert in enumerate([3, None, 0, 7, None, 1]):
            if expert is not None:
                trainer.exports.append(Export(key_of(name, expert), made, expert=row))
    return trainer


def renumbered(place: Any) -> Trainer:
    """All rows in order under other global ids: coalesced, and sorted otherwise in the file."""
    trainer = Trainer(place)
    made = trainer.parameter(4, 3, 2)
    trainer.exports.extend(Export(key_of("a", 11 - row), made, expert=row) for row in range(4))
    return trainer


def mixed_dtypes(place: Any) -> Trainer:
    trainer = Trainer(place)
    for number, dtype in enumerate([torch.float16, torch.bfloat16, torch.float32]):
        trainer.packed(f"a{number}", dtype=dtype, state_dtype=dtype)
        trainer.packed(f"b{number}", dtype=dtype)
    return trainer


def dense_between(place: Any) -> Trainer:
    trainer = Trainer(place)
    made = trainer.parameter(4, 3, 2)
    trainer.export_rows("a", made, [0, 1])
    trainer.dense("router")
    trainer.export_rows("a", made, [2, 3])
    return trainer


def whole_shards(place: Any) -> Trainer:
    """One part of one, with components: what a tensor-parallel trainer exports on a single rank."""
    trainer = Trainer(place)
    made = trainer.parameter(4, 3, 6)
    trainer.export_rows("a", made, range(4), shard=Shard(0, 1, 0, (2, 4)))
    trainer.exports.append(Export(key_of("b"), trainer.parameter(3, 2), shard=Shard(0, 1, 1)))
    return trainer


def real_steps(place: Any) -> Trainer:
    trainer = Trainer(place)
    trainer.packed("a", step=place(torch.tensor(3.0)))
    trainer.packed("b", step=torch.tensor(5))
    trainer.packed("c", step=7)
    trainer.packed("d", step=None)
    return trainer


def on(make: Callable[[], Trainer]) -> Callable[[Any], Trainer]:
    """A layout of the plan's tests, which are built on the host."""
    return lambda place: make()


CONTROLS: dict[str, Callable[[Any], Trainer]] = {
    "full": packed(),
    "one expert": packed(experts=1),
    "sparse": rows(0, 2, 4),
    "subset": rows(0, 1, 2),
    "reversed": rows(5, 4, 3, 2, 1, 0),
    "rotated": rows(1, 2, 3, 4, 5, 0),
    "single row": rows(3),
    "vacant": vacant,
    "renumbered": renumbered,
    "dense between rows": dense_between,
    "mixed dtypes": mixed_dtypes,
    "whole shards": whole_shards,
    "steps of every kind": real_steps,
    "never stepped": packed(missing=MISSING["both"], step=None),
    "never stepped, on the host": packed(missing=MISSING["both"], step=None, own_master=True),
    **{f"moments missing: {name}": packed(missing=names) for name, names in MISSING.items()},
    **{f"strides: {name}": packed(strides=strides) for name, strides in STRIDES.items()},
    "strides: expanded": packed(strides=lambda t: t[:1].expand_as(t)),
    "strides: reversed axes": packed(
        strides=lambda t: t.permute(*range(t.dim() - 1, -1, -1)).contiguous().permute(*range(t.dim() - 1, -1, -1))
    ),
    **{
        f"{state}, parameters {dtype}"[6:].replace("torch.", ""): packed(dtype=dtype, state_dtype=state)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for state in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    },
    "own masters in float32": packed(dtype=torch.float32, own_master=True),
    "own masters in bfloat16": packed(dtype=torch.bfloat16, state_dtype=torch.bfloat16, own_master=True),
    "gapped bfloat16": packed(strides=STRIDES["gapped"], state_dtype=torch.bfloat16),
    "transposed bfloat16 without moments": packed(
        strides=STRIDES["transposed"], state_dtype=torch.bfloat16, missing=MISSING["both"]
    ),
    "interleaved": on(interleaved),
    **{f"plan: {name}": on(make) for name, (make, *_) in LAYOUTS.items()},
}


def test_there_are_enough_controls() -> None:
    assert len(CONTROLS) >= 27


@pytest.mark.filterwarnings("ignore:optimizer state is float64")
@pytest.mark.parametrize("place", [host, emulated.to_device], ids=["host", "device"])
@pytest.mark.parametrize("name", CONTROLS)
def test_both_paths_write_the_same_directory(name: str, place: Any, tmp_path: Path) -> None:
    trainer = CONTROLS[name](place)
    expected = expected_content(trainer)
    digests = [save(tmp_path / path, trainer, path) for path in PATHS]

    assert digests[0] == digests[1]
    assert file_bytes(tmp_path / "slice") == file_bytes(tmp_path / "coalesced")
    assert_same_content(read_content(tmp_path / "coalesced"), expected)


@pytest.mark.parametrize("name", ["full", "sparse", "strides: gapped", "never stepped"])
def test_host_and_device_write_the_same_directory(name: str, tmp_path: Path) -> None:
    save(tmp_path / "host", CONTROLS[name](host))
    save(tmp_path / "device", CONTROLS[name](emulated.to_device))

    assert file_bytes(tmp_path / "host") == file_bytes(tmp_path / "device")


def test_the_controls_reach_both_ways_of_copying() -> None:
    plans = {name: plan_transfers(t.exports, t.state) for name, make in CONTROLS.items() for t in [make(host)]}
    coalesced = {name for name, plan in plans.items() if any(p.coalesced for p in plan.parameters)}

    assert len(coalesced) >= 20
    assert len(set(plans) - coalesced) >= 10


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("packed_parameter", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_part_of_two_is_incomplete_on_one_rank(
    path: Any, dim: int, packed_parameter: bool, rank: int, tmp_path: Path
) -> None:
    trainer = Trainer()
    shard = Shard(rank, 2, dim)
    if packed_parameter:
        trainer.export_rows("a", trainer.parameter(2, 3, 2), range(2), shard=shard)
    else:
        trainer.exports.append(Export(key_of("a"), trainer.parameter(3, 2), shard=shard))

    with pytest.raises(
        SaveError,
        match=rf"^{trainer.exports[0].key}: found shards \[{rank}\] of 2; no rank exports sh"
        rf"ard {1 - rank}",
    ):
        save(tmp_path / "new" / "c", trainer, path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("path", PATHS)
def test_nothing_to_save_is_refused_on_one_rank(path: Any, tmp_path: Path) -> None:
    with pytest.raises(PackckptError, match="no rank exports anything; there is nothing to save"):
        save(tmp_path / "c", Trainer(), path, with_state=False)
    assert names_in(tmp_path) == []
