"""name | path | model → a model ready to train: dtype policy, quantization, adapter, layout, head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from posttrain.errors import ConfigError, ModelError
from posttrain.model.adapters import (
    check_adapter,
    check_trainable,
    head_left_whole,
    is_adapted,
    keep_quantized_weights,
    with_label_head,
    wrap_adapter,
)
from posttrain.model.body import backbone, text_model
from posttrain.model.head import LABEL_HEADS, head_spec, label_head, labels_of, output_head
from posttrain.model.probe import choose_layout, take_forests
from posttrain.model.saved import SavedAdapter, check_resized, find_adapter, put_on
from posttrain.model.scoring import Scoring, bind_head
from posttrain.model.tokens import TOKEN_MULTIPLE, make_room, rows_of, with_trained_tokens
from posttrain.parallel.device import native_bf16
from posttrain.parallel.ranks import say
from posttrain.types import Layout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_POSITIONS = re.compile(r"(^|\.)(wpe|\w*pos\w*)$").search
_DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "dropout")
_DROPOUTS += ("attn_pdrop", "resid_pdrop", "embd_pdrop", "router_jitter_noise", "input_jitter_noise")


@dataclass(frozen=True)
class LoadOptions:
    """What loading needs of the config."""

    init_kwargs: Mapping[str, Any] | None = None
    trust_remote_code: bool = False
    layout: str = "auto"
    chunk_tokens: int | None = None
    memory_bytes: int = 1 << 30
    pad_to_multiple_of: int | None = None
    disable_dropout: bool = False
    task: str = "CAUSAL_LM"  # as peft names it; SEQ_CLS is a reward, TOKEN_CLS the correctness of steps


LABELS = {"SEQ_CLS": 1, "TOKEN_CLS": 2}
"""What the head of a task gives."""
_AUTO = {"SEQ_CLS": AutoModelForSequenceClassification, "TOKEN_CLS": AutoModelForTokenClassification}


@dataclass(frozen=True)
class Prepared:
    """A trainable model and what was decided about it."""

    model: Any
    layout: Layout
    dropout: float  # the largest probability in it

    @property
    def base(self) -> PreTrainedModel:
        return base_model(self.model)


def base_model(model: Any) -> PreTrainedModel:
    """The transformers model under an adapter, or the model itself."""
    return model.get_base_model() if is_adapted(model) else model


def embedding_rows(prepared: Prepared) -> int:
    """How many token ids the model has an embedding for."""
    return rows_of(prepared.base.get_input_embeddings())


def learned_positions(prepared: Prepared) -> int | None:
    """Tokens of the longest row that a model with a table of positions can take (GPT-2, OPT); None without a table."""
    limit = getattr(prepared.base.config.get_text_config(), "max_position_embeddings", None)
    tables = [m for name, m in prepared.base.named_modules() if isinstance(m, torch.nn.Embedding) and _POSITIONS(name)]
    # OPT's has two rows more than it has positions.
    return limit if any(table.num_embeddings in (limit, (limit or 0) + 2) for table in tables) else None


def hub_kwargs(options: LoadOptions) -> dict[str, Any]:
    """Of the arguments of `from_pretrained`, those that say where and how files are found: for all but the weights."""
    given = options.init_kwargs or {}
    kept = {
        name: given[name]
        for name in ("revision", "trust_remote_code", "token", "cache_dir")
        if given.get(name) is not None
    }
    return {"trust_remote_code": options.trust_remote_code, **kept}


_GGUF = (
    "GGUF weights are quantized and cannot be trained as they are: dequantize them with transformers' "
    "`from_pretrained(…, gguf_file=…)`, `save_pretrained` the result, and give that folder."
)


def check_model_source(
    source: Any, options: LoadOptions, peft_config: Any = None, quantization_config: Any = None
) -> None:
    """Raise `ModelError` for a folder or a name that holds no model, or `ConfigError` for fields that do not go
    together, before anything expensive."""
    check_adapter(peft_config)
    if not isinstance(source, str):
        return
    path = Path(source).expanduser()
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        hint = _GGUF if any(path.glob("*.gguf")) else "give the folder of a model."
        raise ModelError(f"`model` is the folder {source!r}, which holds no config.json; {hint}")
    if path.is_file():
        hint = _GGUF if path.suffix == ".gguf" else "give the folder that `save_pretrained` wrote."
        raise ModelError(f"`model` is the file {source!r}; {hint}")
    kwargs = hub_kwargs(options)
    adapter = find_adapter(source, kwargs.get("revision"))
    if adapter is None:
        if quantization_config is not None and peft_config is None:
            raise ConfigError(
                "`quantization_config` is given, and quantized weights cannot be trained; give `peft_config` too (on "
                "the command line `use_peft`)."
            )
        _read_config(source, kwargs, f"`model` is {source!r}")
        return
    check_adapter(adapter.config)
    base_config(adapter, options)


def base_config(adapter: SavedAdapter, options: LoadOptions) -> Any:
    """The config of an adapter's base. Raises `ModelError` where it is not there."""
    what = f"`model` is the adapter {adapter.source!r}, whose base (`base_model_name_or_path` in its "
    kwargs = hub_kwargs(options) | {"revision": adapter.base_revision}
    return _read_config(adapter.base, kwargs, f"{what}adapter_config.json) is {adapter.base!r}")


