"""The plan: which split, why, what it needs, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from transformers import Qwen3Config

from trainer.config import PipelineConfig
from trainer.drafter.config import Dflash2Config, DrafterConfig
from trainer.drafter.model import Drafter
from trainer.outlook import node_count
from trainer.pipeline.costs import (
    TargetShape,
    Work,
    drafter_flop,
    drafter_memory,
    drafter_parameters,
    target_flop,
    target_memory,
)
from trainer.pipeline.plan import make_plan
from trainer.pipeline.split import Costs, Device, PlanError, recommend

pytestmark = pytest.mark.torch

EIGHT = [Device(f"cuda:{i}", "NVIDIA H200", int(141e9)) for i in range(8)]

QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
DENSE_27B = {
    "vocab_size": 248_320,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def work(shape: dict[str, int], microbatches: int = 15, rows: int = 1) -> Work:
    target = Qwen3Config(**shape)
    return Work(
        target=TargetShape.of(target),
        drafter=DrafterConfig.for_target(target, mask_token_id=1),
        rows=rows,
        length=3072,
        anchors=512,
        microbatches=microbatches,
    )


def pipeline(**options: Any) -> PipelineConfig:
    return PipelineConfig.model_validate({"executor": "threads", **options})


# -- costs against published counts ---------------------------------------------------------------


def test_an_8b_drafter_costs_what_was_counted_by_hand() -> None:
    forward, training = drafter_flop(work(QWEN3_8B))
    assert forward / 1e12 == pytest.approx(28.0, rel=0.03)
    assert training / 1e12 == pytest.approx(73.7, rel=0.03)
    assert drafter_parameters(work(QWEN3_8B).drafter) == pytest.approx(1048.6e6, rel=1e-4)


def test_an_8b_target_stopped_after_its_last_tap_costs_less_than_the_whole() -> None:
    # 49 TFLOP for all 36 layers; the last tap is layer 33.
    assert 40 < target_flop(work(QWEN3_8B)) / 1e12 < 49


@pytest.mark.parametrize("dflash2", [None, Dflash2Config()], ids=["DFlash", "DFlash2"])
def test_the_parameters_counted_are_those_of_the_drafter(dflash2: Dflash2Config | None) -> None:
    target = Qwen3Config(**QWEN3_8B)
    config = DrafterConfig.for_target(target, mask_token_id=1, block_size=8, dflash2=dflash2)
    with torch.device("meta"):
        built = Drafter(config)
    assert drafter_parameters(config) == sum(p.numel() for p in built.parameters())


def test_a_target_is_held_whole_and_its_matrices_once_beside_a_drafter() -> None:
    alike = work(QWEN3_8B)
    whole = 2 * (36 * (2 * 4096 * 5120 + 3 * 4096 * 12_288) + 2 * 151_936 * 4096)
    tokens = 3072 * (6 * 4096 + 3 * 12_288)
    assert target_memory(alike, staging=False) == whole + 2 * tokens + alike.feature_slot_bytes
    saved = drafter_memory(alike, 2) - drafter_memory(alike, 2, beside=True)
    assert saved == 2 * 2 * 151_936 * 4096


@pytest.mark.parametrize(("executor", "copies"), [("threads", 1), ("processes", 2)])
def test_workers_of_one_process_read_one_target_and_ranks_have_their_own(
    executor: str, copies: int
) -> None:
    alike = work(QWEN3_8B)
    plan = make_plan(pipeline(executor=executor, devices=["cuda:0"], targets=2), alike, EIGHT)
    weights = target_memory(alike, staging=False) - target_memory(alike, staging=False, beside=True)
    assert weights == 2 * (36 * (2 * 4096 * 5120 + 3 * 4096 * 12_288) + 2 * 151_936 * 4096)
    ((_, needed, _),) = plan.memory
    assert needed == (
        copies * weights
        + 2 * target_memory(alike, staging=False, beside=True)
        + drafter_memory(alike, 2, beside=copies == 1)
    )


def test_a_feature_row_of_an_8b_target_is_40960_bytes_a_token() -> None:
    assert work(QWEN3_8B).feature_slot_bytes == 3072 * 40_960


def test_a_mixture_computes_with_few_experts_and_stores_all() -> None:
    text = Qwen3Config(**QWEN3_8B)
    text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size = 64, 4, 768
    shape = TargetShape.of(text)
    assert (shape.mlp_width, shape.mlp_stored) == (4 * 768, 64 * 768)


# -- the split ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "targets", "drafters"), [(QWEN3_8B, 3, 5), (DENSE_27B, 5, 3)], ids=["8B", "27B"]
)
def test_auto_splits_eight_devices_by_cost_and_says_why(
    shape: dict[str, int], targets: int, drafters: int
) -> None:
    plan = make_plan(pipeline(), work(shape), EIGHT)
    assert (len(plan.targets), len(plan.drafters)) == (targets, drafters)
    assert plan.targets[0] == "cuda:0" and plan.drafters[-1] == "cuda:7"
    assert plan.reason.startswith(f"{targets} + {drafters}: a microbatch costs a target")
    assert "counted" in plan.reason and "would take" in plan.reason


def test_measured_times_decide_before_counted_ones() -> None:
    """Two H200s took 192.3 and 240.8 ms: the target costs more of a drafter's time than counted."""
    given = pipeline(stage_ms={"target": 192.3, "drafter": 240.8})
    plan = make_plan(given, work(QWEN3_8B, microbatches=20), EIGHT)
    assert (len(plan.targets), len(plan.drafters)) == (4, 4)
    assert "a target 192.3 ms and a drafter 240.8 ms (measured)" in plan.reason
    assert "by measured times" in plan.table()
    assert not any("stage_ms" in line for line in plan.advice)
    counted = make_plan(pipeline(), work(QWEN3_8B, microbatches=20), EIGHT)
    assert (len(counted.targets), len(counted.drafters)) == (3, 5)
    assert any("pipeline.stage_ms" in line for line in counted.advice)


