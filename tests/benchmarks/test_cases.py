from __future__ import annotations

import dataclasses

import pytest

from benchmarks import presets
from benchmarks.cases import LAYOUTS, Case, CaseError, all_cases, cases_of, parse_case
from benchmarks.predict import predict
from benchmarks.presets import PresetError, load_preset, preset_names
from benchmarks.workload import ShadowTensors, build
from packckpt import plan_transfers

# Layers with experts, experts, hidden, expert width, as shared/trainers.md lists them.
MODELS = {
    "qwen3-30b-a3b": (48, 128, 2048, 768),
    "qwen3-235b-a22b": (94, 128, 4096, 1536),
    "gpt-oss-20b": (24, 32, 2880, 2880),
    "gpt-oss-120b": (36, 128, 2880, 2880),
    "mixtral-8x7b": (32, 8, 4096, 14336),
    "deepseek-v3": (58, 256, 7168, 2048),
    "olmoe-1b-7b": (16, 64, 2048, 1024),
}


@pytest.mark.parametrize("name", MODELS)
def test_presets_have_the_published_numbers_and_their_sources(name: str) -> None:
    preset = load_preset(name)
    layers, experts, hidden, width = MODELS[name]
    assert (preset.layers, preset.experts) == (layers, experts)
    assert [(m.rows, m.columns) for m in preset.matrices["full"]] == [(hidden, 2 * width), (width, hidden)]
    assert set(preset.sources) == {"layers", "experts", "hidden", "expert_width"}
    assert all(source.startswith("https://") for source in preset.sources.values())


def test_an_id_says_everything() -> None:
    for case in all_cases():
        assert parse_case(case.id) == case
    special = dataclasses.replace(parse_case("gpt-oss-20b/lora3/ep2/l4/float32"), seed=7, state_dtype="bfloat16")
    assert special.id == "gpt-oss-20b/lora3/ep2/l4/float32-bfloat16/seed7"
    assert parse_case(special.id) == special


def test_all_methods_ranks_and_sizes_are_there() -> None:
    cases = cases_of(load_preset("qwen3-30b-a3b"))
    assert {(c.lora_rank, c.expert_parallel) for c in cases} == {(r, e) for r in (1, 8, 32, None) for e in (1, 2, 8)}
    sizes = [case.slice_bytes for case in cases_of(load_preset("sweep"))]
    assert (min(s for s in sizes if s), max(s for s in sizes if s)) == (4 << 10, 128 << 20)
    assert sizes[:2] == [4 << 10, 128 << 20], "the ends tell most"
    assert {case.layout for case in cases_of(load_preset("irregular"))} == set(LAYOUTS) - {"regular"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "expected PRESET/full"),
        ("no-model/lora8/ep1/l1/bfloat16", "preset is 'no-model'; expected one of deepseek-v3, "),
        ("olmoe-1b-7b/lora8/ep1/l17/bfloat16", "layers is 17; expected 1 to 16"),
        ("olmoe-1b-7b/lora8/ep65/l1/bfloat16", "expert-parallel size is 65; expected 1 to 64"),
        ("olmoe-1b-7b/lora8/tilted/ep1/l1/bfloat16", "layout is 'tilted'; expected one of regular, sparse"),
        ("olmoe-1b-7b/lora8/ep1/l1/float8", "dtype is 'float8'; expected one of bfloat16"),
        ("sweep/4097B/ep1/l1/bfloat16", "slice bytes is 4097; expected one of 4096"),
    ],
)
def test_a_case_that_cannot_be_names_what_can(text: str, message: str) -> None:
    with pytest.raises((CaseError, PresetError), match=message):
        parse_case(text)


def test_a_preset_without_a_source_is_refused(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {
        "name": "x",
        "model": "x",
        "family": "model",
        "key": "k",
        "numbers": {"layers": {"value": 1, "source": ""}},
    }
    with pytest.raises(PresetError, match=r"numbers\.layers has no source"):
        presets._preset("x", content)


def test_ranks_hold_every_expert_once_however_they_divide() -> None:
    case = dataclasses.replace(parse_case("qwen3-30b-a3b/lora8/ep1/l1/bfloat16"), expert_parallel=3)
    held = [expert for rank in range(3) for expert in case.local_experts(rank)]
    assert held == list(range(128))
    assert case.with_ranks(2) is case
    assert case.with_ranks(8).expert_parallel == 8


@pytest.mark.parametrize(
    ("layout", "coalesced", "reason"),
    [
        ("regular", True, "rows 0 to 3, complete and in order"),
        ("gapped", True, "rows 0 to 3, complete and in order"),
        ("sparse", False, "sparse: rows 0, 2 of 4"),
        ("reordered", False, "reordered: rows 3, 2, 1, 0"),
        ("interleaved", False, "interleaved with "),
        ("vacant", True, "rows 0 to 3, complete and in order"),  # of four rows none is vacant
    ],
)
def test_layouts_mean_what_they_say(layout: str, coalesced: bool, reason: str) -> None:
    regular = parse_case("irregular/lora8/sparse/ep8/l1/bfloat16")
    case = dataclasses.replace(regular, layout=layout)
    trainer = build(case, 0, ShadowTensors())
    plan = plan_transfers(trainer.exports, trainer.state, "coalesced")
    assert [(p.coalesced, p.reason.startswith(reason)) for p in plan.parameters] == [(coalesced, True)] * 4


def test_vacant_rows_are_left_out() -> None:
    case = parse_case("irregular/lora8/vacant/ep1/l1/bfloat16")
    assert len(case.exported_rows(0)) == 28
    assert predict(case, "coalesced", 0, 1, "cpu").optimizer.calls == 28 * 4 * 3


def test_preset_names_are_files_and_digests_differ() -> None:
    found = [load_preset(name) for name in preset_names()]
    assert len({preset.digest for preset in found}) == len(found)
    assert isinstance(cases_of(found[0])[0], Case)
