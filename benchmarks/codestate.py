"""Which code is measured: git commit, dirty or not, and digests of the two packages."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from benchmarks.missing import Missing
from benchmarks.scrub import ROOT

_SUFFIXES = (".py", ".toml", ".json")


def git_commit() -> str | Missing:
    """Return the commit of the checkout."""
    return _git("rev-parse", "--verify", "HEAD")


def git_dirty() -> bool | Missing:
    """Return whether what is measured, or what measures, differs from the commit; nothing else moves a figure."""
    status = _git("status", "--porcelain", "--", "packckpt", "benchmarks")
    return status if isinstance(status, Missing) else bool(status)


def package_digest(name: str) -> str:
    """Return the digest of a package's source, by file name and content."""
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted((ROOT / name).rglob("*")):
        if path.suffix in _SUFFIXES and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _git(*arguments: str) -> str | Missing:
    if not Path(ROOT, ".git").exists():
        return Missing("no git checkout")
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return Missing(f"git does not answer: {type(error).__name__}")
    return done.stdout.strip()
