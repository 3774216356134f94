"""PaddleFormers' classes of vision and language, as pipelines in the bits of Paddle alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run
from tests.libraries.formers.models import version
from tests.libraries.formers.vision_worker import MODELS

WORKER = Path(__file__).with_name("vision_worker.py")


@pytest.mark.skipif(version() != "1.2.0", reason="PaddleFormers 0.4.1 has none of them")
@pytest.mark.parametrize("model", MODELS)
def test_images_and_texts_train_to_the_plain_bits(model: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run(WORKER, None, folder=tmp_path, args=[model, str(file)], timeout=250)
    assert json.loads(file.read_text()) == {"different": [], "unopened": []}
