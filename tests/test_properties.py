"""For any list of exports: plan, log, device and observer count the same, and both paths write the same bytes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packckpt import CheckpointSaver, Export, load_checkpoint, plan_transfers
from tests import emulated
from tests.builders import (
    BLOCK_PATHS,
    CONFIG,
    MOMENTS,
    PATHS,
    STRIDES,
    Trainer,
    assert_same_content,
    expected_content,
    file_bytes,
    key_of,
    read_content,
)
from tests.observer import CopyObserver

emulated.install_or_skip()

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Parameter:
    """One parameter, and the rows of it that are exported; none of them: the whole, as two axes."""

    experts: int
    rows: tuple[int, ...]
    layers: tuple[int | None, ...]
    shape: tuple[int, int]
    dtype: torch.dtype
    state_dtype: torch.dtype
    missing: tuple[str, ...]
    step: int | None
    device_step: bool
    strides: str


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    experts = draw(st.integers(0, 5))
    whole = st.just(tuple(range(experts)))
    some = st.lists(st.integers(0, max(experts - 1, 0)), min_size=1, max_size=experts + 1).map(tuple)
    layer = st.sampled_from([0, 2, 10, None])
    layers = draw(st.one_of(layer.map(lambda one: (one,)), st.lists(layer, min_size=1, max_size=2).map(tuple)))
    return Parameter(
        experts=experts,
        rows=draw(st.one_of(whole, whole, whole.map(lambda r: r[::-1]), some)) if experts else (),
        layers=layers,
        shape=draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        dtype=draw(st.sampled_from(DTYPES)),
        state_dtype=draw(st.sampled_from(DTYPES)),
        missing=draw(st.sampled_from([(), (), *[(m,) for m in MOMENTS], MOMENTS])),
        step=draw(st.one_of(st.none(), st.integers(0, 2**20))),
        device_step=draw(st.booleans()),
        strides=draw(st.sampled_from(sorted(STRIDES))),
    )


def build(drawn: list[Parameter], shuffled: list[int], place: Any) -> Trainer:
    trainer = Trainer(place)
    exports: list[Export] = []
    for number, item in enumerate(drawn):
        step: Any = item.step
        if step is not None and item.device_step:
            step = place(torch.tensor(float(step)))
        made = trainer.parameter(
            *((item.experts,) if item.experts else ()),
            *item.shape,
            dtype=item.dtype,
            state_dtype=item.state_dtype,
            missing=item.missing,
            step=step,
            strides=STRIDES[item.strides],
        )
        rows: tuple[int | None, ...] = item.rows or (None,)
        for position, row in enumerate(rows):
            layer = item.layers[position * len(item.layers) // len(rows)]
            exports.append(Export(key_of(f"p{number}.{position}", row, layer=layer), made, expert=row))
    for position in shuffled:
        exports.append(exports.pop(position % len(exports)))
    trainer.exports = exports
    return trainer


CASES = st.tuples(
    st.lists(parameters(), min_size=1, max_size=4), st.one_of(st.just([]), st.lists(st.integers(0, 99), max_size=6))
)


# From a single row of an exported tensor (four float32 values) to everything at once.
BUFFERS = st.one_of(st.integers(16, 200), st.just(1 << 20))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60)
@given(case=CASES, buffer_bytes=BUFFERS)
def test_plan_log_device_and_observer_agree(
    path: Any, case: tuple[list[Parameter], list[int]], buffer_bytes: int
) -> None:
    trainer = build(*case, emulated.to_device)
    state, saver = trainer.state, CheckpointSaver(path, durable=False, buffer_bytes=buffer_bytes)
    plan = plan_transfers(trainer.exports, state, path, buffer_bytes)
    with tempfile.TemporaryDirectory() as directory, emulated.observe() as ledger, CopyObserver() as seen:
        log = saver.prepare(Path(directory) / "c", trainer.exports, state, CONFIG)
        saver.abort(Path(directory) / "c")

    assert (log.optimizer.calls, log.optimizer.bytes) == (plan.optimizer_calls, plan.optimizer_bytes)
    assert (log.weight.calls, log.weight.bytes) == (plan.weight_calls, plan.weight_bytes)
    assert log.step.calls <= 1
    logged = (log.weight, log.optimizer, log.step)
    assert ledger.d2h_calls == seen.d2h_calls == sum(count.calls for count in logged)
    assert ledger.d2h_bytes == seen.d2h_bytes == sum(count.bytes for count in logged)
    assert (ledger.item_calls, ledger.h2d_calls) == (0, 0)


@settings(max_examples=60)
@given(case=CASES, buffer_bytes=BUFFERS, on_device=st.booleans())
def test_all_paths_write_the_same_bytes_and_the_right_ones(
    case: tuple[list[Parameter], list[int]], buffer_bytes: int, on_device: bool
) -> None:
    trainer = build(*case, emulated.to_device if on_device else lambda tensor: tensor)
    expected = expected_content(trainer)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        digests = [
            CheckpointSaver(path, durable=False, buffer_bytes=buffer_bytes).save(
                root / path, trainer.exports, trainer.state, CONFIG
            )
            for path in PATHS
        ]
        assert len(set(digests)) == 1
        assert file_bytes(root / "slice") == file_bytes(root / "coalesced") == file_bytes(root / "staged")
        assert_same_content(read_content(root / "slice"), expected)


@settings(max_examples=60)
@given(drawn=st.lists(parameters(), min_size=1, max_size=3))
def test_what_is_saved_comes_back(drawn: list[Parameter]) -> None:
    """Rows that stand once each; a restore refuses two keys for one row."""
    once = [Parameter(**{**vars(item), "rows": tuple(dict.fromkeys(item.rows))}) for item in drawn]
    trainer = build(once, [], lambda tensor: tensor)
    expected = expected_content(trainer)
    with tempfile.TemporaryDirectory() as directory:
        CheckpointSaver(durable=False).save(Path(directory) / "c", trainer.exports, trainer.state, CONFIG)
        with torch.no_grad():
            for tensor in trainer.tensors():
                tensor.zero_()
        with load_checkpoint(Path(directory) / "c") as checkpoint:
            checkpoint.restore(trainer.exports, trainer.optimizer, trainer.masters)
    for master in trainer._states:
        trainer._states[master] = dict(trainer.optimizer.state[master])

    assert_same_content(expected_content(trainer), expected)


@given(case=CASES)
def test_the_slice_path_never_copies_less_often_and_the_bytes_are_equal(
    case: tuple[list[Parameter], list[int]],
) -> None:
    trainer = build(*case, lambda tensor: tensor)
    plans = [plan_transfers(trainer.exports, trainer.state, path) for path in BLOCK_PATHS]

    assert plans[0].optimizer_calls == 3 * len(trainer.exports)
    assert plans[1].optimizer_calls <= plans[0].optimizer_calls
    assert plans[0].optimizer_bytes == plans[1].optimizer_bytes
    assert all(p.coalesced == (p.reason.endswith("complete and in order")) for p in plans[1].parameters)
