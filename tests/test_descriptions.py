"""What ranks tell one another: little for each key, the same after JSON, and no object for each key."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from packckpt import Export, Shard, plan_transfers
from packckpt.descriptions import Description, KeyGroup, group_keys
from packckpt.merge import merge_keys
from tests.builders import Trainer, key_of


def packed(experts: int) -> Trainer:
    trainer = Trainer()
    for layer in range(2):
        trainer.packed("a", experts=experts, layer=layer)
        trainer.packed("b", experts=experts, rows=5, layer=layer)
    return trainer


def test_rows_that_are_alike_share_a_description() -> None:
    trainer = packed(3)
    step_of = {id(parameter): 4 + (number == 3) for number, parameter in enumerate(trainer.parameters)}
    groups = group_keys(trainer.exports, step_of)

    assert [(group.description, group.keys) for group in groups] == [
        (Description(torch.bfloat16, (2, 3), None, 4), [key_of("a", row, layer=n) for n in (0, 1) for row in range(3)]),
        (Description(torch.bfloat16, (2, 5), None, 4), [key_of("b", row, layer=0) for row in range(3)]),
        (Description(torch.bfloat16, (2, 5), None, 5), [key_of("b", row, layer=1) for row in range(3)]),
    ]


def test_rows_of_one_parameter_may_be_different_shards() -> None:
    parameter = torch.arange(24.0).reshape(4, 3, 2)
    shards = [Shard(0, 2, 0), Shard(1, 2, 0), Shard(0, 2, 0), None]
    groups = group_keys([Export(f"k{i}", parameter, i, shard) for i, shard in enumerate(shards)], None)

    assert [(group.description.shard, group.keys) for group in groups] == [
        (Shard(0, 2, 0), ["k0", "k2"]), (Shard(1, 2, 0), ["k1"]), (None, ["k3"]),
    ]  # fmt: skip
    assert {group.description.step for group in groups} == {None}


@pytest.mark.parametrize("shard", [None, Shard(1, 2, 0), Shard(1, 2, 1, (4, 2))], ids=str)
@pytest.mark.parametrize("step", [None, 0, 2**53])
def test_json_and_back(shard: Shard | None, step: int | None) -> None:
    group = KeyGroup(Description(torch.float8_e5m2, (2, 3), shard, step), ["a", "é.layers.0.b"])

    assert KeyGroup.from_json(json.loads(json.dumps(group.to_json()))) == group


def test_no_object_is_kept_for_a_key() -> None:
    """Some for a parameter: ten for each of 3,000 keys start a full collection of the trainer's objects in a save."""

    def kept(experts: int) -> int:
        trainer = packed(experts)
        state = trainer.state
        step_of = {id(parameter): 7 for parameter in trainer.parameters}
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            plan = plan_transfers(trainer.exports, state, "staged")
            groups = group_keys((export for block in plan.blocks for export in block.exports), step_of)
            fields = [group.to_json() for group in groups]
            merged = merge_keys([[KeyGroup.from_json(of_group) for of_group in fields]])
            after = len(gc.get_objects())
        finally:
            gc.enable()
        assert len(merged.compositions) == 4 * experts
        return after - before

    assert kept(4) == kept(400)
