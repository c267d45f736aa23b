"""Sources of initial weights: saved runs (adapters merged), and Hub directories."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nnxdsl import Adapter, Experiment, PlanError, Quantization, Tokenizer, Weights, evolve, from_json, to_dict
from nnxdsl.data.tokenizers.base import open_tokenizer
from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.program import init
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.checkpoint_views import checkpoint_targets, with_restored
from nnxdsl.program.compile import Program
from nnxdsl.program.compile import compile as compile_experiment
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.weights import sources

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)


def saved_experiment(run: Path) -> Experiment:
    return from_json((run / "experiment.json").read_text(encoding="utf-8"), Experiment)


def logits(program: Program, state: Any) -> np.ndarray:
    template, leaves = program.policy(state)

    @jax.jit
    def forward(leaves: dict[str, jax.Array]) -> jax.Array:
        model = template.merge(leaves)
        hidden, *_ = model(TOKENS, positions_right_padded(jnp.array([24, 17]), 24), dtype=jnp.float32)
        return hidden @ model.head().T

    return np.asarray(forward(leaves))


def adapted_logits(experiment: Experiment, home: Path, run: Path, step: int) -> np.ndarray:
    """Of the model that a run ended with, its adapter beside its base."""
    program = compile_experiment(experiment)
    state = program.init(sources.open_source(program.blueprint, home))
    with CheckpointReader(run / "checkpoints") as checkpoints:
        groups = checkpoints.restore(step, checkpoint_targets(program))
    return logits(program, with_restored(program, state, step, groups))


def merged_logits(experiment: Experiment, path: Path, home: Path) -> np.ndarray:
    program = compile_experiment(
        evolve(experiment, {"model.weights": Weights.Checkpoint(str(path)), "adapter": None, "quantization": None})
    )
    return logits(program, program.init(sources.open_source(program.blueprint, home)))


@pytest.mark.slow
def test_a_run_and_each_of_its_steps_give_the_adapted_model(finished: Any, tmp_path: Path) -> None:
    run = finished.run("dpo")
    experiment = saved_experiment(run)
    newest = adapted_logits(experiment, run.parent, run, 40)
    # The home of this process is another one: the base of that run is found beside it.
    np.testing.assert_allclose(
        merged_logits(experiment, run, tmp_path), newest, rtol=0, atol=1e-5 * np.abs(newest).max()
    )
    step = merged_logits(experiment, run / "checkpoints" / "00000036", tmp_path)
    earlier = adapted_logits(experiment, run.parent, run, 36)
    np.testing.assert_allclose(step, earlier, rtol=0, atol=1e-5 * np.abs(newest).max())
    assert np.abs(newest - earlier).max() > 1e-3


@pytest.mark.slow
def test_an_adapter_on_few_bits_is_merged_into_these(lab: Any, tmp_path: Path) -> None:
    argv = (
        "steps=3",
        "evaluation=None",
        "adapter=Adapter.LoRA(rank=4)",
        "quantization=Quantization.NF4(block_size=64)",
    )
    code, _, err = lab.python("sft.py", "run", *argv)
    assert code == 0, err
    (run,) = (lab.place / "runs").glob("sft-*")
    experiment = saved_experiment(run)
    assert experiment.adapter == Adapter.LoRA(rank=4)
    assert experiment.quantization == Quantization.NF4(block_size=64)
    adapted = adapted_logits(experiment, run.parent, run, 3)
    np.testing.assert_allclose(
        merged_logits(experiment, run, tmp_path), adapted, rtol=0, atol=1e-5 * np.abs(adapted).max()
    )


def test_another_network_is_refused(finished: Any) -> None:
    run = finished.run("dpo")
    experiment = evolve(
        saved_experiment(finished.run("sft")), {"model.weights": Weights.Checkpoint(str(run)), "model.size": "1b"}
    )
    with pytest.raises(WeightsError) as raised:
        sources.open_source(build_blueprint(experiment), run.parent)
    assert str(raised.value) == f"{run} holds weights of another model than Model.Llama3"


def test_a_run_without_a_checkpoint(finished: Any, tmp_path: Path) -> None:
    experiment = saved_experiment(finished.run("sft"))
    run = RunDirectory.create(tmp_path / "new", identity="", experiment_json=to_dict(experiment), experiment_py="")
    blueprint = build_blueprint(evolve(experiment, {"model.weights": Weights.Checkpoint(str(run.path))}))
    with pytest.raises(WeightsError) as raised:
        sources.open_source(blueprint, tmp_path)
    assert str(raised.value) == f"{run.path} has no checkpoint yet; run its experiment first"


@pytest.mark.extended
def test_a_run_that_saved_infinity_is_refused_unless_asked(finished: Any, tmp_path: Path) -> None:
    run, saved = tmp_path / "run", saved_experiment(finished.run("sft"))
    run.mkdir()
    shutil.copyfile(finished.run("sft") / "experiment.json", run / "experiment.json")
    targets = {"trainable": checkpoint_targets(compile_experiment(saved))["trainable"]}
    with CheckpointReader(finished.run("sft") / "checkpoints") as checkpoints:
        leaves, meta = checkpoints.restore(60, targets)["trainable"], checkpoints.meta(60)
    leaves["norm.scale"] = leaves["norm.scale"].at[0].set(np.inf)
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(60, {"trainable": leaves}, meta)
        checkpoints.wait()
    for allow in (False, True):
        asked = evolve(saved, {"model.weights": Weights.Checkpoint(str(run), allow_non_finite=allow)})
        program = compile_experiment(asked)
        if allow:
            assert np.isinf(program.init(sources.open_source(program.blueprint, tmp_path)).trainable["norm.scale"][0])
        else:
            with pytest.raises(WeightsError, match=r"1 array holds NaN or infinity.*\n  norm.scale: 1 of 128 values"):
                sources.open_source(program.blueprint, tmp_path)


@pytest.fixture
def hub_directory(finished: Any, tmp_path: Path) -> Path:
    """What the first stage learnt, as a directory of the Hub's format with a tokenizer of its own."""
    program = compile_experiment(saved_experiment(finished.run("sft")))
    with CheckpointReader(finished.run("sft") / "checkpoints") as checkpoints:
        leaves = checkpoints.restore(60, {"trainable": checkpoint_targets(program)["trainable"]})["trainable"]
    directory = tmp_path / "hub"
    hf.write(directory, program.blueprint.config, {path: np.asarray(leaf) for path, leaf in leaves.items()})
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["user model good bad Hi 1 Hi 2"] * 9, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template()}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def template() -> str:
    return (
        "{{ bos_token }}"
        "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
    )


