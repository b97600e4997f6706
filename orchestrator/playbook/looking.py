"""The actions that look: preflight, env, diag."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator import preflight as checks_of
from orchestrator.diag import Report
from orchestrator.diag.finding import ORDER as WEIGHTS
from orchestrator.environment import remote
from orchestrator.environment.compare import ORDER, Difference, compare, faults
from orchestrator.environment.lock import Environment, read_lock
from orchestrator.environment.sync import plan
from orchestrator.errors import RefusedError, RunFailed, UsageError
from orchestrator.examine import examine
from orchestrator.laptop_path import laptop_path, writing
from orchestrator.playbook import actions
from orchestrator.playbook.runner import Done
from orchestrator.playbook.stage import Stage
from orchestrator.run import RunRef
from orchestrator.terminal_text import counted


def preflight(stage: Stage, action: actions.Preflight) -> Done:
    modules = checks_of.MODULES if action.trainer else ()
    total = warned = 0
    for target, channel in stage.each():
        fields = checks_of.request_fields(target, modules, None)
        checks = checks_of.read(channel.call("preflight", **fields), target)
        refused = checks_of.refusal(checks, target)
        if refused is not None:
            raise refused
        total += len(checks)
        for check in checks:
            if not check.ok:
                warned += 1
                stage.notice(f"{target.name}: {check.text} (next: {check.next_step})")
    warnings = f", {counted(warned, 'warning')}" if warned else ""
    return Done(f"{counted(total, 'check')}{warnings}", {"checks": total, "warnings": warned})


def env(stage: Stage, action: actions.Env) -> Done:
    found = {t.name: remote.collect(channel, t) for t, channel in stage.each()}
    lock = read_lock(laptop_path(action.lock)) if action.lock else None
    if action.sync:
        if lock is None:
            raise UsageError("env: sync needs a lock file", next_step="--set lock=FILE")
        found = _sync(stage, lock, found)
    if action.save:
        _save(stage, found, laptop_path(action.save))
    good = lock or next(iter(found.values()))
    differences = {
        name: compare(good, one) if one is not good else list(faults(one))
        for name, one in found.items()
    }
    _judge(stage, differences, action.fail_on)
    count = sum(len(some) for some in differences.values())
    data = {name: [d.as_dict() for d in some] for name, some in differences.items()}
    said = counted(count, "difference") if count else "as it should be"
    return Done(said, {"differences": data})


def _sync(stage: Stage, lock: Environment, found: dict[str, Environment]) -> dict[str, Environment]:
    for target, channel in stage.each():
        planned = plan(lock, found[target.name])
        for text in planned.left:
            stage.notice(f"{target.name}: cannot be installed: {text}")
        with stage.audited(target, "env sync", packages=sorted(planned.wanted)):
            for piece in remote.install(channel, target, planned):
                stage.show(piece)
    return {t.name: remote.collect(channel, t) for t, channel in stage.each()}


def _save(stage: Stage, found: dict[str, Environment], path: Path) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, one in found.items():
            own = path if len(found) == 1 else path.with_stem(f"{path.stem}-{_plain(name)}")
            own.write_text(one.lock_text(), encoding="utf-8")


def _judge(stage: Stage, differences: Mapping[str, list[Difference]], fail_on: str) -> None:
    for target in stage.targets:
        some = differences[target.name]
        heavy = [d for d in some if d.weight != "harmless"]
        for d in heavy:
            stage.notice(
                f"{target.name}: {d.key} {d.before or 'none'} → {d.after or 'none'}: {d.why}"
            )
        bad = [d for d in heavy if fail_on != "never" and ORDER[d.weight] <= ORDER[fail_on]]
        if bad:
            raise RefusedError(
                f"its environment will not do: {bad[0].key}: {bad[0].why}",
                next_step=bad[0].remedy or "make it like the other, or raise `fail_on`",
                **target.place,
            )


def diag(stage: Stage, action: actions.Diag) -> Done:
    reports = {}
    refs = stage.runs(action.run)
    bundle = laptop_path(action.bundle) if action.bundle else None
    for ref in refs:
        own = bundle.with_name(f"{ref.run_id}-{bundle.name}") if bundle and refs[1:] else bundle
        found = examine(stage.fleet, ref, bundle=own)
        reports[str(found.place["run_id"])] = found.report
        for finding in found.report.findings:
            stage.notice(f"{finding.severity}: {finding.code}: {finding.title}")
        _refuse_findings(found.report, ref, action.fail_on)
    count = sum(len(report.findings) for report in reports.values())
    said = counted(count, "finding") if count else "nothing wrong was found"
    return Done(said, {name: report.as_dict() for name, report in reports.items()})


def _refuse_findings(report: Report, ref: RunRef, fail_on: str) -> None:
    """:raises RunFailed: a finding as heavy as ``fail_on``, the root cause first."""
    limit = WEIGHTS.get(fail_on, -1)
    for finding in report.findings:
        if WEIGHTS[finding.severity] <= limit:
            raise RunFailed(
                f"{finding.code}: {finding.title}",
                next_step=finding.remedy.splitlines()[0] if finding.remedy else "",
                **ref.place,
            )


def _plain(name: str) -> str:
    return name.replace("/", "-")
