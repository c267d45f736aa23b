"""Model families, a file for each; importing the package registers them all, and needs no jax."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
