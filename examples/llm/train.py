"""Trains a small Llama on text, from files to perplexity; run again, it goes on where it was.

    python examples/llm/train.py                                      all ranks in one process
    fleetpipe run --nproc 2 examples/llm/train.py --folder run/small  a process for each rank
    python examples/llm/train.py --model.blocks 2 --train.steps 20    other values for this run

config.yaml beside it has the values, and says what they are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import paddle
from jsonargparse import auto_cli
from llama import IGNORED, Llama, Shape, llama_layers, next_token_loss
from paddle import nn
from paddle.optimizer.lr import CosineAnnealingDecay, LinearWarmup
from paddle.static import InputSpec

import fleetpipe
from fleetpipe import fleet
from fleetpipe.callbacks import LogMetricByEpoch, LossMonitor, MetricsLogger, ThroughputMonitor
from fleetpipe.io import DataLoader, PackedText


@dataclass
class Data:
    text: str | None
    vocabulary: int
    length: int
    varied: bool
    hold_out: int


@dataclass
class Pipeline:
    stages: int
    micro_batches: int
    schedule: str
    captured: bool


@dataclass
class Train:
    epochs: int
    steps: int | None
    batch_size: int
    learning_rate: float
    warm_up: int
    weight_decay: float
    clip: float
    save_steps: int


class Perplexity(paddle.metric.Metric):
    """e to the mean loss of all tokens of an epoch or an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.loss, self.tokens = 0.0, 0

    def name(self) -> str:
        return "perplexity"

    def compute(self, logits: Any, labels: Any) -> Any:
        return next_token_loss(logits, labels), (labels != IGNORED).sum()

    def update(self, loss: Any, tokens: Any) -> None:
        self.loss, self.tokens = self.loss + float(loss * tokens), self.tokens + int(tokens)

    def accumulate(self) -> float:
        return math.exp(self.loss / max(self.tokens, 1))


def begin(pipeline: Pipeline, batch_size: int) -> None:
    """Begins the job: as many stages as the settings say; what processes are left are replicas."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": pipeline.stages}
    strategy.pipeline_configs = {
        "accumulate_steps": pipeline.micro_batches,
        "micro_batch_size": max(1, batch_size // pipeline.micro_batches),
        "schedule_mode": pipeline.schedule,
    }
    # The loss is the mean over tokens, of which a sequence has more or fewer that count.
    strategy.fleetpipe_configs = {"loss_reduction": "tokens"}
    fleet.init(is_collective=True, strategy=strategy)


def optimizer(parameters: Any, train: Train, steps: int) -> Any:
    """Returns AdamW whose rate rises for some steps, and falls by a cosine to the last."""
    falling = CosineAnnealingDecay(train.learning_rate, max(1, steps - train.warm_up))
    up = train.warm_up
    return paddle.optimizer.AdamW(
        LinearWarmup(falling, up, 0.0, train.learning_rate) if up else falling,
        beta2=0.95,
        weight_decay=train.weight_decay,
        grad_clip=nn.ClipGradByGlobalNorm(train.clip),
        parameters=parameters,
    )


def main(
    data: Data,
    model: Shape,
    pipeline: Pipeline,
    train: Train,
    seed: int,
    folder: Path,
    prompt: str | None,
) -> float:
    """Trains with these settings, the same on every rank; returns the perplexity."""
    begin(pipeline, train.batch_size)
    options = {"length": data.length, "vocabulary": data.vocabulary, "varied": data.varied}
    text = PackedText(data.text, cache=folder / "tokens", **options)
    rows, held_out = text.hold_out(data.hold_out)
    batches = {"collate_fn": text.collate, "batch_size": train.batch_size}
    loader = DataLoader(rows, shuffle=True, drop_last=True, seed=seed, **batches)
    evaluation = DataLoader(held_out, **batches)

    paddle.seed(seed)
    vocabulary = text.tokenizer.get_vocab_size()
    make = Llama if pipeline.captured else llama_layers
    # A short example: another length is captured by itself, in one forward.
    inputs = [InputSpec([None, 32], kind) for kind in ("int64", "int32")]
    llama = fleetpipe.Model(make(vocabulary, model), inputs)
    steps = min(train.steps or math.inf, train.epochs * len(loader))
    adam = optimizer(llama.parameters(), train, steps)
    llama.prepare(adam, next_token_loss, Perplexity())
    llama.summary()
    settings = {"data": asdict(data), "model": asdict(model), "train": asdict(train)}
    llama.fit(
        loader,
        evaluation,
        epochs=train.epochs,
        num_iters=train.steps,
        verbose=0,
        callbacks=[
            ThroughputMonitor(tokens_per_sample=data.length),
            *(LossMonitor(10), LogMetricByEpoch(), MetricsLogger(folder, config=settings)),
        ],
        save_dir=str(folder / "checkpoints"),
        save_steps=train.save_steps,
        resume="auto",
    )
    perplexity = llama.evaluate(evaluation, verbose=0)["perplexity"]
    if llama.is_rank("first"):
        print(f"perplexity {perplexity:.2f} after {llama.global_step} steps", flush=True)
    if prompt:
        ids = text.tokenizer.encode(prompt).ids
        (new,) = fleetpipe.generate(llama, [ids], 24, temperature=0.8, eos=text.end, seed=seed)
        if llama.is_rank("first"):
            print(prompt + text.tokenizer.decode(new), flush=True)
    fleet.shutdown()
    return perplexity


if __name__ == "__main__":
    beside = Path(__file__).with_name("config.yaml")
    auto_cli(main, as_positional=False, default_config_files=[str(beside)], allow_abbrev=False)
