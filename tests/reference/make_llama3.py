"""Makes the stored reference figures of Llama 3 with torch and transformers: small random checkpoints and their logits.

Run it in an environment that has torch and transformers (figures stored here: torch 2.13, transformers 5.23):

    python tests/reference/make_llama3.py

It writes tests/reference/llama3/<name>/ : a Hub directory (config.json and safetensors) and expected.npz with token ids
[B, T], lengths [B] (rows are right-padded), transformers' float32 logits [B, T, V], and greedy continuations: of the
first `prompt` tokens of each row, the next tokens [B, N] that transformers' own cache gives.

    python tests/reference/make_llama3.py check DIRECTORY

loads a directory that we wrote, and prints the largest difference of its logits from expected.npz beside it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "llama3"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
VARIANTS = {
    # Heads of 16, not 24 / 4; of eight frequencies one is kept, two are mixed and five scaled, on sequences more than
    # twice as long as the "original" length.
    "tied": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    # A head of its own, RoPE as it was in Llama 3.0, and the head size left to be worked out.
    "untied": {
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
}
LENGTHS = (80, 45, 12)
PROMPT, NEW = 8, 12


def main() -> None:
    """Writes every variant anew."""
    for seed, (name, fields) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        config = LlamaConfig(**SIZES, **fields, attn_implementation="eager")
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norm scales start at one, which would hide a norm that is left out
                    parameter.copy_(1 + torch.randn_like(parameter) * 0.3)
                else:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(0, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)))
        mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=mask.long()).logits
            greedy = model.generate(
                tokens[:, :PROMPT], max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )[:, PROMPT:]
        np.savez_compressed(
            directory / "expected.npz",
            tokens=tokens.numpy().astype(np.int32),
            lengths=np.array(LENGTHS, np.int32),
            logits=(logits * mask[..., None]).numpy(),
            prompt=np.int32(PROMPT),
            greedy=greedy.numpy().astype(np.int32),
        )


def check(directory: Path) -> None:
    """Prints how far the logits of a directory are from the figures beside it."""
    expected = np.load(directory / "expected.npz")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    mask = np.arange(expected["tokens"].shape[1])[None] < expected["lengths"][:, None]
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(expected["tokens"]).long(), attention_mask=torch.tensor(mask).long()
        ).logits
    print(type(model).__name__, np.abs(logits.numpy() * mask[..., None] - expected["logits"]).max())


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]))
    else:
        main()
