"""How good a drafter gets in a fixed time: from nothing, for SmolLM2-135M-Instruct, on one GPU.

    python benchmarks/trainer/quality.py --folder OUT                      # data, the base recipe
    python benchmarks/trainer/quality.py --folder OUT --recipes plain,muon+block8 --decode 40
    python benchmarks/trainer/quality.py --list

Data: 120 s in which the target writes prompts and answers them (once; later calls take the folder).
A recipe: 200 s of training from its first step on, its number of steps reckoned from a short
measurement before; then tau over 40 HumanEval prompts and 40 held-out chat prompts, 192 new tokens
each, greedy: by the walk (``walk.py``), and by decoding one after the other for the first
``--decode`` prompts of each kind. ``plain`` is SpecForge 0.2.0's objective and optimizer in a plain
loop (needs its wheel).

Before the first long run on a machine, a short one: ``--folder T --data-seconds 15 --seconds 10``.
Every figure is printed when it is known; every run ends in one line of ``OUT/quality.jsonl``.
On a CPU: ``--device cpu --tiny --target FOLDER`` tries the flow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from measure import Figures, figure, settle, watch_part
from recipes import BASE, CODE, HUMANEVAL, NEW_TOKENS, RECIPES, TARGET, changes, merged, tree
from torch import Tensor
from walk import yields

from trainer.config import parse_config
from trainer.data.conversation import Conversation, read_conversations
from trainer.data.decode import Request
from trainer.data.settings import FilePrompts
from trainer.data.slots import SlotDecoder
from trainer.data.template import ChatTemplate, stop_tokens
from trainer.drafter import format as drafter_format
from trainer.drafter.decoding import DraftSession
from trainer.drafter.model import Drafter
from trainer.evaluate import bootstrap
from trainer.objective import FrozenTarget
from trainer.outlook import default_device
from trainer.pipeline.inline import InlineExecutor
from trainer.pipeline.stages import Sums
from trainer.resolve import Resolved, resolve
from trainer.run import Run, Targets, make_data, make_executor, open_run, prepare_run
from trainer.speculate import Limits, decode_speculatively
from trainer.taps import TappedTarget


def print_config(options: argparse.Namespace) -> None:
    """A recipe as a config file for `python -m trainer train`."""
    found = tree(options, options.print)
    found["data"] |= {"folder": "data", "cache_features": True}
    found["optimization"]["steps"] = options.steps
    found["folder"] = "run"
    found["checkpoint"]["every"] = options.steps
    found["evaluation"] = {"count": options.prompts, "max_new_tokens": options.new_tokens}
    print(yaml.safe_dump(found, sort_keys=False), end="")


def resolved_for(options: argparse.Namespace, recipe: str) -> Resolved:
    config = parse_config(tree(options, recipe), source=recipe, base=Path.cwd())
    return resolve(config)


# -- data -----------------------------------------------------------------------------------------


def data_part(options: argparse.Namespace) -> None:
    """Make the data, timed from the loaded target on, and the target's answers to what is asked in
    the end."""
    resolved = resolved_for(options, "base")
    targets = Targets(resolved)
    device = default_device()
    model = targets.model(device)
    settle(device)
    began = time.perf_counter()
    prepared = make_data(resolved, targets, options.folder)
    figure("data_s", time.perf_counter() - began)
    for name in ("samples", "tokens", "supervised"):
        figure(name, prepared.report["train"][name])
    questions = ask(options, resolved, prepared.prompts())
    stop = stop_tokens(resolved.tokenizer, model.generation_config)
    for kind, prompts in questions.items():
        answers = greedy(model, prompts, options.new_tokens, stop)
        pairs = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]
        (options.folder / f"{kind}.json").write_text(json.dumps(pairs), encoding="utf-8")
        figure(f"{kind} prompts", len(pairs))


def ask(
    options: argparse.Namespace, resolved: Resolved, held_out: Iterable[list[dict[str, str]]]
) -> dict[str, list[list[int]]]:
    """Tokens of the prompts of each kind. Held-out prompts with the code opening are no chat."""
    source = FilePrompts(kind="file", path=options.humaneval, template=CODE + "{prompt}")
    read = read_conversations(source.path, source.template)
    code = [item.prompt for item in read if isinstance(item, Conversation)]
    chat = [messages for messages in held_out if not messages[-1]["content"].startswith(CODE)]
    template = ChatTemplate(resolved.tokenizer)
    room = resolved.drafter.max_position_embeddings - options.new_tokens
    found = {}
    for kind, messages in (("humaneval", code), ("chat", chat)):
        tokens = template.prompts(messages[: 4 * options.prompts])
        found[kind] = [t for t in tokens if len(t) <= room][: options.prompts]
    return found


def greedy(model: Any, prompts: list[list[int]], limit: int, stop: set[int]) -> list[list[int]]:
    requests = [Request(i, tokens, limit) for i, tokens in enumerate(prompts)]
    decoder = SlotDecoder(model, stop, next(iter(stop)), len(prompts))
    found = {c.key: c.tokens for c in decoder.run(requests) if c is not None}
    return [found[i] for i in range(len(prompts))]


# -- a recipe -------------------------------------------------------------------------------------


def train_part(options: argparse.Namespace) -> None:
    resolved = resolved_for(options, options.recipe)
    run = prepare_run(open_run(resolved))
    device = default_device()
    model = run.targets.model(device)
    frozen = run.targets.frozen(device, model.dtype)
    began = time.perf_counter()
    if options.recipe == "plain":
        master = train_plainly(options, run, frozen, began)
    else:
        master = train_inline(options, run, began)
    drafter_format.save(
        options.folder / "runs" / options.recipe / "drafter",
        resolved.drafter,
        master,
        verifier=options.target,
    )
    drafter = Drafter(resolved.drafter)
    drafter.load_state_dict(master)
    evaluate(options, resolved, model, drafter.to(device, model.dtype), frozen)


def train_inline(options: argparse.Namespace, run: Run, began: float) -> dict[str, Tensor]:
    """By the trainer's own stages; the master weights."""
    executor = make_executor(run)
    assert isinstance(executor, InlineExecutor)
    executor.start()
    figure("warm_up_s", time.perf_counter() - began)

    # Whole steps, undone afterwards; six of some hundred batches have their features already then.
    state = executor.state()
    fresh = pace(executor.step, range(1, 7), executor.device)
    again = pace(executor.step, range(1, 7), executor.device)
    executor.load(state)
    epoch = len(run.batches.packed) / run.batches.rows
    steps = steps_within(options.seconds, epoch, fresh, again)
    run.batches.steps = executor.drafter.optimizer.steps = steps  # type: ignore[attr-defined]
    figure("steps", steps)
    figure("epochs", steps / epoch)
    figure("step_ms", again * 1e3)
    figure("first_epoch_step_ms", fresh * 1e3)

    def step(index: int) -> float:
        result = executor.step(index)
        return Sums.read(result.sums).mean_loss if index % 50 == 49 else 0.0

    in_time(options.seconds, steps, step, executor.device)
    state = executor.state()
    executor.close()
    master: dict[str, Tensor] = state["master"]
    figure("skipped", state["skipped"])
    return master


