"""Which layout can a model do exactly? Found by trying, at load, on a shrunken copy with random weights.

Three sequences, two with a common prefix, all longer than the sliding window, are scored in the layout and one by one
with the model's own logits. A layout is taken when the log-probabilities agree and every layer received its segments.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from posttrain.errors import LayoutError, ModelError
from posttrain.model import recurrent
from posttrain.model.attention import NAMES, Calls, default_name, forest_name
from posttrain.model.body import backbone
from posttrain.model.head import head_spec, label_head
from posttrain.model.recurrent import bind_mixers, mixers
from posttrain.model.rope import KINDS, forget_lengths, row_groups
from posttrain.model.router import EXPERT_COUNTS
from posttrain.model.scoring import Scoring, bind_head
from posttrain.parallel.params import whole_weights
from posttrain.types import Layout, Segments, TokenBatch

TOLERANCE = 1e-3
"""Largest difference of a log-probability, in fp32; what should not be seen changes it by 0.01 and more."""

WINDOW = 8
"""Sliding window of the shrunken copy."""

REGIME = 25
"""Context of its rotary embedding, where one varies with the length: one row is shorter, two are longer."""


def choose_layout(model: PreTrainedModel, wanted: str = "auto", attention: str | None = None) -> tuple[Layout, str]:
    """Return the layout to use and why, e.g. ("packed", "probed: equals separate rows"). `attention` is the
    implementation the user asked for, if any.

    Raises `LayoutError` when the layout asked for is not exact for the model, `ModelError` when none is.
    """
    packed_reason = _cannot_pack(model, attention)
    candidates: list[Layout] = ["packed", "packed-unshared", "padded"]
    if wanted != "auto":
        candidates = [layout for layout in candidates if layout == wanted]
    reasons = []
    for layout in candidates:
        reason = packed_reason if layout != "padded" and packed_reason else _probe(model, layout)
        if reason is None:
            return layout, "; ".join([*reasons, "probed: equals separate rows"])
        reasons.append(f"{layout} is not exact ({reason})")
    if wanted != "auto":
        raise LayoutError(f"`layout={wanted!r}` cannot be used for {type(model).__name__}: {reasons[0]}. Use 'auto'.")
    raise ModelError(f"`model`: no layout is exact for {type(model).__name__}: {'; '.join(reasons)}.")


def _cannot_pack(model: PreTrainedModel, asked: str | None) -> str | None:
    """An attention implementation that is not the family's default was asked for, by name or on the object."""
    implementation = model.config._attn_implementation
    if asked in (None, "sdpa") and implementation in (default_name(model), *NAMES, None):
        return None
    return f"`attn_implementation={asked or implementation!r}` was asked for"


def take_forests(model: PreTrainedModel) -> None:
    """Teach attention and token mixers to read segments."""
    model.set_attn_implementation(forest_name(model))
    bind_mixers(model)


def shrunken(model: Any) -> PreTrainedModel:
    """A copy of the architecture: few layers (one of each type at least), a small vocabulary, a short window."""
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config()
    _shrink(text)
    text.vocab_size = 64
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        setattr(text, name, token)
    config._attn_implementation = default_name(model)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would print the copy's generation config
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with whole_weights():  # a model with a head of labels makes its body as `from_config` does
                made = type(model)(config)
            return made.to(dtype=torch.float32).eval()
    finally:
        transformers.logging.set_verbosity(verbosity)


def _shrink(text: Any) -> None:
    types = getattr(text, "layer_types", None)
    if types:
        first = sorted({types.index(kind) for kind in types} | {0, 1} & set(range(len(types))))
        text.num_hidden_layers = len(first)
        if "layer_types" in vars(text):  # elsewhere it follows from the number of layers
            text.layer_types = [types[i] for i in first]
    else:
        text.num_hidden_layers = min(2, text.num_hidden_layers)
    for name in ("sliding_window", "attention_chunk_size", "floor_scale", "index_topk", "window_size"):
        if getattr(text, name, None):
            setattr(text, name, min(WINDOW, getattr(text, name)))
    _shrink_rope(text)
    if getattr(text, "initializer_range", None):
        # Queries and keys of unit size: attention that hardly prefers any token would hide what it should not see.
        text.initializer_range = max(text.initializer_range, text.hidden_size**-0.5)
    for name in (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "intermediate_size_mlp",
    ):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(64, getattr(text, name)))
    _shrink_experts(text)
    for name in ("attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"):
        if getattr(text, name, None):
            setattr(text, name, 0.0)


