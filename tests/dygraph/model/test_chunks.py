"""Several chunks on a rank: placement by schedule, names, loading, and Fleet's questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.errors import ConfigError, PartitionError, ScheduleError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import batch, bits, job, mlp_layers, model_in_job, pipeline, sgd


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


def test_the_memory_cap_reaches_the_search() -> None:
    with model_in_job(2, 4, "auto", memory_cap=2) as model:
        model.train_batch(batch(), sgd(model))
        assert max(model.peak_held.values()) <= 2
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
