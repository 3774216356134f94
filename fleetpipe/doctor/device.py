"""What Paddle is installed, and whether it computes on this host's device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from fleetpipe.doctor.finding import NOTE, OK, WRONG, Finding, looked_at

#: Versions of Paddle that the tests run on.
_SUPPORTED = ("3.3.", "2.6.2")


def findings() -> list[Finding]:
    """Looks at Paddle and at its device; the first finding is wrong where there is no Paddle."""
    try:
        from fleetpipe.paddle_api import paddle
    except Exception as error:
        text = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return [Finding("paddle", WRONG, text, "pip install 'fleetpipe[cpu]', or 'fleetpipe[gpu]'")]
    checks = {"paddle": lambda: _version(paddle), "device": lambda: _device(paddle)}
    return looked_at(checks)


def _version(paddle: Any) -> Finding:
    version = paddle.version.full_version
    text = f"{version}, built for {'CUDA' if paddle.is_compiled_with_cuda() else 'CPUs'}"
    if version.startswith(_SUPPORTED):
        return Finding("paddle", OK, text)
    fix = "pip install 'paddlepaddle>=3.3,<3.4', or paddlepaddle-gpu==2.6.2"
    return Finding("paddle", NOTE, f"{text}; no test runs on this version", fix)


def _device(paddle: Any) -> Finding:
    from fleetpipe.paddle_api.device import device_kind

    device = paddle.device.get_device()
    if device_kind() == "gpu":
        return _card(paddle, device)
    if shutil.which("nvidia-smi") is None:
        return Finding("device", OK, device)
    fix = "install the paddlepaddle-gpu that fits the driver; see CUDA_VISIBLE_DEVICES"
    return Finding("device", NOTE, f"{device}, though nvidia-smi is here", fix)


def _card(paddle: Any, device: str) -> Finding:
    """Compares the card's compute capability with those that the wheel was compiled for."""
    major, minor = paddle.device.cuda.get_device_capability()
    archs: Callable[[], Any] = getattr(paddle.version, "cuda_archs", list)
    count = paddle.device.cuda.device_count()
    name = paddle.device.cuda.get_device_name()
    text = f"{count} x {name}, compute capability {major}.{minor}; this process has {device}"
    built = sorted(int(arch) for arch in archs() or [])
    if built and not any(arch // 10 == major and arch % 10 <= minor for arch in built):
        text += f"; the wheel is compiled for {built}"
        return Finding("device", WRONG, text, "install a paddlepaddle-gpu for this card")
    return Finding("device", OK, text)
