"""Make the virtual environment, or bring it up to date: python tools/make_venv.py DIR.

A torch that the interpreter already has is reused: GPU images ship one built for their driver, and a second
one is gigabytes. Everything else comes from the lock, hashes checked.
"""

import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"  # what a machine without torch gets
ROOT = Path(__file__).resolve().parent.parent

# Prints the folder that holds a usable torch; fails where there is none. The range is pyproject.toml's.
FIND_TORCH = """
import pathlib, torch
version = tuple(int(part) for part in torch.__version__.split(".")[:2])
assert (2, 11) <= version < (2, 15)
print(pathlib.Path(torch.__file__).parent.parent)
"""


def torch_folder(python: str) -> str | None:
    done = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else None


def run(*command: str) -> None:
    print("+", *command, flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"make_venv: failed with status {done.returncode}: {' '.join(command)}")


def main(folder: str) -> None:
    python = str(Path(folder, "bin", "python"))
    found = torch_folder(sys.executable)
    run(sys.executable, "-m", "venv", *(["--system-site-packages"] if found else []), folder)
    install = (python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
    run(*install, "--quiet", "--require-hashes", "-r", str(ROOT / "requirements" / "dev.lock"))
    used = torch_folder(python)
    if used is None and found:
        # The interpreter is a virtual environment's own, and --system-site-packages looks past that one.
        show = "import site; print(site.getsitepackages()[0])"
        packages = subprocess.check_output([python, "-c", show], text=True).strip()
        Path(packages, "torch_of_interpreter.pth").write_text(found + "\n", encoding="utf-8")
        used = torch_folder(python)
    if used is None:
        run(*install, TORCH)
        used = torch_folder(python)
    if used is None:
        sys.exit(f"make_venv: {python} cannot import a torch >=2.11,<2.15; try: {python} -c 'import torch'")
    print(f"make_venv: {folder} is ready; torch comes from {used}")


if __name__ == "__main__":
    main(sys.argv[1])
