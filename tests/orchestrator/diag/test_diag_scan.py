"""A long log is read once, in constant memory, and nothing that a rule knows is lost on the way."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.diag import Evidence, diagnose, scan

CASES = Path(__file__).parent / "cases"


@cache
def filler(count: int, first: int = 0) -> bytes:
    lines = (
        f"step {i:>8}/9999999 | loss {2 + 7 / (1 + i / 900):.4f} | acc 0.1 | tau 1.20 | "
        f"lr 6.00e-04 | {15 + i % 7 / 10:.1f}k tok/s | 37.3 GB"
        for i in range(first, first + count)
    )
    return ("\n".join(lines) + "\n").encode()


def test_a_small_log_is_kept_whole() -> None:
    scanned = scan.scan_bytes(b"one\ntwo\n\nfour")

    assert scanned.whole
    assert scanned.lines == {1: b"one", 2: b"two", 3: b"", 4: b"four"}
    assert scanned.total == 4


def test_a_long_log_keeps_few_lines_and_counts_all() -> None:
    scanned = scan.scan_bytes(filler(30_000))

    assert not scanned.whole
    assert scanned.total == 30_000
    assert len(scanned.lines) < 6_000
    assert {1, 30_000} <= set(scanned.lines)


def test_line_numbers_stay_those_of_the_file() -> None:
    data = filler(12_000) + b"RuntimeError: CUDA error: misaligned address\n" + filler(12_000)

    scanned = scan.scan_bytes(data)

    assert scanned.lines[12_001] == b"RuntimeError: CUDA error: misaligned address"
    assert data.split(b"\n")[11_999] == scanned.lines[12_000]


def test_a_telling_line_keeps_its_neighbourhood_across_pieces() -> None:
    before, after = filler(20_000), filler(20_000, 20_000)
    trace = b"Traceback (most recent call last):\n" + b"".join(
        b'  File "/w/a.py", line %d, in f\n    g()\n' % i for i in range(10)
    )
    data = before + trace + b"ValueError: odd\n" + after
    cut = len(before) + len(trace) // 2

    scanned = scan.scan_chunks([data[:cut], data[cut:]])

    first = 20_001
    assert all(first + i in scanned.lines for i in range(22))


def test_the_same_warning_ten_thousand_times_does_not_fill_memory() -> None:
    line = b"W0301 10:00:%02d.1 7 x.py:1] warning: queue is slow, waited %d s\n"
    data = b"".join(line % (i % 60, i) for i in range(120_000))

    scanned = scan.scan_bytes(data)

    assert len(scanned.lines) < 8_000
    assert sum(scanned.counts.values()) == 120_000


def test_a_line_without_end_is_cut() -> None:
    scanned = scan.scan_bytes(b"\rbar " * 2_000_000)

    assert all(len(line) <= scan.CHUNK for line in scanned.lines.values())
    assert sum(map(len, scanned.lines.values())) < 3_100 * scan.MAX_LINE


def test_work_grows_with_the_log_and_not_with_its_square() -> None:
    def work(lines: int) -> int:
        mixed = (b"%d error of kind %s\n" % (i, b"abcdefg" * (i % 40)) for i in range(lines))
        return scan.scan_bytes(b"".join(mixed)).work

    assert work(96_000) <= 2.5 * work(48_000)


LONG = filler(10_200)
EMBEDDED = ["gpu-oom-own", "fx-race-three-drafters", "data-parquet-magic", "tmux-sighup"]


@pytest.mark.parametrize(
    "name", [EMBEDDED[0], *(pytest.param(one, marks=pytest.mark.slow) for one in EMBEDDED[1:])]
)
def test_a_case_behind_a_long_run_is_named_like_the_short_one(name: str) -> None:
    case = CASES / name
    expected = json.loads((case / "expect.json").read_text())["code"]
    probes = case / "probes.json"
    values = json.loads(probes.read_text()) if probes.is_file() else None
    long = LONG + b"== restarted, attempt 2\n" + (case / "log.txt").read_bytes()

    report = diagnose(Evidence.from_text(long, values))

    assert report.findings[0].code == expected


PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 3, in main',
        "    loss()",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "[rank3]: ",
        "\r 50%|###",
        "step 10/100 | loss 2.0 | 15.2k tok/s",
        "{'loss': nan, 'epoch': 0.1}",
        '{"step": 1e400}',
        "\x1b[31m",
        "  | ",
        "  +-+---------------- 1 ----------------",
        "done",
        "Killed",
        "\x00",
        "The above exception was the direct cause of the following exception:",
        "ValueError:",
        "E0301 10:00:00.000000 4 api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 2)",
        "[E301 25:99:99.1 x.cpp:1] Rank 5] Watchdog caught collective operation timeout: WorkNCCL(",
        "idle t 1% d 99% | queue 0.0",
        "no step for 700 s",
        "\ufeff",
        "世界 ✓",
        "torch._dynamo hit",
        "\t",
        "Exception in thread drafter-1:",
        "resumed from step 3",
        "attempt 2",
        "\u2028",
        "::",
    ]
)
LOGS = st.lists(st.one_of(PIECES, st.text(max_size=40)), max_size=60).map("\n".join)
PROBES = st.dictionaries(
    st.sampled_from(
        [
            *("df", "ps", "now", "dmesg", "exit_record", "tmux", "boot_id", "py_spy", "x", "ct"),
            *("changes", "nccl_flight", "stacks_1", "events", "metrics", "host_dmesg", "env_drift"),
            *("host_gpus", "run_gpus", "predecessor", "ps_host", "ls_dev"),
        ]
    ),
    st.one_of(
        st.none(),
        st.integers(),
        st.text(max_size=80),
        st.lists(PIECES, max_size=6).map("\n".join),
        st.lists(st.text(max_size=9), max_size=3),
        st.dictionaries(
            st.sampled_from(["code", "signal", "now", "entries", "pipestatus"]),
            st.one_of(st.none(), st.integers(-9, 300), st.text(max_size=9)),
        ),
    ),
    max_size=5,
)


@given(LOGS, PROBES)
@examples(40)
def test_no_text_breaks_it(log: str, probes: dict[str, object]) -> None:
    report = diagnose(Evidence.from_text(log.encode("utf-8", "surrogatepass"), probes))

    json.dumps(report.as_dict())
    assert report.healthy == (not any(f.severity != "info" for f in report.findings))


@given(st.binary(max_size=400))
@examples(40)
def test_no_bytes_break_it(data: bytes) -> None:
    diagnose(Evidence.from_text(data, {}))


@given(st.lists(st.binary(max_size=300), max_size=12))
@examples(40)
def test_pieces_make_no_difference(pieces: list[bytes]) -> None:
    assert scan.scan_chunks(pieces).lines == scan.scan_bytes(b"".join(pieces)).lines
