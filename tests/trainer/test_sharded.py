"""A drafter that its ranks hold together, on a CPU: the same training as one that is whole."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import enter_rank, run_ranks, train_until_it_fails  # noqa: E402
from tiny_job import (  # noqa: E402
    drafter_config,
    frozen_target,
    make_sharded,
    make_target,
    tiny_job,
    tiny_plan,
    train_config,
)

from trainer.checkpoint import KINDS, Loaded  # noqa: E402
from trainer.compile_lock import CompileLock  # noqa: E402
from trainer.drafter.by_layer import compile_parts  # noqa: E402
from trainer.drafter.model import Drafter  # noqa: E402
from trainer.head_loss import fast_head_loss  # noqa: E402
from trainer.objective import FrozenTarget  # noqa: E402
from trainer.pipeline.inline import InlineExecutor  # noqa: E402
from trainer.pipeline.processes import ProcessesExecutor  # noqa: E402
from trainer.pipeline.stages import Sums  # noqa: E402
from trainer.replica import DrafterReplica  # noqa: E402
from trainer.sharded import ShardedDrafter, early  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SLOTS = 6
STEPS = 8
EMPTY = frozenset({(1, 1), (1, 3), (1, 5), (2, 0)} | {(4, slot) for slot in range(SLOTS)})
"""Step 1: nothing for the second drafter of two. Step 4: nothing for anybody."""
POISONED = (6, 1)
"""(step, slot) whose features are not numbers: one drafter of several meets them."""


def poisoned_target(device: Any) -> Any:
    """Features of one microbatch are NaN."""
    stage = make_target(device)
    features = stage.features
    bad, _ = tiny_job(SLOTS, empty=EMPTY)
    tokens = bad.batches(*POISONED).tokens

    def poison(batch: Any, out: Any = None) -> Any:
        made = features(batch, out)
        if torch.equal(batch.tokens, tokens):
            made.fill_(torch.nan)
        return made

    stage.features = poison  # type: ignore[method-assign]
    return stage


def the_job(**changes: Any) -> Any:
    return tiny_job(SLOTS, steps=50, empty=EMPTY, target=poisoned_target, **changes)[0]


def losses(executor: Any, first: int, last: int) -> list[float]:
    found = []
    for index in range(first, last):
        found.append(Sums.read(executor.step(index).sums).mean_loss)
        executor.agreed_stop(None)
    return found


def alone() -> InlineExecutor:
    """The same job, with one whole drafter."""
    executor = InlineExecutor(the_job(), torch.device("cpu"))
    executor.start()
    return executor


def sharded_plan(targets: int, drafters: int) -> Any:
    return tiny_plan(
        targets, drafters, SLOTS, executor="processes", shard_drafters=True, check_equal_every=1
    )


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Any]]:
    """(losses, the state after all steps)."""
    executor = alone()
    return losses(executor, 0, STEPS), executor.state()


def same(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the bit."""
    return mine["skipped"] == other["skipped"] and all(
        mine[kind].keys() == other[kind].keys()
        and all(torch.equal(part, other[kind][name]) for name, part in mine[kind].items())
        for kind in KINDS
    )


# -- the same losses ------------------------------------------------------------------------------


def train_rank(rank: int, port: int, out: Any, targets: int, drafters: int, folder: str) -> None:
    enter_rank(rank, targets + drafters, port)
    executor = ProcessesExecutor(the_job(), sharded_plan(targets, drafters))
    executor.start()
    half = STEPS // 2
    found = losses(executor, 0, half)
    middle = executor.state()
    found += losses(executor, half, STEPS)
    state = executor.state()
    held = 0
    if not executor.place.is_target:
        masters = executor.part.stage.optimizer.kinds["master"].values()
        held = sum(part.to_local().numel() for part in masters)
    if state:
        torch.save(middle, f"{folder}/middle.pt")
        torch.save(state, f"{folder}/end.pt")
    executor.close()
    out.put((rank, found, bool(state), held))


