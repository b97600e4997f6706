"""Lines, tracebacks, step lines and probes as they are really printed."""

from __future__ import annotations

import math

import pytest

from orchestrator.diag import Evidence, steps, tracebacks
from orchestrator.diag.probes import Probes
from orchestrator.diag.text import Line, overlays, parse_time, read_line, read_lines


def lines(text: str) -> list[Line]:
    return [li for n, raw in enumerate(text.split("\n"), 1) for li in read_lines(n, raw)]


@pytest.mark.parametrize(
    ("raw", "rank", "text"),
    [
        ("[rank3]: ValueError: x", 3, "ValueError: x"),
        ('[rank3]:   File "a.py", line 1', 3, '  File "a.py", line 1'),
        ("[default7]:loss", 7, "loss"),
        ("[1,5]<stderr>:oops", 5, "oops"),
        ("2026-01-02 03:04:05,678 [rank2]: hello", 2, "hello"),
        ("\x1b[31m[rank1]:\x1b[0m red", 1, "red"),
        ("rank 4: leaving", 4, "leaving"),
    ],
)
def test_rank_prefixes(raw: str, rank: int, text: str) -> None:
    line = read_line(1, raw)

    assert (line.rank, line.text) == (rank, text)


def test_a_glog_header_gives_place_and_time() -> None:
    line = read_line(1, "E0301 10:02:03.557000 44 torch/distributed/elastic/api.py:874] failed")

    assert (line.where, line.text) == ("torch/distributed/elastic/api.py:874", "failed")
    assert line.day_time == 10 * 3600 + 2 * 60 + 3


def test_c10d_header_keeps_the_rank_inside() -> None:
    raw = "[rank0]:[E518 13:10:00.287172474 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught"

    assert read_line(1, raw).rank == 0


@pytest.mark.parametrize(
    "raw",
    [
        "+ python train.py --on-oom abort",
        "$ make train",
        "--max-oom-retries 3",
        "args: oom=retry",
        "[cfg] on_nan=stop",
        "NCCL_DEBUG=WARN",
        "export CUDA_VISIBLE_DEVICES=",
        "Namespace(a='OOM')",
        "torchrun --nnodes 2 train.py",
        "# CUDA out of memory means",
        "TrainingArguments(output=1,",
    ],
)
def test_flags_and_configs_are_quiet(raw: str) -> None:
    assert read_line(1, raw).quiet


@pytest.mark.parametrize(
    "raw",
    [
        "RuntimeError: CUDA error: x",
        "bash: line 1: torchrun: command not found",
        "Killed",
        "start_training.sh: line 9: torchrun: command not found",
        "loss nan",
        "ConfigError: bad",
    ],
)
def test_events_are_not_quiet(raw: str) -> None:
    assert not read_line(1, raw).quiet


