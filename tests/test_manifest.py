"""The manifest trusts nothing that it reads, and a configuration is written as JSON holds it."""

from __future__ import annotations

import enum
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packckpt import CheckpointError, ExportError, Hyperparameters
from packckpt.manifest import config_bytes, file_digest, manifest_bytes, portable_config, read_json, read_manifest
from tests.builders import Trainer, save

Json = dict[str, Any]
A, C = "adapter_model.safetensors", "adapter_config.json"


def digest_of(content: Json) -> str:
    text = json.dumps({**content, "digest": ""}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def write_manifest(root: Path, content: Json, *, sealed: bool = True) -> None:
    """Write a manifest whose digest is right, so that only what was changed in it can be found."""
    if sealed:
        content = {**content, "digest": digest_of(content)}
    (root / "checkpoint.json").write_text(json.dumps(content))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = Trainer()
    trainer.packed("a", experts=2)
    trainer.dense("b", layer=1)
    save(tmp_path / "c", trainer)
    return tmp_path / "c"


@pytest.fixture
def content(saved: Path) -> Json:
    loaded: Json = json.loads((saved / "checkpoint.json").read_text())
    return loaded


def first_key(content: Json) -> str:
    return min(content["parameters"])


def replace_name(content: Json, name: Any) -> None:
    """Put a name in the place of one optimizer file, wherever it stands, as a hostile writer would."""
    old = content["parameters"][first_key(content)][0]
    for names in content["parameters"].values():
        names[:] = [name if n == old else n for n in names]
    digest = content["files"].pop(old)
    if isinstance(name, str):
        content["files"][name] = digest


UNSAFE = {
    "parent": "../x",
    "absolute": "/etc/hostname",
    "parent in the middle": "a/../../x",
    "parent that stays inside": "optimizer/../optimizer/x",
    "empty": "",
    "dot": ".",
    "backslash": "a\\b",
    "NUL byte": "a\0b",
    "drive": "C:x",
    "drive and slash": "C:/x",
    "double slash": "optimizer//x",
    "leading dot": "./optimizer/x",
    "trailing slash": "optimizer/x/",
    "surrogate": "optimizer/\ud800",
}


class TestNamesAsPaths:
    @pytest.mark.parametrize("kind", UNSAFE)
    @pytest.mark.parametrize("place", ["parameters", "files"])
    def test_refused_before_anything_else_is_opened(
        self, kind: str, place: str, saved: Path, content: Json, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if place == "parameters":
            replace_name(content, UNSAFE[kind])
        else:
            content["files"][UNSAFE[kind]] = "0" * 64
        write_manifest(saved, content)
        opened: list[str] = []
        real = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda self: opened.append(self.name) or real(self))  # type: ignore[func-returns-value]

        with pytest.raises(CheckpointError, match=r"checkpoint.json: unsafe file name .*inside the checkpoint"):
            read_manifest(saved)
        assert opened == ["checkpoint.json"]

    @pytest.mark.parametrize("name", [3, None, ["x"], True])
    def test_what_is_no_name_is_refused(self, name: Any, saved: Path, content: Json) -> None:
        content["parameters"][first_key(content)][0] = name
        write_manifest(saved, content)

        with pytest.raises(CheckpointError, match="unsafe file name"):
            read_manifest(saved)


def set_version(value: Any) -> Callable[[Json], None]:
    return lambda content: content.update(format_version=value)


def with_files(names: Callable[[list[str]], Any]) -> Callable[[Json], None]:
    def change(content: Json) -> None:
        key = first_key(content)
        content["parameters"][key] = names(content["parameters"][key])

    return change


def with_step(value: Any) -> Callable[[Json], None]:
    return lambda content: content["steps"].update({first_key(content): value})


def with_optimizer(**values: Any) -> Callable[[Json], None]:
    return lambda content: content["optimizer"].update(values)


def without(name: str) -> Callable[[Json], None]:
    return lambda content: content.pop(name)


def drop_step(content: Json) -> None:
    del content["steps"][first_key(content)]


def drop_digest(content: Json) -> None:
    del content["files"][content["parameters"][first_key(content)][1]]


def file_digests(value: Any) -> Callable[[Json], None]:
    return lambda content: content["files"].update({A: value})


HOSTILE: dict[str, tuple[Callable[[Json], Any], str]] = {
    "version 3": (set_version(3), "format version 3 holds custom tensors, which packckpt does not read"),
    "version True": (set_version(True), "format_version is True; expected 1"),
    "version text": (set_version("1"), "format_version is '1'; expected 1"),
    "version float": (set_version(1.0), "format_version is 1.0; expected 1"),
    "version 2": (set_version(2), "format_version is 2; expected 1"),
    "version 0": (set_version(0), "format_version is 0; expected 1"),
    "no version": (without("format_version"), "format_version is None; expected 1"),
    "entry missing": (without("steps"), r"entries missing: \['steps'\]; unknown: \[\]"),
    "entry too many": (lambda c: c.update(more=1), r"entries missing: \[\]; unknown: \['more'\]"),
    "digest upper case": (lambda c: c.update(digest="A" * 64), "digest is 'A*'; expected 64 lower-case hex digits"),
    "digest short": (lambda c: c.update(digest="0" * 63), "digest is '0*'; expected 64"),
    "digest with newline": (lambda c: c.update(digest="0" * 64 + "\n"), r"digest is '0*\\n'; expected 64"),
    "digest null": (lambda c: c.update(digest=None), "digest is None; expected 64"),
    "digest list": (lambda c: c.update(digest=["0" * 64]), r"digest is \['0*'\]; expected 64"),
    "digest of something else": (lambda c: c.update(digest="0" * 64), "digest is 0*, its content has .* was changed"),
    "file digest upper case": (file_digests("A" * 64), f"digest of '{A}' is 'A*'; expected 64 lower-case hex"),
    "file digest short": (file_digests("0"), f"digest of '{A}' is '0'; expected 64"),
    "file digest null": (file_digests(None), f"digest of '{A}' is None; expected 64"),
    "files is a list": (lambda c: c.update(files=[]), "files is list; expected an object"),
    "files lists the manifest": (
        lambda c: c["files"].update({"checkpoint.json": "0" * 64}),
        "files lists checkpoint.json itself",
    ),
    "a digest without a use": (lambda c: c["files"].update(x="0" * 64), r"digests without a use: \['x'\]"),
    "no adapter": (lambda c: c["files"].pop(A), rf"files without a digest: \['{A}'\]"),
    "no configuration": (lambda c: c["files"].pop(C), rf"files without a digest: \['{C}'\]"),
    "optimizer file without a digest": (drop_digest, "optimizer/exp_avg-000000.safetensors has no digest in files"),
    "two files": (with_files(lambda names: names[:2]), r"files are \[.*\]; expected three \(master, exp_avg, exp_"),
    "four files": (with_files(lambda names: [*names, names[0]]), r"files are \[.*\]; expected three"),
    "files as text": (with_files(lambda names: "abc"), r"files are 'abc'; expected three"),
    "one file three times": (with_files(lambda names: [names[0]] * 3), "expected three"),
    "one file twice": (with_files(lambda names: [names[0], names[1], names[1]]), "expected three"),
    "parameters is a list": (lambda c: c.update(parameters=[]), "parameters is list; expected an object"),
    "steps is a list": (lambda c: c.update(steps=[]), "steps is list; expected an object"),
    "key without a step": (drop_step, "parameters and steps name different keys, among them .*a.lora_A.weight"),
    "step without a key": (lambda c: c["steps"].update(x=1.0), r"name different keys, among them \['x'\]"),
    "negative step": (with_step(-1.0), "a.lora_A.weight: step is -1.0; expected a finite whole number"),
    "fractional step": (with_step(1.5), "step is 1.5; expected"),
    "step True": (with_step(True), "step is True; expected"),
    "step text": (with_step("1"), "step is '1'; expected"),
    "step null": (with_step(None), "step is None; expected"),
    "huge step": (with_step(10**400), "step is 10*; expected"),
    "optimizer entry missing": (
        lambda c: c["optimizer"].pop("eps"),
        r"optimizer is \{.*\}; expected null or \['beta1'",
    ),
    "optimizer entry too many": (with_optimizer(more=1), "optimizer is .*; expected null or"),
    "optimizer is a list": (lambda c: c.update(optimizer=[]), r"optimizer is \[\]; expected null or"),
    "eps True": (with_optimizer(eps=True), "optimizer eps is True; expected a finite number"),
    "eps text": (with_optimizer(eps="0"), "optimizer eps is '0'; expected a finite number"),
    "eps huge": (with_optimizer(eps=10**400), "optimizer eps is 10*; expected a finite number"),
    "no optimizer but its state": (lambda c: c.update(optimizer=None), "optimizer is null but parameters or steps are"),
    "model is no text": (lambda c: c.update(base_model_name_or_path=None), "base_model_name_or_path is None; expected"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_manifest(kind: str, saved: Path, content: Json) -> None:
    change, message = HOSTILE[kind]
    change(content)
    write_manifest(saved, content, sealed="digest" not in kind.split()[:1])

    with pytest.raises(CheckpointError, match=f"^{saved}/checkpoint.json: .*{message}"):
        read_manifest(saved)


def test_the_helper_alone_breaks_nothing(saved: Path, content: Json) -> None:
    write_manifest(saved, content)

    assert read_manifest(saved).digest == content["digest"] == digest_of(content)


class TestText:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "cannot be read as JSON"),
            ("{", "cannot be read as JSON"),
            ("[]", "holds a JSON list; expected an object"),
            ("null", "holds a JSON NoneType; expected an object"),
            ('{"a": 1, "a": 1}', "the name 'a' stands twice in one object"),
            ('{"b": {"a": 1, "c": 2, "a": 3}}', "the name 'a' stands twice in one object"),
            ('{"a": NaN}', "NaN is not a JSON number"),
            ('{"a": [Infinity]}', "Infinity is not a JSON number"),
            ('{"a": -Infinity}', "-Infinity is not a JSON number"),
            ("1" * 5000, "cannot be read as JSON"),
            ("[" * 100_000, "cannot be read as JSON"),
            ('{"a":' * 100_000, "cannot be read as JSON"),
            ("\ufeff{}", "cannot be read as JSON"),
        ],
        ids=lambda value: value[:12] if isinstance(value, str) else None,
    )
    def test_refused(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "checkpoint.json").write_text(text)

        with pytest.raises(CheckpointError, match=f"^{tmp_path}/checkpoint.json: .*{message}"):
            read_manifest(tmp_path)

    @pytest.mark.parametrize("depth", [100, 300, 500, 900, 990, 2_000, 20_000, 60_000])
    @pytest.mark.parametrize("place", ["optimizer", "files", "base_model_name_or_path", "digest"])
    def test_any_depth_of_nesting_is_refused(self, depth: int, place: str, saved: Path, content: Json) -> None:
        """Reading may go deeper than writing the digest's JSON does."""
        content[place] = "HERE"
        text = json.dumps(content).replace('"HERE"', "[" * depth + "]" * depth)
        (saved / "checkpoint.json").write_text(text)

        with pytest.raises(CheckpointError, match=f"^{saved}/checkpoint.json: "):
            read_manifest(saved)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint.json").write_bytes(b'{"a": "\xff"}')

        with pytest.raises(CheckpointError, match="cannot be read as JSON: 'utf-8' codec"):
            read_manifest(tmp_path)

    def test_infinity_by_way_of_a_large_number(self, saved: Path, content: Json) -> None:
        content["optimizer"]["eps"] = float("inf")
        content["digest"] = digest_of(content)
        (saved / "checkpoint.json").write_text(json.dumps(content).replace("Infinity", "1e999"))

        with pytest.raises(CheckpointError, match="optimizer eps is inf; expected a finite number"):
            read_manifest(saved)


