"""What other libraries wrote: ranks load it, it has the hash of its model, no layer is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.contrib.formats import model_files
from fleetpipe.contrib.formats.convert import convert, write_parameters
from fleetpipe.dygraph.state import files
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet_files.manifest import LayerFile, Writer
from tests.checkpoint.ranks.test_ranks import FORMS, contents, load, write
from tests.checkpoint.test_hash import model, said
from tests.fixtures import Call, Capture


@pytest.mark.skipif(paddle.__version__ < "3", reason="Paddle 2.6.2 writes no flex checkpoint")
def test_other_formats_are_loaded_as_they_are(on_ranks: Call, tmp_path: Path) -> None:
    write(tmp_path, ["alone"])
    (tmp_path / "run").symlink_to(tmp_path / "alone")
    for form in FORMS[:-1]:
        convert(tmp_path / "alone", tmp_path / form, to=form)
    whole = sum(len(file) for file in contents(tmp_path / "alone").values())
    shutil.copytree(tmp_path / "formers", tmp_path / "cut short")
    (tmp_path / "cut short/optimizer_state/0_0.distcp").unlink()
    loaded = {"pp 1": [load(tmp_path, {"pp": 1})], "pp 2": [load(tmp_path, {"pp": 2})]}
    loaded["pp 2 x mp 2"] = on_ranks(load, 4, tmp_path, {"pp": 2, "mp": 2})
    for layout, ranks in loaded.items():
        for *results, refusal in ranks:
            assert [result[:2] for result in results] == [(True, 2)] * len(FORMS), layout
            assert "optimizer_state/0_0.distcp" in refusal
            if len(ranks) == 4:
                assert max(result[2] for result in results) < 0.5 * whole


def test_converted_files_have_the_hash_of_the_model(tmp_path: Path, capsys: Capture) -> None:
    layers, run = model(), tmp_path / "run"
    fleetpipe.CheckpointManager(run).save(1, model=layers)
    for form in ("huggingface", "pretrained"):
        convert(run, tmp_path / form, to=form)
    write_parameters(run / "step-00000001", tmp_path / "all.pdparams")
    capsys.readouterr()
    for name in ("huggingface", "pretrained", "all.pdparams"):
        assert said(capsys, tmp_path / name).split()[0] == fleetpipe.model_hash(layers), name


def test_a_folder_that_lacks_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    for rank in range(2):
        layers = {LayerFile(rank): nn.Linear(3, 3).state_dict()}
        files.save(tmp_path, layers, 0, Writer("all/1", rank, 2))
    (tmp_path / "layer_00-tensor_00-model_states.pdparams").unlink()
    with pytest.raises(CheckpointError, match=r"is missing: layer_00-tensor_00-"):
        model_files.read_layer_files(tmp_path)