def _read_config(source: str, kwargs: dict[str, Any], what: str) -> Any:
    try:
        return AutoConfig.from_pretrained(source, **kwargs)
    except Exception as error:
        raise ModelError(f"{what}, which cannot be read: {_first_line(error)}") from error


def load_tokenizer(source: Any, options: LoadOptions) -> Any:
    """The tokenizer that belongs to a model given by name, path or object; an adapter without one has its base's."""
    name, kwargs = source if isinstance(source, str) else base_model(source).config._name_or_path, hub_kwargs(options)
    adapter = find_adapter(source, kwargs.get("revision"))
    try:
        try:
            return AutoTokenizer.from_pretrained(name, **kwargs)
        except Exception:
            if adapter is None:
                raise
            return AutoTokenizer.from_pretrained(adapter.base, **kwargs | {"revision": adapter.base_revision})
    except Exception as error:
        raise ModelError(
            f"`processing_class` was not given and {name!r} has no tokenizer that loads: {_first_line(error)}"
        ) from error


def prepare_model(
    source: Any,
    options: LoadOptions,
    peft_config: Any = None,
    quantization_config: Any = None,
    new_tokens: Sequence[int] = (),
) -> Prepared:
    """Load, make room for new tokens, adapt, probe and bind. Raises `ModelError`, `LayoutError` or `ConfigError`, each
    naming the field."""
    if isinstance(source, str):
        model = load_weights(source, options, peft_config is not None, quantization_config)
    else:
        model = source
        for field, value in (("model_init_kwargs", options.init_kwargs), ("quantization_config", quantization_config)):
            if value:
                raise ConfigError(f"`{field}` is set and `model` is an object already; pass a name or drop the field.")
    if not isinstance(base_model(model), PreTrainedModel):
        raise ModelError(f"`model` is a {type(model).__name__}; give a name, a path or a transformers model.")
    for wrapped in {id(m): m for m in (model, base_model(model))}.values():
        if "_original_forward" in wrapped.__dict__:  # another trainer's autocast, left in place by accelerate
            del wrapped.forward, wrapped._original_forward
            # With the flag left on, accelerate would not put its autocast back: a second trainer would run in float32.
            wrapped.__dict__.pop("_is_accelerate_prepared", None)
    _check_task(base_model(model), options.task)
    keep_quantized_weights(model)
    if new_tokens:
        peft_config = _take_tokens(model, peft_config, list(new_tokens))
    if options.task in LABELS:
        peft_config = with_label_head(base_model(model), peft_config, options.task)
    model = wrap_adapter(model, peft_config)
    if options.disable_dropout:
        turn_dropout_off(model)
    _freeze_all_but_text(base_model(model))
    check_trainable(model)
    low = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
    if low and not isinstance(source, str):
        say(
            f"`model` is trained in {str(min(low, key=str))[6:]}: updates below its precision are lost; for float32 "
            "master weights load it with dtype=torch.float32, or give its name instead of the object."
        )
    base = base_model(model)
    if base is not model:
        check_resized(model)
    layout, why = choose_layout(base, options.layout, (options.init_kwargs or {}).get("attn_implementation"))
    if layout != "padded":
        take_forests(base)
    spec = head_spec(base.config, options.chunk_tokens, options.memory_bytes)
    bind_head(base, Scoring(layout, spec, pad_to_multiple_of=options.pad_to_multiple_of))
    say(f"layout: {layout} ({why})")
    return Prepared(model, layout, dropout_of(model))


def _check_task(base: Any, task: str) -> None:
    """Raise `ModelError` for a model whose head is another task's."""
    head, kind = label_head(base), type(base).__name__
    if task not in LABELS:
        if head is not None:
            raise ModelError(
                f"`model` is a {kind}, which gives labels and no log-probabilities of tokens; load it with "
                "AutoModelForCausalLM."
            )
    elif head is None or labels_of(head) not in (LABELS[task], None):
        has = "has no head of labels" if head is None else f"gives {labels_of(head)} labels"
        raise ModelError(
            f"`model` is a {kind}, which {has}; give its name, or load it with {_AUTO[task].__name__} and num_labels="
            f"{LABELS[task]}."
        )


