"""Labels of the target's own: ``objective.labels: target``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data.make import Progress, Say
from trainer.data.store import Samples, open_labels


def relabel(folders: Sequence[Path], model: Any, say: Say, length: int) -> None:
    """The target's first choice at each place, given the sample's own tokens before it. What lies
    beyond a row's ``length`` is never asked for, and the logits of a book would fit nowhere.

    One sample at a time: in padded batches of eight, 2.5 % of the labels of SmolLM2-135M in
    bfloat16 were others (rounding decides near ties), and a CPU was no faster."""
    parts = [(Samples.load(folder), open_labels(folder)) for folder in folders]
    progress = Progress("labels", sum(len(samples) for samples, _ in parts), say)
    done = tokens = 0
    for samples, labels in parts:
        for index, start in enumerate(samples.offsets[:-1].tolist()):
            own = samples[index].tokens[:length].astype(np.int64)
            read = torch.from_numpy(own)[None].to(model.device)
            with torch.inference_mode():
                best = model(input_ids=read, use_cache=False).logits[0].argmax(-1).cpu().numpy()
            labels[start + 1 : start + len(own)] = best[:-1]
            done, tokens = done + 1, tokens + len(own)
            progress.update(done, tokens)
