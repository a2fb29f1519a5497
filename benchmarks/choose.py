"""From the command line to settings: which cases, on which device, within which budgets."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence

from benchmarks import environment
from benchmarks.cases import Case, cases_of, parse_case
from benchmarks.devices import default_kind, device_count
from benchmarks.missing import Missing
from benchmarks.paths import SAVER_PATHS, parse_arm
from benchmarks.presets import load_preset
from benchmarks.settings import RANKS, Settings, SettingsError

DEFAULT_CASE = "qwen3-30b-a3b/lora8/ep1/l2/bfloat16"
MEMORY_SHARE = 0.8
# A bare `run` keeps its promise of three minutes on a busy machine too; the rest is for its start and its table.
BARE_RUN_SECONDS = 165.0


def chosen_cases(parsed: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for: ids as they are, presets as all their cases."""
    named = [parse_case(text) for text in parsed.cases]
    presets = [load_preset(name) for name in parsed.presets or ()]
    of_presets = [case for preset in presets for case in cases_of(preset, parsed.layers, parsed.dtype)]
    if named or of_presets:
        return [*named, *of_presets]
    default = parse_case(DEFAULT_CASE)
    return [
        Case(
            default.preset,
            default.method,
            default.lora_rank,
            layers=parsed.layers or default.layers,
            dtype=parsed.dtype,
        )
    ]


def chosen_settings(parsed: argparse.Namespace, world_size: int | None) -> Settings:
    """Return the settings of a run.

    Args:
        world_size: of the torchrun or Slurm job that the driver is part of, or None.
    """
    device = parsed.device or default_kind()
    ranks = tuple(parsed.ranks or _default_ranks(device, world_size, parsed.share_device))
    if world_size is not None and max(ranks) > world_size:
        raise SettingsError(f"ranks is {max(ranks)}, and this job was started with {world_size}")
    _expect_devices(device, ranks, parsed.share_device)
    _expect_modules(parsed.imports)
    return Settings(
        cases=tuple(case.id for case in chosen_cases(parsed)),
        arms=tuple(parse_arm(text) for text in parsed.paths or SAVER_PATHS),
        ranks=ranks,
        device=device,
        share_device=parsed.share_device,
        repeats=parsed.repeats,
        rounds=parsed.rounds,
        memory_budget_bytes=memory_budget_bytes(parsed.memory_budget),
        time_budget_seconds=parsed.time_budget or (None if parsed.presets or parsed.cases else BARE_RUN_SECONDS),
        case_seconds=parsed.case_limit,
        durable=not parsed.no_durable,
        references=not parsed.no_reference,
        alone=not parsed.no_alone,
        imports=tuple(parsed.imports),
    )


def memory_budget_bytes(given: int | None) -> int:
    """Return the host memory that a case may need."""
    if given is not None:
        return given
    available = environment.available_bytes()
    if isinstance(available, Missing):
        raise SettingsError(f"free memory is not known ({available.reason}); give --memory-budget")
    return int(MEMORY_SHARE * available)


def _expect_modules(names: Sequence[str]) -> None:
    for name in names:
        try:
            found = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise SettingsError(f"--import is {name!r}, and Python finds no such module; is its folder in PYTHONPATH?")


def _default_ranks(device: str, world_size: int | None, share_device: bool) -> tuple[int, ...]:
    if world_size is not None:
        return tuple(sorted({1, world_size}))
    if device == "cpu" or share_device:
        return RANKS
    return tuple(n for n in RANKS if n <= device_count(device)) or (1,)


def _expect_devices(device: str, ranks: tuple[int, ...], share_device: bool) -> None:
    count = device_count(device)
    if count == 0:
        raise SettingsError(f"device is {device!r}, and torch sees none of that kind here; expected --device cpu")
    if device == "cpu" or share_device or max(ranks) <= count or "WORLD_SIZE" in os.environ:
        return
    raise SettingsError(
        f"ranks is {max(ranks)}, and there is {count} {device} device; expected at most {count}, "
        "or --share-device, which puts all ranks on one and labels them so"
    )
