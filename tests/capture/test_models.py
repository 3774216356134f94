"""Models with the glue that people write, and Paddle's own: their bits, and their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.vision.models import resnet18

import fleetpipe
from fleetpipe import SplitPoint, fleet
from fleetpipe.errors import CaptureError, CheckpointError, ConfigError, FleetPipeError
from tests.capture.models import (
    GPT,
    IMAGE_CLASSES,
    Encoded,
    Mixture,
    Tagger,
    TwoTowers,
    UNet,
    images,
    require_bits,
    tokens,
    trained,
)
from tests.capture.vision import compared
from tests.pipelines import bits, job, sgd


def of_tokens(output: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def of_pixels(output: Any, labels: Any) -> Any:
    return of_tokens(output.transpose([0, 2, 3, 1]).flatten(0, 1), labels.flatten(0, 1))


def of_towers(output: Any, labels: Any) -> Any:
    scores, left, _ = output
    return nn.functional.cross_entropy(scores, labels) + left.mean()


def of_mixture(output: Any, labels: Any) -> Any:
    return of_tokens(output["logits"], labels) + 0.01 * output["balance"]


IDS, NEXT = tokens(8), tokens(8, seed=1)
MASK = paddle.to_tensor(np.where(np.arange(8 * 6).reshape(8, 1, 1, 6) % 5, 0.0, -1e4), "float32")
PIXELS = paddle.to_tensor(np.random.default_rng(0).integers(0, 2, (8, 16, 16)))

#: By name: the model, a batch, the loss, the cut, and the edges with the number of their values.
MODELS: dict[str, tuple[Callable[[], Any], list[Any], Any, Any, dict[str, int]]] = {
    # The outer skip goes straight from stage 0 to stage 2.
    "U-Net": (
        UNet,
        [images(8, 16)[0], PIXELS],
        of_pixels,
        ["middle", "up2"],
        {"0>1": 2, "0>2": 1, "1>2": 1},
    ),
    "LSTM tagger": (Tagger, [IDS, NEXT], of_tokens, ["lstm", "head"], {"0>1": 1, "1>2": 1}),
    "two towers": (
        TwoTowers,
        [{"query": IDS, "answer": NEXT}, paddle.to_tensor([[0], [1]] * 4)],
        of_towers,
        ["right"],
        {"0>1": 2},
    ),
    "Transformer": (
        Encoded,
        [(IDS, NEXT), IDS],
        of_tokens,
        ["transformer.decoder.layers.1"],
        {"0>1": 2},
    ),
    "Transformer with a mask": (
        lambda: Encoded(masked=True),
        [(IDS, NEXT), IDS],
        of_tokens,
        {"transformer.encoder": SplitPoint.END},
        {"0>1": 3},
    ),
    "Transformer with a mask that is given": (
        Encoded,
        [{"source": IDS, "target": NEXT, "source_mask": MASK}, IDS],
        of_tokens,
        ["transformer.decoder.layers.1"],
        {"0>1": 3},
    ),
    # The loss that balances the experts goes on from stage to stage.
    "experts": (Mixture, [IDS, NEXT], of_mixture, ["blocks.1"], {"0>1": 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_glue_gives_the_bits_of_the_plain_one(name: str) -> None:
    build, data, loss_fn, split_spec, edges = MODELS[name]
    done = require_bits(build, data, split_spec, loss_fn=loss_fn)
    crossing = done.pipe.captures.of_example(training=True).crossing
    assert {str(edge): len(values) for edge, values in crossing.items()} == edges


def test_outputs_in_containers_and_another_length_and_a_short_last_batch() -> None:
    with job(pp=3):
        plain = GPT()
        plain.eval()
        pipe = fleetpipe.pipeline(
            plain, {"ids": IDS[:2], "use_cache": True}, split_spec="blocks", verify=False
        )
        model = fleet.distributed_model(pipe)
        for ids in (IDS[:2], tokens(5), tokens(3, length=9)):
            output = model.predict_batch({"ids": ids})
            parts = [plain(ids[row : row + 2], use_cache=True) for row in range(0, len(ids), 2)]
            assert len(output["cache"]) == 4
            for part, (key, value) in zip(output["cache"], parts[0]["cache"]):
                assert np.array_equal(part[0][:2], key)
                assert np.array_equal(part[1][:2], value)
            logits = paddle.concat([part["logits"] for part in parts])
            assert np.array_equal(output["logits"], logits)


class Selected(nn.Layer):  # type: ignore[misc]
    """Has parameters of its own, and returns indices, which Paddle gives the flag of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 10])

    def forward(self, x: Any) -> Any:
        h = paddle.matmul(x, self.weight)
        values, indices = paddle.topk(h, 3)
        return h, values, indices, paddle.argsort(h)


