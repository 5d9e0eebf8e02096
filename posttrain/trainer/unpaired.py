"""What a trainer of labelled responses has: fields of its losses, experience, mismatched rows of a window, metrics.

Letters: S sequences, each a prompt with one response.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.data.forest import build_forest, rows_of
from posttrain.data.mismatched import mismatched
from posttrain.data.sampling import Item
from posttrain.data.unpaired import VALUES
from posttrain.loss.unpaired import UNPAIRED, Unpaired, UnpairedLoss, UnpairedOptions, check_unpaired
from posttrain.parallel.ranks import all_sum, gather_objects, rank
from posttrain.trainer.experience import Experience
from posttrain.types import Mean, Row, TokenBatch


@dataclass
class UnpairedLossFields:
    """Fields of the losses of `posttrain.loss.unpaired`."""

    loss_type: UnpairedLoss = "kto"
    """kto, apo_zero_unpaired or bco; docs/kto.md."""
    beta: float = 0.1
    """How strongly the reference holds the policy back: β."""
    desirable_weight: float = 1.0
    """Weight λ_D of desirable responses; raise it where they are fewer."""
    undesirable_weight: float = 1.0
    """Weight λ_U of the others."""

    compares: ClassVar[bool] = True  # every loss here reads a reference

    def check_losses(self, given: Iterable[str] = ()) -> None:
        """Raise `ConfigError` for a loss that does not exist, or constants that it cannot take."""
        check_unpaired(self.loss_type, self.options())

    def needs(self, what: str) -> bool:
        """Whether the loss needs "kl" or "delta" of the whole optimizer batch."""
        return UNPAIRED[self.loss_type].batch == what

    def options(self) -> UnpairedOptions:
        """The constants of the losses."""
        return UnpairedOptions(self.beta, self.desirable_weight, self.undesirable_weight)


@dataclass(frozen=True)
class UnpairedExperience(Experience):
    """Labelled responses, and what they are compared with."""

    per_sequence: ClassVar[tuple[str, ...]] = ("reference",)
    reference: Tensor  # [S] log-probability of the response under the reference
    kl: float = 0.0  # KTO's z
    delta: float = 0.0  # BCO's δ


def row_values(batch: TokenBatch, name: str) -> Tensor:
    """[S] a value of each sequence. e.g. "desirable" """
    if batch.values is None:
        return torch.zeros(0, device=batch.input_ids.device)
    return batch.values[:, VALUES.index(name)]


def with_other_responses(window: list[TokenBatch], spare: Row | None, limit: int | None) -> list[list[Row]]:
    """For every sequence of the window's micro-batches its prompt with a response of another one, of all ranks.

    They are matched in the order of the data set, so that neither micro-batches nor ranks change them. A response that
    does not fit `limit` behind the prompt loses its end. spare: a row to take the response of where the window has one
    row alone.
    """
    mine = [_parts(row) for batch in window for row in rows_of(batch)]
    keys = [(source, prompt, response) for source, (prompt, response) in zip(_sources(window), mine, strict=True)]
    ranks = gather_objects(keys)
    everyone = [key for part in ranks for key in part]
    order = sorted(range(len(everyone)), key=lambda i: everyone[i])
    given: dict[int, tuple[int, ...]] = {}
    if len(order) > 1:
        others = mismatched([everyone[i][1] for i in order], [everyone[i][2] for i in order])
        given = {i: everyone[order[other]][2] for i, other in zip(order, others, strict=True)}
    elif order and spare is not None:
        given = {0: _parts(spare)[1]}
    start = sum(len(part) for part in ranks[: rank()])
    made = [_join(prompt, given[start + i], limit) for i, (prompt, _) in enumerate(mine)]
    sizes = iter(made)
    return [[next(sizes) for _ in range(batch.num_sequences)] for batch in window]


def _sources(window: list[TokenBatch]) -> list[int]:
    return [source for batch in window for source in batch.source]


def _parts(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of the prompt and of the response, which begins with the first trained one."""
    border = next(i for i, weight in enumerate(row.weights) if weight)
    return tuple(row.input_ids[:border]), tuple(row.input_ids[border:])


def _join(prompt: tuple[int, ...], response: tuple[int, ...], limit: int | None) -> Row:
    response = response if limit is None else response[: max(1, limit - len(prompt))]
    return Row([*prompt, *response], [0.0] * len(prompt) + [1.0] * len(response))


def both_forests(batch: TokenBatch, others: list[Row], share: bool) -> TokenBatch:
    """The batch's own sequences followed by as many others, each beside the one whose prompt it has."""
    own = [replace(row, values=()) for row in rows_of(batch)]
    units = [*range(len(own)), *range(len(others))]
    return build_forest([*own, *others], share=share, units=units)


def kl_over_ranks(log_ratios: list[Tensor], device: torch.device) -> float:
    """KTO's z: the mean log-ratio of the mismatched rows of the window, of all ranks, and at least 0."""
    mine = torch.cat(log_ratios) if log_ratios else torch.zeros(0)
    sums = torch.tensor([float(mine.double().sum()), float(len(mine))], dtype=torch.float64)
    total, count = all_sum(sums.to(device)).tolist()
    return max(0.0, total / max(count, 1.0))


def unpaired_metrics(rows: Unpaired, lengths: Tensor, beta: float, entropy: Tensor | None) -> dict[str, Mean]:
    """Means over the rows of each class; of the entropy, over tokens. What no row has is in no mean."""
    found: dict[str, Mean] = {}
    for side, mask in (("chosen", rows.desirable), ("rejected", ~rows.desirable)):
        values = {"rewards": beta * rows.log_ratios(), "logps": rows.logps, "lengths": lengths.float()}
        count = mask.sum().float()
        found |= {f"{name}/{side}": Mean(value[mask].sum(), count) for name, value in values.items()}
    if entropy is not None:
        found["entropy"] = Mean(entropy.sum(), float(len(entropy)))
    return found


def spare_row(few: list[Item], window: list[TokenBatch]) -> Row | None:
    """One of a few rows of the training set that is none of the window's; None where there is none."""
    sources = {*_sources(window)}
    return next((row for ((row, source),) in few if source not in sources), None)
