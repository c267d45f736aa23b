"""What is written for others to read: exports of runs, merged and as adapters; conversions between all formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import materials
import results
from commands import arrays_below, command, newest_checkpoint, run
from flax.serialization import msgpack_restore
from results import Result
from safetensors import safe_open
from training_cases import ADAMW, ALL, BYTES, DORA, LORA, asked, tiny

from nnxdsl import Adapter, Model, Objective, Optimizer, Quantization, Schedule, Weights

STAMPS = ("transformers_version", "torch_dtype")
"""Fields of a `config.json` that say what wrote it."""

STILL = Optimizer.SGD(schedule=Schedule.Constant(lr=0.0))

EXPORTS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[tuple[str, ...], ...]]] = {
    "export-full": (lambda: {"objective": ALL}, ((), ("--dtype", "bfloat16"))),
    "export-lora": (lambda: {"objective": Objective.DPO(beta=0.5), "adapter": LORA}, ((), ("--adapter",))),
    "export-dora-nf4": (
        lambda: {
            "objective": Objective.SimPO(),
            "adapter": DORA,
            "quantization": Quantization.NF4(block_size=8),
        },
        ((), ("--adapter", "--dtype", "float16")),
    ),
    "export-rslora": (
        lambda: {
            "objective": Objective.SimPO(),
            "adapter": Adapter.LoRA(rank=2, scaling="sqrt_rank", ranks=(("mlp.down", 4),)),
        },
        ((), ("--adapter",)),
    ),
    "export-qwen3-moe": (lambda: {**tiny("Qwen3MoE"), "steps": 1}, (("--max-shard-size", "2MB"),)),
    "export-deepseek-mtp": (lambda: {**tiny("DeepSeekV3", mtp_layers=1), "steps": 1}, ((),)),
}


def tensors(directory: Path) -> dict[str, Any]:
    """Digest of every tensor in the safetensors files of a directory, with its shape and dtype, by name."""
    result = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "flax") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                result[name] = opened.get_tensor(name)
    return result


def written(directory: Path) -> dict[str, Any]:
    """What of a directory for others must be equal everywhere: names, shapes, dtypes, and its settings."""
    configs = {}
    for file in sorted(directory.glob("*config.json")):
        text = file.read_text(encoding="utf-8").replace(str(Path.cwd()), ".")  # an adapter names its base in full
        fields = json.loads(text)
        configs[file.name] = {key: value for key, value in fields.items() if key not in STAMPS}
    shapes = {name: f"{tensor.dtype}{tuple(tensor.shape)}" for name, tensor in tensors(directory).items()}
    return {"files": sorted(path.name for path in directory.iterdir()), "configs": configs, "tensors": shapes}


def _export(name: str, fields: Callable[[], dict[str, Any]], ways: tuple[tuple[str, ...], ...]) -> Callable[[], Result]:
    def case() -> Result:
        directory = run(asked(name, {"steps": 3, "optimizer": ADAMW, **fields()}))
        result: Result = {"sums": {}, "exact": {}, "bits": {}}
        for way in ways:
            target, title = Path(f"{name}{''.join(way)}"), " ".join(("export", *way))
            command("export", str(directory), str(target), *way)
            arrays = tensors(target)
            result["exact"][title] = results.sha(written(target))
            result["sums"][title] = results.magnitudes(arrays.values())
            result["bits"][title] = results.sha({key: results.of_array(array) for key, array in arrays.items()})
        return result

    return case


def _leaves(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _both(result: Result, title: str, arrays: Mapping[str, Any]) -> None:
    """Notes arrays whose names are our own: values apart from names."""
    result["exact"][title] = results.of_arrays(arrays.values())
    result["names"][title] = results.sha(sorted(arrays))


def _convert(family: str) -> Callable[[], Result]:
    """Nothing is computed here but copies and changes of shape, so bits are equal on every machine."""

    def case() -> Result:
        source, place = f"families/{family}", Path(f"converted-{family}")
        result: Result = {"exact": {}, "names": {}}
        command("convert", source, str(place / "linen"), "--to", "linen")
        command("convert", source, str(place / "unrolled"), "--to", "linen", "--unrolled")
        command("convert", str(place / "linen"), str(place / "arrays"), "--to", "checkpoint")
        command("convert", str(place / "arrays"), str(place / "hub"), "--to", "hub")
        for other in (source, str(place / "hub")):  # not with each other: one of them may have encoders
            command("compare", other, str(place / "linen"))
        for form in ("linen", "unrolled"):
            _both(result, form, _leaves(msgpack_restore((place / form / "params.msgpack").read_bytes())))
        _both(result, "checkpoint", arrays_below(_arrays(place / "arrays")))
        result["exact"]["hub"] = results.sha(
            {
                "written": written(place / "hub"),
                "bits": {name: results.of_array(tensor) for name, tensor in tensors(place / "hub").items()},
            }
        )
        return result

    return case


def _arrays(directory: Path) -> Path:
    """The directory of orbax's arrays in a checkpoint of weights alone."""
    return min((path.parent.parent for path in directory.rglob("_METADATA")), key=lambda path: len(path.parts))


def _restored() -> Result:
    """A checkpoint is written, restored by another run, which takes a step of rate 0, and written again."""
    first = run(asked("written", {"objective": Objective.SFT(loss_on="all"), "steps": 3, "optimizer": ADAMW}))
    model = Model.HF("model", weights=Weights.Checkpoint(str(first)), tokenizer=BYTES)
    still = {"objective": ALL, "model": model, "steps": 1, "optimizer": STILL}
    second = run(asked("restored", still))
    before, after = newest_checkpoint(first), newest_checkpoint(second)
    ours, theirs = ([x for key, x in each.items() if key.startswith("trainable")] for each in (before, after))
    return {
        "sums": {"weights": results.magnitudes(ours)},
        "exact": {"restored as written": results.of_arrays(ours) == results.of_arrays(theirs)},
        "bits": {"written": results.of_arrays(before.values()), "restored": results.of_arrays(after.values())},
        "names": {"written": results.sha(sorted(before)), "restored": results.sha(sorted(after))},
    }


CASES: dict[str, Callable[[], Result]] = {
    **{name: _export(name, fields, ways) for name, (fields, ways) in EXPORTS.items()},
    **{f"convert-{path.name.replace('_', '-')}": _convert(path.name) for path in sorted(materials.FAMILIES.iterdir())},
    "restored": _restored,
}
