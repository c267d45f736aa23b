"""Random valid experiments, as hypothesis strategies made from the declared fields, so that no field can be forgotten.

`st.from_type(Experiment)`, and that of any family or noun, is registered here.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st

from nnxdsl import (
    Adapter,
    AdaptiveEntropy,
    Batching,
    Checkpoint,
    Data,
    Distance,
    Divergence,
    Environment,
    Evaluation,
    Experiment,
    ImportanceSampling,
    Memory,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Outer,
    Quantization,
    Reference,
    Reward,
    RolloutLog,
    Schedule,
    Spec,
    TeacherServer,
    Tracking,
    Weights,
)
from nnxdsl.config.adapter import LoRA, LowRank
from nnxdsl.config.core.base import Field, declared, is_family, members, registry
from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.config.core.validators import Limit, function_name, positive
from nnxdsl.config.data import ROLES, FileData
from nnxdsl.config.defaults import default_optimizer
from nnxdsl.config.memory import OFFLOADED
from nnxdsl.config.objectives.online import Online
from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.config.optimizer import MAX_BF16_DECAY
from nnxdsl.config.sharding import MESH_AXES

PACKAGES = Path(__file__).parent / "packages"
sys.path.insert(0, str(PACKAGES))
simpo = importlib.import_module("my_lab.simpo")
THIRD_PARTIES: tuple[type[Spec], ...] = (simpo.SimPO, simpo.Mixture)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PATHS = TEXT.filter(str.strip) | st.lists(TEXT.filter(str.strip), min_size=1, max_size=2).map(tuple)
NAME = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,10}", fullmatch=True)
URL = st.from_regex(r"https?://[a-z]{1,9}:[0-9]{4}", fullmatch=True)
OFFLOAD = st.sampled_from(typing.get_args(OFFLOADED))
TARGETS = st.lists(st.sampled_from(["attention", "mlp", "query", "mlp.up"]), min_size=1, unique=True).map(tuple)
STARTS = st.none() | TEXT.filter(str.strip).map(Weights.PEFT) | TEXT.filter(str.strip).map(Weights.Checkpoint)
LOW_RANK = {
    "targets": TARGETS,
    "ranks": st.lists(st.tuples(st.just("mlp"), st.integers(1, 99)), max_size=1).map(tuple),
    "alphas": st.lists(st.tuples(st.just("up"), st.floats(0.5, 99.0)), max_size=1).map(tuple),
    "start": STARTS,
}
RULES = st.lists(
    st.tuples(
        TEXT,
        st.none()
        | st.sampled_from(MESH_AXES)
        | st.lists(st.sampled_from(MESH_AXES), max_size=2, unique=True).map(tuple),
    ),
    max_size=2,
).map(tuple)


def values(annotation: Any, limit: Limit | None = None) -> st.SearchStrategy[Any]:
    """Every value that a field of this type and limit may hold."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if any(typing.get_origin(arm) is typing.Literal for arm in args):  # other texts are names of imports
            args = tuple(arm for arm in args if arm is not str)
        return st.one_of([st.none() if arm is types.NoneType else values(arm, limit) for arm in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values(args[0]), max_size=3).map(tuple)
        return st.tuples(*(values(arg) for arg in args))
    low, high = None, None
    if limit is not None:
        low = limit.above if limit.above is not None else limit.at_least
        high = limit.below if limit.below is not None else limit.at_most
    if annotation is int:
        result: st.SearchStrategy[Any] = st.integers(0 if low is None else int(low), int(min(10_000, high or 10_000)))
    elif annotation is float:
        result = st.floats(low, high, allow_nan=False, allow_infinity=False) | st.sampled_from([0, -0.0, 1, 5e-6, 1e16])
    elif annotation is JsonObject:
        plain = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | TEXT
        inside = st.lists(plain, max_size=2) | st.dictionaries(TEXT, plain, max_size=2)
        result = st.dictionaries(st.sampled_from(["enable_thinking", "reasoning_effort"]), plain | inside).map(
            JsonObject
        )
    elif annotation is str:
        text = "" if limit is None else limit.describe()
        result = NAME if text.startswith("1 to 64") else URL if text.startswith("a URL") else TEXT
    else:
        return st.deferred(lambda: st.from_type(annotation))
    if limit is function_name:  # what is imported is refused in an object that came as data
        result = result.filter(lambda value: ":" not in value)
    return result.filter(lambda value: limit is None or limit._holds(value))


def of_field(field: Field) -> st.SearchStrategy[Any]:
    """Every value of one declared field."""
    return values(field.type, typing.cast("Limit | None", field.check))


def of_class(cls: type[Spec], **kwargs: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of one class, some fields given and the rest at their defaults or anything that they may hold."""

    def build(example: dict[str, Any]) -> Spec:
        if issubclass(cls, FileData):
            example = with_effect(cls, example)
        positional = [example.pop(name) for name, field in declared(cls).items() if field.positional]
        return cls(*positional, **example)

    if issubclass(cls, FileData):
        kwargs = {"path": PATHS, **kwargs}
    fields = {name: kwargs.get(name, of_field(field)) for name, field in declared(cls).items()}
    needed = {n: s for n, s in fields.items() if declared(cls)[n].default is attrs.NOTHING}
    rest = {n: s for n, s in fields.items() if n not in needed}
    return st.fixed_dictionaries(needed, optional=rest).map(build)


def with_effect(cls: type[Any], example: dict[str, Any]) -> dict[str, Any]:
    """Fields of data without settings that have no effect on its paths, with columns that are read and known roles."""
    paths = (example["path"],) if isinstance(example["path"], str) else example["path"]
    is_hub = any(path.startswith("hf://") for path in paths)
    has_files = any("." in path or "*" in path or "?" in path for path in paths)
    idle = () if is_hub else ("config", "revision", *(("split",) if has_files else ()))
    read = (example.get("field", "text"),) if cls is Data.Text else cls.columns_read
    theirs = dict.fromkeys(name for name, _ in example.get("columns", ()))
    columns = {"columns": tuple(zip(theirs, read or theirs, strict=False))} if theirs else {}
    renamed = dict.fromkeys(name for name, _ in example.get("roles", ()))
    roles = {"roles": tuple(zip(renamed, ROLES, strict=False))} if renamed else {}
    rest = {name: value for name, value in example.items() if name not in (*idle, "columns", "roles")}
    return {**rest, **columns, **roles}


def members_of(family: type[Spec]) -> list[type[Spec]]:
    return [*members(family).values(), *(cls for cls in THIRD_PARTIES if cls.family is family)]


def of_noun(cls: type[Spec]) -> st.SearchStrategy[Any]:
    """Objects of a class that stands alone or is one member of a family."""
    if cls is Evaluation:
        return evaluations(st.none() | st.from_type(Data).filter(lambda data: not isinstance(data, Data.Mixture)))
    if cls is Mesh:
        return meshes()
    if cls is Objective.Sum:
        return sums()
    if issubclass(cls, PolicyGradient):
        return policy_gradients(cls)
    if cls is AdaptiveEntropy:
        return of_class(cls, min_coef=st.floats(0, 0.5), max_coef=st.floats(0.5, 2))
    if cls is RolloutLog:
        return of_class(cls, every_steps=st.integers(1, 9)) | st.just(RolloutLog(every_steps=None))
    if cls is Reward.Model:
        return of_class(cls, weights=of_class(Weights.HF) | of_class(Weights.Checkpoint))
    if cls is Reward.SoftOverlong:
        return of_class(cls, cache=st.integers(1, 9), max_length=st.none() | st.integers(10, 99))
    if cls is Objective.Distill:
        fields = {"teacher": teachers(), "distance": of_family(Distance).filter(lambda kind: kind != SAMPLED)}
        # Hidden states are not kept of a teacher that is asked once.
        return of_class(cls, **fields, top_k=st.none()) | of_class(cls, **fields, feature_weight=st.just(0.0))
    if cls is Objective.OnPolicyDistill:
        return on_policy_distillations()
    if cls.family is Optimizer and cls in members_of(Optimizer):
        return optimizers(cls)
    if cls is Schedule.WSD:
        parts = {name: st.floats(0, 0.5) for name in ("warmup_ratio", "decay_ratio")}
        decays = of_class(cls, **{**parts, "decay_ratio": st.floats(0.01, 0.5)})
        return decays | of_class(cls, **parts, final_ratio=st.just(0.0))
    if cls is Memory:
        return of_class(cls, offload=st.lists(OFFLOAD, unique=True).map(tuple))
    if cls is Weights.Merged:
        return st.builds(merged, TEXT.filter(str.strip), st.lists(st.floats(0.5, 2.0), min_size=1, max_size=2))
    if cls is Reference.Checkpoint:
        return TEXT.filter(str.strip).map(lambda path: cls(Weights.HF(path)))
    if cls in (Adapter.LoRA, Adapter.DoRA):
        return of_class(cls, **LOW_RANK)
    if cls.family is registry["Launcher"]:
        return launchers(cls)
    if cls is Tracking.MLflow:
        return of_class(cls, uri=TEXT.filter(str.strip).map("sqlite:///{}".format))
    if cls.family is registry["Range"]:
        return ranges(cls)
    if cls is Data.Prompts:
        plain = st.just(cls("none").teacher_prompt_template)
        templates = st.just("{prompt}: {privileged_context}") | plain
        without = of_class(cls, privileged_context=st.none(), teacher_prompt_template=plain)
        column = TEXT.filter(str.strip)
        return without | st.builds(attrs.evolve, without, privileged_context=column, teacher_prompt_template=templates)
    if cls is Data.Mixture:
        weights, paths = st.floats(0.5, 2.0), st.lists(TEXT.filter(str.strip), min_size=1, max_size=3, unique=True)
        sources = paths.flatmap(lambda paths: st.fixed_dictionaries({Data.Text(path): weights for path in paths}))
        return of_class(cls, sources=sources.map(lambda sources: tuple(sources.items())))
    if cls is simpo.Mixture:
        pairs = of_class(Data.Preferences, margin=st.none())
        return of_class(cls, sources=st.lists(pairs, min_size=1, max_size=2).map(tuple))
    return of_class(cls, **({"targets": TARGETS} if "targets" in declared(cls) else {}))


def of_family(family: type[Spec]) -> st.SearchStrategy[Any]:
    """Objects of every member of a family, third parties' too."""
    result = [of_noun(cls) for cls in members_of(family) if cls is not Weights.From]
    if family is Weights:
        result.append(st.deferred(lambda: st.from_type(Experiment)).map(Weights.From))
    return st.one_of(result)


def merged(path: str, coefficients: list[float]) -> Spec:
    """Weights with as many adapters in them."""
    adapters = tuple(Weights.PEFT(f"{path}{number}") for number in range(len(coefficients)))
    return Weights.Merged(Weights.HF(path), adapters=adapters, coefficients=tuple(coefficients))


def launchers(cls: type[Spec]) -> st.SearchStrategy[Any]:
    """Launchers whose settings act, each name given once."""
    pairs = st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), TEXT, max_size=2).map(
        lambda actual: tuple(actual.items())
    )
    size = st.none() | st.sampled_from(["64GB", "512MB"])
    fields: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "Slurm": {"memory": size, "options": pairs, "cluster": st.just("slurm")},
        "Ray": {"resources": st.lists(st.tuples(TEXT, st.floats(0.5, 9.0)), max_size=2).map(tuple)},
    }
    result = of_class(cls, **fields.get(cls.tag, {}))
    return result | st.just(cls(cluster="local")) if cls.tag == "Slurm" else result


