"""Who may import whom, what `import packckpt` loads, and what the public names say about themselves."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import packckpt

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "packckpt"

# Module: what it may import of the package. A module may import only what stands above it.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "dtypes": set(),
    "disk": set(),
    "turns": set(),
    "jsontext": set(),
    "strands": set(),
    "once": set(),
    "ring": set(),
    "room": set(),
    "exports": {"dtypes", "errors"},
    "descriptions": {"dtypes", "exports"},
    "optimizer": {"dtypes", "errors"},
    "progressions": set(),
    "windows": {"dtypes", "errors", "exports", "optimizer", "progressions"},
    "plan": {"dtypes", "errors", "exports", "optimizer", "windows"},
    "transfer": {"dtypes", "errors", "exports", "optimizer", "plan"},
    "tensorfile": {"disk", "dtypes"},
    "tensorreader": {"dtypes", "tensorfile"},
    "filepass": {"tensorfile", "tensorreader"},
    "peaks": {"dtypes", "exports", "optimizer", "plan", "tensorfile"},
    "manifest": {"errors", "jsontext", "optimizer", "tensorfile"},
    "gathering": {"transfer", "windows"},
    "staging": {"gathering", "once", "ring", "tensorfile", "transfer", "windows"},
    "snapshot": {"disk", "exports", "plan", "tensorfile", "tensorreader", "transfer"},
    "staged": {
        "disk", "gathering", "manifest", "optimizer", "ring", "snapshot", "staging", "strands", "tensorfile",
        "transfer", "windows",
    },
    "merge": {"descriptions", "errors", "exports", "tensorfile", "windows"},
    "contents": {"errors", "manifest", "optimizer", "tensorreader", "windows"},
    "verify": {"contents", "dtypes", "errors", "manifest", "strands", "tensorreader"},
    "commit": {
        "disk", "errors", "manifest", "merge", "optimizer", "strands", "tensorfile", "verify", "windows",
    },
    "ranks": {"errors", "tensorfile"},
    "reservation": {"disk", "errors"},
    "saver": {
        "commit", "descriptions", "errors", "exports", "manifest", "merge", "optimizer", "plan", "ranks",
        "reservation", "snapshot", "staged", "staging", "transfer", "turns", "windows",
    },
    "checkpoint": {"contents", "errors", "manifest", "optimizer", "tensorfile", "tensorreader", "verify", "windows"},
    "fillings": {"exports", "progressions"},
    "placing": {"fillings", "merge", "progressions", "transfer"},
    "intake": {
        "filepass", "fillings", "placing", "ring", "room", "staging", "strands", "tensorfile", "tensorreader", "verify",
        "windows",
    },
    "restore": {
        "contents", "dtypes", "errors", "exports", "fillings", "intake", "manifest", "merge", "optimizer",
        "progressions", "tensorreader",
    },
    "inspect": {"checkpoint", "dtypes", "exports", "optimizer", "tensorfile"},
    "diff": {"checkpoint", "dtypes", "optimizer", "windows"},
    "cli": {"checkpoint", "diff", "errors", "inspect", "manifest", "verify"},
    "__main__": {"cli"},
    "__init__": {"checkpoint", "errors", "exports", "optimizer", "peaks", "plan", "saver", "transfer", "verify"},
}  # fmt: skip
# Within a function or for types alone: `Checkpoint.restore` is a method, and restore needs a Checkpoint.
ALLOWED_LATE = {("checkpoint", "restore"), ("checkpoint", "exports")}


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield every module that a file imports, in full, and whether at the top of the module."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield node.module or "", id(node) in top
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def modules_of_the_package() -> set[str]:
    return {path.stem for path in PACKAGE.glob("*.py")}


def within_the_package(path: Path) -> Iterator[tuple[str, bool]]:
    names = modules_of_the_package()
    for name, at_top in imports_of(path):
        parts = name.split(".")
        if parts[0] == "packckpt" and len(parts) > 1 and parts[1] in names:
            yield parts[1], at_top


class TestDirection:
    def test_every_module_is_in_the_table(self) -> None:
        assert modules_of_the_package() == set(ALLOWED)

    def test_the_table_has_one_direction(self) -> None:
        above: set[str] = set()
        for module, allowed in ALLOWED.items():
            assert allowed <= above, f"{module} would import what stands below it: {allowed - above}"
            above.add(module)

    @pytest.mark.parametrize("module", ALLOWED)
    def test_is_kept(self, module: str) -> None:
        found = set(within_the_package(PACKAGE / f"{module}.py"))

        assert {name for name, at_top in found if at_top} <= ALLOWED[module]
        late = {(module, name) for name, at_top in found if not at_top and name not in ALLOWED[module]}
        assert late <= ALLOWED_LATE

    def test_the_design_is_in_the_table(self) -> None:
        """errors, exports, optimizer, plan, transfer, snapshot, commit, saver; manifest, ranks beside them."""
        chain = ["errors", "exports", "optimizer", "plan", "transfer", "snapshot", "commit", "saver"]
        order = list(ALLOWED)

        assert [name for name in order if name in chain] == chain
        assert "manifest" in ALLOWED["commit"]
        assert "ranks" in ALLOWED["saver"]
        assert not ALLOWED["manifest"] & {"transfer", "snapshot", "commit", "saver"}

    def test_one_place_copies_from_the_device(self) -> None:
        """Nothing else in the save calls `.cpu()`, `.to(...)`, `.copy_` or `.item()`."""
        movers = {"cpu", "to", "copy_", "item", "tolist", "numpy"}
        found = {
            path.stem: sorted(
                node.func.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in movers
            )
            for path in PACKAGE.glob("*.py")
        }

        assert {name: calls for name, calls in found.items() if calls} == {
            "transfer": ["copy_", "copy_", "item", "numpy", "to", "to"],
            "staging": ["copy_", "copy_"],  # within the device, and within the host
            "windows": ["tolist", "tolist", "tolist"],  # of numbers of a plan
            "staged": ["tolist"],
            "tensorfile": ["numpy"],  # of host memory
            "ranks": ["numpy"],  # of host memory
            "fillings": ["tolist", "tolist", "tolist", "tolist"],  # of numpy arrays
            "placing": ["copy_", "tolist", "tolist"],  # to rows, on the host or within the device
            "intake": ["to"],  # to the device
            "restore": ["item", "to"],  # a step, to the device
        }


class TestOtherRooms:
    def test_the_library_imports_torch_safetensors_and_the_standard_library(self) -> None:
        for path in files_of("packckpt"):
            roots = {name.split(".")[0] for name, _ in imports_of(path)}
            assert roots <= {"packckpt", "torch", "numpy", "safetensors", *sys.stdlib_module_names}, path

    def test_nothing_imports_the_evidence_or_the_tests(self) -> None:
        for path in [*files_of("packckpt"), *files_of("benchmarks")]:
            roots = {name.split(".")[0] for name, _ in imports_of(path)}
            assert not roots & {"tests", "analysis"}, path
        for path in files_of("packckpt"):
            assert "benchmarks" not in {name.split(".")[0] for name, _ in imports_of(path)}, path

    @pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="there are no benchmarks yet")
    def test_benchmarks_use_public_names_only(self) -> None:
        public = {"packckpt", *(f"packckpt.{name}" for name in [*packckpt.__all__, "__version__"])}
        for path in files_of("benchmarks"):
            used = {name for name, _ in imports_of(path) if name.split(".")[0] == "packckpt"}
            assert used <= public, path

    @pytest.mark.skipif(not (ROOT / "benchmarks" / "record.py").exists(), reason="there are no records yet")
    def test_records_need_the_standard_library_alone(self) -> None:
        seen, waiting = set(), ["benchmarks.record"]
        while waiting:
            module = waiting.pop()
            seen.add(module)
            for name, _ in imports_of(file_of(module)):
                root = name.split(".")[0]
                assert root in {"benchmarks", *sys.stdlib_module_names}, f"{module} imports {name}"
                if root == "benchmarks" and file_of(name).exists() and name not in seen:
                    waiting.append(name)
        assert "benchmarks.record" in seen

    @pytest.mark.skipif(not (ROOT / "analysis").is_dir(), reason="there is no analysis yet")
    def test_analysis_imports_neither_torch_nor_the_library(self) -> None:
        for path in files_of("analysis"):
            names = {name for name, _ in imports_of(path)}
            assert not {name for name in names if name.split(".")[0] in ("torch", "packckpt", "safetensors")}, path
            benchmarks = {name for name in names if name.split(".")[0] == "benchmarks" and name != "benchmarks"}
            assert all(name.startswith("benchmarks.record") for name in benchmarks), path


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


class TestImport:
    HEAVY = (
        "pandas", "matplotlib", "pynvml", "psutil", "torch.distributed.checkpoint", "torch.distributed.tensor",
        "torch._dynamo", "multiprocessing.pool", "asyncio", "benchmarks", "analysis",
    )  # fmt: skip

    def test_loads_nothing_heavy_that_torch_has_not_loaded(self) -> None:
        loaded = [self.modules_after(line) for line in ("import torch, numpy, safetensors", "import packckpt")]
        added = loaded[1] - loaded[0]

        assert not [name for name in added if name.startswith(self.HEAVY)]
        foreign = {name.split(".")[0] for name in added} - {"packckpt", *sys.stdlib_module_names}
        assert foreign <= {"torch", "numpy", "safetensors"}

    def test_makes_no_file_and_no_process_group(self, tmp_path: Path) -> None:
        line = "import packckpt, torch.distributed as dist; assert not dist.is_initialized()"
        subprocess.run([sys.executable, "-B", "-c", line], cwd=tmp_path, check=True, env={"PYTHONPATH": str(ROOT)})

        assert list(tmp_path.iterdir()) == []

    def modules_after(self, line: str) -> set[str]:
        code = f"import sys, json\n{line}\nprint(json.dumps(sorted(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        return set(json.loads(done.stdout))


class TestPublicNames:
    def test_are_these(self) -> None:
        assert set(packckpt.__all__) >= {
            "AdamState", "Checkpoint", "CheckpointSaver", "Export", "PackckptError", "Shard", "TransferPlan",
            "load_checkpoint", "plan_transfers", "verify_checkpoint",
        }  # fmt: skip
        assert len(set(packckpt.__all__)) == len(packckpt.__all__)

    @pytest.mark.parametrize("name", packckpt.__all__)
    def test_exist_and_have_a_docstring_of_their_own(self, name: str) -> None:
        item = getattr(packckpt, name)
        docstring = item.__doc__ or ""

        assert docstring.strip()
        # `dataclass` writes `Name(field: type, ...)` where there is none.
        assert not docstring.startswith(f"{name}(")

    @pytest.mark.parametrize("name", [n for n in packckpt.__all__ if inspect.isclass(getattr(packckpt, n))])
    def test_so_have_their_public_methods(self, name: str) -> None:
        for member, value in vars(getattr(packckpt, name)).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property | classmethod)):
                assert inspect.getdoc(value), f"{name}.{member}"

    def test_errors_are_one_family(self) -> None:
        errors = [getattr(packckpt, name) for name in packckpt.__all__ if name.endswith("Error")]

        assert len(errors) == 6
        assert all(issubclass(error, packckpt.PackckptError) for error in errors)
        assert not issubclass(packckpt.PackckptError, (ValueError, RuntimeError, OSError))
