"""While the trainer judges a config the person at the laptop is told what is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import trainer_check
from orchestrator.errors import RefusedError
from orchestrator.inventory import ContainerSettings, Host
from orchestrator.request import Request
from orchestrator.target import HostTarget, Target


class Clock(threading.Event):
    """Nothing passes but the answers that were given."""

    def __init__(self, *answers: bool) -> None:
        super().__init__()
        self.answers: Iterator[bool] = iter(answers)

    def wait(self, timeout: float | None = None) -> bool:
        return next(self.answers)


def told(*answers: bool) -> list[str]:
    notices: list[str] = []
    trainer_check._tell_waiting(Clock(*answers), "a: the trainer checks c.yaml", notices.append)
    return notices


def test_a_quick_verdict_needs_no_word() -> None:
    assert told(True) == []


def test_torch_is_named_first() -> None:
    (only,) = told(False, True)
    assert "importing torch" in only


def test_a_long_silence_is_explained_again_and_again() -> None:
    _, *later = told(False, False, False, True)
    assert ["21 s" in later[0], "41 s" in later[1]] == [True, True]
    assert all("hub" in words and "Ctrl-C" in words for words in later)


class Answered:
    """A channel on which the command has already written to its error output, and ended."""

    def __init__(self, words: bytes, **ending: Any) -> None:
        self.words, self.ending = words, {"exit_code": None, "signal": None, "timed_out": False}
        self.ending |= ending

    def request(self, op: str, **fields: Any) -> Request:
        request = Request(1, op, lambda head, payload: None)
        request.accept({"stream": "stderr"}, self.words)
        request.finish(self.ending)
        return request


def test_a_check_that_was_killed_is_no_fault_of_the_config() -> None:
    target = Target(
        name="a", host=HostTarget(name="pve", settings=Host()), ct=200, settings=ContainerSettings()
    )
    channel: Any = Answered(b"UserWarning: slow tokenizer\n", signal=9)
    with pytest.raises(RefusedError) as told:
        trainer_check.check(channel, target, "c.yaml", {}, None, lambda text: None)
    assert told.value.what == "`trainer check c.yaml` was ended by signal 9"
    assert "memory" in told.value.next_step and "dflashctl doctor a" in told.value.next_step
