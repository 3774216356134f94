"""The command ``fleetpipe doctor``: checks this host, Paddle, some ranks, and a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetpipe import arguments as kinds
from fleetpipe import systems
from fleetpipe.contrib import doctor
from fleetpipe.contrib.doctor import NOTE, OK, WRONG, Finding, run_checks, wrong_findings
from fleetpipe.errors import FleetPipeError, UsageError
from fleetpipe.extras import needed_for
from fleetpipe.launch.script import LAUNCHED, command_folder
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS
from fleetpipe.version import __version__

#: The versions of Paddle that the tests run on.
_SUPPORTED = ("3.3.", "2.6.2")

_OTHER_WHEEL = (
    "install a paddlepaddle-gpu for this card: PyPI's are for 6.1 to 8.9, and Paddle's own index "
    "has newer ones; docs/gpu.md says where"
)
_LIBRARIES = (
    "install CUDA and cuDNN of the versions that the wheel is built for, in a folder of "
    "LD_LIBRARY_PATH: PyPI's wheel brings none of their libraries; docs/gpu.md has them"
)
#: The architectures of cards that a wheel is compiled for, by its versions of Paddle and of CUDA;
#: only of wheels that do not tell them. 86 is compute capability 8.6.
_UNTOLD_ARCHS = {("2.6.2", "11.8"): (61, 70, 75, 80, 86)}

_WORKER = Path(__file__).with_name("worker.py")
#: Seconds in which the ranks must finish.
LIMIT_SECONDS = 90.0
#: Seconds in which the ranks must end after a signal.
_END_SECONDS = 5.0
#: The last lines of each rank's output that are shown.
_LOG_LINES = 5
#: What the user should do if a transport, or the comparison of bits, fails.
_FIXES = {
    SOCKETS: "see what is said above of ports and descriptors, and the ranks' error",
    PROCESS_GROUP: "train with FLEETPIPE_TRANSPORT=sockets, which is the default on CPUs; where "
    "each rank has a GPU, try Paddle's own paddle.distributed.send between two ranks",
    "parity": "send this output with a bug report: bits of a pipeline must not differ",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe doctor`` to its parser."""
    parser.add_argument(
        "--nproc",
        type=kinds.processes,
        default=2,
        metavar="N",
        help="ranks to start on this host (default: %(default)s)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="look at every node of the Ray cluster at HOST:PORT too; auto, the default: the one "
        "that ray start began here",
    )
    parser.add_argument(
        *kinds.spellings("checkpoint_dir"),
        type=Path,
        default=Path(os.environ.get("FLEETPIPE_CHECKPOINT_DIR", "checkpoints")),
        metavar="FOLDER",
        help="where checkpoints are kept (default: $FLEETPIPE_CHECKPOINT_DIR, else checkpoints)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Checks this host, Paddle, some ranks, and a cluster's nodes, and prints the findings.

    Returns:
        0 if nothing is wrong, else 1.
    """
    of_paddle = check_paddle()
    findings = doctor.check_host(options.nproc, options.checkpoint_dir) + of_paddle
    if options.nproc > 1 and not wrong_findings(of_paddle):
        findings += check_ranks(options.nproc)
    if options.ray is not None:
        findings += check_ray_cluster(options.ray, options.nproc, options.checkpoint_dir)
    wrong = len(wrong_findings(findings))
    if options.json:
        listed = [finding._asdict() for finding in findings]
        result = {"fleetpipe": __version__, "findings": listed, "wrong": wrong}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _format_findings(findings))
    return int(wrong > 0)


def _format_findings(findings: list[Finding]) -> Iterator[str]:
    """Yields the lines that the command prints: one or two for each finding, and a summary."""
    width = max(len(finding.subject) for finding in findings)
    for subject, state, text, fix, _ in findings:
        yield f"{state.upper() if state == WRONG else state:<6}{subject:<{width}}  {text}"
        if fix and state != OK:
            yield f"{'':<{width + 8}}what to do: {fix}"
    count = len(wrong_findings(findings))
    yield f"fleetpipe {__version__}: " + (f"{count} wrong" if count else "nothing is wrong")


def check_paddle() -> list[Finding]:
    """Returns the findings on Paddle and on its device; a single one if Paddle is missing."""
    try:
        from fleetpipe.paddle_api import paddle
    except Exception as error:
        text = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return [Finding("paddle", WRONG, text, "pip install 'fleetpipe[cpu]', or 'fleetpipe[gpu]'")]
    checks = {"paddle": lambda: _check_version(paddle), "device": lambda: _check_device(paddle)}
    return run_checks(checks)


def _check_version(paddle: Any) -> Finding:
    """Checks that this version of Paddle is one that fleetpipe is tested with."""
    version = paddle.version.full_version
    text = f"{version}, built for {'CUDA' if paddle.is_compiled_with_cuda() else 'CPUs'}"
    if version.startswith(_SUPPORTED):
        return Finding("paddle", OK, text)
    fix = "pip install 'paddlepaddle>=3.3,<3.4', or paddlepaddle-gpu==2.6.2"
    return Finding("paddle", NOTE, f"{text}; no test runs on this version", fix)


def _check_device(paddle: Any) -> Finding:
    """Checks the device on which Paddle computes in this process."""
    from fleetpipe.paddle_api.device import device_kind

    # Paddle's name of the device on which this process computes.
    device = paddle.device.get_device()
    if device_kind() == "gpu":
        return _check_card(paddle, device)
    if shutil.which("nvidia-smi") is None:
        return Finding("device", OK, device)
    fix = "install the paddlepaddle-gpu that fits the driver; see CUDA_VISIBLE_DEVICES"
    return Finding("device", NOTE, f"{device}, though nvidia-smi is here", fix)


def _check_card(paddle: Any, device: str) -> Finding:
    """Checks that the wheel is compiled for this process's GPU, and computes something on it.

    Args:
        paddle: The module of Paddle.
        device: Paddle's name of the GPU.
    """
    major, minor = paddle.device.cuda.get_device_capability()
    version = paddle.version
    untold = _UNTOLD_ARCHS.get((version.full_version, version.cuda()), ())
    archs: Callable[[], Any] = getattr(version, "cuda_archs", lambda: untold)
    count = paddle.device.cuda.device_count()
    name = paddle.device.cuda.get_device_name()
    text = f"{count} x {name}, compute capability {major}.{minor}; this process has {device}"
    built = sorted(int(arch) for arch in archs() or [])
    wheel = ", ".join(f"{arch / 10:.1f}" for arch in built) or "what it does not say"
    text += f"; the wheel is compiled for {wheel}"
    if built and not any(arch // 10 == major and arch % 10 <= minor for arch in built):
        return Finding("device", WRONG, text, _OTHER_WHEEL)
    ones = paddle.ones([1, 1, 2, 2])
    try:
        paddle.nn.functional.conv2d(paddle.matmul(ones, ones), ones).numpy()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        return Finding("device", WRONG, f"{text}, and cannot compute: {reason}", _LIBRARIES)
    return Finding("device", OK, text)


def check_ranks(ranks: int) -> list[Finding]:
    """Starts ``ranks`` workers, and returns the findings on each transport and on parity."""
    try:
        systems.require_ranks()
    except UsageError as error:
        return [Finding("ranks", NOTE, str(error))]
    from fleetpipe.paddle_api.device import gpu_count

    ranks_share_cards = 0 < gpu_count() < ranks
    with command_folder(large=True) as folder:
        environment = {"FLEETPIPE_TRANSPORT": SOCKETS} if ranks_share_cards else {}
        results, ending = _run_workers(ranks, folder, environment)
    of_transports = [_transport_finding(name, results, ending) for name in (SOCKETS, PROCESS_GROUP)]
    return [*of_transports, _parity_finding(ranks, results, ending)]


def _run_workers(ranks: int, folder: Path, more: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Runs ``worker.py`` on every rank, and kills the ranks if they do not end in time.

    Args:
        ranks: The number of ranks.
        folder: An empty folder for the results and the ranks' output.
        more: Variables that are added to the environment.

    Returns:
        The results that the ranks have written, by the name of a transport or "parity"; and how the
        ranks ended: the last lines of their output, or else the exit code.
    """
    file, logs = folder / "results.json", folder / "log"
    command = [sys.executable, str(LAUNCHED), "run", "--nproc", str(ranks)]
    command += ["--log-dir", str(logs), "--log-level", "ERROR", str(_WORKER), str(file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **more},
        start_new_session=True,
    )
    ended = ""
    try:
        process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        ended = f"the ranks did not end within {LIMIT_SECONDS:g} s"
        # The launcher asks the ranks to end at the first signal, and kills them at the second.
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
                break
        else:
            systems.end_session(process.pid)
            process.wait()
    last = [
        line
        for log in sorted(logs.glob("workerlog.*"))
        for line in log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    ]
    ending = "; ".join(filter(None, [ended, *last])) or f"exit code {process.returncode}"
    return (json.loads(file.read_text()) if file.exists() else {}), ending


def _transport_finding(name: str, results: Mapping[str, Any], ending: str) -> Finding:
    """Returns the finding on a transport; the arguments are what :func:`_run_workers` returns."""
    result = results.get(name, {"error": ending})
    if "error" in result:
        # A transport that this machine cannot have is no fault of the machine.
        state = NOTE if result.get("refused") else WRONG
        return Finding(name, state, result["error"].splitlines()[0], _FIXES[name])
    seconds = {int(nbytes): taken for nbytes, taken in result.items()}
    least, most = min(seconds), max(seconds)
    rate = most / seconds[most]
    text = f"{least} bytes in {1e6 * seconds[least]:.0f} us, {rate / 1e9:.2f} GB/s one way"
    figures = {"latency_seconds": seconds[least], "bytes_per_second": rate}
    return Finding(name, OK, text, figures=figures)


def _parity_finding(ranks: int, results: Mapping[str, Any], ending: str) -> Finding:
    """Returns the finding on the comparison of a pipeline's bits with those of one device."""
    result = results.get("parity", {"error": ending})
    if "error" in result:
        return Finding("parity", WRONG, result["error"].splitlines()[0], _FIXES["parity"])
    last = result["verdict"].splitlines()[-1].removeprefix("parity: ")
    text = f"a small model on {ranks} ranks beside one device: {last}"
    return Finding("parity", OK if result["passed"] else WRONG, text, _FIXES["parity"])


def check_ray_cluster(address: str, ranks: int, folder: Path) -> list[Finding]:
    """Returns the findings on every node of a Ray cluster: packages, resources, folder, clock.

    Args:
        address: The address of the cluster, as for ``fleetpipe launch --ray``.
        ranks: The number of ranks for each node.
        folder: The folder of the checkpoints on each node.
    """
    with needed_for("a Ray cluster is looked at"):
        import ray

        from fleetpipe.contrib.ray import ray_cluster

    def check_node(ranks: int, folder: str) -> tuple[float, list[Finding]]:
        return time.time(), doctor.check_host(ranks, Path(folder))

    findings: list[Finding] = []
    try:
        with ray_cluster.connect(None if address == "local" else address, {"CPU": ranks}):
            ray_cluster.require_packages()
            remote: Any = ray.remote(num_cpus=0)(check_node)
            # One node after another: its clock is compared with this one's around the call.
            for node in ray_cluster.live_nodes():
                begin = time.time()
                reference = remote.options(label_selector=node.label).remote(ranks, str(folder))
                (answer,) = ray_cluster.gather_results({node: reference}).values()
                clock, of_node = answer
                for finding in of_node:
                    subject = f"{node.address} {finding.subject}"
                    findings.append(finding._replace(subject=subject))
                behind, ahead = begin - clock, clock - time.time()
                findings.append(doctor.check_clock(node.address, behind, ahead))
    except FleetPipeError as error:
        return [Finding("ray", WRONG, str(error).splitlines()[0], str(error).splitlines()[-1])]
    return findings
