"""Put a checkpoint back into packed parameters, masters and moments: all of it, or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from packckpt.errors import ExportError, OptimizerError, warn_caller
from packckpt.exports import Export, check_exports, expect_data, named
from packckpt.merge import cut_shard
from packckpt.optimizer import MOMENTS, AdamState, Hyperparameters, ParameterState
from packckpt.placing import Placer
from packckpt.windows import WEIGHTS

if TYPE_CHECKING:
    from packckpt.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """One parameter that is restored: its exports, and where its state goes."""

    parameter: torch.Tensor
    exports: tuple[Export, ...]
    state: ParameterState | None
    step: int
    group: Mapping[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameter, and what the optimizer holds for it."""
        return [self.parameter, *(self.state.held if self.state is not None else ())]


def restore(
    checkpoint: Checkpoint,
    exports: Iterable[Export],
    optimizer: torch.optim.Optimizer | None,
    masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
    *,
    subset: bool = False,
) -> None:
    """Restore parameters, masters, moments and steps; training then continues as if it had not stopped.

    Each packed parameter and each of its states arrives in one host-to-device copy. Rows of a packed parameter
    that no export names keep their value (and get zero moments where the optimizer held none). Hyper-parameters
    are not written into the optimizer; a warning names those that differ.

    Args:
        checkpoint: from `load_checkpoint`.
        exports: as given to the save: which key belongs to which parameter, row and shard.
        optimizer: the optimizer to restore into, or None to restore the exported values alone.
        masters: as for `AdamState.from_optimizer`.
        subset: allow keys in the checkpoint that no export names, as on a rank that holds some of the experts.

    Host memory: for accelerators a ring of two buffers of 64 MiB (or of the largest exported tensor), pinned where
    that is possible; on the CPU none. Device memory: one buffer.

    Raises:
        ExportError: keys, shapes, dtypes or expert counts differ; found before anything is written.
        OptimizerError: the optimizer cannot take the state; found before anything is written.
        CheckpointError: the checkpoint has no optimizer state.
    """
    checkpoint.expect_open()
    if optimizer is None and masters is not None:
        # The next step would write the old masters over the weights that were restored.
        raise OptimizerError("masters are given without the optimizer that steps them; pass both, or neither")
    checked = check_exports(exports)
    _expect_keys(checkpoint, checked, subset)
    state = None if optimizer is None else AdamState.from_optimizer(optimizer, masters)
    targets = _targets(checkpoint, checked, state)
    fitting: set[object] = set()
    for target in targets:
        _expect_fitting(checkpoint, target, fitting)
    _expect_distinct(targets)
    if state is not None:
        _warn_hyperparameters(checkpoint.optimizer, state.hyperparameters())
    # Whatever may find no memory is made before the first write.
    entries = [_entry(target, target.state) if target.state is not None else {} for target in targets]
    largest_bytes = max((8 * math.prod(checkpoint.spec(export.key).shape) for export in checked), default=0)
    with torch.no_grad(), Placer(largest_bytes) as placer:
        placer.make_room(tensor.device for target in targets for tensor in target.tensors)
        for target, entry in zip(targets, entries, strict=True):
            placer.place(target.parameter, target.exports, partial(checkpoint.stacks, WEIGHTS))
            if target.state is not None:
                _place_state(checkpoint, target, target.state.master, entry, placer)
    for target, entry in zip(targets, entries, strict=True):
        if state is not None and target.state is not None:
            state.optimizer.state[target.state.master].update(entry)


def _expect_keys(checkpoint: Checkpoint, exports: Sequence[Export], subset: bool) -> None:
    saved, asked = set(checkpoint.keys), {export.key for export in exports}
    missing, extra = sorted(asked - saved), sorted(saved - asked)
    if missing:
        raise ExportError(f"{checkpoint.path}: has no key {named(missing)}, which the exports name")
    if extra and not subset:
        raise ExportError(
            f"{checkpoint.path}: holds {named(extra)}, which no export names; name every key, or pass subset=True "
            "on a rank that holds some of them"
        )


def _targets(checkpoint: Checkpoint, exports: Sequence[Export], state: AdamState | None) -> list[_Target]:
    by_parameter: dict[int, list[Export]] = {}
    for export in exports:
        by_parameter.setdefault(id(export.parameter), []).append(export)
    reader = None if state is None else state.reader()
    targets = []
    for group in by_parameter.values():
        first = group[0]
        found = None if reader is None else reader.read(first.key, first.parameter)
        steps = {} if reader is None else {export.key: checkpoint.step(export.key) for export in group}
        if len(set(steps.values())) > 1:
            raise ExportError(
                f"{first.key}: its parameter has one step count, the checkpoint has different ones for its rows: "
                f"{named([f'{key}: {step}' for key, step in steps.items()], 4)}"
            )
        options = {} if reader is None or found is None else reader.group_of(found.master)
        targets.append(_Target(first.parameter, tuple(group), found, next(iter(steps.values()), 0), options))
    return targets


