"""The cluster templates of docs/guides/sweeps_and_launching.md against the schemas of JobSet and SkyPilot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from nnxdsl.cli.dispatch import _parser
from tests.doc_pages import texts

TESTS = Path(__file__).parents[1]
JOB_SET, TASK = map(yaml.safe_load, texts(TESTS.parent / "docs" / "guides" / "sweeps_and_launching.md", "yaml"))
SCHEMAS = TESTS / "reference" / "launchers"


def errors(schema: str, document: object) -> list[str]:
    validator = Draft202012Validator(json.loads((SCHEMAS / schema).read_text()))
    return [error.message for error in validator.iter_errors(document)]


def parsed(script: str, **variables: str) -> Any:
    """The arguments that `nnxdsl run` reads from the `python` command which a shell runs for a script."""
    show = f"python() {{ {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"; }}\n"
    script = show + script.replace("exec python", "python")
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    flag, package, *argv = json.loads(done.stdout)
    assert (flag, package) == ("-m", "nnxdsl")
    return _parser(["run"], "nnxdsl", "", None).parse_args(argv)


@pytest.mark.parametrize(("schema", "document"), [("jobset.schema.json", JOB_SET), ("skypilot_task.schema.json", TASK)])
def test_a_template_is_what_its_schema_says(schema: str, document: dict[str, Any]) -> None:
    assert errors(schema, document) == []
    assert errors(schema, {**document, "another": 1})


def test_each_pod_of_the_job_set_is_one_process_and_finds_the_first() -> None:
    name, (job,) = JOB_SET["metadata"]["name"], JOB_SET["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    shell, flag, script = container["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    read = parsed(script, JOB_COMPLETION_INDEX="1")
    # What JobSet calls the first pod of the first job.
    assert read.coordinator == f"{name}-{job['name']}-0-0.{name}:8476"
    assert (read.processes, read.process) == (pods["completions"], 1)
    assert pods["completions"] == pods["parallelism"]
    places = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert places == {str(Path(read.target).parent), str(read.home)}
    volumes = pods["template"]["spec"]["volumes"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in volumes}


def test_each_node_of_the_task_is_one_process_and_finds_the_first(tmp_path: Path) -> None:
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    read = parsed(TASK["run"], HOME=str(tmp_path), **nodes)
    assert (read.coordinator, read.processes, read.process) == ("10.0.0.1:8476", TASK["num_nodes"], 1)
    assert list(TASK["file_mounts"]) == ["~/runs"]
    assert read.home == tmp_path / "runs"
