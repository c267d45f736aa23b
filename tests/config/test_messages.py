"""Whole error messages: path, problem and fix, and all problems at once."""

from __future__ import annotations

import math
import pickle  # noqa: TID251 - of objects that this test made itself
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl import (
    Adapter,
    Checkpoint,
    Data,
    Evaluation,
    Experiment,
    Mesh,
    Model,
    Objective,
    Precision,
    Schedule,
    SpecError,
    Sweep,
    Weights,
    cross,
    diff,
    evolve,
    from_dict,
    from_json,
    get,
    product,
    to_dict,
    zipped,
)

OBJECTIVES = (
    "Objective.SFT, Objective.DPO, Objective.RobustDPO, Objective.IPO, Objective.Hinge, "
    "Objective.LengthNormalizedDPO, Objective.EXO, Objective.DiscoPOP, Objective.NCA, Objective.BCO, Objective.SPPO, "
    "Objective.APOZero, Objective.APODown, Objective.AOT, Objective.AOTUnpaired, Objective.ORPO, Objective.SimPO, "
    "Objective.CPO, Objective.ChosenSFT, Objective.Sum, Objective.Distill, Objective.OnPolicyDistill, Objective.GRPO, "
    "Objective.DAPO, Objective.DrGRPO, Objective.GSPO, Objective.CISPO, Objective.SAPO, Objective.GMPO, "
    "Objective.LUSPO, Objective.VESPO, "
    "Objective.DPPO, Objective.RLOO, Objective.ReinforcePlusPlus, Objective.KTO, Objective.Reward"
)
SHORT = OBJECTIVES.replace("Objective.", "")


def refused(build: Callable[[], object]) -> str:
    """The message of the SpecError that `build` raises."""
    with pytest.raises(SpecError) as caught:
        build()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems, again.where) == (
        str(caught.value),
        caught.value.problems,
        caught.value.where,
    )
    return str(caught.value)


