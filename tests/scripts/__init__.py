"""Scripts as a user of stock Paddle writes them, which tests run unedited."""

from __future__ import annotations
