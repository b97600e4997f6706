"""What each action does, through the controller's own functions. The edge of the playbook."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import launch as launching
from orchestrator import preflight, snapshot, transfer
from orchestrator import release as releases
from orchestrator.alarm import DROP
from orchestrator.audit import audited
from orchestrator.channel import AgentChannel
from orchestrator.collect import collect
from orchestrator.diag import Evidence, Report, diagnose
from orchestrator.diag.finding import ORDER as WEIGHTS
from orchestrator.environment import remote
from orchestrator.environment.compare import ORDER, Difference, compare, faults
from orchestrator.environment.lock import Environment, read_lock
from orchestrator.environment.sync import plan
from orchestrator.errors import RefusedError, RunFailed, UsageError
from orchestrator.fleet import Fleet
from orchestrator.launch import Order
from orchestrator.paths import LaptopPaths
from orchestrator.playbook import actions
from orchestrator.playbook.runner import Done, Perform
from orchestrator.release import Push, Release
from orchestrator.run import RunRef, new_run_id
from orchestrator.target import Target
from orchestrator.watch import Report as Seen
from orchestrator.watch import Watch
from trainer.telemetry import duration

POLL_S = 2.0

Notice = Callable[[str], None]
Show = Callable[[bytes], None]
Choose = Callable[[str | None], list[RunRef]]
"""The runs that a run id (or None: the newest of the targets) means."""


@dataclass
class Stage:
    """One play: its containers, and what earlier steps left for later ones."""

    fleet: Fleet
    laptop: LaptopPaths
    targets: Sequence[Target]
    choose: Choose
    notice: Notice
    show: Show
    """Takes the output of commands."""
    refs: list[RunRef] = field(default_factory=list)
    """The runs that `launch` started, or that were named."""
    code: str | None = None
    pushed: dict[str, str] = field(default_factory=dict)
    """Target name → path of its release."""
    _channels: dict[str, AgentChannel] = field(default_factory=dict)

    def functions(self) -> Mapping[str, Perform]:
        """Action name → function."""
        return {
            "preflight": self.preflight,
            "env": self.env,
            "push": self.push,
            "exec": self.exec,
            "warmup": self.warmup,
            "launch": self.launch,
            "wait": self.wait,
            "diag": self.diag,
            "pull": self.pull,
        }

    # Looking

    def preflight(self, action: actions.Preflight) -> Done:
        modules = preflight.MODULES if action.trainer else ()
        total, warned = 0, []
        for target, channel in self._each():
            fields = preflight.request_fields(target, modules, None)
            checks = preflight.read(channel.call("preflight", **fields), target)
            refused = preflight.refusal(checks, target)
            if refused is not None:
                raise refused
            total += len(checks)
            warned += [check for check in checks if not check.ok]
            for check in warned:
                self.notice(f"{target.name}: {check.text} (next: {check.next_step})")
        warnings = f", {_count(len(warned), 'warning')}" if warned else ""
        return Done(
            f"{_count(total, 'check')}{warnings}", {"checks": total, "warnings": len(warned)}
        )

    def env(self, action: actions.Env) -> Done:
        found = {t.name: remote.collect(channel, t) for t, channel in self._each()}
        lock = read_lock(Path(action.lock).expanduser()) if action.lock else None
        if action.sync:
            if lock is None:
                raise UsageError("env: sync needs a lock file", next_step="--set lock=FILE")
            found = self._sync(lock, found)
        if action.save:
            self._save(found, Path(action.save).expanduser())
        good = lock or next(iter(found.values()))
        differences = {
            name: compare(good, one) if one is not good else list(faults(one))
            for name, one in found.items()
        }
        self._judge(differences, action.fail_on)
        count = sum(len(some) for some in differences.values())
        data = {name: [d.as_dict() for d in some] for name, some in differences.items()}
        said = _count(count, "difference") if count else "as it should be"
        return Done(said, {"differences": data})

    def _sync(self, lock: Environment, found: dict[str, Environment]) -> dict[str, Environment]:
        for target, channel in self._each():
            planned = plan(lock, found[target.name])
            for text in planned.left:
                self.notice(f"{target.name}: cannot be installed: {text}")
            with self._audited(target, "env sync", packages=sorted(planned.wanted)):
                for piece in remote.install(channel, target, planned):
                    self.show(piece)
        return {t.name: remote.collect(channel, t) for t, channel in self._each()}

    def _save(self, found: dict[str, Environment], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, one in found.items():
            own = path if len(found) == 1 else path.with_stem(f"{path.stem}-{_plain(name)}")
            own.write_text(one.lock_text(), encoding="utf-8")

    def _judge(self, differences: Mapping[str, list[Difference]], fail_on: str) -> None:
        for target in self.targets:
            some = differences[target.name]
            heavy = [d for d in some if d.weight != "harmless"]
            for d in heavy:
                self.notice(
                    f"{target.name}: {d.key} {d.before or 'none'} → {d.after or 'none'}: {d.why}"
                )
            bad = [d for d in heavy if fail_on != "never" and ORDER[d.weight] <= ORDER[fail_on]]
            if bad:
                raise RefusedError(
                    f"its environment will not do: {bad[0].key}: {bad[0].why}",
                    next_step=bad[0].remedy or "make it like the other, or raise `fail_on`",
                    host=target.host.name,
                    ct=target.ct,
                )

    # Code and commands

    def push(self, action: actions.Push) -> Done:
        self.code = action.code
        release = self._release(action.code, action.config)
        for target, channel in self._each():
            with self._audited(target, "push", release=release.id):
                blobs, commit = Push(channel, release, None).send()
                for request in blobs:
                    request.result()
                self.pushed[target.name] = str(commit.result()["path"])
        return Done(
            f"{release.id}, {_count(release.files, 'file')}",
            {"release": release.id, "files": release.files},
        )

    def exec(self, action: actions.Exec) -> Done:
        fields = {"timeout_s": action.timeout_s} if action.timeout_s else {}
        return self._execute(action.command, action.cwd, action.env, action.ok, fields)

    def warmup(self, action: actions.Warmup) -> Done:
        fields = {"timeout_s": action.timeout_s}
        return self._execute(action.command, action.cwd, action.env, [0], fields)

    def _execute(
        self,
        command: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str],
        good: Sequence[int],
        fields: Mapping[str, Any],
    ) -> Done:
        codes = {}
        for target, channel in self._each():
            argv = [target.settings.python, *command[1:]] if command[0] == "python" else [*command]
            where = cwd or self.pushed.get(target.name) or target.settings.workdir
            with self._audited(target, "exec", program=argv[0]) as line:
                request = channel.request("exec", command=argv, cwd=where, env=dict(env), **fields)
                for head, payload in request.frames():
                    if "stream" in head:
                        self.show(payload)
                answer = request.result()
                line["exit_code"] = answer["exit_code"]
            codes[target.name] = answer["exit_code"]
            if answer["timed_out"] or answer["exit_code"] not in good:
                raise RunFailed(
                    f"{argv[0]} {_ending(answer)}",
                    next_step="its own words are above; mend what they name",
                    host=target.host.name,
                    ct=target.ct,
                )
        return Done("exit code 0" if set(codes.values()) == {0} else str(codes), {"codes": codes})

    # The run

    def launch(self, action: actions.Launch) -> Done:
        launching.check_log_link(action.log)
        secrets = {}
        if action.env_file:
            secrets = launching.read_environment_file(Path(action.env_file).expanduser())
        code = action.code if action.code is not None else self.code
        release = self._release(code, action.config) if action.push else None
        inside = action.config
        if action.config and release:
            inside = releases.config_path(Path(action.config).expanduser(), release.root)
        self.refs = []
        for target in self.targets:
            run_id = new_run_id(action.name)
            has_script = release is not None and release.has(launching.START_SCRIPT)
            order = Order(
                run_id=run_id,
                name=action.name or "run",
                command=launching.command_for(
                    target,
                    action.command or (),
                    inside,
                    has_script,
                    str(release.root.path) if release else None,
                ),
                config=inside,
                environment=action.env,
                secrets=secrets,
                log_link=action.log,
                force=action.force,
                predecessor=self._predecessor(target),
            )
            with self._audited(target, "launch", run_id=run_id):
                launching.launch(self.fleet, target, order, release, notice=self.notice)
            self.refs.append(RunRef(target, run_id))
        ids = [ref.run_id for ref in self.refs]
        return Done(" ".join(map(str, ids)), {"run_ids": ids})

    def _predecessor(self, target: Target) -> str | None:
        newest = self.fleet.state.newest()
        return newest.run_id if newest and newest.target.name == target.name else None

    def wait(self, action: actions.Wait) -> Done:
        refs = self._runs(action.run)
        watch = Watch(self.fleet, refs, drop=DROP, every_s=POLL_S)
        began = time.monotonic()
        for report in watch.run():
            for notice in report.notices:
                if notice.is_alarm:
                    self.notice(f"{report.where}: {notice.text}")
            _refuse_bad_end(report)
            if action.until == "training" and all(map(_trains, watch.reports)):
                break
            if action.timeout_s and time.monotonic() - began > action.timeout_s:
                raise RunFailed(
                    f"not {action.until} after {duration(action.timeout_s)}: "
                    f"it is {report.watched.state}",
                    next_step=f"dflashctl diag {report.ref.run_id or ''}".rstrip(),
                    **_place(report.ref),
                )
        self.refs = [report.ref for report in watch.reports]
        states = [report.watched.state for report in watch.reports]
        return Done(", ".join(states), {"states": states})

    def diag(self, action: actions.Diag) -> Done:
        reports = {}
        for ref in self._runs(action.run):
            with tempfile.TemporaryDirectory(prefix="dflashctl-") as folder:
                found = collect(self.fleet, ref, Path(folder) / "train.log")
                report = diagnose(Evidence.from_log(found.log, found.probes))
            if found.error is not None and report.healthy:
                raise found.error
            reports[ref.run_id or ref.target.name] = report
            for finding in report.findings:
                self.notice(f"{finding.severity}: {finding.code}: {finding.title}")
            _refuse_findings(report, ref, action.fail_on)
        data = {name: report.as_dict() for name, report in reports.items()}
        if action.save:
            path = Path(action.save).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data, indent=2), encoding="utf-8")
        count = sum(len(report.findings) for report in reports.values())
        said = _count(count, "finding") if count else "nothing is wrong"
        return Done(said, {"reports": data})

    def pull(self, action: actions.Pull) -> Done:
        files = size = 0
        refs = self._runs(action.run)
        for ref in refs:
            channel = self._channel(ref.target)
            run_id = ref.run_id or str(channel.call("run.status", lines=0)["run_id"])
            source, newest = {"run_id": run_id}, None
            if action.what == "checkpoint":
                newest = channel.call("pull.last_checkpoint", run_id=run_id)["path"]
            elif action.what not in {"logs", "run"}:
                key = {"path": action.what}
                source = key if action.what.startswith("/") else source | key
            every = action.what not in {"checkpoint", "logs"}
            pulled = transfer.pull(
                self.fleet,
                ref.target,
                source,
                Path(action.to).expanduser() / run_id,
                wanted=transfer.Wanted(every=every, newest=newest),
                notice=self.notice,
            )
            files, size = files + pulled.files, size + pulled.bytes
        return Done(
            f"{_count(files, 'file')} into {action.to}",
            {"files": files, "bytes": size, "to": action.to},
        )

    # Shared

    def _audited(
        self, target: Target, action: str, **facts: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        return audited(self.fleet, target, action, self.notice, **facts)

    def _release(self, code: str | None, config: str | None) -> Release:
        root = snapshot.find_root(Path(code).expanduser() if code else None, Path.cwd())
        path = Path(config).expanduser() if config else None
        if path is not None and not path.is_file():
            raise UsageError(f"config {config}: no such file", next_step="--set config=FILE")
        return releases.build(root, self.laptop, path)

    def _runs(self, run: str | None) -> list[RunRef]:
        """The run named, else those of this play, else the newest of the targets."""
        if run:
            return self.choose(run)
        return self.refs or self.choose(None)

    def _each(self) -> Iterator[tuple[Target, AgentChannel]]:
        for target in self.targets:
            yield target, self._channel(target)

    def _channel(self, target: Target) -> AgentChannel:
        """One channel a container for the whole play; a dead one is opened again."""
        known = self._channels.get(target.name)
        if known is not None and not known.link_alive:
            self.fleet.drop(known)
            known = None
        if known is None:
            known = self._channels[target.name] = self.fleet.container(target)
        return known


def _trains(report: Seen) -> bool:
    return report.watched.state in {"training", "finished"}


def _refuse_bad_end(report: Seen) -> None:
    """:raises RunFailed: the run failed, or somebody stopped it."""
    summary = report.watched.summary
    if summary is None or not report.watched.is_over or summary.state == "finished":
        return
    last = "".join(f"\n    | {line}" for line in summary.last_lines[-3:])
    raise RunFailed(
        f"{summary.ending()}{last}",
        next_step=f"dflashctl diag {summary.run_id}",
        **_place(report.ref),
    )


def _refuse_findings(report: Report, ref: RunRef, fail_on: str) -> None:
    """:raises RunFailed: a finding as heavy as ``fail_on``, the root cause first."""
    limit = {"fatal": 0, "warning": 1}.get(fail_on, -1)
    for finding in report.findings:
        if WEIGHTS[finding.severity] <= limit:
            raise RunFailed(
                f"{finding.code}: {finding.title}",
                next_step=finding.remedy.splitlines()[0] if finding.remedy else "",
                **_place(ref),
            )


def _place(ref: RunRef) -> dict[str, Any]:
    return {"host": ref.target.host.name, "ct": ref.target.ct, "run_id": ref.run_id}


def _ending(answer: Mapping[str, Any]) -> str:
    if answer["timed_out"]:
        return "was ended when its time was over"
    if answer.get("signal"):
        return f"was ended by signal {answer['signal']}"
    return f"ended with exit code {answer['exit_code']}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _plain(name: str) -> str:
    return name.replace("/", "-")
