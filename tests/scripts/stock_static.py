"""A static-graph pipeline as a user of stock Paddle has it: nothing here knows of fleetpipe."""

from __future__ import annotations

import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.static import device_guard

paddle.enable_static()
paddle.seed(7)
fleet.init(is_collective=True)
strategy = fleet.DistributedStrategy()
strategy.pipeline = True
strategy.pipeline_configs = {
    "accumulate_steps": 4,
    "micro_batch_size": 2,
    "schedule_mode": "F-then-B",
}

with device_guard("gpu:0"):
    image = paddle.static.data("image", [-1, 16])
    label = paddle.static.data("label", [-1, 1], "int64")
    hidden = nn.functional.relu(nn.Linear(16, 32)(image))
with device_guard("gpu:1"):
    loss = nn.functional.cross_entropy(nn.Linear(32, 4)(hidden), label)

optimizer = fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1, 0.9), strategy)
optimizer.minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
data = np.random.RandomState(0)
for step in range(int(sys.argv[1])):
    feed = {
        "image": data.rand(8, 16).astype("float32"),
        "label": data.randint(0, 4, (8, 1)).astype("int64"),
    }
    (value,) = exe.run(paddle.static.default_main_program(), feed=feed, fetch_list=[loss])
    if value is not None:
        print("pp_loss: ", step, float(value), flush=True)
