"""Tokens are those of a loop by hand with the single model; what ``generate`` refuses."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

import fleetpipe
from fleetpipe import fleet
from fleetpipe.callbacks import LogSamples
from fleetpipe.contrib.generation import Sampling, prompt_keys
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.errors import BoundaryError, ConfigError, FleetPipeError, StateError, UsageError
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests.contrib.slices import sliced
from tests.launching import ROOT
from tests.pipelines import adam, bits, job, pipeline

VOCABULARY = 16
#: `examples/gpt.py`: its layers keep keys and values, and its weights are cut along mp.
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "gpt.py"))
#: `examples/llm/llama.py`, for `fleetpipe.pipeline` and as a list.
LLAMA = runpy.run_path(str(ROOT / "examples" / "llm" / "llama.py"))
_SIZES = SimpleNamespace(width=16, heads=2, dropout=0.1, length=32, blocks=4)


def gpt(**options: Any) -> Any:
    """The example's model, wrapped."""
    paddle.seed(0)
    topology = fleet.get_hybrid_communicate_group().topology()
    model = EXAMPLE["gpt"](_SIZES, VOCABULARY, topology=topology, **options)
    return fleet.distributed_model(spread(model))


def spread(model: Any) -> Any:
    """Makes the weights of a new model larger, so that the tokens it predicts differ."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.set_value(parameter * 15.0)
    return model


def single(model: Any) -> Any:
    """Returns the single model of a wrapped one, in evaluation, with its weights."""
    alone = model.layers.single_model()
    alone.set_state_dict(model.layers.full_state_dict())
    alone.eval()
    return alone


def prompts(count: int = 24, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 9 tokens."""
    numbers = np.random.default_rng(seed)
    return [numbers.integers(0, VOCABULARY, 1 + n % 9).tolist() for n in range(count)]


def batch(rows: int, step: int = 0) -> list[Any]:
    """Tokens and the tokens that follow, int64 [rows, 12]."""
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (rows, 13))
    return [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]


def likeliest(logits: Any, place: int) -> int:
    """The token with the largest logit."""
    return int(logits.argmax())


def by_hand(
    model: Callable[[Any], Any],
    prompt: Sequence[int],
    count: int,
    choose: Callable[[Any, int], int] = likeliest,
) -> list[int]:
    """Continues a prompt with a plain model, in a plain loop."""
    sequence = list(prompt)
    with paddle.no_grad():
        for _ in range(count):
            logits = model(paddle.to_tensor([sequence]))[0, -1].numpy()
            sequence.append(choose(logits, len(sequence)))
    return sequence[len(prompt) :]


NEW = 4
DRAWN: dict[str, Any] = {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "seed": 5}


@cache
def expected() -> dict[str, list[list[int]]]:
    """The tokens of the single model of `gpt`, the likeliest and drawn."""
    with job(1):
        model = single(gpt())
    sampling, names = Sampling(**DRAWN), prompt_keys(prompts())
    tokens = {
        "greedy": [by_hand(model, prompt, NEW) for prompt in prompts()],
        "drawn": [
            by_hand(model, prompt, NEW, lambda row, place, n=n: sampling.choose(row, *n, place))
            for prompt, n in zip(prompts(), names)
        ],
    }
    # They vary, or equal ones would say little.
    assert all(len({*map(tuple, rows)}) > 10 for rows in tokens.values())
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


@pytest.fixture
def model() -> Iterator[Any]:
    with job(2):
        paddle.seed(0)
        yield pipeline(sliced.layers())


