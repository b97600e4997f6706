"""What ``dflashctl init`` writes, as text: a first inventory, start script and trainer config.

Each file is complete and valid as it stands; the comments name what is likely to be changed.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

from orchestrator import inventory as inventories
from orchestrator.errors import UsageError
from orchestrator.inventory import NAME, Inventory
from orchestrator.laptop_path import writing
from orchestrator.launch import START_SCRIPT
from orchestrator.paths import DEFAULT_WORKDIR, LaptopPaths
from orchestrator.target import resolve_host
from orchestrator.yaml_text import one_line

CONFIG = "train.yaml"


@dataclass(frozen=True)
class Choices:
    """The few things that only the user knows."""

    host: str
    """``[user@]name[:port]``, or an alias of the ssh config."""
    ct: int
    name: str = "train"
    python: str = "python3"
    workdir: str = DEFAULT_WORKDIR
    model: str = "Qwen/Qwen3-8B"


@dataclass(frozen=True)
class Written:
    """A file, and whether it was made or already there."""

    path: Path
    made: bool


def inventory_text(choices: Choices) -> str:
    """An inventory of one host and one container.

    :raises UsageError: a host that ssh would not take, or a name that is none.
    """
    if not NAME.match(choices.name):
        raise UsageError(
            f"{choices.name!r} is no name for a container",
            next_step="use letters, digits, dots, dashes and underscores",
        )
    settings = resolve_host(Inventory(), choices.host).settings
    entry = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return _INVENTORY.substitute(
        host=one_line(entry),
        name=one_line(choices.name),
        ct=choices.ct,
        workdir=one_line(choices.workdir),
        python=one_line(choices.python),
    )


def script_text(choices: Choices) -> str:
    """The start script."""
    return _SCRIPT.substitute(python=shlex.quote(choices.python), config=CONFIG)


def config_text(choices: Choices) -> str:
    """The trainer's config."""
    return _CONFIG.substitute(
        model=one_line(choices.model),
        name=choices.name,
        config=CONFIG,
        data=one_line(f"{choices.workdir.rstrip('/')}/data/{choices.name}"),
    )


def check_inventory(text: str, folder: Path) -> None:
    """Read it as the verbs will; ``folder`` is an empty one to write it to.

    :raises InventoryError: naming what does not fit.
    """
    path = folder / "inventory.yaml"
    path.write_text(text, encoding="utf-8")
    inventories.load(path, LaptopPaths())


def write(files: dict[Path, str]) -> list[Written]:
    """Make each file that is not there yet; one that is there stays untouched."""
    done = []
    for path, text in files.items():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # "x": nobody's file is replaced, not even one made a moment ago.
                with path.open("x", encoding="utf-8") as stream:
                    stream.write(text)
            except FileExistsError:
                done.append(Written(path, made=False))
                continue
        if path.name == START_SCRIPT:
            path.chmod(0o755)
        done.append(Written(path, made=True))
    return done


_INVENTORY = Template("""\
# The Proxmox hosts and containers that dflashctl knows. More: `dflashctl inventory discover HOST`.

hosts:
  # What is left out here (user, keys, ProxyJump) comes from your ssh config.
  pve: $host

containers:
  # Every verb takes this name: dflashctl launch $name
  $name:
    host: pve
    ct: $ct
    # gpus: [0, 1]        # which of the container's GPUs runs use; default: all of them
    # groups: [all]       # names for several containers at once

defaults:
  workdir: $workdir       # releases and runs lie below it, in dflashctl/
  python: $python         # the interpreter inside the container: Python 3.10 or later, with torch
""")

_SCRIPT = Template("""\
#!/usr/bin/env bash
# What `dflashctl launch` starts when it is given neither --config nor -- COMMAND.
#
# It runs in the pushed folder, inside tmux, in a session of its own. Its output is the run's log;
# its exit code is the run's. `dflashctl stop` sends SIGINT to all of it: a program that takes a
# checkpoint then loses nothing. Set in its environment:
#   DFLASH_RUN_ID, DFLASH_RUN_DIR   the run's name and its folder (write results there)
#   DFLASH_RESUME                   the newest checkpoint, when the run is started again
set -euo pipefail

python=$${PYTHON:-$python}

# Put your own program in place of what follows. As it stands, this runs dflashctl's trainer where
# it is installed in the container.
if ! "$$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("trainer"))'
then
    echo "no trainer here; this brings it along: dflashctl launch --config $config" >&2
    exit 2
fi
exec "$$python" -m trainer train $config
""")

_CONFIG = Template("""\
# A drafter for one target model:  dflashctl launch $name --config $config
# The container checks it before anything starts: every field, the target's shapes, the memory.

target:
  model: $model           # a folder, a .gguf file, or a name that transformers knows

drafter:
  num_layers: 5
  block_size: 16          # the anchor and 15 predictions

data:
  # The target writes its own training data first. For conversations of your own instead:
  #   files: [conversations.jsonl]        # one object a line, with `messages`
  make:
    prompts:
      - {kind: self, count: 20000}        # prompts that the target thinks of itself
    response: {max_new_tokens: 512}
  # In the container, outside of any run: a resumed or a second run takes what the first one made.
  # Give other prompts or answers another folder: data that another config made is refused.
  folder: $data
  sequence_length: 3072

optimization:
  epochs: 2               # or steps: 10000
  microbatches: 8         # rows of one optimizer step, over all drafters
  learning_rate: 6.0e-4

checkpoint:
  every: 500              # steps; `dflashctl stop` takes one more

pipeline:
  # `threads` feeds several drafter GPUs from several target GPUs in one process:
  #   {executor: threads, targets: 5, drafters: 3}
  executor: inline        # one device

evaluation:
  count: 20               # held-out prompts, decoded with and without the drafter
  compare_untrained: true
""")
