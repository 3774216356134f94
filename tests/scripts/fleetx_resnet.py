"""PaddleFleetX's static ResNet, by its calls and names, as for Paddle 2.0 to 2.4; much smaller."""

from __future__ import annotations

import math
import os
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import paddle.fluid as fluid
from paddle.distributed import fleet
from paddle.fluid.param_attr import ParamAttr

batch_size = 2
class_dim = 10


class ResNet:
    def net(self, input: Any, class_dim: int, data_format: str = "NCHW") -> tuple[Any, int]:
        offset = 0
        with fluid.device_guard(f"gpu:{offset}"):
            conv = self.conv_bn_layer(input, 8, 7, stride=2, act="relu", name="conv1")
            conv = fluid.layers.pool2d(
                input=conv,
                pool_size=3,
                pool_stride=2,
                pool_padding=1,
                pool_type="max",
                data_format=data_format,
            )
        for block, num_filters in enumerate([8, 8, 16, 16]):
            with fluid.device_guard(f"gpu:{offset}"):
                conv = self.basic_block(
                    input=conv,
                    num_filters=num_filters,
                    stride=1 if block == 0 else 2,
                    is_first=block == 0,
                    name="res" + str(block + 2) + "a",
                )
            offset += 1
        offset -= 1
        with fluid.device_guard(f"gpu:{offset}"):
            pool = fluid.layers.pool2d(
                input=conv, pool_type="avg", global_pooling=True, data_format=data_format
            )
            stdv = 1.0 / math.sqrt(pool.shape[1] * 1.0)
            out = fluid.layers.fc(
                input=pool,
                size=class_dim,
                param_attr=fluid.param_attr.ParamAttr(
                    name="fc_0.w_0", initializer=fluid.initializer.Uniform(-stdv, stdv)
                ),
                bias_attr=ParamAttr(name="fc_0.b_0"),
            )
        return out, offset

    def conv_bn_layer(
        self,
        input: Any,
        num_filters: int,
        filter_size: int,
        stride: int = 1,
        act: str | None = None,
        name: str = "",
        data_format: str = "NCHW",
    ) -> Any:
        conv = fluid.layers.conv2d(
            input=input,
            num_filters=num_filters,
            filter_size=filter_size,
            stride=stride,
            padding=(filter_size - 1) // 2,
            groups=1,
            act=None,
            param_attr=ParamAttr(name=name + "_weights"),
            bias_attr=False,
            name=name + ".conv2d.output.1",
            data_format=data_format,
        )
        bn_name = "bn_" + name if name == "conv1" else "bn" + name[3:]
        return fluid.layers.batch_norm(
            input=conv,
            act=act,
            name=bn_name + ".output.1",
            param_attr=ParamAttr(name=bn_name + "_scale"),
            bias_attr=ParamAttr(bn_name + "_offset"),
            moving_mean_name=bn_name + "_mean",
            moving_variance_name=bn_name + "_variance",
            data_layout=data_format,
        )

    def basic_block(
        self, input: Any, num_filters: int, stride: int, is_first: bool, name: str
    ) -> Any:
        conv0 = self.conv_bn_layer(
            input, num_filters, 3, stride, act="relu", name=name + "_branch2a"
        )
        conv1 = self.conv_bn_layer(conv0, num_filters, 3, name=name + "_branch2b")
        short = input
        if input.shape[1] != num_filters or stride != 1 or is_first:
            short = self.conv_bn_layer(input, num_filters, 1, stride, name=name + "_branch1")
        return fluid.layers.elementwise_add(x=short, y=conv1, act="relu")


def flowers() -> Iterator[tuple[np.ndarray, int]]:
    random = np.random.RandomState(0)
    for label in random.randint(0, class_dim, 17):
        image = random.rand(3, 32, 32) - 0.5
        image[:, 3 * label : 3 * label + 3] += 1
        yield image, int(label)


def get_train_loader(feed_list: list[Any], place: Any) -> Any:
    def reader_decorator(reader: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        def __reader__() -> Iterator[Any]:
            for item in reader():
                img = np.array(item[0]).astype("float32").reshape(3, 32, 32)
                label = np.array(item[1]).astype("int64").reshape(1)
                yield img, label

        return __reader__

    train_reader = paddle.batch(reader_decorator(flowers), batch_size=batch_size, drop_last=True)
    train_loader = paddle.io.DataLoader.from_generator(
        capacity=32, use_double_buffer=True, feed_list=feed_list, iterable=False
    )
    train_loader.set_sample_list_generator(train_reader, place)
    return train_loader


paddle.enable_static()
paddle.seed(5)
place = paddle.CUDAPlace(int(os.environ.get("FLAGS_selected_gpus", 0)))  # noqa: SIM112, PLW1508
with paddle.fluid.device_guard("gpu:0"):
    image = paddle.static.data(name="x", shape=[None, 3, 32, 32], dtype="float32")
    label = paddle.static.data(name="y", shape=[None, 1], dtype="int64")
    train_loader = get_train_loader([image, label], place)
    out, offset = ResNet().net(input=image, class_dim=class_dim)
with paddle.fluid.device_guard(f"gpu:{offset}"):
    avg_cost = paddle.nn.functional.cross_entropy(input=out, label=label)
    acc_top1 = paddle.metric.accuracy(input=out, label=label, k=1)
    acc_top5 = paddle.metric.accuracy(input=out, label=label, k=5)

strategy = fleet.DistributedStrategy()
strategy.pipeline = True
strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": batch_size}
fleet.init(is_collective=True, strategy=strategy)
optimizer = paddle.optimizer.Momentum(
    learning_rate=0.1, momentum=0.9, weight_decay=paddle.regularizer.L2Decay(1e-4)
)
optimizer = fleet.distributed_optimizer(optimizer)
optimizer.minimize(avg_cost)

exe = paddle.static.Executor(place)
exe.run(paddle.static.default_startup_program())
for epoch in range(2):
    train_loader.start()
    batch_id = 0
    while True:
        try:
            # The script has 3 here: the rank that has the loss, of four.
            if fleet.worker_index() == fleet.worker_num() - 1:
                loss, acc1, acc5 = exe.run(
                    paddle.static.default_main_program(), fetch_list=[avg_cost, acc_top1, acc_top5]
                )
                print(
                    f"[Epoch {epoch}, batch {batch_id}] "
                    f"loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}",
                    flush=True,
                )
            else:
                exe.run(paddle.static.default_main_program())
            batch_id += 1
        except paddle.fluid.core.EOFException:
            train_loader.reset()
            break