def train_plainly(
    options: argparse.Namespace, run: Run, frozen: FrozenTarget, began: float
) -> dict[str, Tensor]:
    from plain_loop import PlainLoop

    device = default_device()
    target = run.tapped_target(device)
    pad = run.batches.pad_token
    loop = PlainLoop(run.resolved.drafter, frozen, target, run.data.train, pad)
    figure("samples_used", loop.count)
    loop.step(0)
    figure("warm_up_s", time.perf_counter() - began)
    each = pace(loop.step, range(6), device)
    steps = int(options.seconds / each)
    figure("steps", steps)
    figure("step_ms", each * 1e3)
    loop.begin(steps)

    def step(index: int) -> float:
        loss = loop.step(index)
        return float(loss) if index % 50 == 49 else 0.0

    in_time(options.seconds, steps, step, device)
    return loop.weights()


def pace(step: Callable[[int], Any], indices: range, device: torch.device) -> float:
    """Seconds a step, over all but the first two."""
    for number, index in enumerate(indices):
        if number == 2:
            settle(device)
            began = time.perf_counter()
        step(index)
    settle(device)
    return (time.perf_counter() - began) / (len(indices) - 2)


def steps_within(seconds: float, epoch: float, fresh: float, again: float) -> int:
    """Steps that take so long, the first epoch's at ``fresh``, where features are new."""
    first = min(epoch, seconds / fresh)
    return max(1, int(first + (seconds - first * fresh) / again))


