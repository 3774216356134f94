"""PaddleFormers' Trainer on a pipeline, as a user's script has it; the options are its own."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddleformers.peft import LoRAConfig, LoRAModel  # noqa: E402
from paddleformers.trainer import (  # noqa: E402
    PdArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.libraries.models import batches  # noqa: E402
from tests.libraries.paddleformers.formers import causal_mask, class_of  # noqa: E402


@dataclass
class Adapters:
    """Whether LoRA's are trained, and nothing else."""

    adapters: bool = False


class Rows(paddle.io.Dataset):  # type: ignore[misc]
    """Rows of tokens, each with the labels one token further and what may look at what."""

    def __init__(self, times: int) -> None:
        self._rows = [row for tokens in batches() for row in tokens] * times
        self._mask = causal_mask(1)[0]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        return {"input_ids": row[:-1], "labels": row[1:], "attention_mask": self._mask}


class Losses(TrainerCallback):  # type: ignore[misc]
    """Keeps the loss that is logged of each step: the Trainer's own history stays empty."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self.found.append(logs["loss"])


def adapted(model: Any) -> Any:
    """Puts adapters into a model, with the same values on any number of ranks."""
    config = LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=4, dtype="float32")
    model = LoRAModel(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            numbers = np.random.default_rng(len(parameter.shape) + parameter.shape[0])
            values = 0.1 * numbers.standard_normal(parameter.shape)
            parameter.set_value(values.astype("float32"))
    return model


folder, name = sys.argv[1], sys.argv[2]
parser = PdArgumentParser((TrainingArguments, Adapters))
arguments, chosen = parser.parse_args_into_dataclasses(sys.argv[3:])
single = arguments.pipeline_model_parallel_size <= 1
model = class_of(name, "ForCausalLM" if single else "ForCausalLMPipe").from_pretrained(
    f"{folder}/{name}", dtype="float32"
)
losses = Losses()
trainer = Trainer(
    model=adapted(model) if chosen.adapters else model,
    args=arguments,
    train_dataset=Rows(2),
    eval_dataset=Rows(1),
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
evaluated = trainer.evaluate()["eval_loss"] if arguments.do_eval else None
if paddle.distributed.get_rank() == 0:
    found = {"losses": losses.found, "evaluated": evaluated}
    Path(arguments.output_dir, "losses.json").write_text(json.dumps(found))
