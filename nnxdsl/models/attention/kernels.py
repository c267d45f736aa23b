"""The attention kernels by name, in the order in which "auto" tries them."""

from __future__ import annotations

from functools import lru_cache

from nnxdsl.config.core.imports import import_name
from nnxdsl.models.attention.blockwise import Chunked
from nnxdsl.models.attention.cudnn import CuDNN
from nnxdsl.models.attention.dense import Dense
from nnxdsl.models.attention.kernel import AttentionKernel
from nnxdsl.models.attention.splash import Splash

KERNELS: dict[str, AttentionKernel] = {kernel.name: kernel for kernel in (CuDNN(), Splash(), Chunked(), Dense())}


def find_kernel(name: str) -> AttentionKernel:
    """The kernel of this name.

    Args:
        name: one of `KERNELS`, or `module:Class` of another package.

    Raises:
        ValueError: it cannot be imported, or is no kernel.
    """
    return KERNELS[name] if name in KERNELS else _imported(name)


@lru_cache
def _imported(name: str) -> AttentionKernel:
    module = import_name(name)
    kernel = module() if isinstance(module, type) else None
    if isinstance(kernel, AttentionKernel):
        return kernel
    raise ValueError(f"'{name}' is no subclass of {AttentionKernel.__module__}.{AttentionKernel.__qualname__}")
