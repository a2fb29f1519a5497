"""Put a checkpoint back into packed parameters, masters and moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from packckpt.contents import Contents
from packckpt.dtypes import DTYPE_OF_NAME
from packckpt.errors import CheckpointError, ExportError, OptimizerError, warn_caller
from packckpt.exports import Export, Shard, check_exports, expect_data, named
from packckpt.fillings import FileLayout, Filling
from packckpt.intake import TASK_BYTES, Intake, Task
from packckpt.manifest import ADAPTER_FILE
from packckpt.merge import cut_shard
from packckpt.optimizer import COMPONENTS, MOMENTS, AdamState, Hyperparameters, ParameterState
from packckpt.progressions import Numbers
from packckpt.tensorreader import Entry

# A whole tensor's shape, the shard that is cut from it, and the shape that the shard must have.
_Cut = tuple[tuple[int, ...], Shard | None, tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """One parameter that is restored: its exports, and where its state goes."""

    parameter: torch.Tensor
    exports: tuple[Export, ...]
    state: ParameterState | None
    step: int
    group: Mapping[str, Any]

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameter, and what the optimizer holds for it, with names for messages."""
        key = self.exports[0].key
        held = [] if self.state is None else [(name, self.state.component(name)) for name in COMPONENTS]
        others = [(f"{key}: {name}", value) for name, value in held if value is not None]
        return [(key, self.parameter), *((name, value) for name, value in others if value is not self.parameter)]


def restore(
    contents: Contents,
    exports: Iterable[Export],
    optimizer: torch.optim.Optimizer | None,
    masters: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
    *,
    subset: bool = False,
    digested: bool = False,
) -> None:
    """Restore parameters, masters, moments and steps; training then continues as if it had not stopped.

    Every file is read once, front to back, and a chunk of it goes to an accelerator in one copy. Rows of a packed
    parameter that no export names keep their value (and get zero moments where the optimizer held none).
    Hyper-parameters are not written into the optimizer; a warning names those that differ.

    Args:
        contents: of a checkpoint that was checked.
        exports: as given to the save: which key belongs to which parameter, row and shard.
        optimizer: the optimizer to restore into, or None to restore the exported values alone.
        masters: as for `AdamState.from_optimizer`.
        subset: allow keys in the checkpoint that no export names, as on a rank that holds some of the experts.
        digested: compare the digests of all tensor files, also of those that nothing is restored from, while they
            are read; otherwise what is not wanted is not read.

    Host and device memory: what `Intake` states.

    Raises:
        ExportError: keys, shapes, dtypes or expert counts differ; found before anything is written.
        OptimizerError: the optimizer cannot take the state; found before anything is written.
        CheckpointError: the checkpoint has no optimizer state; or, when parts were written, which file has another
            digest or cannot be read. Whatever is raised when parts were written says so.
    """
    if optimizer is None and masters is not None:
        # The next step would write the old masters over the weights that were restored.
        raise OptimizerError("masters are given without the optimizer that steps them; pass both, or neither")
    checked = check_exports(exports)
    _expect_keys(contents, checked, subset)
    state = None if optimizer is None else AdamState.from_optimizer(optimizer, masters)
    targets = _targets(contents, checked, state)
    known: set[_Cut] = set()
    for target in targets:
        _expect_fitting(contents, target, known)
    _expect_distinct(targets)
    if state is not None:
        _warn_hyperparameters(contents.manifest.optimizer, state.hyperparameters())
    # Whatever may find no memory is made before the first write.
    entries = [_entry(target, target.state) if target.state is not None else {} for target in targets]
    intake = Intake(_tasks(contents, zip(targets, entries, strict=True), digested))
    written = f"parameters and optimizer hold parts of {contents.root}: restore a checkpoint before they are used"
    try:
        problems = list(intake.run().values())
    except BaseException as error:
        error.add_note(written)
        raise
    if problems:
        raise CheckpointError("\n".join([*problems, written]), problems)
    for target, entry in zip(targets, entries, strict=True):
        if state is not None and target.state is not None:
            state.optimizer.state[target.state.master].update(entry)


def _expect_keys(contents: Contents, exports: Sequence[Export], subset: bool) -> None:
    saved, asked = contents.exported.keys(), {export.key for export in exports}
    missing, extra = sorted(asked - saved), sorted(saved - asked)
    if missing:
        raise ExportError(f"{contents.root}: has no key {named(missing)}, which the exports name")
    if extra and not subset:
        raise ExportError(
            f"{contents.root}: holds {named(extra)}, which no export names; name every key, or pass subset=True "
            "on a rank that holds some of them"
        )


def _targets(contents: Contents, exports: Sequence[Export], state: AdamState | None) -> list[_Target]:
    by_parameter: dict[int, list[Export]] = {}
    for export in exports:
        by_parameter.setdefault(id(export.parameter), []).append(export)
    reader = None if state is None else state.reader()
    targets = []
    for group in by_parameter.values():
        first = group[0]
        found = None if reader is None else reader.read(first.key, first.parameter)
        step = 0 if reader is None else _one_step(contents, group)
        options = {} if reader is None or found is None else reader.group_of(found.master)
        targets.append(_Target(first.parameter, tuple(group), found, step, options))
    return targets


