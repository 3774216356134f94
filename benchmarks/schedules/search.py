"""Searches for schedules at the costs of the Zero Bubble paper and compares with its columns.

python benchmarks/schedules/search.py              all rows, caps p and 2p
python benchmarks/schedules/search.py --most 16    rows with at most 16 ranks
"""

from __future__ import annotations

import time

from benchmarks.figures import Figure, parser, report
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
    options = parser(__doc__)
    options.add_argument("--most", type=int, default=32, help="leave out rows with more ranks")
    arguments = options.parse_args()
    figures = []
    for times in (1, 2):
        for row in ROWS:
            if row[0] <= arguments.most:
                result = measure(row, times)
                title = "p={ranks} m={micro_batches} F={F:g}, cap {cap}".format(**result, F=row[2])
                figures += [
                    Figure(f"{title}: bubble rate", [result["bubble_rate"]]),
                    Figure(f"{title}: the paper's", [result["paper"]]),
                    Figure(f"{title}: search", [result["seconds"]], "s"),
                ]
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
