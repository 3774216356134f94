"""Brings a Llama of Hugging Face into the library's pipeline by every way of the page, and back."""

import fleetpipe

fleetpipe.install()

import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.distributed import fleet  # noqa: E402

from fleetpipe.cli import main  # noqa: E402
from tests.libraries.installed import LIBRARY, class_of, configuration  # noqa: E402
from tests.libraries.models import batches  # noqa: E402

MAP = f"{LIBRARY}-llama"


def convert(*words: object) -> None:
    """Runs the command."""
    assert main(["checkpoint", "convert", *map(str, words)]) == 0


def fill(way: str, name: str, folder: Path, pipe: Any) -> None:
    """Has the pipeline load what the folder ``hf`` has."""
    if way == "load_checkpoint":
        fleetpipe.load_checkpoint(folder / "hf", model=pipe, names=MAP)
    elif way == "convert":
        convert(folder / "hf", folder / "run", "--step", 0, "--names", MAP)
        fleetpipe.CheckpointManager(folder / "run").restore(model=pipe)
    else:
        plain = class_of(name, "ForCausalLM")(configuration(name))
        fleetpipe.load_checkpoint(folder / "hf", model=plain, names=MAP)
        plain.save_pretrained(str(folder / way), safe_serialization=way == "safetensors")
        fleetpipe.load_checkpoint(folder / way, model=pipe)


def go_round(name: str, folder: Path) -> None:
    """Loads the weights by every way, trains them, and writes them back."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    model = class_of(name, "ForCausalLMPipe")(configuration(name))
    pipe = fleet.distributed_model(model)
    optimizer = paddle.optimizer.AdamW(5e-3, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(optimizer)
    tokens, logits = paddle.to_tensor(batches()[0]), {}
    data = [tokens[:, :-1], tokens[:, 1:]]
    for way in ("load_checkpoint", "convert", "safetensors", "pdparams"):
        for parameter in model.parameters():
            parameter.set_value(paddle.full_like(parameter, 0.5))
        fill(way, name, folder, pipe)
        logits[way] = paddle.concat(pipe.eval_batch(data))
    for _ in range(2):
        pipe.train_batch(data, optimizer)
    logits["trained"] = paddle.concat(pipe.eval_batch(data))
    run = folder / "run"
    fleetpipe.CheckpointManager(run).save(2, model=pipe, optimizer=optimizer)
    fleet.shutdown()
    plain = class_of(name, "ForCausalLM")(configuration(name))
    fleetpipe.load_single(plain, run)
    plain.eval()
    logits["load_single"] = plain(data[0])
    np.savez(folder / "paddle.npz", tokens=data[0], **logits)
    convert(run, folder / "back", "--to", "huggingface", "--names", MAP, "--reverse-names")


for one in sys.argv[2:]:
    go_round(one, Path(sys.argv[1], one))