def _take_tokens(model: Any, peft_config: Any, ids: list[int]) -> Any:
    """Rows for new tokens. Returns the adapter's configuration, which trains them."""
    if is_adapted(model):
        raise ModelError(
            f"`chat_template_path` brings {len(ids)} tokens that the adapter given as `model` was not made for; merge "
            "it first (`posttrain merge`), or give the template as a Jinja file."
        )
    make_room(model, ids, TOKEN_MULTIPLE)
    rows = rows_of(model.get_input_embeddings())
    say(f"{len(ids)} tokens come with the chat template; the model has {rows} rows")
    return peft_config if peft_config is None else with_trained_tokens(model, peft_config, ids)


def load_weights(source: str, options: LoadOptions, adapted: bool, quantization_config: Any, trainable: bool = True):
    """A model, or an adapter on its base. Full fine-tuning keeps float32 master weights; under an adapter the frozen
    base keeps its own dtype."""
    adapter = find_adapter(source, hub_kwargs(options).get("revision"))
    if adapter is None:
        return _load(source, options, adapted, quantization_config)
    kwargs = {k: v for k, v in (options.init_kwargs or {}).items() if k != "revision"}
    if adapter.base_revision is not None:
        kwargs["revision"] = adapter.base_revision
    base = _load(adapter.base, replace(options, init_kwargs=kwargs), True, quantization_config)
    return put_on(base, adapter, trainable)


def _load(source: str, options: LoadOptions, adapted: bool, quantization_config: Any) -> PreTrainedModel:
    kwargs: dict[str, Any] = dict(options.init_kwargs or {})
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise ConfigError(f"`dtype` is {dtype!r}; expected auto, {', '.join(_DTYPES)}.")
        dtype = _DTYPES[dtype]
    kwargs["dtype"] = dtype or ("auto" if adapted or quantization_config is not None else torch.float32)
    if quantization_config is not None:
        labelled = options.task in LABELS
        kwargs["quantization_config"] = (
            head_left_whole(quantization_config, LABEL_HEADS) if labelled else quantization_config
        )
    kwargs.setdefault("trust_remote_code", options.trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(source, **hub_kwargs(options))
        if options.task in LABELS:
            kwargs["num_labels"] = LABELS[options.task]
        model = auto_class(config, options.task).from_pretrained(source, **kwargs)
    except Exception as error:
        raise ModelError(f"`model` is {source!r}, which cannot be loaded: {_first_line(error)}") from error
    if dtype is None and quantization_config is None and model.dtype == torch.bfloat16 and not native_bf16():
        say("dtype: float32, since this CPU only emulates bfloat16, the stored one; `dtype` overrides")
        model = model.float()
    return model


def auto_class(config: Any, task: str = "CAUSAL_LM") -> Any:
    """What loads a checkpoint: a causal model, else the multimodal one around it (Mistral 3), trained on text alone.
    For the other tasks, the body under a head of labels."""
    if task in _AUTO:
        return _AUTO[task]
    causal, multimodal = (auto._model_mapping for auto in (AutoModelForCausalLM, AutoModelForImageTextToText))
    only_multimodal = type(config) in multimodal and type(config) not in causal
    return AutoModelForImageTextToText if only_multimodal else AutoModelForCausalLM


def dropout_of(model: Any) -> float:
    """Largest probability of dropout, or size of a router's noise, that training would use: modules', and what layers
    read from the config."""
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    text = base_model(model).config.get_text_config()
    return max([*rates, *(float(getattr(text, name, None) or 0.0) for name in _DROPOUTS)])


def turn_dropout_off(model: Any) -> None:
    """Set every probability that `dropout_of` looks at to 0: of modules, adapters' too, and what layers read from the
    config or took from it when they were built."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in {*_DROPOUTS, "jitter_noise"}:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    text = base_model(model).config.get_text_config()
    for name in _DROPOUTS:
        if getattr(text, name, None):
            setattr(text, name, 0.0)


def _freeze_all_but_text(base: Any) -> None:
    """What a multimodal model has beside its language model never meets a row of text: no gradient, no optimizer
    state, and nothing for DDP to wait for."""
    language = text_model(base)
    if language is backbone(base):
        return
    read = {id(p) for part in (language, output_head(base)) for p in part.parameters()}
    frozen = [p.requires_grad_(False) for p in base.parameters() if p.requires_grad and id(p) not in read]
    if frozen:
        say(f"model: trained on text; {sum(p.numel() for p in frozen):,} parameters beside the language model are kept")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
