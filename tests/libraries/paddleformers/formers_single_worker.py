"""Saves each model once, and trains PaddleFormers' single-device class on Paddle alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import paddle

from tests.libraries.models import MICRO_BATCHES, ROWS, adamw, batches
from tests.libraries.paddleformers.formers import MODELS, causal_mask, class_of


def train(model: Any) -> list[float]:
    """Returns the mean loss of each step's micro-batches."""
    optimizer, losses = adamw(model.parameters()), []
    mask = paddle.to_tensor(causal_mask(ROWS))
    model.train()
    for rows in batches():
        total = 0.0
        for part in paddle.to_tensor(rows).split(MICRO_BATCHES):
            loss = model(part[:, :-1], attention_mask=mask, labels=part[:, 1:])
            loss = loss[0] if isinstance(loss, tuple) else loss
            (loss / MICRO_BATCHES).backward()
            total += float(loss) / MICRO_BATCHES
        optimizer.step()
        optimizer.clear_grad()
        losses.append(total)
    return losses


folder, *names = sys.argv[1:]
found = {}
for name in names:
    paddle.seed(1)
    config = class_of(name, "Config")(**MODELS[name][1])
    class_of(name, "ForCausalLM")(config).save_pretrained(f"{folder}/{name}")
    model = class_of(name, "ForCausalLM").from_pretrained(f"{folder}/{name}", dtype="float32")
    found[name] = train(model)
Path(folder, "single.json").write_text(json.dumps(found))
