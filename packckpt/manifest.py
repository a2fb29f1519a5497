"""The on-disk format: names, digests and validation of `checkpoint.json`; no tensors."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from packckpt.errors import CheckpointError, ExportError
from packckpt.jsontext import COMPACT, INDENTED, Style
from packckpt.optimizer import COMPONENTS, LARGEST_STEP, Hyperparameters
from packckpt.tensorfile import new_digest

FORMAT_VERSION = 1
CUSTOM_TENSORS_VERSION = 3
MANIFEST_FILE = "checkpoint.json"
ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_DIRECTORY = "optimizer"
FORMAT_KEY = "art_lora_format"
FORMAT_NAME = "art-trainer-rank-v1"
MODEL_KEY = "base_model_name_or_path"

_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 1 << 20  # what is hashed is then still in the core's cache
_LARGEST_FLOAT = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `checkpoint.json` says, validated.

    Attributes:
        base_model: the model's name or path.
        optimizer: the hyper-parameters, or None where no optimizer was saved.
        parameters: key to its files of master, exp_avg and exp_avg_sq.
        steps: key to its step count.
        files: relative path to the BLAKE2b-256 hex digest, for every file but the manifest.
        digest: of the manifest itself.
    """

    base_model: str
    optimizer: Hyperparameters | None
    parameters: Mapping[str, tuple[str, str, str]]
    steps: Mapping[str, float]
    files: Mapping[str, str]
    digest: str


def optimizer_file(component: str, block_number: int) -> str:
    """Return the relative path of one component of one block."""
    return f"{OPTIMIZER_DIRECTORY}/{component}-{block_number:06d}.safetensors"


def portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a configuration as JSON holds it: sets as sorted lists, tuples as lists.

    Raises:
        ExportError: a value that JSON cannot hold, or no model name; names the entry.
    """
    if not isinstance(config, Mapping):
        raise ExportError(f"config is a {type(config).__name__}; expected a mapping")
    if MODEL_KEY not in config:
        raise ExportError(f"config has no {MODEL_KEY!r}; the checkpoint records which model it belongs to")
    found = config.get(FORMAT_KEY, FORMAT_NAME)
    if found != FORMAT_NAME:
        raise ExportError(f"config[{FORMAT_KEY!r}] is {found!r}; packckpt writes {FORMAT_NAME!r}: leave it out")
    try:
        portable: dict[str, Any] = _portable(config, "config")
    except RecursionError:
        raise ExportError("config holds itself or is nested too deeply; expected what JSON holds") from None
    return portable


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return the content of `adapter_config.json` for a portable configuration."""
    return (json.dumps({**config, FORMAT_KEY: FORMAT_NAME}, indent=2, sort_keys=True) + "\n").encode()


def manifest_bytes(
    base_model: str,
    optimizer: Hyperparameters | None,
    parameters: Mapping[str, tuple[str, ...]],
    steps: Mapping[str, int],
    files: Mapping[str, str],
) -> tuple[bytes, str]:
    """Return the content of `checkpoint.json` and its digest."""
    values = {
        "format_version": FORMAT_VERSION,
        MODEL_KEY: base_model,
        "optimizer": None if optimizer is None else optimizer.as_dict(),
    }
    tables: dict[str, Mapping[str, Hashable]] = {
        "parameters": parameters,
        "steps": {key: float(step) for key, step in steps.items()},
        "files": dict(sorted(files.items())),
    }

    def text(style: Style, digest: str) -> str:
        texts = {name: style.value(value, 1) for name, value in values.items()}
        texts.update((name, style.table(table, 1)) for name, table in tables.items())
        return style.members({**texts, "digest": style.value(digest, 1)}, 0)

    digest = _text_digest(text(COMPACT, ""))
    return (text(INDENTED, digest) + "\n").encode(), digest


