"""What scripts written for Fleet's PipelineLayer read and call."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, log, parity
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.fleet import meta_parallel
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from fleetpipe.job.job import current_job
from tests.dygraph import models
from tests.pipelines import batch, bits, job, mlp_layers, model_in_job, pipeline, sgd

NEWER = hasattr(meta_parallel, "LayerSpec")


def test_the_attributes_that_users_read() -> None:
    loss = nn.CrossEntropyLoss()
    entries = mlp_layers()
    with job(2):
        layers = pipeline(entries, loss_fn=loss, recompute_ctx={"mp_group": None}).layers
        topology = fleet.get_hybrid_communicate_group().topology()
        assert layers._loss_fn == ([loss] if NEWER else loss)
        assert layers.loss_fn() is loss
        assert layers._topo is topology
    assert layers._layers_desc == entries
    assert layers._num_layers == 7
    assert (layers._num_stages, layers._stage_id) == (2, 0)
    assert layers.segment_parts == [0, 3, 7]
    assert (layers._start_pos, layers._end_pos) == (0, 7)
    assert [type(f).__name__ for f in layers.run_function][:2] == ["Linear", "function"]
    assert list(layers.shared_layers) == []
    assert layers.shared_comm == {}
    assert layers._model_chunks == []
    assert layers.recompute_ctx == {"mp_group": None}
    assert (layers.device_id, layers.global_rank) == (0, 0)
    assert layers.layers == entries
    assert layers.get_num_virtual_stages() == 1
    assert [layers.get_stage_from_index(i) for i in range(7)] == [0, 0, 0, 1, 1, 1, 1]


def test_a_model_of_one_stage_stands_in_any_job_and_cannot_be_wrapped() -> None:
    with job(2):
        layers = PipelineLayer(mlp_layers(), num_stages=1, loss_fn=nn.CrossEntropyLoss())
        assert layers._topo.get_dim("pipe") == 1
        assert layers.segment_parts == [0, 7]
        value, _ = batch()
        assert layers(value).shape == [8, 4]
        assert list(layers.full_state_dict()) == list(layers.state_dict())
        with pytest.raises(ConfigError, match="another number of stages than the job"):
            fleet.distributed_model(layers)
        with pytest.raises(ConfigError, match="differs"):
            PipelineLayer(mlp_layers(), num_stages=3)


def test_the_number_of_stages_must_be_told() -> None:
    for running in (True, False):
        with job(2):
            if not running:
                fleet.shutdown()
            with pytest.raises(ConfigError, match="needs num_stages or topology"):
                PipelineLayer(mlp_layers())


def test_shared_layers_need_no_topology() -> None:
    # On 2.6.2 Fleet asks the topology that it makes of num_stages for an axis that it lacks.
    tied = SharedLayerDesc("k", nn.Linear, None, "weight", 6, 6)
    entries = [tied, nn.functional.tanh, tied, LayerDesc(nn.Linear, 6, 4)]
    assert len(PipelineLayer(entries, num_stages=2).parameters()) == 4
    three_axes = fleet.CommunicateTopology(["data", "pipe", "model"], [1, 2, 1])
    for given in ({"num_stages": 2}, {"topology": three_axes}):
        with job(2):
            layers = PipelineLayer(entries, loss_fn=nn.CrossEntropyLoss(), **given)
            model = fleet.distributed_model(layers)
            assert model.layers.segment_parts == [0, 2, 4]
            assert float(model.train_batch(batch(), sgd(model))) > 0


class Renaming(PipelineLayer):
    """A model whose state dict has other keys, and whose parameters() come in another order."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return {f"model.{n}": t for n, t in super().state_dict(*args, **named).items()}

    def set_state_dict(self, state: Any, *args: Any, **named: Any) -> Any:
        own = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        return super().set_state_dict(own, *args, **named)

    def named_parameters(self, *args: Any, **named: Any) -> Any:
        for name, parameter in reversed(list(super().named_parameters(*args, **named))):
            yield f"model.{name}", parameter