ONE_OBJECT: dict[str, tuple[Callable[[], object], str]] = {
    "unknown field": (
        lambda: Objective.DPO(bta=0.1),  # type: ignore[call-arg]
        "1 problem in Objective.DPO\n  bta: DPO has no field 'bta'; did you mean 'beta'?",
    ),
    "unknown field, none near": (
        lambda: Objective.DPO(clip=0.1),  # type: ignore[call-arg]
        "1 problem in Objective.DPO\n  clip: DPO has no field 'clip'; there are: beta, divergence, label_smoothing, "
        "ld_alpha, mtp_loss_weight, weighting",
    ),
    "text for int": (lambda: Mesh(tensor="3"), "1 problem in Mesh\n  tensor: expected int, got '3'"),
    "float for int": (lambda: Mesh(tensor=2.0), "1 problem in Mesh\n  tensor: expected int, got 2.0"),
    "bool for int": (lambda: Mesh(tensor=True), "1 problem in Mesh\n  tensor: expected int, got True"),
    "bool for float": (
        lambda: Objective.DPO(beta=True),
        "1 problem in Objective.DPO\n  beta: expected float, got True",
    ),
    "int for text": (lambda: Weights.HF(3), "1 problem in Weights.HF\n  path: expected str, got 3"),
    "None": (
        lambda: Objective.DPO(beta=None),
        "1 problem in Objective.DPO\n  beta: expected float, got None",
    ),
    "nan": (
        lambda: Objective.DPO(beta=math.nan),
        "1 problem in Objective.DPO\n  beta: expected a finite number, got nan",
    ),
    "too great for a float": (
        lambda: Objective.DPO(beta=10**400),
        f"1 problem in Objective.DPO\n  beta: expected a finite number, got 1{'0' * 56}...",
    ),
    "half a character": (
        lambda: Weights.HF("\ud800"),
        "1 problem in Weights.HF\n  path: expected text that UTF-8 can hold, got '\\ud800'",
    ),
    "blank": (
        lambda: Weights.HF(" \n"),
        "1 problem in Weights.HF\n  path: expected text that is not blank, got ' \\n'",
    ),
    "below the limit": (
        lambda: Objective.DPO(beta=0, label_smoothing=0.5),
        "2 problems in Objective.DPO\n  beta: expected a value > 0, got 0.0\n"
        "  label_smoothing: expected a value >= 0 and < 0.5, got 0.5",
    ),
    "another choice": (
        lambda: Objective.SFT(loss_on="assistent"),
        "1 problem in Objective.SFT\n"
        "  loss_on: expected one of 'assistant', 'last_assistant', 'completion', 'all', got 'assistent'; "
        "did you mean 'assistant'?",
    ),
    "list for tuple": (
        lambda: Adapter.LoRA(targets=["attention", "mlp"]),
        "1 problem in Adapter.LoRA\n"
        "  targets: expected tuple[str, ...], got ['attention', 'mlp']; write ('attention', 'mlp')",
    ),
    "text for tuple": (
        lambda: Adapter.LoRA(targets="mlp"),
        "1 problem in Adapter.LoRA\n  targets: expected tuple[str, ...], got 'mlp'; write ('mlp',)",
    ),
    "one item of a tuple": (
        lambda: Adapter.LoRA(targets=("mlp", 3)),
        "1 problem in Adapter.LoRA\n  targets.1: expected str, got 3",
    ),
    "targets": (
        lambda: Adapter.LoRA(targets=("mlp", "mlp", "")),
        "2 problems in Adapter.LoRA\n  targets.1: 'mlp' is named twice\n  targets.2: is empty",
    ),
    "no targets": (
        lambda: Adapter.LoRA(targets=()),
        "1 problem in Adapter.LoRA\n  targets: names no module; the usual choice is ('attention', 'mlp')",
    ),
    "needed": (
        lambda: Schedule.WarmupCosine(),  # type: ignore[call-arg]
        "1 problem in Schedule.WarmupCosine\n  peak_lr: Schedule.WarmupCosine needs it",
    ),
    "without a name": (
        lambda: Objective.DPO(0.1),  # type: ignore[misc]
        "1 problem in Objective.DPO\n  takes no value without a name, got 0.1; write name=value",
    ),
    "two without a name": (
        lambda: Model.Gemma3("1b", Weights.Random()),  # type: ignore[misc]
        "1 problem in Model.Gemma3\n  takes only size without a name, got Weights.Random; write name=value",
    ),
    "twice": (
        lambda: Weights.HF("a", path="b"),  # type: ignore[misc]
        "1 problem in Weights.HF\n  path: is given twice, without its name and with it",
    ),
    "the family": (
        lambda: Objective(),
        f"1 problem in Objective\n  Objective is a family; use one of its members: {OBJECTIVES}",
    ),
    "rule of a mesh": (
        lambda: Mesh(rules=(("mlp", "tensr"),)),
        "1 problem in Mesh\n  rules.0: ('mlp', 'tensr') names no mesh axis; did you mean 'tensor'?",
    ),
    "rule that names an axis twice": (
        lambda: Mesh(rules=(("mlp", ("fsdp", "fsdp")),)),
        "1 problem in Mesh\n  rules.0: ('mlp', ('fsdp', 'fsdp')) names the mesh axis 'fsdp' twice",
    ),
    "malformed rule": (
        lambda: Mesh(rules=(("mlp", "tensor", "fsdp"),)),
        "1 problem in Mesh\n"
        "  rules.0: expected tuple[str, str or tuple[str, ...] or None], got ('mlp', 'tensor', 'fsdp')",
    ),
    "answers without prompts": (
        lambda: Evaluation(every_steps=0, data=Data.Text("a"), max_new_tokens=8),
        "2 problems in Evaluation\n  every_steps: expected a value > 0, got 0\n"
        "  max_new_tokens: has no effect without prompts",
    ),
    "draws that are none": (
        lambda: Evaluation(every_steps=1, prompts=("a",), top_k=5, top_p=1.0),
        "2 problems in Evaluation\n  top_p: expected a value > 0 and < 1, got 1.0\n"
        "  top_k: has no effect with temperature=0, which takes the most likely token",
    ),
}


