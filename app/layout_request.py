"""Which layouts a URL asks for, and the child processes that work them out; knows no HTML."""

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

from . import form_texts
from .experiments import stored
from .jobs import Job
from .state import Site

SOURCES = ("run", "exp", "draft")
DEVICE = "h200"
"""The device that a URL means which names none."""

NO_DEVICE = "none"
NONE = "none"
"""The text of no rules at all, where the experiment has some."""

COMPILE_SECONDS = 300
MOST_RULES = 60
SHORT = {"tp": "tensor", "dp": "data", "cp": "context", "ep": "expert", "pp": "stage"}
"""What others call some mesh axes."""

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


def device_of(query: Mapping[str, str]) -> str:
    """The device that is meant; one of the catalogue, perhaps with another memory (`h100:48`), or `NO_DEVICE`.

    Raises:
        PlanError: there is none of this name, or with such a memory.
    """
    name = query.get("device", "").lower()[:40] or DEVICE
    if name != NO_DEVICE:
        hardware.device(name)
    return name


def mesh_of(text: str, most: int) -> dict[str, int]:
    """The sizes that a text like `fsdp:16,tensor:8` gives; axes that it does not name have size 1.

    Args:
        text: As in the URL; `slices` may be named as well.
        most: The most devices.

    Raises:
        SpecError: with everything that is wrong.
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
            problems.append(Problem(f"mesh.{axis}", "is given twice"))
        elif not (size.strip().isascii() and size.strip().isdigit() and 0 < int(size[:12]) <= most):
            problems.append(Problem(f"mesh.{axis}", f"expected a number from 1 to {most:,}, got '{size[:20]}'"))
        else:
            sizes[axis] = int(size)
        named.add(axis)
    if not problems and (count := math.prod(sizes[axis] for axis in MESH_AXES)) > most:
        problems.append(Problem("mesh", f"{count:,} devices; at most {most:,} are planned"))
    if problems:
        raise SpecError(problems)
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The shortest text for sizes; `data:1` for one device.

    >>> mesh_text({"data": 1, "fsdp": 16, "tensor": 8})
    'fsdp:16,tensor:8'
    """
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items() if size > 1) or "data:1"


def rules_of(text: str) -> Rules:
    """The rules of a text with one in each line: `embed: fsdp`, `mlp: tensor+fsdp`, `vocab: -` for no axis.

    Raises:
        SpecError: a line that is none, by its number.
    """
    found: list[tuple[str, str | tuple[str, ...] | None]] = []
    lines = [line.strip() for line in text.splitlines() if line.strip()] if text != NONE else []
    if len(lines) > MOST_RULES:
        raise SpecError([Problem("rules", f"{len(lines)} rules; at most {MOST_RULES} are read")])
    for number, line in enumerate(lines, start=1):
        logical, colon, target = (part.strip() for part in line.partition(":"))
        if not colon or not logical or not target:
            raise SpecError([Problem("rules", f"line {number}: expected `logical axis: mesh axis`, got '{line[:60]}'")])
        axes = tuple(axis.strip() for axis in target.split("+"))
        found.append((logical, None if target in ("-", "None") else axes[0] if len(axes) == 1 else axes))
    return tuple(found)


def rules_text(rules: Rules) -> str:
    """Rules as `rules_of` reads them."""
    return "\n".join(
        f"{logical}: {axes if isinstance(axes, str) else '+'.join(axes or ()) or '-'}" for logical, axes in rules
    )


def array_rules_of(text: str) -> tuple[tuple[str, Rules], ...]:
    """The rules for arrays of some paths, one pattern in each line: `*.mlp.down.kernel | mlp: tensor, embed: -`.

    Raises:
        SpecError: a line that is none, by its number.
    """
    found: list[tuple[str, Rules]] = []
    lines = [line.strip() for line in text.splitlines() if line.strip()] if text != NONE else []
    if len(lines) > MOST_RULES:
        raise SpecError([Problem("array_rules", f"{len(lines)} patterns; at most {MOST_RULES} are read")])
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
    """Rules as `array_rules_of` reads them."""
    return "\n".join(f"{pattern} | {', '.join(rules_text(inner).splitlines())}" for pattern, inner in rules)


def with_placement(experiment: Experiment, query: Mapping[str, str], mesh: str, most: int) -> Experiment:
    """The experiment on a mesh and with the rules of a query.

    Args:
        experiment: As it is written.
        query: Of the URL; its `rules` and `arrays` replace the experiment's.
        mesh: Text of a mesh; empty: the experiment's own.
        most: The most devices.

    Raises:
        SpecError: with everything that is wrong.
    """
    changes: dict[str, object] = {}
    if mesh:
        changes |= {f"mesh.{axis}": size for axis, size in mesh_of(mesh, most).items()}
    elif experiment.mesh.device_count > most:
        raise SpecError([Problem("mesh", f"{experiment.mesh.device_count:,} devices; at most {most:,} are planned")])
    if "rules" in query:
        changes["mesh.rules"] = rules_of(query["rules"])
    if "arrays" in query:
        changes["mesh.array_rules"] = array_rules_of(query["arrays"])
    return evolve(experiment, changes) if changes else experiment


@attrs.frozen
class Source:
    """What a URL names.

    Attributes:
        kind: One of `SOURCES`; empty where the URL names none.
        name: A run's id, a preset's or a draft's name.
        experiment: As it is written; None while a preset is being read.
    """

    kind: str = ""
    name: str = ""
    experiment: Experiment | None = None

    @property
    def words(self) -> str:
        """For people."""
        return f"experiments/{self.name}.py" if self.kind == "exp" else f"{self.kind} {self.name}"


def source(site: Site, query: Mapping[str, str]) -> Source:
    """What a URL names.

    Raises:
        RunError: there is no such thing, or the app cannot read it.
        SpecError: a draft with problems.
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
    """The child process that plans an experiment; its key is all that the plan depends on.

    Args:
        site: Whose jobs it is one of.
        experiment: On the mesh that is asked for.
        device: Name in the catalogue, or `NO_DEVICE`.
        start: Whether to start it if there is none, or if it failed or was ended.
        compiled: Whether XLA is asked, too.
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
    """Why XLA cannot be asked here, and what to do about it; None if it can."""
    if device not in (NO_DEVICE, *hardware.DEVICES):
        return "A compiler knows the devices of the catalogue as they are; leave the memory empty to ask it."
    platform = "cpu" if device == NO_DEVICE else hardware.DEVICES[device].platform
    count = experiment.mesh.device_count
    if platform == "cpu" and count > hardware.MAX_CPU_DEVICES:
        return f"A CPU is divided into at most {hardware.MAX_CPU_DEVICES} devices; this mesh has {count:,}."
    try:
        find_compiler(platform)
    except RunError as error:
        return str(error)
    return None
