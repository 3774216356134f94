"""Small language models, and the loops by hand beside which ``generate`` is tested."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from fleetpipe import fleet
from tests.launching import ROOT

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


def prompts(count: int = 50, seed: int = 0) -> list[list[int]]:
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
