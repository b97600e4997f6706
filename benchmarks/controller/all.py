"""The controller beside what people use, at 0, 20 and 100 ms: one Markdown table.

    python benchmarks/controller/all.py [--quick] [--only launch,transfer,tail]

Some 20 minutes on two cores. Fan-out has a module of its own: fanout.py.
"""

from __future__ import annotations

import argparse

import launch
import tail
import transfer
from bed import HEADER, RTTS_MS, Row, bed, circumstances


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true", help="few rounds")
    options.add_argument("--only", default="launch,transfer,tail")
    given = options.parse_args()
    wanted = given.only.split(",")
    print(HEADER)
    for rtt_ms in RTTS_MS:
        found: list[Row] = []
        with bed(rtt_ms) as made:
            if "launch" in wanted:
                found += launch.rows(made, rtt_ms, 3 if given.quick else 10)
            if "transfer" in wanted:
                found += transfer.rows(made, rtt_ms, 1 if given.quick else 3)
            if "tail" in wanted:
                found += tail.rows(made, rtt_ms, 100 if given.quick else 400)
        print(*(row.markdown() for row in found), sep="\n", flush=True)
    print(circumstances())


if __name__ == "__main__":
    main()
