"""What a live run adds to the log: the trainer's records, dated kernel lines, the run's state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.diag import Evidence, Report, diagnose
from orchestrator.diag.place import KEY, Place

FX = (
    "Detected that you are using FX to symbolically trace a dynamo-optimized function. "
    "This is not supported at the moment."
)
START = 1_788_249_600.0  # 2026-09-01T08:00:00Z


def metrics(count: int, **values: Any) -> list[str]:
    made = []
    for i in range(count):
        record = {"time": START + i * 6, "step": i * 10 + 10, "steps": 9400, "loss": 8 - i * 0.01}
        record |= {k: v(i) if callable(v) else v for k, v in values.items()}
        made.append(json.dumps(record))
    return made


def report(log: str = "", **probes: Any) -> Report:
    return diagnose(Evidence.from_text(log, probes))


def roots(found: Report) -> list[str]:
    return [f.code for f in found.findings if f.severity != "info"]


def test_the_storys_night_is_named_by_its_cause() -> None:
    """20 → 4.6 Ktok/s: the race is the cause, the unfused kernel and the rate are its effects."""
    log = (
        "flex_attention called without torch.compile() - this will use an unfused implementation "
        "that materializes the full scores matrix instead of generating a fused kernel.\n"
        f"[drafter-1] step retried: RuntimeError: {FX}\n"
        f"[drafter-2] step retried: RuntimeError: {FX}\n"
    )
    rate = metrics(80, tokens_per_s=lambda i: 20_000.0 if i < 20 else 4_600.0)

    found = report(log, run_state="training", metrics="\n".join(rate))

    assert roots(found) == ["compile.fx_race"]
    effects = {c.code for c in found.findings[0].consequences}
    assert {"compile.eager_fallback", "throughput.collapse"} <= effects


@pytest.mark.parametrize(
    ("code", "state", "severity"), [(0, "finished", "warning"), (1, "failed", "fatal")]
)
def test_a_run_that_ended_without_a_word_is_fatal_only_if_it_failed(
    code: int, state: str, severity: str
) -> None:
    exit_record = {"code": code, "signal": None, "shell_code": code}
    found = report(run_state=state, exit_record=exit_record, tmux="no server running")
    assert [(f.code, f.severity) for f in found.findings] == [("run.not_started", severity)]


@pytest.mark.parametrize(
    ("date", "severity", "title"),
    [
        ("2026-09-01T08:00:40Z", "info", "not a word yet, 40s after its launch"),
        ("2026-09-01T09:00:00Z", "warning", "the trainer never spoke"),
    ],
)
def test_a_run_that_lives_may_take_its_time_to_the_first_word(
    date: str, severity: str, title: str
) -> None:
    (found,) = report(run_state="starting", run_started=START, date=date).findings
    assert (found.code, found.severity, found.title) == ("run.not_started", severity, title)


def test_a_run_that_waits_at_a_prompt_is_named_at_once() -> None:
    pane = "pane: Do you want to continue? [Y/n] "
    (found,) = report(
        run_state="starting", run_started=START, date="2026-09-01T08:00:05Z", tmux=pane
    ).findings
    assert (found.code, found.severity) == ("run.not_started", "fatal")


def test_a_collapse_in_the_records_alone() -> None:
    rate = metrics(80, tokens_per_s=lambda i: 20_000.0 if i < 20 else 4_600.0)

    (finding,) = report(run_state="training", metrics="\n".join(rate)).findings

    assert finding.code == "throughput.collapse"
    assert "4.6k tok/s, 23% of this run's best 20.0k" in finding.title


def test_recompiles_that_never_end() -> None:
    grown = metrics(40, tokens_per_s=15_000.0, recompiles=lambda i: i * 3)

    assert roots(report(run_state="training", metrics="\n".join(grown))) == [
        "compile.recompile_storm"
    ]


def test_recompiles_of_the_warm_up_are_healthy() -> None:
    calm = metrics(40, tokens_per_s=15_000.0, recompiles=lambda i: min(i, 2))

    assert report(run_state="training", metrics="\n".join(calm)).healthy


@pytest.mark.parametrize(
    ("target", "drafter", "code"),
    [
        (0.02, 0.6, ["throughput.starved"]),
        (0.6, 0.02, ["throughput.backpressure"]),
        (0.05, 0.08, []),
    ],
)
def test_who_waits(target: float, drafter: float, code: list[str]) -> None:
    idle = metrics(30, tokens_per_s=15_000.0, target_idle=target, drafter_idle=drafter)

    assert roots(report(run_state="training", metrics="\n".join(idle))) == code


def test_the_predecessor_is_a_measure() -> None:
    slow = "\n".join(metrics(30, tokens_per_s=5_000.0))

    found = report(run_state="training", metrics=slow, predecessor={"run": "r", "tok_s": 15_400.0})

    assert roots(found) == ["throughput.collapse"]
    assert report(metrics=slow, predecessor={"run": "r", "tok_s": 5_200.0}).healthy


def test_a_predecessor_of_other_work_is_told_and_raises_nothing() -> None:
    slow = "\n".join(metrics(30, tokens_per_s=5_000.0))
    before = {"run": "r", "tok_s": 15_400.0, "unlike": ["data.anchors 512 → 2048", "GPUs 8 → 4"]}

    found = report(run_state="training", metrics=slow, predecessor=before, changes=CHANGES)

    assert found.healthy and found.exit_code == 0
    (told,) = found.findings
    assert (told.code, told.severity, told.confidence) == ("throughput.collapse", "info", 0.4)
    assert told.title == (
        "5.0k tok/s, 32% of its predecessor's 15.4k, which is no measure of it: "
        "data.anchors 512 → 2048, GPUs 8 → 4"
    )


def test_of_another_target_not_even_that_is_told() -> None:
    slow = "\n".join(metrics(30, tokens_per_s=5_000.0))
    unlike = ["target.model SmolLM2-135M → Qwen3-8B", "data.anchors 512 → 256"]

    assert not report(metrics=slow, predecessor={"tok_s": 90_000.0, "unlike": unlike}).findings


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("previous run r-0650 at 15.4k tok/s, same config", ["throughput.collapse"]),
        ("baseline of another machine: 670k tok/s", []),
        ("expected throughput at 8 GPUs: 670k tok/s (linear)", []),
        ("the previous phase (short rows) ran at 300k tok/s", []),
    ],
)
def test_what_a_log_says_of_other_work_is_no_measure(said: str, code: list[str]) -> None:
    steps = "\n".join(
        f"step {i}/900 | loss {8 - i / 300:.3f} | 5.0k tok/s" for i in range(0, 600, 10)
    )

    assert roots(report(f"{said}\n{steps}", run_state="training")) == code


KILL = "{date} Memory cgroup out of memory: Killed process 881 (python3) total-vm:9123kB"


def test_a_run_that_was_killed_with_its_supervisor_is_no_riddle() -> None:
    reason = "the supervisor was killed and left no record; left of it: PID 812, which stop ends"

    (found,) = report("loading\n", run_state="failed", run_reason=reason).findings

    assert found.code == "run.killed"
    assert "PID 812" in found.evidence[0].text


@pytest.mark.parametrize(
    ("date", "code"),
    [
        ("2026-09-01T10:05:00,000000+02:00", "mem.oom_killed"),  # five minutes into the run
        ("2026-09-01T07:05:00,000000+00:00", "run.killed"),  # an hour before it
        ("[ 5420.545796]", "mem.oom_killed"),  # nobody knows when
    ],
)
def test_a_kernels_line_from_before_the_run_is_no_cause(date: str, code: str) -> None:
    found = report(
        "step 1/9 | loss 8.1 | 15.1k tok/s\nKilled\n",
        run_started=START,
        host_dmesg=KILL.format(date=date),
        exit_record={"exit_code": None, "signal": 9},
    )

    assert roots(found) == [code]


def test_a_container_that_was_not_reached_says_nothing_of_its_start() -> None:
    found = report(
        ct=300,
        pct="the agent did not start within 30 s",
        cgroup_events="/sys/fs/cgroup/freezer/lxc/300/freezer.state: FROZEN",
    )

    assert roots(found) == ["ct.frozen"]


def test_a_busy_neighbour_is_no_alarm() -> None:
    log = "\n".join(f"step {i}/400 | loss {8 - i / 50} | 15.1k tok/s" for i in range(30))

    assert report(log, run_state="training", nproc="2", loadavg="9.10 8.90 8.20 3/900 12").healthy


VALIDATING = (
    '{"time": 1.0, "event": "training"}\n{"time": 9.0, "event": "validating", "detail": {}}'
)


@pytest.mark.parametrize(
    ("events", "now", "code"),
    [
        (VALIDATING, "2026-09-01 08:19:00", []),
        (VALIDATING, "2026-09-01 09:30:00", ["run.hang"]),  # longer than any validation is quiet
        (VALIDATING + '\n{"event": "checkpoint"}', "2026-09-01 08:19:00", ["run.hang"]),
        ('{"event": "training"}', "2026-09-01 08:19:00", ["run.hang"]),
    ],
)
def test_silence_within_a_validation_is_no_hang(events: str, now: str, code: list[str]) -> None:
    log = "\n".join(f"step {i}/400 | loss {8 - i / 50} | 15.1k tok/s" for i in range(30))

    found = report(log, ps="alive", events=events, now=now, last_log_write="2026-09-01 08:00:00")

    assert roots(found) == code


CHANGES = (
    "since r-0901:\ncode: release a → b; 1 file differs: trainer/drafter/model.py\n"
    "environment: triton 3.6.0 → 3.5.0 (it compiles the kernels, and its cache is keyed by its "
    "version)"
)


def test_a_slow_run_is_told_with_what_changed_since_the_run_before() -> None:
    slow = "\n".join(metrics(30, tokens_per_s=5_000.0))
    before = {"run": "r-0901", "tok_s": 15_400.0}

    (finding,) = report(metrics=slow, predecessor=before, changes=CHANGES).findings

    assert finding.title.endswith("; since r-0901 changed: code, environment")
    assert "model.py" in " ".join(q.text for q in finding.evidence)
    assert "triton 3.6.0 → 3.5.0" in " ".join(q.text for q in finding.evidence)


def test_a_slow_run_of_which_nothing_changed_points_at_the_machine() -> None:
    slow = "\n".join(metrics(30, tokens_per_s=5_000.0))
    same = "since r-0901:\nnothing in code, command, config, data, GPUs or environment"

    (finding,) = report(metrics=slow, predecessor={"tok_s": 15_400.0}, changes=same).findings

    assert "clocks, neighbours, disks?" in finding.title


def test_the_collapse_names_the_stage_that_is_slow() -> None:
    rate = metrics(
        80,
        tokens_per_s=lambda i: 20_000.0 if i < 20 else 4_600.0,
        target_idle=0.02,
        drafter_idle=lambda i: 0.03 if i < 20 else 0.7,
    )

    found = report(run_state="training", metrics="\n".join(rate))

    assert "throughput.collapse" in str([f.as_dict() for f in found.findings])
    assert "the target is what is slow" in str([f.as_dict() for f in found.findings])


def traced(thread: str, line: str, lock_held: bool = False) -> str:
    detail = {
        "thread": thread,
        "tracer": "Tracer",
        "lock_held": lock_held,
        "stack": ["/a:1 f", line],
    }
    return json.dumps({"time": START, "event": "fx_trace", "detail": detail})


def test_the_trace_names_the_thread_that_set_the_flag_and_its_line() -> None:
    log = (
        "step 1/400 | loss 9.0 | 20.0k tok/s\n"
        "Exception in thread drafter-1 (loop):\nTraceback (most recent call last):\n"
        f'  File "/w/pipe.py", line 9, in loop\n    out = step(x)\nRuntimeError: {FX}\n'
    )
    events = "\n".join(
        [
            traced("drafter-1", "/w/pipe.py:9 loop"),  # the victim traced as well, earlier
            traced("drafter-2", "/w/pipe.py:9 loop", lock_held=True),
            traced("reporter", "/w/report.py:41 draw_graph"),
        ]
    )

    (finding,) = report(log, events=events, exit_record={"exit_code": 1}).findings

    assert finding.code == "compile.fx_race"
    assert finding.title.endswith("last set by thread reporter at /w/report.py:41 draw_graph")


def test_a_trace_without_an_error_is_no_finding() -> None:
    log = "\n".join(f"step {i}/400 | loss {8 - i / 50} | 15.1k tok/s" for i in range(30))

    assert report(log, run_state="training", events=traced("reporter", "/w/r.py:4 f")).healthy


@pytest.mark.parametrize(
    ("stacks", "told"),
    [
        ("Process 33: python3 hang.py\nthread 33 python3: S futex_wait", True),
        (
            'Process 33: python3 hang.py\nThread 33 (idle): "MainThread"\n    get (queue.py:171)',
            False,
        ),
    ],
)
def test_a_hang_without_pythons_stacks_says_how_to_get_them(stacks: str, told: bool) -> None:
    log = "\n".join(f"step {i}/400 | loss {8 - i / 50} | 15.1k tok/s" for i in range(30))

    (finding,) = report(
        log,
        run_state="stalled",
        now="2026-09-01 09:30:00",
        last_log_write="2026-09-01 08:00:00",
        stacks_1=stacks,
    ).findings

    assert ("install py-spy" in finding.remedy) is told


@pytest.mark.parametrize(
    ("fall", "codes"),
    [
        (0.0003, []),  # a long warm-up: slow, but sure
        (0.0, ["loss.stuck"]),
        (0.00002, ["loss.stuck"]),  # it drifts, and will not have arrived at the end
    ],
)
def test_a_loss_that_falls_slowly_but_surely_is_not_stuck(fall: float, codes: list[str]) -> None:
    lines = metrics(
        80, tokens_per_s=15_000.0, loss=lambda i: 9.0 - fall * 10 * i + 0.01 * ((i * 7) % 5 - 2)
    )

    assert roots(report(run_state="training", metrics="\n".join(lines))) == codes


@pytest.mark.parametrize(
    "last",
    ["State: FROZEN", "client_loop: send disconnect: Broken pipe", "ssh: connect timed out"],
)
def test_a_run_whose_container_answers_is_reached_and_not_frozen(last: str) -> None:
    log = "\n".join([*(f"step {i}/90 | loss {9 - i / 50} | 15.1k tok/s" for i in range(9)), last])

    assert report(log, run_state="training").healthy


# What remedies know of a run

NO_TORCH = (
    'Traceback (most recent call last):\n  File "/workspace/train.py", line 1, in <module>\n'
    "    import torch\nModuleNotFoundError: No module named 'torch'\n"
)


def test_a_missing_module_names_the_interpreter_to_install_into() -> None:
    found = report(NO_TORCH, run_state="failed", run_python="/opt/venv/bin/python").findings[0]
    assert "/opt/venv/bin/python -m pip install torch" in found.remedy


def test_another_interpreter_than_the_inventorys_is_named_beside_it() -> None:
    site = '  File "/usr/lib/python3/site-packages/x.py", line 1, in <module>\n    import torch\n'
    log = NO_TORCH.replace("    import torch\n", f"    import x\n{site}")
    found = report(log, run_state="failed", run_python="/opt/venv/bin/python").findings[0]
    assert "it was /usr/bin/python; the inventory names /opt/venv/bin/python" in found.remedy


@pytest.mark.parametrize(
    "log",
    [
        "no trainer here; this brings it along: dflashctl launch --config train.yaml\n",
        NO_TORCH.replace("torch", "trainer"),
        "/usr/bin/python3: No module named trainer\n",
    ],
)
def test_our_own_trainer_is_not_fetched_from_an_index(log: str) -> None:
    found = report(log, run_state="failed", exit_record={"code": 2}).findings[0]
    assert found.code == "env.import"
    assert "launch --config" in found.remedy and "pip install" not in found.remedy


@pytest.mark.parametrize(
    ("config", "advised", "not_advised"),
    [
        ("night.yaml", "play resume --set config=night.yaml", "DFLASH_RESUME"),
        ("none", "launch --env DFLASH_RESUME=", "play resume"),
    ],
)
def test_a_run_is_taken_up_again_as_it_was_started(
    config: str, advised: str, not_advised: str
) -> None:
    boots = {"at_start": "a" * 8, "now": "b" * 8}
    found = report("step 1\n", run_state="failed", run_config=config, boot_id=boots).findings[0]
    assert found.code == "ct.rebooted"
    assert advised in found.remedy and not_advised not in found.remedy


def test_the_run_that_was_looked_at_is_taken_up_not_the_newest_of_all() -> None:
    about = {"run_config": "night.yaml", "run_name": "night-20260901-080000-ab12"}
    about[KEY] = Place(host="pve1", container="train-a").model_dump()
    boots = {"at_start": "a" * 8, "now": "b" * 8}
    found = report("step 1\n", run_state="failed", boot_id=boots, **about).findings[0]
    again = "play resume train-a --set config=night.yaml --set run=night-20260901-080000-ab12 goes"
    assert again in found.remedy


def test_a_session_that_is_gone_later_killed_no_run() -> None:
    record = {"exit_code": None, "signal": 9, "reason": "failed"}
    gone = "can't find session: night-20260901-080000-ab12"
    found = report("step 1 | loss 2.0\n", run_state="failed", exit_record=record, tmux=gone)
    assert roots(found) == ["run.killed"]


@pytest.mark.parametrize(
    ("log", "state", "code", "told"),
    [
        ("a word\n", "failed", "unknown", ["tail ID -n 200", "diag ID --bundle"]),
        (
            "python3: can't open file '/w/nofile.py': [Errno 2] No such file or directory\n",
            "failed",
            "run.not_started",
            ["attach ID ", "launch train-a --follow -- bash -x start_training.sh"],
        ),
        (
            "2026-09-01 08:00:00 step 1 | loss 2.0\n2026-09-01 08:00:30 step 2 | loss 1.9\n",
            "training",
            "run.hang",
            ["status ID; dflashctl attach ID"],
        ),
    ],
)
def test_the_next_step_names_the_run_that_was_looked_at(
    log: str, state: str, code: str, told: list[str]
) -> None:
    about = {"run_name": "night-20260901-080000-ab12", "now": "2026-09-01 08:02:10"}
    about[KEY] = Place(host="pve1", container="train-a").model_dump()
    found = next(f for f in report(log, run_state=state, **about).findings if f.code == code)
    for words in told:
        assert words.replace("ID", about["run_name"]) in found.remedy


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ("2026-09-01 08:00:40", False),  # its steps come every 30 s
        ("2026-09-01 08:02:10", True),
    ],
)
def test_silence_is_told_before_it_is_a_hang(now: str, told: bool) -> None:
    log = "2026-09-01 08:00:00 step 1 | loss 2.0\n2026-09-01 08:00:30 step 2 | loss 1.9\n"
    found = report(log, run_state="training", now=now)
    assert found.healthy and found.exit_code == 0
    titles = [f.title for f in found.findings if f.code == "run.hang"]
    words = "silent for 100 s; a hang is named after 10 min; look before: dflashctl attach RUN"
    assert titles == ([words] if told else [])


def test_a_run_that_validates_is_not_called_silent() -> None:
    log = "2026-09-01 08:00:00 step 1 | loss 2.0\n"
    found = report(log, run_state="training", now="2026-09-01 08:04:00", events=VALIDATING)
    assert not found.findings
