"""Searches for schedules at the costs of the Zero Bubble paper and compares with its columns.

python benchmarks/search.py              all rows, caps p and 2p
python benchmarks/search.py --most 16    rows with at most 16 ranks
python benchmarks/search.py --json
"""

from __future__ import annotations

import argparse
import json
import time

from fleetpipe.schedules import Costs, build

# Table of arXiv:2401.10241, profiled times in ms: p, m, F, I, W, latency, then the bubble rates of
# ZB-1p and ZB-2p.
ROWS = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421, 0.0038),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.0594, 0.0018),
)


def measure(row: tuple[float, ...], times: int) -> dict[str, float]:
    """Searches for a row under a cap of ``times`` p forwards."""
    ranks, micro_batches = int(row[0]), int(row[1])
    costs = Costs(*row[2:5], comm=row[5], input_grad_frees=0.5)
    cap = times * ranks
    begin = time.perf_counter()
    schedule = build("auto", ranks=ranks, micro_batches=micro_batches, memory_cap=cap, costs=costs)
    seconds = time.perf_counter() - begin
    timeline = schedule.simulate(costs)
    return {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "cap": cap,
        "peak": max(timeline.peak_activations),
        "bubble_rate": timeline.bubble_rate,
        "paper": row[5 + times],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--most", type=int, default=32, help="leave out rows with more ranks")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if row[0] <= arguments.most]
    results = [measure(row, times) for times in (1, 2) for row in rows]
    if arguments.json:
        print(json.dumps({"results": results}))
        return
    print("| p | m | cap | peak | auto | paper | seconds |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        print(
            "| {ranks} | {micro_batches} | {cap} | {peak:g} | {bubble_rate:.4f} | {paper:.4f} |"
            " {seconds:.1f} |".format(**result)
        )


if __name__ == "__main__":
    main()
