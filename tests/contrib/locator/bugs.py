"""Bugs that were seeded into ``program.py``, and where each is; run by hand it tries them all.

    python -m tests.contrib.locator.bugs [NAME ..]

Each follows one that somebody has reported. What CI runs is marked in ``test_bugs.py``.
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

HERE = Path(__file__).parent


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
    program: str = "program"


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

LOOPS, BATCHES = "loop_program", "batch_program"
ATTENTION, SEQUENCE, EXPERTS = "--net attention", "--net sequence", "--experts"
TABLE, PLACES = "shared_layers.table.tokens", "shared_layers.table.positions"
ROUTER, LAST_EXPERT = "3.mixture.router", "3.mixture.experts.experts.3"
#: Of another author than the tool's: options, layer, phase, axis; all follow no one report.
BUGS |= {
    name: Bug(degrees, options, layer, phase, axis, "", program)
    for program, name, degrees, options, layer, phase, axis in (
        (LOOPS, "unequal-rows", "dp2", ATTENTION, "", "loss", "dp"),
        (LOOPS, "divided-twice", "dp2", "--micro-batches 6", "", "loss", "dp"),
        (LOOPS, "not-cleared", "dp2", "", "", "gradient", "dp"),
        (LOOPS, "decay-on-one", "dp2", "", "stem", "update", "dp"),
        (LOOPS, "momentum-on-one", "dp2", "", "stem", "update", "dp"),
        (LOOPS, "head-after-draws", "dp2", "", "head", "initial", "dp"),
        (LOOPS, "statistics-frozen", "dp2", "", "norm", "forward", "dp"),
        (LOOPS, "overlapping-slices", "dp2", "", "", "data", "dp"),
        (LOOPS, "labels-of-another", "dp2", "", "", "data", "dp"),
        (LOOPS, "last-overwrites", "dp2", "", "", "gradient", ""),
        (LOOPS, "reduced-too-early", "dp2", "", "head", "reduction", "dp"),
        (LOOPS, "clipped-before", "dp2", "", "head", "reduction", "dp"),
        (LOOPS, "largest-of-ranks", "dp2", "", "deep", "reduction", "dp"),
        (LOOPS, "half-precision-sum", "dp2", "", "stem", "reduction", "dp"),
        (LOOPS, "biases-left-out", "dp2", "", "head", "reduction", "dp"),
        (LOOPS, "state-lost-on-one", "dp2", "--optimizer AdamW", "stem", "update", "dp"),
        (LOOPS, "stale-broadcast", "dp2", "", "head", "initial", "dp"),
        (LOOPS, "rate-after-skip", "dp2", "", "", "optimizer input", "dp"),
        (LOOPS, "no-clip", "dp2", "", "", "clip", "dp"),
        (LOOPS, "table-not-reduced", "mp2", ATTENTION, "table", "forward", "mp"),
        (LOOPS, "norm-by-shard", "mp2", ATTENTION, "norm", "initial", "mp"),
        (LOOPS, "scaled-by-part", "mp2", ATTENTION, "out", "forward", "mp"),
        (LOOPS, "loss-of-part", "mp2", ATTENTION, "", "loss", "mp"),
        (LOOPS, "dropout-of-parts", "mp2", ATTENTION, "out", "forward", "mp"),
        (LOOPS, "decay-on-one mp", "mp2", ATTENTION, "table", "update", "mp"),
        (LOOPS, "norm-of-parts", "mp2", SEQUENCE, "norm", "reduction", "mp"),
        (LOOPS, "gathered-as-sum", "mp2", SEQUENCE, "last", "gradient", "mp"),
        (BATCHES, "label-not-shifted", "pp2", "", "", "data", "pp"),
        (BATCHES, "shifted-again", "pp2", "", "", "loss", ""),
        (BATCHES, "number-within-stage", "pp2", "", "3", "forward", ""),
        (BATCHES, "detached", "pp2", "", "2", "gradient", ""),
        (BATCHES, "dropout-by-stage", "pp2", "--dropout 0.2", "3.dropout", "forward", ""),
        (BATCHES, "divided-twice pp", "pp2", "", "", "loss", ""),
        (BATCHES, "head-drawn-again", "pp2", "", TABLE, "initial", "pp"),
        (BATCHES, "norm-frozen", "pp2", "", "4", "gradient", ""),
        (BATCHES, "tied-scaled", "pp2", "", TABLE, "reduction", "pp"),
        (BATCHES, "rate-by-stage", "pp2", "", "", "optimizer input", "pp"),
        (BATCHES, "decay-on-last", "pp2", "", TABLE, "update", "pp"),
        (BATCHES, "last-stage-left-out", "pp2", "", "3.after", "optimizer input", ""),
        (BATCHES, "shuffled-by-rank", "pp2", "", "", "data", "pp"),
        (BATCHES, "parts-in-order", "cp2", "", "1.attention", "forward", "cp"),
        (BATCHES, "positions-from-zero", "sep2", "", PLACES, "forward", "sep"),
        (BATCHES, "positions-from-zero cp", "cp2", "", PLACES, "forward", "cp"),
        (BATCHES, "local-attention", "sep2", "", "1.attention", "forward", "sep"),
        (BATCHES, "local-attention cp", "cp2", "", "1.attention", "forward", "cp"),
        (BATCHES, "doubled-on-one", "sep2", "", "1.attention.qkv", "gradient", ""),
        (BATCHES, "doubled-on-one dp", "pp2dp2", "", "3.attention.qkv", "gradient", ""),
        (BATCHES, "norm-changed-on-one", "cp2", "", "1.before", "initial", "cp"),
        (BATCHES, "decay-on-one sharding", "sharding2", "", PLACES, "update", "sharding"),
        (BATCHES, "router-not-reduced", "sharding2ep2", EXPERTS, ROUTER, "reduction", "sharding"),
        (LOOPS, "shards-swapped", "mp2", ATTENTION, "q", "initial", "mp"),
        (LOOPS, "evaluating-on-one", "dp2", "", "", "forward", "dp"),
        (LOOPS, "slice-for-scatter", "mp2", SEQUENCE, "table", "gradient", "mp"),
        (LOOPS, "world-for-dp", "dp2mp2", ATTENTION, "head", "reduction", "dp"),
        (BATCHES, "half-in-a-stage", "pp2", "", "3", "forward", ""),
        (BATCHES, "labels-within-part", "sep2", "", "", "data", "sep"),
        (BATCHES, "local-mean", "sep2", "--masked", "", "loss", "sep"),
        (BATCHES, "not-causal", "cp2", "", "1.attention", "forward", "cp"),
        (
            BATCHES,
            "capacity-by-ranks",
            "sharding2ep2",
            f"{EXPERTS} --capacity 1",
            "1.mixture",
            "forward",
            "ep",
        ),
        (
            BATCHES,
            "balance-by-ep",
            "sharding2ep2",
            f"{EXPERTS} --balance 0.1",
            "",
            "loss",
            "sharding",
        ),
        (BATCHES, "expert-twice", "sharding2ep2", EXPERTS, LAST_EXPERT, "gradient", ""),
    )
}


def located(
    degrees: str, options: list[str], *more: str, program: str = "program"
) -> tuple[int, Any]:
    """Returns the exit code of ``fleetpipe locate``, and what it prints as JSON."""
    count = math.prod(int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", degrees) if axis != "ep")
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "fleetpipe", "locate", "--nproc", str(count), "--json"]
        command += ["--log-dir", logs, *(more or ("--twin", "DEGREES="))]
        command += [str(HERE / f"{program}.py"), *options]
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
    options = [*bug.options.split(), "--bug", name.partition(" ")[0]]
    _, place = located(bug.degrees, options, program=bug.program)
    named = place and tuple(place[key] for key in ("layer", "phase", "axis"))
    expected = bug.layer, bug.phase, bug.axis
    verdict = "right" if named == expected else f"WRONG, expected {expected}"
    print(f"{name} ({bug.report}): {named}, step {place and place['step']}: {verdict}", flush=True)
    return named == expected


if __name__ == "__main__":
    results = [right(name) for name in sys.argv[1:] or BUGS]
    print(f"{sum(results)} of {len(results)} right")