@pytest.mark.parametrize("case", ONE_OBJECT)
def test_one_object(case: str) -> None:
    build, message = ONE_OBJECT[case]
    assert refused(build) == message


def wrong(message: str) -> str:
    return f"1 problem in Experiment 'dpo-gemma3-1b'\n  {message}"


IN_EXPERIMENT: dict[str, tuple[dict[str, object], str]] = {
    "another family": ({"objective": Mesh()}, "objective: expected Objective, got Mesh"),
    "class for object": (
        {"objective": Objective.DPO},
        "objective: expected Objective, got the class Objective.DPO; write Objective.DPO(...)",
    ),
    "family for object": (
        {"objective": Objective},
        f"objective: expected Objective, got the class Objective; use one of its members: {OBJECTIVES}",
    ),
    "text for object": (
        {"objective": "dpo"},
        f"objective: expected Objective, got 'dpo'; use one of its members: {OBJECTIVES}",
    ),
    "optional": (
        {"evaluation": 10},
        "evaluation: expected Evaluation, got 10",
    ),
    "name": (
        {"seed": 2**32},
        "seed: expected a value >= 0 and < 4294967296, got 4294967296",
    ),
    "data of another kind": (
        {"data": Data.Conversations("chats.jsonl")},
        "data: Objective.DPO reads preference pairs, Data.Conversations yields conversations; use Data.Preferences",
    ),
    "held-out data of another kind": (
        {"evaluation": Evaluation(every_steps=9, data=Data.Text("held_out.jsonl"))},
        "evaluation.data: Objective.DPO reads preference pairs, Data.Text yields texts; use Data.Preferences",
    ),
    "evaluation of nothing": (
        {"evaluation": Evaluation(every_steps=10)},
        "evaluation: has neither data nor prompts; give one of them, test_size, or evaluation=None",
    ),
    "pairs for supervised fine-tuning": (
        {"objective": Objective.SFT()},
        "data: Objective.SFT reads conversations or texts, Data.Preferences yields preference pairs; "
        "use Data.Conversations or Data.Text",
    ),
    "text has no assistant": (
        {"objective": Objective.SFT(), "data": Data.Text("text.jsonl")},
        "objective.loss_on: 'assistant' has no meaning for Data.Text (data); use loss_on='all'",
    ),
    "nothing to train": (
        {"adapter": None},
        "quantization: Quantization.NF4 freezes the base, so there is nothing to train without an adapter; "
        "add adapter=Adapter.LoRA()",
    ),
    "nothing is frozen": (
        {
            "objective": Objective.SFT(),
            "data": Data.Conversations("chats.jsonl"),
            "adapter": None,
            "quantization": None,
            "precision": Precision(frozen="bfloat16"),
        },
        "precision.frozen: 'bfloat16' has no effect, since all weights are trained (a reference has the format "
        "of the computation)",
    ),
    "micro-batches": ({"microbatch_size": 12}, "microbatch_size: 12 does not divide batch_size=64"),
    "micro-batch over devices": (
        {"microbatch_size": 2},
        "microbatch_size: 2 rows cannot be split over mesh fsdp=4",
    ),
    "batch over devices": (
        {"microbatch_size": None, "mesh": Mesh(data=3, fsdp=2)},
        "batch_size: 64 rows cannot be split over mesh data=3 x fsdp=2",
    ),
}


@pytest.mark.parametrize("case", IN_EXPERIMENT)
def test_in_an_experiment(case: str, design: Any) -> None:
    changes, message = IN_EXPERIMENT[case]
    assert refused(lambda: design(**changes)) == wrong(message)
    assert refused(lambda: evolve(design(), changes)) == wrong(message)


