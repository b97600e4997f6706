"""How good a drafter is: real speculative decoding on prompts it has not seen, batch 1."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.checkpoint import newest_of_run, read_tensors
from trainer.config import EvaluationConfig
from trainer.data.conversation import Messages, Rejection, read_conversations
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.drafter.decoding import DraftSession
from trainer.drafter.model import Drafter
from trainer.errors import DataError
from trainer.objective import FrozenTarget
from trainer.outlook import default_device
from trainer.replica import new_drafter
from trainer.speculate import Decoded, Limits, decode_plainly, decode_speculatively
from trainer.telemetry import say

if TYPE_CHECKING:
    from trainer.resolve import Resolved
    from trainer.run import Run

RESAMPLES = 2000
REPORT_FILE = "evaluation.json"


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded both ways."""

    plain: Decoded
    drafted: Decoded


def evaluate_prompts(
    model: Any,
    drafter: Drafter,
    frozen: FrozenTarget,
    prompts: list[list[int]],
    limits: Limits,
    seed: int,
    name: str = "evaluation",
) -> list[Pair]:
    """Every prompt plainly and with the drafter, one after the other on the same machine."""
    pairs: list[Pair] = []
    tokens = passes = 0
    say(
        f"{name}: {len(prompts)} prompts, each answered with the drafter and by the target alone, "
        f"{limits.max_new_tokens} tokens at most"
    )
    for number, prompt in enumerate(prompts, start=1):
        generators = [torch.Generator(model.device).manual_seed(seed + number) for _ in range(2)]
        session = DraftSession(drafter, frozen.embedding, frozen.head)
        drafted = decode_speculatively(model, session, prompt, limits, generators[0])
        plain = decode_plainly(model, prompt, limits, generators[1])
        pairs.append(Pair(plain, drafted))
        tokens += sum(drafted.yields)
        passes += len(drafted.yields)
        say(
            f"{name}: prompt {number}/{len(prompts)} | {tokens} tokens"
            f" | tau {tokens / max(1, passes):.2f}"
        )
    return pairs


def summarize(pairs: list[Pair], block_size: int, limits: Limits, seed: int) -> dict[str, Any]:
    """The measures as JSON. τ's interval is a bootstrap over prompts, 95 %."""
    drafted = [pair.drafted for pair in pairs]
    tokens = np.array([sum(d.yields) for d in drafted], dtype=np.float64)
    passes = np.array([len(d.yields) for d in drafted], dtype=np.float64)
    tau = float(tokens.sum() / max(1.0, passes.sum()))
    low, high = bootstrap(tokens, passes, seed)
    accepted = [a for d in drafted for a in d.accepted]
    offered = [o for d in drafted for o in d.offered]
    plain_s = sum(p.plain.seconds for p in pairs)
    plain_tokens = sum(len(p.plain.tokens) - 1 for p in pairs)
    drafted_s = sum(d.seconds for d in drafted)
    plain_rate = plain_tokens / plain_s if plain_s else 0.0
    drafted_rate = float(tokens.sum()) / drafted_s if drafted_s else 0.0
    return {
        "prompts": len(pairs),
        "tokens": int(tokens.sum()),
        "passes": int(passes.sum()),
        "tau": round(tau, 4),
        "tau_low": round(low, 4),
        "tau_high": round(high, 4),
        "accepted_histogram": {
            str(n): accepted.count(n) for n in range(block_size) if n in accepted
        },
        "position_acceptance": position_acceptance(accepted, offered, block_size),
        "tokens_per_s_plain": round(plain_rate, 2),
        "tokens_per_s_drafted": round(drafted_rate, 2),
        "speed_up": round(drafted_rate / plain_rate, 3) if plain_rate else None,
        "identical": sum(p.plain.tokens == p.drafted.tokens for p in pairs)
        if limits.temperature <= 0
        else None,
        "temperature": limits.temperature,
        "max_new_tokens": limits.max_new_tokens,
        "median_length": statistics.median(len(d.tokens) for d in drafted) if drafted else 0,
    }


