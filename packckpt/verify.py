"""Check a checkpoint on disk against everything that the format promises."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from packckpt.dtypes import DTYPE_OF_NAME, NAME_OF_DTYPE, STATE_DTYPE
from packckpt.errors import CheckpointError
from packckpt.manifest import (
    ADAPTER_FILE,
    CONFIG_FILE,
    FORMAT_KEY,
    FORMAT_NAME,
    MODEL_KEY,
    Manifest,
    file_digest,
    read_json,
    read_manifest,
    safe_file,
)
from packckpt.strands import MOST_THREADS, usable_cores
from packckpt.tensorreader import Entry, Headers, TensorFileReader


@dataclass(frozen=True, slots=True)
class Contents:
    """A verified checkpoint.

    Attributes:
        root: its directory.
        manifest, config: what its JSON files say.
        files: its tensor files, open, by relative path.
    """

    root: Path
    manifest: Manifest
    config: dict[str, Any]
    files: dict[str, TensorFileReader]


def verify_checkpoint(path: str | os.PathLike[str]) -> str:
    """Verify a checkpoint and return its digest.

    Every file is read once and its BLAKE2b-256 digest compared; then keys, dtypes and shapes of all tensor files
    are held against the manifest. Files that the manifest does not list are not looked at.

    Raises:
        CheckpointError: what is wrong with which file; `.problems` lists every fault.
    """
    return verified_contents(path).manifest.digest


def verified_contents(path: str | os.PathLike[str]) -> Contents:
    """Verify a checkpoint and return what it holds; see `verify_checkpoint`."""
    root = Path(path)
    manifest = read_manifest(root)
    looked = _look_at_files(root, manifest.files)
    problems = [found for found in looked.values() if isinstance(found, str)]
    if not problems:
        files = {name: found for name, found in sorted(looked.items()) if isinstance(found, TensorFileReader)}
        contents = Contents(root, manifest, read_json(root / CONFIG_FILE), files)
        problems = list(_content_problems(contents))
        if not problems:
            return contents
    raise CheckpointError("\n".join(problems), problems)


def unlisted_files(root: Path, manifest: Manifest) -> list[str]:
    """Return files in the directory that no digest covers, as relative paths."""
    found = {str(file.relative_to(root)) for file in root.rglob("*") if not file.is_dir()}
    return sorted(found - set(manifest.files) - {"checkpoint.json"})


def _look_at_files(root: Path, files: Mapping[str, str]) -> dict[str, TensorFileReader | str | None]:
    """Return for every file its reader, what is wrong with it, or None if it is fine and holds no tensors."""
    headers: Headers = {}
    # Hashing and reading release the interpreter's lock; a file is one chain, so files go side by side.
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        found = pool.map(lambda name: _look_at(root, name, files[name], headers), files)
        return dict(zip(files, found, strict=True))


def _look_at(root: Path, relative: str, expected: str, headers: Headers) -> TensorFileReader | str | None:
    problem = _digest_problem(root, relative, expected)
    if problem is not None or relative == CONFIG_FILE:
        return problem
    try:
        return _open_tensors(root / relative, headers)
    except CheckpointError as error:
        return str(error)


def _digest_problem(root: Path, relative: str, expected: str) -> str | None:
    try:
        found = file_digest(safe_file(root, relative))
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{root / relative}: cannot be read: {error}"
    if found != expected:
        return f"{root / relative}: has digest {found}, the manifest {expected}; the file was changed"
    return None


def _open_tensors(path: Path, headers: Headers) -> TensorFileReader:
    try:
        with safe_open(path, framework="pt", device="cpu"):
            pass  # opening it checks lengths, offsets and gaps
        reader = TensorFileReader(path, headers)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: has a header that packckpt does not read: {error}") from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {error}") from None
    for name, (dtype, *_) in reader.entries.items():
        if dtype not in DTYPE_OF_NAME:
            raise CheckpointError(f"{path}: {name} has dtype {dtype}; expected one of {', '.join(DTYPE_OF_NAME)}")
    return reader


def _content_problems(contents: Contents) -> Iterator[str]:
    root, manifest, config = contents.root, contents.manifest, contents.config
    if str(config.get(MODEL_KEY)) != manifest.base_model:
        yield (
            f"{root / CONFIG_FILE}: {MODEL_KEY} is {config.get(MODEL_KEY)!r}, the manifest has {manifest.base_model!r}"
        )
    if config.get(FORMAT_KEY) != FORMAT_NAME:
        yield f"{root / CONFIG_FILE}: {FORMAT_KEY} is {config.get(FORMAT_KEY)!r}; expected {FORMAT_NAME!r}"
    adapter = contents.files[ADAPTER_FILE].entries
    for key, (_, shape, *_) in adapter.items():
        if len(shape) != 2:
            yield f"{root / ADAPTER_FILE}: {key} has shape {list(shape)}; expected two axes"
    if manifest.optimizer is None:
        return
    for key in sorted(set(adapter) ^ set(manifest.parameters)):
        where, other = (ADAPTER_FILE, "the manifest") if key in adapter else ("the manifest", ADAPTER_FILE)
        yield f"{root}: {key} is in {where} and not in {other}"
    yield from _optimizer_problems(contents, adapter)


def _optimizer_problems(contents: Contents, adapter: Mapping[str, Entry]) -> Iterator[str]:
    used: dict[str, set[str]] = {name: set() for name in contents.files if name != ADAPTER_FILE}
    for key, names in contents.manifest.parameters.items():
        for name in names:
            if name in (ADAPTER_FILE, CONFIG_FILE):
                yield f"{contents.root}: {key}: {name} is listed as an optimizer file"
                continue
            used[name].add(key)
            found = contents.files[name].entries.get(key)
            if found is None:
                yield f"{contents.root / name}: has no tensor {key}, which the manifest looks for there"
                continue
            dtype, shape, *_ = found
            expected = adapter[key][1] if key in adapter else shape
            if dtype != NAME_OF_DTYPE[STATE_DTYPE]:
                yield f"{contents.root / name}: {key} has dtype {dtype}; expected F32"
            elif shape != expected:
                yield f"{contents.root / name}: {key} has shape {list(shape)}, the adapter {list(expected)}"
    for name, keys in used.items():
        for key in sorted(set(contents.files[name].entries) - keys):
            yield f"{contents.root / name}: holds {key}, which the manifest does not look for there"