def test_a_bar_is_its_last_piece() -> None:
    assert overlays("\r 1%|#  | 1/9\r 2%|## | 2/9\rTraceback x") == [" 2%|## | 2/9", "Traceback x"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-09-07 00:01:24", 1788739284.0),
        ("2026-09-07T00:01:24Z", 1788739284.0),
        ("Mon Sep  7 00:01:24 UTC 2026", 1788739284.0),
        ("Mon 07 Sep 2026 12:01:24 AM UTC", 1788739284.0),
        ("1788739284", 1788739284.0),
    ],
)
def test_dates(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


CHAINED = """Traceback (most recent call last):
  File "/w/a.py", line 3, in f
    g()
ValueError: inner

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/w/b.py", line 9, in main
    f()
  File "/opt/venv/lib/python3.12/site-packages/x/y.py", line 1, in lib
RuntimeError: outer
second line of it"""


def test_a_chain_has_its_cause_and_the_users_frame() -> None:
    first, last = tracebacks.parse(lines(CHAINED))

    assert last.root is first and first.inner
    assert last.message == "outer\nsecond line of it"
    frame = last.user_frame
    assert frame is not None and (frame.file, frame.line, frame.code) == ("/w/b.py", 9, "f()")


def test_interleaved_ranks_are_told_apart() -> None:
    text = "\n".join(
        f"[rank{r}]: {part}"
        for part in ("Traceback (most recent call last):", '  File "/w/a.py", line 3, in f')
        for r in (0, 1)
    )
    text += "\n[rank1]: KeyError: 'b'\n[rank0]: KeyError: 'a'"

    found = tracebacks.parse(lines(text))

    assert [(f.line.rank, f.message, len(f.frames)) for f in found] == [
        (1, "'b'", 1),
        (0, "'a'", 1),
    ]


def test_an_exception_group_shows_its_parts() -> None:
    text = """  + Exception Group Traceback (most recent call last):
  |   File "/w/a.py", line 3, in main
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/b.py", line 5, in task
    |     open(p)
    | FileNotFoundError: [Errno 2] No such file or directory: 'x.jsonl'
    +------------------------------------"""

    assert [f.name for f in tracebacks.parse(lines(text))] == [
        "ExceptionGroup",
        "FileNotFoundError",
    ]


def test_a_workers_own_traceback_is_the_cause() -> None:
    text = """Traceback (most recent call last):
  File "/w/t.py", line 3, in main
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/w/data.py", line 44, in __getitem__
    return int(x)
ValueError: invalid literal for int()
"""

    outer, inner = tracebacks.parse(lines(text))

    assert outer.cause is inner and inner.inner


def test_threads_rich_boxes_and_terminate() -> None:
    text = """Exception in thread drafter-1 (run):
Traceback (most recent call last):
  File "/w/t.py", line 3, in run
KeyError: 'x'
╭─────── Traceback (most recent call last) ───────╮
│ /w/b.py:24 in launch                            │
╰──────────────────────────────────────────────────╯
RuntimeError: boxed
terminate called after throwing an instance of 'c10::Error'
  what():  bad file"""

    found = tracebacks.parse(lines(text))

    assert found[0].thread == "drafter-1"
    assert found[1].frames[0].line == 24
    assert (found[2].type, found[2].message) == ("c10::Error", "bad file")


def test_what_is_ignored_at_exit_is_no_error() -> None:
    text = "Exception ignored in: <function f>\n" + CHAINED.split("\n\n")[0]

    assert [f.ignored for f in tracebacks.parse(lines(text))] == [True]
    assert Evidence.from_text(text).errors == []


@pytest.mark.parametrize(
    ("raw", "step", "rate", "loss"),
    [
        ("step     10/400 | loss 8.0315 | acc 0.040 | 15.5k tok/s | 37.3 GB", 10, 15500, 8.0315),
        ('{"step": 60, "loss": 2.5, "tok_s": 15441}', 60, 15441, 2.5),
        ("{'loss': 3.02, 'grad_norm': 1.3, 'epoch': 0.03}", None, None, 3.02),
        ("{'loss': '3.02', 'grad_norm': '1.3', 'epoch': '0.03'}", None, None, 3.02),
        ("iter 100: loss 2.3000, time 500.00ms, mfu 30.00%", 100, 2.0, 2.3),
        ("[titan] step: 10  loss:  9.8  memory: 37.70GiB(47%)  tps: 7,512  mfu: 9%", 10, 7512, 9.8),
        (
            " iteration  100/ 500 | elapsed time per iteration (ms): 250.0 | lm loss: 6.2E+00 |",
            100,
            4.0,
            6.2,
        ),
        ("Epoch 0:  6%|  | 32/500 [02:40<39:15,  2.00it/s, loss=2.6, v_num=9]", 32, 2.0, 2.6),
        (
            "2026-01-01 10:00:00,123 INFO loop.py:211 step=30 loss=4.85 gn=0.7 dt=0.500s",
            30,
            2.0,
            4.85,
        ),
        ("[step 41] 25.0 s", 41, 0.04, None),
    ],
)
def test_step_lines_of_many_trainers(
    raw: str, step: int | None, rate: float | None, loss: float | None
) -> None:
    read = steps.read_step(read_line(1, raw))

    assert read is not None
    assert (read.step, read.rate, read.loss) == (step, pytest.approx(rate) if rate else None, loss)


def test_our_line_gives_idle_shares_and_queue() -> None:
    read = steps.read_step(
        read_line(1, "step 10/400 | loss nan | 15.5k tok/s | idle t 3% d 40% | queue 0.4")
    )

    assert read is not None and read.loss is not None and math.isnan(read.loss)
    assert (read.target_idle, read.drafter_idle, read.queue) == (0.03, 0.40, 0.4)


@pytest.mark.parametrize(
    "raw", ["eval: step 10 val_loss 3.0", "loading step 3", "queue 3", "--loss 3 step 4"]
)
def test_what_is_no_step(raw: str) -> None:
    assert steps.read_step(read_line(1, raw)) is None


def test_a_restart_is_a_counter_that_falls_back() -> None:
    text = "\n".join(f"step {i}/99 | loss 1.0" for i in (1, 2, 3, 4, 2, 3, 4, 5))

    assert steps.read_series(lines(text)).restarts() == [5]


def test_threads_that_print_out_of_order_are_no_restart() -> None:
    text = "\n".join(f"step {i}/99 | loss 1.0" for i in (1, 2, 4, 3, 5, 6))

    assert steps.read_series(lines(text)).restarts() == []


def test_tables_are_found_under_any_name() -> None:
    probes = Probes(
        {
            "whatever": "Filesystem Size Used Avail Use% Mounted on\n/dev/sda1 98G 98G 0 100% /w",
            "other": "crw-rw-rw- 1 root root 195,   0 Sep 1 /dev/nvidia0\n"
            "-rw-r--r-- 1 root root 0 Sep 1 /dev/nvidia-uvm",
            "more": "Character devices:\n  1 mem\n195 nvidia\n510 nvidia-uvm",
        }
    )

    assert [(m.path, m.percent) for m in probes.mounts] == [("/w", 100)]
    assert [(n.path, n.kind, n.major) for n in probes.nodes] == [
        ("/dev/nvidia0", "c", 195),
        ("/dev/nvidia-uvm", "-", None),
    ]
    assert probes.majors["nvidia-uvm"] == 510


@pytest.mark.parametrize(
    ("key", "value", "code", "signal", "pipe"),
    [
        ("exit_record", {"exit_code": None, "signal": 9, "reason": "failed"}, None, 9, ()),
        ("exit_record", {"code": 1, "signal": None, "pipestatus": [1, 0]}, 1, None, (1, 0)),
        ("exit_record", '{"exit_code": 3, "signal": "SIGTERM"}', 3, 15, ()),
        ("exit_status", "exit code 137", 137, None, ()),
        ("exit", 2, 2, None, ()),
    ],
)
def test_exit_records(
    key: str, value: object, code: int | None, signal: int | None, pipe: tuple[int, ...]
) -> None:
    record = Probes({key: value}).exit

    assert record is not None
    assert (record.code, record.signal, record.pipe) == (code, signal, pipe)


@pytest.mark.parametrize(
    ("text", "alive"),
    [
        ("all 8 ranks alive", True),
        ("  81 pts/0 Sl+ python -u train.py", True),
        ("  81 pts/0 Z+ [python] <defunct>\n", False),
        ("  12 ? S python3 /workspace/dflashctl/agent/ab.pyz", False),
        ("no trainer", False),
        ("    1 ?  Ss  0:02 /sbin/init", False),
    ],
)
def test_who_lives(text: str, alive: bool) -> None:
    assert Probes({"ps": text}).alive is alive


def test_the_supervisors_word_on_life_comes_first() -> None:
    assert Probes({"run_state": "failed", "ps": "python train.py 1"}).alive is False
    assert Probes({"run_state": "stalled", "ps": ""}).alive is True
