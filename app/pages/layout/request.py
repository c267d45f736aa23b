"""Reads the query of the Layout page, and starts the child processes that compute plans. Independent of gradio."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from nnxdsl import Adapter, Data, Model, Objective, Optimizer, Schedule
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.errors import NnxdslError, Problem, RunError, SpecError, suggest
from nnxdsl.planning.aot_process import find_compiler
from nnxdsl.sharding import hardware

from ...processes.jobs import Job
from ...state import Site
from ...store.experiments import file_of, written
from ...words import whole
from ..new import form_texts
from .arrays import filtered, to_csv

SOURCES = ("run", "exp", "draft")
DEVICE = "h200"
"""Default device of a URL."""

NO_DEVICE = "none"
NONE = "none"
"""Text in a query for an empty list of rules."""

EXAMPLE = "DPO with LoRA, 64 pairs of up to 512 tokens"
"""What a model is trained with if no experiment is chosen."""

CONFIG = "config.json"
MODEL_DEPTH, MOST_DIRECTORIES, MOST_MODELS = 4, 2_000, 60
COMPILE_SECONDS = 300
MOST_RULES = 60
SHORT = {"tp": "tensor", "dp": "data", "cp": "context", "ep": "expert", "pp": "stage"}
"""Aliases of mesh axes."""

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


def device_of(query: Mapping[str, str]) -> str:
    """Returns the device: one of the catalogue, `NO_DEVICE`, or one with another memory size (`h100:48`).

    Raises:
        PlanError: unknown device or invalid memory size.
    """
    kind, memory = device_parts(query)
    if kind == NO_DEVICE:
        return kind
    name = f"{kind}:{memory}" if memory else kind
    hardware.device(name)
    return name


def device_parts(query: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name of a device, and its memory in GiB if that is not the catalogue's."""
    kind, _, memory = query.get("device", "").lower()[:40].partition(":")
    return kind or DEVICE, query.get("memory", "")[:20] or memory


def mesh_of(text: str, most: int) -> dict[str, int]:
    """Parses sizes of mesh axes, and `slices`, such as `fsdp:16,tensor:8` of at most so many devices.

    Raises:
        SpecError: all problems at once.
    """
    sizes: dict[str, int] = dict.fromkeys((*MESH_AXES, "slices"), 1)
    problems: list[Problem] = []
    named: set[str] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        axis, _, size = (one.strip() for one in part.replace("=", ":").partition(":"))
        axis, count = SHORT.get(axis, axis), whole(size)
        if axis not in sizes:
            problems.append(Problem("mesh", f"there is no axis '{axis[:40]}'{suggest(axis, sizes)}"))
        elif axis in named:
            problems.append(Problem(f"mesh.{axis}", "is given more than once"))
        elif count is None or not 0 < count <= most:
            problems.append(Problem(f"mesh.{axis}", f"expected a number from 1 to {most:,}, got '{size[:20]}'"))
        else:
            sizes[axis] = count
        named.add(axis)
    if not problems and (count := math.prod(sizes[axis] for axis in MESH_AXES)) > most:
        problems.append(Problem("mesh", f"{count:,} devices; expected at most {most:,}"))
    if problems:
        raise SpecError(problems)
    return sizes


