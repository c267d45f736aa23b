"""Objectives on preference pairs, one class for each algorithm; `losses/preference.py` computes them.

Of a pair, `c` is the log-probability of the chosen completion under the policy minus that under the reference, in
nats, summed over its `nC` tokens; `r` and `nR` are those of the rejected one, `d = c - r`, and `s(z) = log sigmoid(z)`.
A loss is a mean over pairs. Where a class has a divergence, `c` and `r` in its formula are the scores that this makes
of the log-ratios; rewards are `beta` (`tau` in IPO) times the log-ratios themselves, as in TRL. Where it has a
`ld_alpha` below 1, tokens beyond the length of the shorter completion count so much less in all sums, the
reference's too (LD-DPO, Liu et al. 2024, arXiv:2409.06411): length itself is then preferred less. Where its
`weighting` is "wpo", the loss of a pair is multiplied by `exp(u + v)`, through which no gradient goes: the means
over the tokens of both completions of `log p(token) - log(sum of p^2 over the vocabulary)` under the policy (WPO, Zhou
et al. 2024, arXiv:2406.11827, equation 2, with its sampled alignment, as in TRL).
"""

# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import attrs

from nnxdsl.config.core.base import gather
from nnxdsl.config.core.validators import Limit, not_negative, positive
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.divergence import Divergence, ReverseKL
from nnxdsl.config.objectives.multi_token import WithMTP
from nnxdsl.errors import Problem

_swapped = Limit(at_least=0, below=0.5)
"""A fraction of labels that are the wrong way round: from a half on, nothing is left to learn."""

Weighting = Literal["equal", "wpo"]

_share = Limit(at_least=0, at_most=1)


@attrs.frozen(kw_only=True)
class WithReference(WithMTP):
    """A loss of pairs that compares the policy with a reference; fields of its members mean the same in all of them.

    Attributes:
        beta: Strength of the pull towards the reference; rewards are `beta` times log-ratios, in nats.
        label_smoothing: Assumed fraction of pairs whose labels are swapped.
        divergence: How the distance from the reference is measured.
        ld_alpha: What a token counts beyond the length of the pair's shorter completion.
        weighting: "wpo" weighs pairs by how likely the policy finds their completions, see above.
    """

    is_base: ClassVar[bool] = True
    batch_kind: ClassVar[str] = "pairs"
    needs_reference: ClassVar[bool] = True


@attrs.frozen(kw_only=True)
class OfDifference(WithReference):
    """A loss of the difference `d` of the two scores of a pair."""

    is_base: ClassVar[bool] = True
    of_difference: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = WithMTP.fields_added_later | {"ld_alpha", "weighting"}


