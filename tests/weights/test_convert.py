"""Converting weights between formats and back, bit for bit; comparison; unsupported files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from nnxdsl import NnxdslError, Weights, cli, evolve
from nnxdsl.formats import linen, safetensors
from nnxdsl.formats.hf import INDEX, HubReader
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.saved_experiment import saved_experiment
from nnxdsl.weights import sources
from nnxdsl.weights.compare import compare
from nnxdsl.weights.convert import convert
from nnxdsl.weights.open import open_weights

REFERENCE = Path(__file__).parent.parent / "reference"
GEMMA, LLAMA = REFERENCE / "gemma3" / "scaled", REFERENCE / "llama3" / "untied"


def differing(first: Path, second: Path, **tolerances: float) -> list[str]:
    return [result.path for result in compare(first, second, **tolerances) if result.verdict != "same"]


def leaves_of(directory: Path) -> dict[str, np.ndarray]:
    weights = open_weights(directory)
    return {path: weights.read(path) for path in weights.shapes}


def said(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> str:
    assert cli.main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    return out if code != 2 else err.strip()


@pytest.mark.parametrize("unrolled", [False, True])
def test_to_linen_and_back(unrolled: bool, tmp_path: Path) -> None:
    done = convert(GEMMA, tmp_path / "linen", "linen", unrolled=unrolled)
    weights = open_weights(GEMMA)
    assert (done.kind, done.arrays) == ("hub", len(weights.shapes))
    assert differing(GEMMA, tmp_path / "linen") == []
    # Flax itself reads it as the tree that linen.to_tree makes.
    tree = flax.serialization.msgpack_restore((tmp_path / "linen" / "params.msgpack").read_bytes())
    wanted = linen.to_tree(leaves_of(GEMMA), unrolled=unrolled)
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True))
    assert ("layers_0" in tree["params"]) == unrolled
    convert(tmp_path / "linen", tmp_path / "hub", "hub", max_shard_bytes=20_000)
    assert (tmp_path / "hub" / INDEX).is_file()
    assert differing(GEMMA, tmp_path / "hub") == []
    assert HubReader(tmp_path / "hub").config == HubReader(GEMMA).config


def test_trees_that_others_saved(tmp_path: Path) -> None:
    leaves = leaves_of(LLAMA)
    tree = linen.to_tree(leaves)
    (tmp_path / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", {"params": tree})  # twice "params", as MaxText has it
    np.savez(tmp_path / "tree.npz", **{"/".join(name): leaf for name, leaf in linen.flat_tree(tree)})
    (tmp_path / "tree.msgpack").write_bytes(flax.serialization.to_bytes(tree["params"]))
    for place in (tmp_path, tmp_path / "params", tmp_path / "tree.npz", tmp_path / "tree.msgpack"):
        assert differing(LLAMA, place) == []
        actual = open_weights(place)
        assert actual.kind == "linen"
        assert all(actual.dtype(path) == leaf.dtype for path, leaf in leaves.items())
    convert(tmp_path, tmp_path / "hub", "hub")
    assert differing(LLAMA, tmp_path / "hub") == []
    odd = tmp_path / "läufe [v1] *?\\b"  # orbax makes globs of such paths, tensorstore slashes of backslashes
    odd.mkdir()
    (tmp_path / "params").rename(odd / "params")
    (tmp_path / "config.json").rename(odd / "config.json")
    assert differing(LLAMA, odd) == []


def test_to_a_checkpoint_and_back(tmp_path: Path) -> None:
    convert(LLAMA, tmp_path / "saved", "checkpoint", dtype="bfloat16")
    with CheckpointReader(tmp_path / "saved" / "checkpoints") as checkpoints:
        assert checkpoints.latest_good().step == 0
        assert {info.dtype for info in checkpoints.contents(0)["params"].values()} == {"bfloat16"}
    convert(tmp_path / "saved", tmp_path / "hub", "hub")
    wanted = {path: leaf.astype("bfloat16") for path, leaf in leaves_of(LLAMA).items()}
    actual = leaves_of(tmp_path / "hub")
    assert all(np.array_equal(actual[path], leaf) and actual[path].dtype == leaf.dtype for path, leaf in wanted.items())


@pytest.mark.slow
def test_a_run_without_its_optimizer_starts_another(finished: Any, tmp_path: Path) -> None:
    run = finished.run("sft")
    done = convert(run, tmp_path / "sft-alone", "checkpoint")
    with CheckpointReader(done.directory / "checkpoints") as checkpoints:
        assert list(checkpoints.contents(60)) == ["trainable"]
    assert differing(run, done.directory) == []
    asked = evolve(saved_experiment(run), {"model.weights": Weights.Checkpoint(str(done.directory))})
    source = sources.open_source(build_blueprint(asked), tmp_path)
    assert np.array_equal(source.leaf("embed.embedding"), open_weights(run).read("embed.embedding"))
    convert(run, tmp_path / "hub", "hub")
    convert(tmp_path / "hub", tmp_path / "linen", "linen")
    assert differing(run, tmp_path / "linen") == []
    assert (tmp_path / "linen" / "tokenizer.json").read_bytes() == (tmp_path / "hub" / "tokenizer.json").read_bytes()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A copy of a Hub directory in one file, with five arrays that are not as they were."""
    place = Path(shutil.copytree(LLAMA, tmp_path / "damaged"))
    file = place / "model.safetensors"
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}
    arrays["model.norm.weight"][3] += 0.5
    arrays["model.layers.0.mlp.up_proj.weight"][0, :2] = np.nan
    arrays["model.layers.1.mlp.up_proj.weight"] = arrays["model.layers.1.mlp.up_proj.weight"][:, :-1]
    arrays["model.layers.0.input_layernorm.weight"] = arrays["model.layers.0.input_layernorm.weight"].astype("float64")
    arrays["model.extra.weight"] = arrays.pop("model.layers.2.input_layernorm.weight")
    safetensors.write(file, {name: (a.shape, a.dtype) for name, a in arrays.items()}, arrays.__getitem__)
    return place


