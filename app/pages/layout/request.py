"""Parses the query of the Layout page, and starts the child processes that compute plans. No HTML."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from nnxdsl.config.core.serialization import evolve, to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.errors import Problem, RunError, SpecError, suggest
from nnxdsl.planning.aot_process import find_compiler
from nnxdsl.sharding import hardware
from nnxdsl.storage.jsonl import write_json

from ...processes.jobs import Job
from ...state import Site
from ...store.experiments import stored
from ..new import form_texts

SOURCES = ("run", "exp", "draft")
DEVICE = "h200"
"""Default device of a URL."""

NO_DEVICE = "none"
NONE = "none"
"""Text in a query for an empty list of rules."""

COMPILE_SECONDS = 300
MOST_RULES = 60
SHORT = {"tp": "tensor", "dp": "data", "cp": "context", "ep": "expert", "pp": "stage"}
"""Aliases of mesh axes."""

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


def device_of(query: Mapping[str, str]) -> str:
    """Parses the device: one of the catalogue, optionally with another memory size (`h100:48`), or `NO_DEVICE`.

    Raises:
        PlanError: unknown device or invalid memory size.
    """
    name = query.get("device", "").lower()[:40] or DEVICE
    if name != NO_DEVICE:
        hardware.device(name)
    return name


def mesh_of(text: str, most: int) -> dict[str, int]:
    """Parses mesh sizes such as `fsdp:16,tensor:8`; other axes have size 1.

    Args:
        text: Value in the URL; `slices` is accepted as well.
        most: Maximum number of devices.

    Raises:
        SpecError: all problems at once.
    """
    sizes: dict[str, int] = dict.fromkeys((*MESH_AXES, "slices"), 1)
    problems: list[Problem] = []
    named: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.replace("=", ":").partition(":")
        axis = SHORT.get(axis.strip(), axis.strip())
        if axis not in sizes:
            problems.append(Problem("mesh", f"there is no axis '{axis[:40]}'{suggest(axis, sizes)}"))
        elif axis in named:
            problems.append(Problem(f"mesh.{axis}", "is given more than once"))
        elif not (size.strip().isascii() and size.strip().isdigit() and 0 < int(size[:12]) <= most):
            problems.append(Problem(f"mesh.{axis}", f"expected a number from 1 to {most:,}, got '{size[:20]}'"))
        else:
            sizes[axis] = int(size)
        named.add(axis)
    if not problems and (count := math.prod(sizes[axis] for axis in MESH_AXES)) > most:
        problems.append(Problem("mesh", f"{count:,} devices; expected at most {most:,}"))
    if problems:
        raise SpecError(problems)
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Formats mesh sizes; `data:1` for one device.

    >>> mesh_text({"data": 1, "fsdp": 16, "tensor": 8})
    'fsdp:16,tensor:8'
    """
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items() if size > 1) or "data:1"


def rules_of(text: str) -> Rules:
    """Parses sharding rules, one per line: `embed: fsdp`, `mlp: tensor+fsdp`, `vocab: -` for no axis.

    Raises:
        SpecError: an invalid line, with its number.
    """
    found: list[tuple[str, str | tuple[str, ...] | None]] = []
    lines = [line.strip() for line in text.splitlines() if line.strip()] if text != NONE else []
    if len(lines) > MOST_RULES:
        raise SpecError([Problem("rules", f"{len(lines)} rules; expected at most {MOST_RULES}")])
    for number, line in enumerate(lines, start=1):
        logical, colon, target = (part.strip() for part in line.partition(":"))
        if not colon or not logical or not target:
            raise SpecError([Problem("rules", f"line {number}: expected `logical axis: mesh axis`, got '{line[:60]}'")])
        axes = tuple(axis.strip() for axis in target.split("+"))
        found.append((logical, None if target in ("-", "None") else axes[0] if len(axes) == 1 else axes))
    return tuple(found)


def rules_text(rules: Rules) -> str:
    """Formats rules for `rules_of`."""
    return "\n".join(
        f"{logical}: {axes if isinstance(axes, str) else '+'.join(axes or ()) or '-'}" for logical, axes in rules
    )


def array_rules_of(text: str) -> tuple[tuple[str, Rules], ...]:
    """Parses sharding rules by array path, one pattern per line: `*.mlp.down.kernel | mlp: tensor, embed: -`.

    Raises:
        SpecError: an invalid line, with its number.
    """
    found: list[tuple[str, Rules]] = []
    lines = [line.strip() for line in text.splitlines() if line.strip()] if text != NONE else []
    if len(lines) > MOST_RULES:
        raise SpecError([Problem("array_rules", f"{len(lines)} patterns; expected at most {MOST_RULES}")])
    for number, line in enumerate(lines, start=1):
        pattern, bar, rules = (part.strip() for part in line.partition("|"))
        if not bar or not pattern or not rules:
            message = f"line {number}: expected `path with * | logical axis: mesh axis, ...`, got '{line[:60]}'"
            raise SpecError([Problem("array_rules", message)])
        try:
            found.append((pattern, rules_of(rules.replace(",", "\n"))))
        except SpecError as error:
            raise SpecError([Problem("array_rules", f"line {number}: {error.problems[0].message}")]) from error
    return tuple(found)


