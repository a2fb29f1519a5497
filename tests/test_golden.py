"""The origin trainer's own saves come out byte for byte, on both paths, from the host and from a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from packckpt import CheckpointSaver, load_checkpoint, verify_checkpoint
from tests import emulated, golden
from tests.builders import PATHS, assert_same_tensor

SINGLE = [name for name in golden.NAMES if golden.case(name)["world_size"] == 1]
PathName = Literal["slice", "coalesced"]


def test_there_are_five_saves_and_one_of_them_has_two_ranks() -> None:
    assert len(golden.NAMES) == 5
    assert sorted(set(golden.NAMES) - set(SINGLE)) == ["two-ranks-experts"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SINGLE)
class TestSave:
    def test_from_the_host(self, name: str, path: PathName, tmp_path: Path) -> None:
        trainer = golden.load_rank(name, 0)
        digest = CheckpointSaver(path).save(tmp_path / "c", trainer.exports, trainer.state, golden.case(name)["config"])

        golden.assert_same_checkpoint(golden.expected(name), tmp_path / "c")
        assert digest == json.loads((golden.expected(name) / "checkpoint.json").read_text())["digest"]

    def test_from_a_device(self, name: str, path: PathName, tmp_path: Path) -> None:
        emulated.install_or_skip()
        trainer = golden.load_rank(name, 0, emulated.to_device)
        CheckpointSaver(path).save(tmp_path / "c", trainer.exports, trainer.state, golden.case(name)["config"])

        golden.assert_same_checkpoint(golden.expected(name), tmp_path / "c")


@pytest.mark.parametrize("name", golden.NAMES)
class TestRead:
    def test_verifies(self, name: str) -> None:
        recorded = json.loads((golden.expected(name) / "checkpoint.json").read_text())["digest"]

        assert verify_checkpoint(golden.expected(name)) == recorded

    def test_holds_what_the_inputs_say(self, name: str) -> None:
        ranks = [golden.load_rank(name, rank) for rank in range(golden.case(name)["world_size"])]
        checkpoint = load_checkpoint(golden.expected(name))
        exports = {export.key: (export, rank) for rank in ranks for export in rank.exports}

        assert set(checkpoint.keys) == set(exports)
        for key, (export, rank) in exports.items():
            value = export.parameter.detach()
            assert_same_tensor(checkpoint.exported(key), (value if export.expert is None else value[export.expert]).T)
            if rank.optimizer is not None:
                master = next(master for parameter, master in rank.masters if parameter is export.parameter)
                cut = master.detach() if export.expert is None else master.detach()[export.expert]
                assert_same_tensor(checkpoint.state(key).master, cut.T.float())


@pytest.mark.parametrize("what", ["a byte", "a file", "the manifest"])
def test_the_comparison_can_fail(what: str, tmp_path: Path) -> None:
    trainer = golden.load_rank("block-order", 0)
    made = tmp_path / "c"
    CheckpointSaver().save(made, trainer.exports, trainer.state, golden.case("block-order")["config"])
    if what == "a byte":
        content = bytearray((made / "adapter_model.safetensors").read_bytes())
        content[-1] ^= 1
        (made / "adapter_model.safetensors").write_bytes(content)
    elif what == "a file":
        (made / "optimizer" / "extra").touch()
    else:
        manifest = json.loads((made / "checkpoint.json").read_text())
        (made / "checkpoint.json").write_text(json.dumps({**manifest, "format_version": 2}))

    with pytest.raises(AssertionError):
        golden.assert_same_checkpoint(golden.expected("block-order"), made)
