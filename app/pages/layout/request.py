"""Reads the query of the Layout page, and starts the child processes that compute plans. Independent of gradio."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from nnxdsl import Adapter, Data, Model, Objective, Optimizer, Schedule
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.errors import NnxdslError, Problem, RunError, SpecError, suggest
from nnxdsl.planning.aot_process import find_compiler
from nnxdsl.sharding import hardware

from ...formatting import sentence, whole
from ...processes.jobs import Job
from ...settings import Settings
from ...state import Site
from ...store.experiments import file_of, written
from ..new import form_texts
from .arrays import Plan, filtered, to_csv

SOURCES = ("run", "exp", "draft")
DEVICE, NO_DEVICE = "h200", "none"  # default device of a URL, and what stands for no device
NONE = "none"  # text in a query for an empty list of rules
EXAMPLE = "DPO with LoRA, 64 pairs of up to 512 tokens"  # what a model is trained with if no experiment is chosen
CONFIG = "config.json"
MODEL_DEPTH, MOST_DIRECTORIES, MOST_MODELS = 4, 2_000, 60
COMPILE_SECONDS = 300
MOST_RULES = 60
SHORT = {"tp": "tensor", "dp": "data", "cp": "context", "ep": "expert", "pp": "stage"}  # aliases of mesh axes
Query = Mapping[str, str]
Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


def _wrong(path: str, message: str) -> SpecError:
    return SpecError([Problem(path, message)])


# What a query says: a device, a mesh, rules


def device_parts(query: Query) -> tuple[str, str]:
    """Returns the name of a device, and its memory in GiB if that is not the catalogue's."""
    kind, _, memory = query.get("device", "").lower()[:40].partition(":")
    return kind or DEVICE, query.get("memory", "")[:20] or memory


def device_of(query: Query) -> str:
    """Returns `NO_DEVICE`, or a device of the catalogue, `h100:48` with another memory; refuses others (PlanError)."""
    kind, memory = device_parts(query)
    if kind == NO_DEVICE:
        return kind
    name = f"{kind}:{memory}" if memory else kind
    hardware.device(name)
    return name


def mesh_of(text: str, most: int) -> dict[str, int]:
    """Parses sizes of mesh axes, and `slices`, such as `fsdp:16,tensor:8`, of at most so many devices.

    Raises a SpecError with all problems at once.
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
    if problems:
        raise SpecError(problems)
    return _shortened(sizes, most)


def _shortened(sizes: dict[str, int], most: int) -> dict[str, int]:
    if (count := math.prod(sizes[axis] for axis in MESH_AXES)) > most:
        raise _wrong("mesh", f"{count:,} devices; expected at most {most:,}")
    return sizes


def _lines(text: str, field: str, separator: str, form: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number and the two sides of each line of rules."""
    lines = [] if text == NONE else list(filter(None, map(str.strip, text.splitlines())))
    if len(lines) > MOST_RULES:
        raise _wrong(field, f"{len(lines)} lines; expected at most {MOST_RULES}")
    for number, line in enumerate(lines, start=1):
        left, _, right = (part.strip() for part in line.partition(separator))
        if not left or not right:
            raise _wrong(field, f"line {number}: expected `{form}`, got '{line[:60]}'")
        yield number, left, right


def rules_of(text: str) -> Rules:
    """Parses sharding rules, one per line: `embed: fsdp`, `mlp: tensor+fsdp`, `vocab: -` for no axis (SpecError)."""
    rules: list[tuple[str, str | tuple[str, ...] | None]] = []
    for _, logical, target in _lines(text, "rules", ":", "logical axis: mesh axis"):
        axes = tuple(axis.strip() for axis in target.split("+"))
        rules.append((logical, None if target in ("-", "None") else axes[0] if len(axes) == 1 else axes))
    return tuple(rules)


def rules_text(rules: Rules) -> str:
    """Formats rules for `rules_of`."""
    return "\n".join(
        f"{logical}: {axes if isinstance(axes, str) else '+'.join(axes or ()) or '-'}" for logical, axes in rules
    )


def array_rules_of(text: str) -> tuple[tuple[str, Rules], ...]:
    """Parses rules by array path, a pattern per line: `*.mlp.down.kernel | mlp: tensor, embed: -` (SpecError)."""
    by_array: list[tuple[str, Rules]] = []
    for number, pattern, rules in _lines(text, "array_rules", "|", "path with * | logical axis: mesh axis, ..."):
        try:
            by_array.append((pattern, rules_of(rules.replace(",", "\n"))))
        except SpecError as error:
            raise _wrong("array_rules", f"line {number}: {error.problems[0].message}") from error
    return tuple(by_array)


