"""`packckpt verify | inspect | diff`: what they print, and their exit codes 0 fine, 1 wrong, 2 usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from packckpt import Export, load_checkpoint
from packckpt.cli import main
from packckpt.diff import Difference, differences
from packckpt.inspect import BlockSummary, as_json, format_bytes, summarize
from tests.builders import CONFIG, Trainer, key_of, save

ADAPTER = "adapter_model.safetensors"


def make(**hyper: Any) -> Trainer:
    trainer = Trainer(**hyper)
    trainer.packed("a", experts=2, step=7)
    trainer.packed("b", experts=2, dtype=torch.float16, step=9)
    trainer.dense("c", layer=None, step=0, dtype=torch.float32)
    return trainer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "c", make())
    return tmp_path / "c"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class TestVerify:
    def test_fine(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", str(saved)]) == 0
        assert capsys.readouterr() == (f"{saved}: fine, digest {load_checkpoint(saved).digest}\n", "")

    def test_wrong_says_what_is_wrong_with_which_file(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_a_bit(saved / "optimizer" / "exp_avg-000001.safetensors")
        (saved / ADAPTER).unlink()

        assert main(["verify", str(saved)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{saved}: WRONG"
        assert sorted(line.split(": ")[0].strip() for line in lines[1:]) == sorted(
            [str(saved / ADAPTER), str(saved / "optimizer" / "exp_avg-000001.safetensors")]
        )

    def test_every_directory_is_looked_at(
        self, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(tmp_path / "d", make(lr=0.5))

        assert main(["verify", str(tmp_path / "none"), str(saved), str(tmp_path / "d")]) == 1
        out = capsys.readouterr().out
        assert f"{tmp_path}/none: WRONG\n  {tmp_path}/none/checkpoint.json: no such file" in out
        assert f"{saved}: fine" in out
        assert f"{tmp_path}/d: fine" in out

    def test_what_is_not_checked_is_told(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (saved / "notes.txt").touch()

        assert main(["verify", str(saved)]) == 0
        assert "  note: notes.txt is no part of the checkpoint and was not checked\n" in capsys.readouterr().out


class TestInspect:
    def test_table(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(saved)]) == 0
        out = capsys.readouterr().out
        assert out.splitlines() == [
            f"{saved}",
            f"  digest     {load_checkpoint(saved).digest}",
            "  model      example/moe-tiny",
            "  optimizer  learning_rate 0.001, beta1 0.9, beta2 0.99, eps 1e-08, weight_decay 0.01",
            "",
            "  block                            keys  dtype              weights  optimizer  steps",
            "  __global__                       1     float32            24 B     72 B       0",
            "  base_model.model.model.layers.0  4     bfloat16, float16  48 B     288 B      7 to 9",
            "",
        ]

    def test_keys(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", "--keys", str(saved)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if "lora_A" in line]
        assert rows == [
            [key_of("c", layer=None), "float32", "2x3", "24", "B", "0"],
            [key_of("a", 0), "bfloat16", "2x3", "12", "B", "7"],
            [key_of("b", 0), "float16", "2x3", "12", "B", "9"],
            [key_of("a", 1), "bfloat16", "2x3", "12", "B", "7"],
            [key_of("b", 1), "float16", "2x3", "12", "B", "9"],
        ]

    def test_json_is_one_object_a_line(self, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save(tmp_path / "bare", make(), with_state=False)

        assert main(["inspect", "--json", str(saved), str(tmp_path / "bare")]) == 0
        first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert first == json.loads(json.dumps(as_json(load_checkpoint(saved))))
        assert first["digest"] == load_checkpoint(saved).digest
        assert first["optimizer"]["eps"] == 1e-08
        assert first["config"]["base_model_name_or_path"] == "example/moe-tiny"
        assert {entry["key"]: entry["step"] for entry in first["keys"]}[key_of("b", 1)] == 9
        assert first["keys"][1] == {
            "key": key_of("a", 0),
            "block": "base_model.model.model.layers.0",
            "dtype": "bfloat16",
            "shape": [2, 3],
            "bytes": 12,
            "step": 7,
        }
        assert (second["optimizer"], second["keys"][0]["step"]) == (None, None)

    def test_without_an_optimizer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save(tmp_path / "c", make(), with_state=False)

        assert main(["inspect", "--keys", str(tmp_path / "c")]) == 0
        out = capsys.readouterr().out
        assert "  optimizer  no optimizer saved\n" in out
        assert "float32            24 B     0 B        -\n" in out

    def test_wrong_goes_to_stderr(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flip_a_bit(saved / ADAPTER)

        assert main(["inspect", str(saved)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.startswith(f"{saved / ADAPTER}: has digest")) == ("", True)

    def test_summary(self, saved: Path) -> None:
        assert summarize(load_checkpoint(saved)) == [
            BlockSummary("__global__", 1, ("float32",), 24, 72, (0,)),
            BlockSummary("base_model.model.model.layers.0", 4, ("bfloat16", "float16"), 48, 288, (7, 9)),
        ]

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"),
         (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")],
    )  # fmt: skip
    def test_sizes(self, count: int, text: str) -> None:
        assert format_bytes(count) == text


class TestDiff:
    def test_equal(self, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save(tmp_path / "d", make())

        assert main(["diff", str(saved), str(tmp_path / "d")]) == 0
        assert capsys.readouterr().out == f"{saved} and {tmp_path / 'd'}: equal\n"

    def test_bytes_keys_steps_and_settings_are_named(
        self, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = make(eps=1e-6)
        with torch.no_grad():
            other.parameters[0][1, 0, 0] = -other.parameters[0][1, 0, 0]  # the sign is in one byte
            other.held(other.parameters[1])["exp_avg"][0] += 1024
        other._states[other.held(other.parameters[2])["master"]]["step"] = 5
        other.exports[0] = Export("new", other.parameters[0], expert=0)
        save(tmp_path / "d", other, config={**CONFIG, "r": 8, "more": None})

        assert main(["diff", str(saved), str(tmp_path / "d")]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == [
            "config: more: '(absent)' and None",
            "config: r: 4 and 8",
            "optimizer: eps: 1e-08 and 1e-06",
        ]
        assert f"{key_of('a', 0)}: only in {saved}" in lines
        assert f"new: only in {tmp_path / 'd'}" in lines
        assert f"{key_of('a', 1)}: value: 1 of 12 bytes differ, the first at byte 1" in lines
        assert f"{key_of('c', layer=None)}: step: 0 and 5" in lines
        (moment,) = [line for line in lines if line.startswith(key_of("b", 0))]
        assert moment.startswith(f"{key_of('b', 0)}: exp_avg: ")
        assert lines[-1] == f"{saved} and {tmp_path / 'd'}: 8 differences"
        assert len(lines) == 9

    def test_counts_bytes(self, saved: Path, tmp_path: Path) -> None:
        other = make()
        with torch.no_grad():
            other.held(other.parameters[0])["exp_avg_sq"][1].view(torch.int32).bitwise_xor_(0x01000001)
        save(tmp_path / "d", other)

        assert list(differences(load_checkpoint(saved), load_checkpoint(tmp_path / "d"))) == [
            Difference(key_of("a", 1), "exp_avg_sq: 12 of 24 bytes differ, the first at byte 0", 12)
        ]

    def test_dtype_and_shape(self, saved: Path, tmp_path: Path) -> None:
        other = make()
        other.exports[-1] = Export(other.exports[-1].key, other.parameter(3, 3, dtype=torch.bfloat16))
        with pytest.warns(UserWarning, match="the optimizer also steps what no export"):
            save(tmp_path / "d", other)
        found = list(differences(load_checkpoint(saved), load_checkpoint(tmp_path / "d")))

        assert [d.what for d in found if d.where == key_of("c", layer=None)] == [
            "value: float32 [2, 3] and bfloat16 [3, 3]",
            "step: 0 and 7",
            "master: float32 [2, 3] and float32 [3, 3]",
            "exp_avg: float32 [2, 3] and float32 [3, 3]",
            "exp_avg_sq: float32 [2, 3] and float32 [3, 3]",
        ]

    def test_with_and_without_an_optimizer(self, saved: Path, tmp_path: Path) -> None:
        save(tmp_path / "d", make(), with_state=False)
        found = list(differences(load_checkpoint(saved), load_checkpoint(tmp_path / "d")))

        assert {d.where for d in found} == {"optimizer"}
        assert Difference("optimizer", "beta1: 0.9 and '(absent)'") in found

    def test_nan_is_equal_to_itself_and_zero_is_not_to_minus_zero(self, tmp_path: Path) -> None:
        trainers = [make(), make()]
        with torch.no_grad():
            for trainer, zero in zip(trainers, (0.0, -0.0), strict=True):
                trainer.parameters[0][0].fill_(float("nan"))
                trainer.parameters[1][0].fill_(zero)
        for name, trainer in zip("cd", trainers, strict=True):
            save(tmp_path / name, trainer)

        found = differences(load_checkpoint(tmp_path / "c"), load_checkpoint(tmp_path / "d"))
        assert [d.where for d in found] == [key_of("b", 0)]

    def test_a_damaged_one(self, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save(tmp_path / "d", make())
        flip_a_bit(tmp_path / "d" / ADAPTER)

        assert main(["diff", str(saved), str(tmp_path / "d")]) == 1
        assert str(tmp_path / "d" / ADAPTER) in capsys.readouterr().err


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["verify"],
            ["inspect"],
            ["diff"],
            ["diff", "a"],
            ["diff", "a", "b", "c"],
            ["more"],
            ["verify", "--x", "a"],
        ],
        ids=" ".join,
    )
    def test_is_exit_code_2(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: packckpt" in capsys.readouterr().err

    def test_help_is_fine(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--help"])
        assert caught.value.code == 0
        assert "check every file, key and digest" in capsys.readouterr().out


class TestProcess:
    """`python -m packckpt` as a shell sees it."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", "-m", "packckpt", *arguments],
            capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=100, check=False,
        )  # fmt: skip

    def test_exit_codes(self, saved: Path, tmp_path: Path) -> None:
        fine = self.run("verify", str(saved))
        flip_a_bit(saved / ADAPTER)
        wrong = self.run("verify", str(saved))
        usage = self.run("verify")

        assert (fine.returncode, wrong.returncode, usage.returncode) == (0, 1, 2)
        assert ": fine, digest " in fine.stdout
        assert str(saved / ADAPTER) in wrong.stdout
        assert "usage: " in usage.stderr
        assert "Traceback" not in fine.stderr + wrong.stderr + usage.stderr

    @pytest.mark.parametrize("experts", [2, 4000], ids=["short", "long"])
    def test_a_reader_that_has_seen_enough(self, experts: int, tmp_path: Path) -> None:
        """`packckpt inspect --keys DIR | head -1` ends without a traceback."""
        trainer = Trainer()
        trainer.packed("a", experts, rows=1, columns=1)
        save(tmp_path / "c", trainer)
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "packckpt", "inspect", "--keys", str(tmp_path / "c")],
            stdout=write, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent, timeout=100, check=False,
            env=buffered,
        )  # fmt: skip
        os.close(write)

        assert (done.returncode, done.stderr) == (1, "")
