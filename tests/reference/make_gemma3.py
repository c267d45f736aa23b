"""Makes the stored reference figures of Gemma 3 with torch and transformers: small random checkpoints and their logits.

Run it in an environment that has torch and transformers (figures stored here: torch 2.13, transformers 5.23):

    python tests/reference/make_gemma3.py

It writes tests/reference/gemma3/<name>/ : a Hub directory (config.json and safetensors, in one file or in shards) and
expected.npz with token ids [B, T], lengths [B] (rows are right-padded) and transformers' float32 logits [B, T, V].
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

HERE = Path(__file__).parent / "gemma3"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 12,  # not head_dim, so that mistaking one for the other shows
}
VARIANTS = {
    # Published pattern, no scaling: one period of six and a tail of two.
    "plain": {"num_hidden_layers": 8},
    # Two periods of three and a tail; positions of global layers divided by 8; several shards.
    "scaled": {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    },
}
LENGTHS = (24, 17, 9)


def main() -> None:
    """Writes every variant anew."""
    for seed, (name, fields) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        config = Gemma3TextConfig(**SIZES, **fields, attn_implementation="eager")
        model = Gemma3ForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Norm scales start at zero, which would hide a norm that is left out or in the wrong place.
                spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * spread)
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory, max_shard_size="40KB" if name == "scaled" else "5GB")
        (directory / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(0, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)))
        mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=mask.long()).logits
        np.savez_compressed(
            directory / "expected.npz",
            tokens=tokens.numpy().astype(np.int32),
            lengths=np.array(LENGTHS, np.int32),
            logits=(logits * mask[..., None]).numpy(),
        )


if __name__ == "__main__":
    main()
