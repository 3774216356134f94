"""Trains a class of PaddleFormers for vision and language on two stages: ``MODEL FILE``."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional

import fleetpipe
from fleetpipe import fleet
from tests import pipelines

VOCABULARY, LENGTH, MICRO_BATCHES, ROWS = 96, 24, 2, 2
#: The token of an image's place, and those around it.
IMAGE, BEGIN, END = 1, 3, 4
_PLAIN = {"fuse_rms_norm": False, "tie_word_embeddings": False}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_PLAIN,
}
_VISION = {
    "depth": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    **_PLAIN,
    "out_hidden_size": 32,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 1,
}
#: By package, its class, and what its configuration has beside these sizes.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"window_size": 8, "fullatt_block_indexes": [3]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        {"deepstack_visual_indexes": [1, 2], "num_position_embeddings": 64},
    ),
}
#: The grids of the images of each micro-batch, by step: time, height and width in patches.
STEPS: list[list[list[list[int]]]] = [
    [[[1, 4, 4]], []],
    [[], []],
    [[], [[1, 6, 8]]],
    [[[1, 2, 2], [1, 4, 2]], [[1, 4, 6]]],
]


def model_of(package: str) -> Any:
    """Builds one of the models."""
    prefix, text, vision = MODELS[package]
    package = f"paddleformers.transformers.{package}"
    config = getattr(importlib.import_module(f"{package}.configuration"), f"{prefix}Config")(
        text_config={**_TEXT, **text},
        vision_config={**_VISION, **vision},
        image_token_id=IMAGE,
        **_PLAIN,
    )
    classes = vars(importlib.import_module(f"{package}.modeling"))
    name = f"{prefix}ForConditionalGeneration"
    return classes.get(f"{name}Deprecated", classes.get(name))(config)


def inputs_of(grids: list[list[int]], seed: int) -> dict[str, Any]:
    """Returns a text around images, and one without."""
    numbers = np.random.default_rng(seed)
    text = [5]
    for time, high, wide in grids:
        text += [BEGIN, *[IMAGE] * (time * high * wide // 4), END]
    rows = numbers.integers(10, VOCABULARY, [ROWS, LENGTH])
    rows[0, : len(text)] = text
    places = np.tile(np.arange(LENGTH), (3, ROWS, 1))
    inputs = {"input_ids": paddle.to_tensor(rows), "position_ids": paddle.to_tensor(places)}
    if grids:
        patches = numbers.standard_normal((sum(map(np.prod, grids)), 2 * 2 * 2))
        inputs["pixel_values"] = paddle.to_tensor(patches.astype("float32"))
        inputs["image_grid_thw"] = paddle.to_tensor(grids)
    return inputs


def loss_fn(output: Any, labels: Any) -> Any:
    """Returns the cross entropy of the logits."""
    return functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())


def main(package: str, file: str) -> None:
    pipelines.begin(2, MICRO_BATCHES, rows=ROWS)
    paddle.seed(0)
    model = model_of(package)
    plain = copy.deepcopy(model)
    pipe = fleetpipe.pipeline(
        model,
        {**inputs_of([[1, 4, 4], [1, 4, 2]], 0), "use_cache": False},
        loss_fn,
        shape_inputs=("image_grid_thw",),
    )
    wrapped = fleet.distributed_model(pipe)
    ours = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters())
    ours = fleet.distributed_optimizer(ours)
    theirs = paddle.optimizer.AdamW(0.01, parameters=plain.parameters())
    plain.train()
    different = []
    for step, grids in enumerate(STEPS):
        data = [inputs_of(each, 9 * step + i) for i, each in enumerate(grids)]
        shares = [loss_fn(plain(**x, use_cache=False), x["input_ids"]) / len(data) for x in data]
        for share in shares:
            share.backward()
        loss = wrapped.train_batch(iter([(x, x["input_ids"]) for x in data]), ours)
        different += [f"loss {step}"] * (float(loss) != float(sum(shares[1:], shares[0])))
        theirs.step()
        theirs.clear_grad()
        for name, tensor in pipe.full_state_dict().items():
            if not np.array_equal(tensor, plain.state_dict()[name]):
                different.append(f"{name} {step}")
    unopened = pipe.captures.of_example(training=True).trace.unopened
    Path(file).write_text(json.dumps({"different": different, "unopened": list(unopened)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
