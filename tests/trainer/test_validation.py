"""Held-out samples are measured by the stage that trains, which is afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import enter_rank, run_ranks
from tiny_job import (
    TinyBatches,
    drafter_config,
    frozen_target,
    make_target,
    tiny_job,
    tiny_plan,
    train_config,
)
from tiny_target import make_home, run_config

from trainer.checkpoint import KINDS, Loaded
from trainer.compile_lock import CompileLock
from trainer.config import parse_config
from trainer.data.pack import PackedBatches
from trainer.drafter.mask import masks_for
from trainer.drafter.model import Drafter
from trainer.head_loss import fast_head_loss
from trainer.objective import DrafterLoss, slots_counted
from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.processes import ProcessesExecutor
from trainer.pipeline.stages import Executor, Sums
from trainer.pipeline.threads import ThreadsExecutor
from trainer.replica import DrafterReplica
from trainer.resolve import resolve
from trainer.run import Run, make_executor, open_run, prepare_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]

CPU = torch.device("cpu")
SLOTS, STEPS = 4, 3
HELD_OUT = [TinyBatches(1)(500 + index, 0) for index in range(3)]
DFLASH2: dict[str, Any] = {"dflash2": {}}


def replica(device: torch.device, shape: dict[str, Any], cuda_graph: bool) -> DrafterReplica:
    return DrafterReplica(
        train_config(SLOTS, cuda_graph=cuda_graph),
        drafter_config(**shape),
        frozen_target(device),
        100,
        device,
        head_loss=fast_head_loss(device),
    )


def the_job(shape: dict[str, Any], validate: bool = True, *, cuda_graph: bool = False) -> Any:
    """One step has no valid anchor. Without ``validate`` there is nothing held out at all."""
    return tiny_job(
        SLOTS,
        steps=50,
        empty=frozenset({(1, slot) for slot in range(SLOTS)}),
        drafter=lambda device: replica(device, shape, cuda_graph),
        held_out=HELD_OUT if validate else (),
    )[0]


def train(
    executor: Executor, begin: Path | None = None
) -> tuple[list[list[float]], list[Sums], Any]:
    """The sums of each step, what was measured after each, the state at the end. ``begin``: a saved
    state to go on from."""
    executor.start()
    if begin is not None:
        executor.resume(lambda: Loaded(begin, 1, torch.load(begin), None))
    steps, measured = [], []
    for index in range(STEPS):
        steps.append(executor.step(index).sums.tolist())
        executor.agreed_stop(None)
        if (found := executor.measure()) is not None:
            measured.append(found)
    state = executor.state()
    executor.close()
    return steps, measured, state


def measured_apart(masters: dict[str, Any], shape: dict[str, Any]) -> Sums:
    """By a drafter of its own, from the masters of a checkpoint, in float32."""
    config = drafter_config(**shape)
    drafter = Drafter(config)
    drafter.load_state_dict(masters)
    loss = DrafterLoss(
        drafter, frozen_target(CPU), train_config(SLOTS).objective, masks_for(config, CPU, None)
    )
    target = make_target(CPU)
    with torch.no_grad():
        found = [Sums.vector(loss(batch, target.features(batch))) for batch in HELD_OUT]
    return Sums.read(sum(found[1:], found[0]))


def assert_same_figures(found: Sums, wanted: Sums) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.weight == pytest.approx(wanted.weight, rel=1e-6)
    assert replace(found, loss=0, weight=0) == replace(wanted, loss=0, weight=0)
    assert found.blocks > 0


def assert_same_bits(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["skipped"] == other["skipped"]
    for kind in KINDS:
        assert mine[kind].keys() == other[kind].keys()
        for name, part in mine[kind].items():
            assert torch.equal(part, other[kind][name]), (kind, name)


def inline(shape: dict[str, Any], validate: bool, cuda_graph: bool = False) -> Executor:
    return InlineExecutor(the_job(shape, validate, cuda_graph=cuda_graph), CPU)


def threads(shape: dict[str, Any], validate: bool, cuda_graph: bool = False) -> Executor:
    plan = tiny_plan(2, 2, SLOTS, check_equal_every=1)
    return ThreadsExecutor(the_job(shape, validate, cuda_graph=cuda_graph), plan)


@pytest.mark.parametrize("shape", [{}, DFLASH2], ids=["DFlash", "DFlash2"])
@pytest.mark.parametrize(
    "make",
    [inline, partial(inline, cuda_graph=True), threads, partial(threads, cuda_graph=True)],
    ids=["inline", "inline recorded", "threads", "threads recorded"],
)
def test_a_run_that_validates_trains_as_one_that_does_not_and_measures_its_masters(
    make: Callable[[dict[str, Any], bool], Executor], shape: dict[str, Any]
) -> None:
    steps, measured, state = train(make(shape, True))
    undisturbed, nothing, wanted = train(make(shape, False))
    assert steps == undisturbed and nothing == []
    assert_same_bits(state, wanted)
    assert len(measured) == STEPS and measured[0] != measured[-1]
    assert_same_figures(measured[-1], measured_apart(state["master"], shape))
    assert bool(measured[-1].selector()) == bool(shape)


def measuring_rank(rank: int, port: int, out: Any, folder: str, shard: bool, validate: bool) -> Any:
    """A target and two drafters, which go on from a checkpoint; the state goes to a file."""
    enter_rank(rank, 3, port)
    plan = tiny_plan(1, 2, SLOTS, executor="processes", shard_drafters=shard, check_equal_every=1)
    executor = ProcessesExecutor(the_job({}, validate), plan)
    steps, measured, state = train(executor, Path(folder, "begin.pt"))
    if state:
        torch.save(state, f"{folder}/{validate}.pt")
    out.put((rank, steps, measured))


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "shards"])
def test_ranks_that_validate_train_as_those_that_do_not(tmp_path: Path, shard: bool) -> None:
    _, _, begin = train(inline({}, False))
    torch.save(begin, tmp_path / "begin.pt")
    told = {
        validate: run_ranks(measuring_rank, 3, more=(str(tmp_path), shard, validate))
        for validate in (True, False)
    }
    for (_, steps, _), (_, undisturbed, _) in zip(told[True], told[False], strict=True):
        assert steps == undisturbed
    # The leading rank knows the figures, the others nothing.
    assert [len(measured) for *_, measured in told[True]] == [0, STEPS, 0]
    state = torch.load(tmp_path / "True.pt")
    assert_same_bits(state, torch.load(tmp_path / "False.pt"))
    assert_same_figures(told[True][1][2][-1], measured_apart(state["master"], {}))


def test_measuring_calls_what_training_compiled_and_compiles_nothing_more() -> None:
    lock = CompileLock(policy="fail")

    def drafter(device: torch.device) -> DrafterReplica:
        stage = replica(device, {}, False)
        # Without the compiler's last stage.
        stage.loss.forward = lock.compile(stage.drafter.forward, "drafter", backend="aot_eager")
        stage.backward = lock.backward
        return stage

    job = replace(the_job({}), make_drafter=drafter, compile_lock=lock)
    _, measured, state = train(InlineExecutor(job, CPU))
    lock.close()
    assert (lock.stats().compiles, lock.stats().recompiles, lock.stats().eager_runs) == (1, 0, 0)
    assert_same_figures(measured[-1], measured_apart(state["master"], {}))


# -- of a whole run -------------------------------------------------------------------------------


def the_run(folder: Path, **changes: Any) -> Run:
    folder.mkdir(exist_ok=True)
    tree = run_config(make_home(folder), **changes)
    return prepare_run(open_run(resolve(parse_config(tree, source="t", base=folder))))


def measure_untrained(run: Run) -> Sums | None:
    executor = make_executor(run)
    executor.start()
    try:
        found = executor.measure()
        assert executor.measure() == found
        return found
    finally:
        executor.close()
        run.writer.close()
        run.compile_lock.close()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_as_many_microbatches_are_measured_as_asked_for(tmp_path: Path, microbatches: int) -> None:
    run = the_run(
        tmp_path,
        data={"held_out": 0.6},
        optimization={"rows": 1, "microbatches": microbatches},
        checkpoint={"validate_batches": 3},
    )
    measured = measure_untrained(run)
    assert measured is not None
    held_out = PackedBatches(run.data.held_out, run.config, 0)
    assert len(held_out.packed) > 3, "there is more to measure"
    places = [divmod(index, microbatches) for index in range(3)]
    counted = [slots_counted(held_out(*place), run.resolved.drafter.block_size) for place in places]
    assert measured.blocks == sum(int(block[..., 0].sum()) for block in counted)


@pytest.mark.parametrize(
    "changes",
    [{"data": {"cache_features": True, "held_out": 0.2}}, {"optimization": {"head_sample": 8}}],
    ids=["cache", "sampled head"],
)
def test_neither_a_cache_of_training_samples_nor_a_sampled_head_is_asked(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain = measure_untrained(the_run(tmp_path / "plain"))
    assert plain is not None
    assert measure_untrained(the_run(tmp_path / "other", **changes)) == plain


def test_nothing_held_out_is_nothing_measured(tmp_path: Path) -> None:
    assert measure_untrained(the_run(tmp_path, checkpoint={"validate_batches": 0})) is None
