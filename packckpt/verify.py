"""Check a checkpoint on disk against everything that the format promises."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from packckpt.contents import Contents
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
    return _checked_contents(path, digested=True)


def undigested_contents(path: str | os.PathLike[str]) -> Contents:
    """Return what a checkpoint holds, with everything checked but the digests of its tensor files.

    Raises:
        CheckpointError: as for `verify_checkpoint`.
    """
    return _checked_contents(path, digested=False)


def changed_problem(path: Path, expected: str) -> str | None:
    """Read a file, and return what is wrong with it where it has not the digest that the manifest has for it."""
    try:
        return digest_problem(path, file_digest(path), expected)
    except OSError as error:
        return unreadable_problem(path, error)


def digest_problem(path: str | os.PathLike[str], found: str, expected: str) -> str | None:
    """Return what is wrong where a file has not the digest that the manifest has for it."""
    if found == expected:
        return None
    return f"{os.fspath(path)}: has digest {found}, the manifest {expected}; the file was changed"


def unreadable_problem(path: str | os.PathLike[str], error: OSError) -> str:
    """Return what is wrong with a file that the system does not let us read."""
    return f"{os.fspath(path)}: cannot be read: {error}"


def _checked_contents(path: str | os.PathLike[str], *, digested: bool) -> Contents:
    root = Path(path)
    manifest = read_manifest(root)
    looked = _look_at_files(root, manifest.files, digested)
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


def _look_at_files(root: Path, files: Mapping[str, str], digested: bool) -> dict[str, TensorFileReader | str | None]:
    """Return for every file its reader, what is wrong with it, or None if it is fine and holds no tensors."""
    headers = Headers()
    # Hashing and reading release the interpreter's lock; a file is one chain, so files go side by side.
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        found = pool.map(lambda name: _look_at(root, name, files[name], headers, digested), files)
        return dict(zip(files, found, strict=True))


def _look_at(
    root: Path, relative: str, expected: str, headers: Headers, digested: bool
) -> TensorFileReader | str | None:
    try:
        path = safe_file(root, relative)
        if digested or relative == CONFIG_FILE:
            problem = changed_problem(path, expected)
            if problem is not None or relative == CONFIG_FILE:
                return problem
        return _open_tensors(path, headers)
    except CheckpointError as error:
        return str(error)


def _open_tensors(path: Path, headers: Headers) -> TensorFileReader:
    try:
        reader = TensorFileReader(path, headers, partial(_expect_sound, path))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: has a header that packckpt does not read: {error}") from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be opened: {error}") from None
    if not {dtype for dtype, *_ in reader.entries.values()} <= DTYPE_OF_NAME.keys():
        name, dtype = next((name, entry[0]) for name, entry in reader.entries.items() if entry[0] not in DTYPE_OF_NAME)
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; expected one of {', '.join(DTYPE_OF_NAME)}")
    return reader


def _expect_sound(path: Path) -> None:
    """Refuse what safetensors does: wrong lengths, offsets that leave the file, gaps and overlaps."""
    with safe_open(path, framework="pt", device="cpu"):
        pass


def _content_problems(contents: Contents) -> Iterator[str]:
    root, manifest, config = contents.root, contents.manifest, contents.config
    if str(config.get(MODEL_KEY)) != manifest.base_model:
        yield (
            f"{root / CONFIG_FILE}: {MODEL_KEY} is {config.get(MODEL_KEY)!r}, the manifest has {manifest.base_model!r}"
        )
    if config.get(FORMAT_KEY) != FORMAT_NAME:
        yield f"{root / CONFIG_FILE}: {FORMAT_KEY} is {config.get(FORMAT_KEY)!r}; expected {FORMAT_NAME!r}"
    adapter = contents.exported
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
    for names, keys in _keys_by_files(contents.manifest).items():
        fine: set[int] = set()  # headers: the three files have mostly one
        for name in names:
            if name in (ADAPTER_FILE, CONFIG_FILE):
                yield from (f"{contents.root}: {key}: {name} is listed as an optimizer file" for key in keys)
                continue
            used[name].update(keys)
            entries = contents.files[name].entries
            if id(entries) not in fine:
                problems = list(_state_problems(contents.root / name, keys, entries, adapter))
                yield from problems
                if not problems:
                    fine.add(id(entries))
    for name, found in used.items():
        for key in sorted(contents.files[name].entries.keys() - found):
            yield f"{contents.root / name}: holds {key}, which the manifest does not look for there"


def _keys_by_files(manifest: Manifest) -> dict[tuple[str, str, str], list[str]]:
    by_files: dict[tuple[str, str, str], list[str]] = {}
    for key, names in manifest.parameters.items():
        by_files.setdefault(names, []).append(key)
    return by_files


def _state_problems(
    path: Path, keys: Iterable[str], entries: Mapping[str, Entry], adapter: Mapping[str, Entry]
) -> Iterator[str]:
    for key in keys:
        found = entries.get(key)
        if found is None:
            yield f"{path}: has no tensor {key}, which the manifest looks for there"
            continue
        dtype, shape, *_ = found
        expected = adapter[key][1] if key in adapter else shape
        if dtype != NAME_OF_DTYPE[STATE_DTYPE]:
            yield f"{path}: {key} has dtype {dtype}; expected F32"
        elif shape != expected:
            yield f"{path}: {key} has shape {list(shape)}, the adapter {list(expected)}"
