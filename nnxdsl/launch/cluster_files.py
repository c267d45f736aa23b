"""Files for a cluster's own tools: a JobSet of Kubernetes, a task of SkyPilot. Written, never submitted.

Both hold the experiment itself and the plain command. Several machines are told by flags which of them is the first:
what `jax.distributed` finds out by itself needs rights that pods seldom have.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from nnxdsl.config.core.serialization import to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Kubernetes, Launcher, SkyPilot
from nnxdsl.errors import RunError
from nnxdsl.launch.yaml import to_yaml

PORT = 8476
"""Where the first process listens."""
MOUNTED = "/etc/nnxdsl"
CONTAINER = "nnxdsl"
JOB = "run"
LONGEST_NAME = 40
"""Of a JobSet: its pods have longer ones, and 63 characters are all that a host's name may have."""
SAVE_SECONDS = 120
"""How long a pod that is told to go may take to save."""


def generated(launcher: Launcher, experiment: Experiment) -> str:
    """The text of a launcher's file.

    Raises:
        RunError: the launcher starts runs itself.
    """
    if isinstance(launcher, Kubernetes):
        return _kubernetes(launcher, experiment)
    if isinstance(launcher, SkyPilot):
        return _skypilot(launcher, experiment)
    raise RunError(f"--write has no effect on {type(launcher).__qualname__}, which starts the run itself")


def _kubernetes(launcher: Kubernetes, experiment: Experiment) -> str:
    name = dns_name(experiment.id)
    place = {} if launcher.namespace is None else {"namespace": launcher.namespace}
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **place},
        "data": {"experiment.json": to_json(experiment)},
    }
    words = ["python", "-m", "nnxdsl", "run", f"{MOUNTED}/experiment.json", "--home", launcher.home]
    command = shlex.join(words)
    if launcher.nodes > 1:
        first = f"{name}-{JOB}-0-0.{name}:{PORT}"
        command += f' --coordinator {first} --processes {launcher.nodes} --process "$JOB_COMPLETION_INDEX"'
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": launcher.image,
        "command": ["/bin/sh", "-c", f"exec {command}"],
        "volumeMounts": [{"name": "experiment", "mountPath": MOUNTED, "readOnly": True}],
    }
    volumes: list[dict[str, Any]] = [{"name": "experiment", "configMap": {"name": name}}]
    if launcher.directory is not None:
        container["workingDir"] = launcher.directory
    if launcher.volume_claim is not None:
        container["volumeMounts"].append({"name": "runs", "mountPath": launcher.home})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": launcher.volume_claim}})
    if launcher.resources:
        asked = dict(launcher.resources)
        container["resources"] = {"requests": asked, "limits": asked}
    if launcher.variables:
        container["env"] = [{"name": name, "value": value} for name, value in launcher.variables]
    if launcher.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in launcher.secrets]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }
    if launcher.node_selector:
        pod["nodeSelector"] = dict(launcher.node_selector)
    # What was refused is refused again. A failed process of several may but have missed another one that went away.
    final = [1, 2] if launcher.nodes == 1 else [2]
    exits = {"containerName": CONTAINER, "operator": "In", "values": final}
    job = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": launcher.nodes,
        "parallelism": launcher.nodes,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": exits}]},
        "template": {"spec": pod},
    }
    queue = {} if launcher.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": launcher.queue}}
    jobs = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **place, **queue},
        "spec": {
            "failurePolicy": {
                "maxRestarts": launcher.retries,
                "rules": [
                    {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }
    return f"{_heading(experiment, 'kubectl apply -f')}{to_yaml(files)}---\n{to_yaml(jobs)}"


def _skypilot(launcher: SkyPilot, experiment: Experiment) -> str:
    asked = {
        "infra": launcher.infra,
        "accelerators": launcher.accelerators,
        "cpus": launcher.cpus,
        "memory": launcher.memory,
        "disk_size": launcher.disk_gigabytes,
        "image_id": launcher.image,
        "use_spot": launcher.pricing == "spot" or None,
        "job_recovery": {"max_restarts_on_errors": launcher.retries} if launcher.retries else None,
    }
    command = f'python -m nnxdsl run "$experiment" --home {_in_shell(launcher.home)}'
    if launcher.nodes > 1:
        first = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"'
        command += f' --coordinator {first} --processes "$SKYPILOT_NUM_NODES" --process "$SKYPILOT_NODE_RANK"'
    run = [
        'experiment="$(mktemp -d)/experiment.json"',
        "cat > \"$experiment\" <<'END OF EXPERIMENT'",
        to_json(experiment).rstrip("\n"),
        "END OF EXPERIMENT",
        command,
    ]
    task: dict[str, Any] = {
        "name": dns_name(experiment.id),
        "num_nodes": launcher.nodes,
        "workdir": launcher.directory,
        "resources": {name: value for name, value in asked.items() if value is not None},
        "file_mounts": {launcher.home: {"source": launcher.bucket, "mode": "MOUNT"}} if launcher.bucket else None,
        "envs": dict(launcher.variables) or None,
        "secrets": dict.fromkeys(launcher.secrets) or None,
        "setup": _script(launcher.setup) or None,
        "run": _script(run),
    }
    told = {name: value for name, value in task.items() if value is not None and value != {}}
    return _heading(experiment, "sky jobs launch") + to_yaml(told)


def _heading(experiment: Experiment, command: str) -> str:
    return f"# {experiment.id}, written by nnxdsl: {command} THIS-FILE\n"


def _script(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _in_shell(path: str) -> str:
    """A path as a shell reads it, its `~` that of whoever runs it."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def dns_name(run: str) -> str:
    """A run's id as a label of DNS (RFC 1123): what its name must lose for that, its digest keeps apart."""
    name, _, digest = run.rpartition("-")
    name = re.sub(r"[^a-z0-9-]+", "-", name)[: LONGEST_NAME - len(digest) - 2].strip("-")
    return f"{name}-{digest}" if name[:1].isalpha() else f"r-{name}-{digest}".replace("--", "-")
