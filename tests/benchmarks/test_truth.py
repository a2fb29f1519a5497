"""On the emulated accelerator the answer is known, and the driver must find it. Its figures are no evidence."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy
import pytest

from benchmarks.assemble import Assembler
from benchmarks.cases import parse_case
from benchmarks.launcher import run_ranks
from benchmarks.predict import predict
from benchmarks.record import Count
from benchmarks.stopwatch import Stopwatch
from benchmarks.worker import Worker
from tests import emulated
from tests.benchmarks.orders import TINY, make_order
from tests.benchmarks.settings import make_settings

emulated.install_or_skip()


# Few calls, so that each can cost so much that what else a save does is lost in it.
FEW_CALLS = "gpt-oss-20b/lora1/ep8/l1/bfloat16"


def timed(scratch: Path, implementation: str, saves: int, case_id: str = TINY) -> Worker:
    """Return a worker whose set-up, and its first save of a few bytes, are over."""
    scratch.mkdir(parents=True, exist_ok=True)
    order = make_order(scratch, implementation, ("timing",), case_id=case_id, device=emulated.NAME, saves=saves)
    worker = Worker(order, 0)
    assert worker.saver is not None
    assert worker.trainer.exports
    return worker


SETTINGS = pytest.mark.parametrize(
    ("per_call_seconds", "per_byte_seconds"),
    [(0.06, 0.0), (0.02, 1e-6), (0.0, 2e-6)],
    ids=["calls decide", "both", "no difference"],
)


def expected_ratio(per_call_seconds: float, per_byte_seconds: float) -> float:
    counts = [predict(parse_case(FEW_CALLS), path, 0, 1, emulated.NAME).all for path in ("slice", "coalesced")]
    slice_seconds, coalesced_seconds = (c.calls * per_call_seconds + c.bytes * per_byte_seconds for c in counts)
    return slice_seconds / coalesced_seconds


def found_ratio(workers: dict[str, Worker], per_call_seconds: float, per_byte_seconds: float) -> float:
    fences = {}
    for path, worker in workers.items():
        with emulated.cost(per_call_seconds, per_byte_seconds):
            outcome = worker.run("timing")
        assert outcome.status == "ok", outcome.error
        steady = [sample["fence_seconds"] for sample in outcome.samples if sample["phase"] == "steady"]
        # The shortest: a busy machine can only add to what was injected.
        fences[path] = min(steady)
    return fences["slice"] / fences["coalesced"]


@SETTINGS
def test_the_ratio_of_two_paths_is_the_computed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_call_seconds: float, per_byte_seconds: float
) -> None:
    """On a clock that only the injected costs move, so that a busy machine changes nothing."""
    now = [0.0]
    monkeypatch.setattr(emulated, "_wait", lambda seconds: now.__setitem__(0, now[0] + seconds))
    workers = {path: timed(tmp_path / path, path, 3, FEW_CALLS) for path in ("slice", "coalesced")}
    for worker in workers.values():
        worker.watch = Stopwatch(worker.device, clock=lambda: now[0])
    found = found_ratio(workers, per_call_seconds, per_byte_seconds)
    assert found == pytest.approx(expected_ratio(per_call_seconds, per_byte_seconds), rel=1e-9)


@pytest.mark.slow
@SETTINGS
def test_the_ratio_is_the_computed_one_on_the_real_clock(
    tmp_path: Path, per_call_seconds: float, per_byte_seconds: float
) -> None:
    workers = {path: timed(tmp_path / path, path, 3, FEW_CALLS) for path in ("slice", "coalesced")}
    found = found_ratio(workers, per_call_seconds, per_byte_seconds)
    assert found == pytest.approx(expected_ratio(per_call_seconds, per_byte_seconds), rel=0.05)


def test_the_counts_are_exact_from_a_process_to_the_record(tmp_path: Path) -> None:
    """48 exports, 6 packed parameters: 144 optimizer copies against 18, by four who do not ask each other."""
    for path, calls in (("slice", 144), ("coalesced", 18)):
        scratch = tmp_path / path
        scratch.mkdir()
        imports = ("tests.benchmarks.emulated_device",)
        order = make_order(scratch, path, ("observe",), device=emulated.NAME, imports=imports)
        results = run_ranks(order, [0], 120)
        settings = make_settings(device=emulated.NAME, imports=imports)
        (record,) = Assembler(settings).records(order.task, results, "2026-01-01T00:00:00+00:00", 1.0)
        assert record.status == "ok", record.error
        optimizer = record.transfers["optimizer"]
        assert optimizer["predicted"] == optimizer["logged"] == optimizer["observed"]
        assert optimizer["observed"] == Count(calls, 3 * 4 * 8 * 3 * (2048 + 1024))
        assert record.transfers["all"]["observed"] == record.transfers["all"]["predicted"]
        assert record.samples[0]["synchronize_calls"] is not None
        assert record.samples[0]["synchronize_calls"] >= 1
        assert record.samples[0]["item_calls"] == 6, "one step a packed parameter, read on the host"
        assert record.device is not None
        assert record.device.kind == emulated.NAME


def test_the_boundary_itself_agrees_with_the_observer(tmp_path: Path) -> None:
    for path in ("slice", "coalesced"):
        scratch = tmp_path / path
        scratch.mkdir()
        worker = Worker(make_order(scratch, path, ("observe",), device=emulated.NAME), 0)
        assert worker.trainer.exports
        assert worker.saver is not None  # its warm-up save is over
        with emulated.observe() as ledger:
            outcome = worker.run("observe")
        assert outcome.transfers["all"]["observed"] == {"calls": ledger.d2h_calls, "bytes": ledger.d2h_bytes}


def test_device_memory_is_that_of_the_save(tmp_path: Path) -> None:
    """A gapped view is packed on the device first: one expert on the slice path, the whole parameter coalesced."""
    case_id = "irregular/lora8/gapped/ep8/l1/bfloat16"
    for path in ("slice", "coalesced"):
        scratch = tmp_path / path
        scratch.mkdir()
        order = make_order(scratch, path, ("memory",), case_id=case_id, device=emulated.NAME)
        outcome = Worker(order, 0).run("memory")
        assert outcome.status == "ok", outcome.error
        predicted = predict(parse_case(case_id), path, 0, 1, emulated.NAME)
        for sample in outcome.samples:
            assert sample["device_peak_allocated_bytes"] == pytest.approx(predicted.device_peak_bytes, rel=0.1)
            assert sample["device_resident_bytes"] == pytest.approx(predicted.resident_device_bytes, rel=0.02)
        assert "emu" in outcome.reasons["device_peak_reserved_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_against_a_finds_no_difference(tmp_path: Path) -> None:
    """One path under two names, 20 runs of A B B A: the interval for the ratio holds 1 in at least 17."""
    generator = numpy.random.default_rng(0)
    contains = 0
    for run in range(20):
        samples: dict[str, list[float]] = {"a": [], "b": []}
        for number, name in enumerate("abba"):
            with emulated.cost(0.0002):
                outcome = timed(tmp_path / f"{run}-{number}", "coalesced", 5, FEW_CALLS).run("timing")
            samples[name] += [s["fence_seconds"] for s in outcome.samples if s["phase"] == "steady"]
        low, high = ratio_interval(generator, samples["a"], samples["b"])
        contains += low <= 1 <= high
    assert contains >= 17


def ratio_interval(generator: numpy.random.Generator, a: list[float], b: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the ratio of medians."""
    ratios = [
        statistics.median(generator.choice(a, len(a))) / statistics.median(generator.choice(b, len(b)))
        for _ in range(1000)
    ]
    low, high = numpy.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