def test_compare_says_every_difference(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, 1, "compare", LLAMA, damaged).splitlines()
    scale = safetensors.index(LLAMA / "model.safetensors")["model.norm.weight"].read()
    part = 0.5 / (scale[3] + np.float32(0.5))
    assert set(lines) == {
        "model.layers.0.input_layernorm.weight: dtype float32 and float64",
        "model.layers.0.mlp.up_proj.weight: 2 values, by up to nan, relatively nan",
        "model.layers.1.mlp.up_proj.weight: shape (32, 24) and (32, 23)",
        "model.layers.2.input_layernorm.weight: only in the first: float32 (24,)",
        f"model.norm.weight: 1 value, by up to 0.5, relatively {part:.3g}",
        "model.extra.weight: only in the second: float32 (24,)",
        "# 31 arrays, 6 of them differ",
    }
    actual = json.loads(said(capsys, 1, "compare", LLAMA, damaged, "--atol", "0.6", "--json"))
    assert actual["same"] is False
    rows = {row["path"]: row for row in actual["arrays"]}
    assert rows["model.norm.weight"]["verdict"] == "same"  # within the tolerance
    assert rows["model.layers.0.input_layernorm.weight"]["verdict"] == "same"  # with one, dtypes are only told
    assert rows["model.layers.0.mlp.up_proj.weight"] == {
        "path": "model.layers.0.mlp.up_proj.weight", "verdict": "differs", "shapes": [[32, 24], [32, 24]],
        "dtypes": ["float32", "float32"], "largest": "nan", "relative": "nan", "count": 2,
    }  # fmt: skip
    assert said(capsys, 0, "compare", damaged, damaged) == "# 30 arrays, all the same\n"
    assert said(capsys, 2, "compare", LLAMA, damaged, "--rtol", "-1").endswith(
        "expected a number of at least 0, got -1.0"
    )


def test_relative_tolerances(tmp_path: Path) -> None:
    convert(LLAMA, tmp_path / "half", "hub", dtype="bfloat16")
    assert len(differing(tmp_path / "half", LLAMA)) == 30
    assert differing(tmp_path / "half", LLAMA, rtol=2**-8) == []  # half of the last of eight bits
    assert len(differing(tmp_path / "half", LLAMA, rtol=2**-10)) == 30


