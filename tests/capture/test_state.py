"""The parameters of a captured pipeline go to and fro under the plain model's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CheckpointError, ConfigError, FleetPipeError
from tests.capture.beside import images
from tests.capture.models import GPT, UNet, tokens
from tests.capture.test_models import of_tokens
from tests.jobs import job
from tests.pipelines import bits, sgd

IDS = tokens(8)


def trained_gpt(split_spec: Any) -> Any:
    """A pipeline after a step, in the current job."""
    pipe = fleetpipe.pipeline(GPT(), IDS[:2], of_tokens, split_spec, verify=False)
    model = fleet.distributed_model(pipe)
    model.train_batch([IDS, tokens(8, seed=1)], sgd(model))
    return pipe


def test_the_state_of_a_pipeline_is_saved_and_loads_into_the_plain_model(tmp_path: Path) -> None:
    with job(2):
        state = trained_gpt(["blocks.2"]).state_dict()
        paddle.save(state, str(tmp_path / "gpt.pdparams"))
        kept = bits(state)
    plain = GPT()
    assert list(plain.state_dict()) == list(kept)
    missing, unexpected = plain.set_state_dict(paddle.load(str(tmp_path / "gpt.pdparams")))
    assert (missing, unexpected) == ([], [])
    assert bits(plain.state_dict()) == kept
    with job(3):
        other = fleetpipe.pipeline(GPT(), IDS[:2], split_spec=["blocks.1", "norm"], verify=False)
        other.set_state_dict(plain.state_dict())
        assert bits(other.state_dict()) == kept


def test_fleets_files_have_the_plain_names_and_fit_any_cut(tmp_path: Path) -> None:
    with job(2):
        pipe = trained_gpt(["blocks.2"])
        pipe.save_state_dict(tmp_path)
        kept = bits(pipe.state_dict())
    # Of four blocks six layers each have parameters; an embedding and a norm.
    assert len(list(tmp_path.glob("*.pdparams"))) == 4 * 6 + 2
    first = paddle.load(str(tmp_path / "layer_00-tensor_00-model_states.pdparams"))
    assert list(first) == ["embed.weight"]
    with job(4):
        other = fleetpipe.pipeline(GPT(), IDS[:2], split_spec="blocks", verify=False)
        other.set_state_dir(tmp_path)
        assert bits(other.state_dict()) == kept


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    unet = fleetpipe.pipeline(UNet(), images(2, 16)[0], split_spec=["middle"], verify=False)
    unet.save_state_dict(tmp_path)
    pipe = fleetpipe.pipeline(GPT(), IDS[:2], split_spec=["blocks.2"], verify=False)
    before = bits(pipe.state_dict())
    with pytest.raises(CheckpointError, match=r"'embed\.weight' in layer_00"):
        pipe.set_state_dir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        pipe.set_state_dir(tmp_path / "nowhere")
    assert bits(pipe.state_dict()) == before


def test_a_layer_of_several_ranks_has_no_file(tmp_path: Path) -> None:
    class Halves(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.before, self.after = (self.create_parameter([3]) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x + self.before)) * self.after

    pipe = fleetpipe.pipeline(Halves(), paddle.ones([2, 3]), split_spec=["second"])
    with pytest.raises(ConfigError, match="full_state_dict"):
        pipe.save_state_dict(tmp_path)


#: What a script does with the weights of the model that it has made a pipeline of.
READ: list[Callable[[Any, str], object]] = [
    lambda net, _: [parameter.numpy() for parameter in net.parameters()],
    lambda net, _: sum(float((parameter**2).sum()) for parameter in net.parameters()),
    lambda net, _: [parameter.scale_(0.5) for parameter in net.parameters()],
    lambda net, folder: paddle.save(net.state_dict(), folder + "/net.pdparams"),
    lambda net, _: fleetpipe.model_hash(net),
]
if paddle.__version__.startswith("3."):  # 2.6.2 leaves out what has no memory
    READ.append(lambda net, _: net.set_state_dict(GPT().state_dict()))


def told_on_a_rank(folder: str) -> tuple[int, list[str]]:
    """The size of a model by its parameters, and what a rank is told of each reading."""
    told = []
    net = GPT()
    with job(2):
        fleetpipe.pipeline(net, IDS[:2], of_tokens, ["blocks.2"], verify=False)
        size = sum(int(parameter.numel()) for parameter in net.parameters())
        for read in READ:
            with pytest.raises(FleetPipeError) as refusal, paddle.no_grad():
                read(net, folder)
            told.append(str(refusal.value))
    return size, told


def test_weights_of_another_rank_say_so_whatever_reads_them(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    size = sum(int(parameter.numel()) for parameter in GPT().parameters())
    for counted, told in on_ranks(told_on_a_rank, 2, str(tmp_path)):
        assert counted == size
        assert all("the numbers of this weight are on another rank" in text for text in told)
