"""What ranks have of one model: chunks, their names and loading, and losses that are trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.errors import CheckpointError, ConfigError, PartitionError, ScheduleError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import (
    CLASSES,
    FEATURES,
    batch,
    bits,
    job,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
)


def layers_of(model: Any) -> list[list[int]]:
    """By rank, the layers it would hold."""
    held: list[list[int]] = [[] for _ in range(model.placement.ranks)]
    for layer in range(len(model.partition.layers)):
        held[model.get_stage_from_index(layer)].append(layer)
    return held


@pytest.mark.parametrize(
    ("schedule", "chunks", "held"),
    [
        ("1F1B", None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("1F1B", 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("VPP", None, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("Interleaved1F1B", 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("ZBH1", None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("ZBH1", 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("ZBV", None, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("DualPipeV", 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    ],
)
def test_layers_stand_where_the_schedule_wants_them(
    schedule: str, chunks: int | None, held: list[list[int]]
) -> None:
    layers = [LayerDesc(nn.Linear, 6, 6) for _ in range(7)] + [LayerDesc(nn.Linear, 6, 4)]
    with model_in_job(2, 4, schedule, layers=layers, num_virtual_pipeline_stages=chunks) as model:
        assert layers_of(model.layers) == held
        assert model.layers.placement == model.schedule.placement
        assert model.layers.get_num_virtual_stages() == model.schedule.placement.chunks


def test_fleets_1f1b_with_chunks_is_interleaved() -> None:
    with job(2):
        assert pipeline(num_virtual_pipeline_stages=2).schedule.name == "Interleaved1F1B"


@pytest.mark.parametrize("method", ["uniform", "balanced", "layer:Linear", [0, 2, 4, 6]])
def test_every_way_to_cut_makes_chunks(method: Any) -> None:
    with model_in_job(2, num_virtual_pipeline_stages=2, seg_method=method) as model:
        assert len(model.layers.segment_parts) == 5
        model.train_batch(batch(), sgd(model))


def test_use_dualpipev_means_the_schedule() -> None:
    # Fleet's libraries ask for it with one chunk.
    for chunks in (None, 1, 2):
        options = {"use_dualpipev": True, "num_virtual_pipeline_stages": chunks}
        with model_in_job(2, **options) as model:
            assert model.schedule.name == "DualPipeV"
            assert model.layers.placement.name == "vee"
    with job(2, 4, "ZBV"), pytest.raises(ConfigError, match="use_dualpipev"):
        pipeline(use_dualpipev=True)
    with job(2), pytest.raises(ConfigError, match="use_dualpipev"):
        pipeline(use_dualpipev=True, num_virtual_pipeline_stages=3)


def test_names_depend_on_nothing_and_state_loads_across_all() -> None:
    layers = mlp_layers(blocks=4)
    with model_in_job(1, layers=layers) as whole:
        for parameter in whole.parameters():
            parameter.set_value(paddle.randn(parameter.shape))
        expected = bits(whole.layers.state_dict())
    assert "2.weight" in expected
    others = [(2, "ZBV", None), (4, "ZBV", None), (2, "VPP", 3), (3, "ZBH1", 2)]
    for ranks, schedule, chunks in others:
        with job(ranks, 4, schedule):
            other = pipeline(layers, num_virtual_pipeline_stages=chunks)
            assert list(other.layers.state_dict()) == list(expected)
            assert bits(other.layers.state_dict()) != expected
            other.layers.load_from(whole.layers)
            assert bits(other.layers.full_state_dict()) == expected
            other.layers.set_state_dict(whole.layers.state_dict())
            assert bits(other.layers.state_dict()) == expected


def test_chunks_are_there_to_look_at() -> None:
    with job(2):
        assert pipeline().layers.get_model_chunks() is None
    with job(2, 4, "ZBV"):
        model = pipeline().layers
        chunks = model.get_model_chunks()
        # One process plays both ranks, so it has all four.
        assert [len(chunk) for chunk in chunks] == [1, 2, 2, 2]
        assert [name for chunk in chunks for name in chunk.state_dict()] == list(model.state_dict())
        assert list(chunks[1]) == chunks[1].run_function
        with pytest.raises(PermissionError, match="chunk_id"):
            chunks[0](batch()[0])


def test_a_chunk_is_called_by_its_number() -> None:
    with job(2, 4, "ZBV"):
        model = pipeline().layers
        value, _ = batch()
        expected = model(value)
        for chunk in range(4):
            value = model(value, chunk_id=chunk)
        assert value.numpy().tobytes() == expected.numpy().tobytes()
        with pytest.raises(ConfigError, match="no chunk 4"):
            model(value, chunk_id=4)
    with job(2), pytest.raises(ConfigError, match="one chunk"):
        pipeline().layers(batch()[0], chunk_id=0)


def test_the_table_of_stages_tells_the_ranks_of_a_vee() -> None:
    with job(2, 4, "ZBV"):
        rows = pipeline().layers.stage_table().splitlines()[2:6]
    assert [row.split()[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2", "1"], ["3", "0"]]


@pytest.mark.parametrize("schedule", ["ZBV", "VHalf", "VMin", "DualPipeV"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_vee_has_two_chunks(schedule: str, chunks: int) -> None:
    with job(2, 4, schedule), pytest.raises(ConfigError) as caught:
        pipeline(num_virtual_pipeline_stages=chunks)
    assert f"num_virtual_pipeline_stages={chunks}" in str(caught.value)
    assert "chunks=2" in str(caught.value)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True])
def test_a_number_of_chunks_is_a_whole_number(chunks: Any) -> None:
    with job(2), pytest.raises(ConfigError, match="chunks"):
        pipeline(num_virtual_pipeline_stages=chunks)


def test_a_schedule_of_one_chunk_refuses_more() -> None:
    with job(2, 4, "ZBH2"), pytest.raises(ConfigError, match="ZBH2"):
        pipeline(num_virtual_pipeline_stages=2)


def test_more_stages_than_layers_are_refused() -> None:
    with job(4, 4, "ZBV"), pytest.raises(PartitionError):
        pipeline(mlp_layers(blocks=3))


def test_a_schedule_that_needs_another_placement_is_refused() -> None:
    with job(2, 4, "ZBV"):
        topology = fleet.get_hybrid_communicate_group().topology()
        layers = PipelineLayer(mlp_layers(), topology=topology, loss_fn=nn.CrossEntropyLoss())
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
        strategy.pipeline_configs = {"accumulate_steps": 4, "schedule_mode": "1F1B"}
        fleet.init(is_collective=True, strategy=strategy)
        with pytest.raises(ConfigError, match="placed") as caught:
            fleet.distributed_model(layers)
    assert "a vee of 2 ranks with 2 chunks" in str(caught.value)


def test_without_a_job_chunks_make_a_loop() -> None:
    fleet.shutdown()
    model = PipelineLayer(mlp_layers(), num_stages=2, num_virtual_pipeline_stages=2)
    assert (model.placement.name, model.placement.stages) == ("loop", 4)


def test_a_schedule_that_exceeds_the_memory_cap_is_refused() -> None:
    with job(2, 4, "ZBV", memory_cap=1), pytest.raises(ScheduleError, match="cap"):
        pipeline()


class Marks(paddle.autograd.PyLayer):
    """Notes when backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Any, note: Callable[[], None]) -> Any:
        ctx.note = note
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        ctx.note()
        return grad * 2


