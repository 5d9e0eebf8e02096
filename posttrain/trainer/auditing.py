"""The template audit at the start of a run: printed, enforced, and written beside what is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posttrain.data.audit import TemplateAudit, audit_policy, audit_template, write_audit
from posttrain.data.formats import is_conversational, maybe_convert_to_chatml
from posttrain.data.template import parse_kwargs
from posttrain.errors import DataError, PosttrainError
from posttrain.parallel.ranks import say


def audit_at_start(
    tokenizer: Any, args: Any, model: Any, formatting_func: Callable[[dict[str, Any]], Any] | None, *datasets: Any
) -> list[TrainerCallback]:
    """Audit the chat template that rows will be rendered with, and return the callback that keeps the report.

    model: its name, or itself, for where its generation stops. datasets: train and eval sets, each may be None or a
    mapping of sets; the first row of the first tells whether a template is used, and its `chat_template_kwargs`. Text
    and token ids need no template and no audit: then the list is empty.
    Raises `DataError` naming the checks that failed and are not accepted by `template_audit`.
    """
    first = _first_row(next((rows for rows in datasets if rows is not None), None))
    policy, accepted = audit_policy(args.template_audit)
    if policy == "off" or first is None or not _uses_template(first, formatting_func) or not tokenizer.chat_template:
        return []
    kwargs = parse_kwargs(first.get("chat_template_kwargs"))
    audit = audit_template(tokenizer, generation_config=_generation_config(model), template_kwargs=kwargs)
    say(audit.text(only_doubts=True))
    # Where rows are pairs, whole responses are trained.
    if not getattr(args, "assistant_only_loss", False):
        accepted |= {"turns"}  # the whole text is trained: where the turns lie does not matter
    failed = [check for check in audit.failed if check.name not in accepted]
    if failed and policy == "error":
        why = "; ".join(f"{check.name} ({check.finding}): {check.evidence}" for check in failed)
        names = ", ".join(check.name for check in failed)
        raise DataError(
            f"The chat template fails the audit. {why}. Set `chat_template_path` to a template without this fault, or "
            f"accept it by name: `template_audit: [{names}]`."
        )
    return [TemplateAuditCallback(audit)]


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


def _generation_config(model: Any) -> Any:
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    try:
        return GenerationConfig.from_pretrained(model)
    except Exception:  # many models come without the file, and an adapter has none
        return None


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
