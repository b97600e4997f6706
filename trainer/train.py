"""The loop: from (step) to a line, a checkpoint, an end."""

from __future__ import annotations

import json
import resource
import time
import traceback
from collections import deque
from pathlib import Path

import torch

from trainer.checkpoint import newest_step, read_record
from trainer.config import TrainConfig
from trainer.errors import NonFiniteError
from trainer.evaluate import evaluate_run, run_prompts
from trainer.optimize import learning_rate
from trainer.pipeline.stages import Executor, StepResult, Sums
from trainer.resolve import resolve
from trainer.run import Run, make_executor, open_run, prepare_run
from trainer.stopping import Stopped, StopSignals
from trainer.telemetry import StepLine, say
from trainer.validation import validate


def train(config: TrainConfig) -> int:
    """A whole run: data, steps, evaluation. Returns the exit code."""
    with StopSignals() as signals:
        opened = open_run(resolve(config))
        event = opened.writer.event
        try:
            wanted = config.evaluation if opened.leads else None
            if wanted is not None and wanted.prompts is not None:
                # Before data is made, perhaps for hours.
                run_prompts(opened.resolved, wanted, ())
            run = prepare_run(opened)
            held_out = run.data.prompts()
            prompts = [] if wanted is None else run_prompts(run.resolved, wanted, held_out)
            loop(run, signals)
            if wanted is not None:
                evaluate_run(run, wanted, prompts)
        except Stopped as stop:
            done = newest_step(opened.folder / "checkpoints")
            event("stopped", step=done, signal=str(stop))
            say(f"stopped by {stop} with {done} steps saved")
            return stop.exit_code
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            event("failed", error=f"{type(error).__name__}: {error}", traceback=trace)
            raise
        else:
            event("finished", step=run.batches.steps)
        finally:
            opened.writer.close()
        if run.leads:
            say(f"finished {run.batches.steps} steps")
        return 0


def loop(run: Run, signals: StopSignals) -> None:
    """Steps from where the newest checkpoint left off to the last."""
    executor = make_executor(run)
    try:
        executor.start()
        done, best, skipped = _resume(run, executor)
        run.writer.event("training", step=done)
        report = Report(run, done, skipped)
        signals.defer(True)
        for index in range(done, run.batches.steps):
            report.add(executor.step(index))
            step = index + 1
            # With several processes all leave after the same step, not each when its signal came.
            stop = executor.agreed_stop(signals.received)
            last = step == run.batches.steps or stop is not None
            if last or step % run.config.log_every == 0 or step == done + 1:
                report.write()
            if last or step % run.config.checkpoint.every == 0:
                best = _checkpoint(run, executor, report, step, best)
            if stop is not None:
                run.writer.event("stopping", signal=stop, step=step)
                signals.received = stop
                break
        signals.defer(False)
    finally:
        executor.close()


def _resume(run: Run, executor: Executor) -> tuple[int, float | None, int]:
    """Steps done, the best measure so far, and how many of the steps were skipped."""
    path = run.store.newest() if run.leads else None
    # Before what lies beyond it is put aside, perhaps this one too.
    skipped = 0 if path is None else int(read_record(path)["skipped"])
    done, best = executor.resume(lambda: None if path is None else run.store.load(path))
    if done:
        run.writer.event("resumed", path=str(path or ""), step=done)
    if run.leads and (aside := run.store.abandon_beyond(done)) is not None:
        say(f"checkpoints beyond step {done} are put aside in {aside}; nothing reads them again")
    if path is not None:
        say(f"resumed {path.name}: {done} of {run.batches.steps} steps are done")
    return done, best, skipped


def _checkpoint(
    run: Run, executor: Executor, report: Report, step: int, best: float | None
) -> float | None:
    """Save, and mark as best if it is; the best measure so far."""
    measured = validate(run, executor, step)
    state = executor.state()
    if not state:
        return best
    tau = report.take_tau() if measured is None else measured.decoded_tau
    improved = best is None or tau > best
    best = tau if improved else best
    path = run.store.save(step, state, best)
    if improved:
        run.store.mark_best(step)
    where = "held out" if measured is not None else "in training"
    loss = {} if measured is None else {"held_out_loss": measured.mean_loss}
    run.writer.event("checkpoint", path=str(path), step=step, tau=tau, best=improved, **loss)
    say(f"checkpoint {path.name} | tau {tau:.3f} {where}{' | best' if improved else ''}")
    return best


