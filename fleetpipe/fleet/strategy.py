"""Extends Fleet's ``DistributedStrategy`` by one group of options, ``fleetpipe_configs``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import paddle
from paddle.distributed import fleet as paddle_fleet

from fleetpipe.config import FLEETPIPE_DEFAULTS, merge_fleetpipe_configs
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.log import FLEETS_LOGGER
from fleetpipe.mesh.axes import AXES
from fleetpipe.mesh.degree_checks import require_degree

# Paddle logs this line for every strategy.
logging.getLogger(FLEETS_LOGGER).addFilter(
    lambda record: record.msg != "distributed strategy initialized"
)

_paddle_properties: Mapping[str, Any] = vars(paddle_fleet.DistributedStrategy)


class DistributedStrategy(paddle_fleet.DistributedStrategy):
    """Paddle's strategy, with fleetpipe's own options in ``fleetpipe_configs``."""

    # Paddle's __setattr__ refuses attributes that the class does not have.
    _fleetpipe_configs: Mapping[str, Any] = FLEETPIPE_DEFAULTS

    @property
    def hybrid_configs(self) -> Any:
        """Paddle's options; setting some leaves the others, and the given mapping, as they are.

        Raises:
            ConfigError: An option is unknown, or has a value that cannot be used.
        """
        return self._read_group("hybrid_configs")

    @hybrid_configs.setter
    def hybrid_configs(self, configs: Mapping[str, Any]) -> None:
        _require_mapping("hybrid_configs", configs)
        for name in [f"{axis}_degree" for axis in AXES]:
            if name in configs:
                require_degree(name, configs[name], least=-1 if name == "dp_degree" else 1)
        # A copy: Paddle's setter removes pp_configs and mp_configs from its mapping, and a second
        # strategy made from the same mapping would lack them.
        self._set_group("hybrid_configs", copy.deepcopy(dict(configs)), also=("order",))

    @property
    def pipeline_configs(self) -> Any:
        """Paddle's options; the error for an unknown one names the nearest.

        Raises:
            ConfigError: An option is unknown, or has a value of another type.
        """
        return self._read_group("pipeline_configs")

    @pipeline_configs.setter
    def pipeline_configs(self, configs: Mapping[str, Any]) -> None:
        _require_mapping("pipeline_configs", configs)
        self._set_group("pipeline_configs", configs)

    def _read_group(self, group: str) -> Any:
        """Returns the options of a group, such as "hybrid_configs", by Paddle's own property."""
        try:
            return _paddle_properties[group].fget(self)
        except AttributeError as error:
            # Paddle's own error says that there is no such attribute.
            raise ConfigError(
                "this version of Paddle cannot read its own options: protobuf is too new for it",
                got=f"Paddle {paddle.version.full_version}, protobuf {version('protobuf')}",
                cause=str(error),
                fix="pip install 'protobuf<7', or paddlepaddle 3.3 or later",
            ) from error

    def _set_group(
        self, group: str, configs: Mapping[str, Any], also: tuple[str, ...] = ()
    ) -> None:
        """Sets some options of a group by Paddle's own property.

        Args:
            group: The group, such as "hybrid_configs".
            configs: The options and their values.
            also: Options that Paddle accepts although it does not list them.

        Raises:
            ConfigError: An option is unknown, or has a value of another type.
        """
        keys = {*self._read_group(group), *also}
        for key in configs:
            if key not in keys:
                raise ConfigError(
                    f"{group} has no option {key!r}",
                    where=f"strategy.{group}",
                    fix=nearest(key, keys),
                )
        try:
            _paddle_properties[group].fset(self, configs)
        except (TypeError, ValueError, AttributeError) as error:
            # AttributeError: a mapping was given for a group within the group.
            raise ConfigError(
                f"an option of {group} has a value of another type",
                where=f"strategy.{group}",
                got=repr(dict(configs)),
                cause=str(error),
                fix="give each option a value of the type that it has in "
                f"fleet.DistributedStrategy().{group}; set one within another by its name: "
                f"strategy.{group}['sharding_configs'].comm_overlap = False",
            ) from error

    @property
    def fleetpipe_configs(self) -> dict[str, Any]:
        """Options that Fleet does not have; setting some leaves the others as they are.

        ``allow``: names that are used although no table has them, a list of texts such as
            ``"optimizer:MySAM"``; the error that refuses a name has its text (default none).
        ``loss_reduction``: ``"mean"`` (default) or ``"sum"`` over the micro-batches of a batch, or
            over its ``"tokens"``. ``timeout``: seconds that any wait for another rank may last;
            default ``FLEETPIPE_TIMEOUT`` in the environment, else 600. ``memory_cap``: the most
            forwards whose activations a rank may hold; a schedule that needs more is refused before
            it runs. ``trace``: a folder for the trace and the pictures of the actions that ran,
            written at the end of the job. ``costs``: the costs of actions, a mapping or a JSON file
            from ``model.profile``; with the bytes of each stage ``memory_cap`` is in bytes.
            ``rng``: the source of layers' random numbers, ``"keyed"`` (default) or ``"fleet"``,
            Paddle's generator as it is. ``serve``: a port at which a rank serves the page of the
            running job (default none). ``transport``:
            the way of tensors between ranks, ``"sockets"`` or Paddle's ``"process_group"`` (default
            ``FLEETPIPE_TRANSPORT``, else the latter on GPUs alone). ``fast_leaves``: whether layers
            may compute the same bits in less time (default True). ``order``: ``"ready"`` if each
            rank runs the first ready action of its schedule, with the same bits and within its
            memory, instead of waiting for the next one (default ``"fixed"``). ``overlap``: whether
            exchanges of a fused forward and backward, as in DualPipeV, travel while the other one
            computes (default True). ``rehearse``: ``"bfloat16"`` or ``"float16"``, in which a CPU
            computes what ``paddle.amp`` computes in it on a GPU (default none). ``compare_rows``:
            whether the ranks of a pipeline compare the rows of each batch before they train on it
            (default True). ``sums``: ``"tree"`` makes gradients, norms and losses sums whose bits
            no degree changes; ``"running"`` (default) adds them up one after another, rank after
            rank. ``guards``: after how many steps the invariants of training are verified again
            (default 0: never). ``groups`` and ``warmup_slack``: of Interleaved1F1B, ``groups`` of
            kFkB too, and likewise the options of a schedule that was registered before; ``slices``:
            of Seq1F1B, the slices of each sequence, a number or a list of lengths. ``fetch``: in
            static graph, what ``exe.run`` returns of a value that each micro-batch has, the
            ``"mean"`` (default), the ``"last"`` or ``"all"``;
            ``fetch_broadcast``: whether every rank gets it (default False).

        Raises:
            ConfigError: An option is unknown; the message names the nearest.
        """
        return dict(self._fleetpipe_configs)

    @fleetpipe_configs.setter
    def fleetpipe_configs(self, configs: Mapping[str, Any]) -> None:
        _require_mapping("fleetpipe_configs", configs)
        self._fleetpipe_configs = merge_fleetpipe_configs(self._fleetpipe_configs, configs)


def _require_mapping(group: str, configs: object) -> None:
    """Raises ConfigError unless the value that is set for a group is a mapping."""
    if not isinstance(configs, Mapping):
        raise ConfigError(
            f"{group} takes options by name",
            where=f"strategy.{group}",
            got=repr(configs)[:200],
            fix=f"strategy.{group} = {{..}}, with those that are to change",
        )
