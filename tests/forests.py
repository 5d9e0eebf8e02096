"""A forest for tests, and what it is compared with: the same rows one by one, by the model's own logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posttrain.data.forest import build_forest
from posttrain.model.rope import forget_lengths
from posttrain.types import Row, ScoreRequest, TokenBatch

TOLERANCE = 2e-5
"""Of the largest entry: what fp32 sums in another order may differ by; one token more or less costs 100 times that."""


def sequences() -> list[list[int]]:
    """A tree of prefixes, all longer than Gemma's window of 8:

    A: prompt 34, answers of 20 and 7; the second of them goes on in two ways; a sequence that ends inside another;
    B: 31 tokens of its own.
    """
    ids = torch.randint(3, 300, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt, deeper = ids[:34], ids[54:61]
    return [
        prompt + ids[34:54],
        prompt + deeper + ids[61:75],
        prompt + deeper + ids[75:79],
        (prompt + deeper)[:38],
        ids[100:131],
    ]


def forest() -> TokenBatch:
    return build_forest([Row(ids, [0.0] + [1.0] * (len(ids) - 1)) for ids in sequences()], min_shared=1)


def close(got: Tensor, want: Tensor, name: str = "") -> None:
    scale = max(want.abs().max().item(), 1e-3)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * scale, msg=lambda m: f"{name}: {m}")


def forest_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logps = model(token_batch=forest(), score_request=ScoreRequest()).logps
    (logps * torch.arange(len(logps)).cos()).sum().backward()
    return logps.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def separate_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from the model's own logits, one row at a time."""
    found = []
    for row in sequences():
        ids = torch.tensor([row])
        forget_lengths(model)
        logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        found.append(logps.gather(1, ids[0, 1:, None])[:, 0])
    logps = torch.cat(found)
    (logps * torch.arange(len(logps)).cos()).sum().backward()
    return logps.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def padded_left() -> dict[str, Tensor]:
    """Three prompts of 12, 5 and 9 tokens."""
    ids = torch.randint(3, 300, (3, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 5, 9)):
        ids[row, : 12 - length] = 0
        mask[row, : 12 - length] = 0
    return {"input_ids": ids, "attention_mask": mask}
