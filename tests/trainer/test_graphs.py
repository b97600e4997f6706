"""A recorded step is the step: the same losses, weights and moments. On a CPU nothing is recorded,
but the tensors that stay, and the warm-up's undoing, are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_job import LENGTH, ROWS, TinyBatches, make_target, tiny_job, train_config
from tiny_job import drafter_config as tiny_drafter_config
from tiny_target import run_config
from transformers import AutoModelForCausalLM

from trainer.config import parse_config
from trainer.errors import ConfigError
from trainer.head_loss import fast_head_loss
from trainer.objective import FrozenTarget
from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.stages import DrafterStage, Sums
from trainer.replica import DrafterReplica
from trainer.target import compute_dtype, frozen_weights

pytestmark = pytest.mark.torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def replica(device: torch.device, cuda_graph: bool, **optimization: Any) -> DrafterReplica:
    from tiny_job import target_config

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        frozen = frozen_weights(AutoModelForCausalLM.from_config(target_config()))
    config = train_config(2, cuda_graph=cuda_graph)
    dtype = compute_dtype("auto", device)
    changed = config.optimization.model_copy(update=optimization)
    return DrafterReplica(
        config.model_copy(update={"optimization": changed}),
        tiny_drafter_config(),
        FrozenTarget(frozen.embedding.to(device, dtype), frozen.head.to(device, dtype)),
        100,
        device,
        head_loss=fast_head_loss(device),
    )


def train(device: str, cuda_graph: bool, **optimization: Any) -> tuple[list[float], dict[str, Any]]:
    where = torch.device(device)

    def drafter(_: torch.device) -> DrafterStage:
        return replica(where, cuda_graph, **optimization)

    job, _ = tiny_job(2, drafter=drafter, target=lambda _: make_target(where))
    executor = InlineExecutor(job, where)
    executor.start()
    losses = [Sums.read(executor.step(index).sums).mean_loss for index in range(5)]
    state = executor.state()
    executor.close()
    return losses, state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_recorded_step_is_the_step(device: str, optimizer: str) -> None:
    plain, wanted = train(device, False, optimizer=optimizer)
    recorded, found = train(device, True, optimizer=optimizer)
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-3, "atol": 1e-5}
    assert recorded == pytest.approx(plain, rel=1e-9 if device == "cpu" else 1e-3)
    assert found["skipped"] == wanted["skipped"] == 0
    for kind in ("master", "average", "square"):
        assert found[kind].keys() == wanted[kind].keys()
        for name, value in wanted[kind].items():
            torch.testing.assert_close(found[kind][name], value, **exact)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_forward_pass_gives_the_features_of_any_batch(device: str) -> None:
    where = torch.device(device)
    plain, recorded = make_target(where), make_target(where, cuda_graph=True)
    packed = [TinyBatches(2)(0, slot) for slot in range(2)]
    # One document a row makes transformers leave its mask out where nothing is recorded.
    alone = dataclasses.replace(packed[0], position=torch.arange(LENGTH).expand(ROWS, -1))
    part = dataclasses.replace(
        packed[1], **{name: value[:1] for name, value in packed[1].tensors().items()}
    )
    exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    for batch in (packed[0], alone, packed[1], part, packed[0]):
        torch.testing.assert_close(recorded.features(batch), plain.features(batch), **exact)


def test_a_recorded_forward_pass_reads_the_same_tensors_again_but_for_another_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = make_target(torch.device("cpu"), cuda_graph=True)
    read: list[tuple[int, int]] = []
    run = stage.run

    def watched(*tensors: torch.Tensor) -> None:
        read.append((tensors[0].data_ptr(), tensors[1].data_ptr()))
        run(*tensors)

    monkeypatch.setattr(stage, "run", watched)
    batches = [TinyBatches(2)(0, slot) for slot in range(2)]
    part = {name: value[:1].clone() for name, value in batches[0].tensors().items()}
    for batch in (*batches, dataclasses.replace(batches[0], **part)):
        stage.features(batch)
    assert read[0] == read[1] != (batches[1].tokens.data_ptr(), batches[1].position.data_ptr())
    assert read[2] == (part["tokens"].data_ptr(), part["position"].data_ptr())


def test_a_warm_up_leaves_weights_moments_and_gradients_as_they_were() -> None:
    stage = replica(torch.device("cpu"), True, weight_decay=0.1)
    before = stage.state()
    batch = TinyBatches(2)(0, 0)
    stage.accumulate(batch, make_target(torch.device("cpu")).features(batch))
    stage.discard()
    after = stage.state()
    assert after["skipped"] == 0
    assert not any(gradient.any() for gradient in stage.gradients())
    for kind in ("master", "average", "square"):
        for name, value in before[kind].items():
            assert torch.equal(after[kind][name], value)


def test_a_head_that_draws_on_the_host_is_refused() -> None:
    tree = run_config(Path("/x"), optimization={"head_sample": 8}, pipeline={"cuda_graph": True})
    with pytest.raises(ConfigError, match="head_sample draws on the host"):
        parse_config(tree, source="t", base=Path("/"))
