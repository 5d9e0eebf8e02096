"""Policy-gradient losses of sampled completions.

Letters: N tokens, S completions, |y| tokens of a completion; ρ = π/π_old of a token, ρ_s of a completion; A advantage.

A row of `POLICY` gives a term for each token, how the tokens of a completion are weighted, and the unit by which the
sum is divided, over the whole optimizer batch. So the loss is a sum that can be cut anywhere between completions:

    Σ_n weight_n (term_n · correction_n + β KL_n) / units
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.errors import ConfigError, suggest
from posttrain.loss.fdivergence import capped_exp
from posttrain.loss.kl import KL, KLEstimator
from posttrain.loss.reduce import per_token, sequence_lengths, sequence_means, sequence_sums

PolicyLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gspo", "gmpo"]
Level = Literal["token", "sequence"]
Unit = Literal["tokens", "sequences", "max_length"]


@dataclass(frozen=True)
class Sampled:
    """Tokens of sampled completions. `old` is π when they were sampled: without it, this step's own, with ρ = 1."""

    logps: Tensor  # [N]
    advantages: Tensor  # [N]   of the token: its completion's, or its own
    sequence: Tensor  # [N]   completion of each token
    count: int  # S
    old: Tensor | None = None  # [N]   no gradient
    ref: Tensor | None = None  # [N]   no gradient
    correction: Tensor | None = None  # [N]   sampler mismatch: the trainer's probability over the sampler's

    def log_ratio(self) -> Tensor:
        """log ρ [N]."""
        return self.logps - (self.logps.detach() if self.old is None else self.old)

    def lengths(self) -> Tensor:
        return sequence_lengths(self.sequence, self.count)


@dataclass(frozen=True)
class PolicyOptions:
    """Constants of the losses, by the names of the config fields."""

    beta: float = 0.0  # of the KL to the reference
    epsilon: float = 0.2
    epsilon_high: float = 0.2  # cispo: the ratio's upper bound itself
    delta: float | None = None  # two-sided clipping: an upper bound of ρ whatever A's sign
    importance_sampling_level: Level = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = False  # KL × ρ


def _mean_over_sequence(values: Tensor, tokens: Sampled) -> Tensor:
    """[N] → [N]: each token gets its completion's mean."""
    return sequence_means(values, tokens.sequence, tokens.count)[tokens.sequence]


def log_importance(tokens: Sampled, level: Level) -> Tensor:
    """log ρ [N], or its mean over the completion at each of its tokens (arXiv 2507.18071, eq. 7)."""
    log_ratio = tokens.log_ratio()
    return log_ratio if level == "token" else _mean_over_sequence(log_ratio, tokens)


def _clipped(tokens: Sampled, options: PolicyOptions, level: Level) -> Tensor:
    ratio = capped_exp(log_importance(tokens, level))
    inside = ratio.clamp(1 - options.epsilon, 1 + options.epsilon_high)
    ratio = ratio if options.delta is None else ratio.clamp(max=options.delta)
    return -torch.minimum(ratio * tokens.advantages, inside * tokens.advantages)