@pytest.mark.parametrize(
    ("ranks", "schedule", "chunks"),
    [(2, "ZBV", None), (2, "DualPipeV", None), (1, "Interleaved1F1B", 3), (2, "1F1B", None)],
)
def test_a_backward_ends_at_its_own_stage(
    ranks: int, schedule: str, chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[int] = []
    passed: list[tuple[int, int]] = []
    backward = DygraphStage.backward

    def noted(self: Any, stage: int, micro_batch: int, output_grads: Any) -> Any:
        stages.append(stage)
        grads = backward(self, stage, micro_batch, output_grads)
        assert all(grad is not None for values in grads.values() for grad in values)
        return grads

    def mark(layer: int) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            x, again = value
            # Twice the same: its gradients are those of two tensors that left.
            return (Marks.apply(x + again, lambda: passed.append((layer, stages[-1]))),) * 2

        return run

    monkeypatch.setattr(DygraphStage, "backward", noted)
    layers = [LayerDesc(nn.Linear, 6, 4), lambda x: (x, x), *map(mark, range(2, 8))]
    with job(ranks, 4, schedule):
        model = pipeline([*layers, lambda value: value[0]], num_virtual_pipeline_stages=chunks)
        model.forward_backward_pipeline(batch())
        stage_of = model.layers.partition.stage_of
        assert passed
        assert [stage for _, stage in passed] == [stage_of(layer) for layer, _ in passed]
        gradients = [parameter.grad.numpy().tobytes() for parameter in model.parameters()]
        single = model.layers.single_model()
        model.layers.copy_to(single)
        for inputs, labels in zip(*(part.split(4) for part in batch())):
            (nn.functional.cross_entropy(single(inputs), labels) / 4).backward()
        assert [p.grad.numpy().tobytes() for p in single.parameters()] == gradients


class Tasks(nn.Layer):
    """Weighs two losses by a trained weight of each, and centres them by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([2])
        self.register_buffer("centre", paddle.zeros([CLASSES]))

    def forward(self, output: Any, label: Any) -> Any:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        square = (output - self.centre).square().mean()
        loss = nn.functional.cross_entropy(output, label)
        return loss * paddle.exp(-self.weight[0]) + square * self.weight[1].exp()


def trained_loss(ranks: int, **options: Any) -> list[dict[str, bytes]]:
    """The state of a loss after each of three steps."""
    with job(ranks, 2, **options):
        paddle.seed(0)
        loss = Tasks()
        model = pipeline(loss_fn=loss)
        parameters = [*model.parameters(), *loss.parameters()]
        adam = fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, parameters=parameters))
        states = []
        for step in range(3):
            model.train_batch(batch(2, step), adam)
            states.append(bits(loss.state_dict()))
        return states


@pytest.mark.parametrize("options", [{}, {"dp": 2}])
def test_each_rank_has_the_state_of_a_trained_loss(on_ranks: Any, options: dict[str, int]) -> None:
    alone = trained_loss(2)
    assert alone[0] != alone[2]
    ranks = 2 * options.get("dp", 1)
    assert on_ranks(partial(trained_loss, 2, **options), ranks) == [alone] * ranks


def measured(ranks: int) -> Any:
    """Shapes, a norm, and the loss of a batch after an initialization over all parameters."""
    with job(ranks, 2):
        model = pipeline()
        pipe = model.layers
        largest = pipe.whole_parameters(lambda parameter: float(parameter.abs().max()))
        shapes = pipe.whole_parameters()
        paddle.seed(3)
        drawn = {name: 0.1 * paddle.randn(shape) for name, shape in shapes.items()}
        pipe.load_from({**pipe.full_state_dict(), **drawn})
        loss = model.train_batch(batch(2), sgd(model))
        return [*shapes.items()], max(largest.values()), loss.numpy().tobytes()


def test_what_is_computed_over_all_parameters_is_alike_on_any_ranks(on_ranks: Any) -> None:
    alone = measured(2)
    assert [name for name, _ in alone[0]][:2] == ["0.weight", "0.bias"]
    assert alone[0][0][1] == [FEATURES, 8]
    assert on_ranks(partial(measured, 2), 2) == [alone] * 2


def in_two_pipelines(seg_method: list[int], trains: bool) -> str:
    """What is said of built layers that stand alone, and behind others, on two ranks."""
    body = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for layer in body:
        for parameter in layer.parameters():
            parameter.stop_gradient = not trains
    with job(2, 2):
        # The wrapper is needed while the other is made.
        first = pipeline([LayerDesc(nn.Linear, 8, 8), *body], seg_method=seg_method)
        try:
            pipeline([*body, LayerDesc(nn.Linear, 8, CLASSES)], seg_method=[0, 1])
        except ConfigError as error:
            return str(error).splitlines()[0]
        return f"as {type(first).__name__}"


def test_built_layers_of_two_pipelines_are_on_the_same_ranks(on_ranks: Any) -> None:
    refused = "a built layer stands in two pipelines, which have it on different ranks"
    assert on_ranks(partial(in_two_pipelines, [0, 1], True), 2) == [refused] * 2
    for right in (([0, 2], True), ([0, 1], False)):
        assert on_ranks(partial(in_two_pipelines, *right), 2) == ["as PipelineParallel"] * 2
    assert in_two_pipelines([0, 1], True) == "as PipelineParallel"


class Normed(nn.Layer):
    """A Linear whose weight is of a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.weight_norm(nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("save", ["full_state_dict", "copy_to"])
def test_the_whole_state_names_what_was_taken_out_of_a_layer(save: str) -> None:
    with model_in_job(2, 2, layers=[LayerDesc(Normed), *mlp_layers()]) as model:
        before = model.predict_batch(batch(2)[0])
        single = model.layers.single_model()
        (normed,) = (part for part in model.layers.sublayers() if isinstance(part, Normed))
        nn.utils.remove_weight_norm(normed.inner)
        assert np.allclose(before, model.predict_batch(batch(2)[0]), atol=1e-6)
        with pytest.raises(CheckpointError, match=r"0\.inner\.weight_v, 0\.inner\.weight_g"):
            getattr(model.layers, save)(*([single] if save == "copy_to" else []))