def ranges(cls: type[Spec]) -> st.SearchStrategy[Any]:
    """Ranges with something between their ends."""
    if cls.tag == "Int":
        numbers = st.tuples(st.integers(-99, 99), st.integers(1, 9), st.integers(1, 9))
        return numbers.map(lambda example: cls(example[0], example[0] + example[1] * example[2], step=example[1]))
    floats = st.floats(1e-9, 1e9), st.floats(1.5, 1e9)
    return st.tuples(*floats).map(lambda example: cls(example[0], example[0] * example[1]))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of any shape, their slices cut out of the axes that may cross them."""
    sizes = {axis: draw(st.sampled_from([1, 1, 2, 3, 4])) for axis in MESH_AXES}
    slices = draw(st.sampled_from([1, sizes["data"], sizes["data"] * sizes["stage"]]))
    fields = {"rules": RULES, "array_rules": st.lists(st.tuples(TEXT, RULES), max_size=2).map(tuple)}
    kinds = {name: draw(of_field(declared(Mesh)[name])) for name in ("indivisible", "zero1")}
    return Mesh(**sizes, **kinds, slices=slices, **{name: draw(strategy) for name, strategy in fields.items()})


@st.composite
def optimizers(draw: st.DrawFn, cls: type[Spec]) -> Spec:
    """Optimizers of a class, with patterns where there is a decay, and in a format that can follow their means."""
    fields = {name: draw(of_field(field)) for name, field in declared(cls).items()}
    if fields.get("weight_decay") == 0:
        fields.pop("undecayed", None)
    if any((fields.get(name) or 0) > MAX_BF16_DECAY for name in ("b1", "b2", "momentum")):
        fields = {name: value for name, value in fields.items() if not name.endswith("_dtype")}
    return cls(**fields)


@st.composite
def sums(draw: st.DrawFn) -> Spec:
    """Sums of objectives of pairs."""
    pairs = [cls for cls in members_of(Objective) if cls.batch_kind == "pairs" and cls.reads_logps]
    pairs.remove(Objective.Sum)
    terms = draw(st.lists(st.sampled_from(pairs).flatmap(of_noun), min_size=1, max_size=3))
    once = {"ld_alpha": 1.0, "mtp_loss_weight": 0.0}  # of the sum's one pass
    terms = [attrs.evolve(term, **{name: once[name] for name in once.keys() & declared(type(term))}) for term in terms]
    weights = draw(st.lists(values(float, positive), min_size=len(terms), max_size=len(terms)))
    return Objective.Sum(terms=tuple(terms), weights=tuple(weights))


def teachers() -> st.SearchStrategy[Any]:
    """Models that a student can be distilled from."""
    fields = {"weights": st.just(Weights.Random())}
    return st.sampled_from(members_of(Model)).flatmap(lambda model: of_class(model, **fields))


@st.composite
def on_policy_distillations(draw: st.DrawFn) -> Spec:
    """A teacher of sampled completions, with settings that act."""
    cls = Objective.OnPolicyDistill
    fields = {n: draw(of_field(f)) for n, f in declared(cls).items() if n not in ("teacher", "rewards")}
    names = draw(st.lists(st.sampled_from(("math", "code", "a b")), min_size=2, unique=True))
    several = draw(st.booleans()) and fields["teacher_server"] is None
    fields["teacher_servers"] = tuple((name, draw(of_noun(TeacherServer))) for name in names) if several else ()
    fields["teacher"] = None if several or fields["teacher_server"] is not None else draw(teachers())
    if fields["teacher"] is None:
        fields |= {"temperature": 1.0} | ({"distance": SAMPLED} if fields["teacher_top_k"] is None else {})
    if fields["teacher"] is not None or fields["distance"] == SAMPLED:
        fields["teacher_top_k"] = None
    fields |= {"num_speculative_tokens": 0, "kv_cache_dtype": None} if fields["engine"] is not None else {}
    if fields["distance"] == SAMPLED:
        fields |= {"top_k": None, "top_p": None}
    fields["num_generations"] = draw(st.integers(1, 4))
    return cls(**fields, rewards=draw(rewards_of(fields["environment"], least=0)))


@st.composite
def rewards_of(draw: st.DrawFn, environment: Environment | None, least: int) -> tuple[Reward, ...]:
    """Rewards of different names, of an environment only where there is one."""
    kinds = of_family(Reward)
    if environment is None:
        kinds = kinds.filter(lambda reward: not isinstance(reward, Reward.Environment))
    return tuple(draw(st.lists(kinds, min_size=least, max_size=3, unique_by=lambda reward: reward.name)))


def without_context(data: Spec) -> Spec:
    """Prompts that a teacher sees as the student does."""
    plain = Data.Prompts("none").teacher_prompt_template
    return attrs.evolve(data, privileged_context=None, teacher_prompt_template=plain)


SAMPLED = Distance.SampledReverseKL()


@st.composite
def policy_gradients(draw: st.DrawFn, cls: type[PolicyGradient]) -> Spec:
    """Objectives of sampled completions, with settings that act."""
    known = declared(cls)
    fields = {n: draw(of_field(f)) for n, f in known.items() if n not in ("rewards", "num_generations")}
    fields |= {"num_speculative_tokens": 0, "kv_cache_dtype": None, "router_replay": False} if fields["engine"] else {}
    if fields["engine"] is not None and fields["engine"].max_staleness and fields["importance_sampling"] is None:
        fields["importance_sampling"] = ImportanceSampling()
    if fields["num_iterations"] == 1:
        fields |= {name: known[name].default for name in cls.off_policy_fields}
    if fields["adaptive_entropy"] is not None:
        bounds = fields["adaptive_entropy"].min_coef, fields["adaptive_entropy"].max_coef
        fields["entropy_coef"] = draw(st.floats(*bounds))
    if fields.get("baseline", cls.baseline) == "none":
        fields["max_num_gen_batches"] = 1
    if fields["beta"] == 0 and "kl_estimator" in known:
        fields["kl_estimator"] = "k3"
    if fields["beta"] == 0 or fields.get("kl_estimator") != "k3":
        fields |= {"use_bias_correction_kl": False} if "use_bias_correction_kl" in known else {}
    rewards = draw(rewards_of(fields["environment"], least=1))
    return cls(**fields, rewards=rewards, num_generations=draw(st.integers(2, 4)))


@st.composite
def evaluations(draw: st.DrawFn, data: st.SearchStrategy[Any]) -> Evaluation:
    prompts = tuple(draw(st.lists(TEXT.filter(str.strip), max_size=3)))
    fields = {n: draw(of_field(f)) for n, f in declared(Evaluation).items() if n not in ("data", "prompts")}
    if not prompts:
        held = draw(data.filter(lambda source: source is not None))
        return Evaluation(every_steps=fields["every_steps"], data=held)
    if fields["temperature"] == 0.0:
        fields |= {"top_k": None, "top_p": None}
    return Evaluation(**fields, prompts=prompts, data=draw(data))


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    """Valid experiments: what is checked between fields is made to fit, everything else is anything."""
    objective = draw(st.from_type(Objective))
    sources = [cls for cls in members_of(Data) if cls.batch_kind == objective.batch_kind]
    if Data.Text in sources and objective.loss_on != "all":
        sources.remove(Data.Text)
    data = st.one_of([of_noun(cls) for cls in sources])
    if not objective.reads_margins:
        data = data.map(lambda source: attrs.evolve(source, margin=None) if source.has_margins else source)
    if objective.batch_kind == "prompts":  # evaluations would have to have such a column as well
        data = data.map(lambda source: without_context(source) if source.has_teacher_prompts else source)
    fitted = {
        "objective",
        "data",
        "mesh",
        "microbatch_size",
        "batch_size",
        "evaluation",
        "quantization",
        "model",
        "memory",
        "reference",
        "outer",
        "rollouts",
    }
    fields = {n: draw(of_field(f)) for n, f in declared(Experiment).items() if n not in {*fitted, "precision"}}
    if isinstance(objective, Online):
        fields["batching"] = registry["Batching.Padded"]()
        fields["rollouts"] = draw(st.sampled_from((RolloutLog(), RolloutLog(every_steps=None), RolloutLog(prompts=2))))
    fields["tracking"] = tuple(dict.fromkeys(fields["tracking"]))
    mesh = draw(of_noun(Mesh))
    micro = mesh.data * mesh.fsdp * mesh.expert * draw(st.integers(1, 3))
    adapter = fields["adapter"]
    if adapter is not None:
        fields["frozen"] = ()
    if adapter is not None and adapter.dropout and (isinstance(fields["batching"], Batching.Packed) or mesh.stage > 1):
        fields["adapter"] = adapter = attrs.evolve(adapter, dropout=0.0)
    modes = {"auto"} if not objective.needs_reference else {"auto", "online"}
    modes |= {"cached"} if objective.needs_reference and objective.batch_kind in ("pairs", "feedback") else set()
    reference = draw(st.sampled_from(sorted(modes)))
    compared: list[type[Spec]] = [Reference.Initial]
    compared += [Reference.Synced] if objective.needs_reference and reference != "cached" else []
    is_free = isinstance(objective, Objective.Hinge | Objective.EXO) and reference == "auto"
    compared += [Reference.Uniform] if is_free else []
    fields["reference"] = draw(st.sampled_from(compared).flatmap(of_noun))
    if isinstance(fields["reference"], Reference.Uniform):
        objective = attrs.evolve(objective, divergence=Divergence.ReverseKL())
    alone = mesh.stage > 1 or objective.compares_across_batch or isinstance(objective, Online)
    alone |= isinstance(fields["batching"], Batching.Packed) or isinstance(fields["reference"], Reference.Synced)
    fields["outer"] = None if alone else draw(st.sampled_from((None, Outer.DiLoCo(workers=mesh.data, lr=1.0))))
    parts = {"optimizer", "frozen" if adapter is not None else "reference"}
    parts -= set() if objective.needs_reference and reference == "online" else {"reference"}
    offload = st.lists(st.sampled_from(sorted(parts)), unique=True).map(tuple)
    frozen = {} if adapter is not None else {"frozen": st.just("auto")}
    model = draw(of_noun(draw(st.sampled_from(members_of(Model)))))
    if isinstance(model.weights, Weights.PEFT):
        model = attrs.evolve(model, weights=Weights.Random())
    if isinstance(model.weights, Weights.From):
        model = attrs.evolve(model.weights.experiment.model, weights=model.weights)
    if "router_aux_loss_coef" in declared(type(model)) and mesh.stage > 1:
        model = attrs.evolve(model, router_aux_loss_coef=0.0)
    quantization = draw(st.none() | st.from_type(Quantization).filter(lambda q: q.freezes == (adapter is not None)))
    if isinstance(objective, Online) and objective.engine is not None:
        quantization = None
        if adapter is not None and not isinstance(adapter, LowRank):
            objective = attrs.evolve(objective, engine=None)
        elif not isinstance(adapter, LoRA) or adapter.ranks or adapter.alphas:
            objective = attrs.evolve(objective, engine=attrs.evolve(objective.engine, adapter_only=False))
    if "indexer_stage" in declared(type(model)):
        plain = isinstance(objective, Objective.SFT) and not (objective.z_loss or fields["frozen"] or quantization)
        model = draw(with_indexers(model, is_trained=adapter is None and mesh.stage == 1, is_plain=plain))
        if model.indexer_stage == "dense_warmup":
            objective = attrs.evolve(objective, mtp_loss_weight=0.0)
    if "mtp_layers" in declared(type(model)) and isinstance(model.weights, Weights.From):
        model = attrs.evolve(model, mtp_layers=0)
    further = model.mtp_layers and (quantization is None or quantization.freezes)
    if "mtp_loss_weight" in declared(type(objective)) and not further:
        objective = attrs.evolve(objective, mtp_loss_weight=0.0)
    if objective.teacher is not None and "mtp_layers" in declared(type(objective.teacher)):
        objective = attrs.evolve(objective, teacher=attrs.evolve(objective.teacher, mtp_layers=0))
    is_plain = adapter is None and quantization is None and fields["outer"] is None and mesh.stage == 1
    if isinstance(fields["optimizer"], Optimizer.Muon) and not (is_plain and objective.mtp_loss_weight == 0):
        fields["optimizer"] = attrs.evolve(fields["optimizer"], max_attention_logit=None)
    if default_optimizer(objective, adapter) is not None and draw(st.booleans()):
        del fields["optimizer"]
    fields["data"] = draw(data)
    fields["evaluation"] = draw(st.none() | evaluations(st.none() | data))
    if isinstance(fields["data"], Data.Mixture) or objective.batch_kind == "feedback":
        fields["test_size"] = None
    elif fields["test_size"] is not None and fields["evaluation"] is None:
        del fields["evaluation"]
    elif fields["test_size"] is not None:
        fields["evaluation"] = attrs.evolve(fields["evaluation"], data=None)
    if fields["steps"] is not None or isinstance(fields["data"], Data.Mixture):
        fields |= {"steps": fields["steps"] or draw(st.integers(1, 10)), "epochs": None}
    elif fields["epochs"] is None:
        del fields["steps"], fields["epochs"]
    return Experiment(
        **fields,
        objective=objective,
        mesh=mesh,
        microbatch_size=draw(st.sampled_from([None, micro])),
        batch_size=micro * draw(st.integers(1, 3)) * getattr(objective, "num_generations", 1),
        quantization=quantization,
        precision=draw(of_class(registry["Precision"], **frozen)),
        model=model,
        memory=attrs.evolve(draw(of_class(Memory, offload=offload)), reference=reference),
    )


@st.composite
def with_indexers(draw: st.DrawFn, model: Model, *, is_trained: bool, is_plain: bool) -> Model:
    """A model whose indexers are trained, by themselves or with the rest, where they can be."""
    stages = [(0.0, "sparse"), *([(0.5, "sparse")] if is_trained else [])]
    stages += [(0.5, "dense_warmup")] if is_trained and is_plain else []
    coefficient, stage = draw(st.sampled_from(stages))
    changed = {"indexer_loss_coef": coefficient, "indexer_stage": stage}
    return attrs.evolve(model, **changed, **({"router_aux_loss_coef": 0.0} if stage == "dense_warmup" else {}))


for noun in registry.values():
    if noun is Experiment:
        st.register_type_strategy(noun, experiments())
    elif noun.family is noun:
        st.register_type_strategy(noun, of_family(noun) if is_family(noun) else of_noun(noun))


def design_experiment(**changes: Any) -> Experiment:
    """The first example of the documentation."""
    fields: dict[str, Any] = {
        "name": "dpo-gemma3-1b",
        "model": Model.Gemma3("1b", weights=Weights.HF("google/gemma-3-1b-it")),
        "adapter": Adapter.LoRA(rank=16, alpha=32.0, targets=("attention", "mlp")),
        "quantization": Quantization.NF4(block_size=64),
        "objective": Objective.DPO(beta=0.1),
        "data": Data.Preferences("data/ultrafeedback.jsonl", max_prompt_length=512, max_completion_length=512),
        "optimizer": Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-6, warmup_ratio=0.1), max_grad_norm=1.0),
        "batch_size": 64,
        "steps": 2_000,
        "seed": 0,
        "mesh": Mesh(fsdp=4, tensor=2),
        "microbatch_size": 8,
        "evaluation": Evaluation(every_steps=200, prompts=("Explain DPO to a child.",)),
        "checkpoint": Checkpoint(every_steps=500, keep=2),
    }
    return Experiment(**{**fields, **changes})


@pytest.fixture(scope="session")
def design() -> Any:
    """A function that builds the first example of the documentation, some fields changed."""
    return design_experiment


@pytest.fixture(scope="session")
def packages() -> Path:
    """The directory that holds the package of a third party; also on this process's path."""
    return PACKAGES


@pytest.fixture(scope="session")
def field_values() -> Any:
    """A function that gives the strategy of a declared field's values."""
    return of_field
