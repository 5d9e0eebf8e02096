"""Losses of pairs: one completion is preferred to another.

Letters: P pairs, c = log π/π_ref(chosen) and r = log π/π_ref(rejected), summed over the completion's tokens; Δ = c − r;
a_w = log π(chosen)/|y_w| and a_l = log π(rejected)/|y_l|; ε label smoothing; m the pair's margin; σ the logistic.

Each function takes `Pairs` and `Options` and returns the loss of each pair [P]. `PREFERENCE` says what each one reads.
All are finite, with finite gradients, for log-ratios up to ±1e4 and for empty completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from posttrain.errors import ConfigError, suggest
from posttrain.loss.fdivergence import F_DIVERGENCES, FDivergence, capped_exp
from posttrain.loss.reduce import per_token

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "simpo", "orpo", "cpo", "alphapo", "tpo",
]  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """What is known of each pair. Log-probabilities are sums over the completion's tokens.

    e.g. Pairs(chosen=tensor([-4.0]), rejected=tensor([-6.0]), chosen_tokens=tensor([2]), rejected_tokens=tensor([3]))
    """

    chosen: Tensor  # [P]   log π(chosen)
    rejected: Tensor  # [P]
    chosen_tokens: Tensor  # [P]
    rejected_tokens: Tensor  # [P]
    ref_chosen: Tensor | None = None  # [P]   log π_ref(chosen), no gradient
    ref_rejected: Tensor | None = None  # [P]
    nll: Tensor | None = None  # [P]   of the chosen completion; None: −log π(chosen)/|y_w|
    third: Tensor | None = None  # [P]   log π of TPO's third completion
    third_tokens: Tensor | None = None  # [P]
    margin: Tensor | None = None  # [P]   how much better the chosen one should be, in units of the logit
    delta: Tensor | float = 0.0  # []   BCO's δ: the running mean of the rewards of both sides
    partner: Tensor | None = None  # [P]   from `aot_partners`: the reference margin each policy margin is matched with
    chosen_partner: Tensor | None = None  # [P]   the rejected log-ratio that each chosen one is matched with
    rejected_partner: Tensor | None = None  # [P]   and the other way round

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """c and r [P]. Without a reference, its log-probabilities count as 0."""
        if self.ref_chosen is None or self.ref_rejected is None:
            return self.chosen, self.rejected
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def averages(self) -> tuple[Tensor, Tensor]:
        """a_w and a_l [P]; 0 for an empty completion."""
        return per_token(self.chosen, self.chosen_tokens), per_token(self.rejected, self.rejected_tokens)

    def chosen_nll(self) -> Tensor:
        return -self.averages()[0] if self.nll is None else self.nll


@dataclass(frozen=True)
class Options:
    """Constants of the losses, by the names of the config fields. Which loss reads which is in `PREFERENCE`."""

    beta: float = 0.1  # λ in ORPO
    label_smoothing: float = 0.0  # ε: the share of labels taken to be flipped
    discopop_tau: float = 0.05
    f_divergence_type: FDivergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    simpo_gamma: float = 0.5  # SimPO's and AlphaPO's target margin
    cpo_alpha: float = 1.0  # weight of CPO's NLL
    alpha: float = 0.25  # AlphaPO's exponent; 0 is SimPO
    tpo_alpha: float = 1.0  # weight of TPO's NLL


def _scores(pairs: Pairs, options: Options) -> tuple[Tensor, Tensor]:
    """c and r under the f-divergence asked for."""
    transform = F_DIVERGENCES[options.f_divergence_type]
    c, r = pairs.log_ratios()
    return transform(c, options.f_alpha_divergence_coef), transform(r, options.f_alpha_divergence_coef)


def _logit(pairs: Pairs, options: Options) -> Tensor:
    """βΔ − m."""
    c, r = _scores(pairs, options)
    return _less_margin(options.beta * (c - r), pairs)


def _less_margin(logit: Tensor, pairs: Pairs) -> Tensor:
    return logit if pairs.margin is None else logit - pairs.margin


def _smoothed(logit: Tensor, smoothing: float) -> Tensor:
    clean = -logsigmoid(logit)
    return clean if smoothing == 0 else (1 - smoothing) * clean - smoothing * logsigmoid(-logit)


def sigmoid(pairs: Pairs, options: Options) -> Tensor:
    """−(1−ε) log σ(βΔ − m) − ε log σ(−(βΔ − m)): DPO (arXiv 2305.18290, eq. 7); with ε > 0, cDPO. → [P]"""
    return _smoothed(_logit(pairs, options), options.label_smoothing)


def hinge(pairs: Pairs, options: Options) -> Tensor:
    """max(0, 1 − βΔ + m): SLiC-HF's hinge (arXiv 2305.10425) on DPO's reward. → [P]"""
    return relu(1 - _logit(pairs, options))


def ipo(pairs: Pairs, options: Options) -> Tensor:
    """(c/|y_w| − r/|y_l| − 1/(2β))² (arXiv 2310.12036, eq. 17), on means over tokens as TRL does. → [P]"""
    c, r = _scores(pairs, options)
    difference = per_token(c, pairs.chosen_tokens) - per_token(r, pairs.rejected_tokens)
    return (difference - 1 / (2 * options.beta)).square()


def exo_pair(pairs: Pairs, options: Options) -> Tensor:
    """σ(z)(log σ(z) − log(1−ε)) + σ(−z)(log σ(−z) − log ε), z = βΔ − m and ε > 0: the reverse KL between the policy's
    and the labels' choice (arXiv 2402.00856, eq. 16). → [P]"""
    z, smoothing = _logit(pairs, options), options.label_smoothing
    kept = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-smoothing))
    return kept + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(smoothing))


