"""Fail unless a wheel holds packckpt/ alone and requires torch, numpy and safetensors alone."""

import re
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

REQUIRED = {"torch", "numpy", "safetensors"}
ROOT = Path(__file__).resolve().parent.parent


def complaints(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        metadata = Parser().parsestr(archive.read(info + "METADATA").decode())
    held = {name for name in names if not name.startswith(info)}
    # Caches aside, the wheel is the folder: a file that a build rule dropped shows here.
    paths = [path for path in (ROOT / "packckpt").rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    required = {re.split(r"[^\w.-]", need)[0] for need in needs}

    found = [f"holds {name}, which packckpt/ does not" for name in sorted(held - wanted)]
    found += [f"lacks {name}" for name in sorted((wanted | {"packckpt/py.typed"}) - held)]
    found += [f"requires {name}" for name in sorted(required - REQUIRED)]
    found += [f"does not require {name}" for name in sorted(REQUIRED - required)]
    if info + "licenses/LICENSE" not in names or metadata["License-Expression"] != "Apache-2.0":
        found.append("carries no Apache-2.0 licence")
    return found


def main(wheel: Path) -> None:
    if problems := complaints(wheel):
        sys.exit("\n".join(f"wheel_check: {wheel.name} {problem}" for problem in problems))
    print(f"wheel_check: {wheel.name} holds packckpt/ alone and requires {', '.join(sorted(REQUIRED))} alone")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
