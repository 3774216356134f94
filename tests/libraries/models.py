"""Tiny configurations of PaddleNLP's language models, and the batches that they train on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

VOCABULARY, LENGTH = 96, 16
MICRO_BATCHES, ROWS, STEPS = 4, 2, 4


class Model(NamedTuple):
    """The prefix of the library's class names, and options of the configuration."""

    prefix: str
    options: dict[str, Any]


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "seq_length": LENGTH,
    "use_flash_attention": False,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS = {
    "llama": Model("Llama", _SIZES),
    "llama tied": Model("Llama", {**_SIZES, "tie_word_embeddings": True}),
    "gpt": Model("GPT", {**_SIZES, **_NO_DROPOUT}),
    "qwen2": Model("Qwen2", _SIZES),
    "qwen2 tied": Model("Qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "gemma": Model("Gemma", {**_SIZES, "head_dim": 16}),
    "qwen": Model("QWen", {**_SIZES, "kv_channels": 16, "intermediate_size": 256}),
}


def class_of(model: str, ending: str) -> Any:
    """Returns a class of the library: ``LlamaForCausalLMPipe``, ``LlamaConfig``."""
    from paddlenlp import transformers

    return getattr(transformers, MODELS[model].prefix + ending)


def batches() -> list[np.ndarray[Any, Any]]:
    """Returns the tokens of each step: [rows, LENGTH + 1], the labels one token further.

    Each row counts up from a number of its own, so that there is something to learn.
    """
    numbers = np.random.default_rng(0)
    starts = numbers.integers(1, VOCABULARY - LENGTH, (STEPS, MICRO_BATCHES * ROWS, 1))
    return list(starts + np.arange(LENGTH + 1))


def adamw(parameters: list[Any]) -> Any:
    """Returns the optimizer of both sides."""
    import paddle

    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    return paddle.optimizer.AdamW(5e-3, parameters=parameters, grad_clip=clip)
