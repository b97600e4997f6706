"""``python -m trainer``: train, check, data, evaluate, export, trace.

Exit codes: 0 good · 1 the run failed · 2 wrong input · 4 too little memory, disk or a missing
device · 130, 143 left after SIGINT, SIGTERM with a checkpoint.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import FrameType

from trainer.errors import TrainerError
from trainer.pipeline.place import LOCAL_RANKS


def main(arguments: list[str] | None = None) -> int:
    """Parse, then import what the command needs: `--help` waits for no torch."""
    options = parser().parse_args(arguments)
    if options.module != "traced":  # whose script is not ours
        _set_variables(getattr(options, "trace_compile", False))
    try:
        module = import_module(f"trainer.{options.module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "trainer":
            raise
        print(
            f"error: {sys.executable} has no {error.name}, which the trainer needs\n"
            "  next: pip install 'dflashctl[trainer]', or, where the container has it, from the"
            " laptop: dflashctl launch --config FILE",
            file=sys.stderr,
        )
        return 2

    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code: int = getattr(module, options.run)(options)
        return code
    except KeyboardInterrupt:
        # `train` and `data` take signals themselves; the others have nothing to finish.
        return 130
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _end_rank(error.exit_code)
        return error.exit_code
    except BrokenPipeError:
        return 1
    except Exception:
        if LOCAL_RANKS in os.environ:
            traceback.print_exc()
            _end_rank(1)
        raise


def _end_rank(code: int) -> None:
    """End a failed process of several at once, while the error still holds on to its process
    groups: their destructors wait for what peers owe, and peers that failed too wait likewise.
    torchrun kills all of them after 30 s."""
    if LOCAL_RANKS in os.environ:
        sys.stdout.flush()
        os._exit(code)


def _set_variables(trace_compile: bool) -> None:
    """Before torch and transformers are imported, which read them then."""
    # transformers' progress bars write carriage returns into a log that is read line by line.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if trace_compile:
        os.environ["DFLASH_TRACE_COMPILE"] = "1"
    # Spinning OpenMP threads wait for one that the kernel took off its core: on two busy cores the
    # products of a CPU run were 4 to 8 times slower than with threads that sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def leave(number: int, frame: FrameType | None) -> None:
    """End at once: importing torch takes seconds, and an interrupt in its midst is no news."""
    os._exit(130)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m trainer", description=__doc__.split("\n")[0])
    verbs = top.add_subparsers(required=True, metavar="COMMAND")

    def verb(name: str, text: str, module: str = "") -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(run=name, module=module or f"commands.{name}")
        return made

    def config(made: argparse.ArgumentParser) -> None:
        where = "docs/reference/config.md of dflashctl describes each field"
        made.add_argument("config", type=Path, help=f"YAML; {where}")

    train = verb("train", "make or load the data, train, evaluate")
    config(train)
    train.add_argument(
        "--trace-compile",
        action="store_true",
        help="record which thread sets torch's tracing flag, with its stack, as fx_trace events",
    )
    config(verb("check", "say what a config would do and the memory it needs"))

    evaluate = verb("evaluate", "measure a checkpoint by speculative decoding")
    evaluate.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder in z-lab form")
    evaluate.add_argument("--target", help="the target (default: the one it was trained for)")
    evaluate.add_argument("--prompts", required=True, help="JSONL with `messages` or `prompt`")
    evaluate.add_argument("--count", type=int, default=20, help="prompts (20)")
    evaluate.add_argument("--max-new-tokens", type=int, default=128, help="for each prompt (128)")
    evaluate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--json", type=Path, help="write the measures to this file too")

    data = verb("data", "prepare or check the data of a config")
    parts = data.add_subparsers(required=True, metavar="ACTION", dest="action")
    config(parts.add_parser("prepare", help="make and tokenize it; continues what was begun"))
    config(parts.add_parser("check", help="read every line and report what is wrong"))

    trace = verb("trace", "run any script and record who sets torch's tracing flag", "traced")
    trace.add_argument("script", type=Path, help="a Python file, which is not edited")
    trace.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")

    export = verb("export", "convert a checkpoint for a server")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("folder", type=Path, help="where to write")
    export.add_argument("--form", choices=("zlab", "speculators"), default="zlab")
    return top


if __name__ == "__main__":
    # `kill -USR1` prints every thread's stack into the log: what to do when a run seems to hang.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    sys.exit(main())
