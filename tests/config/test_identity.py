"""The identity of a run: every field of every class, independent of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, get_args

import attrs
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from nnxdsl import (
    Adapter,
    AdaptiveEntropy,
    BadRows,
    Batching,
    Data,
    Distance,
    Divergence,
    Engine,
    Environment,
    Evaluation,
    Experiment,
    Guard,
    ImportanceSampling,
    Model,
    Objective,
    Optimizer,
    Order,
    Outer,
    Quantization,
    Reference,
    Reward,
    Schedule,
    Spec,
    SpecError,
    TeacherServer,
    Tokenizer,
    Tracking,
    Weights,
    evolve,
    flatten,
    from_json,
    get,
    to_json,
)
from nnxdsl.config.core.base import declared, is_family, members, registry
from nnxdsl.config.core.run_id import canonical, fingerprint
from nnxdsl.config.objectives.multi_token import WithMTP
from nnxdsl.config.objectives.policy_gradient import PolicyGradient

OUTSIDE = {"name", "notes", "evaluation", "checkpoint", "rollouts", "tracking"}
OUTSIDE |= {"mesh", "microbatch_size", "batching", "memory"}

OF_PAIRS = (
    Objective.DPO(divergence=Divergence.Alpha()),
    Objective.Sum(terms=(Objective.DPO(), Objective.ChosenSFT()), weights=(1.0, 0.2)),
    *(cls() for cls in members(Objective).values() if cls.batch_kind == "pairs" and cls is not Objective.Sum),
)
"""An object of every class that learns from pairs."""

WITH_MTP = (
    Objective.SFT(loss_on="all"),
    Objective.Distill(teacher=Model.DeepSeekV3("tiny")),
    Objective.KTO(),
    *(one for one in OF_PAIRS if isinstance(one, WithMTP)),
)
"""An object of every class that multi-token prediction can be added to."""


def further(objective: Objective) -> dict[str, Any]:
    """Fields of an experiment whose model has a layer for multi-token prediction."""
    data = {"pairs": Data.Preferences("pairs.jsonl"), "feedback": Data.Feedback("answers.jsonl")}
    return {
        "model": Model.DeepSeekV3("tiny", mtp_layers=1),
        "objective": attrs.evolve(objective, mtp_loss_weight=0.3),
        "data": data.get(objective.batch_kind, Data.Text("text.jsonl") if objective.loss_on == "all" else CHATS),
        "adapter": None,
        "quantization": None,
        "microbatch_size": None,
    }


CHATS = Data.Conversations("chats.jsonl")
RATE = Schedule.WSD(peak_lr=1e-3)
OPTIMIZERS = (
    Optimizer.Lion(schedule=RATE, weight_decay=0.1),
    Optimizer.Adafactor(schedule=Schedule.InverseSqrt(peak_lr=1e-3), weight_decay=0.1),
    Optimizer.Muon(schedule=RATE, weight_decay=0.1),
    Optimizer.AdamW(schedule=RATE, weight_decay=0.1, b2=0.9),
)
"""An object of every class that updates, so that every field of its can be another."""


MERGED = Weights.Merged(Weights.HF("base"), adapters=(Weights.PEFT("adapter"),), coefficients=(0.5,))

NEED_MORE = ("Function", "SoftOverlong", "Model")
REWARDS = (
    Reward("a"),
    Reward.SoftOverlong(cache=2),
    Reward.Model(Weights.HF("rated")),
    *(cls() for name, cls in members(Reward).items() if name not in NEED_MORE),
)
"""An object of every class of rewards."""

TRACKING = (
    Tracking.TensorBoard("events"),
    Tracking.WandB("project"),
    Tracking.Trackio("project"),
    Tracking.MLflow("sqlite:///mlflow.db"),
)

ONLY = {
    ("Experiment", "epochs"): "epochs",
    ("Experiment", "frozen"): "frozen",
    ("Experiment", "rollouts"): "GRPO",
    ("Data.Preferences", "margin"): "rated",
    ("Data.Prompts", "privileged_context"): "told",
    ("Data.Prompts", "teacher_prompt_template"): "told",
    ("Objective.OnPolicyDistill", "teacher_server"): "teacher server",
    ("Objective.OnPolicyDistill", "teacher_servers"): "teacher servers",
    ("Objective.OnPolicyDistill", "teacher_top_k"): "teacher servers",
    ("RolloutLog", "every_steps"): "GRPO",
    ("RolloutLog", "prompts"): "GRPO",
    ("Optimizer.AdamW", "undecayed"): "optimizer 3",
    ("Optimizer.AdamW", "nu_dtype"): "optimizer 3",
    ("Optimizer.Muon", "max_attention_logit"): "clipped",
    **{
        (kind.__qualname__, "mtp_loss_weight"): f"further {kind.__name__}"
        for kind in registry.values()
        if issubclass(kind, WithMTP) and kind is not WithMTP
    },
    ("Model.DeepSeekV3", "mtp_layers"): "DeepSeekV3",
    **{
        (kind.__qualname__, name): f"indexers {kind.__name__}"
        for kind in (Model.DeepSeekV32, Model.GLM5, Model.HF)
        for name in ("indexer_loss_coef", "indexer_stage")
    },
}
"""Fields that can be another in one experiment alone."""

TRAINED = (Quantization.QAT, Quantization.Int8Training, Quantization.FP8Training)
"""Every class that rounds what is trained."""


def model_of(cls: type[Spec]) -> Spec:
    """A model of any family: its first size, or a directory, and random weights."""
    first = next(field for field in declared(cls).values() if field.positional)
    return cls(*(get_args(first.type)[:1] or ("model",)), weights=Weights.Random())


def samples(design: Any) -> dict[str, Experiment]:
    """Experiments that together hold every built-in class."""
    sft = design(
        name="sft",
        model=Model.Gemma3("1b", tokenizer=Tokenizer.Bytes()),
        objective=Objective.SFT(),
        data=Data.Conversations("chats.jsonl", bad_rows=BadRows.Skip(), order=Order.AsInFile()),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        quantization=Quantization.Int8(),
        batching=Batching.Packed(length=4096),
    )
    return {
        "design": design(
            evaluation=Evaluation(every_steps=200, prompts=("Hello?",), temperature=1.0), tracking=TRACKING
        ),
        "sft": sft,
        "text": design(
            model=Model.Gemma3("1b", weights=Weights.Checkpoint("runs/a"), tokenizer=Tokenizer.File("t.json")),
            objective=Objective.SFT(loss_on="all"),
            data=Data.Text("text.jsonl"),
            optimizer=Optimizer.AdamW(schedule=Schedule.WarmupLinear(peak_lr=0.1)),
            evaluation=Evaluation(every_steps=1, data=Data.Text("held_out.jsonl"), prompts=("Hello?",)),
        ),
        "mixed": design(
            objective=Objective.SFT(loss_on="all"),
            data=Data.Mixture({Data.Text("web.jsonl"): 3, Data.Text("code.jsonl"): 1}),
        ),
        "compared": design(reference=Reference.Checkpoint(Weights.HF("other"))),
        "synced": design(reference=Reference.Synced()),
        "feedback": design(objective=Objective.KTO(), data=Data.Feedback("answers.jsonl"), microbatch_size=None),
        **{
            kind.__name__: design(
                objective=kind(
                    rewards=REWARDS,
                    num_iterations=2,
                    beta=0.1,
                    environment=Environment("game"),
                    importance_sampling=ImportanceSampling(),
                    entropy_coef=0.5,
                    adaptive_entropy=AdaptiveEntropy(target=0.5),
                    **({"baseline": "mean"} if "baseline" in declared(kind) else {}),
                ),
                data=Data.Prompts("prompts.jsonl"),
                quantization=None,
            )
            for kind in members(Objective).values()
            if issubclass(kind, PolicyGradient)
        },
        "taught": design(
            objective=Objective.Distill(teacher=Model.Gemma3("tiny"), distance=Distance.JSD()),
            data=Data.Conversations("chats.jsonl"),
        ),
        "online": design(
            objective=Objective.OnPolicyDistill(
                teacher=Model.Gemma3("tiny"),
                rewards=(Reward("length"),),
                environment=Environment("game"),
            ),
            data=Data.Prompts("prompts.jsonl"),
            quantization=None,
        ),
        "told": design(
            objective=Objective.OnPolicyDistill(teacher=Model.Gemma3("tiny")),
            data=Data.Prompts("prompts.jsonl", privileged_context="answer"),
            evaluation=None,
            quantization=None,
        ),
        "served": design(
            objective=Objective.DAPO(
                rewards=(Reward("length"),),
                engine=Engine.Server("http://localhost:8000"),
                importance_sampling=ImportanceSampling(),
            ),
            data=Data.Prompts("prompts.jsonl"),
            quantization=None,
        ),
        "teacher server": design(
            objective=Objective.OnPolicyDistill(
                teacher_server=TeacherServer("http://localhost:8000"), distance=Distance.SampledReverseKL()
            ),
            data=Data.Prompts("prompts.jsonl"),
            quantization=None,
        ),
        "teacher servers": design(
            objective=Objective.OnPolicyDistill(
                teacher_servers=dict.fromkeys(("math", "code"), TeacherServer("http://localhost:8000")),
                teacher_top_k=8,
            ),
            data=Data.Prompts("prompts.jsonl"),
            quantization=None,
        ),
        "rated": design(
            objective=Objective.Reward(),
            data=Data.Preferences("pairs.jsonl", margin="by"),
            evaluation=None,
            microbatch_size=None,
        ),
        "merged": design(model=Model.Gemma3("1b", weights=MERGED)),
        "adapted": design(adapter=Adapter.DoRA(start=Weights.PEFT("adapter"))),
        **{kind.__name__: design(quantization=kind()) for kind in (Quantization.Int4, Quantization.FP8)},
        **{kind.__name__: design(quantization=kind(), adapter=None) for kind in TRAINED},
        **{f"optimizer {number}": design(optimizer=each) for number, each in enumerate(OPTIMIZERS)},
        "frozen": design(adapter=None, quantization=None, frozen=("embed",)),
        "clipped": design(optimizer=Optimizer.Muon(schedule=RATE), adapter=None, quantization=None),
        **{f"further {type(each).__name__}": design(**further(each)) for each in WITH_MTP},
        **{
            f"indexers {kind.__name__}": attrs.evolve(
                sft, model=attrs.evolve(model_of(kind), indexer_loss_coef=0.5), adapter=None, quantization=None
            )
            for kind in (Model.DeepSeekV32, Model.GLM5, Model.HF)
        },
        "apart": design(outer=Outer.DiLoCo(every_steps=10)),
        "epochs": design(steps=None, epochs=2.0),
        "skipping": design(guard=Guard.Skip()),
        "spikes": design(guard=Guard.SkipSpikes()),
        "staged": design(model=Model.Gemma3("1b", weights=Weights.From(sft))),
        **{f"pairs {number}": design(objective=each, microbatch_size=None) for number, each in enumerate(OF_PAIRS)},
        **{
            name: design(model=model_of(cls), batching=Batching.Bucketed(), microbatch_size=None)
            for name, cls in members(Model).items()
        },
    }


def places(experiments: dict[str, Experiment]) -> dict[tuple[str, str], tuple[Experiment, str]]:
    """Every (class, field) with one experiment and the path at which it stands there."""
    result: dict[tuple[str, str], tuple[Experiment, str]] = {}
    for called, experiment in experiments.items():
        for path in flatten(experiment):
            if path.rpartition(".")[2] == "type":
                node = path.removesuffix("type")
                spec = get(experiment, node.rstrip(".")) if node else experiment
                for name in declared(type(spec)):
                    if ONLY.get((type(spec).__qualname__, name), called) != called:
                        continue
                    result.setdefault((type(spec).__qualname__, name), (experiment, node + name))
    return result


@pytest.fixture(scope="module")
def sample_places(design: Any) -> dict[tuple[str, str], tuple[Experiment, str]]:
    return places(samples(design))


BESIDE = {"Launcher", "Range", "Pruner"}
"""Families of what stands beside an experiment."""
INSIDE = [cls for cls in registry.values() if not is_family(cls) and cls.family.__name__ not in BESIDE]
FIELDS = [(cls.__qualname__, name) for cls in INSIDE for name in declared(cls)]
SLOW = {("Weights.From", "experiment")}
"""Another experiment that goes into its place takes half a minute to be drawn."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [pytest.param(*field, marks=pytest.mark.slow) if field in SLOW else field for field in FIELDS],
    ids=lambda part: part,
)
def test_every_field_counts_or_not(
    owner: str, name: str, sample_places: dict[tuple[str, str], tuple[Experiment, str]], field_values: Any
) -> None:
    experiment, path = sample_places[owner, name]
    if owner.startswith("Data.") and name in ("split", "config", "revision"):  # they act on datasets of the Hub
        experiment = evolve(experiment, {path.replace(name, "path"): "hf://lab/rows"})

    def another(value: object) -> bool:
        if value == get(experiment, path):
            return False
        try:
            evolve(experiment, {path: value})
        except SpecError:
            return False
        return True

    checks = {"deadline": None, "suppress_health_check": list(HealthCheck)}  # a busy machine is late at times
    quick = settings(max_examples=3000, phases=[Phase.generate], **checks)
    rendered = field_values(declared(registry[owner])[name])
    if name == "teacher_server":
        rendered = st.just(TeacherServer("http://localhost:8000", model="another"))
    if name == "teacher_servers":
        rendered = st.just((("math", TeacherServer("http://localhost:8000")), ("logic", TeacherServer("http://1:1"))))
    if name == "teacher_prompt_template":
        rendered = st.just("{privileged_context} {prompt}")
    if name == "columns":
        rendered = st.just((("theirs", "text" if owner == "Data.Text" else "prompt"),))
    if name == "roles":
        rendered = st.just((("bot", "assistant"),))
    changed = evolve(experiment, {path: find(rendered, another, settings=quick)})
    outside = path.replace("model.weights.experiment.", "").split(".")[0] in OUTSIDE
    outside |= name in registry[owner].outside_identity
    assert (fingerprint(changed) == fingerprint(experiment)) == outside