def nca_pair(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(βc) − ½ log σ(−βc) − ½ log σ(−βr): noise contrastive alignment of a pair (arXiv 2402.05369). → [P]"""
    c, r = (options.beta * x for x in pairs.log_ratios())
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


def robust(pairs: Pairs, options: Options) -> Tensor:
    """[−(1−ε) log σ(z) + ε log σ(−z)]/(1−2ε), z = βΔ − m, ε < ½: unbiased when a share ε of the labels is flipped
    (arXiv 2403.00409). → [P]"""
    z, smoothing = _logit(pairs, options), options.label_smoothing
    return (-(1 - smoothing) * logsigmoid(z) + smoothing * logsigmoid(-z)) / (1 - 2 * smoothing)


def bco_pair(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(βc − δ) − log σ(−(βr − δ)), δ = `pairs.delta`: binary classifier optimisation (arXiv 2404.04656). → [P]"""
    c, r = (options.beta * x for x in pairs.log_ratios())
    return -logsigmoid(c - pairs.delta) - logsigmoid(pairs.delta - r)


def sppo_hard(pairs: Pairs, options: Options) -> Tensor:
    """(c − 1/(2β))² + (r + 1/(2β))²: self-play with win rates 1 and 0 (arXiv 2405.00675, eq. 4.7, β = 1/η). → [P]"""
    c, r = pairs.log_ratios()
    return (c - 0.5 / options.beta).square() + (r + 0.5 / options.beta).square()


def aot(pairs: Pairs, options: Options) -> Tensor:
    """ℓ(β(u − v')), u = log π(y_w)/π(y_l), v' the reference margin of the same rank in the whole optimizer batch, ℓ the
    smoothed −log σ: alignment by optimal transport, paired (arXiv 2406.05882). `aot_partners` finds v'. → [P]"""
    assert pairs.partner is not None
    return _smoothed(options.beta * (pairs.chosen - pairs.rejected - pairs.partner), options.label_smoothing)


def aot_unpaired(pairs: Pairs, options: Options) -> Tensor:
    """Σ_k ℓ(β(c₍ₖ₎ − r₍ₖ₎)) over the ranks of the whole optimizer batch (arXiv 2406.05882, unpaired). → [P]

    A pair meets two terms: its c against the r of the same rank, its r against the c of the same rank, each partner a
    constant from `aot_partners`. Each term is met from both sides, so half of its value is taken, and all of its
    gradient: each side gives the gradient of its own half."""
    assert pairs.chosen_partner is not None and pairs.rejected_partner is not None
    c, r = pairs.log_ratios()
    twice = _smoothed(options.beta * (c - pairs.chosen_partner), options.label_smoothing)
    twice = twice + _smoothed(options.beta * (pairs.rejected_partner - r), options.label_smoothing)
    return twice - 0.5 * twice.detach()


def apo_zero(pairs: Pairs, options: Options) -> Tensor:
    """1 − σ(βc) + σ(βr): chosen up, rejected down (arXiv 2408.06266, eq. 7). → [P]"""
    c, r = (options.beta * x for x in pairs.log_ratios())
    return torch.sigmoid(-c) + torch.sigmoid(r)


def apo_down(pairs: Pairs, options: Options) -> Tensor:
    """σ(βc) + 1 − σ(βΔ): both down, the rejected one further (arXiv 2408.06266, eq. 8). → [P]"""
    c, r = (options.beta * x for x in pairs.log_ratios())
    return torch.sigmoid(c) + torch.sigmoid(r - c)


def discopop(pairs: Pairs, options: Options) -> Tensor:
    """(1−m)·(−log σ(z)) + m·exp(−z), m = σ(z/τ), z = βΔ: the log-ratio modulated loss (arXiv 2406.08414, eq. 5). → [P]

    m·exp(−z) is formed as one exponential: for z far below 0 the factors under- and overflow."""
    c, r = _scores(pairs, options)
    z = options.beta * (c - r)
    modulated = z / options.discopop_tau
    return torch.sigmoid(-modulated) * -logsigmoid(z) + capped_exp(logsigmoid(modulated) - z)


def sft(pairs: Pairs, options: Options) -> Tensor:
    """The NLL of the chosen completion, a term of mixes: RPO (arXiv 2404.19733, eq. 1), MPO. → [P]"""
    return pairs.chosen_nll()


def sigmoid_norm(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(c/|y_w| − r/|y_l|) − m): DPO on means over tokens (Tülu 3, arXiv 2411.15124). → [P]"""
    c, r = _scores(pairs, options)
    difference = per_token(c, pairs.chosen_tokens) - per_token(r, pairs.rejected_tokens)
    return -logsigmoid(_less_margin(options.beta * difference, pairs))


def simpo(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(a_w − a_l) − γ − m), no reference (arXiv 2405.14734, eq. 6). → [P]"""
    chosen, rejected = pairs.averages()
    return -logsigmoid(_less_margin(options.beta * (chosen - rejected) - options.simpo_gamma, pairs))


_NEVER_CERTAIN = -1e-6  # mean log-probability above which the odds of a completion no longer grow


def _log_odds(average: Tensor) -> Tensor:
    """log(p/(1−p)) for log p [P] ≤ 0."""
    a = average.clamp(max=_NEVER_CERTAIN)
    near_zero = a > -math.log(2)
    return a - torch.where(near_zero, torch.log(-torch.expm1(a)), torch.log1p(-torch.exp(a)))


def orpo(pairs: Pairs, options: Options) -> Tensor:
    """NLL − λ log σ(log odds_w − log odds_l), odds = p/(1−p) with log p = a_w, a_l; λ = β; no reference
    (arXiv 2403.07691, eq. 6 and 7). → [P]"""
    chosen, rejected = (_log_odds(a) for a in pairs.averages())
    return pairs.chosen_nll() - options.beta * logsigmoid(chosen - rejected)


def cpo(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(log π_w − log π_l) − m) + α·NLL, no reference (arXiv 2401.08417). → [P]"""
    logit = _less_margin(options.beta * (pairs.chosen - pairs.rejected), pairs)
    return -logsigmoid(logit) + options.cpo_alpha * pairs.chosen_nll()


def alphapo(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(f(a_w) − f(a_l)) − γ − m), f(a) = (1 − exp(−αa))/α, no reference (arXiv 2501.03884). α → 0 is SimPO.
    → [P]"""
    if options.alpha == 0:
        return simpo(pairs, options)
    chosen, rejected = (capped_exp(-options.alpha * a) for a in pairs.averages())
    logit = options.beta / options.alpha * (rejected - chosen) - options.simpo_gamma
    return -logsigmoid(_less_margin(logit, pairs))


def tpo(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(log π_w − log π_l)) − α log π(y₃)/|y₃|: a third, best completion is learned by likelihood, no reference
    (arXiv 2405.16681). The paper sums over the third completion's tokens; the mean keeps α apart from its length. → [P]
    """
    assert pairs.third is not None and pairs.third_tokens is not None
    preferred = -logsigmoid(options.beta * (pairs.chosen - pairs.rejected))
    return preferred - options.tpo_alpha * per_token(pairs.third, pairs.third_tokens)


@dataclass(frozen=True)
class Preference:
    """A row of the table: the loss, and what of its arguments it reads."""

    loss: Callable[[Pairs, Options], Tensor]
    reads: frozenset[str]  # fields of Options
    reference: bool = True
    margin: bool = False  # it can take a margin
    batch: str | None = None  # what of the whole optimizer batch it needs: "partners" (`aot_partners`) or "delta"
    third: bool = False

    def __call__(self, pairs: Pairs, options: Options) -> Tensor:
        return self.loss(pairs, options)


_F = "f_divergence_type f_alpha_divergence_coef"


def _row(loss: Callable[[Pairs, Options], Tensor], reads: str, **more: bool | str | None) -> Preference:
    return Preference(loss, frozenset(reads.split()), **more)  # pyright: ignore[reportArgumentType]


PREFERENCE: dict[str, Preference] = {
    "sigmoid": _row(sigmoid, f"beta label_smoothing {_F}", margin=True),
    "hinge": _row(hinge, f"beta {_F}", margin=True),
    "ipo": _row(ipo, f"beta {_F}"),
    "exo_pair": _row(exo_pair, f"beta label_smoothing {_F}", margin=True),
    "nca_pair": _row(nca_pair, "beta"),
    "robust": _row(robust, f"beta label_smoothing {_F}", margin=True),
    "bco_pair": _row(bco_pair, "beta", batch="delta"),
    "sppo_hard": _row(sppo_hard, "beta"),
    "aot": _row(aot, "beta label_smoothing", batch="partners"),
    "aot_unpaired": _row(aot_unpaired, "beta label_smoothing", batch="partners"),
    "apo_zero": _row(apo_zero, "beta"),
    "apo_down": _row(apo_down, "beta"),
    "discopop": _row(discopop, f"beta discopop_tau {_F}"),
    "sft": _row(sft, "", reference=False),
    "sigmoid_norm": _row(sigmoid_norm, f"beta {_F}", margin=True),
    "simpo": _row(simpo, "beta simpo_gamma", reference=False, margin=True),
    "orpo": _row(orpo, "beta", reference=False),
    "cpo": _row(cpo, "beta cpo_alpha", reference=False, margin=True),
    "alphapo": _row(alphapo, "beta alpha simpo_gamma", reference=False, margin=True),
    "tpo": _row(tpo, "beta tpo_alpha", reference=False, third=True),
}


def check_options(names: Sequence[str], options: Options, given: Iterable[str] = ()) -> None:
    """Refuse a loss that does not exist, constants outside a loss's domain, and a field that no loss of `names` reads.

    A field counts as set when it is in `given` or differs from its default. Raises ConfigError.
    """
    for name in names:
        if name not in PREFERENCE:
            raise ConfigError(f"loss_type={name!r} is not known.{suggest(name, PREFERENCE)} One of: {[*PREFERENCE]}.")
    read = frozenset[str]().union(*(PREFERENCE[name].reads for name in names))
    given = set(given)
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name not in read and (f.name in given or value != f.default):
            readers = [name for name, row in PREFERENCE.items() if f.name in row.reads]
            raise ConfigError(f"{f.name}={value!r} has no effect on loss_type={[*names]}. It is read by: {readers}.")
    alpha, divergence = options.f_alpha_divergence_coef, options.f_divergence_type
    if divergence != "alpha_divergence" and alpha != Options.f_alpha_divergence_coef:
        raise ConfigError(
            f"f_alpha_divergence_coef={alpha} has no effect with f_divergence_type={divergence!r}; set "
            "'alpha_divergence', or leave it out."
        )
    smoothing = options.label_smoothing
    if "exo_pair" in names and not 0 < smoothing < 1:
        raise ConfigError(f"label_smoothing={smoothing} with loss_type='exo_pair': it must be in (0, 1), e.g. 1e-3.")
    others = [name for name in names if name != "exo_pair"]
    smoothed = [name for name in others if "label_smoothing" in PREFERENCE[name].reads]
    if not 0 <= smoothing < 0.5 and (smoothed or "exo_pair" not in names):
        raise ConfigError(f"label_smoothing={smoothing} with loss_type={[*names]}: it must be in [0, 0.5).")
    if "beta" in read and options.beta <= 0:
        raise ConfigError(f"beta={options.beta}: it must be above 0.")
    if "discopop" in names and options.discopop_tau <= 0:
        raise ConfigError(f"discopop_tau={options.discopop_tau}: it must be above 0.")


def mix(
    names: Sequence[str],
    pairs: Pairs,
    options: Options,
    loss_weights: Sequence[float] | None = None,
    pair_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ_i loss_weights[i] · loss_i of each pair, times its weight: [P]; and each loss unweighted, detached: [P].

    Weights default to 1. Raises ConfigError when there are not as many as losses.
    """
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    if len(weights) != len(names):
        raise ConfigError(f"loss_weights={weights}: {len(weights)} weights for {len(names)} losses {[*names]}.")
    found = {name: PREFERENCE[name](pairs, options) for name in names}
    total = torch.stack([weight * found[name] for name, weight in zip(names, weights, strict=True)]).sum(0)
    total = total if pair_weights is None else total * pair_weights
    return total, {name: loss.detach() for name, loss in found.items()}


def same_rank(values: Tensor, others: Tensor) -> Tensor:
    """For each of values [P], the one of others [P] with the same rank. Ties keep their order."""
    rank = torch.empty_like(values, dtype=torch.long)
    order = values.argsort(stable=True)
    rank[order] = torch.arange(values.shape[0], device=values.device)
    return others.sort(stable=True).values[rank]


def aot_partners(pairs: Pairs) -> dict[str, Tensor]:
    """From all pairs of an optimizer batch, the fields of `Pairs` that `aot` and `aot_unpaired` need, [P] each.

    The losses are then sums over pairs, however the batch is cut. Call it without gradients, with the policy's
    log-probabilities of this step.
    """
    c, r = (x.detach() for x in pairs.log_ratios())
    found = {"chosen_partner": same_rank(c, r), "rejected_partner": same_rank(r, c)}
    if pairs.ref_chosen is None or pairs.ref_rejected is None:
        return found | {"partner": torch.zeros_like(c)}
    margins = (pairs.chosen - pairs.rejected).detach()
    return found | {"partner": same_rank(margins, pairs.ref_chosen - pairs.ref_rejected)}
