"""``save_graphs``: what the stages of a rank run, as text and as a graph, and the plan of all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fleetpipe.aliases import Layer
from fleetpipe.capture.captured_pipeline import CapturedPipeline
from fleetpipe.capture.running.variants import Form
from fleetpipe.capture.tracing.value import Node
from fleetpipe.job.job import Job
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.forms import events_of, write_trace


def save(captured: CapturedPipeline, schedule: Schedule, job: Job, folder: str) -> None:
    """Writes files into ``folder/rank_<rank of the job>``.

    For each stage of this rank ``stage_<s>.txt`` has its nodes in order, with file, line and
    parameters, and ``stage_<s>.dot`` the values between them as a graph for Graphviz. ``plan.txt``
    has what all ranks run, sends and receives too, and ``schedule.json`` draws it in
    chrome://tracing.

    Args:
        captured: The model.
        schedule: What is run.
        job: The job.
        folder: Made where it does not exist.
    """
    place = Path(folder) / f"rank_{job.hcg.get_global_rank()}"
    place.mkdir(parents=True, exist_ok=True)
    placement, form = schedule.placement, captured.forms.example(training=True)
    stages = range(placement.stages) if job.local else placement.stages_of(job.hcg.get_stage_id())
    for stage in stages:
        _write(place / f"stage_{stage}.txt", _lines(form, stage))
        _write(place / f"stage_{stage}.dot", _graph(form, stage))
    edges = captured.edges(training=True)
    _write(place / "plan.txt", [str(schedule.lower(edges))])
    events = events_of(schedule.simulate(edges=edges))
    write_trace(place / "schedule.json", {schedule.name: events}, placement, edges=edges)


def _lines(form: Form, stage: int) -> Iterator[str]:
    for node in form.nodes(stage):
        yield f"{node.name}  {node.place}"
        for parameter in _parameters(node):
            yield f"  {parameter}"


def _graph(form: Form, stage: int) -> Iterator[str]:
    """Yields a graph of the nodes of a stage, and of those outside that they take values of."""
    nodes = form.nodes(stage)
    first = form.trace.nodes.index(nodes[0])
    yield f"digraph stage_{stage} {{"
    for number, node in enumerate(nodes, first):
        yield f'  {number} [label="{node.name}", shape=box];'
        for value in sorted(node.uses):
            maker = form.trace.maker(value)
            source = "inputs" if maker is None else str(maker)
            if maker is not None and not first <= maker < first + len(nodes):
                yield f'  {source} [label="{form.trace.nodes[maker].name}", style=dashed];'
            yield f'  {source} -> {number} [label="{form.trace.likes[value]}"];'
    yield "}"


def _parameters(node: Node) -> list[str]:
    """Returns the names in the model and the shapes of what a node trains."""
    if node.is_layer:
        layer: Layer = node.function
        named = [(f"{node.scopes[-1].path}.{name}", p) for name, p in layer.named_parameters()]
    else:
        named = [(owned.path, getattr(owned.layer, owned.name)) for owned in node.owned]
    return [f"{name} {list(parameter.shape)}" for name, parameter in named]


def _write(path: Path, lines: Iterator[str] | list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
