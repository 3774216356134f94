"""Continues prompts with the library's pipeline, and by a loop by hand with its single class."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.distributed import fleet  # noqa: E402

from tests.libraries.installed import FORMERS, class_of, configuration  # noqa: E402
from tests.libraries.models import VOCABULARY  # noqa: E402
from tests.pipelines import job  # noqa: E402

NEW = 4


def mask(length: int) -> Any:
    """Returns what makes PaddleFormers' models causal."""
    return paddle.tril(paddle.ones([1, 1, length, length]))


def inputs_of(tokens: Any) -> Any:
    """Returns what the pipeline takes."""
    return (tokens, mask(tokens.shape[1])) if FORMERS else tokens


def by_hand(model: Any, prompt: list[int]) -> list[int]:
    """Continues a prompt with the likeliest tokens."""
    tokens = list(prompt)
    with paddle.no_grad():
        for _ in range(NEW):
            options = {"attention_mask": mask(len(tokens))} if FORMERS else {}
            logits = model(paddle.to_tensor([tokens]), **options)
            logits = logits[0] if isinstance(logits, tuple) else logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def compare(name: str, folder: str, prompts: list[list[int]]) -> Any:
    """Returns the new tokens of both."""
    paddle.seed(1)
    single = class_of(name, "ForCausalLM")(configuration(name))
    for parameter in single.parameters():
        if parameter.ndim > 1:
            # Larger, so that the tokens differ.
            parameter.set_value(parameter * 4)
    single.save_pretrained(f"{folder}/{name}")
    single.eval()
    with job(2):
        kind = class_of(name, "ForCausalLMPipe")
        pipe = fleet.distributed_model(kind.from_pretrained(f"{folder}/{name}", dtype="float32"))
        new = fleetpipe.generate(pipe, prompts, NEW, temperature=0, inputs=inputs_of)
    return new, [by_hand(single, prompt) for prompt in prompts]


folder, count, *names = sys.argv[1:]
numbers = np.random.default_rng(0)
prompts = [numbers.integers(0, VOCABULARY, 1 + n % 9).tolist() for n in range(int(count))]
Path(folder, "tokens.json").write_text(
    json.dumps({name: compare(name, folder, prompts) for name in names})
)
