"""AdamW on flat fp32 masters: torch's own result, skipped whole when something is not finite."""

from __future__ import annotations

import pytest
import torch
from tiny_drafter import SECOND, noisy_drafter, tiny_config
from torch import nn

from trainer.config import OptimizationConfig
from trainer.optimize import MasterAdamW, learning_rate

pytestmark = pytest.mark.torch


def settings(**changes: object) -> OptimizationConfig:
    return OptimizationConfig.model_validate(
        {"steps": 10, "learning_rate": 0.01, "warmup": 0.0, "weight_decay": 0.1, **changes}
    )


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def sums_of(weight: float, loss: float = 1.0) -> torch.Tensor:
    return torch.tensor([loss, weight, 0.0, 1.0])


def put_gradients(module: nn.Module, step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.grad is None:
            parameter.grad = drawn
        else:
            parameter.grad.copy_(drawn)


def test_it_is_torchs_adamw_on_the_mean_gradient_clipped() -> None:
    ours, theirs = make_module(), make_module()
    config = settings(schedule="wsd", decay=0.5)
    optimizer = MasterAdamW(ours, config, 10, torch.float32)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )
    for step in range(10):
        put_gradients(ours, step, 8.0)
        put_gradients(theirs, step, 8.0)
        for parameter in theirs.parameters():
            parameter.grad /= 8.0
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)
        for group in reference.param_groups:
            group["lr"] = learning_rate(config, step, 10)
        reference.step()
        assert torch.allclose(optimizer.step(step, sums_of(8.0)), norm, rtol=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_muon_is_torchs_own_on_matrices_and_adamw_on_the_rest() -> None:
    ours, theirs = make_module(), make_module()
    config = settings(schedule="wsd", decay=0.5, optimizer="muon")
    optimizer = MasterAdamW(ours, config, 10, torch.float32)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(
        matrices, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        others, betas=(config.beta1, config.beta2), eps=config.epsilon, weight_decay=0.0
    )
    for step in range(10):
        put_gradients(ours, step, 8.0)
        put_gradients(theirs, step, 8.0)
        for parameter in theirs.parameters():
            parameter.grad /= 8.0
        nn.utils.clip_grad_norm_(theirs.parameters(), config.clip)
        for each in (muon, adamw):
            each.param_groups[0]["lr"] = learning_rate(config, step, 10)
            each.step()
        optimizer.step(step, sums_of(8.0))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_optimizer_goes_on_bit_for_bit(kind: str) -> None:
    def run(steps: range, optimizer: MasterAdamW, module: nn.Module) -> None:
        for step in steps:
            put_gradients(module, step, 1.0)
            optimizer.step(step, sums_of(1.0))

    whole = make_module()
    straight = MasterAdamW(whole, settings(optimizer=kind), 10, torch.float32)
    run(range(6), straight, whole)
    first = make_module()
    stopped = MasterAdamW(first, settings(optimizer=kind), 10, torch.float32)
    run(range(3), stopped, first)
    second = make_module()
    resumed = MasterAdamW(second, settings(optimizer=kind), 10, torch.float32)
    resumed.load(stopped.state())
    run(range(3, 6), resumed, second)
    for name in ("master", "average", "square"):
        wanted, found = straight.state()[name], resumed.state()[name]
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("broken", ["gradient", "infinite", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(broken: str, kind: str) -> None:
    module = make_module()
    optimizer = MasterAdamW(module, settings(optimizer=kind), 10, torch.float32)
    put_gradients(module, 0, 1.0)
    optimizer.step(0, sums_of(1.0))
    before = optimizer.state()
    put_gradients(module, 1, 1.0)
    if broken != "loss":
        next(module.parameters()).grad[0, 0] = float("nan" if broken == "gradient" else "inf")
    optimizer.step(1, sums_of(1.0, loss=float("nan") if broken == "loss" else 1.0))
    after = optimizer.state()
    for kind in ("master", "average", "square"):
        for name, value in before[kind].items():
            assert torch.equal(value, after[kind][name]), (kind, name)
    assert (before["skipped"], after["skipped"]) == (0, 1)
    assert not any(gradient.any() for gradient in optimizer.gradients())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_decay_leaves_norms_and_base_kernels_where_they_are(kind: str) -> None:
    drafter = noisy_drafter(tiny_config(dflash2=SECOND))
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    optimizer = MasterAdamW(drafter, settings(optimizer=kind), 10, torch.float32)
    optimizer.step(0, sums_of(1.0))  # the gradients are zero
    for name, parameter in drafter.named_parameters():
        assert parameter.equal(before[name]) == ("norm" in name or "base_kernel" in name), name


def test_a_step_without_a_valid_anchor_divides_by_nothing() -> None:
    module = make_module()
    optimizer = MasterAdamW(module, settings(weight_decay=0.0), 10, torch.float32)
    before = optimizer.state()["master"]
    norm = optimizer.step(0, sums_of(0.0, loss=0.0))
    assert norm == 0
    for name, value in optimizer.state()["master"].items():
        assert torch.equal(value, before[name])


def test_small_updates_reach_norm_weights_that_bfloat16_alone_would_lose() -> None:
    module = nn.LayerNorm(8, bias=False)
    # 1e-4 a step is far below bfloat16's spacing of 0.0078 at 1.0.
    optimizer = MasterAdamW(module, settings(learning_rate=1e-4, steps=200), 200, torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    for step in range(100):
        module.weight.grad.fill_(1.0)
        optimizer.step(step, sums_of(1.0))
    master = optimizer.state()["master"]["weight"]
    assert (master < 0.995).all()
    assert (module.weight != 1.0).all()


def test_gradients_are_the_same_tensors_at_every_step() -> None:
    module = make_module()
    optimizer = MasterAdamW(module, settings(), 10, torch.float32)
    places = [g.data_ptr() for g in optimizer.gradients()]
    loss = module(torch.ones(2, 5)).square().sum()
    loss.backward()
    assert any(g.any() for g in optimizer.gradients())
    optimizer.step(0, sums_of(1.0))
    module(torch.ones(2, 5)).sum().backward()
    assert [g.data_ptr() for g in optimizer.gradients()] == places


def test_schedules() -> None:
    cosine = settings(steps=100, warmup=0.1, final=0.1, learning_rate=1.0)
    rates = [learning_rate(cosine, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1, abs=0.01)
    wsd = settings(steps=100, warmup=0.1, schedule="wsd", decay=0.2, learning_rate=1.0)
    rates = [learning_rate(wsd, step, 100) for step in range(100)]
    assert set(rates[10:81]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.05)
