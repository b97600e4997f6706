"""Buckets of gradients: every element in one, told in one order, complete when they are told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_graphs import replica  # noqa: E402
from tiny_job import TinyBatches, drafter_config, make_target, tiny_job, tiny_plan  # noqa: E402
from torch import nn  # noqa: E402

from trainer.buckets import BUCKET_BYTES, Buckets, bucket_bytes, cut  # noqa: E402
from trainer.compile_lock import CompileLock  # noqa: E402
from trainer.drafter.by_layer import compile_parts  # noqa: E402
from trainer.drafter.config import Dflash2Config  # noqa: E402
from trainer.drafter.model import Drafter  # noqa: E402
from trainer.flat_group import FlatGroup  # noqa: E402
from trainer.optimize import MasterAdamW  # noqa: E402
from trainer.pipeline.threads import ThreadsExecutor  # noqa: E402
from trainer.replica import DrafterReplica  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


# -- the cut --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_runs_hold_each_parameter_once_in_order_and_are_as_long_as_they_can_be(
    sizes: list[int], limit: int
) -> None:
    runs = cut(sizes, limit)
    assert [i for first, last in runs for i in range(first, last)] == list(range(len(sizes)))
    for first, last in runs:
        assert sum(sizes[first:last]) <= limit or last - first == 1
        if last < len(sizes):
            assert sum(sizes[first : last + 1]) > limit


def test_a_large_drafter_has_buckets_of_64_mib_and_a_small_one_several() -> None:
    assert bucket_bytes(2_100_000_000) == BUCKET_BYTES == 64 << 20
    assert bucket_bytes(40_000_000) == 5_000_000
    assert bucket_bytes(3) == 1


# -- a drafter's ----------------------------------------------------------------------------------


def learn(stage: DrafterReplica, step: int, finished: Any = None) -> None:
    batch = TinyBatches(2)(step, 0)
    stage.accumulate(batch, make_target(CPU).features(batch), finished)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_element_of_a_gradient_lies_in_one_bucket(optimizer: str) -> None:
    stage = replica(CPU, False, optimizer=optimizer)
    buckets = stage.buckets()
    assert len(buckets) > 8
    for number, bucket in enumerate(buckets):
        assert bucket.is_contiguous()
        bucket += number + 1
    found = torch.cat(stage.gradients())
    expected = torch.cat([torch.full_like(b, i + 1) for i, b in enumerate(buckets)])
    assert found.sort().values.equal(expected.sort().values)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_bucket_is_complete_when_it_is_told(optimizer: str) -> None:
    stage = replica(CPU, False, optimizer=optimizer)
    buckets = stage.buckets()
    told: list[tuple[int, Any]] = []
    learn(stage, 0)
    learn(stage, 1, lambda number: told.append((number, buckets[number].clone())))
    assert [number for number, _ in told] == list(range(len(buckets)))
    for number, then in told:
        assert then.equal(buckets[number]) and then.any()


def test_buckets_fill_from_the_front_of_the_buffers() -> None:
    """What lies behind is still empty: most of the sum can go on beside backward."""
    stage = replica(CPU, False)
    buckets = stage.buckets()
    filled: list[int] = []
    learn(stage, 0, lambda number: filled.append(sum(bool(b.any()) for b in buckets)))
    # The norms' bucket gathers from all layers and is told near the end, but has begun before.
    assert all(now <= number + 3 for number, now in enumerate(filled))
    for gradient in stage.gradients():
        first, end = gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes
        places = [b.data_ptr() for b in buckets if first <= b.data_ptr() < end]
        assert places == sorted(places) and places[0] == first


def test_the_backward_order_names_every_parameter_once() -> None:
    config = drafter_config().model_copy(update={"dflash2": Dflash2Config(), "num_layers": 2})
    drafter = Drafter(config)
    order = drafter.backward_order()
    assert sorted(order) == sorted(name for name, _ in drafter.named_parameters())
    assert order[0].startswith("candidate_selector.")
    assert order[-1] == "fc.weight"
    early = [i for i, name in enumerate(order) if "k_proj" in name or "v_proj" in name]
    assert min(early) > max(i for i, name in enumerate(order) if "q_proj" in name)


def test_without_a_call_for_buckets_no_parameter_has_a_hook() -> None:
    job, _ = tiny_job(2)
    for drafters, hooked in ((1, False), (2, True)):
        executor = ThreadsExecutor(job, tiny_plan(1, drafters, 2))
        executor.start()
        parameters = list(executor.drafters[0].stage.drafter.parameters())  # type: ignore[attr-defined]
        executor.close()
        assert {bool(p._post_accumulate_grad_hooks) for p in parameters} == {hooked}


def test_a_recorded_microbatch_tells_nothing() -> None:
    stage = replica(CPU, True)
    told: list[int] = []
    buckets = stage.buckets()
    learn(stage, 0, told.append)
    assert buckets and told == []


# -- any module's ---------------------------------------------------------------------------------


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4)) for _ in range(3))


def watched(module: nn.Module, order: list[str]) -> Buckets:
    named = dict(module.named_parameters())
    buckets = Buckets([FlatGroup([(n, named[n]) for n in order], 0.0, torch.float32)], order)
    buckets.watch()
    return buckets


def test_a_parameter_without_a_gradient_holds_up_all_behind_it() -> None:
    module = Three()
    buckets = watched(module, ["c", "b", "a"])
    told: list[int] = []
    with buckets.telling(told.append):
        (module.c.sum() + module.a.sum()).backward()
    assert len(buckets.tensors) == 3 and told == [0]
    with buckets.telling(told.append):
        (module.a.sum() + module.b.sum() + module.c.sum()).backward()
    assert told == [0, 0, 1, 2]


def test_a_gradient_that_comes_twice_is_an_error() -> None:
    module = Three()
    buckets = watched(module, ["c", "b", "a"])
    with (
        buckets.telling(lambda number: None),
        pytest.raises(RuntimeError, match=r"shape \[4\] arrived twice in one backward pass"),
    ):
        for _ in range(2):
            module.c.sum().backward()


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_drafter_compiled_in_parts_has_its_gradients_layer_by_layer(
    locking: CompileLock,
) -> None:
    """Compiled as a whole, its backward pass is one call: nothing is told before it is over."""
    plain = replica(CPU, False)
    plain.buckets()
    learn(plain, 0)
    expected = torch.cat(plain.gradients())
    events: list[str | int] = []

    def compiled(function: Any, name: str) -> Any:
        """Notes when the backward pass of the call begins."""
        call = locking.compile(function, name, backend="aot_eager")

        def noted(*arguments: Any, **named: Any) -> Any:
            out = call(*arguments, **named)
            first = out[0].key if isinstance(out, list) else out
            first.register_hook(lambda _: events.append(name))
            return out

        return noted

    for kind in ("whole", "parts"):
        stage = replica(CPU, False)
        buckets = stage.buckets()
        if kind == "parts":
            compile_parts(stage.drafter, compiled)
        else:
            stage.loss.forward = compiled(stage.drafter.forward, "drafter")
        events.clear()
        with locking.thread():
            learn(stage, 0, events.append)
        torch.testing.assert_close(torch.cat(stage.gradients()), expected, rtol=1e-4, atol=1e-6)
        told = list(range(len(buckets)))
        assert [e for e in events if isinstance(e, int)] == told
        if kind == "whole":
            assert events == ["drafter", *told]
        else:
            begun = [e for e in events if isinstance(e, str)]
            assert begun == ["norm", "layer_1", "layer_0", "context"]
            # All that layer 1 alone makes is told before layer 0's begins, and so on.
            assert events.index(3) < events.index("layer_0") < events.index(6)
            assert events.index(6) < events.index("context") < events.index(told[-2])
    assert locking.stats().eager_runs == 0


def test_the_order_of_the_buffers_changes_no_update() -> None:
    """Checkpoints hold tensors by name: buffers of another order read them."""
    results = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        module = Three()
        config = replica(CPU, False).optimizer.config
        optimizer = MasterAdamW(module, config, 10, torch.float32, order)
        for number, name in enumerate("abc"):
            getattr(module, name).grad += number + 1.0
        optimizer.step(0, torch.ones(9))
        state = optimizer.state()
        assert list(state["master"]) == order
        results.append(state["master"])
    for name, tensor in results[0].items():
        assert tensor.equal(results[1][name])
