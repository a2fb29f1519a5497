"""Slice and coalesced over one to four ranks: one directory, one digest, and the values that plain torch says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packckpt import CheckpointSaver, SaveError, Shard, verify_checkpoint
from packckpt.plan import PATHS, PathName
from tests.processes import Failure, attempt, on_ranks
from tests.sharded import CONFIG, Site, assert_holds, build, names, tree

DOWN = "base.layers.2.mlp.experts.{expert}.down_proj.lora_A.weight"
UP = "base.layers.10.mlp.experts.{expert}.up_proj.lora_B.weight"
DENSE = "base.layers.2.self_attn.q_proj.lora_A.weight"
HEAD = "base.lm_head.lora_B.weight"

Case = list[list[Site]]


def _experts(*by_rank: tuple[int | None, ...]) -> Case:
    """Each rank holds some experts of two packed parameters in two layers."""
    return [[Site(DOWN, 10, (3, 2), experts), Site(UP, 50, (2, 5), experts)] if experts else [] for experts in by_rank]


def _sharded(name: str, shape: tuple[int, int], dim: int, size: int, **rest: object) -> Case:
    return [[Site(name, 3, shape, shard=Shard(rank, size, dim), **rest)] for rank in range(size)]  # type: ignore[arg-type]


def _uneven(shape: tuple[int, int], dim: int, *ends: int) -> Case:
    starts = (0, *ends[:-1])
    return [
        [Site(DENSE, 3, shape, shard=Shard(rank, len(ends), dim), bounds=(start, end))]
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _components(shape: tuple[int, int], dim: int, size: int, sizes: tuple[int, ...]) -> Case:
    return [[Site(DENSE, 3, shape, shard=Shard(rank, size, dim, sizes))] for rank in range(size)]


def _tensor_parallel_experts(size: int, sizes: tuple[int, ...] | None = None) -> Case:
    return [[Site(DOWN, 10, (4 * size, 3), (0, 1, 2), Shard(rank, size, 0, sizes))] for rank in range(size)]


def _plus(case: Case, *sites: Site) -> Case:
    """Add parameters that every rank holds."""
    return [[*sites, *rank] for rank in case]


CASES: dict[str, Case] = {
    "1 rank: packed": _experts((0, 1, 2, 3)),
    "1 rank: packed and dense": _plus(_experts((0, 1)), Site(DENSE, 3, (4, 2)), Site(HEAD, 4, (2, 6))),
    "1 rank: a vacant row": _experts((0, None, 2)),
    "1 rank: a shard of one": _sharded(DENSE, (4, 3), 1, 1),
    "2 ranks: 2 + 2 experts": _experts((0, 1), (2, 3)),
    "2 ranks: 3 + 2 experts": _experts((0, 1, 2), (3, 4)),
    "2 ranks: 5 + 0 experts": _experts((0, 1, 2, 3, 4), ()),
    "2 ranks: 0 + 4 experts": _experts((), (0, 1, 2, 3)),
    "2 ranks: every other expert": _experts((0, 2), (1, 3)),
    "2 ranks: vacant rows": _experts((0, None, 1), (None, 2, 3)),
    "2 ranks: ten experts sort as text": _experts(tuple(range(6)), tuple(range(6, 12))),
    "2 ranks: axis 0 in halves": _sharded(DENSE, (6, 3), 0, 2),
    "2 ranks: axis 1 in halves": _sharded(DENSE, (3, 6), 1, 2),
    "2 ranks: axis 0 uneven": _uneven((5, 3), 0, 3, 5),
    "2 ranks: axis 1 uneven": _uneven((3, 5), 1, 3, 5),
    "2 ranks: axis 0, the first part is small": _uneven((5, 3), 0, 1, 5),
    "2 ranks: components on axis 0": _components((12, 3), 0, 2, (4, 8)),
    "2 ranks: components on axis 1": _components((3, 12), 1, 2, (8, 2, 2)),
    "2 ranks: packed experts in shards": _tensor_parallel_experts(2),
    "2 ranks: packed experts in shards of components": _tensor_parallel_experts(2, (2, 6)),
    "2 ranks: dense on both, experts apart": _plus(_experts((0, 1), (2, 3)), Site(DENSE, 3, (4, 2))),
    "2 ranks: no moments yet": [
        [Site(DOWN, 10, (3, 2), (0, 1), moments=(), step=0)],
        [Site(DOWN, 10, (3, 2), (2,), moments=("exp_avg",), step=9)],
    ],
    "2 ranks: bfloat16 and float16": [
        [Site(DOWN, 1, (3, 2), (0, 1), dtype=torch.bfloat16), Site(HEAD, 0, (2, 2), dtype=torch.float16)],
        [Site(DOWN, 1, (3, 2), (2, 3), dtype=torch.bfloat16)],
    ],
    "2 ranks: parts of two dtypes and odd sizes": [
        [Site(DENSE, 3, (3, 3), shard=Shard(0, 2, 1), bounds=(0, 2), dtype=torch.bfloat16), Site(HEAD, 4, (1, 1))],
        [Site(DENSE, 3, (3, 3), shard=Shard(1, 2, 1), bounds=(2, 3), dtype=torch.bfloat16)],
    ],
    "3 ranks: 2 + 2 + 1 experts": _experts((0, 1), (2, 3), (4,)),
    "3 ranks: 1 + 0 + 4 experts": _experts((2,), (), (0, 1, 3, 4)),
    "3 ranks: axis 0 in thirds": _sharded(DENSE, (6, 2), 0, 3),
    "3 ranks: axis 1 as chunks": _uneven((2, 7), 1, 3, 6, 7),
    "3 ranks: components": _components((9, 2), 0, 3, (3, 6)),
    "3 ranks: shards in another order": [[Site(DENSE, 3, (6, 2), shard=Shard(shard, 3, 0))] for shard in (2, 0, 1)],
    "3 ranks: experts whole here, in shards there": [
        [Site(DOWN, 10, (4, 3), (0, 1), Shard(0, 2, 0)), Site(UP, 50, (2, 4), (0,))],
        [Site(DOWN, 10, (4, 3), (0, 1), Shard(1, 2, 0)), Site(UP, 50, (2, 4), (1, 2))],
        [Site(DOWN, 10, (4, 3), (2, 3)), Site(UP, 50, (2, 4), (3,))],
    ],
    "3 ranks: one shard twice": [
        [Site(DENSE, 3, (6, 2), shard=Shard(0, 2, 0))],
        [Site(DENSE, 3, (6, 2), shard=Shard(1, 2, 0))],
        [Site(DENSE, 3, (6, 2), shard=Shard(0, 2, 0), differs=0.125)],
    ],
    "4 ranks: two experts each, in two shards": [
        [Site(DOWN, 10, (4, 3), (2 * pair, 2 * pair + 1), Shard(rank, 2, 1), (0, 2) if rank == 0 else (2, 3))]
        for pair in (0, 1)
        for rank in (0, 1)
    ],
    "2 ranks: one key with different values": [
        [Site(DENSE, 3, (4, 2)), Site(DOWN, 10, (3, 2), (0, 1))],
        [Site(DENSE, 3, (4, 2), differs=0.125), Site(DOWN, 10, (3, 2), (1, 2), differs=0.125)],
    ],
}


def _save_on_both_paths(rank: int, root: Path, case: str) -> dict[PathName, tuple[str, int]]:
    exports, state, _ = build(CASES[case][rank])
    saved = {}
    for path in PATHS:
        with CheckpointSaver(path, durable=False, timeout_seconds=30) as saver:
            log = saver.prepare(root / path, exports, state, CONFIG)
            saved[path] = (saver.finalize(root / path), log.optimizer.calls)
    return saved


def _complete_packed_parameters(case: str) -> int:
    experts = [site.experts for rank in CASES[case] for site in rank if site.experts is not None]
    return sum(len(rows) > 1 and None not in rows for rows in experts)


@pytest.mark.parametrize("case", CASES)
def test_both_paths_write_what_plain_torch_says(tmp_path: Path, case: str) -> None:
    by_rank = on_ranks(len(CASES[case]), _save_on_both_paths, tmp_path, case)
    assert len({digest for saved in by_rank for digest, _ in saved.values()}) == 1
    assert tree(tmp_path / "slice") == tree(tmp_path / "coalesced")
    assert verify_checkpoint(tmp_path / "slice") == by_rank[0]["slice"][0]
    assert_holds(tmp_path / "slice", CASES[case])
    assert names(tmp_path) == sorted(PATHS)
    # The two paths were really two.
    calls = {path: sum(saved[path][1] for saved in by_rank) for path in PATHS}
    if _complete_packed_parameters(case):
        assert calls["coalesced"] < calls["slice"]
    else:
        assert calls["coalesced"] == calls["slice"]


def _save_without_optimizer(rank: int, root: Path) -> str:
    exports, _, _ = build(CASES["2 ranks: 3 + 2 experts"][rank])
    with CheckpointSaver(durable=False, timeout_seconds=30) as saver:
        return saver.save(root / "plain", exports, None, CONFIG)


def test_without_an_optimizer(tmp_path: Path) -> None:
    digests = on_ranks(2, _save_without_optimizer, tmp_path)
    assert set(digests) == {verify_checkpoint(tmp_path / "plain")}
    assert_holds(tmp_path / "plain", CASES["2 ranks: 3 + 2 experts"], optimizer=False)
    assert not (tmp_path / "plain" / "optimizer").exists()


# Duplicates under strict_duplicates: (case, what is said of them or None where they are equal).
STRICT: dict[str, tuple[Case, str | None]] = {
    "equal": ([[Site(DENSE, 3, (4, 2))]] * 2, None),
    "values": ([[Site(DENSE, 3, (4, 2))], [Site(DENSE, 3, (4, 2), differs=0.125)]], "different values"),
    "steps": ([[Site(DENSE, 3, (4, 2))], [Site(DENSE, 3, (4, 2), step=8)]], "different values"),
    "moments": ([[Site(DENSE, 3, (4, 2))], [Site(DENSE, 3, (4, 2), moments=("exp_avg",))]], "different exp_avg_sqs"),
    "equal experts": (_experts((0, 1), (1, 2)), None),
    "shards": (
        [
            [Site(DENSE, 3, (4, 2), shard=Shard(0, 2, 0)), Site(HEAD, 5, (2, 2))],
            [Site(DENSE, 3, (4, 2), shard=Shard(1, 2, 0))],
            [Site(DENSE, 3, (4, 2), shard=Shard(1, 2, 0), differs=0.125)],
        ],
        "different values",
    ),
}


def _save_strictly(rank: int, root: Path, case: str) -> tuple[str | Failure, str]:
    exports, state, _ = build(STRICT[case][0][rank])
    with CheckpointSaver(durable=False, timeout_seconds=30, strict_duplicates=True) as strict:
        strict.prepare(root / "strict", exports, state, CONFIG)
        found = attempt(lambda: strict.finalize(root / "strict"))
    with CheckpointSaver(durable=False, timeout_seconds=30) as lenient:
        return found, lenient.save(root / "lenient", exports, state, CONFIG)


@pytest.mark.parametrize("case", STRICT)
def test_strict_duplicates(tmp_path: Path, case: str) -> None:
    sites, text = STRICT[case]
    outcomes = on_ranks(len(sites), _save_strictly, tmp_path, case)
    assert_holds(tmp_path / "lenient", sites)
    for found, _ in outcomes:
        if text is None:
            assert found == verify_checkpoint(tmp_path / "strict")
            continue
        assert isinstance(found, Failure)
        assert found.kind == SaveError.__name__
        ranks = (1, 2) if len(sites) == 3 else (0, 1)
        assert f"{DENSE}: ranks {ranks[0]} and {ranks[1]} export it with {text}" in found.text
    assert names(tmp_path) == (["lenient", "strict"] if text is None else ["lenient"])