def test_modes_stay_as_they_were(model: Any) -> None:
    model.layers.sublayers()[3].eval()
    modes = [layer.training for layer in model.layers.sublayers()]
    fleetpipe.generate(model, prompts(3), 3)
    assert [layer.training for layer in model.layers.sublayers()] == modes
    assert len(set(modes)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"inputs": 5}, "inputs=5"),
        ({"eos": "</s>"}, "eos='</s>'"),
        ({"eos": [1, 2.5]}, "eos=[1, 2.5]"),
        ({"tokens": []}, "tokens=[]"),
        ({"tokens": "text"}, "tokens='text'"),
        ({"tokens": [[1], []]}, "prompt 1 is no list"),
        ({"tokens": [1, 2]}, "prompt 0 is no list"),
        ({"tokens": [[1.0]]}, "prompt 0 is no list"),
        ({"tokens": [[-1]]}, "prompt 0 is no list"),
        ({"tokens": [[[1], [2]]]}, "prompt 0 is no list"),
        ({"tokens": [[[1], [2, 3]]]}, "prompt 0 is no list"),
    ],
)
def test_wrong_arguments_are_refused(model: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleetpipe.generate(model, **{"tokens": [[1]], "max_new_tokens": 2, **options})
    assert words in str(caught.value)


def returning(function: Callable[[Any], Any]) -> list[Any]:
    """The layers, and a function behind them that does not say that it takes slices."""
    return [*sliced.layers(), function]


def head() -> list[Any]:
    return [*sliced.layers()[:-1], VocabularyHead(sliced.WIDTH, sliced.VOCABULARY)]


@pytest.mark.parametrize(
    ("layers", "options", "error", "words"),
    [
        (lambda: returning(lambda x: x[:, 0]), {}, ConfigError, r"paddle.float32 \[1, 16\]"),
        (lambda: returning(lambda x: x), {"cache": True}, ConfigError, "cache=True(.|\n)*layer 6"),
        (lambda: returning(lambda x: x * math.nan), {}, BoundaryError, "next token are NaN"),
        (lambda: returning(lambda x: x.abs() * math.inf), {}, BoundaryError, "or infinite"),
        (head, {"loss": VocabularyLoss()}, ConfigError, "and a VocabularyHead"),
    ],
)
def test_models_without_logits_or_a_cache_are_refused(
    layers: Callable[[], list[Any]], options: Any, error: type[FleetPipeError], words: str
) -> None:
    with job(2):
        model = pipeline(layers(), loss_fn=options.pop("loss", sliced.loss))
        with pytest.raises(error, match=words):
            fleetpipe.generate(model, [[1, 2]], 2, **options)


def test_what_is_not_wrapped_or_has_ended_is_refused() -> None:
    with job(2):
        layers = PipelineLayer(sliced.layers(), num_stages=2)
        with pytest.raises(UsageError, match=r"fleet.distributed_model\(model\)"):
            fleetpipe.generate(layers, [[1]], 1)
        model = fleet.distributed_model(layers)
    with pytest.raises(StateError, match="job has ended"):
        fleetpipe.generate(model, [[1]], 1)


def differ() -> str:
    """The error of a rank that has another prompt than the first."""
    with job(2):
        model = pipeline(sliced.layers())
        rank = paddle.distributed.get_rank()
        with pytest.raises(ConfigError) as caught:
            fleetpipe.generate(model, [[1], [2, rank]], 2)
        return str(caught.value)


@pytest.mark.processes
def test_ranks_with_different_prompts_are_refused(on_ranks: Callable[..., list[Any]]) -> None:
    for text in on_ranks(differ, 2):
        assert "prompt 1 = [2, 0]" in text
        assert "prompt 1 = [2, 1]" in text


def test_prompts_end_behind_eos_and_depend_on_no_other(model: Any) -> None:
    prompts = [[1, 2], [3], [1, 2], [4, 5, 6]]
    new = fleetpipe.generate(model, prompts, 8, seed=3)
    assert new[0] != new[2]
    for given in (prompts[:1], paddle.to_tensor([[1, 2]]), np.array([[1, 2]]), [np.array([1, 2])]):
        assert fleetpipe.generate(model, given, 8, seed=3) == new[:1]
    ends = {new[1][2], new[3][5]}
    cut = [
        row[: next((n for n, token in enumerate(row, 1) if token in ends), len(row))] for row in new
    ]
    assert fleetpipe.generate(model, prompts, 8, seed=3, eos=ends) == cut
    assert cut != new


def test_draws_have_the_shares_of_the_model() -> None:
    logits = np.log(np.array([0.5, 0.05, 0.25, 0.2]))
    tries = 4000

    def shares(**options: Any) -> Any:
        values = {"temperature": 1.0, "top_k": None, "top_p": None, "seed": 1, **options}
        sampling = Sampling(**values)
        sampling.require_valid()
        drawn = [sampling.choose(logits, 7, 0, place) for place in range(tries)]
        return np.bincount(drawn, minlength=4) / tries

    assert np.allclose(shares(), [0.5, 0.05, 0.25, 0.2], atol=0.03)
    assert np.allclose(shares(top_k=2), [2 / 3, 0, 1 / 3, 0], atol=0.03)
    assert np.allclose(shares(top_p=0.8), [0.526, 0, 0.263, 0.211], atol=0.03)
    assert np.allclose(shares(top_p=0.5), [1, 0, 0, 0])
    assert np.allclose(shares(temperature=1e-320), [1, 0, 0, 0])
    assert np.allclose(
        shares(temperature=np.float32(0.5)), [0.7143, 0.0071, 0.1786, 0.1143], atol=0.03
    )
    assert prompt_keys([[1], [2], [1]])[0] != prompt_keys([[1], [2], [1]])[2]
