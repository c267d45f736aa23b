"""The heads of a forward pass, one a file: what final hidden states are read for.

Importing the package registers the heads of all built-in objectives; `build.register` adds others.
"""

from nnxdsl.program.heads import distillation, rewards
from nnxdsl.program.heads.base import Head, HeadInputs, HeadOutput
from nnxdsl.program.heads.logprobs import LogProbs, build

__all__ = ["Head", "HeadInputs", "HeadOutput", "LogProbs", "build", "distillation", "rewards"]
