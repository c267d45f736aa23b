"""Exported models: the same weights, logits and texts; atomic; nothing overwritten."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import nnxdsl
from nnxdsl import Adapter, Tokenizer, Weights, cli
from nnxdsl.data.tokenizers.base import BytesTokenizer, open_tokenizer
from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import peft, quantize
from nnxdsl.formats.hf import INDEX, SINGLE, HubReader
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.program.checkpoint_views import checkpoint_targets, with_restored
from nnxdsl.program.compile import compile as compile_experiment
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.saved_experiment import saved_experiment
from nnxdsl.storage.atomic_dir import atomic_directory
from nnxdsl.weights import sources
from nnxdsl.weights.export import Exported, export

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)
TEXTS = ("Hi", "Grüße, 世界 🙂\n\t", "<bos>a<end_of_turn>\n<eos", "".join(map(chr, range(1, 300))))


def logits_of_run(run: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Of the model that a run ended with, an adapter beside its base, as training has it."""
    program = compile_experiment(saved_experiment(run))
    state = program.init(sources.open_source(program.blueprint, run.parent))
    with CheckpointReader(run / "checkpoints") as checkpoints:
        step = checkpoints.steps()[-1]
        state = with_restored(program, state, step, checkpoints.restore(step, checkpoint_targets(program)))
    template, leaves = program.policy(state)

    @jax.jit
    def forward(leaves: dict[str, jax.Array]) -> jax.Array:
        model: Any = template.merge(leaves)
        return model.logits(model(tokens, positions_right_padded(jnp.array([24, 24]), 24), dtype=jnp.float32).hidden)

    return np.asarray(forward(leaves))


def saved_arrays(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    with CheckpointReader(run / "checkpoints") as checkpoints:
        step = checkpoints.steps()[-1] if step is None else step
        infos = checkpoints.contents(step)["trainable"]
        targets = {name: jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype)) for name, info in infos.items()}
        return {
            name: np.asarray(a) for name, a in checkpoints.restore(step, {"trainable": targets})["trainable"].items()
        }


