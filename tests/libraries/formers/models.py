"""Tiny configurations of PaddleFormers' language models, and what they train on."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import numpy as np

from tests.libraries import families
from tests.libraries.models import LENGTH, MICRO_BATCHES, ROWS, VOCABULARY

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    # On by default in 1.2.0; it needs a kernel that CPUs do not have.
    "fuse_rms_norm": False,
}
_TIED = {**_SIZES, "tie_word_embeddings": True}

#: By version of PaddleFormers, the models: the class's prefix, and its configuration.
VERSIONS = {
    "0.4.1": {
        "qwen2": ("Qwen2", _SIZES),
        "qwen2 tied": ("Qwen2", _TIED),
        "qwen3": ("Qwen3", _SIZES),
    },
    "1.2.0": {
        "llama": ("Llama", _SIZES),
        "llama tied": ("Llama", _TIED),
        "qwen2": ("Qwen2", _SIZES),
        "qwen3": ("Qwen3", _SIZES),
    },
}


def version() -> str:
    """Returns that which is installed, "" for none."""
    try:
        return importlib.metadata.version("paddleformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


MODELS = families.chosen(VERSIONS[version()]) if version() in VERSIONS else {}


def class_of(model: str, ending: str) -> Any:
    """Returns a class of the library: ``Qwen2ForCausalLMPipe``, ``Qwen2Config``."""
    prefix, _ = MODELS[model]
    if version() == "1.2.0" and prefix.startswith("Qwen"):
        return _qwen_of_1_2(prefix, ending)
    return getattr(importlib.import_module("paddleformers.transformers"), prefix + ending)


def _qwen_of_1_2(prefix: str, ending: str) -> Any:
    """Returns a class of a module that 1.2.0 does not import without the package paddlefleet.

    The module needs it for a class that has nothing to do with these; an empty one will do. What
    is built on Paddle's Fleet has "Deprecated" in its name there.
    """
    name = "paddleformers.transformers.gpt_provider"
    if name not in sys.modules:
        sys.modules[name] = placeholder = ModuleType(name)
        placeholder.GPTModelProvider = object  # type: ignore[attr-defined]
    package = f"paddleformers.transformers.{prefix.lower()}"
    if ending == "Config":
        return getattr(importlib.import_module(f"{package}.configuration"), prefix + ending)
    return getattr(importlib.import_module(f"{package}.modeling"), f"{prefix}{ending}Deprecated")


def causal_mask(rows: int = MICRO_BATCHES * ROWS) -> np.ndarray[Any, Any]:
    """Returns 1 where a token may look at another: [rows, 1, LENGTH, LENGTH], float32.

    Without one the library's pipelines are not causal.
    """
    mask: np.ndarray[Any, Any] = np.tril(np.ones([LENGTH, LENGTH], "float32"))
    return np.tile(mask, [rows, 1, 1, 1])
