"""How the time to the first step grows with depth: a program of many layers is one layer's, in a loop.

`python benchmarks/compile_time.py` traces, lowers and compiles a step at 8, 16, 32 and 64 layers, each in a fresh
process and without a cache. A network whose layers are all alike has them in one loop; Gemma 3 (`--gemma`) loops over
periods of six, and what fills no period stands after the loop: 2, 4, 2 and 4 layers at these depths.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version

import attrs
import gemma_shaped
import jax

import nnxdsl
from nnxdsl import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.program import blueprint

DEPTHS = (8, 16, 32, 64)
AIM = 1.2
"""Time of the deepest over that of the shallowest."""


@attrs.frozen(kw_only=True)
class Alike(Model):
    """Llama 3 of any depth, small: all layers are global.

    Attributes:
        layers: How many.
    """

    layers: int


@blueprint.architecture.register(Alike)
def _(model: Alike) -> DecoderConfig:
    small = {"embed_dim": 64, "mlp.dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return LLAMA3["8b"].with_fields(
        {**small, "layers.num_layers": model.layers, "vocab_size": 256, "attention.query_scale": 0.25}
    )


def child(layers: int, is_gemma: bool) -> dict[str, float]:
    """Processor seconds of each stage in this process, all threads together: others may be at work beside it."""
    model = gemma_shaped.Shaped(layers=layers) if is_gemma else Alike(layers=layers)
    asked = gemma_shaped.experiment(model, prompt=32, response=16)
    marks = [time.process_time()]
    program = nnxdsl.compile(asked)
    batch = program.shard_batch(gemma_shaped.pairs(asked))
    marks.append(time.process_time())
    lowered = program.lower(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch))
    marks.append(time.process_time())
    lowered.compile()
    marks.append(time.process_time())
    plan, lower, compiled = (after - before for before, after in itertools.pairwise(marks))
    return {"build": plan, "trace and lower": lower, "compile": compiled, "all": marks[-1] - marks[0]}


def fresh(layers: int, is_gemma: bool) -> dict[str, float]:
    """The same in a process of its own."""
    argv = [sys.executable, __file__, "--child", str(layers), *(["--gemma"] if is_gemma else [])]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return json.loads(subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Print the ratio, and each depth's least."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2, help="processes for each depth")
    parser.add_argument("--gemma", action="store_true", help="Gemma 3's periods instead of layers that are all alike")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.gemma)))
        return
    runs: dict[int, list[dict[str, float]]] = {depth: [] for depth in DEPTHS}
    for _ in range(options.repeat):
        for depth, result in runs.items():
            result.append(fresh(depth, options.gemma))
    least = {
        depth: {stage: min(each[stage] for each in result) for stage in result[0]} for depth, result in runs.items()
    }
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores, {options.repeat} processes each")
    ratio = least[DEPTHS[-1]]["all"] / least[DEPTHS[0]]["all"]
    print(f"{DEPTHS[-1]} layers over {DEPTHS[0]}: {ratio:.2f} (aim: {AIM})")
    for depth, stages in least.items():
        print(f"{depth:>3} layers   " + "   ".join(f"{stage} {seconds:6.2f} s" for stage, seconds in stages.items()))


if __name__ == "__main__":
    main()
