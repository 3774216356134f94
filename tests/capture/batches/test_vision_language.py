"""A tower for images before a decoder: batches with and without images, of several sizes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from examples.qwen_vl import IMAGE, PAD, QwenVL, Sizes, collate
from fleetpipe import fleet
from tests.jobs import job

SIZES = Sizes(32, width=16, layers=2, heads=2, vision_width=8, vision_layers=3, full=(1,))
LENGTH, MICRO_BATCHES = 20, 4

#: The images of a micro-batch: for each of its two texts, their heights and widths in tokens.
Images = tuple[tuple[tuple[int, int], ...], ...]
TEXT: Images = ((), ())
IMAGES: Images = (((2, 2),), ((2, 3), (1, 2)))
ONE: Images = ((), ((3, 3),))

#: The micro-batches of each step: with images, then text first, then text alone, then others.
STEPS: list[list[Images]] = [
    [IMAGES, TEXT, ONE, IMAGES],
    [TEXT, IMAGES, (((2, 2),), ()), TEXT],
    [TEXT] * 4,
    [(((1, 1),), ((2, 2), (2, 2))), ONE, TEXT, IMAGES],
]


def micro_batch(images: Images, seed: int = 0, *, words: bool = True) -> tuple[dict[str, Any], Any]:
    """Returns inputs of texts around images, of which the first is behind a word, and labels."""
    numbers = np.random.default_rng(seed)

    def some(count: int) -> list[int]:
        return [int(token) for token in numbers.integers(2, SIZES.vocabulary, count * words)]

    side = SIZES.patch * SIZES.merge
    texts = [
        some(3)
        + [
            part
            for high, wide in row
            for part in (
                numbers.standard_normal((high * side, wide * side)).astype("float32"),
                *some(2),
            )
        ]
        for row in images
    ]
    inputs = collate(texts, SIZES, LENGTH)
    tokens = inputs["tokens"]
    labels = paddle.concat([tokens[:, 1:], paddle.full([len(texts), 1], PAD, "int64")], 1)
    return inputs, labels


def loss_fn(logits: Any, labels: Any) -> Any:
    """Returns the cross entropy of the words."""
    labels = paddle.where(labels == IMAGE, paddle.full_like(labels, PAD), labels)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


def train_plainly(plain: Any, data: list[Any], optimizer: Any) -> Any:
    """Trains on micro-batches one after another, and returns the loss; a step is left out."""
    shares = []
    for inputs, labels in data:
        share = loss_fn(plain(**inputs), labels) / MICRO_BATCHES
        share.backward()
        shares.append(share.detach())
    return sum(shares[1:], shares[0])


def different(ours: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Returns the names of tensors that differ in bits, or are there in one alone."""

    def bits(tensor: Any) -> Any:
        return None if tensor is None else tensor.numpy().tobytes()

    return [n for n in {**ours, **plain} if bits(ours.get(n)) != bits(plain.get(n))]


BEFORE = ["visual.blocks.1", "visual.merger", "layers.1"]


@pytest.mark.parametrize(
    ("split_spec", "schedule", "options"),
    [
        (["visual.blocks.2"], "1F1B", {"verify": "first"}),
        (BEFORE, "1F1B", {}),
        (BEFORE, "ZBV", {"num_chunks": 2}),
        (BEFORE, "Interleaved1F1B", {"num_chunks": 2, "recompute_interval": 5}),
    ],
)
def test_texts_and_images_in_any_mixture_have_the_plain_bits(
    split_spec: list[str], schedule: str, options: dict[str, Any]
) -> None:
    options = {"verify": False, **options}
    with job((len(split_spec) + 1) // options.get("num_chunks", 1), MICRO_BATCHES, schedule):
        paddle.seed(0)
        model = QwenVL(SIZES)
        plain = copy.deepcopy(model)
        pipe = fleetpipe.pipeline(
            *(model, micro_batch(IMAGES)[0], loss_fn, split_spec),
            shape_inputs=("grids",),
            **options,
        )
        wrapped = fleet.distributed_model(pipe)
        ours = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters())
        theirs = paddle.optimizer.AdamW(0.01, parameters=plain.parameters())
        for step, mixture in enumerate(STEPS):
            data = [micro_batch(images, 10 * step + i) for i, images in enumerate(mixture)]
            loss = wrapped.forward_backward_pipeline(iter(data))
            assert float(loss) == float(train_plainly(plain, data, theirs))
            gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (pipe, plain)]
            assert different(*gradients) == []
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.clear_grad()
            assert different(pipe.state_dict(), plain.state_dict()) == []
            loss = wrapped.eval_batch(iter(data[::-1]), compute_loss=True)
            plain.eval()
            with paddle.no_grad():
                shares = [loss_fn(plain(**i), label) / MICRO_BATCHES for i, label in data[::-1]]
            plain.train()
            assert float(loss) == float(sum(shares[1:], shares[0]))
