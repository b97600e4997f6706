"""A stand-in for a trainer: writes the telemetry of a run and sleeps. Pushed by lab tests.

``python3 fake_run.py STEPS SECONDS_A_STEP [SLOW_AT] [EXIT_CODE]``
"""

import json
import os
import sys
import time

steps, pause = int(sys.argv[1]), float(sys.argv[2])
slow_at = int(sys.argv[3]) if len(sys.argv) > 3 else steps + 1
code = int(sys.argv[4]) if len(sys.argv) > 4 else 0
folder = os.environ["DFLASH_RUN_DIR"]


def line(file, **values):
    with open(os.path.join(folder, file), "a", encoding="utf-8") as stream:
        stream.write(json.dumps({"time": time.time(), **values}) + "\n")
    print(json.dumps(values), flush=True)


for event in ("started", "compiling", "compiled", "training"):
    line("events.jsonl", event=event, detail={})
for step in range(1, steps + 1):
    rate = 4600.0 if step >= slow_at else 20000.0
    line("metrics.jsonl", step=step, steps=steps, loss=9.0 - step / steps, tokens_per_s=rate)
    time.sleep(pause)
if code:
    line("events.jsonl", event="failed", detail={"error": "told to"})
    sys.exit(code)
line("events.jsonl", event="finished", detail={"step": steps})
