"""The staged path under the driver: counts on the emulated accelerator, and what the CPU can not observe."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import parse_case
from benchmarks.predict import predict
from benchmarks.worker import Worker
from tests import emulated
from tests.benchmarks.orders import make_order

emulated.install_or_skip()
CASES = [
    "irregular/lora8/gapped/ep8/l1/bfloat16",
    "irregular/lora8/sparse/ep8/l1/bfloat16",
    "irregular/lora8/reordered/ep8/l1/bfloat16",
]


@pytest.mark.parametrize("case_id", CASES)
def test_counts_and_device_memory_are_the_predicted_ones(tmp_path: Path, case_id: str) -> None:
    predicted = predict(parse_case(case_id), "staged", 0, 1, emulated.NAME)
    order = make_order(tmp_path, "staged", ("observe", "memory"), case_id=case_id, device=emulated.NAME)
    worker = Worker(order, 0)
    observed = worker.run("observe")
    assert observed.status == "ok", observed.error
    for what, count in (("optimizer", predicted.optimizer), ("all", predicted.all)):
        expected = {"calls": count.calls, "bytes": count.bytes}
        assert observed.transfers[what] == {"logged": expected, "observed": expected}
    assert predicted.all.calls == 4, "irregular exports take one copy a file, as complete ones do"
    memory = worker.run("memory")
    assert memory.status == "ok", memory.error
    for sample in memory.samples:
        assert sample["device_peak_allocated_bytes"] == pytest.approx(predicted.device_peak_bytes, rel=0.1)


def test_on_the_cpu_the_observed_count_is_missing_with_its_reason(tmp_path: Path) -> None:
    case_id = CASES[0]
    outcome = Worker(make_order(tmp_path, "staged", ("observe",), case_id=case_id), 0).run("observe")
    assert outcome.status == "ok", outcome.error
    predicted = predict(parse_case(case_id), "staged", 0, 1, "cpu")
    assert outcome.transfers["all"]["logged"] == {"calls": predicted.all.calls, "bytes": predicted.all.bytes}
    assert outcome.transfers["all"].get("observed") is None
    assert any("numpy" in reason for reason in outcome.reasons.values())
