"""What ranks compare in a batch besides rows: learning rates, parts of sequences, losses."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fleetpipe import fleet
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import ColumnParallelLinear, LayerDesc
from tests import jobs
from tests.pipelines import CLASSES, FEATURES, batch, mlp_layers, pipeline, sgd

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))

#: By what is refused: the axis of two ranks, and words of the error.
SITUATIONS = {
    "optimizer:learning_rates": ("dp", "0.1 and 0.2"),
    "data:equal_parts": ("sep", "own_part"),
    "loss:losses_of_shards": ("mp", "gather_output=True"),
}


def texts() -> dict[str, tuple[str, str]]:
    """Trains a batch in each situation: the error as it is, and as the script allows it."""
    found = {}
    for refused, (axis, _) in SITUATIONS.items():
        ends = []
        for allow in ([], [refused]):
            degrees = {"pp_degree": 1, f"{axis}_degree": 2}
            strategy = jobs.strategy(4, own={"allow": allow})
            strategy.hybrid_configs = degrees
            fleet.init(is_collective=True, strategy=strategy)
            layers = mlp_layers()
            if axis == "mp":
                head = {"gather_output": False, "has_bias": True}
                layers = [LayerDesc(ColumnParallelLinear, FEATURES, 2 * CLASSES, **head)]
            model, text = pipeline(layers), ""
            rate = 0.1 * (1 + RANK) if axis == "dp" else 0.1
            try:
                model.train_batch(batch(4, RANK if axis == "dp" else 0), sgd(model, rate))
            except FleetPipeError as error:
                text = str(error)
            with suppress(FleetPipeError):
                fleet.shutdown()
            ends.append(text)
        found[refused] = (ends[0], ends[1])
    return found


def test_what_ranks_cannot_have_rightly_is_refused_and_may_be_allowed(
    on_ranks: Callable[..., list[Any]],
) -> None:
    first, second = on_ranks(texts, 2)
    for refused, (_, words) in SITUATIONS.items():
        assert words in first[refused][0] + second[refused][0], refused
        assert "" not in (first[refused][0], second[refused][0])
        assert first[refused][1] == second[refused][1] == ""