def _expect_fitting(checkpoint: Checkpoint, target: _Target, fitting: set[object]) -> None:
    """Refuse what cannot be placed; `fitting` holds the cuts that are known to be possible."""
    rows: dict[int | None, str] = {}
    expect_data(target.exports[0].key, target.tensors)
    for export in target.exports:
        spec = checkpoint.spec(export.key)
        if spec.dtype is not target.parameter.dtype:
            raise ExportError(
                f"{export.key}: the checkpoint has dtype {spec.dtype}, the parameter {target.parameter.dtype}; "
                "expected one dtype"
            )
        cut = (spec.shape, export.shard, export.shape)
        if cut not in fitting:
            # Without data: shapes decide whether the part can be cut.
            cut_shard(export.key, torch.empty(spec.shape, device="meta"), export.shard, export.shape)
            fitting.add(cut)
        if rows.setdefault(export.expert, export.key) != export.key:
            raise ExportError(
                f"{export.key}: goes to the same place as {rows[export.expert]} (row {export.expert}); name one of them"
            )
    for name in ("master", *MOMENTS) if target.state is not None else ():
        value = target.state.component(name) if target.state is not None else None
        if value is not None and value.shape != target.parameter.shape:
            raise OptimizerError(
                f"{target.exports[0].key}: {name} has shape {list(value.shape)}; expected that of the parameter, "
                f"{list(target.parameter.shape)}"
            )


def _expect_distinct(targets: Iterable[_Target]) -> None:
    owner: dict[tuple[int, int], str] = {}
    for target in targets:
        tensors = {id(tensor): tensor for tensor in target.tensors}
        for tensor in tensors.values():
            if not tensor.numel():
                continue
            key = target.exports[0].key
            place = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size())
            if owner.setdefault(place, key) != key or any(s == 0 for s, n in _steps_of(tensor) if n > 1):
                raise ExportError(
                    f"{key}: shares memory with {owner[place]}; give every parameter and moment memory of its own"
                )


def _steps_of(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.stride(), tensor.shape, strict=True)


def _warn_hyperparameters(saved: Hyperparameters | None, present: Hyperparameters) -> None:
    before, now = (saved.as_dict() if saved else {}), present.as_dict()
    differing = [f"{name} {before[name]!r} -> {now[name]!r}" for name in before if before[name] != now[name]]
    if differing:
        warn_caller(
            f"the optimizer's hyper-parameters differ from the checkpoint's and were left: {', '.join(differing)}"
        )


def _entry(target: _Target, held: ParameterState) -> dict[str, Any]:
    """Return the optimizer's entry for a parameter: moments to be written, made where it holds none, and the step."""
    entry: dict[str, Any] = {}
    # An optimizer cannot step tensors that were made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        for name in MOMENTS:
            value = held.component(name)
            made = torch.zeros_like(held.master, memory_format=torch.preserve_format) if value is None else value
            entry[name] = made
        # Always a tensor of its own: parameters may share the one that is there.
        entry["step"] = _step_like(held.step, target.step, held.master, target.group)
    return entry


def _place_state(
    checkpoint: Checkpoint, target: _Target, master: torch.Tensor, entry: Mapping[str, Any], placer: Placer
) -> None:
    if master is not target.parameter:
        placer.place(master, target.exports, partial(checkpoint.stacks, "master"))
    for name in MOMENTS:
        placer.place(entry[name], target.exports, partial(checkpoint.stacks, name))


def _step_like(old: object, step: int, master: torch.Tensor, group: Mapping[str, Any]) -> object:
    if old is not None and not isinstance(old, torch.Tensor):
        return type(old)(step)  # type: ignore[call-arg]  # an int or float, as it was found
    on_device = bool(group.get("capturable") or group.get("fused"))
    device = old.device if old is not None else master.device if on_device else torch.device("cpu")
    dtype = old.dtype if old is not None else torch.float32
    made = torch.tensor(step, dtype=dtype)
    if int(made.item()) != step:
        made = torch.tensor(step, dtype=torch.float64)  # beyond what float32 counts
    shape = old.shape if old is not None else torch.Size([])
    return made.reshape(shape).to(device)
