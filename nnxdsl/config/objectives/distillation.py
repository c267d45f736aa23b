"""Knowledge distillation from a teacher model; `losses/distillation.py` computes it."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, inner, not_negative, positive
from nnxdsl.config.model import Model
from nnxdsl.config.objectives.multi_token import WithMTP
from nnxdsl.config.weights import PEFT
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment
    from nnxdsl.config.objectives import distillation as members


@attrs.frozen(kw_only=True)
class Distance(Spec):
    """The distance of the student's distribution `q` over the vocabulary from the teacher's, `p`; in nats."""

    ForwardKL: ClassVar[type[members.ForwardKL]]
    ReverseKL: ClassVar[type[members.ReverseKL]]
    JSD: ClassVar[type[members.JSD]]
    SampledReverseKL: ClassVar[type[members.SampledReverseKL]]


@attrs.frozen(kw_only=True)
class ForwardKL(Distance):
    """`KL(p, q)`: mode-covering (Hinton et al. 2015, arXiv:1503.02531)."""


@attrs.frozen(kw_only=True)
class ReverseKL(Distance):
    """`KL(q, p)`: mode-seeking (Gu et al. 2023, arXiv:2306.08543)."""


@attrs.frozen(kw_only=True)
class JSD(Distance):
    """The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2023, arXiv:2306.13649, equation 1).

    `beta KL(p, m) + (1 - beta) KL(q, m)` with `m = beta p + (1 - beta) q`. It is bounded; its gradient leans to that of
    forward KL as beta goes to 0, to that of reverse KL as it goes to 1.

    Attributes:
        beta: Share of the teacher in the mixture.
    """

    beta: float = attrs.field(default=0.5, validator=inner)


@attrs.frozen(kw_only=True)
class SampledReverseKL(Distance):
    """An estimate of `KL(q, p)` from the sampled tokens alone, for `Objective.OnPolicyDistill`.

    It is `log q(token) - log p(token)`, and its gradient that times the gradient of `log q(token)`: the policy gradient
    whose reward of a token is `log p - log q`, with no discounting of later ones (Lu 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation). Both are those of reverse KL in expectation. Of the
    teacher it takes one log-probability for each token.
    """


@attrs.frozen(kw_only=True)
class Distill(WithMTP):
    """Distillation: at each target token the student's distribution over the vocabulary is fitted to the teacher's.

    Per target token `(1 - h) T^2 D(softmax(t / T), softmax(s / T)) - h log softmax(s)[token]`, with the logits `s` of
    the model that is trained and `t` of the teacher, `T` the temperature and `h` the weight of hard labels; the mean is
    over all target tokens of the batch. `T^2` keeps gradients as large whatever the temperature (Hinton et al. 2015,
    arXiv:1503.02531, section 2); TRL's GKD leaves it out. With a `feature_weight`, so many times `1 - cos(x, y)` of the
    final hidden states that predict the token, the model's `x` and the teacher's `y`, is added, so that hidden features
    are matched as well as outputs (features as in FitNets, Romero et al. 2015, arXiv:1412.6550, compared by
    their direction).

    With a `top_k`, both distributions are first made coarser: each of the teacher's `k` most likely tokens is a class,
    all other tokens together are one more, with the remaining mass. `D` is between these classes; none of the three
    distances grows by that, and with `k` as large as the vocabulary it is unchanged. The teacher's outputs are then
    small enough to be precomputed before the first step and cached beside the runs: the teacher is not in memory during
    training. The class of the others is TRL's `loss_add_tail`; without it the `k` probabilities alone are a biased
    target (Anshumann et al. 2025, arXiv:2503.16870).

    Attributes:
        teacher: A frozen model with the same vocabulary, of any size and family; it reads each batch in the same step,
            or each row once, before the first step.
        distance: How distributions are compared.
        temperature: What logits of both are divided by before they are.
        hard_weight: Weight of the tokens themselves as labels, as in `Objective.SFT`.
        feature_weight: Weight of the distance of hidden states, which the teacher then has as many of.
        loss_on: Which tokens are targets, as in `Objective.SFT`.
        top_k: Number of the teacher's most likely tokens that are precomputed for each target; None computes the whole
            distribution in every step.
    """

    batch_kind: ClassVar[str] = "sequences"
    is_token_sum: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = WithMTP.fields_added_later | {"feature_weight", "top_k"}

    teacher: Model
    distance: Distance = ForwardKL()
    temperature: float = attrs.field(default=1.0, validator=positive)
    hard_weight: float = attrs.field(default=0.0, validator=Limit(at_least=0, below=1))
    loss_on: Literal["assistant", "last_assistant", "completion", "all"] = "assistant"
    feature_weight: float = attrs.field(default=0.0, validator=not_negative)
    top_k: int | None = attrs.field(default=None, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)

    def problems(self) -> Iterable[Problem]:
        """A teacher's weights are those of a model, and only its token probabilities can be precomputed."""
        if isinstance(self.distance, SampledReverseKL):
            message = "SampledReverseKL needs tokens that the model itself has sampled; use Objective.OnPolicyDistill"
            yield Problem("distance", message)
        if self.top_k is not None and self.feature_weight:
            message = "hidden states cannot be precomputed, and top_k precomputes the teacher; unset one of them"
            yield Problem("feature_weight", message)
        yield from check_weights(self.teacher)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The teacher is a model that other experiments may give, and predicts one token at a time."""
        yield from super().check(experiment)
        yield from check_teacher(self.teacher)

    @property
    def teacher_top_k(self) -> int | None:
        """See `Objective.teacher_top_k`."""
        return self.top_k


def check_weights(teacher: Model) -> Iterable[Problem]:
    """A teacher's weights are those of a model."""
    if isinstance(teacher.weights, PEFT):
        yield Problem("teacher.weights", "Weights.PEFT is an adapter and no model; merge it by Weights.Merged")


def check_teacher(teacher: Model) -> Iterable[Problem]:
    """A teacher is a model that other experiments may give, and predicts one token at a time."""
    yield from teacher.check_earlier("objective.teacher")
    if teacher.mtp_layers:
        message = "has no effect: a teacher's multi-token prediction (MTP) layer is not used; set 0"
        yield Problem("objective.teacher.mtp_layers", message)