def read_manifest(root: Path) -> Manifest:
    """Read and validate `checkpoint.json`; no other file is opened.

    Raises:
        CheckpointError: no checkpoint there, or a manifest that is not what the format promises.
    """
    path = root / MANIFEST_FILE
    content = read_json(path)
    version = content.get("format_version")
    if version == CUSTOM_TENSORS_VERSION and not isinstance(version, bool):
        raise CheckpointError(
            f"{path}: format version 3 holds custom tensors, which packckpt does not read; "
            "load it with the trainer that wrote it"
        )
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format_version is {version!r}; expected {FORMAT_VERSION}")
    _expect_keys(path, content)
    digest = content["digest"]
    if not _is_digest(digest):
        raise CheckpointError(f"{path}: digest is {digest!r}; expected 64 lower-case hex digits")
    actual = _content_digest(content)
    if digest != actual:
        raise CheckpointError(f"{path}: digest is {digest}, its content has {actual}; the manifest was changed")
    files = _files(path, content["files"])
    optimizer = _optimizer(path, content["optimizer"])
    parameters = _parameters(path, content["parameters"], files)
    steps = _steps(path, content["steps"])
    _expect_consistent(path, optimizer, parameters, steps, files)
    base_model = content[MODEL_KEY]
    if not isinstance(base_model, str):
        raise CheckpointError(f"{path}: {MODEL_KEY} is {base_model!r}; expected a string")
    return Manifest(base_model, optimizer, parameters, steps, files, digest)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object strictly: no repeated names, no NaN, no links, regular files only."""
    try:
        text = _open_regular(path).decode()
        content = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected a checkpoint directory with {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}; expected an object")
    return content


def safe_file(root: Path, relative: str) -> Path:
    """Return the path of a file of the checkpoint; refuse what leads out of it or is no regular file.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    _expect_safe(root, relative)
    path = root / relative
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        if not resolved.is_relative_to(os.path.realpath(root)):
            raise CheckpointError(f"{path}: a link that leads out of the checkpoint, to {resolved}")
        if not stat.S_ISREG(resolved.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the manifest lists it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error}") from None
    return path