def in_time(seconds: float, steps: int, step: Callable[[int], float], device: torch.device) -> None:
    """All steps, or as many as two percent more than the time allow."""
    began = time.perf_counter()
    done = 0
    for index in range(steps):
        loss = step(index)
        done = index + 1
        if loss and done % max(50, steps // 500 * 50) == 0:
            figure("loss", [done, round(loss, 4)])
        if index % 50 == 49 and time.perf_counter() - began > 1.02 * seconds:
            break
    settle(device)
    figure("steps_done", done)
    figure("train_s", time.perf_counter() - began)


# -- tau ------------------------------------------------------------------------------------------


def evaluate(
    options: argparse.Namespace,
    resolved: Resolved,
    model: Any,
    drafter: Drafter,
    frozen: FrozenTarget,
) -> None:
    tapped = TappedTarget(model, resolved.drafter.target_layer_ids, model.device)
    stop = frozenset(stop_tokens(resolved.tokenizer, model.generation_config))
    limits = Limits(options.new_tokens, stop)
    asked = {
        kind: json.loads((options.folder / f"{kind}.json").read_text(encoding="utf-8"))
        for kind in ("humaneval", "chat")
    }
    for kind, pairs in asked.items():
        passes = [yields(drafter, frozen, tapped, p["prompt"], p["answer"]) for p in pairs]
        tell_tau(f"tau_{kind}", passes)
        if 0 < options.decode < len(pairs):
            tell_tau(f"tau_{kind}_of_the_decoded", passes[: options.decode])
    for kind, pairs in asked.items():
        decoded = []
        for pair in pairs[: options.decode]:
            session = DraftSession(drafter, frozen.embedding, frozen.head)
            decoded.append(decode_speculatively(model, session, pair["prompt"], limits).yields)
        if decoded:
            tell_tau(f"tau_{kind}_decoded", decoded)


def tell_tau(name: str, passes: list[list[int]]) -> None:
    tokens, counts = np.array([sum(p) for p in passes]), np.array([len(p) for p in passes])
    low, high = bootstrap(tokens, counts, 0)
    figure(name, float(tokens.sum() / max(1, counts.sum())))
    figure(f"{name}: 95 %", [round(low, 3), round(high, 3)])
    figure(f"{name}: prompts, tokens", [len(passes), int(tokens.sum())])


# -- all ------------------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    if options.part:
        {"data": data_part, "train": train_part}[options.part](options)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    figures = Figures("quality-figures.jsonl")
    if not (options.folder / "chat.json").exists():
        run_watched(options, "data", "base", 240, figures)
        if not (options.folder / "chat.json").exists():
            raise SystemExit("no data was made; nothing can be trained")
    for recipe in options.recipes:
        left = options.limit - figures.spent_s()
        # Start-up, compiling and evaluation took others under 100 s.
        if left < options.seconds + (0 if options.tiny else 60):
            figures.tell(recipe, "left out", f"{options.limit:.0f} s are nearly over")
            continue
        run_watched(options, "train", recipe, left, figures)


def run_watched(
    options: argparse.Namespace, part: str, recipe: str, limit: float, figures: Figures
) -> None:
    told: dict[str, Any] = {}
    title = recipe if part == "train" else part

    def tell(name: str, value: Any) -> None:
        told.setdefault(name, []).append(value)
        figures.tell(title, name, value)

    kept = {
        "TORCHINDUCTOR_CACHE_DIR": str(options.folder / "inductor"),
        "TRITON_CACHE_DIR": str(options.folder / "triton"),
        "TOKENIZERS_PARALLELISM": "true",
    }
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    ended = watch_part([*command, "--part", part, "--recipe", recipe], limit, tell, **kept)
    record: dict[str, Any] = {"run": title, "device": device_name(options), "code": ended.code}
    record |= {name: values[0] if name != "loss" else values for name, values in told.items()}
    if part == "train":
        record["recipe"] = {} if recipe == "plain" else merged(BASE, changes(recipe))
    with (options.folder / "quality.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
    if ended.code or ended.over:
        print("\n".join(ended.lines[-150:]), flush=True)
    print(json.dumps({k: v for k, v in record.items() if k != "loss"}), flush=True)


def device_name(options: argparse.Namespace) -> str:
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("quality"), help="data and results")
    parser.add_argument("--recipes", default="base", help="with commas; muon+block8 is one of both")
    parser.add_argument("--list", action="store_true", help="print the recipes and leave")
    parser.add_argument("--print", metavar="RECIPE", help="as a config file, and leave")
    parser.add_argument("--steps", type=int, default=8000, help="in the printed config (8000)")
    parser.add_argument("--seconds", type=float, default=200, help="of training (200)")
    parser.add_argument("--data-seconds", type=float, default=120, help="of data making (120)")
    parser.add_argument("--limit", type=float, default=560, help="of all of it (560)")
    parser.add_argument("--prompts", type=int, default=40, help="of each kind (40)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--decode", type=int, default=6, help="prompts decoded one by one too (6)")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--humaneval", default=HUMANEVAL)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU and a tiny target")
    parser.add_argument("--part", choices=("data", "train"), help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="base", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        for name, own in RECIPES.items():
            print(f"{name:14} {json.dumps(own)}")
        raise SystemExit
    options.folder = options.folder.absolute()
    if options.print:
        print_config(options)
        raise SystemExit
    options.recipes = options.recipes.split(",")
    unknown = [n for recipe in options.recipes for n in recipe.split("+") if n not in RECIPES]
    if unknown:
        parser.error(f"no recipe {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    return options


if __name__ == "__main__":
    main()
