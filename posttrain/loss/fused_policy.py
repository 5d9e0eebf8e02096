"""`FusedLinearGRPOLoss`. See `posttrain.loss.fused`.

Letters: B rows, T positions, N read-outs (trained positions), P pairs, S completions, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posttrain.errors import ConfigError
from posttrain.loss.fused_rows import TrainedRows, check_inputs, head_spec
from posttrain.loss.policy import (
    POLICY,
    PolicyOptions,
    Sampled,
    check_policy,
    clip_fraction,
    policy_kl,
    policy_losses,
)
from posttrain.types import ScoreRequest


class FusedLinearGRPOLoss(nn.Module):
    """GRPO and its kin: every row of `POLICY`.

    Losses whose tokens stand alone have their gradient formed in the forward pass: three products with the weight and
    none repeated. In torch.distributed, what is divided by active tokens ("dapo", "cispo", "vespo") is divided by their
    mean over the ranks, so that averaging gradients over ranks gives the loss of the whole batch; all ranks must call
    it.

    Args:
        beta: Of the KL to the reference, which must then be given.
        compiled: Ignored.
        use_ref_model: Whether a reference is expected when `beta` is not 0.
        chunk_size: Ignored.
        epsilon_low: ε.
        epsilon_high: ε_h. For "cispo" the upper bound of the ratio itself.
        loss_type: A name of `POLICY`.
        max_completion_length: For "dr_grpo": the longest completion allowed.
        importance_sampling_level: "token" or "sequence". "luspo" and "gspo" are at the sequence whatever it says.
        sapo_temperature_pos, sapo_temperature_neg: τ of "sapo" by the advantage's sign.
        temperature: The logits are divided by it.
        delta: Upper bound of the ratio, whatever the advantage's sign.
        use_bias_correction_kl: KL × ratio.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: Of "vespo", by the advantage's sign.
        kl_estimator: "k1", "k2" or "k3".
        memory_mb: As in `FusedLinearDPOLoss`.

    Raises:
        ConfigError: An unknown loss, a constant outside its domain, an argument missing or without effect.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        kl_estimator: str = "k3",
        memory_mb: float = 1024,
    ) -> None:
        super().__init__()
        self.options = PolicyOptions(
            beta=beta,
            epsilon=epsilon_low,
            epsilon_high=epsilon_high,
            delta=delta,
            importance_sampling_level=importance_sampling_level,  # pyright: ignore[reportArgumentType]
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
            kl_estimator=kl_estimator,  # pyright: ignore[reportArgumentType]
            use_bias_correction_kl=use_bias_correction_kl,
        )
        check_policy(loss_type, self.options)
        if POLICY[loss_type].unit == "max_length" and not max_completion_length:
            raise ConfigError(f"max_completion_length={max_completion_length}: loss_type={loss_type!r} divides by it.")
        if beta and not use_ref_model:
            raise ConfigError(f"beta={beta} weighs a KL to a reference, and use_ref_model=False. Use beta=0.0.")
        if temperature <= 0:
            raise ConfigError(f"temperature={temperature}: it must be above 0.")
        self.loss_type, self.row, self.spec = loss_type, POLICY[loss_type], head_spec(memory_mb)
        self.max_completion_length, self.temperature = max_completion_length, temperature
        self.alone = not self.row.whole and importance_sampling_level == "token"

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """_input [B, T, H], lin_weight [V, H], selected_token_ids and attention_mask [B, T], advantages [B] or [B, T],
        bias [V], *_per_token_logps [B, T], ref_input [B, T, H] and its weight [V, H] where no log-probabilities of the
        reference are given, vllm_is_ratio [B], [B, 1] or [B, T] → loss [] and (kl [] when beta is not 0, clip_ratio
        []), means over active tokens, without gradient.

        num_items_in_batch: active tokens of the whole optimizer batch over all ranks, where the loss is divided by
            them.
        """
        check_inputs(_input, lin_weight, selected_token_ids, ("_input", "lin_weight", "selected_token_ids"))
        rows = TrainedRows(selected_token_ids, attention_mask.bool())
        gains = rows.pick(advantages).float()
        known = {
            "old": None if old_per_token_logps is None else rows.pick(old_per_token_logps).float(),
            "ref": self._reference(rows, ref_per_token_logps, ref_input, ref_weight, ref_bias),
            "correction": None if vllm_is_ratio is None else rows.pick(vllm_is_ratio).float(),
        }
        divisor = self._divisor(attention_mask, num_items_in_batch)
        lengths = rows.tokens.clamp(min=1)[rows.row]

        def objective(logps: Tensor, index: Tensor | slice) -> Tensor:
            part = {name: None if x is None else x[index] for name, x in known.items()}
            # Each token is a completion of its own here, so the weight of its completion is put on afterwards.
            alone = torch.arange(logps.shape[0], device=logps.device)
            tokens = Sampled(logps, gains[index], alone, len(alone), **part)
            found = policy_losses(self.loss_type, tokens, self.options)
            return (found / lengths[index] if self.row.average else found) / divisor

        request = ScoreRequest(objective=objective if self.alone else None, temperature=self.temperature)
        scores = rows.score(_input, lin_weight, bias, self.spec, request)
        tokens = Sampled(scores.logps, gains, rows.row, rows.count, **known)
        if scores.total is not None:
            loss = scores.total
        else:
            loss = policy_losses(self.loss_type, tokens, self.options).sum() / divisor
        return loss, self._metrics(tokens)

    def _reference(
        self, rows: TrainedRows, logps: Tensor | None, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | None:
        if not self.options.beta:
            return None
        if logps is not None:
            return rows.pick(logps.detach()).float()
        if hidden is None or weight is None:
            raise ConfigError(
                f"beta={self.options.beta} weighs a KL to a reference: pass ref_per_token_logps, or ref_input and "
                "ref_weight, or set beta=0.0."
            )
        with torch.no_grad():
            return rows.score(hidden, weight, bias, self.spec, ScoreRequest(temperature=self.temperature)).logps

    def _divisor(self, mask: Tensor, items: Tensor | float | None) -> Tensor | float:
        if self.row.unit == "sequences":
            return float(max(mask.shape[0], 1))
        if self.row.unit == "max_length":
            assert self.max_completion_length is not None
            return float(max(mask.shape[0], 1) * self.max_completion_length)
        local = mask.sum(dtype=torch.float32)
        if self.loss_type == "bnpo":
            return local.clamp(min=1)
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        if items is not None:
            local = torch.as_tensor(items, dtype=torch.float32, device=mask.device)
        elif spread:
            torch.distributed.all_reduce(local)
        return (local / (torch.distributed.get_world_size() if spread else 1)).clamp(min=1)

    @torch.no_grad()
    def _metrics(self, tokens: Sampled) -> tuple[Tensor, ...]:
        count = max(tokens.logps.shape[0], 1)
        clipped = clip_fraction(self.loss_type, tokens, self.options).sum() / count
        return (policy_kl(tokens, self.options).sum() / count, clipped) if self.options.beta else (clipped,)
