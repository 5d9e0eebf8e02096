"""The template audit at the start of a run: printed, enforced, and written beside what is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain.data.audit import CHECKS, TemplateAudit, audit_policy, audit_template, write_audit
from posttrain.data.formats import is_conversational, maybe_convert_to_chatml
from posttrain.data.template import parse_kwargs
from posttrain.errors import DataError, PosttrainError
from posttrain.model.load import hub_kwargs
from posttrain.parallel.ranks import say
from posttrain.trainer.config import load_options


def audit_at_start(
    tokenizer: Any, args: Any, model: Any, formatting_func: Callable[[dict[str, Any]], Any] | None, *datasets: Any
) -> list[TrainerCallback]:
    """Audit the chat template that rows will be rendered with, and return the callback that keeps the report.

    model: its name, or itself, for where its generation stops. datasets: train and eval sets, each may be None or a
    mapping of sets; the first row of the first tells whether a template is used, and its `chat_template_kwargs`. Text
    and token ids need no template and no audit: then the list is empty.
    Raises `DataError` naming the checks that failed and are not accepted by `template_audit`.
    """
    rows = next((rows for rows in datasets if rows is not None), None)
    if audit_policy(args.template_audit)[0] == "off":
        return []
    found = audit_of(tokenizer, args, model, rows, formatting_func)
    if found is None:
        return []
    audit, accepted = found
    say(audit.text(only_doubts=True))
    failed = [check for check in audit.failed if check.name not in accepted]
    if failed:
        why = "; ".join(f"{check.name} ({check.finding}): {check.evidence}" for check in failed)
        names = ", ".join(check.name for check in failed)
        raise DataError(
            f"The chat template fails the audit. {why}. Set `chat_template_path` to a template without this fault, or "
            f"accept it by name: `template_audit: [{names}]`."
        )
    return [TemplateAuditCallback(audit)]


def audit_of(
    tokenizer: Any, args: Any, model: Any, rows: Any, formatting_func: Callable[[dict[str, Any]], Any] | None = None
) -> tuple[TemplateAudit, frozenset[str]] | None:
    """The audit of the template that rows are rendered with, and the checks whose failure stops nothing; None where no
    template is used. Its parts are those of `audit_at_start`."""
    first = _first_row(rows)
    if first is None or not tokenizer.chat_template or not _uses_template(first, formatting_func):
        return None
    generation, unknown = _generation_config(model, args)
    kwargs = parse_kwargs(first.get("chat_template_kwargs"))
    audit = audit_template(tokenizer, generation_config=generation, template_kwargs=kwargs)
    if unknown:
        told = (replace(c, evidence=c.evidence + unknown) if c.name == "eos" else c for c in audit.checks)
        audit = replace(audit, checks=tuple(told))
    policy, accepted = audit_policy(args.template_audit)
    if policy != "error":
        accepted = frozenset(CHECKS)
    # Where rows are pairs, whole responses are trained.
    if not getattr(args, "assistant_only_loss", False):
        accepted |= {"turns"}  # the whole text is trained: where the turns lie does not matter
    return audit, accepted


def _first_row(rows: Any) -> Mapping[str, Any] | None:
    if isinstance(rows, Mapping):
        rows = next(iter(rows.values()), None)
    return None if rows is None else next(iter(rows), None)


def _uses_template(first: Mapping[str, Any], formatting_func: Callable[[dict[str, Any]], Any] | None) -> bool:
    if "input_ids" in first:
        return False
    if formatting_func is None:
        return is_conversational(maybe_convert_to_chatml(first))
    try:
        return isinstance(formatting_func(dict(first)), list)
    except PosttrainError:
        raise
    except Exception:  # a user's function may raise anything; preparing the rows says where
        return False


def _generation_config(model: Any, args: Any) -> tuple[Any, str]:
    """The model's generation config, or None and why it is not known."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None), ""
    try:
        return GenerationConfig.from_pretrained(model, **hub_kwargs(load_options(args))), ""
    except Exception as error:  # many models come without the file, and an adapter has none
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return None, f"; the model's own `eos_token_id` is unknown, because {why:.150}"


class TemplateAuditCallback(TrainerCallback):
    """Writes `template_audit.json` into `output_dir` when training begins, and into each checkpoint."""

    def __init__(self, audit: TemplateAudit) -> None:
        self.audit = audit

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir or "trainer_output")
            folder.mkdir(parents=True, exist_ok=True)
            self.write_state(folder)

    def write_state(self, folder: Path) -> None:
        """Into a checkpoint, while it is written."""
        write_audit(self.audit, folder)
