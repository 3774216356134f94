"""Tiny configurations of PaddleFormers' language models, and what they train on."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np

from tests.libraries import models
from tests.libraries.models import LATENT, LENGTH, MICRO_BATCHES, MIXTURE, ROWS, SHARED, SIZES, YARN

_SIZES = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    # On by default in 1.2.0; it needs a kernel that CPUs do not have.
    "fuse_rms_norm": False,
}
_TIED = {**_SIZES, "tie_word_embeddings": True}
_MIXTURE = {**_SIZES, **MIXTURE, "num_experts": 4, "moe_token_dispatcher_type": "alltoall"}
_LATENT = {
    **LATENT,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "rope_scaling": {**YARN, "rope_type": "yarn"},
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
}

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
        "phi3": ("Phi3", _SIZES),
        "qwen2moe": ("Qwen2Moe", {**_MIXTURE, "shared_expert_intermediate_size": 64}),
        "qwen3moe": ("Qwen3Moe", _MIXTURE),
        "glm4moe": ("Glm4Moe", {**_MIXTURE, **SHARED}),
        "deepseekv3": ("DeepseekV3", {**_MIXTURE, **SHARED, **_LATENT}),
    },
}


def version() -> str:
    """Returns that which is installed, "" for none."""
    try:
        return importlib.metadata.version("paddleformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


MODELS = models.chosen(VERSIONS[version()]) if version() in VERSIONS else {}
#: Those that are run with pp 2 alone.
PLAIN = frozenset({"phi3", "qwen2moe", "qwen3moe", "glm4moe", "deepseekv3"})


#: What 1.2.0's modules import from packages that are not published; the classes here do not use it.
_PLACEHOLDERS = {
    "paddleformers.transformers.gpt_provider": {
        "GPTModelProvider": type("GPTModelProvider", (), {"transform_rules": {}})
    },
    "paddlefleet_ops": {"is_deep_ep_available": lambda: False},
}


def class_of(model: str, ending: str) -> Any:
    """Returns a class of the library: ``Qwen2ForCausalLMPipe``, ``Qwen2Config``."""
    prefix, _ = MODELS[model]
    if version() != "1.2.0":
        return getattr(importlib.import_module("paddleformers.transformers"), prefix + ending)
    for name, content in _PLACEHOLDERS.items():
        if name not in sys.modules:
            sys.modules[name] = placeholder = ModuleType(name)
            vars(placeholder).update(content)
    # Qwen2Moe is in qwen2_moe, Llama in llama.
    package = "_".join(re.findall("[A-Z][a-z0-9_]+", prefix)).lower()
    package = f"paddleformers.transformers.{package}"
    if ending == "Config":
        return getattr(importlib.import_module(f"{package}.configuration"), prefix + ending)
    classes = importlib.import_module(f"{package}.modeling")
    # What is built on Paddle's Fleet has "Deprecated" in its name where there is another.
    return getattr(classes, f"{prefix}{ending}Deprecated", None) or vars(classes)[prefix + ending]


def labels_of(model: str, labels: Any) -> Any:
    """Returns the labels of a batch as the family's pipeline takes them."""
    return (labels,) if MODELS[model][0] == "DeepseekV3" else labels


def causal_mask(rows: int = MICRO_BATCHES * ROWS) -> np.ndarray[Any, Any]:
    """Returns 1 where a token may look at another: [rows, 1, LENGTH, LENGTH], float32.

    Without one the library's pipelines are not causal.
    """
    mask: np.ndarray[Any, Any] = np.tril(np.ones([LENGTH, LENGTH], "float32"))
    return np.tile(mask, [rows, 1, 1, 1])