def test_the_samples_hold_every_class(sample_places: dict[tuple[str, str], tuple[Experiment, str]]) -> None:
    held = {owner for owner, _ in sample_places}
    fieldless = {cls.__qualname__ for cls in INSIDE if not declared(cls)}
    assert held | fieldless == {cls.__qualname__ for cls in INSIDE}


def test_the_earlier_stage_counts_by_its_own_mathematics(design: Any) -> None:
    staged = samples(design)["staged"]
    for path, value in (("name", "other"), ("mesh.fsdp", 1), ("notes", "!"), ("checkpoint.keep", 9)):
        assert evolve(staged, {f"model.weights.experiment.{path}": value}).id == staged.id
    longer = evolve(staged, {"model.weights.experiment.steps": 3})
    assert get(longer, "model.weights.experiment.steps") == 3
    assert longer.id != staged.id


@attrs.frozen(kw_only=True)
class Grown(Spec):
    """A class that has a second field by now; the default of that is what it did before."""

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"second"})

    first: int = 1
    second: float = 0.0


def test_a_field_that_came_later_counts_where_it_is_not_its_default() -> None:
    tag = f"{Grown.__module__}:Grown"
    assert canonical(Grown()) == f'{{"first":1,"type":"{tag}"}}'
    assert canonical(Grown(second=0.5)) == f'{{"first":1,"second":0.5,"type":"{tag}"}}'
    assert canonical(Grown(first=2, second=0)) == f'{{"first":2,"type":"{tag}"}}'


