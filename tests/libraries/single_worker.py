"""Saves each model once, and trains the library's single-device class on Paddle alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import paddle

from tests.libraries.installed import class_of, configuration, mask
from tests.libraries.models import MICRO_BATCHES, ROWS, adamw, batches


def train(model: Any) -> list[float]:
    """Returns the mean loss of each step's micro-batches."""
    optimizer, losses = adamw(model.parameters()), []
    masks = mask(ROWS)
    options = {} if masks is None else {"attention_mask": paddle.to_tensor(masks)}
    model.train()
    for rows in batches():
        total = 0.0
        for part in paddle.to_tensor(rows).split(MICRO_BATCHES):
            loss = model(part[:, :-1], labels=part[:, 1:], **options)
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
    kind = class_of(name, "ForCausalLM")
    model = kind(configuration(name))
    for path, parameter in model.named_parameters():
        if path.endswith(".gate.weight"):
            # PaddleNLP's are ones: every token would go to the same experts.
            parameter.set_value(0.3 * paddle.randn(parameter.shape))
    model.save_pretrained(f"{folder}/{name}")
    # Trained as it is read: what is not saved is the library's own matter.
    found[name] = train(kind.from_pretrained(f"{folder}/{name}", dtype="float32"))
Path(folder, "single.json").write_text(json.dumps(found))