def clipped(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """−min(ρA, clip(ρ, 1−ε, 1+ε_h)A), ρ ≤ δ where one is given (GRPO, arXiv 2402.03300, eq. 3; ε_h: DAPO, 2503.14476;
    δ: INTELLECT-2, 2505.07291). With `importance_sampling_level="sequence"` ρ is the completion's. → [N]"""
    return _clipped(tokens, options, options.importance_sampling_level)


def clipped_sequence(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """The same with the completion's ρ_s = exp(mean log ρ) (GSPO, arXiv 2507.18071, eq. 5 and 7). → [N]"""
    return _clipped(tokens, options, "sequence")


def cispo(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """−sg(min(ρ, ε_h)) A log π: the ratio is cut, never the token (arXiv 2506.13585, eq. 4 and 5). → [N]"""
    ratio = capped_exp(tokens.log_ratio().detach()).clamp(max=options.epsilon_high)
    return -ratio * tokens.advantages * tokens.logps


def sapo(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """−(4/τ) σ(τ(ρ−1)) A, τ one of two by the sign of A: a soft gate instead of a clip (arXiv 2511.20347). → [N]"""
    positive = tokens.advantages > 0
    soft, hard = options.sapo_temperature_pos, options.sapo_temperature_neg
    tau = torch.where(positive, tokens.logps.new_tensor(soft), tokens.logps.new_tensor(hard))
    ratio = capped_exp(tokens.log_ratio())
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * tokens.advantages


_LOG_SMALLEST, _LOG_LARGEST = math.log(1e-8), 20.0


def vespo(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """−sg(φ(w)) A log π, φ(w) = w^k exp(λ − λw), w = Π_t ρ_t of the completion, k and λ by the sign of A
    (arXiv 2602.10693). w is kept in [1e-8, e²⁰]; a sampler's mismatch is part of w. → [N]"""
    log_ratio = tokens.log_ratio().detach()
    if tokens.correction is not None:
        log_ratio = log_ratio + tokens.correction.clamp(min=1e-8).log()
    log_w = sequence_sums(log_ratio, tokens.sequence, tokens.count).clamp(_LOG_SMALLEST, _LOG_LARGEST)[tokens.sequence]
    positive = tokens.advantages >= 0
    k = torch.where(positive, log_w.new_tensor(options.vespo_k_pos), log_w.new_tensor(options.vespo_k_neg))
    rate = torch.where(positive, log_w.new_tensor(options.vespo_lambda_pos), log_w.new_tensor(options.vespo_lambda_neg))
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -phi * tokens.advantages * tokens.logps


def gmpo(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """−(Π_t ρ'_t)^(1/|y|) A, ρ' the token's ratio, clipped to [e^(−ε), e^(ε_h)] on the side that A's sign leaves
    (arXiv 2507.20673, eq. 4). The advantage is the completion's. → [N]"""
    log_ratio = tokens.log_ratio()
    sign = torch.where(tokens.advantages >= 0, 1.0, -1.0)
    inside = log_ratio.clamp(-options.epsilon, options.epsilon_high)
    kept = sign * torch.minimum(sign * log_ratio, sign * inside)
    return -capped_exp(_mean_over_sequence(kept, tokens)) * tokens.advantages


@dataclass(frozen=True)
class Policy:
    """A row of the table."""

    term: Callable[[Sampled, PolicyOptions], Tensor]
    unit: Unit  # what the sum is divided by: active tokens, completions, or completions × the longest allowed
    average: bool = False  # each completion counts as the mean of its tokens, not their sum
    whole: bool = False  # a term looks at its whole completion, so a token's gradient is not its own alone
    levels: tuple[Level, ...] = ("token",)


POLICY: dict[str, Policy] = {
    "grpo": Policy(clipped, "sequences", average=True, levels=("token", "sequence")),
    "bnpo": Policy(clipped, "tokens", levels=("token", "sequence")),
    "dr_grpo": Policy(clipped, "max_length", levels=("token", "sequence")),  # arXiv 2503.20783
    "dapo": Policy(clipped, "tokens", levels=("token", "sequence")),
    "luspo": Policy(clipped_sequence, "sequences", whole=True, levels=("token", "sequence")),  # arXiv 2602.05261
    "cispo": Policy(cispo, "tokens"),
    "sapo": Policy(sapo, "sequences", average=True),
    "vespo": Policy(vespo, "tokens", whole=True),
    "gspo": Policy(clipped_sequence, "sequences", average=True, whole=True, levels=("token", "sequence")),
    "gmpo": Policy(gmpo, "sequences", average=True, whole=True),
}


def check_policy(name: str, options: PolicyOptions) -> None:
    """Refuse a loss that does not exist, a level it does not have and constants outside its domain: ConfigError."""
    if name not in POLICY:
        raise ConfigError(f"loss_type={name!r} is not known.{suggest(name, POLICY)} One of: {[*POLICY]}.")
    level = options.importance_sampling_level
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level={level!r}: it must be 'token' or 'sequence'.")
    if level not in POLICY[name].levels:
        raise ConfigError(
            f"importance_sampling_level={level!r} does not go with loss_type={name!r}, which has a ratio of its own. "
            f"Leave it at 'token', or use one of {[n for n, row in POLICY.items() if 'sequence' in row.levels]}."
        )
    for field in ("sapo_temperature_pos", "sapo_temperature_neg", "delta"):
        value = getattr(options, field)
        if value is not None and value <= 0:
            raise ConfigError(f"{field}={value}: it must be above 0.")
    if options.kl_estimator not in KL:
        raise ConfigError(f"kl_estimator={options.kl_estimator!r} is not known. One of: {[*KL]}.")


def policy_losses(name: str, tokens: Sampled, options: PolicyOptions) -> Tensor:
    """weight_n (term_n · correction_n + β KL_n): the loss of each token [N], to be summed and divided by the unit."""
    row = POLICY[name]
    losses = row.term(tokens, options)
    if tokens.correction is not None and row.term is not vespo:
        losses = losses * tokens.correction
    if options.beta:
        losses = losses + options.beta * policy_kl(tokens, options)
    return per_token(losses, tokens.lengths()[tokens.sequence]) if row.average else losses


def policy_kl(tokens: Sampled, options: PolicyOptions) -> Tensor:
    """The KL to the reference at each token [N]; × ρ when its bias is corrected (DeepSeek-V3.2, arXiv 2512.02556)."""
    assert tokens.ref is not None
    found = KL[options.kl_estimator](tokens.logps, tokens.ref)
    if not options.use_bias_correction_kl:
        return found
    return found * capped_exp(log_importance(tokens, options.importance_sampling_level))


def clip_fraction(name: str, tokens: Sampled, options: PolicyOptions) -> Tensor:
    """1.0 where the bound took the token's gradient away (cispo: cut its ratio), else 0.0: [N], no gradient."""
    term, log_ratio, advantages = POLICY[name].term, tokens.log_ratio().detach(), tokens.advantages
    if term in (sapo, vespo):
        return torch.zeros_like(log_ratio)
    if term is cispo:
        return ((log_ratio.exp() > options.epsilon_high) & (advantages > 0)).float()
    if term is gmpo:
        high, low = log_ratio > options.epsilon_high, log_ratio < -options.epsilon
    else:
        level = "sequence" if term is clipped_sequence else options.importance_sampling_level
        ratio = log_importance(tokens, level).detach().exp()
        high, low = ratio > 1 + options.epsilon_high, ratio < 1 - options.epsilon
        if options.delta is not None:
            low = low | (ratio > options.delta)  # with A < 0: the two-sided bound
    return ((low & (advantages < 0)) | (high & (advantages > 0))).float()
