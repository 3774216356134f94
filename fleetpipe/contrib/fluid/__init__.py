"""The names of ``paddle.fluid`` that PaddleFleetX's scripts use."""
