"""PaddleFleetX's AlexNet as a user of stock Paddle has it: nothing here knows of fleetpipe."""

from __future__ import annotations

import random
import sys

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.distributed.fleet as fleet
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.nn import functional as F

BATCH_SIZE, MICRO_BATCH_SIZE = 4, 2


class Reshape(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x.reshape([x.shape[0], 256])


class AlexNetPipe(PipelineLayer):
    def __init__(self, **kwargs: object) -> None:
        layers = [
            LayerDesc(nn.Conv2D, 1, 64, kernel_size=11, stride=4, padding=5),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(nn.Conv2D, 64, 192, kernel_size=5, padding=2),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(nn.Conv2D, 192, 384, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.Conv2D, 384, 256, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.Conv2D, 256, 256, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2, padding=1),
            LayerDesc(Reshape),
            LayerDesc(nn.Linear, 256, 10),
        ]
        super().__init__(layers=layers, loss_fn=nn.CrossEntropyLoss(), **kwargs)


def set_random_seed(seed: int, dp_id: int) -> None:
    random.seed(seed)
    np.random.seed(seed + dp_id)
    paddle.seed(seed + dp_id)


strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
strategy.pipeline_configs = {
    "accumulate_steps": BATCH_SIZE // MICRO_BATCH_SIZE,
    "micro_batch_size": MICRO_BATCH_SIZE,
}
paddle.distributed.fleet.init(is_collective=True, strategy=strategy)
hcg = fleet.get_hybrid_communicate_group()
set_random_seed(1024, hcg.get_data_parallel_rank())

model = AlexNetPipe(num_stages=hcg.get_pipe_parallel_world_size(), topology=hcg._topo)
scheduler = paddle.optimizer.lr.PiecewiseDecay(boundaries=[2], values=[0.001, 0.002])
optimizer = paddle.optimizer.SGD(learning_rate=scheduler, parameters=model.parameters())
model = dist.fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)

for step in range(int(sys.argv[1])):
    images = paddle.to_tensor(np.random.rand(BATCH_SIZE, 1, 28, 28).astype("float32"))
    labels = paddle.to_tensor(np.random.randint(0, 10, (BATCH_SIZE, 1)))
    loss = model.train_batch([images, labels], optimizer, scheduler)
    print("pp_loss: ", step, float(loss), flush=True)
