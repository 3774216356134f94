"""Makes a pipeline of a ``Model``'s network, and writes and reads the files of ``Model.save``.

The network is a list of layers, or any plain model. The files are those of ``paddle.Model`` for the
single model: ``.pdparams`` is the state dict of the whole model, ``.pdopt`` the state of its
optimizer. The latter uses *counted names*, such as ``linear_0.w_0``, which Paddle numbers in the
order of the layers' creation; elsewhere a tensor has its fully qualified name, its path in the
model.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.atomic_file import replacing
from fleetpipe.capture.api import pipeline
from fleetpipe.capture.captured_pipeline import CapturedPipeline
from fleetpipe.capture.cutting.split_spec import AUTO, SplitSpec
from fleetpipe.checkpoint.contents import parts
from fleetpipe.checkpoint.contents.model_and_optimizer import NamedTensors, OptimizerState, unwrap
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import TensorName
from fleetpipe.checkpoint.files import writer
from fleetpipe.checkpoint.files.tensors import Inventory, plan_files
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.dygraph import PipelineLayer, PipelineParallel
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.parts import LocalTensor, joined_on_first, whole_name
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import has_hooks
from fleetpipe.paddle_api.optimizer import name_prefix, scheduler_of

#: The suffixes of the two files.
PARAMETERS, STATE = ".pdparams", ".pdopt"
#: Paddle's keys in an optimizer's state dict, and its suffix of the name of a master weight.
_SCHEDULE, _MASTERS, _MASTER = "LR_Scheduler", "master_weights", "_fp32_master_0"
#: The end of the counted name of a layer's copy.
_COPY_SUFFIX = re.compile(r"(_deepcopy_\d+)+$")

_GATHERING = "gathering the model"


def pipeline_of(
    network: Layer, inputs: Sequence[Nest], job: Job, split_spec: SplitSpec = AUTO, chunks: int = 1
) -> PipelineLayer:
    """Returns the ``PipelineLayer`` of a network; cuts a plain model.

    Args:
        network: A ``PipelineLayer``, wrapped or not, a list of layers, or a plain model.
        inputs: An ``InputSpec`` or a Tensor for each input of a plain model; an ``nn.Sequential``
            needs none.
        job: The job.
        split_spec: Where a plain model is cut.
        chunks: The number of chunks on each rank for a plain model.

    Raises:
        CaptureError: The plain model cannot be cut.
        ConfigError: The network is none of these, or the inputs are unknown.
    """
    if isinstance(network, PipelineParallel):
        return network.layers
    if isinstance(network, PipelineLayer):
        return network
    if isinstance(network, (list, tuple)):
        return PipelineLayer(list(network), num_stages=job.degrees.pp)
    if not isinstance(network, paddle.nn.Layer):
        raise ConfigError(
            "a Model trains a pipeline",
            expected="a PipelineLayer, the list of its layers, or any nn.Layer",
            got=type(network).__name__,
            fix="pass the model itself, not what runs it",
        )
    plain_sequential = type(network) is paddle.nn.Sequential and not has_hooks(network)
    names = [name for name, _ in network.named_children()]
    if not inputs and plain_sequential and names == [*map(str, range(len(names)))]:
        return PipelineLayer(list(network), num_stages=job.degrees.pp)
    if not inputs:
        raise ConfigError(
            f"a {type(network).__name__} is cut by a run of its forward, which needs inputs",
            fix="Model(network, inputs=[InputSpec([None, 1, 28, 28], 'float32')]), or the inputs "
            "of a first batch in their place",
        )
    example = inputs[0] if len(inputs) == 1 else tuple(inputs)
    return pipeline(network, example, split_spec=split_spec, num_chunks=chunks)


def single_model_of(network: PipelineLayer) -> Layer:
    """Returns the whole model in this process, not with the trained weights: the caller sets them.

    Raises:
        ConfigError: The pipeline was cut from a plain model, of which this rank has only a part.
    """
    if not isinstance(network, CapturedPipeline):
        return network.single_model()
    job = current_job()
    if job is not None and not job.local:
        raise ConfigError(
            "a rank has a part of the plain model alone, and cannot build it again",
            fix="model.save(path), and in a process of its own: network.set_state_dict("
            "paddle.load(path + '.pdparams')); paddle.jit.save(network, path, input_spec=[..])",
        )
    return copy.deepcopy(network.plain)


def counted_names(network: PipelineLayer) -> dict[str, str]:
    """Returns the counted name of each parameter and buffer of the single model.

    A counted name, such as ``linear_0.w_0``, is Paddle's in a process that builds this model first.
    A vocabulary head's tensor has the name of its first shard.
    """
    if isinstance(network, CapturedPipeline):
        return {**_counted_names_of(network.plain), **network.head_names}
    with paddle.utils.unique_name.guard():
        single = network.single_model()
    return _counted_names_of(single)


def _counted_names_of(model: Layer) -> dict[str, str]:
    """Returns Paddle's name of each parameter and buffer of a model, by fully qualified name."""
    names: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(whole_name(name, tensor), tensor.name)
    return names


