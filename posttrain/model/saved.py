"""A saved adapter, given by folder or hub id: found, and put on its base."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.errors import MissingExtraError, ModelError
from posttrain.model.adapters import keep_master_weights
from posttrain.model.tokens import rows_of
from posttrain.parallel.ranks import say
from posttrain.parallel.training_state import fill

if TYPE_CHECKING:
    from peft import PeftConfig


@dataclass(frozen=True)
class SavedAdapter:
    """Where an adapter lies, and what its file says."""

    source: str
    revision: str | None
    config: PeftConfig

    @property
    def base(self) -> str:
        """Name or path of the model it was trained on."""
        return str(self.config.base_model_name_or_path)

    @property
    def base_revision(self) -> str | None:
        return self.config.revision


def find_adapter(source: Any, revision: str | None = None) -> SavedAdapter | None:
    """The adapter at `source`, or None when it is something else: an object, a whole model, a name unknown.

    Raises `ModelError` for an adapter that does not name its base.
    """
    if not isinstance(source, str):
        return None
    folder = Path(source).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file() or not (folder / "adapter_config.json").is_file():
            return None
        source = str(folder)
    elif not _on_the_hub(source, revision):
        return None
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(f"`model` is the adapter {source!r} and peft is not installed; pip install peft.")
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(source, revision=revision)
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"`model` is the adapter {source!r}, which cannot be read: {error}") from error
    if not config.base_model_name_or_path:
        raise ModelError(
            f"`model` is the adapter {source!r}, whose adapter_config.json does not name its base: write the name or "
            "folder of the base model there, as `base_model_name_or_path`."
        )
    return SavedAdapter(source, revision, config)


@functools.lru_cache(maxsize=8)
def _on_the_hub(name: str, revision: str | None) -> bool:
    from transformers.utils.peft_utils import find_adapter_config_file

    try:
        return find_adapter_config_file(name, revision=revision) is not None
    except Exception:  # no such name, or no network: reading it as a model says what is wrong
        return False


def put_on(base: Any, adapter: SavedAdapter, trainable: bool = True) -> Any:
    """The base with the adapter on it, its embeddings resized to the adapter's, as when it was trained."""
    from peft import PeftModel
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(adapter.source, device="cpu", revision=adapter.revision)
    rows = _vocabulary(base, weights)
    if rows is not None and rows != rows_of(base.get_input_embeddings()):
        base.resize_token_embeddings(rows, mean_resizing=False)
    try:
        model = PeftModel.from_pretrained(base, adapter.source, is_trainable=trainable, revision=adapter.revision)
    except (RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"`model` is the adapter {adapter.source!r}, which does not fit its base {adapter.base!r}: {first}"
        ) from error
    if trainable and keep_master_weights(model):
        set_peft_model_state_dict(model, weights)  # once more: the first time they were rounded to the base's dtype
    return model


def _vocabulary(base: Any, weights: dict[str, Any]) -> int | None:
    """Rows of the embedding or of the head among an adapter's weights, or None where it holds neither."""
    for end in (base.get_input_embeddings(), base.get_output_embeddings()):
        prefix = next((f"base_model.model.{name}." for name, module in base.named_modules() if module is end), None)
        for key, value in weights.items():
            if prefix is not None and key.startswith(prefix) and key.endswith("weight") and "lora_" not in key:
                return int(value.shape[0])  # peft stores the whole matrix wherever it was resized or adapted
    return None


def is_saved_otherwise(model: Any) -> bool:
    """Whether a family saves weights under other names than the model's, or other tensors: experts one by one, say."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def restore_weights(model: Any, folder: str) -> None:
    """Read the weights that `save_pretrained` wrote back into the model, sharded or not, whatever names its family
    saves them under.

    Raises `ModelError` when the folder lacks one. The saved tensors are read in float32, which holds every dtype that
    is trained.
    """
    saved, found = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelError(f"the checkpoint {folder!r} lacks {missing[0]!r} and {len(missing) - 1} more weights.")
    values = saved.state_dict()
    with torch.no_grad():
        for name, target in model.state_dict().items():
            fill(target, values[name])


def check_resized(model: Any) -> None:
    """Refuse an adapter on a resized model whose new rows peft would not save with it, so that it could not be loaded
    again: it stores them where it can see that they are new, and never for one end of a model when the other has an
    adapter."""
    from peft.utils import get_peft_model_state_dict
    from transformers import AutoConfig

    base, config = model.get_base_model(), model.active_peft_config
    rows = rows_of(base.get_input_embeddings())
    try:
        before = AutoConfig.from_pretrained(
            config.base_model_name_or_path or "", revision=config.revision
        ).get_text_config()
    except Exception:  # made in memory: there is no base to load
        return
    if before.vocab_size == rows:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = {x.data_ptr() for x in get_peft_model_state_dict(model).values()}
    if rows > before.vocab_size and not any(p.requires_grad for p in base.get_input_embeddings().parameters()):
        say(
            f"{rows - before.vocab_size} rows of the embedding are new, and this adapter does not train them: name the "
            "new tokens in `trainable_token_indices`, or both ends in `lora_modules_to_save`"
        )
    for name, end in (("embedding", base.get_input_embeddings()), ("head", base.get_output_embeddings())):
        if end is None:
            continue
        layer = inner_layer(end, copies=True)
        if layer.weight.data_ptr() not in kept:
            raise ModelError(
                f"the embeddings were resized from {before.vocab_size} to {rows} rows, and peft would not save those "
                f"of the {name} with this adapter: put both ends in `lora_modules_to_save` (with tied ones the "
                "embedding and `ensure_weight_tying`), or give the base as a local folder, where peft sees that "
                "it was resized."
            )


def inner_layer(module: Any, copies: bool = False) -> Any:
    """The plain layer under whatever peft has put around it; with `copies` the copy that is trained, where there is
    one."""
    while True:
        saved = getattr(module, "modules_to_save", None)
        if copies and isinstance(saved, nn.ModuleDict) and module.active_adapters[0] in saved:
            return saved[module.active_adapters[0]]
        inside = [getattr(module, name, None) for name in ("base_layer", "token_adapter", "original_module")]
        found = next((x for x in inside if isinstance(x, nn.Module)), None)
        if found is None:
            return module
        module = found
