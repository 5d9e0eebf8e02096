"""Supervised fine-tuning: maximum likelihood of the trained tokens of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from torch import Tensor

from posttrain.data.rows import prepare_sft
from posttrain.data.sampling import Collator, RowItems
from posttrain.data.tokenizer import new_tokens, set_up_tokenizer
from posttrain.errors import ConfigError
from posttrain.loss.nll import TOKEN_LOSSES
from posttrain.model.load import check_model_source, embedding_rows, learned_positions, load_tokenizer, prepare_model
from posttrain.parallel.ranks import say
from posttrain.trainer.auditing import audit_at_start
from posttrain.trainer.config import BaseConfig, load_options, share_prefixes
from posttrain.trainer.engine import Engine
from posttrain.trainer.experience import Experience
from posttrain.trainer.loading import check_ids, make_items
from posttrain.trainer.options import check_sft, sft_row_options
from posttrain.trainer.randomness import seeded
from posttrain.trainer.run_record import summarize
from posttrain.types import LossOutput, Mean, ScoreRequest, TokenBatch


@dataclass
class SFTConfig(BaseConfig):
    """Arguments of `SFTTrainer`."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    chat_template_path: str | None = None
    """A Jinja file, or a model or folder, whose chat template is used instead of the tokenizer's own. A model's comes
    with the tokens it added and its end of a turn; rows for new ones are made, and trained under LoRA too."""
    dataset_text_field: str = "text"
    """Column that holds plain text."""
    dataset_kwargs: dict[str, Any] | str | None = None
    """Accepted for compatibility: `skip_prepare_dataset`, since rows with `input_ids` are taken as they are anyway."""
    eos_token: str | None = None
    """Token that ends a text or a completion. Unset: the tokenizer's."""
    max_length: int | None = 1024
    """Longest sequence, in tokens; longer rows are cut. With packing, also the capacity of a bin. `None`: no limit."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a long row is kept."""
    overflow: Literal["truncate", "split", "drop", "error"] | None = None
    """What happens to rows longer than `max_length`. truncate: cut. split: go on in another row, which begins with one
    token of context. drop: left out. error: stop. All are counted. Unset: split with `packing` and `bfd_split` or
    `wrapped`, else truncate."""
    packing: bool = False
    """Fill bins of `max_length` tokens with whole rows; a micro-batch is then that many bins. Rows never see each
    other."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """bfd: best fit decreasing. bfd_split: the same, and `overflow` is split. wrapped: rows cut at bin borders, so that
    bins are full."""
    padding_free: bool = False
    """Accepted for compatibility: the packed layout never pads."""
    eval_packing: bool | None = None
    """Pack the evaluation set. Unset: as `packing`."""
    completion_only_loss: bool | None = None
    """Train only on completions. Unset: on for prompt-completion rows."""
    assistant_only_loss: bool = False
    """Train only on what the assistant says in a chat, its stop token included."""
    loss_type: Literal["nll", "chunked_nll", "dft"] | None = None
    """nll (also named chunked_nll; the default) or dft."""
    pad_token: str | None = None
    """Token used for padding. Unset: the tokenizer's, else its end token."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*BaseConfig._VALID_DICT_FIELDS, "dataset_kwargs"]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sft(self)


@final
class SFTTrainer(Engine):
    """Fine-tune a causal language model on rows of text, chats, prompts with completions, or token ids.

    `model` is a name, a path, a transformers model or a peft model. Raises `ConfigError`, `DataError` and `ModelError`
    before anything is trained.

    e.g. SFTTrainer("Qwen/Qwen3-0.6B", SFTConfig(output_dir="out"), train_dataset=rows).train()
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Any] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        args = args or SFTConfig(output_dir="trainer_output")
        if not isinstance(args, SFTConfig):
            raise ConfigError(f"`args` is a {type(args).__name__}; give an SFTConfig, which has all of its fields.")
        for field, value in (("data_collator", data_collator), ("compute_loss_func", compute_loss_func)):
            if value is not None:
                raise ConfigError(
                    f"`{field}` is given; batches here are packed forests: leave it out, see docs/extending.md."
                )
        check_model_source(model, load_options(args), peft_config, quantization_config)
        tokenizer = processing_class or load_tokenizer(model, load_options(args))
        self._tokenizer = set_up_tokenizer(tokenizer, args.eos_token, args.pad_token, args.chat_template_path)
        self._formatting_func, self._config = formatting_func, args
        audits = audit_at_start(self._tokenizer, args, model, formatting_func, train_dataset, eval_dataset)
        self.data_summary = {}
        train_items = None if train_dataset is None else self._items(train_dataset, "train", args.packing)
        eval_items = None
        if isinstance(eval_dataset, dict):
            eval_items = {name: self.eval_items(rows, name) for name, rows in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_items = self.eval_items(eval_dataset)
        with seeded(args.seed):
            added = new_tokens(tokenizer, self._tokenizer)
            prepared = prepare_model(model, load_options(args), peft_config, quantization_config, added)
        self.layout = prepared.layout
        limits = embedding_rows(prepared), learned_positions(prepared)
        for items in (train_items, *(eval_items.values() if isinstance(eval_items, dict) else [eval_items])):
            check_ids(items, *limits)
        super().__init__(
            prepared.model,
            args,
            Collator(share_prefixes(args, prepared)),
            train_dataset=train_items,
            eval_dataset=eval_items,
            processing_class=self._tokenizer,
            compute_metrics=compute_metrics,
            callbacks=[*audits, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    # ---- rows → items ------------------------------------------------------------------------------------------------

    def _items(self, dataset: Any, name: str, packing: bool) -> Any:
        args = self._config
        options = sft_row_options(args, packing, name, self._formatting_func)
        rows, report = prepare_sft(dataset, self._tokenizer, options, args.dataset_num_proc, name)
        if report.rows_in:  # a stream counts while it flows
            say(report.summary())
        items = make_items(rows, args, packing, name)
        found = summarize(report, items, args.max_length if packing else None)
        self.data_summary = {**self.data_summary, name: found}
        return items

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        args = self._config
        return self._items(dataset, name, args.packing if args.eval_packing is None else args.eval_packing)

    # ---- the method --------------------------------------------------------------------------------------------------

    def experience(self, window: list[TokenBatch]) -> list[Experience]:
        return [Experience(batch) for batch in window]

    def unit(self, exp: Experience) -> Tensor:
        return exp.batch.weights.sum()

    def loss_step(self, model: Any, exp: Experience) -> LossOutput:
        weights = exp.batch.weights
        loss = TOKEN_LOSSES[self._config.loss_type or "nll"]
        request = ScoreRequest(
            objective=lambda logps, index: loss(logps, weights[index]),
            entropy=self.measuring,
            top1=self.measuring,
            aux_loss=self.balancing,
        )
        scores = model(token_batch=exp.batch, score_request=request)
        metrics = {}
        if scores.entropy is not None and scores.top1 is not None:
            count = float(len(weights))
            metrics["entropy"] = Mean(scores.entropy.sum(), count)
            metrics["mean_token_accuracy"] = Mean(scores.top1.sum(), count)
        return LossOutput(scores.total, metrics, scores.aux_loss)
