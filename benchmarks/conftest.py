"""pytest-benchmark: the machine's facts into its file, and no green exit where nothing was measured."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment

_NOT_MEASURED = 5  # pytest's own code for "nothing was collected"


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Replace pytest-benchmark's facts, which name the host, by those of every other record."""
    captured = environment.capture(Path(tempfile.gettempdir()))
    machine_info.clear()
    machine_info.update({name: captured[name] for name in ("cpu", "memory", "limits", "software", "reasons")})


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    """Keep what tells the code, and drop author and branch."""
    for name in set(commit_info) - {"id", "dirty", "time", "project"}:
        del commit_info[name]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Say so, and fail, where this suite ran and left no measurement: off under xdist, disabled, skipped, or raised."""
    config = session.config
    if config.option.collectonly or hasattr(config, "workerinput"):
        return
    own = [item for item in getattr(session, "items", ()) if "benchmark" in getattr(item, "fixturenames", ())]
    # Under xdist this process has no items of its own, and pytest-benchmark is off in the others.
    if not own and config.getoption("dist", "no") == "no":
        return
    measured = getattr(config, "_benchmarksession", None)
    found = [] if measured is None else [bench for bench in measured.benchmarks if bench.stats.rounds]
    if not found or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        config.stash[_REASON] = f"no measurements: {len(found)} of {len(own)} benchmarks were timed"
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = _NOT_MEASURED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the reason."""
    if (reason := config.stash.get(_REASON, None)) is not None:
        terminalreporter.write_line(reason, red=True)


_REASON = pytest.StashKey[str]()
