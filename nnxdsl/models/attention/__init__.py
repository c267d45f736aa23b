"""Attention: masks, the KV cache, blockwise and fused kernels, multi-head latent attention (MLA)."""
