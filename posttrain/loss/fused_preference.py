"""The fused losses of preferences: `FusedLinearDPOLoss` and `FusedLinearKTOLoss`. See `posttrain.loss.fused`.

Letters: B rows, T positions, N read-outs (trained positions), P pairs, S completions, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError
from posttrain.loss.fused_rows import TrainedRows, check_inputs, head_spec, reference_logps
from posttrain.loss.preference import PREFERENCE, Options, Pairs, aot_partners, check_options, mix
from posttrain.loss.unpaired import UNPAIRED, Unpaired, UnpairedOptions, check_unpaired
from posttrain.types import ScoreRequest, TokenScores


class FusedLinearDPOLoss(nn.Module):
    """DPO and its kin: every row of `PREFERENCE`, and mixes of them.

    Rows are stacked as Liger and TRL stack them: all chosen, then all rejected (then TPO's third completions). The loss
    is the mean over pairs, plus α times the chosen completions' NLL (mean over tokens) with `compute_nll_loss`.

    Args:
        ignore_index: Target of positions that are not trained. They are not projected.
        beta: β. ORPO's λ.
        alpha: Weight of the NLL added by `compute_nll_loss`.
        compute_nll_loss: Whether to add the NLL.
        compiled: Ignored.
        use_ref_model: Whether the reference's hidden states and weight are expected. False: its log-probabilities are
            0.
        average_log_prob: Means over the completion's tokens instead of sums, of policy and reference.
        chunk_size: Ignored.
        loss_type: A name of `PREFERENCE`, or several.
        label_smoothing: ε, where the loss has it.
        discopop_tau: τ of "discopop".
        loss_weights: Weight of each loss of a mix. Default: 1 each.
        options: The other constants, by the names of the fields of `Options`, e.g. {"simpo_gamma": 1.0}.
        memory_mb: What the head may take. Logits are kept for the backward pass when they fit, else projected again; a
            frozen weight needs neither.

    Raises:
        ConfigError: An unknown loss, a constant outside its domain or that no loss reads, shapes that do not agree.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str | Sequence[str] = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        loss_weights: Sequence[float] | None = None,
        options: dict[str, Any] | None = None,
        memory_mb: float = 1024,
    ) -> None:
        super().__init__()
        self.names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
        known = {f.name for f in fields(Options)} - {"beta", "label_smoothing", "discopop_tau"}
        if unknown := set(options or {}) - known:
            raise ConfigError(f"options={options}: {sorted(unknown)} is not among {sorted(known)}.")
        self.options = Options(beta=beta, label_smoothing=label_smoothing, discopop_tau=discopop_tau, **(options or {}))
        check_options(self.names, self.options, options or ())
        self.rows = [PREFERENCE[name] for name in self.names]
        if loss_weights is not None and len(loss_weights) != len(self.names):
            raise ConfigError(f"loss_weights={loss_weights}: {len(self.names)} losses need as many weights.")
        self.loss_weights, self.spec = loss_weights, head_spec(memory_mb)
        self.ignore_index, self.alpha, self.compute_nll_loss = ignore_index, alpha, compute_nll_loss
        self.average_log_prob = average_log_prob
        self.use_ref_model = use_ref_model and any(row.reference for row in self.rows)
        self.parts = 3 if any(row.third for row in self.rows) else 2

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        *,
        delta: Tensor | float = 0.0,
        margin: Tensor | None = None,
        pair_weights: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """lin_weight [V, H], _input [2P, T, H], target [2P, T], bias [V], ref_* alike, delta [], margin and
        pair_weights [P] → loss [] and (chosen_logps [P], rejected_logps [P], chosen_logits_mean [],
        rejected_logits_mean [], nll_loss [], chosen_rewards [P], rejected_rewards [P]), which carry no gradient.

        The means of the logits are over trained positions: no other one is projected. "aot" sorts over the call's
        pairs.
        """
        check_inputs(_input, lin_weight, target, ("_input", "lin_weight", "target"))
        self._check_call(target, ref_input, ref_weight, margin)
        rows = TrainedRows(target, target != self.ignore_index)
        P = target.shape[0] // self.parts
        scores = rows.score(_input, lin_weight, bias, self.spec, ScoreRequest(mean_logit=True))
        logps = rows.sums(scores.logps, self.average_log_prob).split(P)
        tokens = rows.tokens.split(P)
        reference = (ref_input, ref_weight, ref_bias) if self.use_ref_model else (None, None, None)
        ref = reference_logps(rows, reference, self.average_log_prob, self.spec)
        known = torch.ones_like(rows.tokens).split(P) if self.average_log_prob else tokens
        pairs = Pairs(
            *(logps[0], logps[1], known[0], known[1]),
            *((None, None) if ref is None else ref.split(P)[:2]),
            third=logps[2] if self.parts == 3 else None,
            third_tokens=known[2] if self.parts == 3 else None,
            margin=margin,
            delta=delta,
        )
        if any(row.batch == "partners" for row in self.rows):
            pairs = Pairs(**{**vars(pairs), **aot_partners(pairs)})
        losses, _ = mix(self.names, pairs, self.options, self.loss_weights, pair_weights)
        nll = -rows.sums(scores.logps)[:P].sum() / tokens[0].sum().clamp(min=1)
        loss = losses.sum() / max(P, 1) + (self.alpha * nll if self.compute_nll_loss else 0)
        return loss, self._metrics(rows, pairs, scores, nll, P)

    def _metrics(self, rows: TrainedRows, pairs: Pairs, scores: TokenScores, nll: Tensor, P: int) -> tuple[Tensor, ...]:
        assert scores.mean_logit is not None
        logits = rows.sums(scores.mean_logit).split(P)
        means = [
            total.sum() / count.sum().clamp(min=1) for total, count in zip(logits, rows.tokens.split(P), strict=True)
        ]
        rewards = [self.options.beta * x for x in pairs.log_ratios()]
        nll = nll if self.compute_nll_loss else torch.zeros_like(nll)
        found = (pairs.chosen, pairs.rejected, means[0], means[1], nll, *rewards)
        return tuple(x.detach() for x in found)

    def _check_call(self, target: Tensor, ref_input: Tensor | None, ref_weight: Tensor | None, margin: Any) -> None:
        if target.shape[0] % self.parts:
            parts = "chosen, rejected and third" if self.parts == 3 else "chosen and rejected"
            raise ConfigError(f"target has {target.shape[0]} rows: {parts} completions are stacked, as many of each.")
        if self.use_ref_model and (ref_input is None or ref_weight is None):
            raise ConfigError(
                "ref_input and ref_weight are needed. Pass them, or use_ref_model=False for a reference of 0."
            )
        if not self.use_ref_model and ref_input is not None:
            raise ConfigError(
                f"ref_input has no effect: loss_type={self.names} has no reference, or use_ref_model is False. "
                "Leave it out."
            )
        if margin is not None and not all(row.margin for row in self.rows):
            taken = [name for name, row in PREFERENCE.items() if row.margin]
            raise ConfigError(f"margin has no effect on loss_type={self.names}. It is read by: {taken}.")


