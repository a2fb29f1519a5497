"""`packckpt verify | inspect | diff`: look at checkpoints from a shell.

Exit codes: 0 fine, 1 wrong, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from packckpt.checkpoint import load_checkpoint
from packckpt.diff import differences
from packckpt.errors import CheckpointError
from packckpt.inspect import as_json, format_bytes, summarize
from packckpt.manifest import read_manifest
from packckpt.verify import unlisted_files, verify_checkpoint

FINE, WRONG = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return WRONG
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; what is still buffered would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="packckpt", description="Look at checkpoints of packed-expert state.")
    commands = parser.add_subparsers(required=True, metavar="verify | inspect | diff")
    verify = commands.add_parser("verify", help="check every file, key and digest")
    verify.add_argument("directories", nargs="+", metavar="DIR")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="print blocks, keys, dtypes, sizes, steps and hyper-parameters")
    inspect.add_argument("directories", nargs="+", metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="print one JSON object a line, with every key")
    inspect.add_argument("--keys", action="store_true", help="print every key, not only the blocks")
    inspect.set_defaults(run=_inspect)
    diff = commands.add_parser("diff", help="name the keys and bytes in which two checkpoints differ")
    diff.add_argument("directories", nargs=2, metavar="DIR")
    diff.set_defaults(run=_diff)
    return parser


def _verify(parsed: argparse.Namespace) -> int:
    code = FINE
    for directory in parsed.directories:
        try:
            digest = verify_checkpoint(directory)
        except CheckpointError as error:
            code = WRONG
            print(f"{directory}: WRONG")
            for problem in error.problems:
                print(f"  {problem}")
            continue
        print(f"{directory}: fine, digest {digest}")
        for name in unlisted_files(Path(directory), read_manifest(Path(directory))):
            print(f"  note: {name} is no part of the checkpoint and was not checked")
    return code


def _inspect(parsed: argparse.Namespace) -> int:
    for directory in parsed.directories:
        with load_checkpoint(directory) as checkpoint:
            content = as_json(checkpoint)
            if parsed.json:
                print(json.dumps(content))
                continue
            print(f"{directory}")
            print(f"  digest     {checkpoint.digest}")
            print(f"  model      {checkpoint.config['base_model_name_or_path']}")
            hyper = content["optimizer"] or {"no optimizer": "saved"}
            print(f"  optimizer  {', '.join(f'{name} {value}' for name, value in hyper.items())}")
            rows = [
                (
                    block.name,
                    str(block.keys),
                    ", ".join(block.dtypes),
                    format_bytes(block.weight_bytes),
                    format_bytes(block.optimizer_bytes),
                    _steps(block.steps),
                )
                for block in summarize(checkpoint)
            ]
            _print_table(("block", "keys", "dtype", "weights", "optimizer", "steps"), rows)
            if parsed.keys:
                key_rows = [
                    (
                        entry["key"],
                        entry["dtype"],
                        "x".join(map(str, entry["shape"])),
                        format_bytes(entry["bytes"]),
                        "-" if entry["step"] is None else str(entry["step"]),
                    )
                    for entry in content["keys"]
                ]
                _print_table(("key", "dtype", "shape", "size", "step"), key_rows)
    return FINE


def _diff(parsed: argparse.Namespace) -> int:
    first_name, second_name = parsed.directories
    with load_checkpoint(first_name) as first, load_checkpoint(second_name) as second:
        count = 0
        for difference in differences(first, second):
            count += 1
            print(f"{difference.where}: {difference.what}")
    print(f"{first_name} and {second_name}: {f'{count} differences' if count else 'equal'}")
    return WRONG if count else FINE


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print()
    for row in [header, *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


if __name__ == "__main__":
    sys.exit(main())
