"""What ranks export and what must come out of it, from plain torch: every value tells its tensor and position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from packckpt import AdamState, Export, Shard, load_checkpoint

CONFIG = {"base_model_name_or_path": "model/for-ranks", "r": 2}
_OFFSET = {"value": 0.0, "master": 0.25, "exp_avg": 0.5, "exp_avg_sq": 0.75}


@dataclass(frozen=True)
class Site:
    """One parameter on one rank.

    `shape` is that of a whole exported tensor, `(out, in)`. `experts` are the global ids of the packed rows (None: a
    row that is not exported), or None for a dense parameter. `bounds` cut a shard that is not even. `differs` is
    added to every value, so that this rank's copy can be told from another's.
    """

    name: str
    base: int
    shape: tuple[int, int]
    experts: tuple[int | None, ...] | None = None
    shard: Shard | None = None
    bounds: tuple[int, int] | None = None
    differs: float = 0.0
    dtype: torch.dtype = torch.float32
    step: int = 7
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def key(self, expert: int | None) -> str:
        return self.name.format(expert=expert)

    def whole(self, expert: int | None, component: str) -> torch.Tensor:
        """The exported tensor as it must come out."""
        if component != "value" and component != "master" and component not in self.moments:
            return torch.zeros(self.shape)
        number = self.base + (expert or 0)
        values = torch.arange(self.shape[0] * self.shape[1], dtype=torch.float32).reshape(self.shape)
        values = values + (1000 * number + _OFFSET[component] + self.differs)
        return values.to(self.dtype) if component == "value" else values

    def local(self, expert: int | None, component: str) -> torch.Tensor:
        """This rank's part of it, as the trainer holds it: `(in, out)`."""
        return self._cut(self.whole(expert, component)).T

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        if self.shard is None:
            return whole
        rank, size, dim = self.shard.rank, self.shard.world_size, self.shard.dim
        if self.bounds is not None:
            return whole.narrow(dim, self.bounds[0], self.bounds[1] - self.bounds[0])
        pieces = whole.split(self.shard.component_sizes or whole.shape[dim], dim)
        return torch.cat([piece.chunk(size, dim)[rank] for piece in pieces], dim)

    def packed(self, component: str) -> torch.Tensor:
        if self.experts is None:
            return self.local(None, component).clone()
        some = self.local(0, component)
        rows = [torch.full_like(some, -1) if e is None else self.local(e, component) for e in self.experts]
        return torch.stack(rows)

    def exports(self, parameter: torch.Tensor) -> list[Export]:
        if self.experts is None:
            return [Export(self.key(None), parameter, shard=self.shard)]
        return [
            Export(self.key(expert), parameter, expert=row, shard=self.shard)
            for row, expert in enumerate(self.experts)
            if expert is not None
        ]


def build(sites: Sequence[Site]) -> tuple[list[Export], AdamState, list[torch.Tensor]]:
    """Return a rank's exports and optimizer state, and every tensor that they read."""
    exports: list[Export] = []
    masters: list[tuple[torch.Tensor, torch.Tensor]] = []
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for site in sites:
        parameter, master = torch.nn.Parameter(site.packed("value")), torch.nn.Parameter(site.packed("master"))
        masters.append((parameter, master))
        states[master] = {name: site.packed(name) for name in site.moments} | {"step": torch.tensor(float(site.step))}
        exports.extend(site.exports(parameter))
    # A rank without exports still has an optimizer, which holds something else.
    spare = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([*states, spare], lr=1e-3, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1)
    optimizer.state.update(states)
    read = [tensor for pair in masters for tensor in pair]
    read += [value for state in states.values() for value in state.values()]
    return exports, AdamState.from_optimizer(optimizer, masters), read


def assert_holds(path: Path, sites_by_rank: Sequence[Sequence[Site]], optimizer: bool = True) -> None:
    """Compare a checkpoint with what the sites say; of a key on several ranks, the lowest rank's counts."""
    expected: dict[str, tuple[Site, int | None]] = {}
    for sites in sites_by_rank:
        for site in sites:
            for expert in [None] if site.experts is None else [e for e in site.experts if e is not None]:
                expected.setdefault(site.key(expert), (site, expert))
    with load_checkpoint(path) as checkpoint:
        assert checkpoint.keys == tuple(sorted(expected))
        for key, (site, expert) in expected.items():
            found = checkpoint.exported(key)
            assert found.dtype is site.dtype, key
            assert torch.equal(found, site.whole(expert, "value")), key
            if optimizer:
                state = checkpoint.state(key)
                for component in ("master", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(getattr(state, component), site.whole(expert, component)), (key, component)
                assert state.step == site.step, key
        assert (checkpoint.optimizer is not None) is optimizer


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def names(directory: Path) -> list[str]:
    """What stands in a directory, hidden entries too."""
    return sorted(os.listdir(directory))