def test_a_pipeline_is_not_pickled() -> None:
    with model_in_job(2) as model:
        for wrapped in (model, model.layers):
            with pytest.raises(StateError, match="a pipeline is not pickled"):
                pickle.dumps(wrapped)


def test_a_subclass_may_give_its_parameters_other_names(tmp_path: Path) -> None:
    """As PaddleNLP's models do: the names of the whole model stay."""
    states = []
    for kind in (PipelineLayer, Renaming):
        shared = SharedLayerDesc("k", nn.Linear, None, "weight", 6, 6)
        entries = [shared, nn.functional.tanh, shared, LayerDesc(nn.Linear, 6, 4)]
        with job(2, schedule="ZBH1"):
            layers = kind(entries, num_stages=2, loss_fn=nn.CrossEntropyLoss())
            model = fleet.distributed_model(layers)
            clip = nn.ClipGradByGlobalNorm(1.0)
            adamw = paddle.optimizer.AdamW(
                0.01, parameters=layers.trained_parameters(), grad_clip=clip
            )
            session = parity.begin(model, fleet.distributed_optimizer(adamw))
            session.step(batch())
            model.profile(batch())
            layers._synchronize_shared_weights()
            assert session.report.passed
            layers.save_state_dict(tmp_path / kind.__name__)
            whole = layers.full_state_dict()
            layers.load_from({name: tensor * 2 for name, tensor in whole.items()})
            layers.set_state_dir(tmp_path / kind.__name__)
            single = layers.single_model()
            layers.copy_to(single)
            states += [bits(whole), bits(layers.full_state_dict()), bits(single.state_dict())]
        prefix = "model." if kind is Renaming else ""
        assert set(layers.state_dict()) == {prefix + name for name in whole}
    assert all(state == states[0] for state in states)


def test_a_built_layer_keeps_its_values() -> None:
    layer = nn.Linear(6, 8)
    before = layer.weight.numpy().tobytes()
    with model_in_job(2, layers=[layer, LayerDesc(nn.Linear, 8, 4)]) as model:
        assert model.layers.run_function[0] is layer
    assert layer.weight.numpy().tobytes() == before


def test_each_layer_gets_one_argument_unchanged() -> None:
    seen: list[Any] = []

    def fork(x: Any) -> Any:
        return x, (x * 2,), [x * 3]

    def note(*arguments: Any) -> Any:
        seen.append(arguments)
        return arguments[0]

    def join(value: Any) -> Any:
        first, (second,), (third,) = value
        return first + second + third

    entries = [LayerDesc(nn.Linear, 6, 6), fork, note, note, join, LayerDesc(nn.Linear, 6, 4)]
    results = []
    # Cut nowhere, and between the two that note.
    for cut in ([0], [0, 3]):
        seen.clear()
        with model_in_job(len(cut), layers=entries, seg_method=cut) as model:
            results.append(model.train_batch(batch(), sgd(model)).numpy().tobytes())
        assert len(seen) == 2 * 4
        for (value,) in seen:
            assert [type(part) for part in value[1:]] == [tuple, list]
    assert results[0] == results[1]


@pytest.mark.parametrize(("rank", "told"), [(0, 0), (1, 1)])
def test_a_rank_without_parameters_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, told: int
) -> None:
    log.once.cache_clear()
    with job(2), monkeypatch.context() as played:
        running = current_job()
        assert running is not None
        played.setattr(running, "local", False)
        played.setattr(running.hcg, "get_stage_id", lambda: rank)
        PipelineLayer([LayerDesc(nn.Linear, 6, 4), nn.functional.relu], num_stages=2)
    notice = f"the layers of rank {rank} of the pipeline have no parameters"
    assert caplog.text.count(notice) == told


