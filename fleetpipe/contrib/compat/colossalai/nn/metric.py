"""``Accuracy``: counts the right outputs, for ``AccuracyHook``."""

from __future__ import annotations

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import paddle


class Accuracy(paddle.nn.Layer):
    """Counts the rows whose largest output is that of the label."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the number of right rows, a Tensor [].

        Args:
            logits: [rows, classes].
            targets: Numbers of classes, [rows] or [rows, 1].
        """
        predicted = logits.argmax(axis=-1)
        expected = targets.reshape(predicted.shape).astype(predicted.dtype)
        return (predicted == expected).astype("int64").sum()
