"""Bugs that were seeded into ``program.py``, and where each is; run by hand it tries them all.

    python -m tests.contrib.locator.bugs [NAME ..]

Each follows one that somebody has reported. ``test_bugs.py`` has those that CI runs, and
``seeded.py`` others, of more axes.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Bug(NamedTuple):
    """A bug and what is to be named.

    Attributes:
        degrees: Of the job.
        options: Of the program.
        layer: Its path.
        phase: Where a step first differs.
        axis: Along which.
        report: Whose bug it follows.
    """

    degrees: str
    options: str
    layer: str
    phase: str
    axis: str
    report: str


TIED = "shared_layers.embedding.table"
LOOP = "--loop"
BUGS = {
    "no-tied-reduction": Bug("pp2", "", TIED, "reduction", "pp", "uw-syfi/piper#13"),
    "gradient-counted-twice": Bug("pp2", "", TIED, "gradient", "pp", "NVIDIA/Megatron-LM#844"),
    "labels-shuffled": Bug("pp2", "", "", "data", "pp", "NVIDIA-NeMo/Megatron-Bridge#5944"),
    "layer-missing": Bug("pp2", "", "2.norm", "initial", "", "arXiv 2506.09280"),
    "epsilon": Bug("pp2", "", "1.norm", "forward", "", "NVIDIA-NeMo/Megatron-Bridge#5411"),
    "activation": Bug("pp2", "", "1", "forward", "", "NVIDIA-NeMo/Megatron-Bridge#5411"),
    "loss-scaled-by-dp": Bug("dp2", "", "", "loss", "dp", "intel/ipex-llm#2079"),
    "loss-mean-of-all": Bug("dp2", LOOP, "", "loss", "dp", "verl-project/verl#5625"),
    "not-divided": Bug(
        "dp2", f"{LOOP} --micro-batches 6", "", "loss", "dp", "karpathy/nanoGPT#206"
    ),
    "same-data": Bug("dp2", LOOP, "", "data", "dp", "NVlabs/LongLive#71"),
    "data-of-another-step": Bug("dp2", "", "", "data", "dp", "NVlabs/LongLive#71"),
    "one-not-reduced": Bug("dp2", LOOP, "blocks.0.widen", "reduction", "dp", "gpt-neox#1257"),
    "reduced-twice": Bug("dp2", LOOP, "blocks.0.norm", "reduction", "dp", "fairseq#494"),
    "summed-not-averaged": Bug("dp2", LOOP, "head", "reduction", "dp", "intel/ipex-llm#2079"),
    "seed-by-rank": Bug("dp2", LOOP, "embedding.table", "initial", "dp", "ecmwf/anemoi-core#595"),
    "update-on-one": Bug("dp2", LOOP, "norm", "initial", "dp", "NVIDIA/Megatron-LM#656"),
    "rate-by-rank": Bug("dp2", LOOP, "", "optimizer input", "dp", "huggingface/accelerate#1398"),
    "scheduler-twice": Bug(
        "dp2", LOOP, "", "optimizer input", "", "huggingface/transformers#24088"
    ),
    "parameter-left-out": Bug("dp2", LOOP, "head", "optimizer input", "", "paiml/entrenar#314"),
    "same-stream": Bug(
        *("dp2", f"{LOOP} --dropout 0.2", "blocks.0.dropout", "forward", "dp"),
        "huggingface/transformers#31412",
    ),
    "row-not-reduced": Bug("mp2", LOOP, "blocks.0.narrow", "forward", "mp", "awslabs/slapo#10"),
    "row-bias-twice": Bug(
        # Biases begin as zeros: what is wrong first is their gradient.
        *("mp2", LOOP, "blocks.1.narrow", "gradient", "mp"),
        "huggingface/text-generation-inference#1036",
    ),
    "column-backward-not-reduced": Bug(
        "mp2", LOOP, "blocks.1.widen", "gradient", "mp", "NovaSky-AI/SkyRL#1886"
    ),
    "local-norm": Bug("mp2", LOOP, "embedding.table", "clip", "mp", "meta-pytorch/torchtune#2420"),
}


def located(degrees: str, options: list[str], *more: str) -> tuple[int, Any]:
    """Returns the exit code of ``fleetpipe locate``, and what it prints as JSON."""
    count = math.prod(int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", degrees) if axis != "ep")
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "fleetpipe", "locate", "--nproc", str(count), "--json"]
        command += ["--log-dir", logs, *(more or ("--twin", "DEGREES="))]
        command += [str(Path(__file__).with_name("program.py")), *options]
        environment = {**os.environ, "DEGREES": degrees}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
    if done.returncode > 1:
        raise AssertionError(done.stderr[-3000:])
    return done.returncode, json.loads(done.stdout)


def right(name: str) -> bool:
    """Seeds a bug, prints what is named, and returns whether that is the place."""
    bug = BUGS[name]
    _, place = located(bug.degrees, [*bug.options.split(), "--bug", name])
    named = place and tuple(place[key] for key in ("layer", "phase", "axis"))
    expected = bug.layer, bug.phase, bug.axis
    verdict = "right" if named == expected else f"WRONG, expected {expected}"
    print(f"{name} ({bug.report}): {named}, step {place and place['step']}: {verdict}", flush=True)
    return named == expected


if __name__ == "__main__":
    results = [right(name) for name in sys.argv[1:] or BUGS]
    print(f"{sum(results)} of {len(results)} right")