def entries(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


@pytest.fixture(scope="session")
def base(finished: Any, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What the first run ended with."""
    return export(finished.run("sft"), tmp_path_factory.mktemp("base") / "out")


@pytest.mark.slow
def test_a_model_with_all_weights_trained(finished: Any, base: Exported) -> None:
    run, done, place = finished.run("sft"), base, base.directory.parent
    assert (done.run, done.step, done.kind, done.difference) == (run.name, 60, "model", 0.0)
    assert entries(place) == {"out"}
    beside = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(done.files) == entries(place / "out") == {"config.json", SINGLE, *beside}
    reader = HubReader(place / "out")
    for path, array in saved_arrays(run).items():
        assert reader.dtype(path) == np.float32
        assert np.array_equal(reader.leaf(path), array)
    config = json.loads((place / "out" / "config.json").read_text())
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("llama", 257, [258, 260])
    generation = json.loads((place / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [258, 260]


def test_the_byte_tokenizer_as_a_file(base: Exported) -> None:
    ours, theirs = BytesTokenizer(), open_tokenizer(Tokenizer.File(str(base.directory)), None)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text), skip_special=False) == text
    names = ("bos_id", "bos_token", "eos_id", "eos_token", "stop_ids", "chat_template")
    assert [getattr(theirs, name) for name in names] == [getattr(ours, name) for name in names]


@pytest.mark.extended
def test_an_adapter_merged_and_alone(finished: Any, base: Exported, tmp_path: Path) -> None:
    run = finished.run("dpo")
    wanted = logits_of_run(run)
    merged = export(run, tmp_path / "merged")
    close = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(nnxdsl.load(tmp_path / "merged")(TOKENS), wanted, rtol=0, atol=close)
    assert 0 < merged.difference < close
    first, after = (HubReader(done.directory) for done in (base, merged))
    assert np.array_equal(first.leaf("embed.embedding"), after.leaf("embed.embedding"))
    path = "layers.blocks.0.mlp.up.kernel"
    assert np.abs(first.leaf(path) - after.leaf(path)).max() > 1e-3

    alone = export(run, tmp_path / "alone", adapter=True)
    assert (alone.kind, alone.base, alone.difference) == ("adapter", None, 0.0)
    assert alone.notes == (
        "base_model_name_or_path is empty, since the base is no Hub directory; the base is the final model of "
        f"{finished.run('sft').name}: nnxdsl export {finished.run('sft').name} BASE",
    )
    reader = HubReader(base.directory)
    template = compile_experiment(saved_experiment(run)).blueprint.base
    actual = peft.read(alone.directory, reader.config, template)
    assert actual.adapter == Adapter.LoRA(rank=4, alpha=8.0)
    arrays = saved_arrays(run)
    assert actual.leaves.keys() == arrays.keys()
    assert all(np.array_equal(actual.leaves[path], array) for path, array in arrays.items())
    with pytest.raises(WeightsError, match="trained all weights and has no adapter"):
        export(finished.run("sft"), tmp_path / "none", adapter=True)


@pytest.mark.extended
def test_an_earlier_step_in_fewer_bits_and_several_files(finished: Any, tmp_path: Path) -> None:
    run = finished.run("sft")
    done = export(run / "checkpoints" / "00000054", tmp_path / "out", dtype="bfloat16", max_shard_bytes=500_000)
    assert done.step == 54
    assert 0 < done.difference < 0.05 * done.largest
    listing = json.loads((tmp_path / "out" / INDEX).read_text())
    files = set(listing["weight_map"].values())
    assert files == {f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)}
    assert len(files) > 4
    # A header aside, each is below the limit; together they hold everything.
    assert all(done.files[name] < 500_000 + 20_000 for name in files)
    reader = HubReader(tmp_path / "out")
    for path, array in saved_arrays(run, 54).items():
        assert np.array_equal(reader.leaf(path), array.astype(ml_dtypes.bfloat16))
    newest = saved_arrays(run)["embed.embedding"].astype(ml_dtypes.bfloat16)
    assert not np.array_equal(reader.leaf("embed.embedding"), newest)


def test_nothing_is_written_over(finished: Any, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, what in (("held", "is not empty"), ("file", "already exists"), ("link", "already exists")):
        with pytest.raises(RunError) as caught:
            export(finished.run("sft"), tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: {what} and is not overwritten; name a new directory"
    assert entries(tmp_path) == {"held", "file", "link"}
    assert entries(tmp_path / "held") == {"notes.txt"}


def test_a_full_disk_leaves_nothing(finished: Any, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # no file may be larger
    try:
        with pytest.raises(RunError, match=r"cannot be written; no files were left behind: .*File too large"):
            export(finished.run("sft"), tmp_path / "new" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert entries(tmp_path / "new") == set()


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        dead, alive = tmp_path / f".writing-{child.pid}-1-out", tmp_path / f".writing-{os.getpid()}-0-out"
        child.kill()
    other = tmp_path / f".writing-{child.pid}-1-another"
    for place in (dead, alive, other):
        place.mkdir()
        (place / SINGLE).write_bytes(b"half")
    with atomic_directory(tmp_path / "out") as place:
        (place / SINGLE).write_bytes(b"whole")
    assert entries(tmp_path) == {alive.name, other.name, "out"}


@pytest.mark.slow
def test_the_tokenizer_of_the_weights_is_copied(base: Exported, lab: Any) -> None:
    base_place = Path(shutil.copytree(base.directory, lab.place / "hub"))
    argv = ("steps=2", "evaluation=None", "model.weights=Weights.HF('hub')", "adapter=Adapter.LoRA(rank=2)")
    code, _, err = lab.python("sft.py", "run", *argv)
    assert code == 0, err
    (run,) = (lab.place / "runs").glob("sft-*")
    # From somewhere else, and by its id: relative paths mean what they meant to the run.
    (lab.place / "else").mkdir()
    code, out, err = lab.cli(
        "export", run.name, "out", "--adapter", "--home", "../runs", "--json", cwd=lab.place / "else"
    )
    assert code == 0, err
    actual = json.loads(out)
    assert actual["base"] == str(base_place)
    assert actual["tokenizer"] == f"that of {base_place.name}"
    place = lab.place / "else" / "out"
    assert json.loads((place / peft.CONFIG).read_text())["base_model_name_or_path"] == str(base_place)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (place / name).read_bytes() == (base_place / name).read_bytes()


def test_words(finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        assert cli.main(["export", *argv]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    run, out = str(finished.run("sft")), str(tmp_path / "out")
    assert refused(run) == "UsageError: the following arguments are required: DIR; see nnxdsl export --help"
    assert refused(run, out, "more") == "UsageError: more: unexpected argument; see nnxdsl export --help"
    assert refused(run, out, "--rtol", "1") == "UsageError: --rtol has no effect on export"
    assert refused(run, out, "--dtype", "int8") == (
        "RunError: dtype: expected one of float32, bfloat16, float16, got 'int8'"
    )
    assert refused(run, out, "--max-shard-size", "many") == (
        "RunError: --max-shard-size: expected a size such as 5GB or 500MB, got 'many'"
    )
    assert refused(run, out, "--adapter", "--max-shard-size", "5GB") == (
        "RunError: --max-shard-size has no effect with --adapter, which is one small file"
    )
    assert not (tmp_path / "out").exists()
    copied = Path(shutil.copytree(finished.run("sft"), tmp_path / "sft-copy", ignore=shutil.ignore_patterns("000*")))
    assert refused(str(copied), out) == f"WeightsError: {copied} has no checkpoint yet; run its experiment first"


@pytest.mark.extended
def test_a_quantized_model(finished: Any, tmp_path: Path) -> None:
    """In integers of 8 bits: read back within the bound of the format; an adapter alone cannot be quantized."""
    run = finished.run("sft")
    done = export(run, tmp_path / "out", quantization="int8")
    assert (done.quantization, done.dtype) == ("int8", "bfloat16")
    assert 0 < done.difference < 0.2 * done.largest
    stored = HubReader(tmp_path / "out")
    path = "layers.blocks.0.mlp.up.kernel"
    trained = saved_arrays(run)[path]
    error = np.abs(stored.leaf(path).astype(np.float32) - trained).max()
    assert 0 < error <= quantize.largest_error("int8") * np.abs(trained).max()
    with pytest.raises(RunError, match="quantization has no effect on an adapter"):
        export(run, tmp_path / "adapter", adapter=True, quantization="int8")


@pytest.mark.slow
def test_few_bits_are_exported_as_they_were_before(lab: Any, tmp_path: Path) -> None:
    argv = (
        "steps=3",
        "evaluation=None",
        "adapter=Adapter.LoRA(rank=4)",
        "quantization=Quantization.NF4(block_size=64)",
    )
    code, _, err = lab.python("sft.py", "run", *argv)
    assert code == 0, err
    (run,) = (lab.place / "runs").glob("sft-*")
    done = export(run, tmp_path / "out")
    assert done.notes[0].startswith("the run quantized its base (NF4); the export")
    assert done.difference == pytest.approx(0, abs=1e-5 * done.largest)
    # The frozen weights without an adapter are the first ones, not what four bits left of them.
    experiment = nnxdsl.evolve(saved_experiment(run), {"adapter": None, "quantization": None})
    source = sources.open_source(compile_experiment(experiment).blueprint, tmp_path)
    reader = HubReader(tmp_path / "out")
    assert np.array_equal(reader.leaf("embed.embedding"), source.leaf("embed.embedding"))
    arrays, path = saved_arrays(run), "layers.blocks.0.mlp.up.kernel"
    a, b = (np.float64(arrays[path + end]) for end in ("_lora_a", "_lora_b"))
    scale = 32.0 / 4
    np.testing.assert_allclose(reader.leaf(path), source.leaf(path) + scale * a @ b, rtol=0, atol=1e-6)
    assert isinstance(experiment.model.weights, Weights.Random)


MIXTURE = """
from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, Tokenizer, Weights

PLACE = {place!r}
experiment = Experiment(
    name="mixture",
    model=Model.HF(PLACE, weights=Weights.HF(PLACE), tokenizer=Tokenizer.Bytes(allow_mismatch=True)),
    adapter=Adapter.LoRA(rank=2),
    objective=Objective.DPO(),
    data=Data.Preferences("ids.jsonl", max_prompt_length=8, max_completion_length=8),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-2)),
    batch_size=2,
    steps=2,
)
if __name__ == "__main__":
    experiment.main()
