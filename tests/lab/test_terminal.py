"""What a person sees on a terminal: nothing of a container steers it, and waiting says for what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from laptop import Cli, Terminal

from orchestrator.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("stopped_after")]

# Clears, moves, retitles, asks the terminal to answer; and a colour, which may pass.
HOSTILE = r"a\033[2J\033[3A\033]0;owned\007\033[6n\033c\033[31mred\033[0m \033[?1049hb\n"
SCRIPT = f"printf '{HOSTILE}'; printf '{HOSTILE}' >&2; sleep 1; exit 3"
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


@pytest.fixture
def run_id(cli: Cli) -> str:
    """A failed run with such a log."""
    words = ("launch", "lab-201", "--no-push", "--wait", "--", "sh", "-c", SCRIPT)
    return cli(*words, code=1).stdout.splitlines()[0]


def shown(cli: Cli, *words: str) -> bytes:
    terminal = Terminal(cli, *words)
    terminal.exit_code()
    return terminal.seen


def test_no_verb_hands_a_logs_control_sequences_on(cli: Cli, run_id: str) -> None:
    for words in (("status",), ("diag",), ("tail", "-n", "9"), ("ps", "lab-201"), ("stop",)):
        cli.extra = {}
        piped = cli(*words)
        assert "\x1b" not in piped.stdout + piped.stderr
        assert words[0] == "ps" or "ared b" in piped.stdout
        for variables in ({"NO_COLOR": "1"}, {}):
            cli.extra = variables
            seen = shown(cli, *words)
            assert run_id.encode() in seen
            left = COLOUR.sub(b"", seen).replace(b"\r\x1b[K", b"")
            assert b"\x1b" not in left, seen
            assert not variables or not COLOUR.search(seen), seen


def test_a_command_shows_words_and_colours_on_a_terminal_and_all_bytes_in_a_pipe(cli: Cli) -> None:
    words = ("exec", "lab-201", "--", "printf", HOSTILE)
    assert "\x1b[2J" in cli(*words, code=0).stdout
    assert shown(cli, *words) == b"a\x1b[31mred\x1b[0m b\x1b[0m\r\n"
    cli.extra = {"NO_COLOR": "1"}
    assert shown(cli, *words) == b"ared b\r\n"


def test_whoever_waits_for_the_trainers_verdict_is_told_and_may_leave(
    cli: Cli, lab: Lab, code: Path
) -> None:
    (code / "config.yaml").write_text("x: 1\n")
    before = cli.run_ids("lab-200")
    # The trainer imports it first: a check that takes as long as a torch on a cold disk.
    (code / "argparse.py").write_text("import time; open('/tmp/waits', 'w'); time.sleep(60)\n")
    terminal = Terminal(
        cli, "launch", "lab-200", "--config", str(code / "config.yaml"), "--code", str(code)
    )
    terminal.until(b"lab-200: the trainer checks config.yaml there")
    terminal.type(b"\x03")
    assert terminal.exit_code() == 130
    assert b"Traceback" not in terminal.seen
    assert cli.run_ids("lab-200") == before
