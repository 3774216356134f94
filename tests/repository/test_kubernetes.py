"""The manifests for Kubernetes' operators, by the operators' rules, and what ranks are told.

``RULES`` says in our own words what the schemas of PaddleJob and RayJob allow for the fields that
the manifests have; a field that has no rule there is refused. PaddleJob's schema is
manifests/base/crds/kubeflow.org_paddlejobs.yaml of kubeflow/training-operator, branch release-1.9;
the other rules are those of its admission webhook, pkg/webhooks/paddlepaddle, and what pods are
told is from pkg/controller.v1/paddlepaddle/envvar.go. RayJob's are the types in KubeRay's
ray-operator/apis/ray/v1.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.launching import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
PADDLE, RAY = "paddlejob.yaml", "rayjob.yaml"

#: A name with ! is required; * stands for any name; a list has one rule for all of its items.
QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[numkMGTPE])?")
CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath!": str}}}],
    "ports": [{"name": str, "containerPort!": int, "protocol": str}],
    "resources": {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": str,
    "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
    "secret": {"secretName": str, "defaultMode": int},
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
}
TEMPLATE = {"metadata": dict, "spec": {"containers!": [CONTAINER], "volumes": [VOLUME]}}
REPLICA = {
    "replicas": int,
    "restartPolicy": re.compile("Always|OnFailure|Never|ExitCode"),
    "template": TEMPLATE,
}
RUN_POLICY = {
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "cleanPodPolicy": re.compile("All|Running|None"),
    "ttlSecondsAfterFinished": int,
}
METADATA = {"name!": re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")}
WORKERS = {
    "groupName!": str,
    "replicas": int,
    "minReplicas!": int,
    "maxReplicas!": int,
    "rayStartParams": {"*": str},
    "template!": TEMPLATE,
}
CLUSTER = {
    "rayVersion": re.compile(r"\d+\.\d+\.\d+"),
    "authOptions": {"mode": re.compile("token|disabled")},
    "headGroupSpec!": {"rayStartParams": {"*": str}, "template!": TEMPLATE},
    "workerGroupSpecs": [WORKERS],
}
RULES = {
    PADDLE: {
        "apiVersion!": re.compile("kubeflow.org/v1"),
        "kind!": re.compile("PaddleJob"),
        "metadata!": METADATA,
        "spec!": {"runPolicy": RUN_POLICY, "paddleReplicaSpecs!": {"*": REPLICA}},
    },
    RAY: {
        "apiVersion!": re.compile("ray.io/v1"),
        "kind!": re.compile("RayJob"),
        "metadata!": METADATA,
        "spec!": {
            "entrypoint": str,
            "shutdownAfterJobFinishes": bool,
            "backoffLimit": int,
            "rayClusterSpec": CLUSTER,
        },
    },
}


def faults(value: Any, rule: Any, place: str = "") -> list[str]:
    """Returns what does not keep to a rule, and where."""
    if isinstance(rule, re.Pattern):
        return [] if isinstance(value, str) and rule.fullmatch(value) else [f"{place}: {value!r}"]
    if isinstance(rule, type):
        return [] if type(value) is rule else [f"{place}: {value!r}"]
    if not isinstance(value, type(rule)):
        return [f"{place}: {value!r}"]
    if isinstance(rule, list):
        items = enumerate(value)
        return [fault for i, item in items for fault in faults(item, rule[0], f"{place}[{i}]")]
    rules = {name.rstrip("!"): inner for name, inner in rule.items()}
    required = [name[:-1] for name in rule if name.endswith("!")]
    found = [f"{place}.{name} is missing" for name in required if name not in value]
    for name, inner in value.items():
        known = rules.get(name, rules.get("*"))
        where = f"{place}.{name}"
        found += [f"{where} is unknown"] if known is None else faults(inner, known, where)
    return found


def manifest(name: str = PADDLE) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [PADDLE, RAY])
def test_a_manifest_keeps_to_the_schema(name: str) -> None:
    assert faults(manifest(name), RULES[name]) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "workers"), 2, ".spec.workers is unknown"),
        (("spec", "paddleReplicaSpecs"), None, ".spec.paddleReplicaSpecs is missing"),
        (("metadata", "name"), "My_Job", ".metadata.name: 'My_Job'"),
        (("spec", "runPolicy", "backoffLimit"), "3", ".spec.runPolicy.backoffLimit: '3'"),
        (("spec", "paddleReplicaSpecs", "Worker", "replicas"), 2.0, ".Worker.replicas: 2.0"),
    ],
)
def test_what_does_not_keep_to_it_is_seen(path: tuple[str, ...], value: Any, fault: str) -> None:
    changed = copy.deepcopy(manifest())
    *way, last = path
    inner = changed
    for name in way:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    (found,) = faults(changed, RULES[PADDLE])
    assert found.endswith(fault)


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
