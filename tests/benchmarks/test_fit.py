from __future__ import annotations

from pathlib import Path

from benchmarks.assemble import Assembler
from benchmarks.fit import Fit
from benchmarks.schedule import tasks_of
from tests.benchmarks.settings import make_settings


def fit(tmp_path: Path, **changes: object) -> tuple[Fit, list[object]]:
    settings = make_settings(**changes)
    return Fit(settings, Assembler(settings), tmp_path), list(tasks_of(settings))


def test_what_does_not_fit_in_memory_is_said_before_it_starts(tmp_path: Path) -> None:
    judge, tasks = fit(tmp_path, memory_budget_bytes=1 << 20)
    assert judge.obstacle(tasks[0]) is None, "the ceiling needs no case"
    obstacle = judge.obstacle(tasks[1])
    assert obstacle is not None
    assert "of host memory; the budget is 1 MiB" in obstacle.reason


def test_what_does_not_fit_in_time_is_skipped(tmp_path: Path) -> None:
    judge, tasks = fit(tmp_path, time_budget_seconds=1.0)
    obstacle = judge.obstacle(tasks[1])
    assert obstacle is not None
    assert "of the time budget of 1 s is left" in obstacle.reason


def test_a_model_that_is_larger_than_the_disk_does_not_fit(tmp_path: Path) -> None:
    judge, tasks = fit(tmp_path, cases=("deepseek-v3/full/ep1/l58/bfloat16",), memory_budget_bytes=1 << 60)
    obstacle = judge.obstacle(tasks[1])
    assert obstacle is not None
    assert "of scratch disk" in obstacle.reason


def test_every_path_touches_as_much_memory_as_the_largest_needs(tmp_path: Path) -> None:
    judge, tasks = fit(tmp_path, cases=("irregular/lora8/gapped/ep1/l1/bfloat16",))
    assert len({judge.touch_bytes(task) for task in tasks[1:]}) == 1


def test_paths_alternate_and_every_pass_is_there() -> None:
    tasks = tasks_of(make_settings(ranks=(2,), rounds=2, alone=True, references=True))
    timed = [(t.path, t.round) for t in tasks if t.passes == ("timing",) and t.concurrency == "together"]
    assert timed == [("slice", 0), ("coalesced", 0), ("coalesced", 1), ("slice", 1)]
    assert [t.sequence for t in tasks] == list(range(len(tasks)))
    assert {p for t in tasks for p in t.passes} == {
        "ceiling", "timing", "memory", "timeline", "observe", "profile", "reference",
    }  # fmt: skip
    assert [(t.path, t.ranks) for t in tasks if t.concurrency == "alone"] == [
        ("slice", (0,)), ("slice", (1,)), ("coalesced", (0,)), ("coalesced", (1,)),
    ]  # fmt: skip
