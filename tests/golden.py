"""The five saves of the origin trainer: read the inputs, build exports and optimizer, name the expected files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from packckpt import AdamState, Export, Shard

ROOT = Path(__file__).parent / "data" / "golden"
NAMES = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


@dataclass
class GoldenRank:
    """One rank's part of a golden save."""

    exports: list[Export] = field(default_factory=list)
    masters: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    optimizer: torch.optim.AdamW | None = None

    @property
    def state(self) -> AdamState | None:
        return None if self.optimizer is None else AdamState.from_optimizer(self.optimizer, self.masters)


def case(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / name / "case.json").read_text())
    return content


def expected(name: str) -> Path:
    return ROOT / name / "expected"


def load_rank(name: str, rank: int, device: Any = None) -> GoldenRank:
    """Build the trainer's tensors; `device` maps a host tensor to where it shall live (default: stays)."""
    content = case(name)
    tensors = load_file(ROOT / name / f"inputs-r{rank}.safetensors")
    place = device or (lambda tensor: tensor)
    made = GoldenRank()
    states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for index, site in enumerate(content["sites"][rank]):
        shard = None if site["shard"] is None else Shard(**site["shard"])
        for factor in "AB":
            parts = {
                part: place(_swapped(tensors[f"{index}.{factor}.{part}"], site["strided"]))
                for part in ("param", "master", "exp_avg", "exp_avg_sq")
                if f"{index}.{factor}.{part}" in tensors
            }
            parameter, master = torch.nn.Parameter(parts.pop("param")), torch.nn.Parameter(parts.pop("master"))
            made.masters.append((parameter, master))
            states[master] = {**parts, "step": tensors[f"{index}.{factor}.step"]}
            made.exports.extend(_site_exports(site, factor, parameter, shard))
    made.optimizer = _optimizer(content["optimizer"], states)
    return made


def _swapped(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if strided else tensor


def _site_exports(site: dict[str, Any], factor: str, parameter: torch.Tensor, shard: Shard | None) -> list[Export]:
    name = f"{site['prefix']}.lora_{factor}.weight"
    if site["experts"] is None:
        return [Export(name, parameter, shard=shard)]
    return [
        Export(name.replace("{expert}", str(expert)), parameter, expert=row, shard=shard)
        for row, expert in enumerate(site["experts"])
        if expert is not None
    ]


def _optimizer(
    hyper: dict[str, float] | None, states: dict[torch.Tensor, dict[str, torch.Tensor]]
) -> torch.optim.AdamW | None:
    if hyper is None:
        return None
    optimizer = torch.optim.AdamW(
        list(states),
        lr=hyper["learning_rate"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["eps"],
        weight_decay=hyper["weight_decay"],
    )
    optimizer.state.update(states)
    return optimizer


def assert_same_checkpoint(expected_dir: Path, made_dir: Path) -> None:
    """Compare two checkpoints: the same files, each byte for byte, and `checkpoint.json` as a JSON value."""
    files = [_files_below(root) for root in (expected_dir, made_dir)]
    assert sorted(files[0]) == sorted(files[1])
    for name, path in files[0].items():
        if name == "checkpoint.json":
            assert json.loads(path.read_text()) == json.loads(files[1][name].read_text())
        else:
            assert path.read_bytes() == files[1][name].read_bytes(), name


def _files_below(root: Path) -> dict[str, Path]:
    return {str(path.relative_to(root)): path for path in root.rglob("*") if not path.is_dir()}
