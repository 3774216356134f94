"""A library's Trainer on a pipeline, as a user's script has it; the options are the Trainer's."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402

from tests.libraries.installed import FORMERS, STAGES, class_of, mask, module  # noqa: E402
from tests.libraries.models import batches  # noqa: E402

peft, library = module("peft"), module("trainer")


@dataclass
class Adapters:
    """Whether LoRA's are trained, and nothing else."""

    lora: bool = False


class Rows(paddle.io.Dataset):  # type: ignore[misc]
    """Rows of tokens, and each with the labels one token further."""

    def __init__(self, times: int) -> None:
        self._rows = [row for tokens in batches() for row in tokens] * times

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, masks = self._rows[index], mask(1)
        item = {"input_ids": row[:-1], "labels": row[1:]}
        return item if masks is None else {**item, "attention_mask": masks[0]}


class InOrder(library.Trainer):  # type: ignore[misc, name-defined]
    """Takes the rows in their order: how the Trainer shuffles depends on the degrees."""

    def _get_train_sampler(self) -> Any:
        if FORMERS:
            return super()._get_train_sampler()  # which an option keeps from shuffling
        return paddle.io.DistributedBatchSampler(
            self.train_dataset,
            self.args.per_device_train_batch_size,
            num_replicas=self.args.dataset_world_size,
            rank=self.args.dataset_rank,
        )


class Losses(library.TrainerCallback):  # type: ignore[misc, name-defined]
    """Keeps what is logged of each step: the Trainer's own history stays empty."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self.found.append(logs["loss"])


def adapted(model: Any) -> Any:
    """Puts adapters into a model, with the same values on any number of ranks."""
    config = peft.LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=4, dtype="float32")
    model = peft.LoRAModel(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            numbers = np.random.default_rng(len(parameter.shape) + parameter.shape[0])
            values = 0.1 * numbers.standard_normal(parameter.shape)
            parameter.set_value(values.astype("float32"))
    return model


folder, name = sys.argv[1], sys.argv[2]
parser = library.PdArgumentParser((library.TrainingArguments, Adapters))
arguments, adapters = parser.parse_args_into_dataclasses(sys.argv[3:])
single = getattr(arguments, STAGES) <= 1
degrees = () if FORMERS else ("tensor_parallel_degree", "tensor_parallel_rank")
model = class_of(name, "ForCausalLM" if single else "ForCausalLMPipe").from_pretrained(
    f"{folder}/{name}",
    dtype="float32",
    **{degree: getattr(arguments, degree) for degree in degrees},
)
losses = Losses()
trainer = InOrder(
    model=adapted(model) if adapters.lora else model,
    args=arguments,
    train_dataset=Rows(2),
    eval_dataset=Rows(1),
    callbacks=[losses],
)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
evaluated = trainer.evaluate()["eval_loss"] if arguments.do_eval else None
if paddle.distributed.get_rank() == 0:
    text = json.dumps({"losses": losses.found, "evaluated": evaluated})
    Path(arguments.output_dir, "losses.json").write_text(text)