def test_later_fields_are_fields_with_defaults() -> None:
    for cls in registry.values():
        for name in cls.fields_added_later:
            assert declared(cls)[name].default is not attrs.NOTHING, (cls, name)


def test_layers_are_the_same_by_the_names_of_transformers_and_by_ours(design: Any) -> None:
    def of(*targets: str, **fields: Any) -> str:
        both = {"adapter": Adapter.LoRA(targets=targets, **fields), "quantization": Quantization.NF4(targets=targets)}
        return design(**both).id

    assert of("all-linear") == of("attention", "mlp") == design().id
    assert of("q_proj", "up_proj") == of("attention.query", "up")
    assert of("qkv_proj") == of("q_proj", "k_proj", "v_proj") == of("attention.query", "k_proj", "attention.value")
    assert of("q_proj", "attention.query") == of("q_proj") != of("k_proj")
    patterns = (("gate_up_proj", 8), ("up_proj", 2)), (("gate", 8), ("up", 8))
    ranks, alphas = ({of("mlp", **{name: each}) for each in patterns} for name in ("ranks", "alphas"))
    assert len(ranks) == len(alphas) == 1
    assert of("mlp", ranks=patterns[1]) != of("mlp", ranks=patterns[1][:1])
    again = Weights.From(design(adapter=Adapter.LoRA(targets=("q_proj",)), evaluation=None))
    assert design(adapter=Adapter.LoRA(targets=("attention.query",), start=again)).id  # continued as the same


