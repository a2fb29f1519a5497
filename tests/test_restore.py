"""Restore: from a verified checkpoint (all of it or nothing), or while it is read and digested, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import (
    AdamState,
    CheckpointError,
    CheckpointSaver,
    Export,
    ExportError,
    OptimizerError,
    PackckptError,
    Shard,
    load_checkpoint,
    restore_checkpoint,
    verify_checkpoint,
)
from packckpt.filepass import FilePass
from packckpt.manifest import file_digest
from packckpt.merge import cut_shard
from tests import emulated
from tests.builders import (
    CONFIG,
    MOMENTS,
    PREFIX,
    STRIDES,
    Trainer,
    allocated_on_device,
    arange,
    assert_same_content,
    assert_same_tensor,
    bytes_of,
    expected_content,
    key_of,
    save,
)

emulated.install_or_skip()

Saved = dict[int, torch.Tensor]
Restore = Callable[..., None]


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def make(place: Any = host, *, strides: str = "contiguous", **kwargs: Any) -> Trainer:
    """Two packed parameters and a dense one, in two layers."""
    trainer = Trainer(place)
    for layer, step in ((0, 7), (1, 9)):
        options = {"step": place(torch.tensor(float(step))), "strides": STRIDES[strides], **kwargs}
        trainer.packed("a", layer=layer, **options)
        trainer.packed("b", layer=layer, rows=2, columns=5, **options)
        trainer.dense("c", layer=layer, **options)
    return trainer


def scrambled(trainer: Trainer) -> Trainer:
    """Change every value and step, so that only a restore can bring them back."""
    with torch.no_grad():
        for tensor in trainer.tensors():
            tensor.mul_(0).add_(5)
    return trainer


def everything(trainer: Trainer) -> list[tuple[str, Any]]:
    """Every tensor and number that a restore could change, as bytes."""
    found: list[tuple[str, Any]] = []
    for parameter in trainer.parameters:
        found.append(("parameter", bytes_of(parameter)))
        for group in trainer.optimizer.param_groups:
            for held in group["params"]:
                found.append(("master", bytes_of(held)))
                state = trainer.optimizer.state.get(held, {})
                found.extend(
                    (name, bytes_of(value) if isinstance(value, torch.Tensor) else value)
                    for name, value in sorted(state.items())
                )
    return [*found, ("groups", repr([{k: v for k, v in g.items() if k != "params"} for g in groups_of(trainer)]))]


def groups_of(trainer: Trainer) -> list[dict[str, Any]]:
    return trainer.optimizer.param_groups


def from_verified(path: Path, *what: Any, **kwargs: Any) -> None:
    with load_checkpoint(path) as checkpoint:
        checkpoint.restore(*what, **kwargs)


def in_one_reading(path: Path, *what: Any, **kwargs: Any) -> None:
    restore_checkpoint(path, *what, **kwargs).close()


@pytest.fixture(params=[from_verified, in_one_reading])
def restore_from(request: pytest.FixtureRequest) -> Restore:
    """Restore what the arguments say, either way."""
    way: Restore = request.param
    return way


@pytest.fixture
def restore(restore_from: Restore) -> Restore:
    """Restore a trainer, either way."""

    def into(path: Path, trainer: Trainer, **kwargs: Any) -> None:
        restore_from(path, trainer.exports, trainer.optimizer, trainer.masters, **kwargs)

    return into


def now_held(trainer: Trainer) -> dict[str, torch.Tensor]:
    """As `expected_content`, from what the optimizer holds now (a restore replaces steps and adds moments)."""
    for master in trainer._states:
        trainer._states[master] = dict(trainer.optimizer.state.get(master, {}))
    return expected_content(trainer)


def flip(path: Path, position: int) -> None:
    """Change a bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


PLACES = {"host": host, "device": emulated.to_device}


