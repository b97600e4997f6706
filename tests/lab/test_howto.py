"""Every command that a how-to shows is run in the lab, in the page's order, and ends as it should.

Whatever stands in a block and cannot run here is listed in ``NOT_HERE`` with the reason. Anything
else that is added to a page is run, and so fails until it works or is listed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from laptop import ROOT, Cli

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
SEVERAL = ROOT / "docs" / "howto" / "several-nodes.md"

NO_INDEX = "installs from an index; the lab's containers have no way out"
NO_GPU = "needs an NVIDIA driver"
OWN_LAB = "the user's own lab; tests/lab/test_lab_cli.py runs these verbs on another"
TRAINS = "trains for minutes: `make demo`, test_multi_node_training.py and test_playbook.py do"
PROXMOX = "a Proxmox host's own files and commands"
NO_COMMAND = "shows a file or an output, not a command"
SERVER = "a server's own command, not installed here"

NOT_HERE = {
    r"apt-get install|pip install|pipx install|-m pip|env sync train-b --lock good.json$": NO_INDEX,
    r"nvidia|NVIDIA": NO_GPU,
    r"^pct set|^lxc\.|^echo nvidia": PROXMOX,
    r"^dflashctl lab |--no-push --follow -- uname": OWN_LAB,
    r"play (resume|bring-up|export.yaml) (?!.*--check)|--config train.yaml --follow": TRAINS,
    r"launch train-a train-b --config nodes.yaml": TRAINS,
    r"^-?-?step +\d": NO_COMMAND,
    r"sglang|^vllm|^'\{|^--speculative|^dflash generate": SERVER,
    r"trainer export": "needs a trained checkpoint; tests/trainer/test_drafter_format.py exports",
    r"^python -m trainer tra": "a program that compiles; tests/trainer/test_traced.py has one",
    r"^dflashctl attach": "takes the terminal; tests/lab/test_attach.py lends one",
    r"py-spy dump|kill -USR1": "needs a live trainer; tests/lab/test_diag_inside.py has one",
    r"^ssh root@": "OpenSSH by hand; tests/lab/test_audit.py reads the file",
    r"^export ": "sets a variable of the shell that reads it",
}

EXIT_CODES = {
    "dflashctl env diff train-a train-b": 1,  # the second has no torch, which breaks
    "dflashctl inventory check": 4,  # discover has found the container that is stopped
}
"""Where it is not 0."""

RUN = """
cd $DFLASH_RUN_DIR
mkdir -p checkpoints/step-00000500/drafter
echo '{}' | tee checkpoints/step-00000500/state.json > checkpoints/step-00000500/drafter/config.json
ln -s step-00000500 checkpoints/best
for n in 1 2 3; do
  echo '{"time": '$n', "step": '$n', "steps": 3, "loss": 8.0, "tokens": 100, "tokens_per_s": 900}' \
    >> metrics.jsonl
  echo "step $n/3 | loss 8.0 | 0.9k tok/s"
done
"""


def commands(page: Path) -> list[str]:
    """The lines of a page's blocks, those that go on joined; YAML is checked by test_docs.py."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    lines = re.findall(r"^ {4,}(\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [re.sub(r"\s+# .*$", "", line).strip() for line in lines]


def to_run(page: Path) -> list[str]:
    return [c for c in commands(page) if not any(re.search(words, c) for words in NOT_HERE)]


@dataclass
class Desk:
    """A folder with an inventory as the pages have it, and two runs that ended."""

    cli: Cli
    folder: Path
    before: str
    now: str

    def filled_in(self, command: str) -> str:
        for word, value in {
            "RUN_BEFORE": self.before,
            "RUN_NOW": self.now,
            r"runs/RUN\b": f"runs/{self.now}",
            r"\bRUN\b": self.now,
            r"big-n[01]-[0-9a-f-]+": self.now,
            r"root@10\.1\.2\.6": "pve1",
            r"\bURL\b": "http://127.0.0.1:9/",
        }.items():
            command = re.sub(word, value, command)
        return command


@pytest.fixture(scope="module")
def prepared(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Desk]:
    """A desk whose second run was in these containers: made once, to be copied."""

    @cache
    def make(*second: str) -> Desk:
        place = tmp_path_factory.mktemp("desk")
        cli = Cli.at_home(place / "home", lab.inventory)
        known = yaml.safe_load(lab.inventory.read_text())
        own = {
            "hosts": {"pve1": known["hosts"]["lab"]},
            "containers": {
                name: {**known["containers"][f"lab-{ct}"], "host": "pve1", "groups": ["train"]}
                for name, ct in (("train-a", 200), ("train-b", 201))
            },
        }
        path = cli.home / ".config" / "dflashctl" / "inventory.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(own))
        cli.extra = {"DFLASHCTL_INVENTORY": ""}
        folder = place / "project"
        folder.mkdir()
        cli("init", "--host", "pve1", "--ct", "200", "--model", "m", cwd=folder, code=0)
        (folder / "start_training.sh").write_text(RUN)
        (folder / "secrets.env").write_text("TOKEN=hush\n")
        (folder / "train.py").write_text("print('mine')\n")
        words = ("--name", "night", "--wait")
        ids = [
            cli("launch", *targets, *words, cwd=folder, code=0).stdout.split()[0]
            for targets in (("train-a",), second)
        ]
        return Desk(cli, folder, *ids)

    return make


@pytest.fixture
def desk(page: Path, prepared: Callable[..., Desk], cli: Cli, tmp_path: Path) -> Desk:
    made = prepared("train-a", "train-b") if page == SEVERAL else prepared("train-a")
    shutil.copytree(made.cli.home, cli.home, dirs_exist_ok=True)
    cli.extra = {"DFLASHCTL_INVENTORY": ""}
    return replace(made, cli=cli, folder=shutil.copytree(made.folder, tmp_path / "project"))


@pytest.mark.parametrize("page", [p for p in PAGES if to_run(p)], ids=lambda page: page.stem)
def test_every_command_of_the_page_runs(page: Path, desk: Desk) -> None:
    for command in to_run(page):
        shown = desk.filled_in(command)
        program = f"dflashctl() {{ '{sys.executable}' -m orchestrator.cli \"$@\"; }}\n{shown}"
        done = subprocess.run(
            ["bash", "-c", program],
            cwd=desk.folder,
            env=desk.cli.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        said = f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, said
        assert done.returncode == EXIT_CODES.get(command, 0), said


def test_every_reason_still_has_its_command() -> None:
    every = [command for page in PAGES for command in commands(page)]
    unused = [words for words in NOT_HERE if not any(re.search(words, c) for c in every)]
    assert unused == []
    assert set(EXIT_CODES) <= set(every)
