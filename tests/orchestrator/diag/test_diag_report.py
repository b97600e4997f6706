"""How a finding's evidence is shown where it is longer than the line."""

from __future__ import annotations

from orchestrator.diag.finding import Finding, Quote, Report
from orchestrator.diag.report import render
from orchestrator.diag.text import Line
from trainer.telemetry import StepLine


def shown(text: str) -> list[str]:
    finding = Finding("code.error", "fatal", 0.9, "it failed", (Quote("log", 7, text),), "")
    lines = render(Report((finding,)), width=60).splitlines()
    return [line for line in lines if line.startswith("  │")]


def test_what_fits_two_lines_is_all_there_and_broken_between_words() -> None:
    words = "ValueError: tried to set a tensor of shape [8, 4096] where the other one has [8, 2048]"
    first, second = shown(words)
    assert first == "  │ log:7  ValueError: tried to set a tensor of shape [8,"
    assert second == "  │   4096] where the other one has [8, 2048]"


def test_of_a_longer_one_the_beginning_and_the_telling_end_are_there() -> None:
    first, second = shown(f"RuntimeError: began well, {'and went on ' * 20}and found no disk")
    assert first.startswith("  │ log:7  RuntimeError: began well, and went on")
    assert second.startswith("  │   … ") and second.endswith("went on and found no disk")
    assert max(map(len, (first, second))) <= 60


def test_a_word_longer_than_the_line_is_cut() -> None:
    first, second = shown("x" * 200)
    assert (len(first), len(second)) == (58, 60)


def test_a_record_of_metrics_is_quoted_as_the_line_that_the_trainer_prints() -> None:
    step = StepLine(step=960, steps=1500, loss=0.98747417, tau=2.94, gradient_norm=1.03697)
    record = step.model_copy(update={"tokens_per_s": 1214.06, "queue_depth": 0.2}).model_dump_json()
    quote = Quote.of(Line(49, record, "probe:metrics"))
    assert quote.text == (
        "step    960/1500 | loss 0.9875 | tau 2.94 | 1.2k tok/s | queue 0.2 | gradient 1.04"
    )
    torn = Quote.of(Line(50, record[:40], "probe:metrics"))
    assert torn.text == record[:40]