class Reranked(nn.Layer):  # type: ignore[misc]
    """Takes indices as a layer with parameters, and returns what came of them."""

    def __init__(self) -> None:
        super().__init__()
        self.select, self.bias = Selected(), self.create_parameter([3])
        self.last = nn.Linear(3, 10)

    def forward(self, x: Any) -> Any:
        h, values, indices, order = self.select(x)
        chosen = paddle.take_along_axis(h, indices, 1, broadcast=False)
        first = paddle.index_select(h.flatten(), order.flatten()[:3])
        return self.last((values + self.bias).tanh() * chosen + first), order


def of_first(output: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(output[0], labels)


def test_indices_that_have_the_flag_of_a_gradient_have_none() -> None:
    inputs = paddle.to_tensor(np.random.default_rng(0).standard_normal((8, 4)), "float32")
    data = [inputs, paddle.arange(8).unsqueeze(1)]
    require_bits(Reranked, data, ["last"], loss_fn=of_first)
    require_bits(Reranked, data, "auto", "ZBH1", loss_fn=of_first, verify=True)


class Weighted(nn.Layer):  # type: ignore[misc]
    """Two layers between what a forward makes of its arguments."""

    def __init__(self, before: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.before = nn.Linear(4, 8), nn.Linear(8, 10), before

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.second(self.first(self.before(*args, **named)).tanh())


def by_default(x: Any, w: Any = 2.0) -> Any:
    return x * (0.5 if w is None else w)


def by_membership(batch: Any, scale: float = 1.0) -> Any:
    return batch["x"] * scale + (batch["w"] if "w" in batch else 1.0)  # noqa: SIM401


def over_views(views: Any, scale: float = 1.0) -> Any:
    return sum(view for view in views if view is not None) * scale / len(views)


DTYPES = ("bool", "uint8", "int8", "int16", "float16", "bfloat16", "float64", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_may_be_of_any_dtype(dtype: str) -> None:
    numbers = paddle.to_tensor(np.random.default_rng(0).integers(0, 100, (8, 4)))
    data = [numbers.astype(dtype), paddle.arange(8).unsqueeze(1)]
    with job(2):
        build = Weighted(lambda x: x.astype("float32") / 99)
        verify = dtype in ("bool", "bfloat16", "complex64")
        done = trained(lambda: build, data, split_spec=["second"], verify=verify)
        few = data[0][:1]
        assert np.array_equal(done.model.predict_batch(few), done.plain(few))
    assert done.differing == []


X = paddle.to_tensor(np.random.default_rng(0).standard_normal((2, 4)), "float32")
LABELS = paddle.to_tensor([[0], [1]])


@pytest.mark.parametrize(
    ("before", "example", "batch", "args"),
    [
        (by_default, {"x": X, "w": X}, {"x": X}, (X,)),
        (by_default, (X, X), X, (X,)),
        (by_default, (X, X), (X, None), (X, None)),
        (by_default, (X, 3.0), X, (X, 3.0)),
        (by_membership, ({"w": X, "x": X}, 3.0), ({"x": X},), ({"x": X}, 3.0)),
        (over_views, ((X, X, X), 3.0), ((X, X),), ((X, X), 3.0)),
    ],
)
def test_what_a_batch_leaves_out_is_left_out(
    before: Callable[..., Any], example: Any, batch: Any, args: Any
) -> None:
    paddle.seed(7)
    model = Weighted(before)
    plain = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(plain(*args), LABELS)
    loss.backward()
    with job(2, micro_batches=1):
        pipe = fleetpipe.pipeline(model, example, nn.CrossEntropyLoss(), ["second"], verify=False)
        wrapped = fleet.distributed_model(pipe)
        assert np.array_equal(wrapped.forward_backward_pipeline([batch, LABELS]), loss)
        for ours, right in zip(pipe.parameters(), plain.parameters()):
            assert np.array_equal(ours.grad, right.grad)
        assert np.array_equal(wrapped.predict_batch(batch), plain(*args))


@pytest.mark.parametrize(
    ("example", "batch"), [((X, X, 3.0), X), ({"x": X, "scale": 3.0}, X), ((X, 3.0), {"x": X})]
)
def test_a_batch_without_a_place_for_a_plain_value_is_refused(example: Any, batch: Any) -> None:
    with job(2):
        build = Weighted(lambda x, w=1.0, scale=1.0: x * w * scale)
        pipe = fleetpipe.pipeline(build, example, None, ["second"], verify=False)
        with pytest.raises(CaptureError, match="no place for the plain values"):
            fleet.distributed_model(pipe).predict_batch(batch)


def test_the_state_and_fleets_files_have_the_plain_names_and_fit_any_cut(tmp_path: Path) -> None:
    with job(2):
        pipe = fleetpipe.pipeline(GPT(), IDS[:2], of_tokens, ["blocks.2"], verify=False)
        model = fleet.distributed_model(pipe)
        model.train_batch([IDS, NEXT], sgd(model))
        state = pipe.state_dict()
        paddle.save(state, str(tmp_path / "gpt.pdparams"))
        kept = bits(state)
        pipe.save_state_dict(tmp_path / "layers")
    plain = GPT()
    assert list(plain.state_dict()) == list(kept)
    assert plain.set_state_dict(paddle.load(str(tmp_path / "gpt.pdparams"))) == ([], [])
    assert bits(plain.state_dict()) == kept
    # Of four blocks six layers each have parameters; an embedding and a norm.
    assert len(list((tmp_path / "layers").glob("*.pdparams"))) == 4 * 6 + 2
    first = paddle.load(str(tmp_path / "layers" / "layer_00-tensor_00-model_states.pdparams"))
    assert list(first) == ["embed.weight"]
    with job(3):
        other = fleetpipe.pipeline(GPT(), IDS[:2], split_spec=["blocks.1", "norm"], verify=False)
        other.set_state_dict(plain.state_dict())
        assert bits(other.state_dict()) == kept
        for tensor in other.state_dict().values():
            tensor.set_value(paddle.zeros_like(tensor))
        other.set_state_dir(tmp_path / "layers")
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


#: By name, the stages and where they begin; ``make test-models`` cuts all of them by cost.
SAMPLE = {
    "shufflenet_v2_x0_25": ["3_3", "4_2"],
    "mobilenet_v3_small": ["blocks.5"],
    "squeezenet1_1": ["_conv5"],
    "LeNet": ["fc"],
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_vision_model_has_the_bits_of_the_plain_one(name: str) -> None:
    spec = SAMPLE[name]
    done = compared(name, len(spec) + 1, steps=1, split_spec=spec)
    assert done.differing == []


def test_an_unmodified_resnet_trains_to_the_same_bits() -> None:
    # Within a block, whose input goes over the edge too, to the addition.
    cut = {"layer2.0.conv2": SplitPoint.END}
    done = require_bits(lambda: resnet18(num_classes=IMAGE_CLASSES), images(8), cut)
    # Each basic block has 7 nodes, or 9 with a downsample.
    assert done.pipe.segment_parts == [0, 23, 71]
