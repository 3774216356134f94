"""Tiny configurations of PaddleNLP's language models, their batches, and which families are run."""

from __future__ import annotations

import functools
import os
from importlib.metadata import distributions
from typing import Any, NamedTuple, TypeVar

import numpy as np

#: Names families with a comma between them, as ``llama,gpt``; `make test-libraries-short` sets it.
VARIABLE = "FLEETPIPE_TEST_FAMILIES"

Kind = TypeVar("Kind")


def chosen(models: dict[str, Kind]) -> dict[str, Kind]:
    """Returns those of a library's models that are to be run, by name.

    The environment may name others: those of another library.
    """
    names = os.environ.get(VARIABLE)
    if not names:
        return models
    return {name: models[name] for name in names.split(",") if name in models}


VOCABULARY, LENGTH = 96, 16
MICRO_BATCHES, ROWS, STEPS = 4, 2, 4


#: PaddleNLP 2.8.1, which has llama untied alone, and whose recompute Paddle 2.6.2 refuses on a CPU.
OLD = any(
    found.version.startswith("2.6")
    for found in distributions()
    if found.metadata["Name"] in ("paddlepaddle", "paddlepaddle-gpu")
)


class Model(NamedTuple):
    """A family of the library's models.

    Attributes:
        prefix: That of its class names.
        options: Of its configuration.
        lacks: Forms that the library itself does not run.
    """

    prefix: str
    options: dict[str, Any]
    lacks: tuple[str, ...] = ()


#: Of both libraries' models.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_SIZES = {**SIZES, "num_key_value_heads": 4, "seq_length": LENGTH, "use_flash_attention": False}
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
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DEEPSEEK = {
    **_SIZES,
    **MIXTURE,
    **SHARED,
    **LATENT,
    "topk_method": "greedy",
    # The library adds the loss of balance once for each micro-batch, whatever their weights.
    "aux_loss_alpha": 0.0,
    # Without one the library's rotary embedding fails.
    "rope_scaling": YARN,
}
#: Gates of mixtures take three axes, and parts of sequences have two.
_NO_PARTS = ("mp 2, sequence_parallel",)
# The library spreads the experts of mixtures along dp.
_MIXTURES = {
    "qwen2moe": Model(
        "Qwen2Moe",
        {**_SIZES, **MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 64},
        _NO_PARTS,
    ),
    "deepseekv2": Model("DeepseekV2", _DEEPSEEK, (*_NO_PARTS, "mp 2")),
}
MODELS.update(_MIXTURES)
if OLD:
    MODELS = {name: MODELS[name] for name in ("llama", "gpt")}
MODELS = chosen(MODELS)


class Form(NamedTuple):
    """A pipeline of two ranks: what it has besides, and what then tells it from the plain one."""

    degrees: dict[str, int]
    options: dict[str, Any]
    facts: dict[str, Any]

    @property
    def replicas(self) -> int:
        """How many replicas share the rows of a batch."""
        return self.degrees.get("dp_degree", 1) * self.degrees.get("sharding_degree", 1)


#: How often an attention runs in a micro-batch, and whether this rank has slices and all states.
PLAIN = {"chunks": 1, "replicas": 1, "runs": 1, "slices": False, "all states": True}
_PIPELINES = {
    "pp 2": Form({}, {}, {}),
    "virtual 2": Form({}, {"virtual_pp_degree": 2}, {"chunks": 2}),
    "recompute": Form({}, {"recompute": True, "recompute_granularity": "full"}, {"runs": 2}),
}
if OLD:
    del _PIPELINES["recompute"]
_HYBRIDS = {
    "mp 2": Form({"mp_degree": 2}, {}, {"slices": True}),
    "mp 2, sequence_parallel": Form(
        {"mp_degree": 2}, {"sequence_parallel": True}, {"slices": True}
    ),
    "sharding 2": Form({"sharding_degree": 2}, {}, {"replicas": 2, "all states": False}),
    "dp 2": Form({"dp_degree": 2}, {}, {"replicas": 2}),
}


if OLD:  # not tried there
    del _HYBRIDS["mp 2, sequence_parallel"]


class Job(NamedTuple):
    """Its processes, None for one without a launcher, and the forms that it trains."""

    processes: int | None
    forms: dict[str, Form]


JOBS = {
    "one process": Job(None, _PIPELINES),
    "two processes": Job(2, _PIPELINES),
    "four processes": Job(4, _HYBRIDS),
}


def class_of(model: str, ending: str) -> Any:
    """Returns a class of the library: ``LlamaForCausalLMPipe``, ``LlamaConfig``."""
    from paddlenlp import transformers

    if not OLD:
        _mend_gates()
    return getattr(transformers, MODELS[model].prefix + ending)


def _mend_gates() -> None:
    """Has PaddleNLP's gates run on Paddle 3.3, and their gradients have the scale of the loss.

    They multiply int32 with sums of int32, which are int64 since Paddle 3.2. And their mask of
    bools, which they make of weights, has the weights' gradients be 1 more.
    """
    import paddle
    from paddlenlp.transformers.moe_gate import PretrainedMoEGate

    cumsum, gating = paddle.cumsum, PretrainedMoEGate.topkgating
    if hasattr(gating, "__wrapped__"):
        return

    def sums(x: Any, axis: Any = None, dtype: Any = None, **named: Any) -> Any:
        return cumsum(x, axis, x.dtype if dtype is None else dtype, **named)

    @functools.wraps(gating)
    def topkgating(gate: Any, scores: Any) -> Any:
        capacity, weights, mask, *rest = gating(gate, scores)
        return capacity, weights, mask.detach(), *rest

    paddle.cumsum, PretrainedMoEGate.topkgating = sums, topkgating


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
    # With the epsilon of Paddle, 1e-8, Adam divides gradients that are nothing but rounding by
    # themselves: the single model alone differs by 3e-6 when it adds its micro-batches in another
    # order.
    return paddle.optimizer.AdamW(5e-3, epsilon=1e-6, parameters=parameters, grad_clip=clip)