def _lines(text: str, field: str, separator: str, form: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number and the two sides of each line of rules.

    Raises:
        SpecError: a line without two sides, or too many of them.
    """
    lines = [] if text == NONE else list(filter(None, map(str.strip, text.splitlines())))
    if len(lines) > MOST_RULES:
        raise SpecError([Problem(field, f"{len(lines)} lines; expected at most {MOST_RULES}")])
    for number, line in enumerate(lines, start=1):
        left, _, right = (part.strip() for part in line.partition(separator))
        if not left or not right:
            raise SpecError([Problem(field, f"line {number}: expected `{form}`, got '{line[:60]}'")])
        yield number, left, right


def rules_of(text: str) -> Rules:
    """Parses sharding rules, one per line: `embed: fsdp`, `mlp: tensor+fsdp`, `vocab: -` for no axis.

    Raises:
        SpecError: an invalid line, with its number.
    """
    found: list[tuple[str, str | tuple[str, ...] | None]] = []
    for _, logical, target in _lines(text, "rules", ":", "logical axis: mesh axis"):
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
    for number, pattern, rules in _lines(text, "array_rules", "|", "path with * | logical axis: mesh axis, ..."):
        try:
            found.append((pattern, rules_of(rules.replace(",", "\n"))))
        except SpecError as error:
            raise SpecError([Problem("array_rules", f"line {number}: {error.problems[0].message}")]) from error
    return tuple(found)


def array_rules_text(rules: tuple[tuple[str, Rules], ...]) -> str:
    """Formats rules for `array_rules_of`."""
    return "\n".join(f"{pattern} | {', '.join(rules_text(inner).splitlines())}" for pattern, inner in rules)


def with_placement(experiment: Experiment, query: Mapping[str, str], mesh: str, most: int) -> Experiment:
    """Returns the experiment with a mesh (empty for its own) of at most so many devices, and a query's rules.

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
    """Kind (of `SOURCES`) and name of the experiment in a URL, empty if it names none, and the experiment once read."""

    kind: str = ""
    name: str = ""
    experiment: Experiment | None = None

    @property
    def words(self) -> str:
        """Display name."""
        if not self.kind:
            return EXAMPLE
        return f"experiments/{self.name}.py" if self.kind == "exp" else f"{self.kind} {self.name}"


def named(query: Mapping[str, str]) -> Source:
    """Returns the kind and the name of the experiment that a URL names, without loading it."""
    kind = next((kind for kind in SOURCES if query.get(kind)), "")
    return Source(kind, query.get(kind, ""))


def source(site: Site, query: Mapping[str, str]) -> Source:
    """Loads the experiment that a URL names, with the model that it names.

    Raises:
        RunError: it does not exist, or the app cannot read it.
        SpecError: the draft has problems, or the model does not suit the experiment.
    """
    found = named(query)
    experiment = _loaded(site, found.kind, found.name)
    if query.get("model"):
        model = Model.HF(model_path(site.settings.project, query["model"]))
        if not found.kind:
            experiment = _example(model)
        elif experiment is not None:
            experiment = attrs.evolve(experiment, model=model)
    return attrs.evolve(found, experiment=experiment)


def _loaded(site: Site, kind: str, name: str) -> Experiment | None:
    if kind == "run":
        return site.experiment(name)
    if kind == "draft":
        experiment, problems = form_texts.read(site.drafts.load(name).texts)
        if experiment is None:
            raise SpecError(problems, "this draft")
        return experiment
    if kind == "exp":
        return site.presets.experiment(name)
    return None


def _example(model: Model) -> Experiment:
    """What `EXAMPLE` says, for a model without an experiment."""
    return Experiment(
        name="fit",
        model=model,
        adapter=Adapter.LoRA(rank=16),
        objective=Objective.DPO(beta=0.1),
        data=Data.Preferences("pairs.jsonl", max_prompt_length=256, max_completion_length=256),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
        batch_size=64,
        steps=1_000,
    )


def model_path(project: Path, text: str) -> str:
    """Returns the absolute path of a directory in a project that has a `config.json`, by its path or that of the file.

    Raises:
        RunError: there is none, or it is outside of the project, of which nothing is read.
    """
    root = project.resolve()
    try:
        file = (root / text).resolve()
        file = (file if file.name == CONFIG else file / CONFIG).resolve()
        if not file.is_relative_to(root):
            raise RunError(f"{text[:200]} is outside of the project {root}; start the app in its directory")
        if not file.is_file():
            raise RunError(f"{text[:200]} has no {CONFIG}")
    except (OSError, ValueError) as error:
        raise RunError(f"{text[:200]!r} cannot be read: {error}") from None
    return str(file.parent)


def models_in(project: Path) -> list[str]:
    """Returns directories of a project that have a `config.json`; only the upper levels are searched."""
    found: list[str] = []
    for count, (place, names, files) in enumerate(os.walk(project)):
        path = Path(place).relative_to(project)
        names[:] = [] if len(path.parts) >= MODEL_DEPTH else sorted(name for name in names if not name.startswith("."))
        if CONFIG in files and path.parts:
            found.append(str(path))
        if count >= MOST_DIRECTORIES:
            break
    return found[:MOST_MODELS]


# Layouts


@attrs.frozen
class Layout:
    """An experiment with its mesh, a device or `NO_DEVICE`, and the job that computes their plan if it was started."""

    experiment: Experiment
    device: str
    job: Job | None

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """The plan; None before it is computed."""
        return None if self.job is None else self.job.result


def layouts(site: Site, query: Mapping[str, str], of: Source | None = None, *, start: bool = False) -> list[Layout]:
    """Returns the layout on the query's mesh, and that on its second one; none before the experiment has been read.

    `start` starts jobs that have never been started: one that failed or was cancelled is restarted on request only.

    Raises:
        RunError: the experiment does not exist, or the app cannot read it.
        SpecError: all problems of the draft, or of meshes and rules, at once.
        PlanError: unknown device.
    """
    experiment = (of or source(site, query)).experiment
    if experiment is None:
        return []
    device, most = device_of(query), site.settings.limits.mesh_devices
    meshes = [query.get("mesh", ""), *filter(None, [query.get("mesh2", "")])]
    found: list[Layout] = []
    for placed in [with_placement(experiment, query, mesh, most) for mesh in meshes]:
        job = plan_job(site, placed, device, start=False)
        if job is None and start:
            job = plan_job(site, placed, device, start=True)
        found.append(Layout(placed, device, job))
    return found


def first_layout(site: Site, query: Mapping[str, str]) -> Layout:
    """Returns the layout on the query's first mesh; errors as of `layouts`."""
    found = layouts(site, query)
    if not found:
        raise RunError("Choose an experiment first: a recipe, a run or a draft.")
    return found[0]


def arrays_csv(site: Site, query: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the name of a file and CSV of the arrays of a query's plan; None if it was not computed."""
    try:
        plan = first_layout(site, query).plan
    except NnxdslError:
        return None
    return (f"{plan['id']}-layout.csv", to_csv(filtered(plan["arrays"], query))) if plan else None


# Child processes


def plan_job(site: Site, experiment: Experiment, device: str, *, start: bool, compiled: bool = False) -> Job | None:
    """Returns the job that plans an experiment for a device, or also compiles its step with XLA.

    `start` starts it if there is none, or if it failed or was cancelled.
    """
    device = "" if device == NO_DEVICE else device
    file = file_of(site.settings.own / "plans", experiment)
    key, jobs = f"plan {file} {device}", site.compiles if compiled else site.jobs
    if not start:
        return jobs.get(key)
    written(file.parent, experiment)
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
