"""Replaces ``paddle.distributed.fleet``: same names, same paths, pipelines that run.

Every name that fleetpipe does not define is Paddle's own object; ``overlay`` has the table of the
submodules that fleetpipe changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetpipe import numerics, systems
from fleetpipe.fleet import overlay
from fleetpipe.fleet.overlay import replace_moe_functions
from fleetpipe.fleet.static_graph import load_at_first_device_guard
from fleetpipe.paddle_api import paddle_fleet
from fleetpipe.paddle_api.distributed import choose_backend, hide_own_flags

choose_backend()
hide_own_flags()
numerics.prepare()
systems.keep_freed_memory()
overlay.install()
load_at_first_device_guard()
replace_moe_functions()

from fleetpipe.fleet import high_level, lifecycle, meta_parallel  # noqa: E402
from fleetpipe.fleet.lifecycle import (  # noqa: E402
    get_hybrid_communicate_group,
    init,
    shutdown,
)
from fleetpipe.fleet.static_graph import (  # noqa: E402
    init_worker,
    save_inference_model,
    save_persistables,
    stop_worker,
)
from fleetpipe.fleet.strategy import DistributedStrategy  # noqa: E402
from fleetpipe.fleet.wrapping import (  # noqa: E402
    distributed_model,
    distributed_optimizer,
    distributed_scaler,
)

high_level.install()
lifecycle.end_job_at_exit()

__all__ = [
    "DistributedStrategy",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "get_hybrid_communicate_group",
    "init",
    "init_worker",
    "layers",
    "meta_parallel",
    "save_inference_model",
    "save_persistables",
    "shutdown",
    "stop_worker",
]
__all__ += [name for name in paddle_fleet.__all__ if name not in __all__]

if TYPE_CHECKING:
    # Paddle's names for a type checker; at run time ``__getattr__`` gets them from Paddle's module.
    # fmt: off
    # isort: off
    from paddle.distributed import auto_parallel
    from paddle.distributed.fleet import (
        CommunicateTopology as CommunicateTopology, Fleet as Fleet,
        HybridCommunicateGroup as HybridCommunicateGroup,
        MultiSlotDataGenerator as MultiSlotDataGenerator,
        MultiSlotStringDataGenerator as MultiSlotStringDataGenerator,
        PaddleCloudRoleMaker as PaddleCloudRoleMaker, Role as Role,
        UserDefinedRoleMaker as UserDefinedRoleMaker, UtilBase as UtilBase,
        all_reduce as all_reduce, barrier_worker as barrier_worker, base as base,
        check_memory_usage as check_memory_usage,
        check_save_pre_patch_done as check_save_pre_patch_done, cloud_utils as cloud_utils,
        collective_perf as collective_perf, data_generator as data_generator, dataset as dataset,
        elastic as elastic, fleet as fleet, get_fl_client as get_fl_client,
        get_log_level_code as get_log_level_code, get_log_level_name as get_log_level_name,
        init_coordinator as init_coordinator, init_server as init_server,
        is_coordinator as is_coordinator,
        is_first_worker as is_first_worker, is_server as is_server, is_worker as is_worker,
        launch as launch, launch_utils as launch_utils,
        load_inference_model as load_inference_model, load_model as load_model,
        load_one_table as load_one_table, local_device_ids as local_device_ids,
        local_rank as local_rank, log_util as log_util, make_fl_strategy as make_fl_strategy,
        meta_optimizers as meta_optimizers, metrics as metrics, minimize as minimize,
        model as model, node_num as node_num, nranks as nranks, optimizer as optimizer,
        print_table_stat as print_table_stat, proto as proto, rank as rank,
        rank_in_node as rank_in_node, recompute as recompute, run_server as run_server,
        runtime as runtime, save_cache_model as save_cache_model,
        save_cache_table as save_cache_table, save_dense_params as save_dense_params,
        save_one_table as save_one_table, scaler as scaler,
        server_endpoints as server_endpoints, server_index as server_index,
        server_num as server_num, set_date as set_date, set_log_level as set_log_level,
        shrink as shrink, util as util, utils as utils,
        worker_endpoints as worker_endpoints, worker_index as worker_index,
        worker_num as worker_num, world_device_ids as world_device_ids, world_size as world_size,
    )
    from paddle.distributed.fleet.dataset.dataset import (
        BoxPSDataset as BoxPSDataset, DatasetBase as DatasetBase,
        FileInstantDataset as FileInstantDataset, InMemoryDataset as InMemoryDataset,
        QueueDataset as QueueDataset,
    )
    # isort: on
    # fmt: on
    auto = auto_parallel
    fleet_executor_utils: Any  # 2.6 only
    #: Made by ``overlay``.
    layers: Any
else:
    __getattr__, __dir__ = overlay.module_over(globals(), paddle_fleet)
