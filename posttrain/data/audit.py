"""The template audit: what a chat template does to rows, found by rendering probes before anything is trained.

Each check has a name, a verdict, a short finding and the evidence for it. An audit with a check that fails stops a run,
unless the check is accepted by name (`template_audit` of the config). docs/templates.md explains every check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.data.template_checks import Check, run_checks

__all__ = ["Check", "TemplateAudit", "audit_template", "write_audit"]

FILE_NAME = "template_audit.json"


@dataclass(frozen=True)
class TemplateAudit:
    """The checks of one template with one tokenizer, and what identifies the two."""

    checks: tuple[Check, ...]
    identity: str  # sha256 of the template's text and the tokens around it

    def __getitem__(self, name: str) -> Check:
        """The check of that name. Raises `KeyError` for a name that was not checked."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict == "fail")

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings do not count."""
        return not self.failed

    @property
    def hash(self) -> str:
        """16 hex digits: equal in every process for the same template, tokens and findings. Evidence is left out, since
        a template may write the date."""
        found = [(check.name, check.verdict, check.finding) for check in self.checks]
        return hashlib.sha256(json.dumps([self.identity, found]).encode()).hexdigest()[:16]

    def text(self) -> str:
        """The report, a line a check and its evidence under it where it did not pass."""
        count = {v: sum(check.verdict == v for check in self.checks) for v in ("pass", "warn", "fail")}
        lines = [
            f"template audit {self.hash}: {count['pass']} passed, {count['warn']} warned, {count['fail']} failed",
            *(f"  {c.verdict}  {c.name:<15} {c.finding}{_under(c)}" for c in self.checks),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """What `write_audit` writes and an HTML page shows."""
        return {"hash": self.hash, "ok": self.ok, "checks": [asdict(check) for check in self.checks]}


def _under(check: Check) -> str:
    return "" if check.verdict == "pass" else f"\n        {check.evidence}"


def write_audit(audit: TemplateAudit, folder: str | Path) -> Path:
    """Write `template_audit.json` into a folder and return its path."""
    path = Path(folder) / FILE_NAME
    path.write_text(json.dumps(audit.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def audit_template(
    tokenizer: Any,
    *,
    generation_config: Any = None,
    template_kwargs: dict[str, Any] | None = None,
) -> TemplateAudit:
    """Render probes with the tokenizer's chat template and say what it does.

    generation_config: the model's; its `eos_token_id` (a number or several) says where generation stops.
    template_kwargs: as in the column `chat_template_kwargs`.

    e.g. audit_template(tokenizer).ok -> True; audit_template(tokenizer)["stop_token"].finding -> "<|im_end|>"
    Raises `DataError` when the tokenizer has no chat template.
    """
    checks, identity = run_checks(tokenizer, _stop_ids(generation_config), template_kwargs or {})
    return TemplateAudit(tuple(checks), identity)


def _stop_ids(generation_config: Any) -> frozenset[int] | None:
    value = getattr(generation_config, "eos_token_id", None)
    if value is None:
        return None
    return frozenset(int(token) for token in (value if isinstance(value, Iterable) else [value]))
