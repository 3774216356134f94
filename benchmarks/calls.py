"""Counts what one micro-batch costs beyond its layers: calls, system calls and bytes copied.

    python benchmarks/calls.py [--case list captured tree kept fit]

Two ranks train the tiny GPT under 1F1B over sockets. A step of many micro-batches is counted beside
one of fewer, and the difference is shared out, so that what is done once a batch drops out. Calls
are those of fleetpipe's own functions, in all and by file. System calls are those that its
functions make of sockets, selectors and files. Copied are the bytes of tensors that it clones; the
kernel copies those of a message besides. How often a rank waits depends on the machine, all else
does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import paddle
from paddle import nn

import fleetpipe
from benchmarks.figures import (
    ROOT,
    Figure,
    answer,
    is_rank,
    on_ranks,
    parser,
    report,
    started,
    wrapped,
)
from benchmarks.workers.gpt import CASES as MODELS
from fleetpipe import fleet
from fleetpipe.contrib.kept_state.kept_state import FOLDER

CASES = ("list", "captured", "tree", "kept", "fit")
FEW, MANY = 16, 48
SPLIT = {"1": fleetpipe.SplitPoint.BEGINNING}
OWN = (str(ROOT / "fleetpipe"), str(ROOT / "dygraph"))
#: What of Python's enters the kernel: classes and a module.
KERNEL = ("socket", "epoll", "poll", "kqueue", "posix")


def counted(run: Callable[[], Any]) -> Counter[str]:
    """Returns how often ``run`` calls own functions and the kernel, and the bytes it copies."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, called: Any) -> None:
        path = frame.f_code.co_filename
        if not path.startswith(OWN):
            return
        if event == "call":
            counts["calls"] += 1
            counts[f"calls, {os.path.relpath(path, ROOT / 'fleetpipe')}"] += 1
        elif event == "c_call":
            owner = getattr(called, "__self__", None)
            if getattr(owner, "__name__", type(owner).__name__) in KERNEL:
                counts["system calls"] += 1
            elif called.__name__ == "clone" and isinstance(owner, paddle.Tensor):
                counts["bytes copied"] += owner.element_size() * int(owner.numel())

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


def stepping(name: str, micro_batches: int, folder: str) -> Callable[[], Any]:
    """Begins a job and returns what trains a batch in it. Collective."""
    case = replace(MODELS["tiny"], micro_batches=micro_batches)
    started(2, micro_batches, case.rows, **({"sums": "tree"} if name == "tree" else {}))
    layers, batch = case.layers(), case.batch()
    plain = nn.Sequential(*(layer.build_layer() for layer in layers))
    if name == "fit":
        fitted = fleetpipe.Model(plain, split_spec=SPLIT)
        adam = paddle.optimizer.Adam(1e-4, parameters=fitted.parameters())
        fitted.prepare(adam, nn.MSELoss())
        data = paddle.io.TensorDataset(batch)
        return lambda: fitted.fit(data, batch_size=len(data), verbose=0)
    if name == "captured":
        example = batch[0][: case.rows]
        pipe = fleetpipe.pipeline(plain, example, nn.MSELoss(), SPLIT, verify=False)
        adam = paddle.optimizer.Adam(1e-4, parameters=pipe.parameters())
        model, optimizer = fleet.distributed_model(pipe), fleet.distributed_optimizer(adam)
    else:
        model, optimizer = wrapped(layers, nn.MSELoss())
    if name != "kept":
        return lambda: model.train_batch(batch, optimizer)
    os.environ[FOLDER] = folder
    manager = fleetpipe.CheckpointManager(folder, save_interval=99)
    # Each step ends the one before, whose state it keeps.
    steps = fleetpipe.resume(model, optimizer, manager=manager).steps(99)
    return lambda: (next(steps), model.train_batch(batch, optimizer))


def measured(name: str, micro_batches: int) -> Counter[str]:
    """Returns the counts of a steady step of this rank. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        step = stepping(name, micro_batches, folder)
        for _ in range(2):
            step()
        counts = counted(step)
        fleet.shutdown()
    os.environ.pop(FOLDER, None)
    return counts


def main() -> None:
    """Launches the ranks of this file and shows what they counted."""
    options = parser(__doc__)
    options.add_argument("--case", nargs="+", choices=CASES, default=CASES, help="default: all")
    arguments = options.parse_args()
    if is_rank():
        answer([[measured(name, many) for many in (FEW, MANY)] for name in arguments.case])
        return
    figures = []
    for name, ranks in zip(arguments.case, zip(*on_ranks(2))):
        for key in sorted(set().union(*(many for _, many in ranks))):
            more = [many.get(key, 0) - few.get(key, 0) for few, many in ranks]
            if any(more):
                figures.append(Figure(f"{name}: {key}", [one / (MANY - FEW) for one in more]))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