class TestFiles:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(
            CheckpointError, match=r"no such file; expected a checkpoint directory with checkpoint.json"
        ):
            read_manifest(tmp_path / "none")

    def test_a_file_in_place_of_the_directory(self, tmp_path: Path) -> None:
        (tmp_path / "f").touch()

        with pytest.raises(CheckpointError, match=r"f/checkpoint.json: cannot be read as JSON: .*Not a directory"):
            read_manifest(tmp_path / "f")

    @pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
    def test_no_regular_file(self, make: Callable[[Path], None], tmp_path: Path) -> None:
        """A FIFO would block for ever."""
        make(tmp_path / "checkpoint.json")

        with pytest.raises(CheckpointError, match="cannot be read as JSON: a link, or not a regular file"):
            read_manifest(tmp_path)

    def test_a_manifest_that_is_a_link_out(self, saved: Path, tmp_path: Path) -> None:
        (saved / "checkpoint.json").rename(tmp_path / "elsewhere.json")
        (saved / "checkpoint.json").symlink_to(tmp_path / "elsewhere.json")

        with pytest.raises(CheckpointError, match=r"checkpoint.json: .*link"):
            read_manifest(saved)

    def test_digest_of_a_file_of_several_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("packckpt.manifest._READ_BYTES", 7)
        (tmp_path / "f").write_bytes(bytes(range(100)))

        assert file_digest(tmp_path / "f") == hashlib.blake2b(bytes(range(100)), digest_size=32).hexdigest()


