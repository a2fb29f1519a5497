"""Decide for the GPU workflow: may this code run there, must it, and what is the verdict? Standard library only.

gate.py origin    print `trusted=true|false`: code from a fork never reaches a runner of ours
gate.py needed    print `needed=true|false`: does the change touch what is measured?
gate.py verdict   exit 0 only where nothing had to be measured, or the measurement went through
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

# What can move a figure.
MEASURED = (
    "packckpt/*",
    "benchmarks/*",
    "tests/*gpu*",
    "pyproject.toml",
    "requirements/*",
    ".github/workflows/gpu.yml",
)
UNMEASURED = ("*.md",)


def trusted(event: str, repository: str, head_repository: str) -> bool:
    """Return whether the code is from this repository; what cannot be told is not."""
    if event != "pull_request":
        return event in ("push", "workflow_dispatch")
    return bool(repository) and head_repository == repository


def needed(event: str, changed: Sequence[str] | None) -> bool:
    """Return whether to measure; a change that cannot be listed counts as one that must be."""
    if event == "workflow_dispatch" or changed is None:
        return True
    return any(_matches(path, MEASURED) and not _matches(path, UNMEASURED) for path in changed)


def verdict(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the gate passes, and why. Silence never passes."""
    if environment.get("DECIDED") != "success":
        return False, f"not enough data: the decision itself ended as {environment.get('DECIDED') or 'nothing'}"
    if environment.get("NEEDED") == "false":
        return True, "nothing that is measured has changed"
    if environment.get("TRUSTED") != "true":
        return False, "not enough data: code from a fork does not run on our GPUs; a maintainer can push it to a branch"
    measured = environment.get("MEASURED") or "nothing"
    if measured == "success":
        return True, "measured"
    if measured == "failure":
        return False, "the run on the GPU failed, or found no GPU; see the job `measure`"
    return False, f"not enough data: no GPU could be had (the job `measure` ended as {measured})"


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _changed(base: str) -> list[str] | None:
    done = subprocess.run(["git", "diff", "--name-only", f"{base}...HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if base and done.returncode == 0 else None


def main(arguments: Sequence[str]) -> int:
    """Run one of the three."""
    environment = os.environ
    event = environment.get("EVENT", "")
    if arguments == ["origin"]:
        here, there = environment.get("GITHUB_REPOSITORY", ""), environment.get("HEAD_REPOSITORY", "")
        print(f"trusted={str(trusted(event, here, there)).lower()}")
        return 0
    if arguments == ["needed"]:
        print(f"needed={str(needed(event, _changed(environment.get('BASE', '')))).lower()}")
        return 0
    if arguments == ["verdict"]:
        passes, why = verdict(environment)
        print(f"gpu gate: {why}")
        return 0 if passes else 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