def array_rules_text(rules: tuple[tuple[str, Rules], ...]) -> str:
    """Formats rules for `array_rules_of`."""
    return "\n".join(f"{pattern} | {', '.join(rules_text(inner).splitlines())}" for pattern, inner in rules)


def own_rules(experiment: Experiment) -> tuple[str, str]:
    """Formats the rules of an experiment, and those by array path."""
    return rules_text(experiment.mesh.rules), array_rules_text(experiment.mesh.array_rules)


def with_placement(experiment: Experiment, query: Query, mesh: str, most: int) -> Experiment:
    """Returns the experiment on a mesh (or its own) of at most so many devices, with a query's rules (SpecError)."""
    sizes = mesh_of(mesh, most) if mesh else _shortened(experiment.mesh.sizes, most)
    changes: dict[str, object] = {f"mesh.{axis}": size for axis, size in sizes.items()} if mesh else {}
    if "rules" in query:
        changes["mesh.rules"] = rules_of(query["rules"])
    if "arrays" in query:
        changes["mesh.array_rules"] = array_rules_of(query["arrays"])
    return evolve(experiment, changes) if changes else experiment


# The experiment


@attrs.frozen
class Layout:
    """An experiment with its mesh, a device or `NO_DEVICE`, and the job that computes their plan if it was started."""

    experiment: Experiment
    device: str
    job: Job | None

    @property
    def plan(self) -> Plan | None:
        """The plan; None before it is computed."""
        return None if self.job is None else self.job.result


@attrs.frozen
class Source:
    """What a query names: an experiment, without its layouts if it has not been read, or cannot be."""

    query: Query
    kind: str = ""  # one of `SOURCES`; empty if it names none
    name: str = ""
    experiment: Experiment | None = None
    layouts: Sequence[Layout] = ()  # on the mesh, and on the second one
    problem: str = ""  # what is wrong

    @classmethod
    def named(cls, query: Query) -> Source:
        """Returns the kind and the name of the experiment, without loading it."""
        kind = next((kind for kind in SOURCES if query.get(kind)), "")
        return cls(query, kind, query.get(kind, ""))

    @property
    def display_name(self) -> str:
        """Display name."""
        return f"experiments/{self.name}.py" if self.kind == "exp" else f"{self.kind} {self.name}"

    @property
    def is_reading(self) -> bool:
        """Whether a child process still reads the experiment."""
        return bool(self.kind) and self.experiment is None and not self.problem

    @property
    def plans(self) -> list[Plan]:
        """The plans that are computed, if that of the first mesh is among them."""
        plans = [one.plan for one in self.layouts]
        return [plan for plan in plans if plan is not None] if plans and plans[0] is not None else []


def source(site: Site, query: Query) -> Source:
    """Loads the experiment that a URL names, with the model that it names; an `NnxdslError` says why it cannot."""
    source, experiment = Source.named(query), None
    if source.kind == "run":
        experiment = site.experiment(source.name)
    elif source.kind == "exp":
        experiment = site.presets.experiment(source.name)
    elif source.kind == "draft":
        experiment = form_texts.experiment_of(site.drafts.load(source.name).texts)
    if query.get("model"):
        model = Model.HF(model_path(site.settings, query["model"]))
        if not source.kind:
            experiment = _example(model)
        elif experiment is not None:
            experiment = attrs.evolve(experiment, model=model)
    return attrs.evolve(source, experiment=experiment)


def chosen(site: Site, query: Query) -> Experiment:
    """Returns the experiment that a query names; errors as of `source`, or a RunError if it names none or none yet."""
    experiment = source(site, query).experiment
    if experiment is None:
        raise RunError("Choose an experiment first: a recipe, a run or a draft.")
    return experiment


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


