"""The advice for an exception is of its kind, and an error names the option that was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.diag import Evidence, Finding, diagnose
from orchestrator.diag.cli import read_saved
from orchestrator.errors import NotFoundError, UsageError

TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/workspace/train.py", line 51, in main\n'
    "    loss = step(row['label'])\n"
)
ON_THE_CPU = "run one step on the CPU"


def raised(last: str) -> Finding:
    record = {"exit_code": 1, "signal": None, "reason": "failed"}
    found = diagnose(Evidence.from_text(f"{TRACE}{last}\n", {"exit_record": record}))
    assert found.findings[0].code == "code.error"
    return found.findings[0]


@pytest.mark.parametrize(
    ("last", "advice"),
    [
        ("KeyError: 'label'", "print the keys there"),
        ("KeyError: 'cuda'", "print the keys there"),
        ("AttributeError: 'NoneType' object has no attribute 'loss'", "is it None"),
        ("IndexError: list index out of range", "the length and the index"),
        ("NameError: name 'stpe' is not defined", "a slip in the code"),
        ("ZeroDivisionError: division by zero", "print the divisor"),
        ("OSError: [Errno 24] Too many open files: 'x'", "ulimit -n 65536"),
        ("RuntimeError: the schedule has no stage 3", "that line raised it"),
    ],
)
def test_an_exact_traceback_is_not_sent_to_the_cpu(last: str, advice: str) -> None:
    remedy = raised(last).remedy
    assert "open /workspace/train.py at line 51" in remedy
    assert advice in remedy
    assert ON_THE_CPU not in remedy


def test_an_error_that_is_noticed_late_is_sought_on_the_cpu() -> None:
    last = "RuntimeError: Function 'MulBackward0' returned an invalid gradient at index 1"
    assert ON_THE_CPU in raised(last).remedy


def test_a_file_that_does_not_parse_is_opened_not_asked_for_help() -> None:
    record = {"exit_code": 1, "signal": None, "reason": "failed"}
    log = "  File \"/workspace/train.py\", line 7\n    if x\n        ^\nSyntaxError: expected ':'\n"
    found = diagnose(Evidence.from_text(log, {"exit_record": record})).findings[0]
    assert found.code == "code.error"
    assert "/workspace/train.py" in f"{found.title} {found.remedy}"
    assert "--help" not in found.remedy


@pytest.mark.parametrize("option", ["--from", "--log", "--probes"])
def test_a_missing_file_is_told_in_the_words_that_were_typed(option: str, tmp_path: Path) -> None:
    (tmp_path / "run.tar.gz").touch()
    given = {option: tmp_path / "rum.tar.gz"}
    with pytest.raises(NotFoundError) as told:
        read_saved(given.get("--log"), given.get("--probes"), given.get("--from"))
    assert told.value.what.startswith(f"{option} {tmp_path}/rum.tar.gz: no such file")
    assert f"did you mean {tmp_path}/run.tar.gz?" in told.value.what


@pytest.mark.parametrize("option", ["--from", "--log", "--probes"])
def test_a_folder_is_called_one(option: str, tmp_path: Path) -> None:
    given = {option: tmp_path}
    with pytest.raises(NotFoundError, match="that is a folder"):
        read_saved(given.get("--log"), given.get("--probes"), given.get("--from"))


def test_an_empty_log_is_not_a_healthy_run(tmp_path: Path) -> None:
    (tmp_path / "train.log").touch()
    with pytest.raises(UsageError, match="is empty"):
        read_saved(tmp_path / "train.log")


def test_a_log_given_as_a_bundle_is_sent_to_the_right_option(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1/2\n")
    with pytest.raises(UsageError) as told:
        read_saved(None, None, tmp_path / "train.log")
    assert "--bundle" not in told.value.what
    assert "a saved log goes to --log" in told.value.next_step


@pytest.mark.parametrize(
    ("code", "words"), [(127, "did not find a command"), (126, "could not execute"), (3, "")]
)
def test_a_shells_own_exit_code_without_a_word(code: int, words: str) -> None:
    record = {"exit_code": code, "signal": None, "reason": "failed"}

    log = f"[dflashctl] failed, exit code {code}\n"
    (finding,) = diagnose(Evidence.from_text(log, {"exit_record": record})).findings

    assert finding.code == "unknown"
    assert words in finding.remedy
    assert ("a shell's" in finding.remedy) is bool(words)


def test_a_programs_own_reason_and_advice_are_repeated() -> None:
    log = (
        "step 1/9 | loss 8.1 | 15.1k tok/s\n"
        "error: drafter.block_size: 1 is too small\n"
        "  it came from train.yaml\n"
        "  next: set it to 8 or 16\n"
        "[dflashctl] failed, exit code 2\n"
    )
    record = {"exit_code": 2, "signal": None, "reason": "failed"}

    (finding,) = diagnose(Evidence.from_text(log, {"exit_record": record})).findings

    assert (finding.code, finding.severity) == ("run.refused", "fatal")
    assert finding.title == "drafter.block_size: 1 is too small"
    assert finding.remedy == "set it to 8 or 16"


def test_a_reason_of_an_earlier_attempt_or_of_a_run_that_ended_well_is_none() -> None:
    word = "a\nb\nc\nerror: drafter.block_size: 1 is too small\n"
    again = "[dflashctl] attempt 1 failed, exit code 2; attempt 2 begins in 5 s anew\n"
    record = {"exit_code": 3, "signal": None, "reason": "failed"}
    well = {"exit_code": 0, "signal": None, "reason": "finished"}

    later = Evidence.from_text(word + again + "bye\n", {"exit_record": record})

    assert [f.code for f in diagnose(later).findings] == ["unknown"]
    assert not diagnose(Evidence.from_text(word + "bye\n", {"exit_record": well})).findings


def test_a_rank_that_only_heard_of_a_timeout_has_not_waited() -> None:
    waited = (
        "[rank{0}]:[E1112 04:18:07.331204 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=9121, OpType=ALLREDUCE, Timeout(ms)=600000)"
        " ran for 600021 milliseconds before timing out.\n"
    )
    heard = (
        "[rank2]:[E1112 04:18:07.555012 ProcessGroupNCCL.cpp:1682] [PG ID 0 Rank 2] Observed "
        "flight recorder dump signal from another rank via TCPStore.\n"
    )
    log = "".join(waited.format(rank) for rank in (0, 1, 3)) + heard

    assert diagnose(Evidence.from_text(log)).findings[0].title.endswith("; rank 2 never arrived")


def test_the_numbers_of_a_message_that_a_pager_broke() -> None:
    log = (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 1 "
        "has\n[rank0]: another's line, of which 9.00 GiB is free\n[rank1]: a total capacity of "
        "79.11 GiB of which 1.61 GiB is free.\n"
    )

    title = diagnose(Evidence.from_text(log)).findings[0].title

    assert title == "CUDA ran out of memory: 3.00 GiB asked for, 1.61 GiB free"


def test_a_host_name_without_an_address_is_the_ranks_meeting_place() -> None:
    """torchrun on one node meets at the machine's own name; /etc/hosts may lack it."""
    log = (
        "[W1130 07:38:01.227797668 socket.cpp:764] [c10d] The IPv6 network addresses of (ct200, "
        "35215) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).\n"
    )

    (finding,) = diagnose(Evidence.from_text(log * 9)).findings

    assert (finding.code, len(finding.evidence)) == ("dist.rendezvous", 2)
    assert finding.title.endswith("nothing resolves the host name ct200")
    assert "127.0.1.1 ct200" in finding.remedy and "ss -ltnp" not in finding.remedy


def test_an_exception_of_one_rank_names_the_rank() -> None:
    """As torchrun's two ranks wrote it: the other one lost its peer, and is no cause."""
    log = (Path(__file__).parent / "cases" / "rank-raised-gloo-peer-lost" / "log.txt").read_text()

    found = diagnose(Evidence.from_text(log)).findings[0]

    assert found.title.startswith("KeyError: 12 on rank 1  (")
    assert [effect.code for effect in found.consequences] == ["nccl.peer_lost"]


@pytest.mark.parametrize(
    ("listed", "title"),
    [
        ("1 ? Ss init\n88 ? Ss tmux: server\n", "socket is gone"),
        ("timed out", "or its server is gone"),
    ],
)
def test_a_process_list_that_was_not_read_clears_no_server(listed: str, title: str) -> None:
    probes = {
        "tmux": "no server running on /tmp/tmux-0/default",
        "ps": listed,
        "run_state": "training",
    }

    (finding,) = diagnose(Evidence.from_text("step 8/400 | loss 8.1\n", probes)).findings

    assert finding.code == "tmux.socket_lost" and title in finding.title
    assert finding.confidence == (0.9 if "tmux" in listed else 0.6)
