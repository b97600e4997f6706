"""Which finding is the cause, which its effect; what a report says and with what code it exits."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.diag import Finding, Report
from orchestrator.diag.codes import CODES
from orchestrator.diag.finding import Quote
from orchestrator.diag.ranking import EFFECT_OF, explains, ranked
from orchestrator.diag.report import render


def finding(code: str, position: int = 10, severity: str = "fatal") -> Finding:
    quote = Quote("log", position or None, f"{code} at {position}")
    made = Finding(code, "fatal", 0.9, f"title of {code}", (quote,), "do this", position)
    return replace(made, severity=severity)  # type: ignore[arg-type]


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [f.code for f in findings]


def test_only_known_codes_are_ordered() -> None:
    assert set(EFFECT_OF) <= set(CODES)


def test_a_cause_holds_its_effects() -> None:
    report = ranked(
        [finding("nccl.timeout", 90), finding("disk.full", 20), finding("exit.masked", 0)]
    )

    assert codes(report) == ["disk.full"]
    assert codes(report[0].consequences) == ["exit.masked", "nccl.timeout"]


def test_an_effect_long_before_its_alleged_cause_is_none() -> None:
    first, later = finding("loss.nan", 100), finding("gpu.illegal_access", 5000)

    assert not explains(later, first)
    assert explains(replace(later, position=90), first)


def test_first_in_time_wins_among_equals() -> None:
    report = ranked([finding("data.format", 300), finding("gpu.oom", 20)])

    assert codes(report) == ["gpu.oom", "data.format"]


def test_what_goes_before_that() -> None:
    assert codes(ranked([finding("run.hang", 5), finding("data.format", 300)]))[0] == "data.format"


def test_a_slower_run_is_not_slower_because_tmux_ended() -> None:
    assert not explains(finding("tmux.died", 0, "warning"), finding("throughput.collapse", 0))


def test_a_remark_explains_nothing() -> None:
    report = ranked([finding("gpu.oom", 5, "info"), finding("code.error", 50)])

    assert codes(report) == ["code.error", "gpu.oom"]


def test_a_warning_that_ended_in_death_is_fatal() -> None:
    (cause,) = ranked([finding("compile.eager_fallback", 5, "warning"), finding("gpu.oom", 50)])

    assert cause.severity == "fatal"
    assert codes(cause.consequences) == ["gpu.oom"]


def test_an_explained_exception_is_evidence_and_no_symptom() -> None:
    (cause,) = ranked([finding("code.error", 20), finding("hub.auth", 20)])

    assert cause.code == "hub.auth"
    assert cause.consequences == ()


def test_two_findings_of_one_code_are_one() -> None:
    report = ranked([finding("code.error", 20), finding("code.error", 30)])

    assert len(report) == 1
    assert [q.line for q in report[0].evidence] == [20, 30]


def test_exit_code_and_health() -> None:
    assert (Report().healthy, Report().exit_code) == (True, 0)
    warned = Report((finding("loss.stuck", 1, "warning"),))
    assert (warned.healthy, warned.exit_code) == (False, 0)
    assert Report((finding("gpu.oom", 1),)).exit_code == 1
    assert Report((finding("gpu.oom", 1, "info"),)).healthy


def test_json_has_the_stable_keys() -> None:
    data = Report((finding("gpu.oom", 7),)).as_dict()

    assert data == {
        "findings": [
            {
                "code": "gpu.oom",
                "severity": "fatal",
                "confidence": 0.9,
                "title": "title of gpu.oom",
                "evidence": [{"source": "log", "line": 7, "text": "gpu.oom at 7"}],
                "remedy": "do this",
                "consequences": [],
            }
        ],
        "healthy": False,
    }


def test_the_text_fits_eighty_columns_and_names_everything() -> None:
    long = replace(
        finding("gpu.oom", 7),
        title="t" * 30 + " " + "word " * 40,
        evidence=(Quote("probe:df", 2, "x" * 500), Quote("log", 7, "y")),
    )
    text = render(Report((replace(long, consequences=(finding("run.hang", 9),)),)))

    assert max(map(len, text.splitlines())) <= 80
    for part in ("FATAL gpu.oom", "df:2", "log:7", "do this", "therefore run.hang"):
        assert part in text
    assert "\x1b" not in text


def test_the_prose_of_a_remedy_is_wrapped_and_its_commands_are_whole() -> None:
    prose = "what does the odd one wait for: a lock, a queue, a disk (state D), a collective?"
    command = "dmesg -T | grep -i xid; nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT | less"
    steps = replace(finding("run.hang"), remedy=f"{prose}\n{command}")

    lines = render(Report((steps,))).splitlines()

    assert [line for line in lines if len(line) > 80] == [f"    {command}"]
    assert "    collective?" in lines


def test_colour_is_asked_for() -> None:
    assert "\x1b[31;1mFATAL gpu.oom" in render(Report((finding("gpu.oom"),)), colour=True)


def test_health_is_said() -> None:
    text = render(Report((finding("gpu.oom", 3, "info"),)))

    assert text.startswith("Nothing wrong was found.")
    assert "For the record" in text