def _shrink_experts(text: Any) -> None:
    """Fewer experts, twice as many as a token or a group of them needs."""
    groups, chosen = (getattr(text, name, None) or 1 for name in ("n_group", "num_experts_per_tok"))
    for name in EXPERT_COUNTS:
        count = getattr(text, name, None)
        if isinstance(count, int) and count:
            setattr(text, name, min(count, 2 * groups * chosen))


def _shrink_rope(text: Any) -> None:
    """Bring the length where frequencies or scales change among the rows."""
    rope: Any = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if "original_max_position_embeddings" in each:
            each["original_max_position_embeddings"] = REGIME
        if each.get("rope_type") in KINDS:
            each["original_max_position_embeddings"] = text.max_position_embeddings = REGIME
            if getattr(text, "original_max_position_embeddings", None):  # where the config copies it from
                text.original_max_position_embeddings = REGIME


def _probe(model: PreTrainedModel, layout: Layout) -> str | None:
    """None when the layout is exact, else what went wrong."""
    try:
        small = shrunken(model)
    except Exception as error:  # an architecture that cannot be rebuilt from its config
        return f"its shrunken copy cannot be built: {type(error).__name__}: {error}"
    bind_head(small, Scoring(layout, head_spec(small.config)))
    batch, rows = _probe_batch(shared=layout == "packed")
    forwards = len(row_groups(small.config, [len(row) for row in rows]))
    before, mixed = Calls.forest, recurrent.Calls.forest
    try:
        if layout != "padded":
            take_forests(small)
        with torch.no_grad():
            got = small(token_batch=batch).logps
            calls, mixed = Calls.forest - before, recurrent.Calls.forest - mixed
            if layout != "padded":
                small.set_attn_implementation(default_name(small))
            want = torch.cat([_own_logps(small, row) for row in rows])
    except Exception as error:
        logging.getLogger(__name__).debug("probe of %s failed", layout, exc_info=True)
        return f"{type(error).__name__}: {error}"
    missed = None if layout == "padded" else _missed(small, calls // forwards, mixed // forwards)
    if missed is not None:
        return missed
    difference = (got - want).abs().max().item()
    return None if difference <= TOLERANCE else f"log-probabilities differ by {difference:.2g}"


def _missed(small: PreTrainedModel, calls: int, mixed: int) -> str | None:
    """Whether a layer did not receive its segments. Beside mixers, how many layers attend is the family's affair."""
    layers, count = small.config.get_text_config().num_hidden_layers, len(mixers(small))
    if count:
        return None if mixed == count else f"{mixed} of {count} token mixers received their segments"
    some = calls > 0 and calls % layers == 0  # differential attention calls twice
    return None if some else f"{calls} of {layers} layers use the attention interface"


def _own_logps(model: PreTrainedModel, row: list[int]) -> torch.Tensor:
    """log p of tokens 1… of a row, from the model's own logits; of a head of labels, what it gives at all tokens but
    the last."""
    ids = torch.tensor([row])
    forget_lengths(model)
    if (head := label_head(model)) is not None:
        body: Any = backbone(model)
        values = head(body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state)[0]
        forget_lengths(model)
        own: Any = model(input_ids=ids[:, :-1], use_cache=False).logits  # [1, L] of the last token, or [1, T, L]
        return torch.cat([values[:-1, 0], own.reshape(-1, own.shape[-1])[-1:, 0]])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def _probe_batch(shared: bool) -> tuple[TokenBatch, list[list[int]]]:
    """Sequences of 33, 29 and 21 tokens; the first two start with the same 13."""
    ids = torch.randint(3, 60, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [ids[:33], ids[:13] + ids[33:49], ids[49:70]]
    if shared:
        segments, leaf = Segments((0, 13, 33, 49), (13, 33, 49, 70), (-1, 0, 0, -1)), (1, 2, 3)
        tokens, positions = ids[:70], [*range(33), *range(13, 29), *range(21)]
    else:
        segments, leaf = Segments((0, 33, 62), (33, 62, 83), (-1, -1, -1)), (0, 1, 2)
        tokens, positions = [t for row in rows for t in row], [p for row in rows for p in range(len(row))]
    read_from = torch.cat([torch.from_numpy(segments.positions(k)[:-1]) for k in leaf])
    targets = torch.tensor([t for row in rows for t in row[1:]])
    sequence = torch.tensor([s for s, row in enumerate(rows) for _ in row[1:]])
    batch = TokenBatch(
        input_ids=torch.tensor(tokens),
        position_ids=torch.tensor(positions),
        segments=segments,
        read_from=read_from,
        targets=targets,
        weights=torch.ones(len(targets)),
        sequence=sequence,
        leaf=leaf,
        source=(-1, -1, -1),
        unshared_tokens=83,
    )
    return batch, rows
