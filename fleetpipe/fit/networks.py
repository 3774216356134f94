"""Makes a pipeline of the network of a ``Model``: a list of layers, or any plain model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.api import pipeline
from fleetpipe.capture.captured_pipeline import CapturedPipeline
from fleetpipe.capture.cutting.split_spec import AUTO, SplitSpec
from fleetpipe.dygraph import PipelineLayer, PipelineParallel
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.parts import whole_name
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import has_hooks


def pipeline_of(
    network: Layer, inputs: Sequence[Nest], job: Job, split_spec: SplitSpec = AUTO, chunks: int = 1
) -> PipelineLayer:
    """Returns a network as a pipeline.

    Args:
        network: A ``PipelineLayer``, wrapped or not, the list of layers of one, or a plain model.
        inputs: An ``InputSpec`` or a Tensor for each input of a plain model; an ``nn.Sequential``
            needs none.
        job: The job.
        split_spec: Where a plain model is cut.
        chunks: Into how many parts for each rank.

    Raises:
        CaptureError: The plain model cannot be cut.
        ConfigError: The network is none of these, or the inputs are not known.
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
    if not inputs and _is_list(network):
        return PipelineLayer(list(network), num_stages=job.degrees.pp)
    if not inputs:
        raise ConfigError(
            f"a {type(network).__name__} is cut by a run of its forward, which needs inputs",
            fix="Model(network, inputs=[InputSpec([None, 1, 28, 28], 'float32')]), or the inputs "
            "of a first batch in their place",
        )
    example = inputs[0] if len(inputs) == 1 else tuple(inputs)
    return pipeline(network, example, split_spec=split_spec, num_chunks=chunks)


def _is_list(network: Layer) -> bool:
    """Whether a network is a plain ``nn.Sequential``, which equals the list of its layers."""
    if type(network) is not paddle.nn.Sequential or has_hooks(network):
        return False
    return all(name == str(index) for index, (name, _) in enumerate(network.named_children()))


def single_model_of(network: PipelineLayer) -> Layer:
    """Returns the whole model in this process, in the pipeline's form but not with its values.

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
    """Returns the name that Paddle counts for each parameter and buffer of the single model.

    They are the names in a process that builds this model first. A tensor that a vocabulary head
    has in parts goes by the name of the first part.
    """
    if isinstance(network, CapturedPipeline):
        return {**_count_names(network.plain), **network.head_names}
    with paddle.utils.unique_name.guard():
        single = network.single_model()
    return _count_names(single)


def _count_names(model: Layer) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(whole_name(name, tensor), tensor.name)
    return names
