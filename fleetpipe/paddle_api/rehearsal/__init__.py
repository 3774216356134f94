"""Imitates on a CPU how Paddle computes in bfloat16 or float16 on a GPU.

A CPU holds tensors of these dtypes and casts them, but lacks most of their kernels, and
``paddle.amp`` does nothing there. While a rehearsal is on, ``paddle.amp`` takes the CPU for a GPU,
and an operation on such tensors runs in float32 and rounds its result. The casts around it are
operations as well, so that autograd rounds the gradients too. For 3.3.x: the casts of 2.6.2 cut off
digits on a CPU, and a rehearsal is refused there.

Start with ``replacing``, which wraps Paddle's operations and finds the dtype of automatic casts;
``rounding`` does the arithmetic.
"""

from fleetpipe.paddle_api.rehearsal.replacing import (
    end_rehearsal,
    rehearse,
    require_rounding,
)

__all__ = ["end_rehearsal", "rehearse", "require_rounding"]
