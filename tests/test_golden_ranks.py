"""The golden saves that more than one rank made, by real processes, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packckpt import CheckpointSaver, verify_checkpoint
from packckpt.plan import PATHS
from tests import golden
from tests.processes import on_ranks
from tests.sharded import names, tree

NAMES = [name for name in golden.NAMES if golden.case(name)["world_size"] > 1]


def _save(rank: int, root: Path, name: str) -> dict[str, str]:
    made = golden.load_rank(name, rank)
    digests = {}
    for path in PATHS:
        with CheckpointSaver(path, timeout_seconds=30) as saver:
            digests[path] = saver.save(root / path, made.exports, made.state, golden.case(name)["config"])
    return digests


def test_there_is_one() -> None:
    assert NAMES == ["two-ranks-experts"]


@pytest.mark.parametrize("name", NAMES)
def test_byte_for_byte(tmp_path: Path, name: str) -> None:
    digests = on_ranks(golden.case(name)["world_size"], _save, tmp_path, name)
    expected = tree(golden.expected(name))
    manifest = json.loads(expected.pop("checkpoint.json"))
    for path in PATHS:
        found = tree(tmp_path / path)
        assert json.loads(found.pop("checkpoint.json")) == manifest
        assert found == expected
        assert verify_checkpoint(tmp_path / path) == manifest["digest"]
    assert digests == [dict.fromkeys(PATHS, manifest["digest"])] * len(digests)
    assert names(tmp_path) == sorted(PATHS)
