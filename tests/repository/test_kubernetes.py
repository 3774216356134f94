"""The manifests for Kubernetes' operators: what their ranks are given, and that they are shown.

What a pod of PaddleJob is given is what kubeflow/training-operator's
pkg/controller.v1/paddlepaddle/envvar.go writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.launching import ROOT

pytestmark = pytest.mark.once

FOLDER = ROOT / "examples" / "kubernetes"
PADDLE, RAY = "paddlejob.yaml", "rayjob.yaml"


def manifest(name: str = PADDLE) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def worker() -> Any:
    """The one kind of replicas, as the webhook wants it: its containers have images."""
    replicas = manifest()["spec"]["paddleReplicaSpecs"]
    assert list(replicas) == ["Worker"]
    return replicas["Worker"]


def test_the_operator_takes_it() -> None:
    pod = worker()["template"]["spec"]
    assert all(container["image"] for container in pod["containers"])
    (container,) = [one for one in pod["containers"] if one["name"] == "paddle"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def told(number: int, address: str) -> dict[str, str]:
    """What the operator and the manifest tell the container of a pod."""
    (container,) = worker()["template"]["spec"]["containers"]
    (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == "master"]
    name = manifest()["metadata"]["name"]
    # The first pod is told its own address, the others the name of its service.
    master = f"{name}-worker-0" if number else address
    own = {one["name"]: one.get("value", address) for one in container["env"]}
    return {
        **own,
        "PADDLE_JOB_ID": name,
        "PADDLE_NNODES": str(worker()["replicas"]),
        "PADDLE_MASTER": f"{master}:{port}",
    }


def test_the_launcher_understands_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle.distributed.launch.context import Context

    (container,) = worker()["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "paddle.distributed.launch"]
    monkeypatch.setattr(sys, "argv", ["launch", *container["args"]])
    for number, master in ((0, "10.1.0.7:36543"), (1, "pipeline-worker-0:36543")):
        for name, value in told(number, "10.1.0.7").items():
            monkeypatch.setenv(name, value)
        found: Mapping[str, Any] = vars(Context(enable_plugin=False).args)
        assert found["master"] == master
        assert found["host"] == "10.1.0.7"
        assert (found["nnodes"], found["nproc_per_node"]) == ("2", 4)
        assert (found["job_id"], found["training_script"]) == ("pipeline", "/app/train.py")


def test_ray_has_a_place_for_every_rank_and_its_pods_are_alike() -> None:
    spec = manifest(RAY)["spec"]
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    words = spec["entrypoint"].split()
    options = dict(zip(words[2::2], words[3::2]))
    assert words[:2] == ["fleetpipe", "launch"]
    assert options["--ray"] == "auto"
    assert options["--nnodes"] == f"1:{workers['replicas']}"
    assert options["--nproc"] == workers["rayStartParams"]["num-cpus"]
    # No rank is on the head, whose loss is another one's than a rank's.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head, worker = (group["template"]["spec"] for group in (cluster["headGroupSpec"], workers))
    for pod in (head, worker):
        (container,) = pod["containers"]
        names = {mount["name"] for mount in container["volumeMounts"]}
        assert names == {volume["name"] for volume in pod["volumes"]}
    for shared in ("image", "env", "volumeMounts"):
        assert head["containers"][0][shared] == worker["containers"][0][shared]


@pytest.mark.parametrize("name", [PADDLE, RAY])
def test_the_page_shows_the_manifests(name: str) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f'```yaml\n--8<-- "{(FOLDER / name).relative_to(ROOT).as_posix()}"\n```' in page
