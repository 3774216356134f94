"""What ``generate`` refuses, before any rank waits, and what it makes of odd arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest

import fleetpipe
from fleetpipe import fleet
from fleetpipe.contrib.generation.sampling import Sampling, names_of
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.errors import BoundaryError, ConfigError, FleetPipeError, StateError, UsageError
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests.contrib.slices import sliced
from tests.jobs import job
from tests.pipelines import pipeline


@pytest.fixture
def model() -> Iterator[Any]:
    with job(2):
        paddle.seed(0)
        yield pipeline(sliced.layers())


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
    assert names_of([[1], [2], [1]])[0] != names_of([[1], [2], [1]])[2]
