"""The README's figures come from a run, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tools.readme import BEGIN, END, first_screen, newest_run, with_first_screen

ROOT = Path(__file__).parent.parent


def test_the_table_is_that_of_the_newest_run() -> None:
    readme = (ROOT / "README.md").read_text()
    assert with_first_screen(readme, first_screen(newest_run())) == readme


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    assert with_first_screen(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}\nnew\n\n{END}b\n"


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
