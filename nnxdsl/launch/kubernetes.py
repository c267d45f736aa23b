"""A JobSet of Kubernetes with the experiment as a ConfigMap. Written, never submitted."""

from __future__ import annotations

import shlex
from typing import Any

from nnxdsl.config.core.serialization import to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Kubernetes
from nnxdsl.launch.cluster_files import PORT, dns_name, heading
from nnxdsl.launch.yaml import to_yaml

MOUNTED = "/etc/nnxdsl"
CONTAINER = "nnxdsl"
JOB = "run"
SAVE_SECONDS = 120
"""How long a pod may take to save after SIGTERM."""


def job_set(launcher: Kubernetes, experiment: Experiment) -> str:
    """The text of the file for `kubectl apply`."""
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
        resources = dict(launcher.resources)
        container["resources"] = {"requests": resources, "limits": resources}
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
    # Exit code 2 (refused) is final. Code 1 is not where there are several processes: one of them may only have lost
    # the connection to another one that was preempted.
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
    return f"{heading(experiment, 'kubectl apply -f')}{to_yaml(files)}---\n{to_yaml(jobs)}"
