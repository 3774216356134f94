"""Fleet's files of a captured model: one for each layer with parameters or buffers of its own.

They are numbered in the plain model's order, whatever the cut is, and hold its names: what was
saved from two stages is read into three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.state.files import LayerFiles
from fleetpipe.dygraph.state.layer_in_parts import LayerInParts
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.errors import ConfigError
from fleetpipe.fleet_files.layers import LayerFile
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import parameters_in
from fleetpipe.schedules import Placement


class _ShardOnly(paddle.nn.Layer):
    """Tensors under their names in the whole model, as a layer has them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        parameters_in(self).update(tensors)


def files_of_model(
    slots: Sequence[Slot],
    users: Mapping[str, Sequence[int]],
    tensors: Mapping[str, Tensor],
    stages: Collection[int],
    placement: Placement,
    job: Job | None,
    group: Callable[[], Group],
) -> LayerFiles:
    """Returns the files of a captured model.

    Args:
        slots: The parameters and buffers of the whole model, in its order.
        users: By name, the stages that use a parameter or buffer.
        tensors: Those of this process, by name.
        stages: The stages of this process.
        placement: Which rank has which stage.
        job: The job of the model; None where it was built outside of one.
        group: Returns the ranks that hold the stages.

    Raises:
        ConfigError: The first uses of a layer's parameters are on several ranks.
    """
    layers: dict[str, list[str]] = {}
    in_parts: dict[str, dict[str, list[Tensor]]] = {}
    for slot in slots:
        path = slot.whole.name.rpartition(".")[0]
        layers.setdefault(path, []).append(slot.name)
        if slot.part is not None and slot.name in tensors:
            parts = in_parts.setdefault(path, {}).setdefault(slot.whole.name, [])
            parts.append(tensors[slot.name])
    # Who uses a weight first writes it, and reads it for all that hold copies.
    sources = {name: placement.rank_of(first) for name, (first, *_) in users.items()}
    places: dict[LayerFile, _ShardOnly | LayerInParts] = {}
    for number, (path, names) in enumerate(layers.items()):
        if path in in_parts:
            places[LayerFile(number)] = LayerInParts(in_parts[path], group)
            continue
        if len({sources[name] for name in names}) > 1:
            raise ConfigError(
                "the parameters of a layer are on several ranks: Fleet has one file for it",
                where=path,
                cause="operations in several stages take them one by one",
                fix="write pipe.full_state_dict() by paddle.save, or cut elsewhere",
            )
        if users[names[0]][0] in stages:
            places[LayerFile(number)] = _ShardOnly({name: tensors[name] for name in names})
    return LayerFiles(places, places, sources, job)
