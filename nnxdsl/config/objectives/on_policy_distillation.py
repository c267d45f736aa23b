"""On-policy distillation: a teacher corrects what the student itself writes; `losses/distillation.py` computes it."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)
# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import gather
from nnxdsl.config.core.fields import Pairs
from nnxdsl.config.core.validators import Limit, positive
from nnxdsl.config.model import Model
from nnxdsl.config.objectives.distillation import (
    Distance,
    ReverseKL,
    SampledReverseKL,
    check_teacher,
    check_weights,
)
from nnxdsl.config.objectives.online import Online
from nnxdsl.config.objectives.reward import Reward
from nnxdsl.config.objectives.teacher_server import TeacherServer
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class OnPolicyDistill(Online):
    """On-policy distillation (GKD, Agarwal et al. 2023, arXiv:2306.13649, with all completions the student's own).

    The policy answers prompts, and at each token that it has sampled its distribution over the vocabulary is fitted to
    the teacher's: `D(softmax(t / T), softmax(s / T))` with the logits `s` of the policy, `t` of the teacher and the
    `temperature` T, as a mean over all sampled tokens of the step. No gradient flows through the sampling. Against
    `Objective.Distill` on a file, the student learns where it itself gets to. As TRL's `DistillationTrainer`, whose
    `beta` 0, 0.5 and 1 are `Distance.ForwardKL()`, `Distance.JSD(beta=0.5)` and `Distance.ReverseKL()`.

    With `privileged_context` of the data the teacher reads the same completions after a prompt of its own, which has
    more information. A teacher that is the model itself, `teacher=model`, is then worth learning from:
    self-distillation (SDFT, Shenfeld et al. 2026, arXiv:2601.19897) from the initial weights, TRL's
    `teacher_model_kind="base"`.

    Attributes:
        teacher: A frozen model with the same vocabulary, of any size and family; it reads each batch in the same step.
        teacher_server: The teacher behind a server, in place of `teacher`. Of each sampled token it is asked for the
            log-probability, so that `distance` is `Distance.SampledReverseKL()`, or for those of its `teacher_top_k`;
            `temperature` is 1. Log-probabilities are recorded with the completions before they are learned from.
        teacher_servers: Several teachers behind servers, each with a name, in place of `teacher` (MOPD,
            arXiv:2606.30406). The column `teacher_id` of a row names the one that scores its completions.
        teacher_top_k: Number of the most likely tokens of a teacher behind a server that are compared, beside all
            others as one; see `Objective.Distill`. Where these have less than 1e-7, they count as 1e-7, as in TRL: it
            is a difference, and rounding leaves no more. None for the sampled tokens alone.
        distance: How distributions are compared.
        rewards: They are logged, of training and held-out completions, and not learned from.
        num_generations: Completions of each prompt. `batch_size` counts completions, so this divides it.
        temperature: Of sampling, and what logits of both models are divided by before they are compared.
    """

    fields_added_later: ClassVar[frozenset[str]] = Online.fields_added_later | {
        "teacher_server",
        "teacher_servers",
        "teacher_top_k",
    }
    reads_teacher_prompts: ClassVar[bool] = True

    teacher: Model | None = None
    teacher_server: TeacherServer | None = None
    teacher_servers: Pairs[str, TeacherServer] = ()
    teacher_top_k: int | None = attrs.field(default=None, validator=positive)
    distance: Distance = ReverseKL()
    rewards: tuple[Reward, ...] = ()
    num_generations: int = attrs.field(default=1, validator=Limit(at_least=1))

    @classmethod
    def field_hint(cls, name: str, value: object) -> str:
        """What to write for several teachers."""
        if name not in ("teacher", "teacher_server") or not isinstance(value, Mapping):
            return ""
        return "; several teachers are behind servers: teacher_servers={'math': TeacherServer(url), ...}"

    @property
    def served_teachers(self) -> Mapping[str, TeacherServer]:
        """See `Objective.served_teachers`."""
        return dict(self.teacher_servers) if self.teacher_server is None else {"": self.teacher_server}

    def problems(self) -> Iterable[Problem]:
        """A teacher's weights are those of a model, and samples are unbiased where they are the estimate."""
        return gather(super().problems, self._check_teacher, self._check_servers, self._check_sampling)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The teacher is a model that other experiments may give, and predicts one token at a time."""
        checks = super().check
        return gather(lambda: checks(experiment), lambda: () if self.teacher is None else check_teacher(self.teacher))

    def _check_teacher(self) -> Iterable[Problem]:
        if self.teacher is not None:
            yield from check_weights(self.teacher)
        count = (self.teacher is not None) + (self.teacher_server is not None) + (len(self.teacher_servers) > 0)
        if count != 1:
            number = ("there is none", "", "there are two", "there are three")[count]
            message = "give teacher=Model..., teacher_server=TeacherServer(url), or teacher_servers"
            yield Problem("teacher", f"{number}; {message}")

    def _check_servers(self) -> Iterable[Problem]:
        names = [name for name, _ in tuple(self.teacher_servers)]
        if len(names) == 1:
            yield Problem("teacher_servers", "expected two teachers or more, got one; give it as teacher_server")
        for index, name in enumerate(names):
            if not name.strip() or not name.isprintable():
                yield Problem(f"teacher_servers.{index}.0", f"expected the name of a teacher, got {name!r}")
            elif name in names[:index]:
                yield Problem(f"teacher_servers.{index}.0", f"{name!r} is listed twice")
        if not self.served_teachers:
            if self.teacher_top_k is not None:
                message = "has no effect: a teacher in the step gives whole distributions; leave it out"
                yield Problem("teacher_top_k", message)
            return
        is_sampled, name = isinstance(self.distance, SampledReverseKL), type(self.distance).__qualname__
        if not is_sampled and self.teacher_top_k is None:
            message = f"a server gives log-probabilities of tokens, and {name} compares whole distributions"
            yield Problem("distance", f"{message}; set Distance.SampledReverseKL(), or teacher_top_k")
        if is_sampled and self.teacher_top_k is not None:
            yield Problem("teacher_top_k", f"has no effect with {name}, which reads the sampled tokens; leave it out")
        if self.temperature != 1:
            message = (
                f"a server gives log-probabilities at temperature 1, and this is {self.temperature:g}; leave it out"
            )
            yield Problem("temperature", message)

    def _check_sampling(self) -> Iterable[Problem]:
        if isinstance(self.distance, SampledReverseKL):
            for name in ("top_k", "top_p"):
                if getattr(self, name) is not None:
                    message = "tokens that are never sampled bias SampledReverseKL; leave it out, or use ReverseKL"
                    yield Problem(name, message)