class Kind(enum.StrEnum):
    """What PEFT's configurations hold."""

    LORA = "LORA"


class TestConfiguration:
    def test_is_written_sorted_with_a_final_newline(self) -> None:
        text = config_bytes(portable_config({"r": 4, "base_model_name_or_path": "m", "t": {"b", "a"}})).decode()

        assert text == (
            '{\n  "art_lora_format": "art-trainer-rank-v1",\n  "base_model_name_or_path": "m",\n'
            '  "r": 4,\n  "t": [\n    "a",\n    "b"\n  ]\n}\n'
        )

    def test_sets_become_sorted_lists_and_tuples_lists(self) -> None:
        given = {
            "base_model_name_or_path": "m",
            "set": {"b", "a"},
            "frozen": frozenset([3, 1]),
            "tuple": (1, (2, {"x"})),
            "kind": Kind.LORA,
            "nested": {"deep": [{"z", "y"}]},
            "mixed": {1, "a", None},
            "pairs": {("b", 2), ("a", 1)},
            "float": 0.1,
            "none": None,
        }
        portable = portable_config(given)

        assert portable["set"] == ["a", "b"]
        assert portable["frozen"] == [1, 3]
        assert portable["tuple"] == [1, [2, ["x"]]]
        assert (portable["kind"], type(portable["kind"])) == ("LORA", str)
        assert portable["nested"] == {"deep": [["y", "z"]]}
        assert sorted(portable["mixed"], key=str) == [1, None, "a"]
        assert portable["pairs"] == [["a", 1], ["b", 2]]
        assert json.loads(config_bytes(portable)) == {**portable, "art_lora_format": "art-trainer-rank-v1"}

    def test_is_a_copy(self) -> None:
        given = {"base_model_name_or_path": "m", "modules": ["a"]}
        portable = portable_config(given)
        given["modules"].append("b")  # type: ignore[attr-defined]

        assert portable["modules"] == ["a"]

    def test_may_name_the_format_itself(self) -> None:
        config = {"base_model_name_or_path": "m", "art_lora_format": "art-trainer-rank-v1"}

        assert portable_config(config) == config

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ([], "config is a list; expected a mapping"),
            ({}, "config has no 'base_model_name_or_path'"),
            ({"x": object()}, r"config\['x'\] is <object.*> \(object\); expected what JSON holds"),
            ({"x": [1, {"y": b""}]}, r"config\['x'\]\[1\]\['y'\] is b'' \(bytes\)"),
            ({"x": float("nan")}, r"config\['x'\] is nan \(float\)"),
            ({"x": {(1, "a"), ("b", 2)}}, r"config\['x'\] is a set whose items have no order; give a list"),
            ({1: 2}, "config has the key 1; expected strings"),
            ({"x": {None: 2}}, r"config\['x'\] has the key None; expected strings"),
            ({"art_lora_format": "other"}, r"config\['art_lora_format'\] is 'other'; packckpt writes 'art-trainer"),
        ],
    )
    def test_refuses_what_json_cannot_hold(self, config: Any, message: str) -> None:
        if isinstance(config, dict) and config:
            config = {"base_model_name_or_path": "m", **config}
        with pytest.raises(ExportError, match=message):
            portable_config(config)

    def test_refuses_a_configuration_that_holds_itself(self) -> None:
        config: dict[str, Any] = {"base_model_name_or_path": "m"}
        config["self"] = [config]

        with pytest.raises(
            ExportError, match=r"^config holds itself or is nested too deeply; expected what JSON holds"
        ):
            portable_config(config)