def _files_of(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Returns the files for parameters and optimizer of a path, given with an ending or without."""
    name = os.fspath(path).removesuffix(PARAMETERS).removesuffix(STATE)
    return Path(name + PARAMETERS), Path(name + STATE)


def save(job: Job, path: str, pipeline: PipelineParallel, optimizer: Optimizer) -> None:
    """Writes the whole model and the whole optimizer, on the first rank. Collective over the job.

    Args:
        job: The job.
        path: The path of the files without their endings.
        pipeline: The wrapped model.
        optimizer: The wrapped optimizer; None without one.

    Raises:
        CheckpointError: A file cannot be written; every rank raises.
        PipelineTimeout: A rank did not arrive within the limit.
    """
    full_tensors = gather_model(job, pipeline, optimizer)

    def write() -> None:
        if full_tensors:
            file, state_file = _files_of(path)
            # The single model may have copies of layers, whose names end with _deepcopy_0.
            counted = counted_names(pipeline.layers)
            names = {full: _COPY_SUFFIX.sub("", name) for full, name in counted.items()}
            parameters = tensors_in_group(full_tensors, parts.MODEL)
            for name, tensor in parameters.items():
                tensor.name = names[name]
            order = [slot.name for slot in pipeline.layers.state.whole_slots()]
            contents: dict[str, Nest] = {file.name: {name: parameters[name] for name in order}}
            state = _optimizer_state_to_save(full_tensors, names, optimizer)
            if state:
                contents[state_file.name] = dict(state)
            fleet_files.save_all(file.parent, contents)

    Ranks.of_job().together(f"saving {path}", write)


def save_for_inference(job: Job, path: str, pipeline: PipelineParallel, inputs: Nest) -> None:
    """Writes the whole model by ``paddle.jit.save`` on the first rank. Collective.

    Args:
        job: The job.
        path: The path of the files without their endings.
        pipeline: The wrapped model.
        inputs: An ``InputSpec`` for each input.

    Raises:
        ConfigError: There are no ``inputs``, or no rank can build the whole model.
    """
    if not inputs:
        raise ConfigError(
            "a model for inference has inputs of known shapes and dtypes",
            got="no inputs",
            fix="Model(network, inputs=[InputSpec([None, 64], 'float32')])",
        )
    if pipeline.layers.placement.has_head:
        raise ConfigError(
            "a vocabulary head in parts gives no logits, which a model for inference returns",
            fix="model.save(path), and load it into a model with a Linear or a matmul at its end",
        )
    single = single_model_of(pipeline.layers)
    full_tensors = tensors_in_group(gather_model(job, pipeline, None), parts.MODEL)

    def write() -> None:
        if full_tensors:
            names = pipeline.layers.state.names_in(single)
            single.set_state_dict({key: full_tensors[name] for key, name in names.items()})
            single.eval()
            target = Path(path)
            with replacing(target.parent) as draft:
                paddle.jit.save(single, str(draft / target.name), input_spec=inputs)

    Ranks.of_job().together(f"saving {path}", write)


def load_parameters(path: str, network: PipelineLayer, skip_mismatch: bool) -> bool:
    """Loads a model's parameters from a file of :func:`save`.

    Collective over the pipeline if parameters are skipped.

    Args:
        path: The path of the files without their endings.
        network: The model.
        skip_mismatch: Whether parameters that the file lacks, or has in another shape, keep their
            values; if it is False, the file may have other names, in the order of the model.

    Returns:
        Whether the file had all parameters, in the shapes of the model.

    Raises:
        CheckpointError: The file is missing or damaged, or does not fit.
    """
    state = fleet_files.load(_files_of(path)[0])
    left_out = []
    if skip_mismatch:
        shapes = {slot.name: list(slot.shape) for slot in network.state.whole_slots()}
        left_out = [n for n in shapes if n not in state or list(state[n].shape) != shapes[n]]
    if left_out:
        current = network.full_state_dict()
        state = {name: value for name, value in state.items() if name in shapes}
        state.update((name, current[name]) for name in left_out)
        warnings.warn(f"not in {path}, or in another shape: {', '.join(left_out)}", stacklevel=3)
    network.load_from(state)
    return not left_out


def load_optimizer_state(path: str, pipeline: PipelineParallel, optimizer: Optimizer) -> None:
    """Loads an optimizer's state from the file beside the parameters; does nothing without a file.

    Args:
        path: The path of the files without their endings.
        pipeline: The wrapped model.
        optimizer: The wrapped optimizer.

    Raises:
        CheckpointError: A file is missing or damaged, or of another optimizer or model; no value
            has changed.
    """
    file, state_file = _files_of(path)
    if not state_file.exists():
        return
    contents = fleet_files.arrays(state_file)
    part = OptimizerState(optimizer, NamedTensors(pipeline.layers.state.checkpoint_part()))
    base = unwrap(optimizer)
    names = _full_names_by_counted(file, pipeline.layers)
    values = _arrays_by_checkpoint_name(contents, names, name_prefix(base))
    described = {name: LocalTensor(value).described for name, value in values.items()}
    order = tuple(slot.name for slot in pipeline.layers.state.whole_slots())
    try:
        wanted = part.wanted(parts.Saved(described, order, part.kind))
    except CheckpointError:
        part.abandon()
        raise
    for name, local in wanted.items():
        value = values[name] if local.cut is None else local.cut.taken_from(values[name])
        writer.assign(local, paddle.to_tensor(value))
    part.settle()
    scheduler = scheduler_of(base)
    if scheduler is not None and _SCHEDULE in contents:
        scheduler.set_state_dict(contents[_SCHEDULE])


def _optimizer_state_to_save(
    full_tensors: Mapping[parts.TensorName, Tensor], names: Mapping[str, str], optimizer: Optimizer
) -> dict[str, Nest]:
    """Returns an optimizer's state dict with Paddle's names, such as ``linear_0.w_0_moment1_0``.

    Args:
        full_tensors: All tensors of the model and the optimizer, on the first rank.
        names: Paddle's name of each parameter, by fully qualified name.
        optimizer: The optimizer; None for an empty dict.
    """
    if optimizer is None:
        return {}
    base = unwrap(optimizer)
    masters = tensors_in_group(full_tensors, parts.MASTER_WEIGHTS)
    contents: dict[str, Nest] = {}
    for name, tensor in tensors_in_group(full_tensors, parts.OPTIMIZER).items():
        parameter, _, kind = name.rpartition("/")
        owner = names[parameter] + (_MASTER if parameter in masters else "")
        tensor.name = f"{owner}_{name_prefix(base)}{kind}"
        contents[tensor.name] = tensor
    if masters:
        for parameter, tensor in masters.items():
            tensor.name = names[parameter] + _MASTER
        contents[_MASTERS] = {names[parameter]: t for parameter, t in masters.items()}
    scheduler = scheduler_of(base)
    if scheduler is not None:
        contents[_SCHEDULE] = scheduler.state_dict()
    return contents


def _full_names_by_counted(path: Path, network: PipelineLayer) -> dict[str, str]:
    """Returns the fully qualified name of each parameter, by Paddle's name in a file.

    Args:
        path: The file of the parameters, which has both names. If the model has other fully
            qualified names, parameters are matched by their order.
        network: The model.
    """
    names = [slot.name for slot in network.state.whole_slots()]
    # In reverse, so that a tied weight has its first name.
    counted = {name: full for full, name in reversed(fleet_files.counted_names(path))}
    # By a fully qualified name of the file, the model's name at the same place.
    by_order = dict(zip(reversed(counted.values()), names))
    return {name: full if full in names else by_order[full] for name, full in counted.items()}


def _arrays_by_checkpoint_name(
    contents: Mapping[str, Nest], names: Mapping[str, str], prefix: str
) -> dict[parts.TensorName, np.ndarray]:
    """Returns the arrays of an optimizer's file by their names in checkpoints.

    Args:
        contents: The contents of the file.
        names: The fully qualified name of each parameter, by Paddle's name.
        prefix: The prefix of the names of the optimizer's state.

    Raises:
        CheckpointError: The file has state of a parameter that ``names`` lacks.
    """
    values: dict[parts.TensorName, np.ndarray] = {}
    for counted, array in contents.get(_MASTERS, {}).items():
        values[parts.TensorName(parts.MASTER_WEIGHTS, names[counted])] = array
    for key, array in contents.items():
        if key in (_MASTERS, _SCHEDULE):
            continue
        counted = max((n for n in names if key.startswith(f"{n}_")), key=len, default=None)
        if counted is None:
            raise CheckpointError(
                f"the optimizer's file has {key!r}, of a parameter that the model's has not",
                expected=", ".join(list(names)[:4]) + ", ..",
                fix=f"save both again, or load with reset_optimizer=True: {STATE} is left out",
            )
        # Of linear_0.w_0_fp32_master_0_moment1_0 this leaves moment1_0.
        kind = key[len(counted) + 1 :].removeprefix(f"{_MASTER[1:]}_").removeprefix(prefix)
        # The number at the end is not 0 for the second optimizer of a process: moment1_1.
        state = f"{names[counted]}/{kind.rpartition('_')[0]}_0"
        values[parts.TensorName(parts.OPTIMIZER, state)] = array
    return values


def gather_model(job: Job, model: Layer, optimizer: Optimizer) -> dict[TensorName, Tensor]:
    """Returns copies of all full tensors on the first rank of the job; an empty dict on others.

    Collective over the job.

    Args:
        job: The job.
        model: The wrapped model.
        optimizer: The optimizer; None leaves its tensors out.

    Raises:
        CheckpointError: The ranks do not have the same model.
        PipelineTimeout: A rank did not arrive within the limit.
    """
    objects = Objects(model, optimizer)
    part = NamedTensors(model.layers.state.checkpoint_part())
    states = objects.optimizer_part(part)
    local = {**part.local_tensors(), **({} if states is None else states.local_tensors())}
    ranks = Ranks.of_job()
    texts = ranks.together(_GATHERING, lambda: Inventory.describe(local).to_json())
    # As in a checkpoint, of equal parts on several ranks the plan chooses one rank's. Names travel
    # as plain tuples.
    plan = plan_files([Inventory.from_json(text) for text in texts])
    parts = (
        ((*name,), local[name]._replace(cut=cut)) for name, _, cut in plan.parts_of(ranks.rank)
    )
    with job.guarded(lambda: _GATHERING):
        full_tensors = joined_on_first(job.everyone(), parts)
    return {TensorName(*name): tensor for name, tensor in full_tensors.items()}


def tensors_in_group(full_tensors: Mapping[TensorName, Tensor], group: str) -> dict[str, Tensor]:
    """Returns the tensors of a group of a checkpoint, such as ``"model"``, by name."""
    return {name.name: tensor for name, tensor in full_tensors.items() if name.group == group}