@attrs.frozen(kw_only=True)
class DPO(OfDifference):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Per pair `-(1 - e) s(beta d) - e s(-beta d)`, with the label smoothing `e` of conservative DPO (Mitchell 2023).
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    label_smoothing: float = attrs.field(default=0.0, validator=_swapped)
    divergence: Divergence = ReverseKL()
    ld_alpha: float = attrs.field(default=1.0, validator=_share)
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class RobustDPO(OfDifference):
    """DPO whose mean is right although some labels are swapped (Chowdhury et al. 2024, arXiv:2403.00409).

    Per pair `(-(1 - e) s(beta d) + e s(-beta d)) / (1 - 2 e)`.

    Attributes:
        label_smoothing: Probability `e` that the labels of a pair are swapped.
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    label_smoothing: float = attrs.field(default=0.1, validator=_swapped)
    divergence: Divergence = ReverseKL()
    ld_alpha: float = attrs.field(default=1.0, validator=_share)
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class IPO(OfDifference):
    """Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, equation 17), averaged over tokens.

    Per pair `(c / nC - r / nR - 1 / (2 tau))^2`. The paper writes sums; its authors confirmed to TRL's that they took
    means over tokens, which is what TRL does too.

    Attributes:
        tau: Strength of the pull towards the reference; the gap of the means aims at 1 / (2 tau) nats per token.
            Rewards are `tau` times summed log-ratios.
    """

    fields_added_later: ClassVar[frozenset[str]] = WithMTP.fields_added_later | {"weighting"}

    tau: float = attrs.field(default=0.1, validator=positive)
    divergence: Divergence = ReverseKL()
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class Hinge(OfDifference):
    """The hinge of SLiC-HF on DPO's rewards (Zhao et al. 2023, arXiv:2305.10425; Liu et al. 2023, arXiv:2309.06657).

    Per pair `max(0, 1 - beta d)`.

    Attributes:
        beta: Strength of the pull towards the reference: a pair counts until `d` is 1 / beta nats.
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    divergence: Divergence = ReverseKL()
    ld_alpha: float = attrs.field(default=1.0, validator=_share)
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class LengthNormalizedDPO(OfDifference):
    """DPO on means over tokens, as Tulu 3 was trained (Lambert et al. 2024, arXiv:2411.15124).

    Per pair `-s(beta (c / nC - r / nR))`.

    Attributes:
        beta: Strength of the pull towards the reference, per token; rewards are `beta` times summed log-ratios.
    """

    fields_added_later: ClassVar[frozenset[str]] = WithMTP.fields_added_later | {"weighting"}

    beta: float = attrs.field(default=5.0, validator=positive)
    divergence: Divergence = ReverseKL()
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class EXO(OfDifference):
    """Efficient exact optimisation (Ji et al. 2024, arXiv:2402.00856, equation 16): a reverse KL of preferences.

    Per pair `q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e)`, where `q = sigmoid(beta d)`.

    Attributes:
        label_smoothing: Probability `e` that the rejected completion is better; it cannot be 0, which has no
                logarithm.
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    label_smoothing: float = attrs.field(default=1e-3, validator=Limit(above=0, below=0.5))
    divergence: Divergence = ReverseKL()
    ld_alpha: float = attrs.field(default=1.0, validator=_share)
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class DiscoPOP(OfDifference):
    """The loss that a language model found: log-ratio modulated (Lu et al. 2024, arXiv:2406.08414, equation 5).

    Per pair `-(1 - g) s(beta d) + g exp(-beta d)`, where `g = sigmoid(beta d / tau)`.

    Attributes:
        tau: Temperature of the blend `g` of the logistic and the exponential loss.
    """

    beta: float = attrs.field(default=0.05, validator=positive)
    tau: float = attrs.field(default=0.05, validator=positive)
    divergence: Divergence = ReverseKL()
    ld_alpha: float = attrs.field(default=1.0, validator=_share)
    weighting: Weighting = "equal"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class NCA(WithReference):
    """Noise contrastive alignment on pairs (Chen et al. 2024, arXiv:2402.05369): likelihoods themselves, not their gap.

    Per pair `-s(beta c) - s(-beta c) / 2 - s(-beta r) / 2`.
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class BCO(WithReference):
    """Binary classifier optimisation on pairs (Jung et al. 2024, arXiv:2404.04656).

    Per pair `-s(beta c - h) - s(h - beta r)` with a reward shift `h`, through which no gradient goes: 0, as in TRL's
    `bco_pair`, or half the sum of the mean rewards of chosen and of rejected completions (the paper's definition).

    Attributes:
        shift: "none", or "batch" for the means over the whole batch, whatever its micro-batches; held-out batches
            have their own. The paper has a running mean over batches.
    """

    fields_added_later: ClassVar[frozenset[str]] = WithMTP.fields_added_later | {"shift"}

    beta: float = attrs.field(default=0.1, validator=positive)
    shift: Literal["none", "batch"] = "none"
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)

    # Other members know it by their class; here it goes by `shift`.
    @property
    def compares_across_batch(self) -> bool:
        """Whether rewards are compared with those of the whole batch."""
        return self.shift == "batch"


