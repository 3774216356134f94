"""PaddleNLP unedited: its Trainer goes on, plain models train, a mistake in a layer is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import pytest

from tests.launching import run
from tests.libraries.models import MICRO_BATCHES, MODELS, ROWS

HERE = Path(__file__).parent
STEPS, SAVED = 6, 4
OPTIONS = (
    f"--max_steps {STEPS} --save_steps 2 --logging_steps 1 --learning_rate 5e-3"
    f" --per_device_train_batch_size {ROWS} --gradient_accumulation_steps {MICRO_BATCHES}"
    f" --per_device_eval_batch_size {ROWS * MICRO_BATCHES} --do_train --do_eval --seed 5"
    " --device cpu --disable_tqdm true --report_to none"
).split()


PIPELINE = "--pipeline_parallel_degree 2"
SHARDED = "--sharding stage1 --sharding_parallel_degree 2 --gradient_accumulation_steps 2"


class Form(NamedTuple):
    """A way to train: the model, the processes, and options beside those of the pipeline."""

    model: str
    processes: int
    options: str = ""


FORMS = {
    "pp 2": Form("llama tied", 2),
    "mp 2": Form("llama", 4, "--tensor_parallel_degree 2"),
    "sharding 2": Form("llama", 4, SHARDED),
    "unified checkpoint": Form("llama tied", 2, "--unified_checkpoint 1"),
    "unified checkpoint, mp 2": Form(
        "llama tied", 4, "--tensor_parallel_degree 2 --unified_checkpoint 1"
    ),
    "unified checkpoint, sharding 2": Form("llama", 4, f"{SHARDED} --unified_checkpoint 1"),
    "lora": Form("llama", 2, "--lora 1"),
    "bf16": Form("llama", 2, "--bf16 1 --fp16_opt_level O2 --amp_master_grad 1"),
}


def train(folder: Path, model: str, output: str, processes: int | None, options: str) -> Any:
    args = [str(folder), model, "--output_dir", str(folder / output), *OPTIONS, *options.split()]
    run(HERE / "trainer_worker.py", processes, folder=folder, args=args, timeout=250)
    return json.loads((folder / output / "losses.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the models saved."""
    folder = tmp_path_factory.mktemp("trainer")
    models = sorted({form.model for form in FORMS.values()})
    run(HERE / "single_worker.py", None, folder=folder, args=[str(folder), *models], timeout=250)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[str, bool], Any]:
    """What the Trainer finds for the single-device classes, by model and whether with LoRA."""
    wanted = {(form.model, "--lora" in form.options) for form in FORMS.values()}
    return {
        (model, lora): train(folder, model, f"{model} {lora}", None, "--lora 1" if lora else "")
        for model, lora in wanted
    }


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint, those of the optimizer included."""
    found = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    for file in [*folder.glob("*.pdparams"), *folder.glob("*.pdopt")]:
        for name, value in paddle.load(str(file), return_numpy=True).items():
            if hasattr(value, "tobytes"):
                found[f"{file.name} {name}"] = value.tobytes()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FORMS)
def test_the_trainer_resumes_with_the_same_bits(
    folder: Path, alone: dict[tuple[str, bool], Any], name: str, record_property: Any
) -> None:
    form = FORMS[name]
    single = alone[form.model, "--lora" in form.options]
    options, output = f"{PIPELINE} {form.options}", name.replace(" ", "-")
    straight = train(folder, form.model, output, form.processes, options)
    resume = f"--resume_from_checkpoint {folder / output}/checkpoint-{SAVED}"
    resumed = train(folder, form.model, f"{output}-on", form.processes, f"{options} {resume}")

    assert len(straight["losses"]) == STEPS
    assert straight["losses"] == pytest.approx(single["losses"], abs=1e-5)
    assert straight["evaluated"] == pytest.approx(single["evaluated"], abs=1e-5)
    assert straight["losses"][-1] < straight["losses"][0] - (0.01 if name == "lora" else 0.1)
    record_property("gap", max(abs(a - b) for a, b in zip(straight["losses"], single["losses"])))
    assert resumed["losses"] == straight["losses"][SAVED:]
    assert resumed["evaluated"] == straight["evaluated"]
    last = f"checkpoint-{STEPS}"
    ends = [bytes_of(folder / end / last) for end in (output, f"{output}-on")]
    assert ends[0]
    assert ends[0] == ends[1]


WORKER = Path(__file__).with_name("plain_worker.py")


@pytest.mark.parametrize(
    ("model", "rounded"),
    # T5's relative positions are used on both stages: that sum is made stage by stage.
    [("llama", 0), ("bert", 0), ("t5", 1)],
)
def test_a_plain_model_is_captured_and_trains(model: str, rounded: int, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run(WORKER, None, folder=tmp_path, args=[model, str(file)], timeout=200)
    found = json.loads(file.read_text())
    assert found["gradients"] > 30
    assert len(found["rounded"]) <= rounded
    assert all(error < 1e-6 for error in found["rounded"].values())
    assert found["losses"][-1] < found["losses"][0]


SCRIPT = f"""
    import fleetpipe

    fleetpipe.install()

    import paddle
    from paddle.distributed import fleet
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLMPipe

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {{"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}}
    strategy.pipeline_configs = {{"accumulate_steps": 4, "micro_batch_size": 2}}
    fleet.init(is_collective=True, strategy=strategy)
    model = LlamaForCausalLMPipe(LlamaConfig(**{MODELS["llama"].options}))
    for name, layer in model.named_sublayers():
        if name == "3.mlp.down_proj":
            layer.weight = layer.create_parameter([100, 64])
    pipe = fleet.distributed_model(model)
    adamw = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    tokens = paddle.randint(0, 96, [8, 17])
    pipe.train_batch([tokens[:, :-1], tokens[:, 1:]], fleet.distributed_optimizer(adamw))
"""

#: The line that quotes Paddle goes on with a place in its sources.
MESSAGE = """\
fleetpipe.errors.BoundaryError: layer 3 (LlamaDecoderLayerPipe): its mlp.down_proj cannot take \
what the layer gives it
  where: rank 1, operation F1.0 (stage 1, micro-batch 0)
  expected: what Linear(in_features=100, out_features=64, dtype=float32) takes
  got: Tensor of float32[2, 16, 128]; the layer itself was given Tensor of \
float32[2, 16, 64], from layer 2 (LlamaDecoderLayerPipe)
  likely cause: ValueError: [Hint: Expected K_lhs == K_rhs, but received K_lhs:128 != K_rhs:100.]
  what to do: change mlp.down_proj of layer 3, or what stands before it there, so that they fit
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [None, 2])
def test_a_wrong_shape_in_a_layer_is_reported(tmp_path: Path, processes: int | None) -> None:
    done = run(SCRIPT, processes, folder=tmp_path, timeout=120, check=False)
    assert done.returncode != 0
    for line in MESSAGE.splitlines():
        assert line in done.logs[-1]