class TestEverythingComesBack:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("strides", STRIDES)
    @pytest.mark.parametrize("own_master", [False, True])
    def test_bit_for_bit(self, place: str, strides: str, own_master: bool, tmp_path: Path, restore: Restore) -> None:
        trainer = make(PLACES[place], strides=strides, own_master=own_master)
        expected = expected_content(trainer)
        layouts = [tensor.stride() for tensor in trainer.tensors() if tensor.dim()]
        pointers = [tensor.data_ptr() for tensor in trainer.parameters]
        save(tmp_path / "c", trainer)
        restore(tmp_path / "c", scrambled(trainer))

        assert_same_content(now_held(trainer), expected)
        assert [tensor.stride() for tensor in trainer.tensors() if tensor.dim()] == layouts
        assert [tensor.data_ptr() for tensor in trainer.parameters] == pointers, "parameters are written in place"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_narrow_state_is_widened_and_narrowed_without_loss(
        self, dtype: torch.dtype, state_dtype: torch.dtype, tmp_path: Path, restore: Restore
    ) -> None:
        trainer = make(dtype=dtype, state_dtype=state_dtype)
        before = everything(trainer)
        save(tmp_path / "c", trainer)
        restore(tmp_path / "c", scrambled(trainer))

        assert everything(trainer) == before

    def test_in_another_order_of_exports(self, tmp_path: Path, restore: Restore) -> None:
        trainer = make()
        expected = expected_content(trainer)
        save(tmp_path / "c", trainer)
        scrambled(trainer).exports.reverse()
        restore(tmp_path / "c", trainer)

        assert_same_content(now_held(trainer), expected)

    def test_into_an_optimizer_that_never_stepped(self, tmp_path: Path, restore: Restore) -> None:
        trainer = make()
        expected = expected_content(trainer)
        save(tmp_path / "c", trainer)
        fresh = make(missing=MOMENTS, step=None)
        assert not fresh.optimizer.state
        restore(tmp_path / "c", fresh)

        assert_same_content(now_held(fresh), expected)
        for parameter in fresh.parameters:
            held = fresh.held(parameter)
            assert held["exp_avg"].stride() == held["master"].stride()
            assert (held["step"].dtype, held["step"].shape) == (torch.float32, ())

    def test_state_that_was_missing_when_saved_comes_back_as_zeros(self, tmp_path: Path, restore: Restore) -> None:
        trainer = make(missing=MOMENTS, step=None)
        save(tmp_path / "c", trainer)
        other = make()
        restore(tmp_path / "c", other)

        content = now_held(other)
        assert_same_content(content, expected_content(make(missing=MOMENTS, step=None)))
        assert content[f"step/{key_of('a', 0)}"].item() == 0

    def test_without_an_optimizer(self, tmp_path: Path, restore_from: Restore) -> None:
        trainer = make()
        expected = expected_content(trainer)
        save(tmp_path / "c", trainer, with_state=False)
        held = [bytes_of(trainer.held(p)["exp_avg"]) for p in trainer.parameters]
        with torch.no_grad():
            for parameter in trainer.parameters:
                parameter.zero_()
        restore_from(tmp_path / "c", trainer.exports, None)

        assert_same_content(now_held(trainer), expected)
        assert [bytes_of(trainer.held(p)["exp_avg"]) for p in trainer.parameters] == held

    def test_weights_alone_from_a_checkpoint_with_an_optimizer(self, tmp_path: Path, restore_from: Restore) -> None:
        trainer = make()
        save(tmp_path / "c", trainer)
        before = everything(trainer)
        with torch.no_grad():
            for parameter in trainer.parameters:
                parameter.zero_()
        restore_from(tmp_path / "c", trainer.exports, None)

        assert everything(trainer) == before

    def test_leaves_gradients_and_autograd_alone(self, tmp_path: Path, restore: Restore) -> None:
        trainer = make(own_master=True, dtype=torch.float32)
        save(tmp_path / "c", trainer)
        for parameter in trainer.parameters:
            parameter.grad = torch.ones_like(parameter)
        restore(tmp_path / "c", trainer)

        assert all(p.requires_grad and p.grad_fn is None for p in trainer.parameters)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in trainer.parameters if p.grad is not None)