@attrs.frozen(kw_only=True)
class SPPO(WithReference):
    """Self-play preference optimisation (Wu et al. 2024, arXiv:2405.00675, equation 4.7) with hard labels.

    Per pair `(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`: the chosen completion is taken to win always.

    Attributes:
        beta: The inverse of the paper's `eta`: log-ratios aim at 1 / (2 beta) and -1 / (2 beta) nats.
    """

    beta: float = attrs.field(default=1e-3, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class APOZero(WithReference):
    """Anchored preference optimisation (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7), "zero".

    Per pair `1 - sigmoid(beta c) + sigmoid(beta r)`: chosen up, rejected down. It is for chosen completions
    that are better than the model's own.
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class APODown(WithReference):
    """Anchored preference optimisation (D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8), "down".

    Per pair `sigmoid(beta c) + 1 - sigmoid(beta d)`: both down, rejected further. It is for chosen
    completions that are worse than the model's own.
    """

    beta: float = attrs.field(default=0.1, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class AOT(WithReference):
    """Alignment by optimal transport (Melnyk et al. 2024, arXiv:2406.05882), paired: gaps as distributions.

    DPO's formula with another `d`: gaps of log-probabilities (chosen minus rejected) are sorted over the batch, the
    policy's and the reference's each for itself, and the k-th of the one is compared with the k-th of the other. So it
    is a loss of whole batches, whatever their micro-batches: held-out batches sort their own rows.
    """

    compares_across_batch: ClassVar[bool] = True

    beta: float = attrs.field(default=0.1, validator=positive)
    label_smoothing: float = attrs.field(default=0.0, validator=_swapped)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class AOTUnpaired(WithReference):
    """Alignment by optimal transport (Melnyk et al. 2024, arXiv:2406.05882), unpaired: chosen against rejected.

    DPO's formula with another `d`: all `c` and all `r` of the batch are sorted, each for itself, and the k-th `c` is
    compared with the k-th `r`. So it is a loss of whole batches, whatever their micro-batches: held-out batches sort
    their own rows.
    """

    compares_across_batch: ClassVar[bool] = True

    beta: float = attrs.field(default=0.1, validator=positive)
    label_smoothing: float = attrs.field(default=0.0, validator=_swapped)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class ORPO(WithMTP):
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691), without a reference.

    Per pair `-a - beta s(log odds(a) - log odds(b))`, where `a` and `b` are mean log-probabilities of the tokens of the
    chosen and the rejected completion, and `log odds(x) = x - log(1 - exp(x))`.

    Attributes:
        beta: Weight of the odds ratio beside the likelihood of the chosen completion (the paper's lambda); rewards are
            `beta` times mean log-probabilities.
    """

    batch_kind: ClassVar[str] = "pairs"

    beta: float = attrs.field(default=0.1, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class SimPO(WithMTP):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734, equation 6), without a reference.

    Per pair `-s(beta (a - b) - gamma)`, where `a` and `b` are mean log-probabilities of the tokens of the chosen and
    the rejected completion.

    Attributes:
        beta: Scale of the rewards, which are `beta` times mean log-probabilities.
        gamma: By how much the chosen reward is to exceed the rejected one.
    """

    batch_kind: ClassVar[str] = "pairs"

    beta: float = attrs.field(default=2.0, validator=positive)
    gamma: float = attrs.field(default=1.0, validator=not_negative)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class CPO(WithMTP):
    """Contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417), without a reference.

    Per pair `-s(beta (p - q)) - alpha p / nC`, where `p` and `q` are summed log-probabilities of the chosen and the
    rejected completion. The likelihood is a mean over tokens, as in its authors' code.

    Attributes:
        beta: Scale of the rewards, which are `beta` times summed log-probabilities.
        alpha: Weight of the chosen completion's likelihood; 0 for none.
    """

    batch_kind: ClassVar[str] = "pairs"

    beta: float = attrs.field(default=0.1, validator=positive)
    alpha: float = attrs.field(default=1.0, validator=not_negative)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class ChosenSFT(WithMTP):
    """Likelihood of the chosen completion alone, per token: a term of sums such as RPO, or a baseline.

    Per pair `-p / nC`, where `p` is the summed log-probability of the chosen completion (Pang et al. 2024,
    arXiv:2404.19733). It is a mean over pairs, each the mean of its own tokens.
    """

    batch_kind: ClassVar[str] = "pairs"

    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)


_NOT_IN_SUM = "is not supported in a Sum, whose terms share one forward pass"


@attrs.frozen(kw_only=True)
class Sum(WithMTP):
    """A weighted sum of objectives of pairs, all read from one pass of the model.

    DPO with `ChosenSFT` is RPO (Pang et al. 2024, arXiv:2404.19733); DPO, BCO and `ChosenSFT` with the weights 0.8, 0.2
    and 1 are MPO (Wang et al. 2024, arXiv:2411.10442). Rewards are those of the first term that has any, and each
    term's own loss is a metric, `loss/DPO`.

    Attributes:
        terms: The objectives; the loss of each is a mean over pairs.
        weights: The weight of each term.
    """

    batch_kind: ClassVar[str] = "pairs"

    terms: tuple[Objective, ...]
    weights: tuple[float, ...]
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)

    @property
    def all_terms(self) -> tuple[Objective, ...]:
        """Its terms."""
        return self.terms

    # Other members know these by their class; a sum knows them by its terms.
    @property
    def needs_reference(self) -> bool:
        """Whether one of its terms compares the policy with a reference."""
        return any(term.needs_reference for term in self.terms)

    @property
    def of_difference(self) -> bool:
        """Whether all of its terms that have a reference are losses of a difference."""
        return all(term.of_difference for term in self.terms if term.needs_reference)

    @property
    def compares_across_batch(self) -> bool:
        """Whether one of its terms is a loss of whole batches."""
        return any(term.compares_across_batch for term in self.terms)

    def problems(self) -> Iterable[Problem]:
        """Terms are objectives on pairs, each with a weight above 0."""
        return gather(self._check_terms, self._check_weights, self._check_count)

    def _check_terms(self) -> Iterable[Problem]:
        if not self.terms:
            yield Problem("terms", "is empty; expected at least one objective")
        for index, term in enumerate(self.terms):
            kind = type(term).__qualname__
            if isinstance(term, Sum):
                yield Problem(f"terms.{index}", f"{kind} within {kind}; write its terms here")
            elif term.ld_alpha != 1:
                yield Problem(f"terms.{index}.ld_alpha", f"{_NOT_IN_SUM}; set 1.0")
            elif term.mtp_loss_weight:
                yield Problem(f"terms.{index}.mtp_loss_weight", f"{_NOT_IN_SUM}; set mtp_loss_weight of the sum")
            elif term.batch_kind != "pairs":
                remedy = "; use Objective.ChosenSFT()" if kind == "Objective.SFT" else ""
                yield Problem(f"terms.{index}", f"{kind} reads {term.batch_kind}, a sum reads pairs{remedy}")
            elif not term.reads_logps:
                yield Problem(f"terms.{index}", f"{kind} has another head than the other terms; train it alone")

    def _check_weights(self) -> Iterable[Problem]:
        for index, weight in enumerate(self.weights):
            if weight <= 0:
                yield Problem(f"weights.{index}", f"expected a value > 0, got {weight}")

    def _check_count(self) -> Iterable[Problem]:
        if len(self.terms) != len(self.weights):
            yield Problem("weights", f"{len(self.weights)} of them for {len(self.terms)} terms; write one for each")