Trained = Callable[[int, int], tuple[list[Any], Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """(targets, drafters) → what each rank says, and the folder of their states; run once."""

    @cache
    def train(targets: int, drafters: int) -> tuple[list[Any], Path]:
        folder = tmp_path_factory.mktemp("states")
        more = (targets, drafters, str(folder))
        return run_ranks(train_rank, targets + drafters, more=more), folder

    return train


@pytest.mark.parametrize(("targets", "drafters"), [(2, 2), (1, 3)])
def test_shards_train_as_one_whole_drafter_does(
    reference: Any, trained: Trained, targets: int, drafters: int
) -> None:
    """With a drafter that gets no valid anchor, a step without any, and one that is not finite. By
    three no tensor of the drafter can be divided evenly."""
    answers, folder = trained(targets, drafters)
    expected, whole = reference
    leader = targets
    for _, found, *_ in answers[leader:]:
        assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert [has_state for _, _, has_state, _ in answers] == [
        rank == leader for rank in range(targets + drafters)
    ]
    state = torch.load(folder / "end.pt")
    assert state["skipped"] == whole["skipped"] == 1
    for kind in KINDS:
        assert state[kind].keys() == whole[kind].keys()
        for name, part in state[kind].items():
            torch.testing.assert_close(part, whole[kind][name], rtol=1e-4, atol=1e-6)
    # Each holds its part, and no more.
    held = [elements for *_, elements in answers[leader:]]
    assert sum(held) == sum(part.numel() for part in whole["master"].values())
    assert max(held) < 1.2 * sum(held) / drafters


def dflash2_settings() -> dict[str, Any]:
    """Of either stage: a selector, which reads weights after the forward pass, and bfloat16."""
    config = train_config(SLOTS)
    bf16 = config.optimization.model_copy(update={"dtype": "bfloat16"})
    device = torch.device("cpu")
    frozen = frozen_target(device)
    return {
        "config": config.model_copy(update={"optimization": bf16}),
        "drafter_config": drafter_config(dflash2={}),
        "frozen": FrozenTarget(frozen.embedding.bfloat16(), frozen.head.bfloat16()),
        "steps": 100,
        "device": device,
        "head_loss": fast_head_loss(device),
    }


def dflash2_rank(rank: int, port: int, out: Any) -> None:
    enter_rank(rank, 3, port)

    def sharded(device: Any, group: Any) -> Any:
        return ShardedDrafter(**dflash2_settings(), group=group)

    executor = ProcessesExecutor(the_job(sharded=sharded), sharded_plan(1, 2))
    executor.start()
    found = losses(executor, 0, STEPS)
    kinds = {part.dtype for part in executor.state().get("master", {}).values()}
    executor.close()
    out.put((rank, found, kinds))


def test_a_selector_and_bfloat16_train_in_shards_too() -> None:
    answers = run_ranks(dflash2_rank, 3)
    whole = InlineExecutor(
        the_job(drafter=lambda device: DrafterReplica(**dflash2_settings())), torch.device("cpu")
    )
    whole.start()
    expected = losses(whole, 0, STEPS)
    for _, found, _ in answers[1:]:
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found == pytest.approx(expected, rel=5e-3, nan_ok=True)
    assert answers[1][2] == {torch.float32}


# -- checkpoints ----------------------------------------------------------------------------------


def resume_rank(rank: int, port: int, out: Any, folder: str) -> None:
    """The second half of the steps, and whether it began and ended with the same bits."""
    enter_rank(rank, 4, port)
    executor = ProcessesExecutor(the_job(), sharded_plan(1, 3))
    executor.start()
    half = STEPS // 2

    def read() -> Loaded:
        path = Path(folder, "middle.pt")
        return Loaded(path, half, torch.load(path), 1.5)

    done = executor.resume(read)
    given = executor.state()
    found = losses(executor, half, STEPS)
    state = executor.state()
    equal = None
    if executor.place.leads:
        end = torch.load(Path(folder, "end.pt"))
        equal = same(given, read().state), same(state, end)
    executor.close()
    out.put((rank, done, equal, found))


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(trained: Trained) -> None:
    before, folder = trained(1, 3)
    answers = run_ranks(resume_rank, more=(str(folder),))
    assert all(done == (STEPS // 2, 1.5) for _, done, *_ in answers)
    assert answers[1][2] == (True, True)
    for (*_, found), (_, losses_before, *_) in zip(answers[1:], before[1:], strict=True):
        assert found == pytest.approx(losses_before[STEPS // 2 :], rel=0, abs=0, nan_ok=True)


def test_a_whole_drafter_goes_on_where_shards_ended(trained: Trained) -> None:
    _, folder = trained(1, 3)
    end = torch.load(folder / "end.pt")
    back, on = alone(), alone()
    back.load(end)
    assert same(back.state(), end)
    losses(on, 0, STEPS)
    assert losses(back, STEPS, STEPS + 2) == pytest.approx(losses(on, STEPS, STEPS + 2), rel=1e-5)


# -- compiled -------------------------------------------------------------------------------------


def compiled_rank(rank: int, port: int, out: Any) -> None:
    """Each part compiled under FSDP's hooks, without the compiler's last stage."""
    enter_rank(rank, 3, port)
    lock = CompileLock(policy="fail")

    def sharded(device: Any, group: Any) -> Any:
        stage = make_sharded(device, group)
        compile_parts(stage.drafter, partial(lock.compile, backend="aot_eager"))
        stage.backward = lock.backward
        return stage

    job = replace(the_job(sharded=sharded), compile_lock=lock)
    executor = ProcessesExecutor(job, sharded_plan(1, 2))
    executor.start()
    found = losses(executor, 0, STEPS)
    stats = lock.stats()
    executor.close()
    out.put((rank, found, stats.compiles, stats.recompiles, stats.eager_runs))


def test_each_part_is_compiled_once_before_the_first_step(reference: Any) -> None:
    answers = run_ranks(compiled_rank, 3)
    for _, found, compiles, recompiles, eager in answers[1:]:
        assert found == pytest.approx(reference[0], rel=1e-4, nan_ok=True)
        # Two layers, the context, the norm.
        assert compiles >= 4
        assert (recompiles, eager) == (0, 0)


# -- failure --------------------------------------------------------------------------------------


def broken_rank(rank: int, port: int, out: Any, how: str) -> None:
    """The second drafter raises in the third step, or is killed."""
    enter_rank(rank, 4, port)

    def broken(step: int, sums: Any) -> Any:
        if step == 2 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2:
            raise RuntimeError("the second drafter broke")
        return update(step, sums)

    executor = ProcessesExecutor(the_job(), sharded_plan(2, 2))
    executor.start()
    if rank == 3:
        update = executor.part.stage.update
        executor.part.stage.update = broken  # type: ignore[method-assign]
    train_until_it_fails(executor, rank, out)


def test_all_name_the_drafter_that_failed_first() -> None:
    answers = run_ranks(broken_rank, more=("raises",))
    assert answers[3][1:3] == ("RuntimeError", "the second drafter broke")
    for _, kind, text in answers[:3]:
        assert kind == "PeerFailedError"
        assert text.startswith("drafter 1 (rank 3) failed first: RuntimeError: the second drafter")


def test_a_killed_drafter_ends_all_and_is_named() -> None:
    answers = run_ranks(broken_rank, more=("killed",), answers=3)
    assert [rank for rank, *_ in answers] == [0, 1, 2]
    assert {kind for _, kind, _ in answers} == {"PeerFailedError"}
    for _, _, text in answers:
        assert "a rank went away" in text
        assert "drafter 1 (rank 3)" in text, "it alone has not told of a lost peer"


# -- on a GPU -------------------------------------------------------------------------------------


def test_the_contexts_keys_by_our_kernel_read_nothing_that_a_layer_gathers_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel needs a GPU: in its place stands what notes the weights that it is given."""
    drafter = Drafter(drafter_config())
    given: list[Any] = []

    def split_heads(fused: Any, query_weight: Any, key_weight: Any, *rest: Any) -> Any:
        *_, heads, kv_heads = rest
        given.extend((query_weight, key_weight))
        parts = fused.unflatten(-1, (-1, key_weight.numel()))
        return parts.split((heads, kv_heads, kv_heads), dim=2)

    stands_in = SimpleNamespace(split_heads=split_heads)
    monkeypatch.setitem(sys.modules, "trainer.kernels.operators", stands_in)
    width = drafter.config.feature_size
    drafter.context(torch.randn(1, 5, width), torch.arange(5)[None], kernels=True)

    gathered = {weight.data_ptr() for module in early(drafter) for weight in module.parameters()}
    assert len(given) == 2 * drafter.config.num_layers
    assert {weight.data_ptr() for weight in given} <= gathered
