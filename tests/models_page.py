"""docs/models.md, made by running the probe on the tiny model of every family.

make models
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from families import EVERY, build

import posttrain.model.attention as attention
from posttrain.model.attention import forest_name
from posttrain.model.head import head_spec
from posttrain.model.probe import choose_layout
from posttrain.model.recurrent import mixers
from posttrain.model.rope import varying_rope
from posttrain.model.router import experts_per_token

PAGE = Path(__file__).parent.parent / "docs" / "models.md"

INTRO = """# Models

<!-- made by tests/models_page.py: make models -->

Any causal language model of `transformers` can be trained. Which [layout](design.md#layouts-and-the-probe) it gets is
found by a probe when it is loaded, and printed. This table is that probe, run on a tiny random model of each family; a
test holds it to what the code does. Each of these models is also compared with separate rows, losses and gradients of
every parameter, and saved, reloaded and called without a forest.

- **packed**: side by side, common prefixes computed once. What `auto` takes where it is exact.
- **padded**: one row a sequence, because packing is not exact for the reason given. `layout='packed'` is then an error.

A checkpoint that `AutoModelForCausalLM` loads as a multimodal model, or that only `AutoModelForImageTextToText` can
load, is trained on text: what it has beside its language model is frozen, and saved as it was.

| family | class | layout | attention | head | balance loss |
|---|---|---|---|---|---|
"""

NOTES = """
## What the columns say

- **sliding window**: with *hidden*, the family builds the window into its mask and does not pass it to the attention
  function; it is then read from the config.
- **soft cap**, **sinks**: computed in blocks of 512 queries, and again in the backward pass, so that scores of a whole
  row are never in memory. On CUDA such layers run a call a segment; others one call for all segments. Calls without a
  forest go to the family's own eager function, which is its default.
- **values smaller than keys**: padded with zeros up to the keys' size, which changes nothing.
- **token mixers**: state-space, linear-attention and convolution layers see one sequence a row, in few calls of like
  lengths. Tokens that sequences share go through them once for each; through all other layers once.
- **longrope**: rows up to the original context and longer ones have their own frequencies. A micro-batch that holds
  both kinds runs as two forwards; where weights are sharded, on every rank.
- **dynamic** rotary frequencies differ for every length beyond the context: a forward for each such length.
- **positions learned**: rows longer than the table are refused before training; set `max_length`.
- **head**: a tied head shares its weight with the embedding; `×` is a factor on the logits, `cap` a soft cap.
- **balance loss**: what `router_aux_loss_coef` multiplies, the formula of transformers taken for each sequence alone
  and averaged over the sequences of a step. *none*: experts without such a loss (DeepSeek-V3 and GLM-4-MoE balance by a
  bias on the router), for which the field does nothing, and a line says so.

## Not exact, and why

- **Llama 4** attends in chunks, and scales queries by their place in the row, which in a packed row is not their place
  in the sequence.
- **Router noise** (two fields of PhiMoE's config, 0.01 by default) is drawn a token, like dropout: sharing is
  off when it is above 0, unless `share_prefixes` is set to true.
- **An `attn_implementation` that was asked for** and is not the family's default is kept, and the model padded.
- **A second model on the same config** is not meant: `attn_implementation` belongs to the config, so a model that is
  trained packed says so in it while it is in memory. Saved configs do not name it.
"""


def row(name: str) -> str:
    model = build(name)
    windows: list[int | None] = []
    own = attention._window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_window", lambda module: windows.append(own(module)) or own(module))
        layout, why = choose_layout(model)
    shown = layout if layout == "packed" else f"{layout}: {_short(why)}"
    features = ", ".join(_attention(model, hidden_window=any(windows)))
    cells = (name, type(model).__name__, shown, features, ", ".join(_head(model)), _balance(model))
    return f"| {' | '.join(cells)} |"


def _short(why: str) -> str:
    """The reason why packing is not exact, without numbers that rounding may change."""
    reason = why.split("packed is not exact (")[1].split("); packed-unshared")[0]
    return re.sub(r" by [\d.e-]+$", "", reason.removeprefix("LayoutError: "))


def _attention(model: Any, hidden_window: bool) -> Iterator[str]:
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window and (getattr(text, "layer_types", None) is None or "sliding_attention" in text.layer_types):
        yield "sliding window (hidden)" if hidden_window else "sliding window"
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        yield "chunks"
    if getattr(text, "attn_logit_softcapping", None) and forest_name(model) != "posttrain_forest":
        yield "soft cap"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        yield "sinks"
    parts = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(parts) and text.v_head_dim < sum(parts):
        yield "values smaller than keys"
    kinds = sorted({type(mixer).__name__ for mixer in mixers(model)})
    if kinds:
        yield f"token mixers ({', '.join(kinds)})"
    if varying_rope(model.config):
        yield f"{varying_rope(model.config)} rotary frequencies"
    if any(name.endswith(("wpe", "embed_positions")) for name, _ in model.named_modules()):
        yield "positions learned"


def _head(model: Any) -> Iterator[str]:
    head, spec = model.get_output_embeddings(), head_spec(model.config)
    if head.weight is model.get_input_embeddings().weight:
        yield "tied"
    if head.bias is not None:
        yield "bias"
    if spec.scale != 1.0:
        yield f"× {spec.scale:g}"
    if spec.softcap is not None:
        yield f"cap {spec.softcap:g}"


def _balance(model: Any) -> str:
    text = model.config.get_text_config()
    experts = any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return "yes" if experts_per_token(model) is not None else "none" if experts else ""


def page() -> str:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return INTRO + "\n".join(row(name) for name in EVERY) + "\n" + NOTES
    finally:
        transformers.logging.set_verbosity(verbosity)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
