"""While the trainer judges a config the person at the laptop is told what is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from orchestrator import trainer_check


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
