"""A library's DPOTrainer: pairs of answers, and a model that stays as it is beside the trained."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402

from tests.libraries.formers.models import version  # noqa: E402
from tests.libraries.installed import FORMERS, STAGES, class_of, mask, module  # noqa: E402
from tests.libraries.models import LENGTH, batches  # noqa: E402

NEWER = version() == "1.2.0"
library = module("trainer")
DPOTrainer = module("cli.train.dpo.dpo_trainer" if NEWER else "trl").DPOTrainer

#: The last token of the question, and how many each of the two answers has.
ASKED, ANSWERED = 6, 4


@dataclass
class Preferences:
    """What the library's criterion asks its ``dpo_config`` for."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    pref_loss_ratio: float = 1.0
    sft_loss_ratio: float = 0.0
    offset_alpha: float = 0.0
    normalize_logps: bool = False
    ignore_eos_token: bool = False
    reference_free: bool = False
    lora: bool = False
    ref_model_update_steps: int = -1


class Pairs(paddle.io.Dataset):  # type: ignore[misc]
    """A question and its two answers in a row; the first one is liked better."""

    def __init__(self) -> None:
        self._rows = [row for tokens in batches() for row in tokens] * 2

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        middle, end = ASKED + ANSWERED, ASKED + 2 * ANSWERED
        chosen, rejected = np.zeros((2, LENGTH), "int64")
        chosen[ASKED:middle], rejected[middle:end] = row[1:][ASKED:middle], row[1:][middle:end]
        # The newer version has one row of labels for both.
        labels = {"chosen_labels": chosen, "rejected_labels": rejected}
        masks = mask(1)
        return {
            "input_ids": row[:-1],
            "position_ids": np.arange(LENGTH),
            "attention_mask": np.tril(np.ones((1, LENGTH, LENGTH), "bool"))
            if masks is None
            else masks[0],
            **({"response_labels": chosen + rejected} if NEWER else labels),
            "response_indexs": np.array([0, ASKED, middle, end]),
        }


def collated(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins pairs; each index says which row it belongs to."""
    joined = {key: np.stack([item[key] for item in items]) for key in items[0]}
    joined["response_indexs"][:, 0] = np.arange(len(items))
    return {key: paddle.to_tensor(value) for key, value in joined.items()}


class InOrder(DPOTrainer):  # type: ignore[misc]
    """Takes the pairs in their order."""

    def _get_train_sampler(self) -> Any:
        if FORMERS:
            return super()._get_train_sampler()  # which an option keeps from shuffling
        return paddle.io.BatchSampler(
            self.train_dataset, batch_size=self.args.per_device_train_batch_size
        )


class Found(library.TrainerCallback):  # type: ignore[misc, name-defined]
    """Keeps the loss of each step, and how much better the first answer was rated."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            # Rank 0 alone is told of the ratings.
            self.found.append([logs["loss"], logs.get("rewards/margins", 0.0)])


folder, name = sys.argv[1], sys.argv[2]
parser = library.PdArgumentParser(library.TrainingArguments)
(arguments,) = parser.parse_args_into_dataclasses(sys.argv[3:])
single = getattr(arguments, STAGES) <= 1


def model() -> Any:
    """Reads the model; a pipeline has its criterion from the configuration."""
    config = class_of(name, "Config").from_pretrained(f"{folder}/{name}", dtype="float32")
    config.dpo_config = None if single and not FORMERS else Preferences()
    config.use_sparse_head_and_loss_fn = False
    kind = class_of(name, "ForCausalLM" if single else "ForCausalLMPipe")
    return kind.from_pretrained(f"{folder}/{name}", config=config)


found = Found()
trainer = InOrder(
    model=model(),
    ref_model=model(),
    dpo_config=Preferences(),
    args=arguments,
    train_dataset=Pairs(),
    data_collator=collated,
    callbacks=[found],
)
trainer.train()
if paddle.distributed.get_rank() == 0:
    Path(arguments.output_dir, "found.json").write_text(json.dumps(found.found))
