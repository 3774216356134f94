"""Tokens are those of a loop by hand with the single model, under every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import paddle
import pytest

import fleetpipe
from fleetpipe import fleet
from fleetpipe.callbacks import LogSamples
from fleetpipe.contrib.generation.sampling import Sampling, names_of
from tests.contrib.generation.languages import (
    LLAMA,
    VOCABULARY,
    batch,
    by_hand,
    gpt,
    prompts,
    single,
    spread,
)
from tests.contrib.slices import sliced
from tests.jobs import job
from tests.pipelines import adam, bits, pipeline, train

NEW = 4
DRAWN: dict[str, Any] = {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "seed": 5}


@cache
def expected() -> dict[str, list[list[int]]]:
    """The tokens of the single model of `gpt`, the likeliest and drawn."""
    with job(1):
        model = single(gpt())
    sampling, names = Sampling(**DRAWN), names_of(prompts())
    tokens = {
        "greedy": [by_hand(model, prompt, NEW) for prompt in prompts()],
        "drawn": [
            by_hand(model, prompt, NEW, lambda row, place, n=n: sampling.choose(row, *n, place))
            for prompt, n in zip(prompts(), names)
        ],
    }
    # They vary, or equal ones would say little.
    assert all(len({*map(tuple, rows)}) > 20 for rows in tokens.values())
    return tokens


def both(model: Any) -> dict[str, list[list[int]]]:
    greedy = fleetpipe.generate(model, prompts(), NEW, temperature=0)
    return {"greedy": greedy, "drawn": fleetpipe.generate(model, prompts(), NEW, **DRAWN)}


@pytest.mark.parametrize(
    ("pp", "schedule", "chunks"),
    [(1, "1F1B", 1), (4, "1F1B", 1), (2, "Interleaved1F1B", 2), (2, "ZBV", 2), (2, "Seq1F1B", 1)],
)
def test_one_process_has_the_tokens_of_a_loop_by_hand(pp: int, schedule: str, chunks: int) -> None:
    tokens = expected()
    with job(pp, schedule=schedule):
        model = gpt(num_virtual_pipeline_stages=chunks)
        assert both(model) == tokens
        whole = fleetpipe.generate(model, prompts(), NEW, temperature=0, cache=False)
        assert whole == tokens["greedy"]


def in_a_job(degrees: dict[str, int], beside: bool) -> dict[str, Any]:
    """Tokens in a job of some degrees, and a training loss behind them."""
    with job(**degrees):
        model = gpt()
        found: dict[str, Any] = {}
        optimizer = adam(model)
        for step in range(2):
            if beside:
                found = found or both(model)
            loss = model.train_batch(batch(8, step), optimizer)
        return {**found, "loss": loss.numpy().tobytes()}


def with_whole_logits(**degrees: int) -> list[list[int]]:
    """Tokens of a model whose shards all have all logits."""
    with job(**degrees):
        paddle.seed(0)
        return fleetpipe.generate(pipeline(sliced.layers()), prompts(5), NEW)


def on_this_rank() -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Tokens with whole logits, and what `in_a_job` returns, in layouts of four ranks."""
    layouts = ({"pp": 2, "mp": 2}, {"pp": 2, "dp": 2})
    found = [in_a_job(degrees, beside) for degrees in layouts for beside in (True, False)]
    with job(pp=2, dp=2):
        # One replica has nothing to do, and then trains on.
        model = gpt()
        found.append({"one": fleetpipe.generate(model, prompts(1), NEW, temperature=0)})
        model.eval_batch(batch(2), compute_loss=True)
    return with_whole_logits(pp=2, mp=2), found


@pytest.mark.processes
def test_all_ranks_have_the_tokens_of_a_loop_by_hand(on_ranks: Callable[..., list[Any]]) -> None:
    for whole, rank in on_ranks(on_this_rank, 4):
        assert whole == with_whole_logits(pp=1)
        assert rank.pop() == {"one": expected()["greedy"][:1]}
        for beside, alone in zip(rank[::2], rank[1::2]):
            assert beside == {**expected(), **alone}


def test_training_has_the_bits_of_a_run_without() -> None:
    options: dict[str, Any] = {
        "data": lambda micro_batches, step: sliced.batch(2 * micro_batches, 7, step),
        "loss_fn": sliced.loss,
        "gradients": True,
    }
    layers = partial(sliced.layers, dropout=0.2)
    modes = []

    def freeze(model: Any) -> None:
        model.layers.sublayers()[3].eval()
        modes.append([layer.training for layer in model.layers.sublayers()])

    def freeze_and_generate(model: Any) -> None:
        freeze(model)
        fleetpipe.generate(model, prompts(3), 3)
        modes.append([layer.training for layer in model.layers.sublayers()])

    assert train(layers(), each_step=freeze_and_generate, **options) == train(
        layers(), each_step=freeze, **options
    )
    assert modes == [modes[0]] * len(modes)
    assert len(set(modes[0])) == 2


def docs_beside(ids: Any) -> Any:
    """The ids with a document for each, which `examples/llm` takes."""
    return ids, paddle.zeros_like(ids, dtype="int32")


@pytest.mark.parametrize("listed", [False, True])
def test_a_captured_model_and_a_list_have_the_tokens_of_the_plain_one(listed: bool) -> None:
    shape = LLAMA["Shape"](width=16, blocks=2, heads=2, key_heads=1, perceptron=32)

    def llama() -> Any:
        paddle.seed(0)
        return spread(LLAMA["Llama"](VOCABULARY, shape))

    plain = llama()
    plain.eval()
    tokens = [by_hand(lambda ids: plain(*docs_beside(ids)), prompt, 3) for prompt in prompts(4)]
    options: dict[str, Any] = {"temperature": 0, "inputs": docs_beside}
    with job(2):
        if listed:
            model = pipeline(LLAMA["llama_layers"](VOCABULARY, shape))
            options = {"temperature": 0, "cache": True}
            # Both have their parameters in the same order.
            for one, other in zip(model.layers.parameters(), plain.parameters()):
                one.set_value(other)
        else:
            example = docs_beside(paddle.zeros([2, 8], "int64"))
            model = fleet.distributed_model(
                fleetpipe.pipeline(llama(), example, loss_fn=LLAMA["next_token_loss"])
            )
        assert fleetpipe.generate(model, prompts(4), 3, **options) == tokens


def fit(*callbacks: Any) -> Any:
    """Trains by `fit` for two epochs of 4 batches, and returns the losses and weights."""
    with job(2):
        paddle.seed(0)
        model = fleetpipe.Model(sliced.layers(0.2))
        model.prepare(paddle.optimizer.SGD(0.1, parameters=model.parameters()), loss=sliced.loss)
        data = paddle.io.TensorDataset(batch(32))
        history = model.fit(data, batch_size=8, epochs=2, verbose=0, callbacks=[*callbacks])
        return history, bits(model.network.full_state_dict())


@pytest.mark.parametrize(("every", "steps"), [(None, (0, 4, 8)), (3, (0, 3, 6))])
def test_fit_logs_samples(every: int | None, steps: tuple[int, ...], capsys: Any) -> None:
    samples = LogSamples([[1, 2], [3]], 2, every, lambda tokens: f"<{tokens[:2]}>", top_k=3)
    assert fit(samples) == fit()
    lines = capsys.readouterr().out.splitlines()
    heads = [f"sample after step {step}: <[{begin}" for step in steps for begin in ("1, 2]", "3, ")]
    assert [line[: len(head)] for line, head in zip(lines, heads)] == heads
    assert len(lines) == len(heads)