def test_auto_keeps_to_splits_that_the_microbatches_allow_and_advises() -> None:
    plan = make_plan(pipeline(), work(QWEN3_8B, microbatches=4), EIGHT)
    assert (len(plan.targets), len(plan.drafters)) == (4, 4)
    assert "3 + 5 would be" in plan.advice[0]
    assert "optimization.microbatches to be a multiple of 5" in plan.advice[0]


def test_one_side_given_leaves_the_rest_to_the_other() -> None:
    plan = make_plan(pipeline(targets=2), work(QWEN3_8B, 6), EIGHT)
    assert (len(plan.targets), len(plan.drafters)) == (2, 6)


def test_everything_given_is_taken_as_it_is() -> None:
    plan = make_plan(pipeline(targets=1, drafters=2), work(QWEN3_8B, 2), EIGHT)
    assert plan.targets == ("cuda:0",) and plan.drafters == ("cuda:1", "cuda:2")
    assert plan.reason == "as configured"


def test_workers_may_share_a_device() -> None:
    plan = make_plan(pipeline(devices=["cuda:0", "cuda:0"]), work(QWEN3_8B), EIGHT)
    assert plan.targets == plan.drafters == ("cuda:0",)
    on_cpu = make_plan(pipeline(targets=2, drafters=3), work(QWEN3_8B), [Device("cpu", "cpu")])
    assert on_cpu.targets == ("cpu",) * 2 and on_cpu.drafters == ("cpu",) * 3


@pytest.mark.parametrize(
    ("devices", "costs", "split"),
    [
        (1, Costs(1, 1), (1, 1)),
        (2, Costs(1, 9), (1, 1)),
        (8, Costs(1, 1), (4, 4)),
        (8, Costs(166, 110), (5, 3)),
        (8, Costs(49, 74), (3, 5)),
        (3, Costs(1, 1), (1, 2)),
    ],
)
def test_the_recommended_split_has_the_shortest_period(
    devices: int, costs: Costs, split: tuple[int, int]
) -> None:
    assert recommend(costs, devices) == split


