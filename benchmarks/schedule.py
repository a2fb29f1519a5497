"""Which processes a run starts, in which order: paths alternate, and the most telling come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cases import Case, parse_case
from benchmarks.paths import REFERENCE
from benchmarks.record import Pass
from benchmarks.settings import Settings
from benchmarks.task import Task

# Memory first: its first save shall meet a fresh heap. What only counts comes last.
WATCHING: tuple[Pass, ...] = ("memory", "timeline", "observe", "profile")


def tasks_of(settings: Settings) -> list[Task]:
    """Return the tasks of a run, in order."""
    drafts = list(_drafts(settings))
    return [replace(task, sequence=number) for number, task in enumerate(drafts)]


def cases_of(settings: Settings) -> list[Case]:
    """Return the cases as they are measured: their experts are split over at least the ranks that save."""
    found: dict[str, Case] = {}
    for text in settings.cases:
        for world_size in settings.ranks:
            case = parse_case(text).with_ranks(world_size)
            found.setdefault(case.id, case)
    return list(found.values())


def _drafts(settings: Settings) -> Iterator[Task]:
    yield Task(None, "ceiling", "ceiling", ("ceiling",), 0, 1, (0,), "together", 0)
    for text in settings.cases:
        sizes = [(parse_case(text).with_ranks(world_size), world_size) for world_size in settings.ranks]
        for case, world_size in sizes:
            yield from _compared(settings, case, world_size)
        for case, world_size in sizes:
            yield from _beside(settings, case, world_size)


def _compared(settings: Settings, case: Case, world_size: int) -> Iterator[Task]:
    """Every path, timed and watched."""
    everyone = tuple(range(world_size))
    for number in range(settings.rounds):
        # A B, then B A: a drift of the machine falls on both alike.
        for arm in settings.arms if number % 2 == 0 else settings.arms[::-1]:
            yield Task(case.id, arm.name, arm.implementation, ("timing",), number, world_size, everyone, "together", 0)
    for arm in settings.arms:
        yield Task(case.id, arm.name, arm.implementation, WATCHING, 0, world_size, everyone, "together", 0)


def _beside(settings: Settings, case: Case, world_size: int) -> Iterator[Task]:
    """What stands beside the comparison: torch's stager, and each rank of a pair alone."""
    if settings.references:
        everyone = tuple(range(world_size))
        yield Task(case.id, REFERENCE, REFERENCE, ("reference",), 0, world_size, everyone, "together", 0)
    if settings.alone and world_size > 1:
        for arm in settings.arms:
            for rank in range(world_size):
                yield Task(case.id, arm.name, arm.implementation, ("timing",), 0, world_size, (rank,), "alone", 0)