@pytest.mark.skipif(not NEWER, reason="2.6.2 has no LayerSpec")
def test_a_layer_spec_describes_a_layer() -> None:
    spec = meta_parallel.LayerSpec
    by_name = spec(("paddle.nn", "Linear"), {"in_features": 8, "out_features": 4})
    wide = spec(nn.Linear, {"in_features": 6})
    entries = [
        LayerDesc(wide, out_features=8),
        nn.functional.tanh,
        SharedLayerDesc("k", spec(nn.Linear, {"in_features": 8, "out_features": 8})),
        SharedLayerDesc("k", spec(nn.Linear, {"in_features": 8, "out_features": 8})),
        LayerDesc(by_name),
    ]
    with model_in_job(2, layers=entries) as model:
        assert [name for name, _ in model.layers.named_parameters()][::2] == [
            "shared_layers.k.weight",
            "0.weight",
            "4.weight",
        ]
        assert float(model.train_batch(batch(), sgd(model))) > 0
    with job(2):
        # The name of a class given as (module, name) is not known before it is built.
        assert pipeline(entries, seg_method="layer:Linear$|tanh").layers.segment_parts == [0, 2, 5]
    # Building wrote nothing into a specification that another entry may use.
    assert wide.extra_kwargs == {"in_features": 6}
    layer = meta_parallel.build_spec_layer(wide, out_features=3)
    assert layer.weight.shape == [6, 3]


@pytest.mark.skipif(not NEWER, reason="2.6.2 has no LayerSpec")
def test_a_layer_spec_that_does_not_fit_is_named_with_its_arguments() -> None:
    spec = meta_parallel.LayerSpec(nn.Linear, {"in_features": 8, "wide": 4})
    with job(1), pytest.raises(ConfigError) as refused:
        pipeline([LayerDesc(spec, out_features=4)])
    assert "layer 0 (Linear) cannot be built from its description" in str(refused.value)
    handed = "{'in_features': 8, 'wide': 4, 'out_features': 4} of a LayerSpec"
    assert f"got: arguments {handed}" in str(refused.value)
    assert "unexpected keyword argument 'wide'" in str(refused.value)


def test_building_leaves_the_random_streams_as_they_were() -> None:
    tracker = meta_parallel.get_rng_state_tracker()
    tracker.reset()
    paddle.seed(3)
    tracker.add("stream", 11)

    def draw() -> tuple[list[float], list[float]]:
        with tracker.rng_state("stream"):
            theirs = paddle.rand([2]).tolist()
        return paddle.rand([2]).tolist(), theirs

    class Random(nn.Linear):
        def __init__(self) -> None:
            with tracker.rng_state("stream"):
                super().__init__(4, 4)

    try:
        first = PipelineLayer([LayerDesc(Random), LayerDesc(Random)], num_stages=1)
        found = draw()
        weights = [layer.weight.tolist() for layer in first.run_function]
        # Two layers do not begin with the same numbers.
        assert weights[0] != weights[1]
        tracker.reset()
        paddle.seed(3)
        tracker.add("stream", 11)
        assert draw() == found
    finally:
        tracker.reset()


def test_weights_depend_on_the_place_in_the_list_alone() -> None:
    found: list[Any] = []
    for ranks, seed in ((1, 1), (3, 2)):
        paddle.seed(seed)
        with model_in_job(ranks) as model, job(ranks):
            tied = pipeline(models.layers(), loss_fn=models.loss).layers
            found.append([bits(layers.state_dict()) for layers in (model.layers, tied)])
    assert found[0] == found[1]
    paddle.seed(1234 + 2)
    assert nn.Linear(8, 8).weight.numpy().tobytes() == found[0][0]["2.weight"]


def test_a_description_that_its_constructor_does_not_take_is_named() -> None:
    layers = [LayerDesc(nn.Linear, 3, 4), LayerDesc(nn.Linear, 3)]
    with pytest.raises(ConfigError, match=r"layer 1 \(Linear\) cannot be built") as raised:
        PipelineLayer(layers, num_stages=1)
    assert "arguments (3,), {}" in str(raised.value)
    assert "TypeError" in str(raised.value)