def file_digest(path: Path) -> str:
    """Return the BLAKE2b-256 hex digest of a file, read in pieces of 1 MiB."""
    digest = new_digest()
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _portable(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ExportError(f"{name} has the key {key!r}; expected strings")
        return {key: _portable(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, set | frozenset):
        items = [_portable(item, f"{name}{{}}") for item in value]
        try:
            return sorted(items, key=lambda item: (str(type(item)), item))
        except TypeError:
            raise ExportError(f"{name} is a set whose items have no order; give a list") from None
    if isinstance(value, list | tuple):
        return [_portable(item, f"{name}[{index}]") for index, item in enumerate(value)]
    try:
        # Through JSON and back: a str or int subclass (an enum member) becomes what a reader will see.
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise ExportError(
            f"{name} is {value!r} ({type(value).__name__}); expected what JSON holds: text, finite numbers, "
            "true, false, null, lists and objects"
        ) from None


def _content_digest(content: Mapping[str, Any]) -> str:
    return _text_digest(COMPACT.value({**content, "digest": ""}, 0))


def _text_digest(text: str) -> str:
    digest = new_digest()
    digest.update(text.encode())
    return digest.hexdigest()


def _open_regular(path: Path) -> bytes:
    # A FIFO would block for ever and a link may lead out, so it is looked at before it is opened.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("a link, or not a regular file")
    return path.read_bytes()


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    listed = list(pairs)
    content = dict(listed)
    if len(content) != len(listed):
        twice = next(name for name, count in Counter(name for name, _ in listed).items() if count > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return content


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _HEX_DIGEST.fullmatch(value) is not None


def _expect_keys(path: Path, content: Mapping[str, Any]) -> None:
    expected = {"format_version", MODEL_KEY, "optimizer", "parameters", "steps", "files", "digest"}
    if set(content) != expected:
        missing, extra = sorted(expected - set(content)), sorted(set(content) - expected)
        raise CheckpointError(f"{path}: entries missing: {missing}; unknown: {extra}; expected {sorted(expected)}")


def _files(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: files is {type(value).__name__}; expected an object of path to digest")
    for relative, digest in value.items():
        _expect_safe(path, relative)
        if not _is_digest(digest):
            raise CheckpointError(f"{path}: digest of {relative!r} is {digest!r}; expected 64 lower-case hex digits")
    if MANIFEST_FILE in value:
        raise CheckpointError(f"{path}: files lists {MANIFEST_FILE} itself; expected every file but the manifest")
    return value


def _expect_safe(where: Path, relative: object) -> None:
    parts = PurePosixPath(relative).parts if isinstance(relative, str) else ()
    unsafe = (
        not parts
        or not isinstance(relative, str)
        or "\0" in relative
        or "\\" in relative
        or not _is_unicode(relative)
        or ".." in parts
        or PurePosixPath(relative).is_absolute()
        or bool(PureWindowsPath(relative).drive)
        # One spelling a file: `a//b` and `./a` would escape a comparison by name.
        or "/".join(parts) != relative
    )
    if unsafe:
        raise CheckpointError(f"{where}: unsafe file name {relative!r}; expected a relative path inside the checkpoint")


def _is_unicode(text: str) -> bool:
    # JSON can spell half a surrogate pair, which no file name holds.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _optimizer(path: Path, value: object) -> Hyperparameters | None:
    if value is None:
        return None
    expected = set(Hyperparameters.__dataclass_fields__)
    if not isinstance(value, dict) or set(value) != expected:
        raise CheckpointError(f"{path}: optimizer is {value!r}; expected null or {sorted(expected)}")
    for name, number in value.items():
        finite = isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= _LARGEST_FLOAT
        if not finite:
            raise CheckpointError(f"{path}: optimizer {name} is {number!r}; expected a finite number")
    return Hyperparameters(**{name: float(number) for name, number in value.items()})


def _parameters(path: Path, value: object, files: Mapping[str, str]) -> dict[str, tuple[str, str, str]]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: parameters is {type(value).__name__}; expected an object of key to files")
    checked: dict[str, tuple[str, str, str]] = {}
    previous: object = None
    for key, names in value.items():
        if names != previous:  # all keys of a block have the same three
            known, previous = _three_files(path, key, names, files), names
        checked[key] = known
    return checked


def _three_files(path: Path, key: str, names: object, files: Mapping[str, str]) -> tuple[str, str, str]:
    if not isinstance(names, list) or len(names) != len(COMPONENTS):
        raise CheckpointError(f"{path}: {key}: files are {names!r}; expected three ({', '.join(COMPONENTS)})")
    for name in names:
        # Names in `files` are known to be safe.
        if not isinstance(name, str) or name not in files:
            _expect_safe(path, name)
            raise CheckpointError(f"{path}: {key}: {name} has no digest in files")
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path}: {key}: files are {names!r}; expected three different ones")
    return names[0], names[1], names[2]


def _steps(path: Path, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: steps is {type(value).__name__}; expected an object of key to number")
    for key, step in value.items():
        number = isinstance(step, int | float) and not isinstance(step, bool)
        if not number or not 0 <= step <= LARGEST_STEP or step != int(step):
            raise CheckpointError(f"{path}: {key}: step is {step!r}; expected a finite whole number, 0 or more")
    return {key: float(step) for key, step in value.items()}


def _expect_consistent(
    path: Path,
    optimizer: Hyperparameters | None,
    parameters: Mapping[str, Sequence[str]],
    steps: Mapping[str, float],
    files: Mapping[str, str],
) -> None:
    if optimizer is None and (parameters or steps):
        raise CheckpointError(f"{path}: optimizer is null but parameters or steps are not empty")
    if set(parameters) != set(steps):
        differing = sorted(set(parameters) ^ set(steps))[:8]
        raise CheckpointError(f"{path}: parameters and steps name different keys, among them {differing}")
    expected = {ADAPTER_FILE, CONFIG_FILE, *(name for names in parameters.values() for name in names)}
    if set(files) != expected:
        missing, extra = sorted(expected - set(files)), sorted(set(files) - expected)
        raise CheckpointError(f"{path}: files without a digest: {missing}; digests without a use: {extra}")