def _one_step(contents: Contents, exports: Sequence[Export]) -> int:
    """Return the step count of a parameter's exports."""
    step = contents.step(exports[0].key)
    steps = contents.manifest.steps
    if any(steps[export.key] != step for export in exports):
        raise ExportError(
            f"{exports[0].key}: its parameter has one step count, the checkpoint has different ones for its rows: "
            f"{named([f'{export.key}: {contents.step(export.key)}' for export in exports], 4)}"
        )
    return step


def _expect_fitting(contents: Contents, target: _Target, known: set[_Cut]) -> None:
    """Refuse what cannot be placed; `known` holds cuts that are possible."""
    rows: dict[int | None, str] = {}
    wanted = target.exports[0].shape  # of all of them: they are cut from one parameter
    expect_data(target.exports[0].key, [tensor for _, tensor in target.named])
    for export in target.exports:
        dtype_name, shape, *_ = contents.entry(export.key)
        dtype = DTYPE_OF_NAME[dtype_name]
        if dtype is not target.parameter.dtype:
            raise ExportError(
                f"{export.key}: the checkpoint has dtype {dtype}, the parameter {target.parameter.dtype}; "
                "expected one dtype"
            )
        cut = (shape, export.shard, wanted)
        if cut not in known:
            # Without data: shapes decide whether the part can be cut.
            cut_shard(export.key, torch.empty(shape, device="meta"), export.shard, wanted)
            known.add(cut)
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
    """Refuse tensors that share memory: which value stays would be left to chance."""
    dense: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    begins: dict[tuple[torch.device, int, int], str] = {}
    for name, tensor in chain.from_iterable(target.named for target in targets):
        if not tensor.numel():
            continue
        if any(step == 0 for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1):
            raise _sharing(name, name)
        storage = tensor.device, tensor.untyped_storage().data_ptr()
        begin, end = _extent(tensor)
        if (other := begins.setdefault((*storage, begin), name)) != name:
            raise _sharing(name, other)
        # Tensors with gaps may lie between one another, as the columns of a fused matrix do.
        if end - begin == tensor.numel() * tensor.element_size():
            dense.setdefault(storage, []).append((begin, end, name))
    for spans in dense.values():
        for (_, end, name), (begin, _, other) in pairwise(sorted(spans)):
            if begin < end:
                raise _sharing(other, name)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    last = sum(step * (extent - 1) for step, extent in zip(tensor.stride(), tensor.shape, strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _sharing(name: str, other: str) -> ExportError:
    return ExportError(f"{name}: shares memory with {other}; give every parameter and moment memory of its own")


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


def _tasks(contents: Contents, targets: Iterable[tuple[_Target, Mapping[str, Any]]], digested: bool) -> Iterator[Task]:
    """Yield what has to be read: whole files where they are digested, else the parts that are wanted."""
    fillings: dict[str, list[Filling]] = {name: [] for name in contents.files}
    for target, entry in targets:
        for name, filling in _fillings(contents, target, entry):
            fillings[name].append(filling)
    for name, reader in contents.files.items():
        layout = FileLayout(fillings[name])
        if digested:
            yield Task(reader, layout, layout.tensors, contents.manifest.files[name])
            continue
        for tensors in layout.split(layout.tensors, TASK_BYTES):
            yield Task(reader, layout, tensors, None)


def _fillings(contents: Contents, target: _Target, entry: Mapping[str, Any]) -> Iterator[tuple[str, Filling]]:
    """Yield what each file holds for a parameter, its master and its moments."""
    for stretch in _stretches(contents.exported, target.exports):
        yield ADAPTER_FILE, stretch.filling(target.parameter)
    if target.state is None:
        return
    destinations: dict[str, torch.Tensor] = {name: entry[name] for name in MOMENTS}
    if target.state.master is not target.parameter:
        destinations["master"] = target.state.master
    by_files: dict[tuple[str, ...], list[Export]] = {}
    for export in target.exports:
        by_files.setdefault(contents.manifest.parameters[export.key], []).append(export)
    for names, exports in by_files.items():
        name_of = dict(zip(COMPONENTS, names, strict=True))
        known: dict[int, list[_Stretch]] = {}  # the three files have mostly one header
        for component, destination in destinations.items():
            entries = contents.files[name_of[component]].entries
            if id(entries) not in known:
                known[id(entries)] = _stretches(entries, exports)
            for stretch in known[id(entries)]:
                yield name_of[component], stretch.filling(destination)


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Exports of one parameter that a file holds with one dtype and shape, and that take one shard of it."""

    export: Export
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Numbers
    rows: Numbers

    def filling(self, destination: torch.Tensor) -> Filling:
        packed = destination.detach() if self.export.expert is not None else destination.detach()[None]
        return Filling(packed.transpose(1, 2), self.export, self.dtype, self.shape, self.offsets, self.rows)


def _stretches(entries: Mapping[str, Entry], exports: Iterable[Export]) -> list[_Stretch]:
    groups: dict[tuple[str, tuple[int, ...], Shard | None], list[tuple[int, Export]]] = {}
    for export in exports:
        dtype_name, shape, offset, _ = entries[export.key]
        groups.setdefault((dtype_name, shape, export.shard), []).append((offset, export))
    found = []
    for (dtype_name, shape, _), members in groups.items():
        members.sort(key=itemgetter(0))
        offsets = np.array([offset for offset, _ in members], np.int64)
        rows = np.array([export.expert or 0 for _, export in members], np.int64)
        found.append(_Stretch(members[0][1], DTYPE_OF_NAME[dtype_name], shape, offsets, rows))
    return found


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
