"""The analysis runs where there is neither torch nor packckpt, and imports nothing of theirs but the records."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKED = ("torch", "packckpt", "safetensors", "pynvml", "scipy", "jsonschema", "psutil", "tqdm")

RUN_WITHOUT = f"""
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test")

sys.meta_path.insert(0, Refuse())
from analysis.__main__ import main
run, results = sys.argv[1:]
for words in (["report", run], ["--results", results, "index"], ["--results", results, "check"], ["decide", run]):
    assert main(words) == 0, words
loaded = sorted({{name.split(".")[0] for name in sys.modules}} & set({BLOCKED!r}))
assert not loaded, loaded
"""


def test_report_and_decide_without_torch(tmp_path: Path) -> None:
    from tests.analysis.variants import written

    folder = written("adopt", tmp_path / "runs")
    words = [sys.executable, "-c", RUN_WITHOUT, str(folder), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "plots" / "fence.png").exists()


def test_only_the_records_are_imported_from_outside() -> None:
    allowed = {"analysis", "benchmarks", "numpy", "pandas", "matplotlib", "PIL", *sys.stdlib_module_names}
    for path in sorted((ROOT / "analysis").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("benchmarks") or name == "benchmarks.record", f"{path.name}: {name}"


def test_leaves_import_nothing_that_stands_above_them() -> None:
    order = (
        *("missing", "units", "statistics", "rounds", "policy", "load", "commands", "instability", "evidence"),
        *("believe", "decision", "tables", "words", "charts", "plots", "report", "compare", "results", "github"),
        "__main__",
    )
    for place, name in enumerate(order):
        for node in ast.walk(ast.parse((ROOT / "analysis" / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("analysis."):
                below = (node.module or "").removeprefix("analysis.")
                assert order.index(below) < place, f"{name} imports {below}"
    found = {path.stem for path in (ROOT / "analysis").glob("*.py")} - {"__init__"}
    assert found == set(order)