def test_the_name_of_a_run(design: Any) -> None:
    assert refused(lambda: design(name="Mine: 1")) == (
        "1 problem in Experiment 'Mine: 1'\n"
        "  name: expected 1 to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit, got 'Mine: 1'"
    )


def test_another_network_than_the_earlier_stage(design: Any) -> None:
    assert refused(lambda: design(model=Model.Gemma3("4b", weights=Weights.From(design())))) == wrong(
        "model: is another network than that of model.weights.experiment; both must be of one family and size"
    )


ALL_AT_ONCE = (
    "3 problems in Experiment 'dpo-gemma3-1b'\n"
    "  objective.bta: DPO has no field 'bta'; did you mean 'beta'?\n"
    "  mesh.tensor: expected int, got '2'\n"
    "  data: Objective.DPO reads preference pairs, Data.Conversations yields conversations; use Data.Preferences"
)


def test_all_problems_at_once(design: Any) -> None:
    changes = {"objective.bta": 0.1, "mesh.tensor": "2", "data": Data.Conversations("chats.jsonl")}
    assert refused(lambda: evolve(design(), changes)) == ALL_AT_ONCE
    tree = to_dict(design())
    tree["objective"]["bta"] = 0.1
    tree["mesh"]["tensor"] = "2"
    tree["data"] = to_dict(Data.Conversations("chats.jsonl"))
    assert refused(lambda: from_dict(tree)) == ALL_AT_ONCE


def test_checks_between_fields_go_on_past_wrong_fields_and_do_not_guess(design: Any) -> None:
    assert refused(
        lambda: design(objective="dpo", adapter="lora", batch_size=63, steps=0, data=Data.Conversations("chats.jsonl"))
    ) == (
        "4 problems in Experiment 'dpo-gemma3-1b'\n"
        f"  objective: expected Objective, got 'dpo'; use one of its members: {OBJECTIVES}\n"
        "  steps: expected a value > 0, got 0\n"
        "  adapter: expected Adapter, got 'lora'; use one of its members: Adapter.LoRA, Adapter.DoRA\n"
        "  microbatch_size: 8 does not divide batch_size=63"
    )


IN_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "unknown member": (
        {"objective": {"type": "DPOO", "beta": 0.1}},
        "objective: Objective has no member 'DPOO'; did you mean 'DPO'?",
    ),
    "member of another family": (
        {"objective": {"type": "AdamW"}},
        "objective: Objective has no member 'AdamW'",
    ),
    "another noun": ({"mesh": {"type": "Memory"}}, "mesh: expected type 'Mesh', got 'Memory'"),
    "no type": (
        {"objective": {"beta": 0.1}},
        f"objective: needs a 'type': one of {SHORT}",
    ),
    "no type of a noun": ({"mesh": {"fsdp": 2}}, "mesh: needs a 'type': 'Mesh'"),
    "type is no text": ({"mesh": {"type": 3}}, "mesh.type: expected str, got 3"),
    "unknown module": (
        {"objective": {"type": "her_lab.simpo:SimPO"}},
        "objective: 'her_lab.simpo:SimPO' would import the module 'her_lab.simpo', which is not allowed; if you trust "
        "it, allow it with --allow her_lab.simpo, NNXDSL_ALLOW=her_lab.simpo or nnxdsl.allow_imports('her_lab.simpo')",
    ),
    "allowed module that is not there": (
        {"objective": {"type": "nobodys_lab.simpo:SimPO"}},
        "objective: 'nobodys_lab.simpo:SimPO' cannot be imported: No module named 'nobodys_lab'; is its package "
        "installed?",
    ),
    "unknown class": (
        {"objective": {"type": "my_lab.simpo:SimPOO"}},
        "objective: 'my_lab.simpo:SimPOO' cannot be imported: module 'my_lab.simpo' has no attribute 'SimPOO'; "
        "is its package installed?",
    ),
    "no spec class": ({"objective": {"type": "os:path"}}, "objective: type 'os:path' is not a spec class"),
    "third party of another family": (
        {"objective": {"type": "my_lab.simpo:Mixture"}},
        "objective: expected Objective, got Mixture",
    ),
    "built-in as third party": (
        {"objective": {"type": "nnxdsl.config.objectives.preference:DPO"}},
        "objective: type 'nnxdsl.config.objectives.preference:DPO' is written 'DPO'",
    ),
    "object for a number": ({"steps": {"type": "DPO"}}, "steps: expected int, got {'type': 'DPO'}"),
    "list for a number": ({"steps": [3]}, "steps: expected int, got [3]"),
    "deep inside": (
        {"mesh": {"type": "Mesh", "fsdp": 4, "rules": [["mlp", ["data", 3]]]}},
        "mesh.rules.0.1.1: expected str, got 3",
    ),
    "schema": ({"schema": 2}, "schema: this nnxdsl reads schema 1, got 2"),
    "schema is no number": ({"schema": True}, "schema: this nnxdsl reads schema 1, got True"),
}


