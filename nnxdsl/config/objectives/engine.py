"""Engines: what samples completions, if it is not the devices that train."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.adapter import Adapter, LoRA, LowRank
from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, filled, positive, server_url
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Engine(Spec):
    """What samples completions. A class of your own is a subclass, and a function registered for it.

    See `nnxdsl.rollouts.engine.build`.
    """

    Server: ClassVar[type[Server]]

    max_staleness: ClassVar[int] = 0
    """Updates of the weights between those that sample and those that learn, at most."""


@attrs.frozen(kw_only=True)
class Server(Engine):
    """A server that samples: `nnxdsl serve` or vLLM, on other devices or another machine.

    Before completions of a step are sampled, the weights of the policy (with its adapter merged) are written to a
    directory that both sides see, and the server loads them from there. It must be told so at its start:
    `nnxdsl serve MODEL --weights-directory DIR`, or vLLM with `VLLM_SERVER_DEV_MODE=1`. Prompts and completions are
    token ids. Each completion has a seed of its own, so that a request that a busy server refused can be sent again.

    Completions are recorded in the run's directory before anything is learned from them. A run that was killed resumes
    from what is recorded, and samples only what is not.

    vLLM's log-probabilities are at temperature 1 and of all tokens unless it is started with
    `--logprobs-mode processed_logprobs`; use that with another `temperature`, and neither `top_k` nor `top_p` with it.

    Attributes:
        url: Where it listens, without `/v1`.
        weights_directory: Where weights are written, in a directory of the run's id, by the path at which the server
            finds it too: one version and the one that is being written. None for `server_weights` beside the runs.
        api_key_variable: The environment variable with the key that the server asks for; it may be unset.
        timeout: Seconds that a request may take.
        max_logp_difference: Most nats by which log-probabilities of server and trainer may differ in the mean over the
            first completions; the run ends where they differ by more, since the server has another model.
        max_staleness: Above 0, the completions of so many batches are sampled and rewarded ahead, with the weights of
            then, while the devices train. `importance_sampling` then corrects the loss.
        adapter_only: Writes the adapter alone, in PEFT's format, and has the server load it under a new name. vLLM is
            then started with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`, `--enable-lora` and `--max-lora-rank`. The server
            has the weights of the base, which may be quantized here, and not those that another run has sent.
    """

    outside_identity: ClassVar[frozenset[str]] = frozenset(
        {"url", "weights_directory", "api_key_variable", "timeout", "max_logp_difference", "adapter_only"}
    )

    url: str = attrs.field(kw_only=False, validator=server_url)
    weights_directory: str | None = attrs.field(default=None, validator=filled)
    api_key_variable: str = attrs.field(default="NNXDSL_API_KEY", validator=filled)
    timeout: float = attrs.field(default=600.0, validator=positive)
    max_logp_difference: float = attrs.field(default=0.1, validator=positive)
    max_staleness: int = attrs.field(default=0, validator=Limit(at_least=0))
    adapter_only: bool = False

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The weights are such as the server can be given."""
        adapter, path = experiment.adapter, "objective.engine"
        if self.adapter_only:
            yield from _adapter_problems(adapter)
            return
        if experiment.quantization is not None:
            kind = type(experiment.quantization).__qualname__
            yield Problem(path, f"a server gets merged weights, and those of {kind} are not merged; leave one out")
        if adapter is not None and not isinstance(adapter, LowRank):
            message = f"a server gets merged weights, and {type(adapter).__qualname__} cannot be merged; leave one out"
            yield Problem(path, message)


def _adapter_problems(adapter: Adapter | None) -> Iterable[Problem]:
    """Why a server cannot be given an adapter."""
    path = "objective.engine.adapter_only"
    if adapter is None:
        yield Problem(path, "has no effect without an adapter; set adapter=Adapter.LoRA(), or leave it out")
    elif not isinstance(adapter, LoRA):
        kind = type(adapter).__qualname__
        yield Problem(path, f"vLLM serves LoRA, and no {kind}; leave it out, which sends merged weights")
    elif adapter.ranks or adapter.alphas:
        yield Problem(path, "vLLM has one rank and one alpha for all layers; leave out ranks and alphas, or this")