@pytest.mark.slow
def test_a_hub_directory_with_its_tokenizer(lab: Any, hub_directory: Path) -> None:
    code, out, err = lab.python("sft.py", "run", "steps=2", "model.weights=Weights.HF('hub')", "--json")
    assert code == 0, err
    assert "tokens: " in err
    (run,) = (lab.place / "runs").glob("sft-*")
    with CheckpointReader(run / "checkpoints") as checkpoints:
        fingerprint = checkpoints.meta(2)["identity"]["tokenizer"]
    assert fingerprint == open_tokenizer(Tokenizer.Auto(), hub_directory).fingerprint
    assert json.loads(out)["evaluations"]["0"]["eval/loss"] > 0


@pytest.mark.slow
def test_a_name_of_the_hub_is_architecture_weights_and_tokenizer(lab: Any, hub_directory: Path) -> None:
    pytest.importorskip("huggingface_hub")
    revision = "0123456789" * 4
    cached = lab.place / "cache" / "hub" / "models--somebody--tiny"
    shutil.copytree(hub_directory, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    lab.environment.update(HF_HOME=str(lab.place / "cache"), HF_HUB_OFFLINE="1")
    code, out, err = lab.python("sft.py", "run", "steps=2", "model=Model('somebody/tiny')", "--json")
    assert code == 0, err
    named = json.loads(out)["evaluations"]["0"]
    code, out, err = lab.python("sft.py", "run", "steps=2", "model.weights=Weights.HF('hub')", "--json")
    assert code == 0, err
    assert named == json.loads(out)["evaluations"]["0"]


def test_a_hub_directory_of_another_network_is_refused(
    hub_directory: Path, monkeypatch: pytest.MonkeyPatch, finished: Any
) -> None:
    config = json.loads((hub_directory / "config.json").read_text())
    (hub_directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    monkeypatch.setenv("HOME", str(hub_directory.parent))
    asked = evolve(saved_experiment(finished.run("sft")), {"model.weights": Weights.HF("~/hub")})
    with pytest.raises(PlanError, match=re.escape("model: has mlp.dim=384, but ~/hub/config.json has 256")):
        build_blueprint(asked)
    # A name is looked at when it has been downloaded; here the download is what is already there.
    named = build_blueprint(evolve(asked, {"model.weights": Weights.HF("somebody/hub")}))
    monkeypatch.setattr(init, "locate", lambda path: hub_directory)
    with pytest.raises(PlanError, match=re.escape("model: has mlp.dim=384, but somebody/hub/config.json has 256")):
        sources.open_source(named, Path("runs"))


def test_a_name_of_the_hub_without_a_network_is_refused(lab: Any) -> None:
    lab.environment.update(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(lab.place / "hub-cache"))
    code, out, err = lab.python("sft.py", "run", "model.weights=Weights.HF('google/gemma-3-1b-it')", "model.size=1b")
    assert (code, out) == (2, "")
    error = err.splitlines()[-1]
    assert error.startswith(f"WeightsError: google/gemma-3-1b-it: no such directory (relative to {lab.place}), and ")
    cures = ("copy the repository's files to a directory and name that", "to download it, pip install 'nnxdsl[hub]'")
    assert error.endswith(cures)
    assert not (lab.place / "runs").exists()
