"""Makes the stored figures of adapters with torch, transformers and PEFT: random LoRAs, a DoRA, and their logits.

Run it in an environment that has torch, transformers and peft (stored here: torch 2.15, transformers 5.12, peft 0.21;
experts, gpt_oss and saved with torch 2.13, transformers 5.24, peft 0.21.2):

    python tests/reference/make_peft.py

For bases that make_gemma3.py and make_llama3.py wrote, it writes tests/reference/peft/<name>/ : a directory of PEFT's
own (adapter_config.json, adapter_model.safetensors) and expected.npz with token ids [B, T] and the float32 logits
[B, T, V] of the base with the adapter on it.

    python tests/reference/make_peft.py check DIRECTORY

loads what tests/reference/export_ours.py wrote there (`model`, and `adapter` on `base`), in transformers and PEFT, and
prints the largest differences of logits from those of our own model, how far both are from float64, and whether texts
have the same ids.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

HERE = Path(__file__).parent
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # All linear layers, over two periods and a tail.
    "gemma3": (
        "gemma3/plain",
        {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                                      "down_proj"]},
    ),
    # Some of them, and a scale below 1.
    "llama3": ("llama3/untied", {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    # Magnitudes, the scale of high ranks, and some layers with a rank and an alpha of their own.
    "dora": (
        "llama3/untied",
        {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True,
         "use_rslora": True, "rank_pattern": {"down_proj": 6}, "alpha_pattern": {"q_proj": 9}, "lora_dropout": 0.1},
    ),
    # Layers that have no adapter, among those that our arrays stack.
    "layers": ("llama3/untied", {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"],
                                 "layers_to_transform": [0, 2]}),
    # Projections that join several layers: they share A, and each has rows of B.
    "phi3": ("families/phi3", {"r": 4, "lora_alpha": 9, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"],
                               "use_rslora": True}),
    # A base without its principal components, which PEFT computes when it loads the adapter.
    "pissa": ("llama3/untied", {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"],
                                "init_lora_weights": "pissa"}),
    # Stacked experts, as [experts, out, in] with gate and up one after the other; some layers and the attention too.
    "experts": ("families/qwen3_moe", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "target_parameters": [
                                       "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    # As [experts, in, out], with gate and up interleaved.
    "gpt_oss": ("families/gpt_oss", {"r": 2, "lora_alpha": 5, "target_modules": [], "use_rslora": True,
                                     "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    # The whole embedding and head beside the adapter.
    "saved": ("llama3/untied", {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"],
                                "modules_to_save": ["embed_tokens", "lm_head"]}),
}  # fmt: skip
ROWS, LENGTH = 2, 20


def load(directory: Path, dtype: torch.dtype = torch.float32, named: str | None = None) -> Any:
    """A model, of the class that its config.json names, or of another one."""
    named = named or json.loads((directory / "config.json").read_text())["architectures"][0]
    labels = {"num_labels": 1} if named.endswith("ForSequenceClassification") else {}
    options = {"dtype": dtype, "attn_implementation": "eager", **labels}
    return getattr(transformers, named).from_pretrained(directory, **options).eval()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of full rows."""
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens).long()).logits.numpy()


def main(names: list[str]) -> None:
    """Writes every variant anew, or those that are named."""
    for seed, (name, (base, fields)) in enumerate(VARIANTS.items()):
        if names and name not in names:
            continue
        torch.manual_seed(seed)
        model = get_peft_model(load(HERE / base), LoraConfig(task_type="CAUSAL_LM", **fields)).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if ".lora_B." in path:  # zero at first, which would hide everything
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
                if ".lora_magnitude_vector." in path:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
                if ".modules_to_save." in path:  # equal to the base at first
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
        directory = HERE / "peft" / name
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory)
        (directory / "README.md").unlink(missing_ok=True)
        settings = json.loads((directory / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = base
        (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        tokens = np.random.default_rng(seed).integers(0, 96, (ROWS, LENGTH)).astype(np.int32)
        plain = logits_of(load(HERE / base), tokens)
        if fields.get("init_lora_weights") == "pissa":  # as it is loaded
            model = PeftModel.from_pretrained(load(HERE / base), directory).eval()
        logits = logits_of(model, tokens)
        assert np.abs(logits - plain).max() > 0.5  # the adapter is worth comparing
        np.savez_compressed(directory / "expected.npz", tokens=tokens, logits=logits)


def check(directory: Path) -> None:
    """Prints how far logits are from the figures in a directory."""
    expected = dict(np.load(directory / "expected.npz"))
    named = json.loads((directory / "model" / "config.json").read_text())["architectures"][0]
    if named.endswith("ForSequenceClassification"):  # which gives a row's last token alone
        expected["logits"] = expected["logits"][:, -1]
    largest = np.abs(expected["logits"]).max()

    def adapted(dtype: torch.dtype) -> Any:
        base = load(directory / "base", dtype, named)
        return PeftModel.from_pretrained(base, directory / "adapter").to(dtype).eval()

    for name, make in (("merged", lambda dtype: load(directory / "model", dtype)), ("adapter", adapted)):
        single, double = make(torch.float32), make(torch.float64)
        theirs, exact = (logits_of(result, expected["tokens"]) for result in (single, double))
        apart, ours, value = (np.abs(a - b).max() for a, b in (
            (theirs, expected["logits"]), (expected["logits"], exact), (theirs, exact),
        ))  # fmt: skip
        print(f"{name}: {type(single).__name__}, logits up to {largest:.3g}, at most {apart:.3g} away; from float64 "
              f"ours are {ours:.3g} away, theirs {value:.3g}")  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    texts = json.loads((directory / "texts.json").read_text(encoding="utf-8"))
    same = all(tokenizer(row["text"], add_special_tokens=False)["input_ids"] == row["ids"] for row in texts)
    print(f"tokenizer: {type(tokenizer).__name__}, {len(texts)} texts, {'the same ids' if same else 'OTHER IDS'}")
    chat = [{"role": "user", "content": "Hi"}]
    print(repr(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
