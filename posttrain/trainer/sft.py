"""Supervised fine-tuning: maximum likelihood of the trained tokens of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from torch import Tensor

from posttrain.data.rows import prepare_sft
from posttrain.data.sampling import Collator, RowItems
from posttrain.loss.nll import TOKEN_LOSSES
from posttrain.parallel.ranks import say
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.engine import Engine
from posttrain.trainer.experience import Experience
from posttrain.trainer.loading import make_items
from posttrain.trainer.opening import config_of, open_run, refuse_given
from posttrain.trainer.options import check_sft, made_of, sft_row_options
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
        args = config_of(args, SFTConfig)
        refuse_given(data_collator=data_collator, compute_loss_func=compute_loss_func)
        self._formatting_func, self._config = formatting_func, args
        run = open_run(
            args,
            model,
            processing_class,
            train_dataset,
            eval_dataset,
            self._items,
            peft_config,
            quantization_config,
            formatting_func,
        )
        self.layout = run.layout
        super().__init__(
            run.model,
            args,
            Collator(run.share),
            train_dataset=run.train_items,
            eval_dataset=run.eval_items,
            processing_class=run.tokenizer,
            compute_metrics=compute_metrics,
            callbacks=[*run.audits, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )

    # ---- rows → items ------------------------------------------------------------------------------------------------

    def _items(self, tokenizer: Any, dataset: Any, name: str) -> Any:
        args = self._config
        packing = args.packing if name == "train" or args.eval_packing is None else args.eval_packing
        options = sft_row_options(args, packing, name, self._formatting_func)
        rows, report = prepare_sft(dataset, tokenizer, options, args.dataset_num_proc, name)
        if report.rows_in:  # a stream counts while it flows
            say(report.summary())
        items = make_items(rows, args, packing, name, made_of(dataset, args, tokenizer), report)
        found = summarize(report, items, args.max_length if packing else None)
        self.data_summary = {**self.data_summary, name: found}
        return items

    def eval_items(self, dataset: Any, name: str = "eval") -> RowItems:
        return self._items(self.processing_class, dataset, name)

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
