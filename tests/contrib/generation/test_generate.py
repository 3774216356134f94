"""Tokens are those of a loop by hand with the single model, under every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import paddle
import pytest

import fleetpipe
from fleetpipe import fleet
from fleetpipe.contrib.generation.sampling import Sampling, names_of
from tests.contrib.generation.languages import batch, by_hand, gpt, prompts, single
from tests.contrib.slices import sliced
from tests.jobs import job
from tests.pipelines import train

NEW = 4
DRAWN: dict[str, Any] = {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "seed": 5}


@cache
def expected() -> dict[str, list[list[int]]]:
    """The tokens of the single model of `gpt`, the likeliest and drawn."""
    with job(1):
        model = single(gpt())
    sampling, names = Sampling(**DRAWN), names_of(prompts())
    return {
        "greedy": [by_hand(model, prompt, NEW) for prompt in prompts()],
        "drawn": [
            by_hand(model, prompt, NEW, lambda row, place, n=n: sampling.choose(row, *n, place))
            for prompt, n in zip(prompts(), names)
        ],
    }


def both(model: Any) -> dict[str, list[list[int]]]:
    greedy = fleetpipe.generate(model, prompts(), NEW, temperature=0)
    return {"greedy": greedy, "drawn": fleetpipe.generate(model, prompts(), NEW, **DRAWN)}


def test_the_tokens_of_a_loop_by_hand_vary() -> None:
    for rows in expected().values():
        assert len({tuple(row) for row in rows}) > 20


@pytest.mark.parametrize(
    ("pp", "schedule", "chunks"),
    [(1, "1F1B", 1), (4, "1F1B", 1), (2, "Interleaved1F1B", 2), (2, "ZBV", 2), (2, "Seq1F1B", 1)],
)
def test_one_process_has_the_tokens_of_a_loop_by_hand(pp: int, schedule: str, chunks: int) -> None:
    with job(pp, schedule=schedule):
        model = gpt(num_virtual_pipeline_stages=chunks)
        assert both(model) == expected()
        whole = fleetpipe.generate(model, prompts(), NEW, temperature=0, cache=False)
        assert whole == expected()["greedy"]


def in_a_job(degrees: dict[str, int], beside: bool) -> dict[str, Any]:
    """Tokens in a job of some degrees, and a training loss behind them."""
    with job(**degrees):
        model = gpt()
        found: dict[str, Any] = {}
        optimizer = fleet.distributed_optimizer(
            paddle.optimizer.Adam(0.01, parameters=model.parameters())
        )
        for step in range(2):
            if beside:
                found = found or both(model)
            loss = model.train_batch(batch(8, step), optimizer)
        return {**found, "loss": loss.numpy().tobytes()}


def on_this_rank() -> list[dict[str, Any]]:
    """What `in_a_job` returns for layouts of four ranks."""
    layouts = ({"pp": 2, "mp": 2}, {"pp": 2, "dp": 2})
    return [in_a_job(degrees, beside) for degrees in layouts for beside in (True, False)]


@pytest.mark.processes
def test_all_ranks_have_the_tokens_of_a_loop_by_hand(on_ranks: Callable[..., list[Any]]) -> None:
    for rank in on_ranks(on_this_rank, 4):
        for beside, alone in zip(rank[::2], rank[1::2]):
            assert beside == {**expected(), **alone}


def test_training_has_the_bits_of_a_run_without() -> None:
    options: dict[str, Any] = {
        "data": lambda micro_batches, step: sliced.batch(2 * micro_batches, 7, step),
        "loss_fn": sliced.loss,
        "gradients": True,
    }
    generate = partial(fleetpipe.generate, tokens=prompts(3), max_new_tokens=3)
    layers = partial(sliced.layers, dropout=0.2)
    assert train(layers(), each_step=generate, **options) == train(layers(), **options)
