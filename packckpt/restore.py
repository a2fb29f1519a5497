"""Put a checkpoint back into packed parameters, masters and moments: all of it, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from packckpt.errors import ExportError, OptimizerError
from packckpt.exports import Export, check_exports, named
from packckpt.merge import cut_shard
from packckpt.optimizer import MOMENTS, AdamState, Hyperparameters, ParameterState

if TYPE_CHECKING:
    from packckpt.checkpoint import Checkpoint

# (key) -> the whole tensor of that key in the checkpoint
Source = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """One parameter that is restored: its exports, and where its state goes."""

    parameter: torch.Tensor
    exports: tuple[Export, ...]
    state: ParameterState | None
    step: int
    group: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Whether the exports cover every row of the parameter."""
        if self.exports[0].expert is None:
            return True
        return len({export.expert for export in self.exports}) == self.parameter.shape[0]


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

    Host memory: one packed parameter in one state. Device memory: the same, where only some of its rows are
    restored or the dtype differs.

    Raises:
        ExportError: keys, shapes, dtypes or expert counts differ; found before anything is written.
        OptimizerError: the optimizer cannot take the state; found before anything is written.
        CheckpointError: the checkpoint has no optimizer state.
    """
    checked = check_exports(exports)
    _expect_keys(checkpoint, checked, subset)
    state = None if optimizer is None else AdamState.from_optimizer(optimizer, masters)
    targets = _targets(checkpoint, checked, state)
    for target in targets:
        _expect_fitting(checkpoint, target)
    _expect_distinct(targets)
    if state is not None:
        _warn_hyperparameters(checkpoint.optimizer, state.hyperparameters())
    with torch.no_grad():
        for target in targets:
            _write(target.parameter, target, checkpoint.exported)
            if state is not None and target.state is not None:
                _write_state(checkpoint, target, target.state, state)


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


def _expect_fitting(checkpoint: Checkpoint, target: _Target) -> None:
    rows: dict[int | None, str] = {}
    for export in target.exports:
        spec = checkpoint.spec(export.key)
        if spec.dtype is not target.parameter.dtype:
            raise ExportError(
                f"{export.key}: the checkpoint has dtype {spec.dtype}, the parameter {target.parameter.dtype}; "
                "expected one dtype"
            )
        # Without data: shapes decide whether the part can be cut.
        cut_shard(export.key, torch.empty(spec.shape, device="meta"), export.shard, export.shape)
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
        state = target.state
        tensors = {id(t): t for t in _tensors(target.parameter, state)}
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


def _tensors(parameter: torch.Tensor, state: ParameterState | None) -> Iterator[torch.Tensor]:
    yield parameter
    for value in () if state is None else (state.master, state.exp_avg, state.exp_avg_sq):
        if value is not None:
            yield value


def _warn_hyperparameters(saved: Hyperparameters | None, present: Hyperparameters) -> None:
    before, now = (saved.as_dict() if saved else {}), present.as_dict()
    differing = [f"{name} {before[name]!r} -> {now[name]!r}" for name in before if before[name] != now[name]]
    if differing:
        warnings.warn(
            f"the optimizer's hyper-parameters differ from the checkpoint's and were left: {', '.join(differing)}",
            stacklevel=4,
        )


def _write_state(checkpoint: Checkpoint, target: _Target, held: ParameterState, state: AdamState) -> None:
    master = held.master
    if master is not target.parameter:
        _write(master, target, lambda key: checkpoint.component(key, "master"))
    entry: dict[str, Any] = state.optimizer.state[master]
    for name in MOMENTS:
        value = entry.get(name)
        if value is None:
            value = torch.zeros_like(master, memory_format=torch.preserve_format)
        _write(value, target, lambda key, name=name: checkpoint.component(key, name))  # type: ignore[misc]
        entry[name] = value
    # Always a tensor of its own: parameters may share the one that is there.
    entry["step"] = _step_like(held.step, target.step, master, target.group)


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


def _write(destination: torch.Tensor, target: _Target, source: Source) -> None:
    """Assemble what the exports name on the host and copy it to `destination` at once."""
    destination = destination.detach()
    first = target.exports[0]
    if first.expert is None:
        destination.copy_(_part(first, source).T)
        return
    rows = sorted(target.exports, key=lambda export: export.expert or 0)
    shape = (len(rows), *target.parameter.shape[1:])
    # In the destination's dtype, so that the device converts nothing; narrowing a widened value is exact.
    host = torch.empty(shape, dtype=destination.dtype)
    for position, export in enumerate(rows):
        host[position].copy_(_part(export, source).T)
    if target.whole:
        destination.copy_(host)
        return
    index = torch.tensor([export.expert for export in rows], device=destination.device)
    destination.index_copy_(0, index, host.to(destination.device))


def _part(export: Export, source: Source) -> torch.Tensor:
    return cut_shard(export.key, source(export.key), export.shard, export.shape)
