"""Paddle's private names for loading data, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

from paddle.io.dataloader.collate import default_collate_fn, default_convert_fn

__all__ = ["default_collate_fn", "default_convert_fn"]