def bootstrap(tokens: np.ndarray, passes: np.ndarray, seed: int) -> tuple[float, float]:
    """95 % interval of Σ tokens / Σ passes, prompts drawn with replacement: tokens of one prompt
    resemble each other, so prompts are what is independent."""
    generator = np.random.Generator(np.random.Philox(key=(seed, 7)))
    drawn = generator.integers(0, len(tokens), (RESAMPLES, len(tokens)))
    ratios = tokens[drawn].sum(1) / np.maximum(passes[drawn].sum(1), 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def position_acceptance(accepted: list[int], offered: list[int], block_size: int) -> list[float]:
    """Share of passes that accepted slot k, among those that offered it, k = 1..B-1."""
    rates = []
    for slot in range(1, block_size):
        chances = sum(o >= slot for o in offered)
        right = sum(a >= slot for a, o in zip(accepted, offered, strict=True) if o >= slot)
        rates.append(round(right / chances, 4) if chances else 0.0)
    return rates


def table(summary: dict[str, Any]) -> str:
    """The summary for people."""
    kind = "greedy" if summary["temperature"] <= 0 else f"sampled at {summary['temperature']}"
    gain = summary["speed_up"]
    times = "" if gain is None else f"  ({gain:.2f} times)"
    positions = " ".join(f"{rate:.2f}" for rate in summary["position_acceptance"])
    histogram = ", ".join(f"{n}: {count}" for n, count in summary["accepted_histogram"].items())
    lines = [
        f"decoding              {kind}, batch 1, up to {summary['max_new_tokens']} new tokens",
        f"prompts               {summary['prompts']} ({summary['tokens']} tokens)",
        f"tau                   {summary['tau']:.3f}"
        f"  (95 %: {summary['tau_low']:.3f} to {summary['tau_high']:.3f})",
        f"accepted by slot      {positions}",
        f"accepted a pass       {histogram}",
        f"tokens/s, target only {summary['tokens_per_s_plain']:.1f}",
        f"tokens/s, drafted     {summary['tokens_per_s_drafted']:.1f}{times}",
    ]
    if summary["identical"] is not None:
        lines.append(
            f"identical to greedy   {summary['identical']} of {summary['prompts']} prompts"
        )
    return "\n".join(lines)


def load_prompts(
    evaluation: EvaluationConfig, held_out: Iterable[Messages], template: ChatTemplate, room: int
) -> list[list[int]]:
    """Tokens of the prompts to decode, ``evaluation.count`` at most; longer ones than ``room``
    tokens are passed over."""
    if evaluation.prompts is not None:
        read = read_conversations(evaluation.prompts)
        found: Iterable[Messages] = (c.prompt for c in read if not isinstance(c, Rejection))
        source = evaluation.prompts
    else:
        found, source = held_out, "the held-out share of the data"
    prompts: list[list[int]] = []
    seen = 0
    for messages in found:
        seen += 1
        tokens = template.prompt(messages)
        if len(tokens) <= room:
            prompts.append(tokens)
        if len(prompts) == evaluation.count:
            break
    if not prompts:
        raise DataError(
            f"there is no prompt to evaluate on: {source} has {seen},"
            f" of which none has at most {room} tokens"
            f" (the target's positions less {evaluation.max_new_tokens} new tokens)",
            next_step="raise data.held_out, name a file by evaluation.prompts, or decode fewer"
            " tokens (evaluation.max_new_tokens)",
        )
    return prompts


def run_prompts(
    resolved: Resolved, evaluation: EvaluationConfig, held_out: Iterable[Messages]
) -> list[list[int]]:
    """What a run will be evaluated on. Asked for before its first step, so that nobody learns of a
    file that does not do when the training is over."""
    room = resolved.drafter.max_position_embeddings - evaluation.max_new_tokens
    template = ChatTemplate(resolved.tokenizer, resolved.drafter.vocab_size)
    return load_prompts(evaluation, held_out, template, room)


def evaluate_run(
    run: Run, evaluation: EvaluationConfig, prompts: list[list[int]]
) -> dict[str, Any]:
    """The best checkpoint of a run (else its newest), on ``run_prompts``."""
    best = run.store.folder / "best"
    path = best.resolve() if best.is_symlink() else newest_of_run(run.store.folder)
    assert path is not None, "the loop always ends with a checkpoint"
    run.writer.event("evaluating", checkpoint=str(path))
    weights = read_tensors(path / "master.safetensors")
    device = default_device()
    model = run.targets.model(device)
    frozen = run.targets.frozen(device, model.dtype)
    drafter = new_drafter(run.resolved.drafter, run.config.seed, frozen.head)
    if run.config.drafter.start == "target":
        run.start(drafter)
    drafter.to(device, model.dtype)
    summary: dict[str, Any] = {"checkpoint": str(path)}
    stop = frozenset(stop_tokens(run.resolved.tokenizer, model.generation_config))
    limits = Limits(evaluation.max_new_tokens, stop, evaluation.temperature)
    if evaluation.compare_untrained:
        # It accepts nothing, so a few tokens say so.
        few = Limits(min(32, evaluation.max_new_tokens), stop, evaluation.temperature)
        pairs = evaluate_prompts(
            model, drafter, frozen, prompts[:2], few, run.config.seed, "untrained"
        )
        untrained = summarize(pairs, drafter.config.block_size, limits, run.config.seed)
        summary["untrained_tau"] = untrained["tau"]
    drafter.load_state_dict(weights)
    pairs = evaluate_prompts(model, drafter, frozen, prompts, limits, run.config.seed)
    summary |= summarize(pairs, drafter.config.block_size, limits, run.config.seed)
    write_report(run.folder / REPORT_FILE, summary)
    run.writer.event("evaluated", **summary)
    say(table(summary))
    return summary


def write_report(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
