from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.devices import device_count
from benchmarks.scrub import scrub
from benchmarks.units import UnitError, format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--preset", "nope"], "choose from"),
        (["run", "--path", "diagonal"], "path is 'diagonal'; expected one of slice, coalesced"),
        (["run", "--path", "slice", "--path", "slice"], "expected each once"),
        (["run", "--device", "tpu"], "device is 'tpu'; expected one of cpu"),
        (["run", "--case", "x"], "expected PRESET/full"),
        (["run", "--ranks", "0"], "not a whole number, 1 or more"),
        (["run", "--time-budget", "soon"], "expected a number with s, m or h"),
        (["run", "--memory-budget", "lots"], "expected a number with B, KiB"),
        (["plan", "--layers", "999"], "layers is 999; expected 1 to 48"),
        ([], "required"),
        (["resume", "/nowhere"], "no run; expected a folder with run.json"),
        (["check", "--scratch", "/proc/nowhere"], "--scratch is '/proc/nowhere', and there is no such folder"),
        (["floors", "--scratch", "/proc/nowhere"], "--scratch is '/proc/nowhere', and there is no such folder"),
        (["run", "--device", "cpu", "--out", "/proc/x"], "--out is '/proc/x', and no run can be put there"),
        (["run", "--device", "cpu", "--import", "no_such.module"], "--import is 'no_such.module', and Python finds no"),
    ],
)
def test_misuse_exits_2_and_names_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_list_names_sources_and_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--preset", "mixtral-8x7b"]) == 0
    out = capsys.readouterr().out
    assert "mixtral-8x7b/lora8/ep1/l2/bfloat16" in out
    assert "https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json: num_local_experts" in out


def test_plan_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--case", "mixtral-8x7b/full/ep1/l32/bfloat16", "--ranks", "1", "--device", "cpu"]
    assert main([*arguments, "--bandwidth", "20GiB", "--memory-budget", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "20 GiB/s (stated)" in out
    assert "DOES NOT FIT  host memory" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip().startswith(("slice", "coal"))}
    assert (rows["slice"][2], rows["coalesced"][2]) == (str(32 * 8 * 2 * 3), str(32 * 2 * 3))


def test_check_gives_a_number_a_limit_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    for what in ("free memory", "free scratch disk", "swap in use", "memory lock limit", "CPU frequency governor"):
        (line,) = [line for line in lines if what in line]
        assert "(limit " in line


def test_units() -> None:
    assert [format_bytes(n) for n in (0, 999, 1 << 20, 36282368, 5 << 40)] == [
        "0 B",
        "999 B",
        "1 MiB",
        "34.6 MiB",
        "5 TiB",
    ]
    assert [format_seconds(s) for s in (12.3, 0.0421, 6.3e-6)] == ["12.3 s", "42.1 ms", "6.3 us"]
    assert [parse_bytes(t) for t in ("16GiB", "1.5 MiB", "2K", "7")] == [16 << 30, 3 << 19, 2048, 7]
    assert [parse_seconds(t) for t in ("90s", "8m", "1.5h", "30")] == [90, 480, 5400, 30]
    with pytest.raises(UnitError):
        parse_bytes("-1")


def test_scrub_takes_paths_and_names_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import scrub as module

    monkeypatch.setattr(module.socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(module, "_user", lambda: "ada")
    text = scrub(f'File "{module.ROOT}/packckpt/plan.py", node17: ada cannot; adamw can')
    assert text == 'File "<repo>/packckpt/plan.py", <host>: <user> cannot; adamw can'


def test_a_run_that_times_nothing_is_not_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time budget may leave cases out, but not every case of a path."""
    arguments = ["run", "--case", "olmoe-1b-7b/lora8/ep8/l1/bfloat16", "--ranks", "1", "--device", "cpu"]
    assert main([*arguments, "--time-budget", "1s", "--out", str(tmp_path)]) == 1
    assert "not measured at all: coalesced, slice, staged" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--share-device"]])
def test_a_gpu_that_is_not_there_is_a_usage_error(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.choose.device_count", lambda kind: 0)
    with pytest.raises(SystemExit) as exit_:
        main(["run", "--device", "cuda", *more, "--out", str(tmp_path / "runs")])
    assert exit_.value.code == 2
    assert "torch sees none of that kind here; expected --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(device_count("cuda") > 0, reason="shows what a machine without a GPU does")
def test_a_gpu_node_is_planned_on_a_machine_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--case", "qwen3-30b-a3b/lora8/ep1/l2/bfloat16", "--ranks", "1", "--device", "cuda"]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "state its speed: --bandwidth" in capsys.readouterr().err
    assert main([*arguments, "--bandwidth", "20GiB"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  s")}
    # Weights and three states: one window each on the device, whose weights fit one buffer, for each of two layers.
    assert int(rows["staged"][3]) < 10 < int(rows["slice"][3])
