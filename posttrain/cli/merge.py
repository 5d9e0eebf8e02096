"""`posttrain merge`: an adapter and its base → one model, checked before it is called done."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.parse import Values, construct
from posttrain.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from posttrain.model.config import MergeConfig
    from posttrain.model.saved import SavedAdapter

_DTYPES = ("float32", "bfloat16", "float16")
_PROBE = "The quick brown fox jumps over the lazy dog; 12 + 34 = 46.\nWas der Bauer nicht kennt, isst er nicht."


def merge(values: Values) -> None:
    """`posttrain merge`."""
    given = values["MergeConfig"]
    check(given)

    from posttrain.model.config import MergeConfig
    from posttrain.model.saved import find_adapter

    config: MergeConfig = construct(MergeConfig, given)
    source = _adapter_folder(str(config.model_name_or_path))
    adapter = find_adapter(source, config.model_revision)
    if adapter is None:
        raise ConfigError(
            f"`model_name_or_path` is {source!r}, which is not an adapter: give the folder or hub id of one, with an "
            "adapter_config.json."
        )
    out = Path(str(config.output_dir)).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _merge_into(partial, config, adapter)
        if out.is_dir():
            out.rmdir()  # empty, as was checked
        partial.chmod(0o777 & ~_umask())
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"saved to {out}", flush=True)


def check(given: dict[str, Any]) -> None:
    """Refuse what cannot run, before anything heavy is imported."""
    for name, what in (("model_name_or_path", "an adapter's folder or hub id"), ("output_dir", "a new folder")):
        if not given.get(name):
            raise ConfigError(f"`{name}` is not set; give --{name} {what}.")
    dtype = given.get("dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"`dtype` is {dtype!r}; expected {', '.join(_DTYPES)}.")
    out = Path(given["output_dir"]).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"`output_dir` is {str(out)!r}, which is not empty; give a new folder.")
    folder = Path(given["model_name_or_path"]).expanduser()
    if folder.is_dir() and (folder / "config.json").is_file():
        raise ConfigError(f"`model_name_or_path` is {str(folder)!r}, which is a whole model, not an adapter.")


def _adapter_folder(source: str) -> str:
    """The adapter itself, or the newest complete checkpoint of a run that has not saved one at its end."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or (folder / "adapter_config.json").is_file():
        return source
    from posttrain.trainer.checkpoints import is_complete

    steps = sorted((int(p.name[11:]), p) for p in folder.glob("checkpoint-*") if p.name[11:].isdigit())
    found = [p for _, p in steps if (p / "adapter_config.json").is_file() and is_complete(p)]
    if found:
        print(f"{source} holds no adapter at its top; merging {found[-1]}", flush=True)
    return str(found[-1]) if found else source


def _merge_into(folder: Path, config: MergeConfig, adapter: SavedAdapter) -> None:
    """Merge in float32, save, load what was saved, and compare it with the adapter. Raises `ModelError`."""
    import torch

    from posttrain.model.load import LABELS, LoadOptions, auto_class, base_config, load_tokenizer, load_weights
    from posttrain.model.merge import (
        HALF_TOLERANCE,
        TOLERANCE,
        difference,
        first_difference,
        merge_adapter,
        probe_logits,
    )
    from posttrain.model.tokens import end_with

    trust = config.trust_remote_code
    kind = getattr(adapter.config.task_type, "value", adapter.config.task_type)
    task = str(kind) if kind in LABELS else "CAUSAL_LM"
    options = LoadOptions({"revision": config.model_revision, "dtype": "float32"}, trust_remote_code=trust, task=task)
    stored = base_config(adapter, options)
    if getattr(stored, "quantization_config", None) is not None:
        raise ModelError(
            f"the base {adapter.base!r} is stored quantized, and rounds what is merged into it: name the base that is "
            "not quantized as `base_model_name_or_path` in the adapter's adapter_config.json."
        )
    dtype = getattr(torch, config.dtype) if config.dtype else stored.dtype or torch.float32
    tokenizer = load_tokenizer(adapter.source, options)
    model = load_weights(adapter.source, options, True, None, trainable=False)
    ids = probe_ids(tokenizer, model)
    want = probe_logits(model, ids)
    model = merge_adapter(model)
    _judge("merged", difference(probe_logits(model, ids), want), TOLERANCE)
    for parameter in model.parameters():  # not the module: its rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    end_with(model, tokenizer)  # an adapter's folder holds no config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = auto_class(model.config, task).from_pretrained(folder, dtype=dtype, trust_remote_code=trust)
    lost = first_difference(saved, model)
    if lost is not None:
        raise ModelError(f"the saved model's {lost!r} is not what was merged; nothing was saved.")
    found = difference(probe_logits(saved, ids), want)
    _judge("saved", found, TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE)
    print(
        f"merged {adapter.source} into {adapter.base} as {str(dtype)[6:]}: over {len(ids)} probe tokens, a logit "
        f"differs from the adapter's (in float32) by at most {found:.1e} of the largest",
        flush=True,
    )


def probe_ids(tokenizer: Any, model: Any) -> list[int]:
    """A row of token ids: a text, and the tokens that were added or trained, 64 of them at most."""
    from posttrain.model.tokens import rows_of

    rows = rows_of(model.get_base_model().get_input_embeddings())
    trained = getattr(model.active_peft_config, "trainable_token_indices", None) or []
    tokens = [i for some in trained.values() for i in some] if isinstance(trained, dict) else list(trained)
    added = sorted(tokenizer.get_added_vocab().values(), reverse=True)
    ids = [*tokenizer(_PROBE, add_special_tokens=False)["input_ids"], *dict.fromkeys([*tokens, *added][:64])]
    return [i for i in ids if i < rows]


def _judge(what: str, found: float, tolerance: float) -> None:
    if not found <= tolerance:
        raise ModelError(
            f"the {what} model's logits differ from what they must be by {found:.1e} of the largest, more than "
            f"{tolerance:.0e}; nothing was saved."
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
