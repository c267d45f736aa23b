"""What objectives have in common whose completions the policy samples, in `rollouts/`."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.batching import Padded
from nnxdsl.config.core.base import gather
from nnxdsl.config.core.validators import Limit, inner, positive
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.engine import Engine
from nnxdsl.config.objectives.environment import Environment
from nnxdsl.config.objectives.reward import Reward
from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Online(Objective):
    """An objective of completions that the policy samples; fields of its members mean the same in all of them.

    Attributes:
        rewards: The reward of a completion is the weighted sum of these.
        num_generations: Completions of each prompt, a group. `batch_size` counts completions, so this divides it.
        temperature: Of sampling. The policy that is trained is the one that divides its logits by it, as in TRL.
        top_k: Sample from the k most likely tokens only; None for all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to it or more (of those that
            `top_k` leaves, if it is given); None for all.
        num_speculative_tokens: Tokens that the model's multi-token-prediction layer (`mtp_layers`) drafts for each of
            its passes: the same completions, up to the rounding of logits. The layer is not trained. 0 for none.
        kv_cache_dtype: Dtype of keys and values while completions are sampled: "int8" with a float32 scale for each
            token and head takes about half the memory of bfloat16; None for that of activations. Log-probabilities in
            sampling then differ from those in training, which `importance_sampling` corrects where an objective has
            it. Metrics say by how much. The name is vLLM's.
        environment: What answers a completion, so that an episode has several turns; None for single completions.
        engine: What samples, as `Engine.Server(url)`; None for the devices that train.
    """

    is_base: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = frozenset({"engine", "kv_cache_dtype"})
    batch_kind: ClassVar[str] = "prompts"
    max_num_gen_batches: ClassVar[int] = 1
    """Most batches of completions that are sampled for one that is trained on."""
    mask_truncated_completions: ClassVar[bool] = False
    """Whether completions that reached the maximal length before their end are left out of the loss."""

    rewards: tuple[Reward, ...]
    num_generations: int = attrs.field(default=8, validator=Limit(at_least=2))
    temperature: float = attrs.field(default=1.0, validator=positive)
    top_k: int | None = attrs.field(default=None, validator=positive)
    top_p: float | None = attrs.field(default=None, validator=inner)
    num_speculative_tokens: int = attrs.field(default=0, validator=Limit(at_least=0))
    kv_cache_dtype: KVCacheDtype | None = None
    environment: Environment | None = None
    engine: Engine | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether completions are recorded before they are learned from: a server would not give the same again."""
        return self.engine is not None or len(self.served_teachers) > 0

    def problems(self) -> Iterable[Problem]:
        """No reward is there twice, and those of an environment have one."""
        if self.engine is not None and self.num_speculative_tokens:
            yield Problem("num_speculative_tokens", "has no effect with an engine, which has drafts of its own")
        if self.engine is not None and self.kv_cache_dtype:
            yield Problem("kv_cache_dtype", "has no effect with an engine, which has a cache of its own")
        names = [reward.name for reward in self.rewards]
        for index, name in enumerate(names):
            if name in names[:index]:
                other = "" if isinstance(self.rewards[index], Reward.Function) else ", or one of the two another name"
                yield Problem(f"rewards.{index}.name", f"'{name}' is named twice; give it one weight{other}")
            if self.environment is None and isinstance(self.rewards[index], Reward.Environment):
                yield Problem(f"rewards.{index}", "there is no environment; set environment=Environment(name)")

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Groups fill batches, and their completions are sampled: in no file, and by the weights that are trained."""
        return gather(
            lambda: self._check_groups(experiment),
            lambda: self._check_batching(experiment),
            lambda: self._check_workers(experiment),
            lambda: () if self.engine is None else self.engine.check(experiment),
        )

    def _check_groups(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.batch_size % self.num_generations:
            message = f"{self.num_generations} completions of a prompt do not divide batch_size={experiment.batch_size}"
            yield Problem("objective.num_generations", message)

    def _check_batching(self, experiment: Experiment) -> Iterable[Problem]:
        if not isinstance(experiment.batching, Padded):
            kind = type(experiment.batching).__qualname__
            yield Problem("batching", f"{kind} arranges rows of a file, and completions are in none; leave it out")

    def _check_workers(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.outer is not None:
            name = type(self).__qualname__
            message = f"completions are sampled with the outer weights, and {name} trains workers with others; set None"
            yield Problem("outer", message)
