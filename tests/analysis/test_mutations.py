"""A gate that fails closed: the golden adopt run with one thing taken away or spoilt is never "adopt"."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.decision import Decision, Outcome, decide
from analysis.load import load_run
from analysis.policy import load_policy
from tests.analysis.golden import Json, Made
from tests.analysis.variants import committed

# Fewer resamples: what is looked for here does not hang on an interval's third digit.
POLICY = replace(load_policy(), statistics=replace(load_policy().statistics, resamples=200))
ADOPT = committed("adopt")
REMOVED = object()

Place = tuple[Any, Any, Json]


def test_the_unspoilt_run_is_adopt(tmp_path: Path) -> None:
    assert _decision(ADOPT, tmp_path).outcome is Outcome.ADOPT


def _figures() -> Iterator[tuple[str, str]]:
    for name in POLICY.figures.required:
        for path in ("ceiling",) if name.startswith("pinned") else ("slice", "coalesced"):
            yield name, path


def _places(made: Made, name: str, path: str) -> list[Place]:
    """Return (holder, key, line) of each place where a figure stands."""
    found: list[Place] = []
    for line in made.chosen(path=path):
        if line["concurrency"] == "alone":
            continue
        if name == "digest" or name.startswith(("transfers.", "predicted.")):
            *holders, key = name.split(".")
            holder: Any = line
            for each in holders:
                holder = holder[each]
            if holder[key] is not None:
                found.append((holder, key, line))
        else:
            found += [(sample, name, line) for sample in line["samples"] if sample.get(name) is not None]
    return found


def _spoil(place: Place, change: Callable[[float], object]) -> None:
    holder, key, line = place
    value = holder[key]
    if isinstance(value, dict):  # a count of transfers
        holder[key] = {part: change(number) for part, number in value.items()}
        return
    if isinstance(value, str):
        holder[key] = change(1.0) if not isinstance(change(1.0), float | int) else f"{line['rank']}a" * 32
        return
    new = change(value)
    holder[key] = int(new) if isinstance(value, int) and isinstance(new, float) and math.isfinite(new) else new


SPOILT: dict[str, Callable[[float], object]] = {
    "nan": lambda _: math.nan,
    "negative": lambda value: -abs(value) or -1,
    "zero": lambda _: 0,
    "infinite": lambda _: math.inf,
    "30 times better": lambda value: value / 30,
    "null without a reason": lambda _: None,
}


# Whatever the file's reader refuses is refused by the line: once is enough.
EVERYWHERE = ("zero", "30 times better", "null with a reason")
WAYS = [(how, "in one place") for how in (*SPOILT, "removed", "null with a reason")]
WAYS += [(how, "everywhere") for how in EVERYWHERE]


@pytest.mark.parametrize(("how", "where"), WAYS)
@pytest.mark.parametrize(("name", "path"), list(_figures()))
def test_a_spoilt_figure_is_never_adopted(name: str, path: str, how: str, where: str, tmp_path: Path) -> None:
    made = copy.deepcopy(ADOPT)
    places = _places(made, name, path)
    assert places, "the golden run has every required figure"
    if where == "in one place":
        places = places[len(places) // 2 :][:1]
    for place in places:
        holder, key, line = place
        if how == "removed":
            del holder[key]
        elif how == "null with a reason":
            holder[key] = None
            line["reasons"][name] = "planted"
        elif how == "30 times better" and name.startswith("pinned"):
            holder[key] *= 30
        elif how == "null without a reason":
            holder[key] = None
        else:
            _spoil(place, SPOILT[how])
    decision = _decision(made, tmp_path)
    assert decision.outcome is not Outcome.ADOPT
    assert decision.exit_code in (3, 4, 5)
    assert _names(decision, name), [str(reason) for reason in decision.all_reasons]


def _names(decision: Decision, name: str) -> bool:
    """Whether a reason names the figure: whole, or by the key that is missing or wrong in the file."""
    key = name.rsplit(".", 1)[-1]
    group = ".".join(name.split(".")[:2]) if name.startswith("transfers") else name
    texts = [str(reason) for reason in decision.all_reasons]
    faults = [text for text in texts if "records.jsonl line" in text]
    return any(name in text or group in text for text in texts) or any(key in text for text in faults)


RECORD_LOSSES: dict[str, tuple[Callable[[Json], bool], str]] = {
    "one path": (lambda line: line["path"] == "coalesced", "coalesced"),
    "the baseline": (lambda line: line["path"] == "slice", "slice"),
    "one rank": (lambda line: line["rank"] == 1, "rank 1"),
    "one pass": (lambda line: line["pass"] == "memory", "memory"),
    "one round": (lambda line: line["round"] == 3, "round 3"),
    "the ceiling": (lambda line: line["pass"] == "ceiling", "pinned_bytes_per_second"),
    "one record": (lambda line: line["pass"] == "observe" and line["rank"] == 1 and line["path"] == "slice", "observe"),
    "all rows": (lambda _: True, "records.jsonl"),
}


@pytest.mark.parametrize("what", RECORD_LOSSES)
def test_a_lost_record_is_never_adopted(what: str, tmp_path: Path) -> None:
    lost, named = RECORD_LOSSES[what]
    made = copy.deepcopy(ADOPT)
    made.lines[:] = [line for line in made.lines if not lost(line)]
    decision = _decision(made, tmp_path)
    assert decision.outcome is Outcome.NOT_ENOUGH
    assert any(named in str(reason) for reason in decision.all_reasons), decision.all_reasons


def test_an_error_record_in_the_place_of_a_good_one(tmp_path: Path) -> None:
    made = copy.deepcopy(ADOPT)
    line = made.chosen("memory", "coalesced", 1)[0]
    line |= {"status": "failed", "samples": [], "error": {"type": "KilledError", "message": "gone", "traceback": "..."}}
    decision = _decision(made, tmp_path)
    assert decision.outcome is Outcome.NOT_ENOUGH
    assert any("KilledError: gone" in str(reason) for reason in decision.all_reasons)


@pytest.mark.parametrize("file", ["run.json", "records.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]\n", b"null\n", b"\xff\xfe\n", b'{"schema_version": 1}\n', None])
def test_a_broken_file_is_never_adopted(file: str, content: bytes | None, tmp_path: Path) -> None:
    folder = copy.deepcopy(ADOPT).write(tmp_path)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    decision = decide([load_run(folder)], POLICY)
    assert decision.outcome is Outcome.NOT_ENOUGH
    assert any(file in str(reason) for reason in decision.all_reasons)
    assert main(["decide", str(folder)]) == 4


def test_another_runs_records_are_refused(tmp_path: Path) -> None:
    made = copy.deepcopy(ADOPT)
    for line in made.lines:
        line["started_at"] = line["started_at"].replace("2026-", "2025-")
    decision = _decision(made, tmp_path)
    assert decision.outcome is Outcome.NOT_ENOUGH
    assert any("another run" in str(reason) for reason in decision.all_reasons)


def test_an_older_schema_is_refused_by_its_number(tmp_path: Path) -> None:
    made = copy.deepcopy(ADOPT)
    made.lines[5]["schema_version"] = 0
    decision = _decision(made, tmp_path)
    assert decision.outcome is Outcome.NOT_ENOUGH
    assert any("line 6: schema_version is 0" in str(reason) for reason in decision.all_reasons)


def test_a_record_twice_is_refused(tmp_path: Path) -> None:
    made = copy.deepcopy(ADOPT)
    made.lines.append(made.lines[3])
    assert _decision(made, tmp_path).outcome is Outcome.NOT_ENOUGH


def test_no_run_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decide", str(tmp_path / "nowhere")])
    assert ended.value.code == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_folder_without_a_run_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decide", str(tmp_path)])
    assert ended.value.code == 2
    assert "holds no run.json" in capsys.readouterr().err


def test_a_path_that_no_run_measured_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy.deepcopy(ADOPT).write(tmp_path)
    assert main(["decide", str(folder), "--path", "fast"]) == 2
    assert "--path is 'fast'; the runs measured coalesced" in capsys.readouterr().err
    assert main(["decide", str(folder), "--path", "coalesced"]) == 0


def test_an_exception_is_not_enough_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy.deepcopy(ADOPT).write(tmp_path)

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("analysis.decision.collect", broken)
    assert decide([load_run(folder)], POLICY).outcome is Outcome.NOT_ENOUGH
    monkeypatch.setattr("analysis.__main__.decide", broken)
    assert main(["decide", str(folder)]) == 4


def test_a_good_run_does_not_take_a_bad_one_back(tmp_path: Path) -> None:
    good = copy.deepcopy(ADOPT).write(tmp_path)
    slow = copy.deepcopy(ADOPT)
    slow.info["run_id"] = "20260303-intel-xeon-64cpu-gpux2-0123abc"
    for line in slow.chosen("timing", "coalesced"):
        for sample in line["samples"]:
            for name in ("fence_seconds", "prepare_seconds", "device_seconds"):
                sample[name] *= 2
    bad = slow.write(tmp_path)
    assert decide([load_run(good), load_run(bad)], POLICY).outcome is Outcome.HOLD
    assert decide([load_run(bad), load_run(good)], POLICY).outcome is Outcome.HOLD


def test_a_mismatch_counts_on_any_machine_and_beside_a_good_run(tmp_path: Path) -> None:
    good = copy.deepcopy(ADOPT).write(tmp_path)
    made = committed("cpu")
    for line in made.chosen(path="coalesced"):
        line["digest"] = line["digest"] and "77" * 32
    wrong = made.write(tmp_path)
    decision = decide([load_run(good), load_run(wrong)], POLICY)
    assert (decision.outcome, decision.exit_code) == (Outcome.HOLD, 5)


def test_a_run_on_a_cpu_beside_a_good_one_says_nothing(tmp_path: Path) -> None:
    runs = [load_run(made.write(tmp_path)) for made in (copy.deepcopy(ADOPT), committed("cpu"))]
    assert decide(runs, POLICY).outcome is Outcome.ADOPT


def _decision(made: Made, parent: Path) -> Decision:
    folder = copy.deepcopy(made).write(parent)
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["run_id"] == folder.name
    return decide([load_run(folder)], POLICY)