# -- the table ------------------------------------------------------------------------------------


def test_the_table_shows_each_device_its_part_memory_and_cost() -> None:
    text = make_plan(pipeline(), work(QWEN3_8B), EIGHT).table()
    lines = text.splitlines()
    assert lines[1].startswith("cuda:0     target 0")
    assert lines[8].startswith("cuda:7     drafter 4")
    assert "of 141.0 GB" in lines[1] and lines[1].endswith("ms")
    assert "15 microbatches a step, 3 a drafter" in text
    assert "1 x 3072 x 20480 (125.8 MB each)" in text
    assert "context tok/s by counted operations, for the split; no promise" in text
    measured = make_plan(pipeline(stage_ms={"target": 4, "drafter": 6}), work(QWEN3_8B), EIGHT)
    assert "context tok/s by measured times, at most" in measured.table()


def test_a_device_of_unknown_memory_is_told_what_it_needs() -> None:
    cpu = [Device("cpu", "cpu")]
    lines = make_plan(pipeline(executor="inline"), work(QWEN3_8B), cpu).table().splitlines()
    assert re.search(r"^cpu +target 0, drafter 0 +[\d.]+ GB +[\d.]+ ms$", lines[1])


def test_graphs_and_several_drafters_say_that_the_sum_waits_for_backward() -> None:
    for nodes, drafters, advised in ((1, 1, False), (1, 2, True), (2, 1, True)):
        split = pipeline(targets=1, drafters=drafters, cuda_graph=True)
        table = make_plan(split, work(QWEN3_8B, 4), EIGHT, nodes).table()
        assert ("sum their gradients after a step's last microbatch" in table) == advised
    plain = make_plan(pipeline(targets=1, drafters=2), work(QWEN3_8B, 4), EIGHT)
    assert "sum their gradients" not in plain.table()


def test_a_plan_is_plain_data() -> None:
    data = make_plan(pipeline(), work(QWEN3_8B), EIGHT).as_data()
    assert data["targets"] == ("cuda:0", "cuda:1", "cuda:2")
    assert data["tokens_per_s"] > 0


# -- refusals -------------------------------------------------------------------------------------


def refusal(options: dict[str, Any], microbatches: int = 15, **kwargs: Any) -> PlanError:
    devices = kwargs.pop("devices", EIGHT)
    with pytest.raises(PlanError) as caught:
        make_plan(pipeline(**options), work(QWEN3_8B, microbatches, **kwargs), devices)
    return caught.value


def test_more_workers_than_devices() -> None:
    error = refusal({"targets": 6, "drafters": 3})
    assert "6 targets and 3 drafters need 9 devices; there are 8" in error.what
    assert error.exit_code == 4, "a device is missing"


def test_microbatches_that_do_not_divide() -> None:
    error = refusal({"targets": 3, "drafters": 5}, microbatches=8)
    assert "optimization.microbatches is 8, not a multiple of 5 drafters" in error.what
    assert error.exit_code == 2, "wrong input"
    assert "set it to 10" in error.next_step


def test_the_drafters_of_all_nodes_share_the_microbatches() -> None:
    # Neither 15 nor, below, 20 and 16 drafters could take as many of 12.
    plan = make_plan(pipeline(), work(QWEN3_8B, 12), EIGHT, nodes=3)
    assert (len(plan.targets), len(plan.drafters)) == (4, 4)
    plan = make_plan(pipeline(), work(QWEN3_8B, 12), EIGHT, nodes=4)
    assert (len(plan.targets), len(plan.drafters)) == (5, 3)
    assert "12 microbatches a step, 1 a drafter" in plan.table()
    assert "optimization.microbatches to be a multiple of 20" in plan.advice[0]
    with pytest.raises(PlanError, match="12, not a multiple of 8 drafters on 2 nodes") as caught:
        make_plan(pipeline(targets=4, drafters=4), work(QWEN3_8B, 12), EIGHT, nodes=2)
    assert "set it to 16" in caught.value.next_step