class TestCopies:
    @pytest.mark.parametrize("strides", ["contiguous", "transposed"])
    def test_one_for_each_file_that_fits_a_chunk(self, strides: str, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", experts=8, rows=4, columns=6, strides=STRIDES[strides])
        trainer.packed("b", experts=8, rows=3, columns=4, strides=STRIDES[strides])
        expected = expected_content(trainer)
        save(tmp_path / "c", trainer)
        scrambled(trainer)
        with emulated.observe() as ledger:
            restore(tmp_path / "c", trainer)

        elements = 8 * (24 + 12)
        assert sorted(event.shape for event in ledger.h2d) == [(2 * elements,), *[(4 * elements,)] * 3]
        assert ledger.h2d_bytes == 8 * (24 + 12) * (2 + 3 * 4)
        assert (ledger.d2h_calls, ledger.item_calls) == (0, 0)
        assert_same_content(now_held(trainer), expected)

    def test_of_the_parameter_alone_where_it_is_its_own_master(self, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", experts=8, own_master=True, dtype=torch.float32)
        save(tmp_path / "c", trainer)
        with emulated.observe() as ledger:
            restore(tmp_path / "c", trainer)

        assert ledger.h2d_calls == 3

    def test_narrow_state_crosses_as_it_is_in_the_file_and_is_converted_there(
        self, tmp_path: Path, restore: Restore
    ) -> None:
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", experts=8, rows=4, columns=6, state_dtype=torch.bfloat16)
        save(tmp_path / "c", trainer)
        before = allocated_on_device()
        emulated.reset_peak()
        with emulated.observe() as ledger:
            restore(tmp_path / "c", trainer)

        assert ledger.h2d_bytes == 8 * 24 * (2 + 3 * 4)
        # Transposed and converted on the device: one chunk at a time.
        assert emulated.max_memory_allocated() - before == 8 * 24 * 4

    def test_device_steps_go_back_to_the_device(self, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer(emulated.to_device)
        trainer.packed("a", step=emulated.to_device(torch.tensor(7.0)))
        save(tmp_path / "c", trainer)
        with emulated.observe() as ledger:
            restore(tmp_path / "c", scrambled(trainer))

        assert ledger.h2d_calls == 5
        step = trainer.optimizer.state[trainer.masters[0][1]]["step"]
        assert (step.device.type, emulated.to_host(step).item()) == ("emu", 7.0)


class TestSomeRows:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("rows", [[2], [3, 1], [0, 3]])
    def test_sparse_exports_leave_the_other_rows(
        self, place: str, rows: list[int], tmp_path: Path, restore: Restore
    ) -> None:
        trainer = Trainer(PLACES[place])
        made = trainer.parameter(4, 3, 2)
        trainer.export_rows("a", made, rows)
        saved = expected_content(trainer)
        save(tmp_path / "c", trainer)
        restore(tmp_path / "c", scrambled(trainer))

        assert_same_content(now_held(trainer), saved)
        held = trainer.held(made)
        for tensor in (made, held["master"], held["exp_avg"], held["exp_avg_sq"]):
            for row in set(range(4)) - set(rows):
                assert emulated.to_host(tensor)[row].unique().tolist() == [5.0]

    def test_of_one_checkpoint_on_a_rank_that_holds_a_part(self, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer()
        trainer.packed("a", experts=4)
        expected = expected_content(trainer)
        save(tmp_path / "c", trainer)
        part = Trainer()
        part.parameter(2, 3, 2, missing=MOMENTS, step=None)
        part.exports = [Export(key_of("a", 2 + row), part.parameters[0], expert=row) for row in range(2)]

        with pytest.raises(ExportError, match=r"c: holds .*experts.0.a.*, which no export names; .* subset=True"):
            restore(tmp_path / "c", part)
        restore(tmp_path / "c", part, subset=True)
        assert_same_content(now_held(part), {k: v for k, v in expected.items() if "experts.2" in k or "experts.3" in k})

    def test_moments_that_are_made_are_zero_in_the_other_rows(self, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer()
        trainer.export_rows("a", trainer.parameter(4, 3, 2), [1])
        save(tmp_path / "c", trainer)
        fresh = Trainer()
        made = fresh.parameter(4, 3, 2, missing=MOMENTS, step=None)
        fresh.export_rows("a", made, [1])
        restore(tmp_path / "c", fresh)
        held = fresh.optimizer.state[fresh.held(made)["master"]]

        for moment in MOMENTS:
            assert held[moment][[0, 2, 3]].abs().sum() == 0
            assert held[moment][1].abs().sum() > 0


class TestShards:
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("components", [None, (6, 12)])
    @pytest.mark.parametrize("packed", [False, True])
    def test_are_cut_back(
        self,
        dim: int,
        world_size: int,
        components: tuple[int, ...] | None,
        packed: bool,
        tmp_path: Path,
        restore: Restore,
    ) -> None:
        whole = Trainer()
        if packed:
            whole.packed("a", experts=2, rows=18, columns=18)
        else:
            whole.dense("a", rows=18, columns=18)
        expected = expected_content(whole)
        save(tmp_path / "c", whole)
        for rank in range(world_size):
            part = Trainer()
            shard = Shard(rank, world_size, dim, components)
            own = 18 // world_size
            shape = (18, own) if dim == 0 else (own, 18)  # [in, out]; dim counts on the transpose
            if packed:
                part.export_rows("a", part.parameter(2, *shape), range(2), shard=shard)
            else:
                part.exports.append(Export(key_of("a"), part.parameter(*shape), shard=shard))
            restore(tmp_path / "c", scrambled(part))
            for name, value in now_held(part).items():
                cut = expected[name] if name.startswith("step/") else part_of(expected[name], shard)
                assert_same_tensor(value, cut.contiguous(), name)

    @pytest.mark.parametrize("world_size", [2, 3, 4, 7])
    def test_uneven_ones_as_torch_chunk_makes_them(self, world_size: int) -> None:
        whole = arange(10, 3)
        parts = list(torch.chunk(whole, world_size))
        parts += [whole[:0]] * (world_size - len(parts))

        for rank, part in enumerate(parts):
            shard = Shard(rank, world_size, 0)
            assert_same_tensor(cut_shard("k", whole, shard, (part.shape[0], 3)), part)

    def test_uneven_ones_into_parameters(self, tmp_path: Path, restore: Restore) -> None:
        whole = Trainer()
        whole.dense("a", rows=3, columns=10)
        expected = expected_content(whole)
        save(tmp_path / "c", whole)
        for rank, part in enumerate(torch.chunk(arange(10), 4)):
            other = Trainer()
            other.exports.append(Export(key_of("a"), other.parameter(3, len(part)), shard=Shard(rank, 4, 0)))
            restore(tmp_path / "c", scrambled(other))
            begin = int(part[0]) - 1
            assert_same_tensor(
                now_held(other)[f"exp_avg/{key_of('a')}"], expected[f"exp_avg/{key_of('a')}"][begin : begin + len(part)]
            )

    @pytest.mark.parametrize(
        ("shard", "shape", "message"),
        [
            (Shard(0, 2, 0), (3, 4), r"the checkpoint has shape \[5, 3\] for it, the export \[4, 3\]"),
            (Shard(0, 2, 1), (3, 10), r"the checkpoint has shape \[10, 2\] for it, the export \[10, 3\]"),
            (Shard(0, 2, 0, (4, 4)), (3, 4), r"shape \[10, 3\] is not the sum of component_sizes \(4, 4\) on axis 0"),
        ],
    )
    def test_that_do_not_fit_are_refused(
        self, shard: Shard, shape: tuple[int, int], message: str, tmp_path: Path, restore: Restore
    ) -> None:
        whole = Trainer()
        whole.dense("a", rows=3, columns=10)
        save(tmp_path / "c", whole)
        part = Trainer()
        part.exports.append(Export(key_of("a"), part.parameter(*shape), shard=shard))
        before = everything(part)

        with pytest.raises(ExportError, match=f"^{key_of('a')}: {message}"):
            restore(tmp_path / "c", part)
        assert everything(part) == before


def part_of(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Cut each component evenly, by plain torch."""
    sizes = list(shard.component_sizes or [whole.shape[shard.dim]])
    components = whole.split(sizes, dim=shard.dim)
    return torch.cat([c.chunk(shard.world_size, dim=shard.dim)[shard.rank] for c in components], dim=shard.dim)


def rename(trainer: Trainer) -> None:
    trainer.exports[-1] = Export("other", trainer.exports[-1].parameter)


def drop_last(trainer: Trainer) -> None:
    trainer.exports.pop()


def one_row_less(trainer: Trainer) -> None:
    del trainer.exports[3]


def replace_last(shape: tuple[int, ...] = (3, 2), **kwargs: Any) -> Callable[[Trainer], None]:
    def change(trainer: Trainer) -> None:
        trainer.exports[-1] = Export(trainer.exports[-1].key, trainer.parameter(*shape, **kwargs))

    return change


def more_experts(trainer: Trainer) -> None:
    """The trainer holds five experts where four were saved: its fifth has no key."""
    made = trainer.parameter(5, 2, 5)
    del trainer.exports[4:8]
    trainer.export_rows("b", made, range(5))


def fewer_experts(trainer: Trainer) -> None:
    made = trainer.parameter(3, 2, 5)
    del trainer.exports[4:8]
    trainer.export_rows("b", made, range(3))


def not_held(trainer: Trainer) -> None:
    trainer.exports[-1] = Export(trainer.exports[-1].key, torch.nn.Parameter(arange(3, 2, dtype=torch.bfloat16)))


def two_keys_to_one_row(trainer: Trainer) -> None:
    first, second = trainer.exports[:2]
    trainer.exports[1] = Export(second.key, first.parameter, expert=first.expert)


def rows_of_two_steps(trainer: Trainer) -> None:
    """A row of layer 1 goes into the parameter of layer 0, which has one step count for all rows."""
    first = trainer.exports[0]
    position = next(i for i, e in enumerate(trainer.exports) if e.key == key_of("a", 0, layer=1))
    trainer.exports[0], trainer.exports[position] = (
        Export(trainer.exports[position].key, first.parameter, expert=0),
        Export(first.key, trainer.exports[position].parameter, expert=0),
    )


def shared_memory(trainer: Trainer) -> None:
    last = trainer.exports[-1]
    alias = torch.nn.Parameter(trainer.parameters[2].detach())
    trainer.parameters.append(alias)
    trainer._states[alias] = {}
    trainer._optimizer = None
    trainer.exports[-1] = Export(last.key, alias)


def overlapping_memory(trainer: Trainer) -> None:
    """The last parameter begins in the middle of another."""
    last, wide = trainer.exports[-1], trainer.parameters[1].detach()
    alias = torch.nn.Parameter(torch.as_strided(wide, last.parameter.shape, (last.parameter.shape[1], 1), 2))
    trainer.parameters.append(alias)
    trainer._states[alias] = {}
    trainer._optimizer = None
    trainer.exports[-1] = Export(last.key, alias)


def one_tensor_for_both_moments(trainer: Trainer) -> None:
    held = trainer.optimizer.state[trainer.optimizer.param_groups[0]["params"][0]]
    held["exp_avg_sq"] = held["exp_avg"]


def twice(trainer: Trainer) -> None:
    trainer.exports.append(trainer.exports[0])


def odd_moment(trainer: Trainer) -> None:
    master = trainer.held(trainer.parameters[0])["master"]
    trainer._states[master]["exp_avg"] = arange(5, 3, 2)
    trainer._optimizer = None


def amsgrad(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["amsgrad"] = True


MISMATCHES: dict[str, tuple[Callable[[Trainer], None], type[PackckptError], str]] = {
    "missing key": (rename, ExportError, "c: has no key other, which the exports name"),
    "extra key": (drop_last, ExportError, f"c: holds {key_of('c', layer=1)}, which no export names; name every key"),
    "extra row": (one_row_less, ExportError, f"c: holds {key_of('a', 3)}, which no export names"),
    "shape": (
        replace_last(shape=(2, 3)), ExportError, r"c.lora_A.weight: the checkpoint has shape \[2, 3\] for it, the exp",
    ),
    "dtype": (
        replace_last(dtype=torch.float16), ExportError, "the checkpoint has dtype torch.bfloat16, the param",
    ),
    "more experts": (more_experts, ExportError, f"c: has no key {key_of('b', 4)}"),
    "fewer experts": (fewer_experts, ExportError, f"c: holds {key_of('b', 3)}, which no export names"),
    "not held by the optimizer": (not_held, OptimizerError, "AdamW does not hold the parameter"),
    "two keys to one row": (two_keys_to_one_row, ExportError, "goes to the same place as .*; name one of them"),
    "rows of two steps": (rows_of_two_steps, ExportError, "its parameter has one step count, the checkpoint has diff"),
    "shared memory": (shared_memory, ExportError, "shares memory with .*; give every parameter and moment memory of"),
    "overlapping memory": (overlapping_memory, ExportError, "shares memory with"),
    "one tensor for both moments": (
        one_tensor_for_both_moments, ExportError, f"{key_of('a', 0)}: exp_avg_sq: shares memory with .*: exp_avg;",
    ),
    "key twice": (twice, ExportError, "exported twice"),
    "odd moment": (odd_moment, OptimizerError, r"exp_avg has shape \[5, 3, 2\]; expected that of the parameter, \[4"),
    "amsgrad": (amsgrad, OptimizerError, "uses amsgrad"),
}  # fmt: skip


def test_masters_without_their_optimizer_are_refused(tmp_path: Path, restore_from: Restore) -> None:
    trainer = Trainer()
    trainer.packed("a")
    save(tmp_path / "c", trainer)
    before = [bytes_of(parameter) for parameter in scrambled(trainer).parameters]
    with pytest.raises(OptimizerError, match="masters are given without the optimizer that steps them"):
        restore_from(tmp_path / "c", trainer.exports, None, trainer.masters)
    assert [bytes_of(parameter) for parameter in trainer.parameters] == before


class TestAllOrNothing:
    @pytest.mark.parametrize("kind", MISMATCHES)
    def test_a_mismatch_is_found_before_anything_is_written(self, kind: str, tmp_path: Path, restore: Restore) -> None:
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        change, error, message = MISMATCHES[kind]
        change(trainer)
        before = everything(trainer)

        with pytest.raises(error, match=message):
            restore(tmp_path / "c", trainer)
        assert everything(trainer) == before

    def test_an_unchanged_trainer_is_restored(self, tmp_path: Path, restore: Restore) -> None:
        """Else the mismatches above would show nothing."""
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        restore(tmp_path / "c", trainer)

        assert everything(trainer) == everything(make())

    @pytest.mark.parametrize(
        "other", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adafactor(p)]
    )
    def test_another_optimizer(
        self, other: Callable[[Any], torch.optim.Optimizer], tmp_path: Path, restore_from: Restore
    ) -> None:
        save(tmp_path / "c", make(dtype=torch.float32, own_master=True))
        trainer = scrambled(make(dtype=torch.float32, own_master=True))
        optimizer = other(trainer.parameters)
        before = everything(trainer)

        with pytest.raises(OptimizerError, match=type(optimizer).__name__):
            restore_from(tmp_path / "c", trainer.exports, optimizer)
        assert everything(trainer) == before
        assert not optimizer.state

    def test_a_checkpoint_without_an_optimizer(self, tmp_path: Path, restore: Restore) -> None:
        save(tmp_path / "c", make(), with_state=False)
        trainer = scrambled(make())
        before = everything(trainer)

        with pytest.raises(CheckpointError, match="c: was saved without an optimizer; there is no state of"):
            restore(tmp_path / "c", trainer)
        assert everything(trainer) == before

    def test_a_closed_checkpoint(self, tmp_path: Path, restore: Restore) -> None:
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        before = everything(trainer)
        checkpoint = load_checkpoint(tmp_path / "c")
        checkpoint.close()

        with pytest.raises(CheckpointError, match="c: is closed; load it again"):
            checkpoint.restore(trainer.exports, trainer.optimizer, trainer.masters)
        assert everything(trainer) == before

    def test_a_row_expanded_over_the_experts(self, tmp_path: Path, restore: Restore) -> None:
        save(tmp_path / "c", make())
        trainer = make()
        made = trainer.parameter(4, 2, 5, strides=lambda t: t[:1].expand_as(t))
        del trainer.exports[4:8]
        trainer.export_rows("b", made, range(4))
        before = everything(trainer)

        with pytest.raises(ExportError, match="shares memory with"):
            restore(tmp_path / "c", trainer)
        assert everything(trainer) == before


class TestOneReading:
    """A damaged file is noticed when it was read, so what was placed is told to be of no use."""

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer/exp_avg-000001.safetensors"])
    def test_a_changed_byte(self, name: str, place: str, tmp_path: Path) -> None:
        save(tmp_path / "c", make())
        flip(tmp_path / "c" / name, -3)
        trainer = scrambled(make(PLACES[place]))
        step = trainer.optimizer.state[trainer.masters[0][1]]["step"]

        with pytest.raises(CheckpointError) as caught:
            in_one_reading(tmp_path / "c", trainer.exports, trainer.optimizer, trainer.masters)
        assert f"{name}: has digest " in str(caught.value)
        assert f"parameters and optimizer hold parts of {tmp_path / 'c'}: restore a checkpoint" in str(caught.value)
        assert len(caught.value.problems) == 1
        assert trainer.optimizer.state[trainer.masters[0][1]]["step"] is step

    @pytest.mark.parametrize(
        ("before", "after"), [(b'"BF16"', b'"F16" '), (b"[2,3]", b"[3,2]"), (b"experts", b"exparts")]
    )
    def test_a_header_that_fits_no_trainer(self, before: bytes, after: bytes, tmp_path: Path) -> None:
        """The trainer is not at fault."""
        save(tmp_path / "c", make(), with_state=False)
        adapter = tmp_path / "c" / "adapter_model.safetensors"
        content = adapter.read_bytes()
        assert before in content
        adapter.write_bytes(content.replace(before, after, 1))
        trainer = scrambled(make())
        before_restore = everything(trainer)

        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: has digest .*; the file was changed"):
            in_one_reading(tmp_path / "c", trainer.exports, None)
        assert everything(trainer) == before_restore

    def test_an_interruption_says_that_parts_were_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        monkeypatch.setattr("packckpt.intake.place_on_host", raising(KeyboardInterrupt()))

        with pytest.raises(KeyboardInterrupt) as caught:
            in_one_reading(tmp_path / "c", trainer.exports, trainer.optimizer, trainer.masters)
        assert caught.value.__notes__ == [
            f"parameters and optimizer hold parts of {tmp_path / 'c'}: restore a checkpoint before they are used"
        ]

    def test_a_file_that_nothing_is_restored_from(self, tmp_path: Path) -> None:
        save(tmp_path / "c", make())
        flip(tmp_path / "c" / "optimizer" / "master-000000.safetensors", -1)
        trainer = scrambled(make())

        with pytest.raises(CheckpointError, match=r"optimizer/master-000000\.safetensors: has digest "):
            in_one_reading(tmp_path / "c", trainer.exports, None)

    @pytest.mark.parametrize("name", ["adapter_config.json", "checkpoint.json"])
    def test_what_is_not_tensors_is_checked_before_anything_is_written(self, name: str, tmp_path: Path) -> None:
        save(tmp_path / "c", make())
        flip(tmp_path / "c" / name, -4)
        trainer = scrambled(make())
        before = everything(trainer)

        with pytest.raises(CheckpointError, match=name):
            in_one_reading(tmp_path / "c", trainer.exports, trainer.optimizer, trainer.masters)
        assert everything(trainer) == before

    def test_every_byte_is_read_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path / "c", make())
        read: list[int] = []
        fill = FilePass._fill
        monkeypatch.setattr(FilePass, "_fill", lambda self, at, piece: read.append(len(piece)) or fill(self, at, piece))
        monkeypatch.setattr("packckpt.verify.file_digest", lambda path: read.append(-1) or file_digest(path))
        trainer = make()
        in_one_reading(tmp_path / "c", trainer.exports, trainer.optimizer, trainer.masters)

        files = list((tmp_path / "c").rglob("*.safetensors"))
        heads = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
        assert read.count(-1) == 1  # the configuration
        assert sum(count for count in read if count > 0) == sum(file.stat().st_size for file in files) - heads

    def test_the_checkpoint_that_it_returns_is_verified_and_open(self, tmp_path: Path) -> None:
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        with restore_checkpoint(tmp_path / "c", trainer.exports, trainer.optimizer, trainer.masters) as checkpoint:
            assert checkpoint.digest == verify_checkpoint(tmp_path / "c")
            assert_same_tensor(checkpoint.exported(key_of("a", 2)), trainer.parameters[0].detach()[2].T.contiguous())


class TestHyperparameters:
    def test_that_differ_are_named_and_left(self, tmp_path: Path, restore: Restore) -> None:
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        trainer.optimizer.param_groups[0].update(lr=0.5, eps=0.25)

        with pytest.warns(
            UserWarning, match=r"differ from the checkpoint's and were left: learning_rate 0.001 -> 0.5, ep"
        ):
            restore(tmp_path / "c", trainer)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.5
        assert_same_content(now_held(trainer), expected_content(make()))

    def test_a_warning_that_is_an_error_comes_before_anything_is_written(
        self, tmp_path: Path, restore: Restore
    ) -> None:
        save(tmp_path / "c", make())
        trainer = scrambled(make())
        trainer.optimizer.param_groups[0]["lr"] = 0.5
        before = everything(trainer)

        with pytest.raises(UserWarning, match="were left"):
            restore(tmp_path / "c", trainer)
        assert everything(trainer) == before


class TestSteps:
    @pytest.mark.parametrize(
        "form",
        [
            7,
            7.0,
            torch.tensor(7.0),
            torch.tensor(7),
            torch.tensor([7.0]),
            torch.tensor([[7]], dtype=torch.int32),
            torch.tensor(7.0, dtype=torch.float64),
        ],
        ids=repr,
    )
    def test_keep_their_form(self, form: Any, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer()
        trainer.packed("a", step=form)
        save(tmp_path / "c", trainer)
        other = Trainer()
        other.packed("a", step=form * 0 + 3)
        restore(tmp_path / "c", other)
        step = other.optimizer.state[other.masters[0][1]]["step"]

        assert type(step) is type(form)
        if isinstance(form, torch.Tensor):
            assert_same_tensor(step, form)
        else:
            assert step == form

    def test_that_three_parameters_share_become_three(self, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer()
        for name, step in zip("abc", (3, 5, 7), strict=True):
            trainer.packed(name, step=step)
        save(tmp_path / "c", trainer)
        shared = torch.tensor(1.0)
        other = Trainer()
        for name in "abc":
            other.packed(name, step=shared)
        restore(tmp_path / "c", other)
        steps = [other.optimizer.state[master]["step"] for _, master in other.masters]

        assert [step.item() for step in steps] == [3, 5, 7]
        assert len({id(step) for step in [*steps, shared]}) == 4
        assert shared.item() == 1

    def test_beyond_float32_stay_exact(self, tmp_path: Path, restore: Restore) -> None:
        trainer = Trainer()
        trainer.packed("a", step=2**24 + 1)
        save(tmp_path / "c", trainer)
        other = Trainer()
        other.packed("a", step=torch.tensor(1.0))
        restore(tmp_path / "c", other)

        assert other.optimizer.state[other.masters[0][1]]["step"].item() == 2**24 + 1

    @pytest.mark.parametrize("setting", ["capturable", "fused"])
    def test_of_an_optimizer_that_steps_on_the_device(self, setting: str, tmp_path: Path, restore: Restore) -> None:
        """Where no step is held yet, it is made where such an optimizer would make it."""
        trainer = Trainer(emulated.to_device)
        trainer.packed("a")
        save(tmp_path / "c", trainer)
        fresh = Trainer(emulated.to_device)
        fresh.packed("a", missing=MOMENTS, step=None)
        fresh.optimizer.param_groups[0][setting] = True
        restore(tmp_path / "c", fresh)
        step = fresh.optimizer.state[fresh.masters[0][1]]["step"]

        assert (step.device.type, step.dtype, emulated.to_host(step).item()) == ("emu", torch.float32, 7.0)


def test_the_manifest_of_a_restored_trainer_is_the_same(tmp_path: Path, restore: Restore) -> None:
    """Save, restore elsewhere, save again: the same checkpoint, byte for byte."""
    digest = save(tmp_path / "a", make())
    trainer = make(missing=MOMENTS, step=None)
    restore(tmp_path / "a", trainer)

    assert save(tmp_path / "b", trainer) == digest
    assert json.loads((tmp_path / "b" / "checkpoint.json").read_text())["digest"] == digest
    assert PREFIX in trainer.exports[0].key


def test_in_inference_mode_moments_are_made_that_an_optimizer_can_step(tmp_path: Path, restore_from: Restore) -> None:
    parameter = torch.nn.Parameter(arange(2, 3, 2).to(torch.bfloat16))
    stepped = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    stepped.step()
    exports = [Export(f"k{row}", parameter, expert=row) for row in range(2)]
    with CheckpointSaver(durable=False) as saver:
        saver.save(tmp_path / "c", exports, AdamState.from_optimizer(stepped), CONFIG)
    wanted = {name: value.clone() for name, value in stepped.state[parameter].items()}
    fresh = torch.optim.AdamW([parameter])

    with torch.inference_mode():
        parameter.zero_()
        restore_from(tmp_path / "c", exports, fresh)

    for name, value in wanted.items():
        assert torch.equal(fresh.state[parameter][name], value), name
    fresh.step()


def test_what_was_made_in_inference_mode_is_restored_in_it(tmp_path: Path, restore: Restore) -> None:
    """Threads have a mode of their own, and nothing but inference mode may change such tensors."""
    save(tmp_path / "c", make())
    with torch.inference_mode():
        made = scrambled(make(state_dtype=torch.bfloat16))
        restore(tmp_path / "c", made)
        assert_same_content(now_held(made), expected_content(make(state_dtype=torch.bfloat16)))


def test_parameters_without_data_are_refused(tmp_path: Path, restore_from: Restore) -> None:
    parameter = torch.nn.Parameter(arange(2, 3))
    with CheckpointSaver(durable=False) as saver:
        saver.save(tmp_path / "c", [Export("k", parameter)], None, CONFIG)

    with pytest.raises(ExportError, match=r"k: .* on the meta device"):
        restore_from(tmp_path / "c", [Export("k", parameter.to("meta"))], None)