def test_the_id_is_the_name_and_eight_digits(design: Any) -> None:
    assert design().id == f"dpo-gemma3-1b-{fingerprint(design())[:8]}"
    assert design().id.rpartition("-")[2] == "9220130e"


def test_the_canonical_text_writes_defaults_out(design: Any) -> None:
    small = design(model=Model.Gemma3("tiny"), adapter=None, quantization=None)
    assert canonical(small) == (
        '{"adapter":null,"batch_size":64,'
        '"data":{"bad_rows":{"type":"Stop"},"max_completion_length":512,"max_prompt_length":512,'
        '"order":{"type":"Shuffled"},"path":"data/ultrafeedback.jsonl","type":"Preferences"},'
        '"model":{"size":"tiny","tokenizer":{"type":"Auto"},"type":"Gemma3","weights":{"type":"Random"}},'
        '"objective":{"beta":0.1,"divergence":{"type":"ReverseKL"},"label_smoothing":0.0,"type":"DPO"},'
        '"optimizer":{"b1":0.9,"b2":0.999,"eps":1e-08,"max_grad_norm":1.0,'
        '"schedule":{"final_ratio":0.0,"peak_lr":5e-06,"type":"WarmupCosine","warmup_ratio":0.1},'
        '"type":"AdamW","weight_decay":0.0},'
        '"precision":{"compute":"auto","frozen":"auto","type":"Precision"},"quantization":null,"seed":0,"steps":2000,'
        '"type":"Experiment"}'
    )


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_another_process_finds_the_same_identity(hash_seed: str, design: Any, packages: Path, tmp_path: Path) -> None:
    experiments = samples(design)
    for name, experiment in experiments.items():
        (tmp_path / f"{name}.json").write_text(to_json(experiment))
    code = (
        "import pathlib, sys\n"
        "from nnxdsl import from_json, to_json\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.json')):\n"
        "    experiment = from_json(path.read_text())\n"
        "    assert to_json(experiment) == path.read_text()\n"
        "    print(experiment.id)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [experiments[name].id for name in sorted(experiments)]
    assert all(from_json(to_json(experiment)) == experiment for experiment in experiments.values())
