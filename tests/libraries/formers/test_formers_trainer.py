"""PaddleFormers' Trainer goes on as if it had never stopped; its vision models are pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import pytest

from tests.launching import run
from tests.libraries.formers.models import MODELS, version
from tests.libraries.formers.vision_worker import MODELS as VISION_MODELS
from tests.libraries.models import MICRO_BATCHES, ROWS

WORKERS = Path(__file__).parent.parent
STEPS, SAVED = 6, 4
OPTIONS = (
    f"--max_steps {STEPS} --save_steps 2 --logging_steps 1 --learning_rate 5e-3"
    f" --per_device_train_batch_size {ROWS} --gradient_accumulation_steps {MICRO_BATCHES}"
    f" --per_device_eval_batch_size {ROWS} --do_train --do_eval --seed 5"
    f" --evaluation_strategy steps --eval_steps {STEPS} --amp_master_grad false"
    " --dataloader_shuffle false --device cpu --disable_tqdm true --report_to none"
).split()
if version() == "1.2.0":
    # With a pipeline in float32 it looks for `_inner_opt` on the bare optimizer to watch the clip.
    OPTIONS += ["--max_grad_norm", "0"]
else:
    # By default it saves in a format that it does not resume from.
    OPTIONS += ["--save_to_hf", "false"]


def train(folder: Path, model: str, output: str, ranks: int, *options: str) -> dict[str, Any]:
    args = [str(folder), model, "--output_dir", str(folder / output), *OPTIONS, *options]
    if ranks > 1:
        args += ["--pipeline_model_parallel_size", str(ranks)]
    processes = ranks if ranks > 1 else None
    run(WORKERS / "trainer_worker.py", processes, folder=folder, args=args, timeout=250)
    found: dict[str, Any] = json.loads((folder / output / "losses.json").read_text())
    return found


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint, those of the optimizer included."""
    found = {}
    for kind in ("pdparams", "pdopt", "distcp"):
        for file in sorted(folder.rglob(f"*.{kind}")):
            for name, value in paddle.load(str(file)).items():
                if isinstance(value, paddle.Tensor):
                    where = file.relative_to(folder)
                    found[f"{where} {name}"] = value.numpy().tobytes()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [*MODELS][:1])
def test_the_trainer_resumes_with_the_same_bits(tmp_path: Path, model: str) -> None:
    worker = WORKERS / "single_worker.py"
    run(worker, None, folder=tmp_path, args=[str(tmp_path), model], timeout=250)
    alone = train(tmp_path, model, "alone", 1)
    straight = train(tmp_path, model, "straight", 2)
    saved = str(tmp_path / "straight" / f"checkpoint-{SAVED}")
    resumed = train(tmp_path, model, "resumed", 2, "--resume_from_checkpoint", saved)

    assert len(straight["losses"]) == STEPS
    assert straight["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert straight["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-5)
    assert straight["losses"][-1] < straight["losses"][0] - 0.1
    assert resumed["losses"] == straight["losses"][SAVED:]
    assert resumed["evaluated"] == straight["evaluated"]
    last = f"checkpoint-{STEPS}"
    ends = [bytes_of(tmp_path / output / last) for output in ("straight", "resumed")]
    assert any("opt" in name for name in ends[0])
    assert ends[0] == ends[1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [*MODELS][:1])
def test_adapters_are_trained_as_without_a_pipeline(tmp_path: Path, model: str) -> None:
    worker = WORKERS / "single_worker.py"
    run(worker, None, folder=tmp_path, args=[str(tmp_path), model], timeout=250)
    # 1.2.0 evaluates a LoRAModel on one device with a name of the package paddlefleet.
    lora = ["--lora", "1", "--do_eval", "0", "--evaluation_strategy", "no"]
    alone = train(tmp_path, model, "alone", 1, *lora)
    straight = train(tmp_path, model, "straight", 2, *lora)
    saved = str(tmp_path / "straight" / f"checkpoint-{SAVED}")
    resumed = train(tmp_path, model, "resumed", 2, *lora, "--resume_from_checkpoint", saved)

    assert len(straight["losses"]) == STEPS
    assert straight["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert resumed["losses"] == straight["losses"][SAVED:]


WORKER = Path(__file__).with_name("vision_worker.py")


@pytest.mark.skipif(version() != "1.2.0", reason="PaddleFormers 0.4.1 has none of them")
@pytest.mark.parametrize("model", VISION_MODELS)
def test_images_and_texts_train_to_the_plain_bits(model: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run(WORKER, None, folder=tmp_path, args=[model, str(file)], timeout=250)
    assert json.loads(file.read_text()) == {"different": [], "unopened": []}
