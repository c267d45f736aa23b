"""PiSSA: the base weights of an adapter, without their principal components."""

from __future__ import annotations

import numpy as np


def residual(weight: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Weights without their r largest singular values (PiSSA, Meng et al. 2024, arXiv:2404.02948, section 3).

    PEFT stores A and B of such an adapter, and computes its base anew when it loads it. The decomposition is float32.

    Args:
        weight: `[..., in, out]`.
        a: The A of the adapter, `[..., in, r]`; a weight whose A is zero has no adapter and stays as it is.

    Returns:
        `[..., in, out]` in the dtype of `weight`.
    """
    if weight.ndim > 2:
        return np.stack([residual(layer, layer_a) for layer, layer_a in zip(weight, a, strict=True)])
    if not np.any(a):
        return weight
    kernel, rank = weight.astype(np.float32), a.shape[-1]
    left, values, right = np.linalg.svd(kernel, full_matrices=False)
    return (kernel - (left[:, :rank] * values[:rank]) @ right[:rank]).astype(weight.dtype)
