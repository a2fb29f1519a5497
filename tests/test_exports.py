"""Exports and shards refuse bad values at birth, naming field, value and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packckpt import CheckpointSaver, Export, ExportError, PackckptError, Shard, exports, plan_transfers
from packckpt.exports import GLOBAL_BLOCK, block_of, blocks_of, check_exports, named
from tests.builders import arange

# Blocks within blocks, numbers that begin alike, and what only looks like a block.
BEGINNINGS = [
    "a.layers.1", "a.layers.10", "a.layers.1.layers.2", "a.layers.1.b.layers.2", "a.layers.1.b.layers.x",
    "a.layers.1\n", "a\n.layers.1", "a.layers.1.b\n.layers.2", "b", GLOBAL_BLOCK, f"{GLOBAL_BLOCK}.layers.1", "",
]  # fmt: skip


class TestBlockOf:
    @pytest.mark.parametrize(
        ("key", "block"),
        [
            ("a.layers.3.mlp.experts.17.down_proj.lora_A.weight", "a.layers.3"),
            ("a.layers.3.b.layers.12.c", "a.layers.3.b.layers.12"),
            ("a.layers.10.x", "a.layers.10"),
            ("a.layers.3", GLOBAL_BLOCK),
            ("layers.3.x", GLOBAL_BLOCK),
            ("a.layers.x.3", GLOBAL_BLOCK),
            ("a.layers.3b.x", GLOBAL_BLOCK),
            ("lm_head.lora_A.weight", GLOBAL_BLOCK),
            ("é.layers.0.x", "é.layers.0"),
            ("a/../b.layers.0.x", "a/../b.layers.0"),
        ],
    )
    def test_is_the_longest_prefix_up_to_a_layer_number(self, key: str, block: str) -> None:
        assert block_of(key) == block

    @given(keys=st.lists(st.builds(str.__add__, st.sampled_from(BEGINNINGS), st.sampled_from(["", ".w", ".3.w"]))))
    def test_of_many_keys_is_that_of_each(self, keys: list[str]) -> None:
        assert list(blocks_of(keys)) == [block_of(key) for key in keys]

    def test_is_looked_for_once_where_keys_of_one_follow_one_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looked: list[str] = []
        monkeypatch.setattr(exports, "block_of", lambda key: looked.append(key) or block_of(key))
        keys = [f"a.layers.{layer}.experts.{row}.w" for layer in (1, 10, 2) for row in range(5)]

        assert list(blocks_of(keys)) == [f"a.layers.{layer}" for layer in (1, 10, 2) for _ in range(5)]
        assert looked == keys[::5]


class TestShard:
    def test_keeps_its_values_as_plain_ints(self) -> None:
        shard = Shard(numpy.int64(1), 2, 0, [4, 6])  # type: ignore[arg-type]

        assert (type(shard.rank), shard.rank, shard.component_sizes) == (int, 1, (4, 6))
        assert shard.local_component_sizes == (2, 3)
        assert Shard(0, 2, 1).local_component_sizes is None

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0, 0, 0), r"Shard.world_size is 0; expected 1 or more"),
            ((2, 2, 0), r"Shard.rank is 2; expected 0 to 1"),
            ((-1, 2, 0), r"Shard.rank is -1; expected 0 to 1"),
            ((0, 2, 2), r"Shard.dim is 2; expected 0 or 1, the axis of the exported tensor"),
            ((0, 2, -1), r"Shard.dim is -1"),
            ((True, 2, 0), r"Shard.rank is True; expected a whole number"),
            ((0, 2.0, 0), r"Shard.world_size is 2.0; expected a whole number"),
            ((0, 2, 0, ()), r"Shard.component_sizes is \(\); expected sizes"),
            ((0, 2, 0, (4, 3)), r"component_sizes is \(4, 3\); .* divisible by world_size 2"),
            ((0, 2, 0, (4, 0)), r"component_sizes is \(4, 0\)"),
            ((0, 2, 0, (4, 2.5)), r"Shard.component_sizes is 2.5; expected a whole number"),
        ],
    )
    def test_refuses(self, arguments: tuple[Any, ...], message: str) -> None:
        with pytest.raises(ExportError, match=message):
            Shard(*arguments)

    def test_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            Shard(0, 2, 0).rank = 1  # type: ignore[misc]


def test_a_parameter_without_data_is_planned_and_not_saved(tmp_path: Path) -> None:
    parameter = torch.empty(8, 3, 2, device="meta")
    exports = [Export(f"k{row}", parameter, expert=row) for row in range(8)]
    assert [plan_transfers(exports, None, path).weight_calls for path in ("slice", "staged")] == [8, 1]  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"k0: the parameter.* is on the meta device and has no data"):
        CheckpointSaver().prepare(tmp_path / "c", exports, None, {"base_model_name_or_path": "m"})
    assert list(tmp_path.iterdir()) == []


class TestExport:
    def test_shape_is_that_of_the_transpose(self) -> None:
        assert Export("k", arange(3, 2)).shape == (2, 3)
        assert Export("k", arange(4, 3, 2), expert=3).shape == (2, 3)

    @pytest.mark.parametrize("row", [numpy.int64(2), torch.tensor(2)])
    def test_row_may_be_any_index(self, row: Any) -> None:
        export = Export("k", arange(4, 3, 2), expert=row)

        assert (type(export.expert), export.expert) == (int, 2)

    @pytest.mark.parametrize("key", ["a/b", "../../x", "/etc/passwd", "k" * 300, "ключ 鍵 🗝", "a\nb\t\x01", " "])
    def test_a_key_is_no_path(self, key: str) -> None:
        assert Export(key, arange(3, 2)).key == key

    @pytest.mark.parametrize(
        ("key", "message"),
        [
            ("", "export key is ''; expected a non-empty string"),
            (3, "export key is 3; expected a non-empty string"),
            ("__metadata__", "'__metadata__', a reserved name in a safetensors file"),
            ("a\0b", r"export key 'a\\x00b' contains a NUL byte"),
            ("a\ud800", "is not valid Unicode"),
        ],
    )
    def test_refuses_a_key(self, key: Any, message: str) -> None:
        with pytest.raises(ExportError, match=message):
            Export(key, arange(3, 2))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
    def test_refuses_what_is_no_float(self, dtype: torch.dtype) -> None:
        with pytest.raises(ExportError, match=rf"k: parameter has dtype {str(dtype)[6:]}; expected one of float64, "):
            Export("k", torch.zeros(3, 2, dtype=dtype))

    @pytest.mark.parametrize(
        ("parameter", "expert", "message"),
        [
            ([1.0], None, "k: parameter is a list; expected a torch.Tensor"),
            (arange(3, 2).to_sparse(), None, r"k: parameter is a torch.sparse_coo tensor; expected a dense"),
            (arange(4, 3, 2), None, r"k: parameter has shape \[4, 3, 2\]; expected \[in, out\] .*give `expert=`"),
            (arange(3), None, r"k: parameter has shape \[3\]; the format holds tensors of two axes: save norms"),
            (arange(3, 2), 0, r"k: parameter has shape \[3, 2\]; expected \[experts, in, out\] with an expert"),
            (arange(4, 3, 2), 4, "k: expert is 4; the parameter holds rows 0 to 3"),
            (arange(4, 3, 2), -1, "k: expert is -1; the parameter holds rows 0 to 3"),
            (arange(4, 3, 2), True, "k: expert is True; expected a whole number"),
            (arange(4, 3, 2), 1.0, "k: expert is 1.0; expected a whole number"),
        ],
    )
    def test_refuses_a_parameter(self, parameter: Any, expert: Any, message: str) -> None:
        with pytest.raises(ExportError, match=message):
            Export("k", parameter, expert=expert)

    def test_refuses_a_distributed_tensor_and_says_what_to_pass(self) -> None:
        class Distributed(torch.Tensor):
            def to_local(self) -> torch.Tensor:
                raise AssertionError("is not to be called")

        with pytest.raises(ExportError, match=r"k: parameter is a Distributed; export its local rows \(`parameter.to_"):
            Export("k", arange(3, 2).as_subclass(Distributed))

    def test_refuses_a_shard_that_is_none(self) -> None:
        with pytest.raises(ExportError, match="k: shard is a tuple; expected a Shard or None"):
            Export("k", arange(3, 2), shard=(0, 2, 0))  # type: ignore[arg-type]

    def test_refuses_components_that_do_not_add_up(self) -> None:
        with pytest.raises(ExportError, match=r"k: component_sizes \(4, 6\) over 2 ranks make 5 on axis 0; .*\[2, 3\]"):
            Export("k", arange(3, 2), shard=Shard(0, 2, 0, (4, 6)))

        assert Export("k", arange(3, 5), shard=Shard(0, 2, 0, (4, 6))).shape == (5, 3)


class TestCheckExports:
    def test_keeps_the_order_of_any_iterable(self) -> None:
        exports = [Export(key, arange(3, 2)) for key in "cab"]

        assert check_exports(iter(exports)) == exports
        assert check_exports([]) == []

    def test_names_a_key_that_stands_twice_and_where(self) -> None:
        exports = [Export(key, arange(3, 2)) for key in "abcb"]

        with pytest.raises(
            ExportError, match=r"^b: exported twice, at positions 1 and 3 of the list; one rank exports"
        ):
            check_exports(exports)

    def test_names_the_position_of_what_is_no_export(self) -> None:
        with pytest.raises(ExportError, match=r"exports\[1\] is a str; expected an Export"):
            check_exports([Export("a", arange(3, 2)), "b"])  # type: ignore[list-item]


def test_named_shows_the_first_keys_and_counts_the_rest() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named(list("abcd"), limit=3) == "a, b, c, ... (4 in all)"


def test_every_error_is_of_one_family() -> None:
    assert issubclass(ExportError, PackckptError)
