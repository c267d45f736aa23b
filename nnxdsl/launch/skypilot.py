"""A task of SkyPilot with the experiment in its script. Written, never submitted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from nnxdsl.config.core.serialization import to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import SkyPilot
from nnxdsl.launch.cluster_files import PORT, dns_name, heading
from nnxdsl.launch.yaml import to_yaml


def task(launcher: SkyPilot, experiment: Experiment) -> str:
    """The text of the file for `sky jobs launch`."""
    resources = {
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
    fields: dict[str, Any] = {
        "name": dns_name(experiment.id),
        "num_nodes": launcher.nodes,
        "workdir": launcher.directory,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "file_mounts": {launcher.home: {"source": launcher.bucket, "mode": "MOUNT"}} if launcher.bucket else None,
        "envs": dict(launcher.variables) or None,
        "secrets": dict.fromkeys(launcher.secrets) or None,
        "setup": _script(launcher.setup) or None,
        "run": _script(run),
    }
    given = {name: value for name, value in fields.items() if value is not None and value != {}}
    return heading(experiment, "sky jobs launch") + to_yaml(given)


def _script(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _in_shell(path: str) -> str:
    """A path as a shell reads it, its `~` that of whoever runs it."""
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)
