"""What other libraries wrote and how they name layers: ranks load it, and no layer is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import load_file, save_file

import fleetpipe
from fleetpipe.contrib.formats import convert as conversion
from fleetpipe.contrib.formats import model_files
from fleetpipe.contrib.formats.convert import write_parameters
from fleetpipe.dygraph.state import files
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from fleetpipe.fleet_files.manifest import LayerFile, Writer
from tests.checkpoint.ranks.test_ranks import FORMS, contents, load, write
from tests.checkpoint.test_hash import model, said
from tests.contrib.formats.trainer_files import convert
from tests.fixtures import Call, Capture
from tests.pipelines import bits


@pytest.mark.skipif(paddle.__version__ < "3", reason="Paddle 2.6.2 writes no flex checkpoint")
def test_other_formats_are_loaded_as_they_are(on_ranks: Call, tmp_path: Path) -> None:
    write(tmp_path, ["alone"])
    (tmp_path / "run").symlink_to(tmp_path / "alone")
    for form in FORMS[:-1]:
        conversion.convert(tmp_path / "alone", tmp_path / form, to=form)
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
        conversion.convert(run, tmp_path / form, to=form)
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


LAYERS = 11


class Head(nn.Embedding):
    """Its weight is an embedding's."""

    def forward(self, x: Any) -> Any:
        return x @ self.weight.T


class Listed(PipelineLayer):
    """A list of layers, with prefixes as PaddleNLP's classes have them."""

    def __init__(self, tied: bool) -> None:
        layers = [LayerDesc(nn.Linear, 3, 3, bias_attr=False) for _ in range(LAYERS)]
        if tied:
            sizes = {"num_embeddings": 5, "embedding_dim": 3, "shared_weight_attr": "weight"}
            begin, end = (SharedLayerDesc("key", one, **sizes) for one in (nn.Embedding, Head))
            layers = [begin, *layers, end]
        self._prefixes = [f"h.{number}.w" for number in range(LAYERS)]
        if tied:
            self._prefixes = ["wte", *self._prefixes, "wte"]
        super().__init__(layers, num_stages=1)

    def get_sequential_name_prefixes(self) -> dict[str, str]:
        return {str(number): prefix for number, prefix in enumerate(self._prefixes)}


def saved(folder: Path, tied: bool, head: float | None = None) -> dict[str, bytes]:
    """Writes what Hugging Face's libraries would, and returns it by the names of the list."""
    numbers = np.random.default_rng(5)
    weights = {f"h.{n}.w.weight": numbers.random((3, 3), "float32") for n in range(LAYERS)}
    lasting = {f"{n + tied}.weight": weights[f"h.{n}.w.weight"] for n in range(LAYERS)}
    if tied:
        weights["wte.weight"] = numbers.random((5, 3), "float32")
        lasting["shared_layers.key.weight"] = weights["wte.weight"]
    if head is not None:
        weights["lm_head.weight"] = weights["wte.weight"] + np.float32(head)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return {name: array.tobytes() for name, array in lasting.items()}


@pytest.mark.parametrize(("tied", "head"), [(False, None), (True, None), (True, 0.0)])
def test_a_list_is_loaded_and_converted_by_plain_names(
    tmp_path: Path, tied: bool, head: float | None
) -> None:
    expected = saved(tmp_path / "plain", tied, head)
    convert(tmp_path / "plain", tmp_path / "run", "--step", 1)
    for path in ("plain", "run"):
        model = Listed(tied)
        fleetpipe.load_checkpoint(tmp_path / path, model=model)
        assert bits(model.full_state_dict()) == expected
    manager = fleetpipe.CheckpointManager(tmp_path / "run")
    manager.save(2, model=model)
    convert(tmp_path / "run", tmp_path / "back", "--to", "huggingface")
    (file,) = (tmp_path / "back").glob("*.safetensors")
    there = load_file(tmp_path / "plain/model.safetensors")
    there.pop("lm_head.weight", None)
    assert {n: one.tobytes() for n, one in load_file(file).items()} == {
        name: one.tobytes() for name, one in there.items()
    }
    if not tied:
        convert(tmp_path / "run", tmp_path / "layers", "--to", "fleet")
        assert len([*(tmp_path / "layers").glob("layer_*")]) == LAYERS


@pytest.mark.parametrize(
    ("tied", "head", "words"),
    [(True, 1.0, "got: 13, lm_head.weight"), (False, None, "h.0.w.weight, h.1.w.weight")],
)
def test_what_only_the_order_of_names_could_match_is_refused(
    tmp_path: Path, tied: bool, head: float | None, words: str
) -> None:
    """A head that differs from the embedding; and a list without names, as 10 sorts before 2."""
    saved(tmp_path / "plain", tied, head)
    convert(tmp_path / "plain", tmp_path / "run", "--step", 1)
    layers = [LayerDesc(nn.Linear, 3, 3, bias_attr=False) for _ in range(LAYERS)]
    model = Listed(tied) if tied else PipelineLayer(layers, num_stages=1)
    before = bits(model.state_dict())
    for path in ("plain", "run"):
        with pytest.raises(CheckpointError, match=words):
            fleetpipe.load_checkpoint(tmp_path / path, model=model)
    assert bits(model.state_dict()) == before