class Report:
    """Results since the last line. Reading them waits for the device, so it happens once a line."""

    def __init__(self, run: Run, done: int, skipped: int = 0) -> None:
        self.run = run
        self.pending: list[StepResult] = []
        self.tokens = 0
        self.skipped = skipped
        self.began = time.monotonic()
        self.taus: list[float] = []
        # The ETA looks back over some lines: a first epoch that fills a cache is slower.
        self.recent: deque[tuple[int, float]] = deque(maxlen=8)
        self.recent.append((done, self.began))

    def add(self, result: StepResult) -> None:
        self.pending.append(result)

    def write(self) -> None:
        """One line; raises ``NonFiniteError`` beyond the limit."""
        if not self.pending or not self.run.leads:
            self.pending = []
            return
        run, results = self.run, self.pending
        sums = Sums.read(torch.stack([r.sums.cpu() for r in results]).sum(0))
        norms = torch.stack([r.gradient_norm.cpu() for r in results])
        now = time.monotonic()
        interval = max(now - self.began, 1e-9)
        tokens = sum(r.tokens for r in results)
        self.tokens += tokens
        step = results[-1].step + 1
        first, since = self.recent[0]
        self.recent.append((step, now))
        last = results[-1]
        left = run.batches.steps - step
        finite = torch.isfinite(norms).all().item()
        line = StepLine(
            step=step,
            steps=run.batches.steps,
            loss=sums.mean_loss if finite else None,
            accuracy=[round(a, 4) for a in sums.accuracy],
            tau=sums.mean_tau,
            learning_rate=learning_rate(run.config.optimization, last.step, run.batches.steps),
            gradient_norm=norms[-1].item() if finite else None,
            tokens=self.tokens,
            tokens_per_s=tokens / interval,
            eta_s=(now - since) / max(1, step - first) * left if left else None,
            epoch=run.batches.epoch(last.step),
            memory_gb=peak_memory_gb(),
        )
        run.writer.step(line.model_copy(update={**sums.selector(), **last.telemetry}))
        self.taus.append(sums.decoded_tau)
        self.pending, self.began = [], now
        self._count_nonfinite(results, norms)

    def take_tau(self) -> float:
        """Mean over the lines since the last call."""
        taus, self.taus = self.taus, []
        return sum(taus) / max(1, len(taus))

    def _count_nonfinite(self, results: list[StepResult], norms: torch.Tensor) -> None:
        for result, norm in zip(results, norms.tolist(), strict=True):
            if norm - norm == 0 and result.sums[0].isfinite():
                continue
            self.skipped += 1
            step = result.step + 1
            path = dump_batch(self.run, result.step)
            self.run.writer.event("nonfinite", step=step, count=self.skipped, batch=str(path))
            say(f"step {step}: loss or gradient is not finite; skipped ({self.skipped}), {path}")
            limit = self.run.config.optimization.nonfinite_limit
            if self.skipped > limit:
                raise NonFiniteError(
                    f"{self.skipped} steps had a loss or gradient that is not finite"
                    f" (optimization.nonfinite_limit is {limit}); the last was step {step}",
                    next_step=f"look at {path}; a lower learning rate often helps",
                )


def dump_batch(run: Run, step: int) -> Path:
    """The tokens and samples of every microbatch of a step, for whoever asks why."""
    path = run.folder / "nonfinite" / f"step-{step + 1:08d}.json"
    path.parent.mkdir(exist_ok=True)
    slots = [run.batches(step, slot) for slot in range(run.batches.slots)]
    content = [
        {"samples": b.sample_ids, "tokens": b.tokens.tolist(), "anchors": b.anchors.tolist()}
        for b in slots
    ]
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def peak_memory_gb() -> float:
    """Of the fullest device; of the process without a GPU (ru_maxrss is in KiB)."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        return max(torch.cuda.max_memory_allocated(device) for device in devices) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
