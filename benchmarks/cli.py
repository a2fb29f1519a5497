"""`python -m benchmarks list | plan | run | resume | check | floors`.

Exit codes: 0 fine, 1 something was not measured or is in doubt, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import DTYPES, CaseError
from benchmarks.errors import DeviceError
from benchmarks.paths import SAVER_PATHS, PathError
from benchmarks.presets import PresetError, preset_names
from benchmarks.scrub import ROOT
from benchmarks.settings import SettingsError
from benchmarks.units import UnitError, parse_bytes, parse_seconds

FLOOR_CASE, FLOOR_ROUNDS = "qwen3-30b-a3b/lora8/ep1/l4/bfloat16", 5
RUNS = ROOT / "results" / "runs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    parsed = parser.parse_args(given)
    try:
        code: int = _command(parsed.command)(parsed, given)
    except (CaseError, DeviceError, PathError, PresetError, SettingsError) as error:
        parser.error(str(error))
    except BrokenPipeError:
        sys.stderr.close()  # the reader (`| head`) has seen enough
        return 1
    return code


def _command(name: str) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    """Import a command when it is asked for: `--help` needs no torch."""
    from benchmarks import commands

    found: Callable[[argparse.Namespace, Sequence[str]], int] = getattr(commands, f"{name}_command")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what a save costs on each path.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="list | plan | run | resume | check | floors"
    )

    listed = commands.add_parser("list", help="presets and cases")
    listed.add_argument("--preset", **_preset())

    plan = commands.add_parser("plan", help="predict transfers, memory, disk and time; nothing is allocated")
    _add_cases(plan)
    plan.add_argument("--bandwidth", type=_bytes, metavar="SIZE", help="bytes a second from device to host, say 20GiB")
    plan.add_argument(
        "--memory-budget", type=_bytes, metavar="SIZE", help="host memory, all ranks (default: 80%% of what is free)"
    )

    run = commands.add_parser("run", help="measure")
    _add_cases(run)
    run.add_argument(
        "--repeats", type=_positive, default=2, metavar="N", help="steady saves in each process (%(default)s)"
    )
    run.add_argument(
        "--rounds", type=_positive, default=2, metavar="N", help="processes a path, alternating (%(default)s)"
    )
    run.add_argument(
        "--memory-budget", type=_bytes, metavar="SIZE", help="host memory, all ranks (default: 80%% of what is free)"
    )
    run.add_argument("--time-budget", type=_seconds, metavar="TIME", help="skip what does not fit, say 8m")
    run.add_argument(
        "--case-limit", type=_seconds, default=300.0, metavar="TIME", help="end a launch after that long (5m)"
    )
    run.add_argument("--no-durable", action="store_true", help="do not sync checkpoints to disk")
    run.add_argument("--no-alone", action="store_true", help="do not measure each rank of a pair alone")
    run.add_argument("--no-reference", action="store_true", help="leave torch's DefaultStager out")
    run.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help="import in every worker first"
    )
    run.add_argument("--resume", type=Path, metavar="RUN", help="the same as `resume RUN`")
    _add_places(run)

    resume = commands.add_parser("resume", help="go on where an interrupted run stopped")
    resume.add_argument("run", type=Path, metavar="RUN", help="its folder")
    resume.add_argument("--scratch", type=Path, metavar="DIR", help="where checkpoints go meanwhile")

    floors = commands.add_parser("floors", help="saves and a restore against hashing and writing the same bytes")
    floors.add_argument("--case", default=FLOOR_CASE, metavar="ID", help="one case, as `list` prints it (%(default)s)")
    floors.add_argument(
        "--rounds", type=int, default=FLOOR_ROUNDS, metavar="N", help="alternating rounds (%(default)s)"
    )
    floors.add_argument("--scratch", type=Path, metavar="DIR", help="where checkpoints go meanwhile")

    check = commands.add_parser("check", help="is this machine fit to measure?")
    check.add_argument("--scratch", type=Path, metavar="DIR", help="where checkpoints would go")
    return parser


def _add_cases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", **_preset(), action="append", dest="presets")
    parser.add_argument(
        "--case", action="append", dest="cases", default=[], metavar="ID", help="one case, as `list` prints it"
    )
    parser.add_argument(
        "--path",
        action="append",
        dest="paths",
        metavar="[NAME=]PATH",
        help=f"one of {', '.join(SAVER_PATHS)} (default: all)",
    )
    parser.add_argument(
        "--ranks", type=_positive, action="append", metavar="N", help="ranks of a save; may be repeated (1 and 2)"
    )
    parser.add_argument("--device", metavar="KIND", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument(
        "--share-device", action="store_true", help="put all ranks on one GPU; labelled so in every record"
    )
    parser.add_argument(
        "--layers", type=_positive, metavar="N", help="layers of each case (2 with LoRA, 1 with full fine-tuning)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the parameters (%(default)s)")


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=RUNS, metavar="DIR", help="where the run's folder is made (results/runs)"
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="where checkpoints go meanwhile (the system's temporary folder)"
    )


def _preset() -> dict[str, Any]:
    return {"choices": preset_names(), "metavar": "PRESET", "help": f"one of {', '.join(preset_names())}"}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