class TestManifestBytes:
    def test_values_and_digest(self) -> None:
        hyper = Hyperparameters(1.0, 0.5, 0.25, 0.125, 0.0)
        content, digest = manifest_bytes("m", hyper, {"k": ("a", "b", "c")}, {"k": 7}, {"z": "1", "a": "2"})
        loaded = json.loads(content)

        assert content.endswith(b"}\n")
        assert content.decode() == json.dumps(loaded, indent=2) + "\n"
        assert digest == loaded["digest"] == digest_of(loaded)
        assert list(loaded["files"]) == ["a", "z"]
        assert (loaded["steps"], type(loaded["steps"]["k"])) == ({"k": 7.0}, float)
        assert loaded["optimizer"] == {
            "learning_rate": 1.0, "beta1": 0.5, "beta2": 0.25, "eps": 0.125, "weight_decay": 0.0,
        }  # fmt: skip
        assert set(loaded) == {
            "format_version", "base_model_name_or_path", "optimizer", "parameters", "steps", "files", "digest",
        }  # fmt: skip

    @given(keys=st.lists(st.text(), unique=True), numbers=st.data())
    def test_is_the_text_and_the_digest_of_the_whole(self, keys: list[str], numbers: st.DataObject) -> None:
        steps = {key: numbers.draw(st.integers(0, 2**53)) for key in keys}
        files = [("m-0", "a-0", "v-0"), ("m-1", "a-1", "v-1")]
        parameters = {key: numbers.draw(st.sampled_from(files)) for key in keys}
        content, digest = manifest_bytes("mö\n", None, parameters, steps, {"z": "1", "a": "2"})
        whole: Json = {
            "format_version": 1,
            "base_model_name_or_path": "mö\n",
            "optimizer": None,
            "parameters": {key: list(names) for key, names in parameters.items()},
            "steps": {key: float(step) for key, step in steps.items()},
            "files": {"a": "2", "z": "1"},
        }
        whole["digest"] = digest_of(whole)

        assert digest == whole["digest"]
        assert content.decode() == json.dumps(whole, indent=2) + "\n"

    def test_without_an_optimizer(self) -> None:
        loaded = json.loads(manifest_bytes("m", None, {}, {}, {})[0])

        assert (loaded["optimizer"], loaded["parameters"], loaded["steps"]) == (None, {}, {})


def test_read_json_returns_the_object(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('{"a": [1, 2.5, null]}')

    assert read_json(tmp_path / "f") == {"a": [1, 2.5, None]}
