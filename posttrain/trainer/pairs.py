"""What trainers of preference pairs share: the fields of their losses, their experience, and their metrics.

Letters: N read-outs, S sequences, P pairs, D sequences a pair: the chosen one, the rejected one, and where a loss
learns from a third response that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
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
    tpo_alpha: float = 1.0
    """Weight of the likelihood of the third response in `tpo`."""
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
    def needs_third(self) -> bool:
        """Whether one of the losses learns from a third response."""
        return any(PREFERENCE[name].third for name in self.loss_type)

    @property
    def sides(self) -> int:
        """D."""
        return 3 if self.needs_third else 2

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
    partner: Tensor  # [S] for losses over the whole batch: what the pair is matched with, on its first two sequences
    side_partner: Tensor  # [S] and what each of its sequences is
    delta: float = 0.0  # BCO's δ


def sides_of(batch: TokenBatch) -> int:
    """D of a batch of pairs."""
    return batch.unit.count(batch.unit[0]) if batch.unit else 2


def of_pairs(values: Tensor, batch: TokenBatch) -> Tensor:
    """[P, 2] what the chosen and the rejected one have, of values [S]."""
    return values.view(-1, sides_of(batch))[:, :2]


def _to_sequences(values: Tensor, batch: TokenBatch) -> Tensor:
    """[S] from [P, 2]; a third response has 0."""
    return pad(values, (0, sides_of(batch) - 2)).view(-1)


def with_tail_weights(batch: TokenBatch, ld_alpha: float | None) -> TokenBatch:
    """LD-DPO: tokens beyond the length both responses of a pair have weigh `ld_alpha` in the sums; a third response is
    not compared, and its tokens weigh what they did."""
    if ld_alpha is None or not batch.num_sequences:
        return batch
    lengths = sequence_lengths(batch.sequence, batch.num_sequences)
    first = torch.cumsum(lengths, 0) - lengths  # read-outs lie sequence by sequence
    position = torch.arange(len(batch.sequence)) - first[batch.sequence]
    public = lengths.view(-1, sides_of(batch)).clone()
    public[:, :2] = public[:, :2].amin(1, keepdim=True)
    return replace(batch, weights=batch.weights * ld_weights(position, public.view(-1)[batch.sequence], ld_alpha))


def pairs_of(logps: Tensor, exp: PairExperience, margin: Tensor, config: PairLossFields) -> Pairs:
    """The pairs of a batch, from the log-probabilities [N] of its read-outs."""
    batch, D = exp.batch, config.sides  # also where there is none
    S = batch.num_sequences
    sums = sequence_sums(logps * batch.weights, batch.sequence, S).view(-1, D)
    lengths = sequence_lengths(batch.sequence, S).view(-1, D)
    reference, sides = of_pairs(exp.reference, batch), of_pairs(exp.side_partner, batch)
    return Pairs(
        chosen=sums[:, 0],
        rejected=sums[:, 1],
        third=sums[:, 2] if config.needs_third else None,
        third_tokens=lengths[:, 2] if config.needs_third else None,
        chosen_tokens=lengths[:, 0],
        rejected_tokens=lengths[:, 1],
        ref_chosen=reference[:, 0] if config.compares else None,
        ref_rejected=reference[:, 1] if config.compares else None,
        margin=margin,
        delta=exp.delta,
        partner=of_pairs(exp.partner, batch)[:, 0],
        chosen_partner=sides[:, 0],
        rejected_partner=sides[:, 1],
    )


def matched(found: list[PairExperience], policy: list[Tensor], compared: bool) -> list[PairExperience]:
    """Give every pair its partner in the optimizer batch of all ranks (AOT), from the policy's log-probabilities [S] of
    each micro-batch."""
    if not found:
        return found
    # [2, P, 2]: of policy and reference, what both sides of each pair have
    mine = [
        torch.stack([of_pairs(p, e.batch), of_pairs(e.reference, e.batch)]) for p, e in zip(policy, found, strict=True)
    ]
    ranks = gather_objects(torch.cat(mine, 1))
    own, reference = (each.unbind(1) for each in torch.cat(ranks, 1))
    tokens = torch.ones_like(own[0])
    everyone = Pairs(own[0], own[1], tokens, tokens)
    if compared:
        everyone = replace(everyone, ref_chosen=reference[0], ref_rejected=reference[1])
    partners = aot_partners(everyone)
    both = torch.stack([partners["partner"]] * 2, 1)
    sides = torch.stack([partners["chosen_partner"], partners["rejected_partner"]], 1)
    start = sum(part.shape[1] for part in ranks[: rank()])
    sizes = [each.shape[1] for each in mine]
    here = slice(start, start + sum(sizes))
    parts = zip(found, both[here].split(sizes), sides[here].split(sizes), strict=True)
    return [
        replace(exp, partner=_to_sequences(one, exp.batch), side_partner=_to_sequences(other, exp.batch))
        for exp, one, other in parts
    ]


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
    if pairs.third is not None and pairs.third_tokens is not None:
        found |= {"logps/reference": pairs.third, "lengths/reference": pairs.third_tokens.float()}
    metrics = {name: Mean(value.sum(), count) for name, value in found.items()}
    if entropy is not None:
        metrics["entropy"] = Mean(entropy.sum(), float(len(entropy)))
    return metrics