class FusedLinearKTOLoss(nn.Module):
    """KTO and its kin: every row of `UNPAIRED`. The loss is the mean over completions.

    Args:
        ignore_index: Target of positions that are not trained. They are not projected.
        beta: β.
        compiled: Ignored.
        use_ref_model: Whether the reference's hidden states and weight are expected. False: its log-probabilities are
            0.
        average_log_prob: Means over the completion's tokens instead of sums, of policy and reference.
        chunk_size: Ignored.
        loss_type: A name of `UNPAIRED`.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
        memory_mb: As in `FusedLinearDPOLoss`.

    Raises:
        ConfigError: An unknown loss, a constant outside its domain, an argument missing or without effect.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        memory_mb: float = 1024,
    ) -> None:
        super().__init__()
        self.loss_type, self.spec = loss_type, head_spec(memory_mb)
        self.options = UnpairedOptions(beta, desirable_weight, undesirable_weight)
        check_unpaired(loss_type, self.options)
        self.ignore_index, self.use_ref_model, self.average_log_prob = ignore_index, use_ref_model, average_log_prob

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
        *,
        delta: Tensor | float = 0.0,
        udm: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """_input [S, T, H], lin_weight [V, H], target [S, T], bias [V], preference_labels bool [S], ref_* alike, kl []
        or [S] (z, from `kl_estimate`; none counts as 0), delta [], udm [S] → loss [] and (chosen_logps_sum,
        rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, chosen_rewards_sum, rejected_rewards_sum), [] each,
        without gradient. The sums of the logits are over trained positions.
        """
        check_inputs(_input, lin_weight, target, ("_input", "lin_weight", "target"))
        if preference_labels is None or preference_labels.dtype != torch.bool:
            found = None if preference_labels is None else preference_labels.dtype
            raise ConfigError(f"preference_labels must be a bool tensor [{target.shape[0]}], not {found}.")
        if kl is not None and UNPAIRED[self.loss_type].batch != "kl":
            raise ConfigError(f"kl has no effect on loss_type={self.loss_type!r}. It is read by: ['kto'].")
        if self.use_ref_model != (ref_input is not None and ref_weight is not None):
            raise ConfigError(
                f"use_ref_model={self.use_ref_model}, and ref_input and ref_weight are "
                f"{'missing' if self.use_ref_model else 'given'}. They go together."
            )
        rows = TrainedRows(target, target != self.ignore_index)
        scores = rows.score(_input, lin_weight, bias, self.spec, ScoreRequest(mean_logit=True))
        logps = rows.sums(scores.logps, self.average_log_prob)
        ref = reference_logps(rows, (ref_input, ref_weight, ref_bias), self.average_log_prob, self.spec)
        unpaired = Unpaired(logps, ref, preference_labels, 0.0 if kl is None else kl.detach(), delta, udm)
        losses = UNPAIRED[self.loss_type](unpaired, self.options)
        assert scores.mean_logit is not None
        logits = rows.sums(scores.mean_logit) * lin_weight.shape[0]
        chosen = preference_labels.to(logps.dtype)
        values = (logps, logits, self.options.beta * unpaired.log_ratios())
        metrics = tuple((x.detach() * side).sum() for x in values for side in (chosen, 1 - chosen))
        return losses.sum() / max(target.shape[0], 1), metrics
