"""Fleet's files of a captured model: one for each layer with parameters or buffers.

They are numbered in the plain model's order, whatever the cut is, and hold its names: a save of two
stages can be loaded into three.
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
    """A layer with some tensors under their names in the whole model."""

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
        tensors: The tensors of this process, by name.
        stages: The stages of this process.
        placement: The rank of each stage.
        job: The job of the model; None if it was built outside of one.
        group: Returns the group of the ranks that hold the stages.

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
