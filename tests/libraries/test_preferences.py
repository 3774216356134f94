"""A library's DPOTrainer on a pipeline of two ranks beside the same on one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run
from tests.libraries.formers.models import MODELS, version
from tests.libraries.installed import FORMERS, STAGES

HERE = Path(__file__).parent
OPTIONS = (
    "--max_steps 4 --save_strategy no --logging_steps 1 --learning_rate 1e-3 --do_train"
    " --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --seed 5"
    " --device cpu --disable_tqdm true --report_to none"
)
if FORMERS:
    OPTIONS += " --amp_master_grad false --dataloader_shuffle false"
if version() == "1.2.0":
    # With a pipeline in float32 it looks for `_inner_opt` on the bare optimizer to watch the clip.
    OPTIONS += " --max_grad_norm 0"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", [*MODELS][:1] if FORMERS else ["llama"])
def test_preferences_are_learned_as_on_one_device(tmp_path: Path, model: str) -> None:
    worker = HERE / "single_worker.py"
    run(worker, None, folder=tmp_path, args=[str(tmp_path), model], timeout=250)
    found = []
    for ranks in (1, 2):
        output = str(tmp_path / f"on-{ranks}")
        args = [str(tmp_path), model, "--output_dir", output, *OPTIONS.split()]
        if ranks > 1:
            args += [f"--{STAGES}", str(ranks)]
        processes = None if ranks == 1 else ranks
        worker = HERE / "preferences_worker.py"
        run(worker, processes, folder=tmp_path, args=args, timeout=250)
        found.append(json.loads(Path(output, "found.json").read_text()))
    alone, pipelined = found
    assert len(alone) == 4
    assert pipelined == [pytest.approx(step, abs=1e-5) for step in alone]
    (_, first), (_, last) = alone[0], alone[-1]
    assert first == 0.0
    assert last > 0.01
