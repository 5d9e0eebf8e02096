"""What the model writes when it is asked the prompts of the evaluation set."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from posttrain.data.chat import maybe_apply_chat_template
from posttrain.data.sampling import RowItems
from posttrain.errors import ConfigError
from posttrain.parallel.ranks import gather_objects, rank, world_size
from posttrain.trainer.randomness import preserved_rng


def eval_prompts(trainer: Any, who: str, count: int | None = None) -> list[list[int]]:
    """Token ids of the first `count` prompts: of a prepared row, what comes before its first target.

    Raises `ConfigError` where there is no evaluation set, or its rows have no prompt.
    """
    found = trainer.eval_dataset
    if found is None:
        raise ConfigError(f"{who} completes the prompts of `eval_dataset`, and the trainer has none.")
    sets = list(found.values()) if isinstance(found, dict) else [found]
    prompts = list(chain.from_iterable(_prompts_of(items, trainer.processing_class, count) for items in sets))[:count]
    if not prompts:
        raise ConfigError(
            f"{who} needs prompts: rows with `prompt` and `completion`, or chats trained with `assistant_only_loss`. "
            "The rows of `eval_dataset` are trained from their first tokens on."
        )
    return prompts


def _prompts_of(items: Any, tokenizer: Any, count: int | None) -> Iterable[list[int]]:
    if not isinstance(items, RowItems):
        rows = (items[i] for i in range(min(len(items), count or len(items))))
        texts = (maybe_apply_chat_template({"prompt": row["prompt"]}, tokenizer)["prompt"] for row in rows)
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = (items.rows[i] for i in range(len(items.rows)))
    cut = ((row["input_ids"], next((i for i, w in enumerate(row["weights"]) if w), 0)) for row in rows)
    # A first token is never a target: on its own it is no prompt.
    prompts = (ids[:end] for ids, end in cut if end > 1)
    return [ids for _, ids in zip(range(count if count is not None else len(items.rows)), prompts, strict=False)]


def complete(trainer: Any, model: Any, prompts: list[list[int]], generation_config: Any) -> list[tuple[str, str]]:
    """(prompt, completion) of every prompt, on every rank, in order. Draws nothing from the training's generators."""
    tokenizer, size, ranks = trainer.processing_class, trainer.args.per_device_eval_batch_size, world_size()
    # Sharded weights are gathered by all ranks at once: every rank makes as many calls, with a prompt more than once.
    share = -(-len(prompts) // ranks)
    mine = [prompts[min(i * ranks + rank(), len(prompts) - 1)] for i in range(share)]
    was_training = model.training
    written: list[str] = []
    with preserved_rng():
        model.eval()
        try:
            for start in range(0, share, size):
                written += _write(model, tokenizer, mine[start : start + size], generation_config, trainer.args.device)
        finally:
            model.train(was_training)
    by_rank = gather_objects(written)
    texts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    return [(text, by_rank[i % ranks][i // ranks]) for i, text in enumerate(texts)]


def _write(model: Any, tokenizer: Any, prompts: list[list[int]], generation_config: Any, device: Any) -> list[str]:
    """Left-padded, so that every row goes on from its last token."""
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rows = [[pad] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    found = model.generate(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device),
        generation_config=generation_config,
        pad_token_id=pad,
        synced_gpus=world_size() > 1,
    )
    return tokenizer.batch_decode(found[:, longest:], skip_special_tokens=True)
