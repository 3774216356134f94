"""Inputs that need a gradient get it, as from a loop of gradient accumulation in plain Paddle."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from tests.pipelines import ROWS, batch, model_in_job, sgd, switch


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("form", ["whole", "leaf", "list", "iterator", "delayed"])
def test_inputs_that_need_a_gradient_get_it(schedule: str, form: str) -> None:
    with model_in_job(2, schedule=schedule) as model:
        single = model.layers.single_model()
        inputs, labels = batch()
        prompts = [paddle.create_parameter([6], "float32") for _ in range(2)]
        prompts[1].set_value(prompts[0])
        leaf = inputs.clone()
        leaf.stop_gradient = False
        value: Any = leaf if form == "leaf" else inputs + prompts[0]
        if form == "list":
            value = value.split(4)
        if form == "delayed":
            switch(delay_scale_loss=True)
            model = model.__class__(model.layers)
        data: Any = [value, labels]
        if form == "iterator":
            data = zip(value.split(4), labels.split(4))
        model.train_batch(data, sgd(model))
        total = paddle.zeros([])
        plain = inputs + prompts[1]
        if form == "leaf":
            plain = inputs.clone()
            plain.stop_gradient = False
        for begin in range(0, 4 * ROWS, ROWS):
            rows = slice(begin, begin + ROWS)
            total = total + nn.functional.cross_entropy(single(plain[rows]), labels[rows]) / 4
        total.backward()
        got, wanted = (leaf, plain) if form == "leaf" else prompts
        assert got.grad is not None
        assert float((got.grad - wanted.grad).abs().max()) < 1e-7
        assert float(wanted.grad.abs().max()) > 1e-3
        assert model.eval_batch([value, labels]) != []
