"""Makes the stored figures of weights in few bits with transformers: random bits, and the numbers they stand for.

Run it in an environment that has torch and transformers (stored here: torch 2.15, transformers 5.23):

    python tests/reference/make_few_bits.py

It writes tests/reference/few_bits.npz: blocks and scales of MXFP4 (`blocks`, `scales`) with `mxfp4`, what transformers
makes of them, and a matrix of 8-bit floats with its factors (`eight`, `factors`) with `float8`. Numbers are bfloat16,
as their bits (uint16).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def main() -> None:
    draw = np.random.default_rng(11)
    blocks = draw.integers(0, 256, (3, 6, 2, 16), dtype=np.uint8)  # [experts, out, in / 32, 16]
    scales = draw.integers(110, 135, (3, 6, 2), dtype=np.uint8)
    numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16)
    weight = torch.tensor(draw.standard_normal((256, 384)).astype(np.float32) * 60).to(torch.float8_e4m3fn)
    factors = torch.tensor(draw.uniform(1e-4, 1e-2, (2, 3)).astype(np.float32))
    kept = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128)))
    plain = Fp8Dequantize(kept)._dequantize_one(weight, factors, torch.bfloat16)
    np.savez_compressed(
        Path(__file__).parent / "few_bits.npz",
        blocks=blocks,
        scales=scales,
        mxfp4=numbers.contiguous().view(torch.uint16).numpy(),
        eight=weight.view(torch.uint8).numpy(),
        factors=factors.numpy(),
        float8=plain.contiguous().view(torch.uint16).numpy(),
    )


if __name__ == "__main__":
    main()