def within(settings: Settings, text: str) -> Path:
    """Returns the absolute path of a text in the project; raises if it is outside, of the app itself, or no path."""
    root = settings.project.resolve()
    try:
        path = (root / text).resolve()
        path.exists()  # an OSError if a name in it is longer than the file system has
    except OSError as error:
        raise RunError(f"{text[:200]!r} cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError) as error:
        raise RunError(f"{text[:200]!r} cannot be read: {error}") from None
    if not path.is_relative_to(root) or text.startswith(("-", "~")):
        raise RunError(f"{text[:200]} is outside of the project {root}; start the app in its directory")
    if path.is_relative_to(settings.app_directory.resolve()):
        raise RunError(f"{text[:200]} is a file of the app itself")
    return path


def model_path(settings: Settings, text: str) -> str:
    """Returns the absolute path of a model's directory in the project, by its path or that of its config (RunError)."""
    file = within(settings, text)
    file = within(settings, str(file if file.name == CONFIG else file / CONFIG))
    if not file.is_file():
        raise RunError(f"{text[:200]} has no {CONFIG}")
    return str(file.parent)


def models_in(project: Path) -> list[str]:
    """Returns directories of a project that have a `config.json`; only the upper levels are searched."""
    models = [str(path) for path, files in _upper(project) if CONFIG in files and path.parts]
    return models[:MOST_MODELS]


def project_files(settings: Settings, ends: tuple[str, ...]) -> list[str]:
    """Returns files of a project whose names end in one of these, but those of runs; upper levels alone."""
    paths = (
        str(path / file)
        for path, files in _upper(settings.project, settings.home)
        for file in sorted(files)
        if file.endswith(ends)
    )
    return list(itertools.islice(paths, MOST_MODELS))


def _upper(project: Path, without: Path | None = None) -> Iterator[tuple[Path, list[str]]]:
    """The directories of a project's upper levels, relative to it, with the names of their files."""
    for place, names, files in itertools.islice(os.walk(project), MOST_DIRECTORIES):
        path = Path(place).relative_to(project)
        names[:] = sorted(name for name in names if not name.startswith(".") and Path(place, name) != without)
        if len(path.parts) >= MODEL_DEPTH:
            names.clear()
        yield path, files


# Its plans


def layouts(site: Site, query: Query, experiment: Experiment | None, *, start: bool = False) -> list[Layout]:
    """Returns the layout on the query's mesh, and that on its second one; none before the experiment has been read.

    `start` starts jobs that have never been started. An `NnxdslError` says what is wrong with meshes, rules or device.
    """
    if experiment is None:
        return []
    device, most = device_of(query), site.settings.limits.mesh_devices
    meshes = [query.get("mesh", ""), *filter(None, [query.get("mesh2", "")])]
    results: list[Layout] = []
    for placed in [with_placement(experiment, query, mesh, most) for mesh in meshes]:
        job = plan_job(site, placed, device, start=False)
        if job is None and start:
            job = plan_job(site, placed, device, start=True)
        results.append(Layout(placed, device, job))
    return results


def laid_out(site: Site, query: Query) -> Source:
    """Returns what a query names with its layouts, whose plans are started, or with what is wrong."""
    chosen_source = Source.named(query)
    try:
        chosen_source = source(site, query)
        return attrs.evolve(chosen_source, layouts=layouts(site, query, chosen_source.experiment, start=True))
    except NnxdslError as error:
        return attrs.evolve(chosen_source, problem=str(error))


def first_layout(site: Site, query: Query) -> Layout:
    """Returns the layout on the query's first mesh; errors as of `chosen` and `layouts`."""
    return layouts(site, query, chosen(site, query))[0]


def arrays_csv(site: Site, query: Query) -> tuple[str, str] | None:
    """Returns the name of a file and CSV of the arrays of a query's plan; None if it was not computed."""
    try:
        plan = first_layout(site, query).plan
    except NnxdslError:
        return None
    return (f"{plan['id']}-layout.csv", to_csv(filtered(plan["arrays"], query))) if plan else None


def plan_job(site: Site, experiment: Experiment, device: str, *, start: bool, compiled: bool = False) -> Job | None:
    """Returns the job that plans an experiment for a device, or also compiles its step with XLA.

    `start` starts it if there is none, or if it failed or was cancelled.
    """
    device = "" if device == NO_DEVICE else device
    file = file_of(site.settings.app_directory / "plans", experiment)
    key, jobs = f"plan {file} {device}", site.compiles if compiled else site.jobs
    if not start:
        return jobs.get(key)
    written(file.parent, experiment)
    argv = ["-m", "nnxdsl", "plan", str(file), "--json", "--home", str(site.settings.home)]
    argv += ["--device", device] if device else []
    return jobs.start(key, argv + (["--compile", "--limit", str(COMPILE_SECONDS)] if compiled else []))


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
        return sentence(str(error))
    return None
