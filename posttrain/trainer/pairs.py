"""What trainers of preference pairs share: the fields of their losses, their experience, and their metrics.

Letters: N read-outs, S sequences, P pairs; sequences 2k and 2k + 1 are the chosen and the rejected one of pair k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from posttrain.errors import ConfigError
from posttrain.loss.fdivergence import FDivergence
from posttrain.loss.preference import PREFERENCE, Options, Pairs, aot_partners, check_options
from posttrain.loss.reduce import sequence_lengths, sequence_sums
from posttrain.loss.reweight import ld_weights
from posttrain.parallel.ranks import all_sum, gather_objects, rank
from posttrain.trainer.experience import Experience
from posttrain.types import Mean, TokenBatch


@dataclass
class PairLossFields:
    """Fields of the losses of `posttrain.loss.preference`."""

    loss_type: list[str] | str = field(default_factory=lambda: ["sigmoid"])
    """One loss, or several that are mixed; docs/dpo.md lists them."""
    loss_weights: list[float] | None = None
    """Weight of each loss of a mix. Unset: 1 each."""
    beta: float = 0.1
    """How strongly the reference holds the policy back: β. In ORPO the weight λ of its ratio."""
    label_smoothing: float = 0.0
    """Share ε of pairs whose labels are taken to be flipped."""
    f_divergence_type: FDivergence = "reverse_kl"
    """The divergence that holds the policy near its reference."""
    f_alpha_divergence_coef: float = 0.5
    """α of `alpha_divergence`."""
    discopop_tau: float = 0.05
    """Temperature τ of `discopop`."""
    simpo_gamma: float = 0.5
    """Target margin γ of `simpo` and `alphapo`."""
    cpo_alpha: float = 1.0
    """Weight of the likelihood in `cpo`."""
    alpha: float = 0.25
    """Exponent α of `alphapo`."""
    ld_alpha: float | None = None
    """LD-DPO: weight of the tokens beyond the length that both responses have. Unset: 1."""
    use_weighting: bool = False
    """WPO: weigh a pair by how likely the policy is to write it."""

    def check_losses(self, given: Iterable[str] = ()) -> None:
        """Raise `ConfigError` for losses and constants that do not go together, and for a constant that none of the
        losses reads: one that is in `given` or differs from its default."""
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        if not self.loss_type:
            raise ConfigError("`loss_type` is empty; name a loss, such as sigmoid.")
        repeated = [name for at, name in enumerate(self.loss_type) if name in self.loss_type[:at]]
        if repeated:
            raise ConfigError(f"`loss_type` names {repeated[0]!r} twice; give it one weight in `loss_weights`.")
        check_options(self.loss_type, self.options(), given)
        third = [name for name in self.loss_type if PREFERENCE[name].third]
        if third:
            raise ConfigError(
                f"`loss_type` {third[0]!r} learns from a third response, and rows here are pairs; use 'cpo', or mix "
                "'sigmoid' with 'sft'."
            )
        weights = self.loss_weights
        if weights is not None and len(weights) != len(self.loss_type):
            raise ConfigError(
                f"`loss_weights` has {len(weights)} weights, and `loss_type` {len(self.loss_type)} losses."
            )
        if weights is not None and not all(math.isfinite(weight) for weight in weights):
            raise ConfigError(f"`loss_weights` is {weights}; weights are finite numbers.")
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ConfigError(f"`ld_alpha` is {self.ld_alpha}; it must be between 0 and 1.")

    def needs(self, what: str) -> bool:
        """Whether one of the losses needs "partners" or "delta" of the whole optimizer batch."""
        return any(PREFERENCE[name].batch == what for name in self.loss_type)

    @property
    def compares(self) -> bool:
        """Whether one of the losses reads a reference."""
        return any(PREFERENCE[name].reference for name in self.loss_type)

    @property
    def margins_ignored(self) -> str:
        """Why the column `margin` would have no effect; empty where a loss reads it."""
        reads = any(PREFERENCE[name].margin for name in self.loss_type)
        return "" if reads else f"`loss_type` {', '.join(self.loss_type)} reads none"

    def options(self) -> Options:
        """The constants of the losses."""
        mine = {f.name for f in fields(self)}
        return Options(**{f.name: getattr(self, f.name) for f in fields(Options) if f.name in mine})


@dataclass(frozen=True)
class PairExperience(Experience):
    """Pairs, and what they are compared with."""

    per_sequence: ClassVar[tuple[str, ...]] = ("reference", "partner", "side_partner")
    reference: Tensor  # [S] log-probability of the response under the reference, 0 without one
    partner: Tensor  # [S] for losses over the whole batch: what the pair is matched with, on both its sequences
    side_partner: Tensor  # [S] and what each of its sequences is
    delta: float = 0.0  # BCO's δ


def with_tail_weights(batch: TokenBatch, ld_alpha: float | None) -> TokenBatch:
    """LD-DPO: tokens beyond the length both responses of a pair have weigh `ld_alpha` in the sums."""
    if ld_alpha is None or not batch.num_sequences:
        return batch
    lengths = sequence_lengths(batch.sequence, batch.num_sequences)
    first = torch.cumsum(lengths, 0) - lengths  # read-outs lie sequence by sequence
    position = torch.arange(len(batch.sequence)) - first[batch.sequence]
    both = lengths.view(-1, 2).amin(1).repeat_interleave(2)
    return replace(batch, weights=batch.weights * ld_weights(position, both[batch.sequence], ld_alpha))


def pairs_of(logps: Tensor, exp: PairExperience, margin: Tensor, compared: bool) -> Pairs:
    """The pairs of a batch, from the log-probabilities [N] of its read-outs."""
    batch = exp.batch
    S = batch.num_sequences
    chosen, rejected = sequence_sums(logps * batch.weights, batch.sequence, S).view(-1, 2).unbind(1)
    lengths = sequence_lengths(batch.sequence, S).view(-1, 2)
    reference, sides = exp.reference.view(-1, 2), exp.side_partner.view(-1, 2)
    return Pairs(
        chosen=chosen,
        rejected=rejected,
        chosen_tokens=lengths[:, 0],
        rejected_tokens=lengths[:, 1],
        ref_chosen=reference[:, 0] if compared else None,
        ref_rejected=reference[:, 1] if compared else None,
        margin=margin,
        delta=exp.delta,
        partner=exp.partner.view(-1, 2)[:, 0],
        chosen_partner=sides[:, 0],
        rejected_partner=sides[:, 1],
    )


def matched(found: list[PairExperience], policy: list[Tensor], compared: bool) -> list[PairExperience]:
    """Give every pair its partner in the optimizer batch of all ranks (AOT), from the policy's log-probabilities [S] of
    each micro-batch."""
    if not found:
        return found
    mine = torch.cat([torch.stack([p, e.reference]) for p, e in zip(policy, found, strict=True)], 1)
    ranks = gather_objects(mine)
    everything = torch.cat(ranks, 1).view(2, -1, 2)
    own, reference = everything[0].unbind(1), everything[1].unbind(1)
    tokens = torch.ones_like(own[0])
    everyone = Pairs(own[0], own[1], tokens, tokens)
    if compared:
        everyone = replace(everyone, ref_chosen=reference[0], ref_rejected=reference[1])
    partners = aot_partners(everyone)
    both = torch.stack([partners["partner"]] * 2, 1).view(-1)
    sides = torch.stack([partners["chosen_partner"], partners["rejected_partner"]], 1).view(-1)
    start = sum(part.shape[1] for part in ranks[: rank()])
    sizes = [p.shape[0] for p in policy]
    here = slice(start, start + sum(sizes))
    parts = zip(found, both[here].split(sizes), sides[here].split(sizes), strict=True)
    return [replace(exp, partner=one, side_partner=other) for exp, one, other in parts]


class RunningMean(TrainerCallback, ExportableState):
    """The mean of all values so far, over all ranks: BCO's δ (arXiv 2404.04656, section 3.3). Checkpoints keep it."""

    def __init__(self, total: float = 0.0, count: float = 0.0) -> None:
        self.total, self.count = total, count

    @property
    def value(self) -> float:
        """0 before the first value."""
        return self.total / max(self.count, 1.0)

    def add(self, values: Tensor, device: torch.device) -> None:
        """Values of this rank; every rank calls it."""
        mine = torch.tensor([float(values.double().sum()), float(len(values))], dtype=torch.float64)
        total, count = all_sum(mine.to(device)).tolist()
        self.total, self.count = self.total + total, self.count + count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"total": self.total, "count": self.count}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        found = saved["attributes"] if saved else {"total": 0.0, "count": 0.0}
        self.total, self.count = found["total"], found["count"]


def pair_metrics(pairs: Pairs, beta: float, losses: dict[str, Tensor], entropy: Tensor | None) -> dict[str, Mean]:
    """Means over pairs; of the entropy, over tokens."""
    c, r = (beta * x for x in pairs.log_ratios())
    count = float(len(c))
    found = {
        "rewards/chosen": c,
        "rewards/rejected": r,
        "rewards/margins": c - r,
        "rewards/accuracies": (c > r).float(),
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
        "lengths/chosen": pairs.chosen_tokens.float(),
        "lengths/rejected": pairs.rejected_tokens.float(),
        **{f"loss/{name}": loss for name, loss in losses.items()},
    }
    metrics = {name: Mean(value.sum(), count) for name, value in found.items()}
    if entropy is not None:
        metrics["entropy"] = Mean(entropy.sum(), float(len(entropy)))
    return metrics
