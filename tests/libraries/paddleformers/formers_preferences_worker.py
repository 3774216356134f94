"""PaddleFormers' DPOTrainer: pairs of answers, and a model that stays as it is."""

import fleetpipe

fleetpipe.install()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddleformers.trainer import (  # noqa: E402
    PdArgumentParser,
    TrainerCallback,
    TrainingArguments,
)

from tests.libraries.models import LENGTH, batches  # noqa: E402
from tests.libraries.paddleformers.formers import causal_mask, class_of, version  # noqa: E402

NEWER = version() == "1.2.0"
if NEWER:
    from paddleformers.cli.train.dpo.dpo_trainer import DPOTrainer
else:
    from paddleformers.trl import DPOTrainer

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
        self._mask = causal_mask(1)[0]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        middle, end = ASKED + ANSWERED, ASKED + 2 * ANSWERED
        chosen, rejected = np.zeros((2, LENGTH), "int64")
        chosen[ASKED:middle], rejected[middle:end] = row[1:][ASKED:middle], row[1:][middle:end]
        # The newer version has one row of labels for both.
        labels = {"chosen_labels": chosen, "rejected_labels": rejected}
        return {
            "input_ids": row[:-1],
            "position_ids": np.arange(LENGTH),
            "attention_mask": self._mask,
            **({"response_labels": chosen + rejected} if NEWER else labels),
            "response_indexs": np.array([0, ASKED, middle, end]),
        }


def collated(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins pairs; each index says which row it belongs to."""
    joined = {key: np.stack([item[key] for item in items]) for key in items[0]}
    joined["response_indexs"][:, 0] = np.arange(len(items))
    return {key: paddle.to_tensor(value) for key, value in joined.items()}


class Found(TrainerCallback):  # type: ignore[misc]
    """Keeps the loss of each step, and how much better the first answer was rated."""

    def __init__(self) -> None:
        self.found: list[list[float]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            # Rank 0 alone is told of the ratings.
            self.found.append([logs["loss"], logs.get("rewards/margins", 0.0)])


folder, name = sys.argv[1], sys.argv[2]
(arguments,) = PdArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[3:])
single = arguments.pipeline_model_parallel_size <= 1


def model() -> Any:
    """Reads the model; a pipeline has its criterion from the configuration."""
    config = class_of(name, "Config").from_pretrained(f"{folder}/{name}", dtype="float32")
    config.dpo_config = Preferences()
    config.use_sparse_head_and_loss_fn = False
    kind = class_of(name, "ForCausalLM" if single else "ForCausalLMPipe")
    return kind.from_pretrained(f"{folder}/{name}", config=config, dtype="float32")


found = Found()
trainer = DPOTrainer(
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
