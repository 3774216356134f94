"""``fleetpipe.generate`` with the libraries' pipelines, beside their single classes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import run
from tests.libraries import models
from tests.libraries.formers import models as formers
from tests.libraries.installed import FORMERS

#: Whichever of them the library has, and the environment asks for.
NAMES = [n for n in ("llama", "qwen2") if n in (formers.MODELS if FORMERS else models.MODELS)]


def test_a_pipeline_has_the_tokens_of_the_single_class(tmp_path: Path) -> None:
    args = [str(tmp_path), "10", *NAMES]
    run(Path(__file__).parent / "worker.py", None, folder=tmp_path, args=args)
    pairs = json.loads((tmp_path / "tokens.json").read_text())
    assert list(pairs) == NAMES
    for name, (new, expected) in pairs.items():
        assert new == expected, name
        assert len({tuple(row) for row in new}) > 5