def test_what_does_not_fit_is_listed_by_both_names(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(NnxdslError) as caught:
        convert(damaged, tmp_path / "out", "linen")
    file = damaged / "model.safetensors"
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{damaged}: 3 tensors do not fit:"
    assert set(lines[1:]) == {
        f"  layers.blocks.0.mlp.up.kernel: {file}: model.layers.1.mlp.up_proj.weight: expected shape (32, 24), "
        "got (32, 23)",
        f"  layers.blocks.0.pre_attention_norm.scale: {file}: expected a tensor "
        "model.layers.2.input_layernorm.weight of shape (24,), there is none",
        f"  model.extra.weight: {file}: no tensor of a text decoder of 3 layers",
    }
    convert(LLAMA, tmp_path / "linen", "linen")
    file = tmp_path / "linen" / "params.msgpack"
    tree = flax.serialization.msgpack_restore(file.read_bytes())
    del tree["params"]["layers"]["blocks_0"]["mlp"]["up"]
    tree["params"]["norm"]["scale"] = np.zeros(7, np.float32)
    tree["params"]["norm"]["bias"] = np.zeros(7, np.float32)
    file.write_bytes(flax.serialization.msgpack_serialize(tree))
    with pytest.raises(NnxdslError) as caught:
        convert(tmp_path / "linen", tmp_path / "out", "hub")
    names = ", ".join(f"layers.{layer}.mlp.up_proj.weight" for layer in range(3))
    assert set(str(caught.value).splitlines()) == {
        f"{tmp_path / 'linen' / 'params.msgpack'}: 3 arrays do not fit:",
        f"  layers.blocks.0.mlp.up.kernel: expected an array of shape (3, 24, 32), there is none ({names})",
        "  norm.scale: expected an array of shape (24,), got (7,) (norm.weight)",
        "  norm.bias: no array of this model",
    }
    assert not (tmp_path / "out").exists()


def test_files_that_will_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(place: Path) -> str:
        return said(capsys, 2, "compare", place, LLAMA)

    (tmp_path / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = refused(tmp_path)
    assert "there is neither; pytorch_model.bin would be read with pickle, which runs any code" in message
    assert "convert it with torch and transformers: python -c" in message
    assert "would be read with pickle" in refused(tmp_path / "pytorch_model.bin")
    for outside in ("../other/model.safetensors", "/etc/model.safetensors"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": outside}}))
        assert refused(tmp_path) == (
            f"WeightsError: {tmp_path / INDEX}: names files outside of its directory, which are not read: '{outside}'"
        )
    (tmp_path / "cut.msgpack").write_bytes(flax.serialization.to_bytes({"a": np.zeros(9)})[:-9])
    assert f"{tmp_path / 'cut.msgpack'}: damaged, or not a Flax msgpack file: " in refused(tmp_path / "cut.msgpack")
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    assert "a: holds pickled objects; save it" in refused(tmp_path / "objects.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "objects.npz").read_bytes()[:-30])
    assert "cut.npz: damaged, or not an .npz file: " in refused(tmp_path / "cut.npz")
    (tmp_path / "empty").mkdir()
    assert "holds no weights of a supported format; expected a Hub directory" in refused(tmp_path / "empty")
    assert "no such file or directory" in refused(tmp_path / "nowhere")


def test_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert said(capsys, 2, "convert", LLAMA, out) == (
        "UsageError: convert needs a format: --to hub, --to checkpoint or --to linen"
    )
    assert "expected one of hub, checkpoint, linen, got 'onnx'" in said(
        capsys, 2, "convert", LLAMA, out, "--to", "onnx"
    )
    assert "unrolled has no effect to 'hub'" in said(capsys, 2, "convert", LLAMA, out, "--to", "hub", "--unrolled")
    assert said(capsys, 0, "convert", LLAMA, out, "--to", "linen") == (
        f"{out}: linen, from hub {LLAMA}: 12 arrays, 67,488 bytes\n"
    )
    again = said(capsys, 2, "convert", LLAMA, out, "--to", "linen")
    assert again.endswith(f"RunError: {out}: is not empty and is not overwritten; name a new directory")
