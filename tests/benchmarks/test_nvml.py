"""Cases 13 and 14: NVML that gives nothing, and the right GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpus, nvml
from benchmarks.check import doubts_of, render_doubts
from benchmarks.environment import capture
from benchmarks.missing import Missing
from benchmarks.nvml import VisibleDeviceError, hash_uuid, open_gpu, open_library, visible_uuids
from benchmarks.schema import validate
from tests.benchmarks.fake_nvml import (
    FakeNvml,
    NVMLError,
    NVMLError_LibraryNotFound,
    NVMLError_NoPermission,
    NVMLError_NotSupported,
    NVMLError_Uninitialized,
)

FIRST, SECOND = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1d3d5f37-0000-4106-c12f-000000000002"
INSTANCE = "MIG-4f2a8c1e-0000-5555-9999-000000000003"


def opened(module: FakeNvml) -> Any:
    library = open_library(module)
    assert not isinstance(library, Missing)
    return library


def test_used_memory_that_is_none_is_missing_with_a_reason() -> None:
    used = open_gpu(FIRST, opened(FakeNvml({FIRST: None}))).used_bytes()
    assert isinstance(used, Missing)
    assert "tells no used memory" in used.reason


@pytest.mark.parametrize("error", [NVMLError_NotSupported, NVMLError_NoPermission, NVMLError_Uninitialized])
@pytest.mark.parametrize(
    ("function", "figure"),
    [
        ("nvmlDeviceGetMemoryInfo", "used_bytes"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_joules"),
        ("nvmlDeviceGetComputeRunningProcesses", "other_processes"),
    ],
)
def test_a_refusal_names_the_function_and_the_error(error: type[NVMLError], function: str, figure: str) -> None:
    module = FakeNvml({FIRST: 1})
    module.refuse[function] = error("refused")
    answer = getattr(open_gpu(FIRST, opened(module)), figure)()
    assert isinstance(answer, Missing)
    assert answer.reason == f"{function}: {error.__name__.removeprefix('NVMLError_')}: refused"


def test_without_the_library_every_gpu_figure_is_missing() -> None:
    library = open_library(FakeNvml({}, init=NVMLError_LibraryNotFound("NVML Shared Library Not Found")))
    assert isinstance(library, Missing)
    assert "LibraryNotFound" in library.reason
    for found in (open_gpu(FIRST, library), gpus.visible(library), gpus.driver_version(library)):
        assert isinstance(found, Missing)
        assert "LibraryNotFound" in found.reason


def test_a_gpu_whose_facts_are_refused_still_fits_the_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module = FakeNvml({FIRST: 1})
    module.refuse["nvmlDeviceGetMemoryInfo"] = NVMLError_NoPermission("Insufficient Permissions")
    monkeypatch.setattr(nvml, "load", lambda: opened(module))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = capture(tmp_path)
    (gpu,) = environment["gpus"]
    assert gpu["memory_bytes"] is None
    assert "NoPermission" in gpu["reasons"]["memory_bytes"]
    assert gpu["throttle_reasons"] == ["SwPowerCap"]
    assert gpu["cpu_affinity"] == "0-1,5-7"
    assert all(name in gpu["reasons"] for name, value in gpu.items() if value is None)
    assert FIRST not in json.dumps(environment)
    doubts = doubts_of(environment)
    validate_in_run(environment, doubts)
    link = next(doubt for doubt in doubts if "link generation" in doubt["what"])
    assert link["ok"] is None, "an idle link sleeps at generation 1: that is no fault"
    assert "throttling: SwPowerCap" in render_doubts(doubts)


def test_other_processes_are_a_doubt(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module = FakeNvml({FIRST: 1})
    module.processes = [SimpleNamespace(pid=1)]
    monkeypatch.setattr(nvml, "load", lambda: opened(module))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (doubt,) = [d for d in doubts_of(capture(tmp_path)) if "other processes" in d["what"]]
    assert (doubt["found"], doubt["limit"], doubt["ok"]) == (1, 0, False)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [FIRST, SECOND]),
        ("1", [SECOND]),
        ("1,0", [SECOND, FIRST]),
        (" 1 , 0 ", [SECOND, FIRST]),
        (SECOND, [SECOND]),
        ("GPU-1d3d", [SECOND]),
        ("gpu-8932F937", [FIRST]),
        (INSTANCE, [INSTANCE]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [FIRST]),
    ],
)
def test_visible_devices_by_uuid(visible: str | None, expected: list[str]) -> None:
    assert visible_uuids(visible, [FIRST, SECOND], [INSTANCE]) == expected


@pytest.mark.parametrize("visible", ["2", "GPU-ffff", "MIG-0", "cuda:0", "8932f937", "GPU-"])
def test_an_unknown_device_is_an_error_and_not_index_0(visible: str) -> None:
    with pytest.raises(VisibleDeviceError, match="CUDA_VISIBLE_DEVICES holds"):
        visible_uuids(visible, [FIRST, SECOND], [INSTANCE])


def test_nvml_is_asked_about_the_gpu_that_cuda_uses() -> None:
    """CUDA's device 0 is NVML's second: the UUID finds it, as torch tells it without a prefix."""
    library = opened(FakeNvml({FIRST: 111, SECOND: 222}))
    assert open_gpu(SECOND.removeprefix("GPU-"), library).used_bytes() == 222
    assert isinstance(open_gpu("ffffffff-0000", library), Missing)


def test_visible_gpus_follow_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    library = opened(FakeNvml({FIRST: 111, SECOND: 222}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [gpu.uuid for gpu in gpus.visible(library)] == [SECOND, FIRST]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible(library) == []


def test_a_hashed_uuid_is_the_same_with_and_without_prefix_and_does_not_tell_it() -> None:
    assert hash_uuid(FIRST) == hash_uuid(FIRST.removeprefix("GPU-")) != hash_uuid(SECOND)
    assert "8932f937" not in hash_uuid(FIRST)


def validate_in_run(environment: dict[str, Any], doubts: list[dict[str, Any]]) -> None:
    session = {"started_at": environment["captured_at"], "ended_at": None, "status": "running"}
    run = {
        "kind": "run",
        "schema_version": 1,
        "run_id": "20260101-some-gpu-gpux1-abcdef0",
        "status": "running",
        "command": [],
        "settings": {},
        "cases": [],
        "jobs": [],
        "sessions": [session],
        "environment": {"start": environment, "end": None},
        "doubts": doubts,
    }
    assert validate(run)
