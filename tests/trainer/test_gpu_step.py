"""On a GPU: the fast path (flex_attention, compiled; Triton kernels) equals the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.data.batch import Batch
from trainer.drafter.config import FULL, SLIDING, Dflash2Config, DrafterConfig, LayerType
from trainer.drafter.mask import MaskBuilder, kernels_take, masks_for, tile_lists
from trainer.drafter.model import Drafter
from trainer.head_loss import (
    HeadLoss,
    fast_head_loss,
    reference_head_loss,
    torch_softmax_gradient_,
)
from trainer.objective import DrafterLoss, FrozenTarget, ObjectiveConfig

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def away(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ in fp64; NaN when either has one."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scale", [(1.0, None), (0.5, 20.0)])
@pytest.mark.parametrize("vocabulary", [151_936, 49_152, 1_001])
def test_softmax_kernel_equals_plain_torch(
    vocabulary: int, scale: tuple[float, float | None]
) -> None:
    from trainer.kernels.cross_entropy import softmax_gradient_

    raw = torch.randn(300, vocabulary, device="cuda", dtype=torch.bfloat16) * 4
    labels = torch.randint(0, vocabulary, (300,), device="cuda")
    fast, plain = raw.clone(), raw.double()
    logp, best = softmax_gradient_(fast, labels, scale)
    wanted_logp, wanted_best = torch_softmax_gradient_(plain, labels, scale)
    assert away(logp, wanted_logp) < 1e-5
    assert away(fast, plain) < 4e-3
    # Equal bf16 logits have no order; the chosen ones must be equally large.
    assert torch.equal(raw.gather(1, best[:, None]), raw.gather(1, wanted_best[:, None]))


def test_adamw_kernel_equals_torch_and_skips_a_bad_step() -> None:
    from trainer.kernels.adamw import adamw_, schedule_factors

    betas = {"beta1": 0.9, "beta2": 0.95}
    master = torch.randn(70_001, device="cuda")
    reference = master.clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    copy = torch.zeros_like(master, dtype=torch.bfloat16)
    average, square = torch.zeros_like(master), torch.zeros_like(master)

    def step(number: int, coefficient: float, gradient: Tensor) -> None:
        rest = schedule_factors(step=number, learning_rate=1e-2, weight_decay=0.1, **betas)
        factors = torch.cat((torch.tensor([coefficient]), rest)).cuda()
        adamw_(copy, gradient, master, average, square, factors, **betas, epsilon=1e-8)

    for number in range(1, 4):
        gradient = torch.randn_like(master).bfloat16()
        reference.grad = gradient.float() * 0.5
        optimizer.step()
        step(number, 0.5, gradient)
    assert away(master, reference.detach()) < 1e-6
    assert torch.equal(copy, master.bfloat16())
    before = master.clone()
    for bad in (float("nan"), float("inf")):
        step(4, bad, gradient)
    assert torch.equal(master, before)


def small_config(
    num_heads: int, layer_types: tuple[LayerType, ...], **changes: Any
) -> DrafterConfig:
    """What the kernels take, in a vocabulary of 1000 and on two layers of a target of 256."""
    return DrafterConfig(
        hidden_size=256,
        intermediate_size=512,
        num_layers=len(layer_types),
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=1_000,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        block_size=8,
        mask_token_id=999,
        target_layer_ids=(1, 2),
        num_target_layers=6,
        target_hidden_size=256,
        layer_types=layer_types,
        **changes,
    )


def compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("attention", ["kernels", "flex"])
@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
def test_fast_step_equals_the_dense_one(second: bool, attention: str) -> None:
    """Same loss, same gradients: bf16 and flex_attention against fp32 and a dense mask."""
    config = small_config(
        num_heads=8,
        layer_types=(FULL, SLIDING, FULL),
        sliding_window=100,
        dflash2=Dflash2Config(selector_rank=16, selector_top_k=4) if second else None,
    )
    torch.manual_seed(0)
    length, blocks = 600, 77
    position = torch.cat([torch.arange(250), torch.arange(300), torch.arange(50)])
    document = torch.tensor([0] * 250 + [1] * 300 + [-1] * 50, dtype=torch.int32)
    anchors = torch.stack([torch.randperm(548)[:blocks].sort().values for _ in range(2)])
    batch = Batch(
        tokens=torch.randint(0, 999, (2, length)),
        document=document.expand(2, -1).contiguous(),
        position=position.expand(2, -1).contiguous(),
        supervised=torch.rand(2, length) < 0.9,
        anchors=anchors,
        anchor_valid=torch.rand(2, blocks) < 0.9,
        sample_ids=((0, 1), (2, 3)),
    )
    plain = Drafter(config).cuda()
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
        parameter.data = parameter.data.bfloat16().float()
    fast = Drafter(config).cuda().bfloat16()
    fast.load_state_dict(plain.state_dict())
    features = torch.randn(2, length, 512, device="cuda").bfloat16()
    embedding = torch.randn(1000, 256, device="cuda").bfloat16()
    frozen = FrozenTarget(embedding, embedding * 0.1)
    masks = MaskBuilder(8, full=True, window=100)
    assert kernels_take(config)
    fast_masks = masks_for(config, torch.device("cuda"), compiled)
    if attention == "flex":
        fast_masks = MaskBuilder(8, full=True, window=100, list_tiles=compiled(tile_lists, ""))
    wide = FrozenTarget(*(t.float() for t in frozen))
    wanted = DrafterLoss(plain, wide, ObjectiveConfig(), masks)(batch, features.float())
    got = DrafterLoss(
        fast,
        frozen,
        ObjectiveConfig(),
        fast_masks,
        forward=compiled(fast.forward, "drafter"),
        head_loss=fast_head_loss(torch.device("cuda")),
    )(batch, features)
    assert away(got.loss.detach(), wanted.loss.detach()) < 5e-3
    assert torch.equal(got.count, wanted.count)
    wanted.loss.backward()
    got.loss.backward()
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert away(a.grad, b.grad) < 0.05, name


def test_fp8_head_keeps_loss_and_gradient_near_the_reference() -> None:
    torch.manual_seed(0)
    head = torch.randn(4_096, 512, device="cuda").bfloat16() * 0.05
    hidden = torch.randn(700, 512, device="cuda").bfloat16().requires_grad_()
    rows, labels = torch.arange(0, 700, 2), torch.randint(0, 4_096, (350,))
    rows, labels = rows.cuda(), labels.cuda()

    def run(loss: HeadLoss) -> tuple[Tensor, Tensor]:
        got = loss(hidden, head, rows, labels, torch.ones_like, (1.0, None))
        return got.loss.detach(), torch.autograd.grad(got.loss, hidden)[0]

    wanted = run(reference_head_loss)
    found = run(fast_head_loss(torch.device("cuda"), head, "fp8"))
    assert away(found[0], wanted[0]) < 1e-3
    assert away(found[1], wanted[1]) < 0.05


def test_a_recorded_step_with_compiled_parts_equals_the_plain_one() -> None:
    """Kernels, compile lock, fused optimizer, three steps of new batches: graph or launches."""
    from pathlib import Path

    from tiny_target import run_config

    from trainer.compile_lock import CompileLock
    from trainer.config import parse_config
    from trainer.replica import DrafterReplica

    device = torch.device("cuda")
    config = small_config(num_heads=4, layer_types=(FULL, FULL))
    length, blocks = 384, 32
    torch.manual_seed(0)
    embedding = torch.randn(1000, 256, device=device).bfloat16()
    frozen = FrozenTarget(embedding, embedding * 0.1)

    def batch(seed: int) -> tuple[Batch, Tensor]:
        random = torch.Generator().manual_seed(seed)
        places = torch.rand(2, length - 1, generator=random)
        made = Batch(
            tokens=torch.randint(0, 999, (2, length), generator=random),
            document=torch.zeros(2, length, dtype=torch.int32),
            position=torch.arange(length).expand(2, -1).contiguous(),
            supervised=torch.ones(2, length, dtype=torch.bool),
            anchors=places.argsort(1)[:, :blocks].sort(1).values,
            anchor_valid=torch.ones(2, blocks, dtype=torch.bool),
            sample_ids=((seed,), (seed,)),
        )
        return made, torch.randn(2, length, 512, generator=random).to(device).bfloat16()

    def train(cuda_graph: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        tree = run_config(Path("/x"), pipeline={"cuda_graph": cuda_graph})
        lock = CompileLock()
        replica = DrafterReplica(
            parse_config(tree, source="t", base=Path("/")),
            config,
            frozen,
            20,
            device,
            head_loss=fast_head_loss(device),
            compile_=lock.compile,
            backward=lock.backward,
        )
        with lock.thread():
            replica.accumulate(*batch(0))
            replica.discard()
            lock.end_warm_up()
            found = []
            for step in range(3):
                sums = replica.accumulate(*batch(step + 1))
                found.append(torch.cat((sums, replica.update(step, sums)[None])))
        assert lock.stats().recompiles == 0
        lock.close()
        return found, replica.state()["master"]

    plain, wanted = train(False)
    recorded, weights = train(True)
    for one, other in zip(recorded, plain, strict=True):
        assert away(one, other) < 1e-2
    for name, value in wanted.items():
        assert away(weights[name], value) < 1e-2, name
