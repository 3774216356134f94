"""A residual network for small images, written for one device: nothing in it knows of a pipeline.

Its children have the names of torchvision's and are made in the order in which they run.
"""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.vision.models.resnet import BasicBlock, BottleneckBlock

#: Blocks of layer1 to layer4, and what they are made of.
DEPTHS = {
    18: ((2, 2, 2, 2), BasicBlock),
    34: ((3, 4, 6, 3), BasicBlock),
    50: ((3, 4, 6, 3), BottleneckBlock),
    101: ((3, 4, 23, 3), BottleneckBlock),
    152: ((3, 8, 36, 3), BottleneckBlock),
}


class ResNet(nn.Layer):
    """He et al., Deep Residual Learning for Image Recognition, 2015; images are [N, 3, 32, 32]."""

    def __init__(self, layers: int = 50, width: int = 64, num_classes: int = 10) -> None:
        """Builds a network.

        Args:
            layers: The depth, a key of DEPTHS.
            width: Channels of the stem; 64 is the paper's.
            num_classes: Outputs.
        """
        super().__init__()
        counts, self._block = DEPTHS[layers]
        self._channels = width
        self.conv1 = nn.Conv2D(3, width, 7, stride=2, padding=3, bias_attr=False)
        self.bn1 = nn.BatchNorm2D(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2D(3, stride=2, padding=1)
        self.layer1 = self._made(width, counts[0], stride=1)
        self.layer2 = self._made(width * 2, counts[1], stride=2)
        self.layer3 = self._made(width * 4, counts[2], stride=2)
        self.layer4 = self._made(width * 8, counts[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2D(1)
        self.fc = nn.Linear(self._channels, num_classes)

    def _made(self, channels: int, count: int, stride: int) -> nn.Sequential:
        out = channels * self._block.expansion
        shortcut = None
        if stride != 1 or self._channels != out:
            conv = nn.Conv2D(self._channels, out, 1, stride=stride, bias_attr=False)
            shortcut = nn.Sequential(conv, nn.BatchNorm2D(out))
        blocks = [self._block(self._channels, channels, stride, shortcut)]
        blocks += [self._block(out, channels) for _ in range(count - 1)]
        self._channels = out
        return nn.Sequential(*blocks)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(paddle.flatten(self.avgpool(x), 1))
