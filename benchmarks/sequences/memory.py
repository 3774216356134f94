"""Peak memory of attention, forward and backward, of one rank and of two that split sequences.

Without arguments it measures all of it: each row is a process of its own, or two. One layer of
width 256 with 4 heads, causal, one sequence; the figure is what the peak of a rank's memory is
above that before the step. ``plain`` is one softmax over a matrix of all scores.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

LENGTHS = (2048, 4096, 8192, 16384, 32768)
#: By name, the ranks and the axis along which they split sequences.
KINDS = {"plain": (1, ""), "attention": (1, ""), "sep 2": (2, "sep"), "cp 2": (2, "cp")}
#: Above this the matrices of all scores take more than 4 GB.
LONGEST_PLAIN = 8192
WIDTH, HEADS = 256, 4


def memory(field: str) -> float:
    """Returns a figure of this process's memory, in MB."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines[field].split()[0]) / 1024


def measure(kind: str, length: int) -> float:
    """Returns the MB that a step takes on this rank. Collective over the ranks."""
    import paddle
    from paddle.nn import functional

    from fleetpipe import fleet
    from fleetpipe.dygraph import sequences

    ranks, axis = KINDS[kind]
    strategy = fleet.DistributedStrategy()
    if ranks > 1:
        strategy.hybrid_configs = {f"{axis}_degree": ranks}
    fleet.init(is_collective=True, strategy=strategy)
    qkv, out = paddle.nn.Linear(WIDTH, 3 * WIDTH), paddle.nn.Linear(WIDTH, WIDTH)

    def attend(*parts: Any) -> Any:
        if kind != "plain":
            return sequences.attention(*parts)
        query, key, value = (part.transpose([0, 2, 1, 3]) for part in parts)
        scores = paddle.matmul(query, key, transpose_y=True) * (WIDTH // HEADS) ** -0.5
        hidden = paddle.triu(paddle.full(scores.shape[-2:], -1e9), 1)
        weights = functional.softmax(scores + hidden)
        return paddle.matmul(weights, value).transpose([0, 2, 1, 3])

    def step(places: int) -> None:
        x = sequences.own_part(paddle.rand([1, places, WIDTH]))
        x.stop_gradient = False
        parts = qkv(x).reshape([1, -1, HEADS, 3 * WIDTH // HEADS]).split(3, axis=-1)
        out(attend(*parts).reshape([1, -1, WIDTH])).sum().backward()

    step(16)
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")
    step(length)
    taken = memory("VmHWM") - before
    fleet.shutdown()
    return taken


def main() -> None:
    """Measures every row, and prints a table."""
    print("places  " + "  ".join(f"{kind:>9}" for kind in KINDS), flush=True)
    for length in LENGTHS:
        row = []
        for kind, (ranks, _) in KINDS.items():
            if kind == "plain" and length > LONGEST_PLAIN:
                row.append(f"{'-':>9}")
                continue
            command = [sys.executable, "-m", "fleetpipe", "run", "--nproc", str(ranks)]
            done = subprocess.run(
                [*command, __file__, kind, str(length)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=1800,
            )
            taken = [float(line.split()[-2]) for line in done.stdout.splitlines() if "MB" in line]
            row.append(f"{max(taken):9.0f}")
        print(f"{length:6}  " + "  ".join(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"{measure(sys.argv[1], int(sys.argv[2])):.0f} MB")
    else:
        main()