"""


@pytest.mark.slow
def test_a_mixture_that_learnt_from_ids_by_the_command_line(lab: Any) -> None:
    """Its tokenizer has more words than the model, so that none of them may be what the model fills rows with."""
    place = Path(__file__).parent.parent / "reference" / "families" / "mixtral"
    (lab.place / "mixture.py").write_text(MIXTURE.format(place=str(place)), encoding="utf-8")
    row = {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10]}
    (lab.place / "ids.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    code, _, err = lab.python("mixture.py")
    assert code == 0, err
    (run,) = (lab.place / "runs").glob("mixture-*")
    code, _, err = lab.cli("export", str(run), "out")
    assert code == 0, err
    config = json.loads((lab.place / "out" / "config.json").read_text())
    assert config["model_type"] == "mixtral"
    assert all(config.get(f"{which}_token_id") is None for which in ("bos", "eos", "pad"))
    generation = json.loads((lab.place / "out" / "generation_config.json").read_text())
    assert set(generation.values()) == {None}
    exported = nnxdsl.load(lab.place / "out")
    np.testing.assert_allclose(exported(TOKENS % 96), logits_of_run(run, TOKENS % 96), atol=2e-5)
    code, _, err = lab.cli("export", str(run), "alone", "--adapter")
    assert code == 2
    assert "PEFT does not support this layer; export the model with its adapter merged" in err
