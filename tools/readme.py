"""Put the first screen of the newest run's summary into the README, or check that it is there.

No figure in the README is typed by hand: `make readme` writes them, a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- measured:begin -->\n", "<!-- measured:end -->\n"


def newest_run(root: Path = ROOT) -> Path:
    """Return the folder of the newest run that has a summary."""
    return max(path.parent for path in (root / "results" / "runs").glob("*/summary.md"))


def first_screen(run: Path) -> str:
    """Return a summary down to its decision: the table and its notes, with a link to the rest."""
    title, _, rest = (run / "summary.md").read_text().partition("\n")
    table, _, _ = rest.strip().partition("\n## ")
    name = title.removeprefix("# ")
    return f"From [{name}](results/runs/{run.name}/summary.md):\n\n{table.strip()}\n"


def with_first_screen(readme: str, screen: str) -> str:
    """Return the README with the text between the two marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{screen}\n{END}{after}"


def main() -> int:
    """Write the README; with `--check`, fail where it would change."""
    path = ROOT / "README.md"
    readme = path.read_text()
    wanted = with_first_screen(readme, first_screen(newest_run()))
    if "--check" in sys.argv:
        if readme != wanted:
            print("README.md does not show the newest run: make readme", file=sys.stderr)
        return int(readme != wanted)
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