def array_rules_text(rules: tuple[tuple[str, Rules], ...]) -> str:
    """Formats rules for `array_rules_of`."""
    return "\n".join(f"{pattern} | {', '.join(rules_text(inner).splitlines())}" for pattern, inner in rules)


def with_placement(experiment: Experiment, query: Mapping[str, str], mesh: str, most: int) -> Experiment:
    """Returns the experiment with a mesh and a query's sharding rules.

    Args:
        experiment: The original experiment.
        query: Query of the URL; its `rules` and `arrays` replace the experiment's.
        mesh: Text of a mesh; empty for the experiment's own.
        most: Maximum number of devices.

    Raises:
        SpecError: all problems at once.
    """
    changes: dict[str, object] = {}
    if mesh:
        changes |= {f"mesh.{axis}": size for axis, size in mesh_of(mesh, most).items()}
    elif experiment.mesh.device_count > most:
        raise SpecError([Problem("mesh", f"{experiment.mesh.device_count:,} devices; expected at most {most:,}")])
    if "rules" in query:
        changes["mesh.rules"] = rules_of(query["rules"])
    if "arrays" in query:
        changes["mesh.array_rules"] = array_rules_of(query["arrays"])
    return evolve(experiment, changes) if changes else experiment


@attrs.frozen
class Source:
    """Origin of the experiment in a URL.

    Attributes:
        kind: One of `SOURCES`; empty if the URL names none.
        name: Id of a run, or name of a preset or draft.
        experiment: The experiment; None while a preset is being read.
    """

    kind: str = ""
    name: str = ""
    experiment: Experiment | None = None

    @property
    def words(self) -> str:
        """Display name."""
        return f"experiments/{self.name}.py" if self.kind == "exp" else f"{self.kind} {self.name}"


def source(site: Site, query: Mapping[str, str]) -> Source:
    """Loads the experiment that a URL names.

    Raises:
        RunError: it does not exist, or the app cannot read it.
        SpecError: the draft has problems.
    """
    kind = next((kind for kind in SOURCES if query.get(kind)), "")
    name = query.get(kind, "")
    if kind == "run":
        return Source(kind, name, _of_run(site, name))
    if kind == "draft":
        experiment, problems = form_texts.read(site.drafts.load(name).texts)
        if experiment is None:
            raise SpecError(problems, "this draft")
        return Source(kind, name, experiment)
    if kind == "exp":
        job = site.presets.job(name)
        if job is None:
            raise RunError(f"there is no {site.presets.place / name}.py")
        if job.is_over and job.state != "done":
            raise RunError(f"experiments/{name}.py cannot be read: {job.error or job.state}")
        return Source(kind, name, site.presets.experiment(name))
    return Source()


def _of_run(site: Site, name: str) -> Experiment:
    if site.index.row(name) is not None:
        place = site.run(name).path
    else:
        newest = site.launcher.newest(name)
        if newest is None:
            raise RunError(f"there is no run {name}; choose one")
        place = newest.directory
    experiment = stored(place / "experiment.json")
    if experiment is None:
        raise RunError(
            f"{name} names classes of another package, which the app does not import; "
            "`nnxdsl plan FILE` shows its layout in a terminal"
        )
    return experiment


# Child processes


def plan_job(site: Site, experiment: Experiment, device: str, *, start: bool, compiled: bool = False) -> Job | None:
    """Returns the job that plans an experiment; its key covers all that the plan depends on.

    Args:
        site: State of the app.
        experiment: The experiment with its mesh.
        device: Name in the catalogue, or `NO_DEVICE`.
        start: Whether to start it if there is none, or if it failed or was cancelled.
        compiled: Whether XLA compiles the step as well.
    """
    device = "" if device == NO_DEVICE else device
    tree: dict[str, Any] = to_dict(experiment)
    digest = hashlib.sha256(f"{json.dumps(tree, sort_keys=True)} {device}".encode()).hexdigest()[:16]
    key = f"{'compiled plan' if compiled else 'plan'} {digest}"
    jobs = site.compiles if compiled else site.jobs
    if not start:
        return jobs.get(key)
    file = site.settings.own / "plans" / f"{digest}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, tree)
    words = ["-m", "nnxdsl", "plan", str(file), "--json", "--home", str(site.settings.home)]
    words += ["--device", device] if device else []
    return jobs.start(key, words + (["--compile", "--limit", str(COMPILE_SECONDS)] if compiled else []))


def why_not_compiled(experiment: Experiment, device: str) -> str | None:
    """Why the step cannot be compiled for a device, and what to do about it; None if it can."""
    if device not in (NO_DEVICE, *hardware.DEVICES):
        return "Only devices with the catalogue's memory size can be compiled for; leave the memory empty."
    platform = "cpu" if device == NO_DEVICE else hardware.DEVICES[device].platform
    count = experiment.mesh.device_count
    if platform == "cpu" and count > hardware.MAX_CPU_DEVICES:
        return f"A CPU can emulate at most {hardware.MAX_CPU_DEVICES} devices; this mesh has {count:,}."
    try:
        find_compiler(platform)
    except RunError as error:
        return str(error)
    return None
