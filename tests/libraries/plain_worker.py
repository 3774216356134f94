"""Trains a plain model of PaddleNLP, unmodified, as a pipeline of two ranks: ``MODEL FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional
from paddlenlp import transformers

import fleetpipe
from fleetpipe import fleet
from tests import pipelines

VOCABULARY, LENGTH = 96, 12
MICRO_BATCHES, ROWS, STEPS = 2, 2, 3
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def model_of(name: str) -> Any:
    """Builds one of the models, with dropouts where it has them."""
    if name == "llama":
        config = transformers.LlamaConfig(**_SIZES, use_cache=False)
        return transformers.LlamaForCausalLM(config)
    if name == "bert":
        config = transformers.BertConfig(**_SIZES, num_labels=3)
        return transformers.BertForSequenceClassification(config)
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_layers=2, num_decoder_layers=2, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def batch_of(name: str) -> list[Any]:
    """Returns inputs and labels of all micro-batches."""
    numbers = np.random.default_rng(0)
    ids = paddle.to_tensor(numbers.integers(1, VOCABULARY, (MICRO_BATCHES * ROWS, LENGTH)))
    if name == "bert":
        return [ids, paddle.to_tensor(numbers.integers(0, 3, MICRO_BATCHES * ROWS))]
    return [{"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else ids, ids]


def loss(output: Any, label: Any) -> Any:
    """Returns the cross entropy of the logits, which come first of several outputs."""
    logits = output[0] if isinstance(output, (tuple, list)) else output
    return functional.cross_entropy(logits.reshape([-1, logits.shape[-1]]), label.reshape([-1]))


def main(name: str, file: str) -> None:
    pipelines.begin(2, MICRO_BATCHES, rows=ROWS)
    model, batch = model_of(name), batch_of(name)
    example = paddle.utils.map_structure(lambda tensor: tensor[:ROWS], batch[0])
    pipe = fleetpipe.pipeline(model, example, loss_fn=loss)
    wrapped = fleet.distributed_model(pipe)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=pipe.parameters())
    optimizer = fleet.distributed_optimizer(optimizer)
    losses = [float(wrapped.train_batch(batch, optimizer)) for _ in range(STEPS)]
    proof = pipe.proof
    found = {"losses": losses, "gradients": proof.gradients, "rounded": proof.rounded}
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
