"""Training continued after a restore is bit-identical to training that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import AdamState, CheckpointSaver, Export, load_checkpoint
from tests.builders import CONFIG, PATHS, PREFIX

EXPERTS, WIDTH, HIDDEN, BATCH = 4, 6, 5, 16


class PackedMoe(torch.nn.Module):
    """A router and, packed over the experts, two projections; one of them is a transposed view in memory."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = torch.nn.Parameter(torch.randn(WIDTH, EXPERTS).to(dtype))
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN).to(dtype))
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN).to(dtype).transpose(1, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights, chosen = (tokens @ self.router).softmax(-1).topk(2, -1)
        every = torch.einsum("eth,ehw->tew", torch.einsum("tw,ewh->eth", tokens, self.up).relu(), self.down)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (picked * weights[..., None]).sum(1)


class Run:
    """A training run: plain, or bfloat16 parameters with float32 masters that the optimizer steps."""

    def __init__(self, seed: int, dtype: torch.dtype, masters: bool, optimizer: Any) -> None:
        self.model = PackedMoe(seed, dtype)
        parameters = list(self.model.parameters())
        self.masters = (
            [(p, torch.nn.Parameter(p.detach().float().clone(memory_format=torch.preserve_format))) for p in parameters]
            if masters
            else []
        )
        self.optimizer = optimizer([master for _, master in self.masters] if masters else parameters)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randn(BATCH, WIDTH, generator=generator).to(self.model.up.dtype)
            loss = (self.model(tokens) - tokens.flip(-1)).float().square().mean()
            self.model.zero_grad()
            loss.backward()
            for parameter, master in self.masters:
                master.grad = None if parameter.grad is None else parameter.grad.float()
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in self.masters:
                    parameter.copy_(master)
            losses.append(loss.item())
        return losses

    @property
    def exports(self) -> list[Export]:
        model, layer = self.model, f"{PREFIX}.layers.0"
        return [
            Export(f"{layer}.router.weight", model.router),
            *(Export(f"{layer}.experts.{e}.up.weight", model.up, expert=e) for e in range(EXPERTS)),
            *(Export(f"{layer}.experts.{e}.down.weight", model.down, expert=e) for e in range(EXPERTS)),
        ]

    def save(self, path: Any, destination: Path) -> None:
        state = AdamState.from_optimizer(self.optimizer, self.masters)
        CheckpointSaver(path, durable=False).save(destination, self.exports, state, CONFIG)

    def everything(self) -> dict[str, Any]:
        held: dict[str, Any] = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        for number, (parameter, state) in enumerate(self.optimizer.state.items()):
            held[f"{number}.master"] = parameter.detach().clone()
            held.update({f"{number}.{name}": torch.as_tensor(value).clone() for name, value in state.items()})
        return held


def expect_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def adamw(**settings: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **settings)


OPTIMIZERS = {
    "for each": adamw(foreach=True),
    "one by one": adamw(foreach=False),
    "fused": adamw(fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
MODELS = {
    "bfloat16 with float32 masters": (torch.bfloat16, True),
    "float32": (torch.float32, False),
    "bfloat16 alone": (torch.bfloat16, False),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
class TestContinued:
    @pytest.mark.parametrize("stepped", [False, True], ids=["into a fresh optimizer", "into one that has stepped"])
    def test_is_bit_identical(self, path: Any, optimizer: str, model: str, stepped: bool, tmp_path: Path) -> None:
        uninterrupted = Run(1, *MODELS[model], OPTIMIZERS[optimizer])
        uninterrupted.train(range(5))
        uninterrupted.save(path, tmp_path / "c")
        continued = Run(2, *MODELS[model], OPTIMIZERS[optimizer])
        if stepped:
            continued.train(range(50, 53))
        load_checkpoint(tmp_path / "c").restore(continued.exports, continued.optimizer, continued.masters)

        losses = uninterrupted.train(range(5, 15))
        assert continued.train(range(5, 15)) == losses
        expect_equal(continued.everything(), uninterrupted.everything())
        assert losses[0] != losses[-1]


@pytest.mark.parametrize("path", PATHS)
def test_saving_does_not_change_training(path: Any, tmp_path: Path) -> None:
    plain, saving = (Run(1, torch.bfloat16, True, adamw()) for _ in range(2))
    for step in range(6):
        plain.train(range(step, step + 1))
        saving.train(range(step, step + 1))
        saving.save(path, tmp_path / str(step))

    expect_equal(saving.everything(), plain.everything())


@pytest.mark.parametrize("what", ["up", "router"])
def test_one_wrong_bit_would_be_seen(what: str, tmp_path: Path) -> None:
    uninterrupted = Run(1, torch.float32, False, adamw())
    uninterrupted.train(range(5))
    uninterrupted.save("coalesced", tmp_path / "c")
    continued = Run(2, torch.float32, False, adamw())
    load_checkpoint(tmp_path / "c").restore(continued.exports, continued.optimizer)
    moment = continued.optimizer.state[getattr(continued.model, what)]["exp_avg"].view(-1).view(torch.int32)
    moment[3] ^= 1 << 12
    uninterrupted.train(range(5, 15))
    continued.train(range(5, 15))

    with pytest.raises(AssertionError):
        expect_equal(continued.everything(), uninterrupted.everything())