@pytest.mark.parametrize("case", IN_JSON)
def test_in_json(case: str, design: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNXDSL_ALLOW", "my_lab,nobodys_lab,os")
    changes, message = IN_JSON[case]
    assert refused(lambda: from_dict({**to_dict(design()), **changes})) == wrong(message)


def test_json_that_is_none() -> None:
    assert refused(lambda: from_json("{")) == (
        "1 problem\n  not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )
    assert refused(lambda: from_json("[1]")) == "1 problem\n  expected a JSON object, got [1]"
    assert refused(lambda: from_json('{"type": "Mesh", "fsdp": 1, "fsdp": 2}')) == (
        "1 problem\n  not JSON: 'fsdp' is repeated in one object"
    )
    assert refused(lambda: from_json('{"type": "DPO", "beta": NaN}')) == (
        "1 problem in Objective.DPO\n  beta: expected a finite number, got nan"
    )
    deep = '{"type": "Mesh", "rules": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert refused(lambda: from_json(deep)).startswith("1 problem\n  not JSON: maximum recursion depth exceeded")


def test_a_type_that_says_too_little() -> None:
    tree = to_dict(Weights.Checkpoint("runs/a"))
    assert refused(lambda: from_dict(tree)) == (
        "1 problem\n  type 'Checkpoint' alone may be Checkpoint or Reference.Checkpoint or Weights.Checkpoint; "
        "pass the family as `expected`"
    )
    assert from_dict(tree, Weights) == Weights.Checkpoint("runs/a")
    assert from_dict(to_dict(Checkpoint()), Checkpoint) == Checkpoint()


AT_PATHS: dict[str, tuple[dict[str, object], str]] = {
    "through None": (
        {"evaluation.data.path": "a"},
        "evaluation.data.path: None has no field 'path'; set the whole object first: "
        "Data.Preferences, Data.Feedback, Data.Conversations, Data.Text, Data.Prompts, Data.Mixture",
    ),
    "through a number": ({"steps.most": 3}, "steps.most: 2000 has no field 'most'"),
    "unknown part": (
        {"optimiser.eps": 1e-8},
        "optimiser: Experiment has no field 'optimiser'; did you mean 'optimizer'?",
    ),
    "unknown item": ({"adapter.targets.2": "x"}, "adapter.targets.2: there is no item '2' among 2"),
    "in part and as a whole": (
        {"adapter.rank": 8, "adapter": Adapter.LoRA()},
        "adapter.rank: is changed, and so is 'adapter' as a whole; put both into one value",
    ),
    "as a whole and in part": (
        {"adapter": Adapter.LoRA(), "adapter.rank": 8},
        "adapter.rank: is changed, and so is 'adapter' as a whole; put both into one value",
    ),
    "empty": (
        {"objective.": 3},
        "objective: DPO has no field ''; there are: beta, divergence, label_smoothing, ld_alpha, mtp_loss_weight, "
        "weighting",
    ),
}


@pytest.mark.parametrize("case", AT_PATHS)
def test_at_paths(case: str, design: Any) -> None:
    changes, message = AT_PATHS[case]
    assert refused(lambda: evolve(design(), changes)) == wrong(message)


def test_rank_of_no_adapter(design: Any) -> None:
    full = design(adapter=None, quantization=None)
    assert refused(lambda: evolve(full, {"adapter.rank": 8})) == wrong(
        "adapter.rank: None has no field 'rank'; set the whole object first: Adapter.LoRA, Adapter.DoRA"
    )


def test_reading_and_comparing(design: Any) -> None:
    assert refused(lambda: get(design(), "objective.bta")) == wrong(
        "objective.bta: Objective.DPO has no field 'bta'; did you mean 'beta'?"
    )
    assert refused(lambda: get(design(), "steps.most")) == wrong("steps.most: 2000 has no field 'most'")
    assert refused(lambda: diff(Mesh(), Precision())) == "1 problem\n  Mesh and Precision are of different types"


def test_sweeps(design: Any) -> None:
    points = product({"objective.bta": [0.1], "steps": [1, "2"]})
    assert refused(lambda: Sweep(design(), points)) == (
        "3 problems in Sweep of 'dpo-gemma3-1b'\n"
        "  points.0.objective.bta: DPO has no field 'bta'; did you mean 'beta'?\n"
        "  points.1.objective.bta: DPO has no field 'bta'; did you mean 'beta'?\n"
        "  points.1.steps: expected int, got '2'"
    )
    assert refused(lambda: Sweep(design(), [])) == "1 problem in Sweep of 'dpo-gemma3-1b'\n  points: is empty"
    assert refused(lambda: zipped({"steps": [1, 2], "seed": [0]})) == (
        "1 problem\n  zipped paths need as many values each: steps has 2, seed has 1"
    )
    assert refused(lambda: product({"objective.loss_on": "all"})) == (
        "1 problem\n  objective.loss_on: expected a list of values, got 'all'; write ['all']"
    )
    assert refused(lambda: cross(product({"steps": [1]}), product({"steps": [2]}))) == (
        "1 problem\n  steps: is changed by two of the crossed grids"
    )


def test_a_sweep_is_its_experiments(design: Any) -> None:
    grid = cross(
        product({"objective": [Objective.DPO(beta=0.05), Objective.DPO(beta=0.2)]}),
        zipped({"adapter.rank": [8, 64], "adapter.alpha": [16.0, 128.0]}),
    )
    sweep = Sweep(design(), grid)
    assert len(sweep) == 4
    assert [(e.objective, e.adapter) for e in sweep] == [
        (Objective.DPO(beta=beta), Adapter.LoRA(rank=rank, alpha=alpha))
        for beta in (0.05, 0.2)
        for rank, alpha in ((8, 16.0), (64, 128.0))
    ]
    assert all(e.optimizer is sweep.base.optimizer for e in sweep)


def test_objects_cannot_change(design: Any) -> None:
    with pytest.raises(AttributeError):
        design().steps = 3
    with pytest.raises(AttributeError, match="'Experiment' object has no attribute 'stepz'"):
        getattr(design(), "stepz")  # noqa: B009


def test_text_that_is_odd_but_not_blank() -> None:
    for path in ("a\nb", "\n.", "-", "日本"):
        assert Weights.HF(path).path == path


@pytest.mark.parametrize("text", ["qwen3-small", "Qwen/Qwen3-0.6B"])
def test_a_model_given_as_a_text_is_told_how_to_be_written(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Experiment(model=text, objective=Objective.SFT(), data=Data.Conversations("x.jsonl"))  # type: ignore[arg-type]
    hint = f"model: expected Model, got {text!r}; write Model({text!r}) for a directory or a repository of the Hub"
    assert f"{hint}, or use one of its members: Model.DeepSeekV2, " in str(caught.value)
    assert Model(text) == Model.HF(text, weights=Model(text).weights)
