"""Write requirements/dev.lock, or with --check say whether it is current. Run from the repository root.

The pins in the lock are kept as long as they fit, so a new release elsewhere never turns the check red: only
a change of its sources does.
"""

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

LOCK = Path("requirements/dev.lock")
REMEDY = "run `make lock` and commit requirements/dev.lock"
SOURCES = ("pyproject.toml", "requirements/torch-needs.in")


def compile_into(target: Path, *options: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", *SOURCES, *options, "--quiet"]
    command += ["--output-file", str(target), "--all-extras", "--group", "dev"]
    command += ["--excludes", "requirements/not-locked.txt"]
    # One lock for every platform and for each Python from 3.11 on.
    command += ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest"]
    # Hashes say what to install; where it comes from is each machine's own affair.
    command += ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links"]
    command += ["--custom-compile-command", "make lock"]
    # The machine's own trust store: a mirror may have an authority of its own.
    command += ["--system-certs"]
    if subprocess.run(command, check=False).returncode:
        sys.exit("lock: the requirements could not be resolved (see above); is a package index within reach?")


def complaints(lock: str) -> list[str]:
    """What must hold of the sources and of the lock, whatever the resolver says."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    extras = {need for needs in project["project"]["optional-dependencies"].values() for need in needs}
    missing = sorted(extras - set(project["dependency-groups"]["dev"]))
    found = [f"the dev group lacks {need}, which an extra has" for need in missing]
    found += [f"a location in the lock: {line}" for line in lock.splitlines() if "://" in line]
    heavy = re.findall(r"^(torch|triton|cuda-\S+|nvidia-(?!ml-py)\S+)==", lock, re.MULTILINE)
    return found + [f"{name} is in the lock, and torch stays out of it" for name in heavy]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when it is not current")
    parser.add_argument("--upgrade", action="store_true", help="move every pin to its newest release")
    arguments = parser.parse_args()
    if not arguments.check:
        compile_into(LOCK, *(["--upgrade"] if arguments.upgrade else []))
    lock = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    if problems := complaints(lock):
        sys.exit("lock: " + "\nlock: ".join(problems))
    if arguments.check:
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder, "dev.lock")
            if lock:
                shutil.copy(LOCK, fresh)
            compile_into(fresh)
            now = fresh.read_text(encoding="utf-8")
        if now != lock:
            changes = difflib.unified_diff(lock.splitlines(), now.splitlines(), "dev.lock", "needed", n=0, lineterm="")
            print(*list(changes)[:40], sep="\n")
            sys.exit(f"lock: requirements/dev.lock is not current (changes above): {REMEDY}")
        print("lock: requirements/dev.lock is current")


if __name__ == "__main__":
    main()
