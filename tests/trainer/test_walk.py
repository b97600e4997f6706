"""The walk over a known text makes the passes that speculative decoding makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trainer"))

from tiny_drafter import SECOND, noisy_drafter  # noqa: E402
from tiny_target import SHAPE  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from walk import yields  # noqa: E402

from trainer.drafter.config import FULL, SLIDING, Dflash2Config, DrafterConfig  # noqa: E402
from trainer.drafter.decoding import DraftSession  # noqa: E402
from trainer.speculate import Limits, decode_speculatively  # noqa: E402
from trainer.taps import TappedTarget  # noqa: E402
from trainer.target import frozen_weights  # noqa: E402

pytestmark = pytest.mark.torch


def blocks_within(passes: list[int], length: int, block_size: int) -> int:
    """How many passes had room for a whole block: near the end decoding offers shorter ones."""
    starts = [1 + sum(passes[:i]) for i in range(len(passes))]
    return sum(length - start >= block_size - 1 for start in starts)


# The hardest of the four is quick enough for every run.
@pytest.mark.parametrize(
    "second",
    [pytest.param(None, id="dflash", marks=pytest.mark.slow), pytest.param(SECOND, id="dflash2")],
)
@pytest.mark.parametrize(
    "types",
    [
        pytest.param((FULL, FULL), id="full", marks=pytest.mark.slow),
        pytest.param((FULL, SLIDING), id="sliding"),
    ],
)
def test_the_same_passes_as_one_after_the_other(
    types: tuple[str, ...], second: Dflash2Config | None
) -> None:
    # Of six tokens, a drafter of random weights is sometimes right.
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 6})).eval()
    config = DrafterConfig.for_target(
        model.config,
        mask_token_id=5,
        num_layers=2,
        block_size=5,
        layer_types=types,
        sliding_window=6,
        dflash2=second,
    )
    frozen = frozen_weights(model)
    tapped = TappedTarget(model, list(config.target_layer_ids), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for seed, limit in enumerate((1, 2, 17, 60, 60, 60)):
        drafter = noisy_drafter(config, seed)
        prompt = torch.randint(3, 6, (9,), generator=generator).tolist()
        session = DraftSession(drafter, frozen.embedding, frozen.head)
        limits = Limits(limit, frozenset({2}))
        decoded = decode_speculatively(model, session, prompt, limits)
        found = yields(drafter, frozen, tapped, prompt, decoded.tokens)
        whole = blocks_within(decoded.yields, len(decoded.tokens), config.block_size)
        assert found[:whole] == decoded.yields[:whole]
        assert sum(found) == sum(decoded.yields)
        lengths |= set(decoded.yields[:whole])
    assert len(lengths) > 1, "too little was accepted to prove anything"