def test_a_device_that_is_not_there() -> None:
    error = refusal({"devices": ["cuda:0", "cuda:9"]})
    assert "pipeline.devices names cuda:9" in error.what


def test_no_room_for_the_other_part() -> None:
    assert "leave no room" in refusal({"targets": 8}).what


def test_too_little_memory() -> None:
    small = [Device(f"cuda:{i}", "NVIDIA A100", int(16e9)) for i in range(2)]
    error = refusal({"targets": 1, "drafters": 1}, devices=small, rows=2)
    assert "cuda:0 would need about" in error.what and "has 16.0 GB" in error.what


CARDS = [Device(f"cuda:{i}", "NVIDIA GeForce RTX 4090", int(24e9)) for i in range(4)]


@pytest.mark.parametrize(
    ("executor", "step"),
    [
        ("processes", "set pipeline.shard_drafters: true; the 3 drafters then hold one together"),
        ("threads", "set pipeline.executor: processes and pipeline.shard_drafters: true; the 3 dr"),
    ],
)
def test_a_drafter_too_large_as_a_whole_is_shown_the_way_to_shards(
    executor: str, step: str
) -> None:
    options = {"executor": executor, "targets": 1, "drafters": 3}
    error = refusal(options, microbatches=3, devices=CARDS)
    assert "cuda:1 would need about 26.0 GB for drafter 0 and has 24.0 GB" in error.what
    assert error.next_step.startswith(step) and "cuda:1 needs about 18.8 GB" in error.next_step


def test_shards_are_not_advised_where_they_would_not_fit_either() -> None:
    cards = [Device(d.name, d.model, int(17e9)) for d in CARDS]
    error = refusal({"executor": "processes", "targets": 1, "drafters": 3}, 3, devices=cards)
    assert error.next_step.startswith("lower optimization.rows")


def test_one_drafter_cannot_be_held_together() -> None:
    options = {"executor": "processes", "targets": 1, "drafters": 1, "shard_drafters": True}
    error = refusal(options)
    assert "several drafters hold one together, and there is one" in error.what
    assert "ask for more by pipeline.drafters, or leave out shard_drafters" in error.next_step
    # The other node has one too.
    assert make_plan(pipeline(**options), work(QWEN3_8B, 2), EIGHT, nodes=2).sharded


def test_the_table_shows_what_a_drafter_needs_both_ways() -> None:
    options = {"executor": "processes", "targets": 1, "drafters": 2}
    whole = make_plan(pipeline(**options), work(QWEN3_8B, 4), EIGHT, nodes=2)
    shards = make_plan(pipeline(**options, shard_drafters=True), work(QWEN3_8B, 4), EIGHT, nodes=2)
    ways = (
        "needs 26.0 GB whole and 17.4 GB as one of 4 shards (pipeline.shard_drafters); here it is"
    )
    assert f"a drafter {ways} whole" in whole.table()
    assert f"a drafter {ways} a shard" in shards.table()
    needed = {name: need for name, need, _ in shards.memory}
    assert needed["cuda:1"] == pytest.approx(17.4e9, rel=0.01)
    # Nothing is said where there is no choice.
    assert "shards" not in make_plan(pipeline(), work(QWEN3_8B), EIGHT).table()


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, 1),
        ({"NNODES": "3"}, 3),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2),
    ],
    ids=["alone", "launched", "under torchrun"],
)
def test_a_plan_knows_how_many_nodes_run_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], nodes: int
) -> None:
    for name in ("NNODES", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert node_count() == nodes


def test_inline_is_one_and_one() -> None:
    with pytest.raises(PlanError, match="inline runs one target and one drafter"):
        make_plan(
            PipelineConfig(executor="inline", targets=2, drafters=1),
            work(QWEN3_8B),
            [Device("cpu", "cpu")],
        )
