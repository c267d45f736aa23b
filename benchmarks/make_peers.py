"""Makes the environment of the trainers that nnxdsl is compared with: Tunix and TRL, of the versions of the results.

`python benchmarks/make_peers.py [DIRECTORY]`; then `python benchmarks/dpo_step.py --peers DIRECTORY`. A package index
is all it needs, and some gigabytes: the wheels of torch for Linux hold the libraries of CUDA.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

PLACE = Path("build/peers")
PACKAGES = (
    "google-tunix==0.1.7",
    "qwix==0.1.8",
    "flax==0.12.8",
    "jax==0.10.2",
    "trl==1.16.0",
    "transformers==5.12.1",
    "peft==0.21.2",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "torch==2.15.0",
)


def main() -> int:
    """Makes the environment, or completes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=PLACE)
    directory = parser.parse_args().directory
    venv.create(directory, with_pip=True)
    return subprocess.run([directory / "bin/python", "-m", "pip", "install", "-q", *PACKAGES], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
