"""Generated files: what a reader of YAML sees, what the schemas of JobSet and SkyPilot allow, what a shell runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nnxdsl import Data, Experiment, Launcher, Model, Objective, Optimizer, RunError, Schedule, evolve, from_json
from nnxdsl.launch.cluster_files import LONGEST_NAME, dns_name
from nnxdsl.launch.engines import generated
from nnxdsl.launch.yaml import to_yaml

SCHEMAS = Path(__file__).parents[1] / "reference" / "launchers"
HOSTILE = "a'b\"c $(touch hacked) `x` \\ : # - {} \t ü 🙂"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "~",
        "null",
        "1e5",
        "0x1",
        "yes",
        "- a",
        "a: b",
        "#",
        "a\nb\n",
        "a\n\nb\n",
        " a\nb\n",
        "\n\n",
        "1:20",
        "=",
        "<<",
        ".",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(VALUES)
def test_a_reader_of_yaml_sees_the_same_values(value: object) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.fixture
def experiment() -> Experiment:
    return Experiment(
        name="tiny",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(HOSTILE, max_length=16),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=2,
        steps=2,
        notes=f"{HOSTILE}\nEND OF EXPERIMENT\n",
    )


def check(schema: str, document: object) -> None:
    validator = Draft202012Validator(json.loads((SCHEMAS / schema).read_text()))
    assert [error.message for error in validator.iter_errors(document)] == []


def pod_of(jobs: dict[str, Any]) -> dict[str, Any]:
    return jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


KUBERNETES = Launcher.Kubernetes(
    image="registry.example/nnxdsl:1",
    nodes=4,
    volume_claim="runs",
    home=f"/runs/{HOSTILE}",
    directory="/data",
    resources=(("nvidia.com/gpu", "8"), ("memory", "512Gi")),
    node_selector=(("cloud.google.com/gke-accelerator", "nvidia-h200-141gb"),),
    variables=(("A", HOSTILE), ("B", "1")),
    secrets=("hub",),
    namespace="team",
    queue="batch",
    retries=7,
)


@pytest.mark.parametrize("launcher", [KUBERNETES, Launcher.Kubernetes(image="a")], ids=["all", "least"])
def test_a_jobset_is_what_its_schema_says(launcher: Any, experiment: Experiment) -> None:
    files, jobs = yaml.safe_load_all(generated(launcher, experiment))
    check("jobset.schema.json", jobs)
    assert from_json(files["data"]["experiment.json"], Experiment) == experiment
    pod = pod_of(jobs)
    assert pod["volumes"][0]["configMap"]["name"] == files["metadata"]["name"] == jobs["metadata"]["name"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    broken = json.loads(json.dumps(jobs))
    broken["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    with pytest.raises(AssertionError, match="backofLimit"):  # the schema knows all names
        check("jobset.schema.json", broken)


def test_each_pod_of_a_jobset_is_one_process_and_finds_the_first(experiment: Experiment) -> None:
    _, jobs = yaml.safe_load_all(generated(KUBERNETES, experiment))
    name, job = jobs["metadata"]["name"], jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    shell, flag, script = pod_of(jobs)["containers"][0]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    words = typed(script, JOB_COMPLETION_INDEX="3")
    host = f"{name}-run-0-0.{name}"  # what JobSet calls the first pod of the first job
    assert words == [
        *("python", "-m", "nnxdsl", "run", "/etc/nnxdsl/experiment.json", "--home", KUBERNETES.home),
        *("--coordinator", f"{host}:8476", "--processes", "4", "--process", "3"),
    ]  # fmt: skip
    single = generated(Launcher.Kubernetes(image="a"), experiment)
    assert "--coordinator" not in single


SKYPILOT = Launcher.SkyPilot(
    accelerators="H200:8",
    nodes=2,
    infra="gcp/us-central1",
    cpus="16+",
    memory="64",
    disk_gigabytes=512,
    image="docker:registry.example/nnxdsl:1",
    pricing="spot",
    bucket="gs://my-runs",
    home="~/all runs",
    setup=("pip install -q nnxdsl", f"echo {json.dumps(HOSTILE)}"),
    variables=(("A", HOSTILE),),
    secrets=("HF_TOKEN",),
)


@pytest.mark.parametrize("launcher", [SKYPILOT, Launcher.SkyPilot()], ids=["all", "least"])
def test_a_task_is_what_its_schema_says(launcher: Any, experiment: Experiment) -> None:
    task = yaml.safe_load(generated(launcher, experiment))
    check("skypilot_task.schema.json", task)
    assert ("use_spot" in task["resources"]) == (launcher.pricing == "spot")
    assert ("--coordinator" in task["run"]) == (launcher.nodes > 1)


def test_each_node_of_a_task_is_one_process_and_has_the_experiment(experiment: Experiment, tmp_path: Path) -> None:
    task = yaml.safe_load(generated(SKYPILOT, experiment))
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    words = typed(task["run"], HOME=str(tmp_path), **given)
    place = words.pop(4)
    assert words == [
        *("python", "-m", "nnxdsl", "run", "--home", f"{tmp_path}/all runs"),
        *("--coordinator", "10.0.0.1:8476", "--processes", "2", "--process", "1"),
    ]  # fmt: skip
    assert from_json(Path(place).read_text(encoding="utf-8"), Experiment) == experiment
    Path(place).unlink()
    Path(place).parent.rmdir()


def typed(script: str, **variables: str) -> list[str]:
    """The words of the `python` command that a shell runs for a script."""
    show = f"python() {{ {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' python \"$@\"; }}\n"
    environment = {"PATH": os.environ["PATH"], **variables}
    script = script.replace("exec python", "python")
    done = subprocess.run(["/bin/sh", "-c", show + script], env=environment, capture_output=True, text=True, check=True)
    assert not Path("hacked").exists()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["tiny", "9to5", "a.b_c", "a" * 64, "x-", "0._-."])
def test_names_are_labels_of_dns_and_stay_apart(name: str, experiment: Experiment) -> None:
    run = evolve(experiment, {"name": name}).id
    label = dns_name(run)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", label)
    assert len(label) <= LONGEST_NAME
    assert label.endswith(run[-9:])


def test_launchers_that_start_runs_write_no_file(experiment: Experiment) -> None:
    with pytest.raises(RunError, match=r"--write has no effect on Launcher\.Local"):
        generated(Launcher.Local(), experiment)
