"""The files of other libraries have the hash of the model that is in them."""

from __future__ import annotations

from pathlib import Path

import fleetpipe
from fleetpipe.contrib.formats.convert import convert, write_parameters
from tests.checkpoint.test_hash import model, said
from tests.fixtures import Capture


def test_converted_files_have_the_hash_of_the_model(tmp_path: Path, capsys: Capture) -> None:
    layers, run = model(), tmp_path / "run"
    fleetpipe.CheckpointManager(run).save(1, model=layers)
    for form in ("huggingface", "pretrained"):
        convert(run, tmp_path / form, to=form)
    write_parameters(run / "step-00000001", tmp_path / "all.pdparams")
    capsys.readouterr()
    for name in ("huggingface", "pretrained", "all.pdparams"):
        assert said(capsys, tmp_path / name).split()[0] == fleetpipe.model_hash(layers), name
