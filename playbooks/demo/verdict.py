"""Say what the pulled run measured, and fail if its drafter is no better than it should be.

Usage: ``python verdict.py RUN_FOLDER THRESHOLD``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MIN_TOKENS = 1000

GPU_NOTE = """\
On a GPU: five layers, a million tokens of data and more, thousands of steps.
The recipe of playbooks/smollm2/config.yaml reached an acceptance length of 3.00 on chat and 3.45 on
HumanEval on an H200 in 146 s, data making included (2026-11-30); the published one 2.1 in 320 s
(2026-11-29)."""


def main() -> int:
    folder, threshold = Path(sys.argv[1]), float(sys.argv[2])
    try:
        found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        print(
            f"no {missing.filename}: the run was not evaluated, or not pulled to there\n"
            f"  next: `dflashctl status` says how it ended; dflashctl pull --to {folder}",
            file=sys.stderr,
        )
        return 2
    untrained, tau, low, high = (found[k] for k in ("untrained_tau", "tau", "tau_low", "tau_high"))
    print(
        f"\nacceptance length on {found['prompts']} held-out prompts ({found['tokens']} tokens): "
        f"{tau:.3f}, 95 % interval {low:.3f} to {high:.3f}; untrained: {untrained:.3f}"
    )
    print(
        f"tokens a second: {found['tokens_per_s_plain']:.1f} without the drafter, "
        f"{found['tokens_per_s_drafted']:.1f} with it; identical to the target's own greedy text: "
        f"{found['identical']} of {found['prompts']}"
    )
    print(f"\n{GPU_NOTE}\n")
    checks = {
        f"at least {MIN_TOKENS} held-out tokens": found["tokens"] >= MIN_TOKENS,
        "better than untrained beyond the interval": low > untrained,
        f"acceptance length at least {threshold}": tau >= threshold,
        "text identical to greedy decoding": found["identical"] == found["prompts"],
    }
    for name, good in checks.items():
        print(f"{'ok  ' if good else 'MISS'} {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
