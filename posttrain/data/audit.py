"""The template audit: what a chat template does to rows, found by rendering probes before anything is trained.

Each check has a name, a verdict, a short finding and the evidence for it. An audit with a check that fails stops a run,
unless the check is accepted by name (`template_audit` of the config). docs/templates.md explains every check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.data import audit_messages, audit_tokens
from posttrain.data.audit_probe import Check, Probe
from posttrain.errors import ConfigError, suggest

__all__ = ["CHECKS", "Check", "TemplateAudit", "audit_policy", "audit_template", "write_audit"]

FILE_NAME = "template_audit.json"
POLICIES = ("error", "warn", "off")
# In the order of the report. Where one of the first two fails, the others cannot be made.
FIRST = (audit_tokens.renders, audit_tokens.turns)
OTHERS: tuple[Callable[[Probe], Check], ...] = (
    audit_tokens.one_bos,
    audit_tokens.stop_token,
    audit_tokens.eos,
    audit_tokens.prompt_ids,
    audit_messages.history,
    audit_messages.reasoning,
    audit_messages.system,
    audit_messages.default_system,
    audit_messages.date,
    audit_messages.order,
    audit_messages.content,
    audit_messages.none_content,
    audit_messages.tools,
    audit_messages.special_text,
)
CHECKS: tuple[str, ...] = tuple(check.__name__ for check in (*FIRST, *OTHERS))


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

    def text(self, only_doubts: bool = False) -> str:
        """The report: a line a check, its evidence under it where it did not pass. `only_doubts`: only those."""
        count = {v: sum(check.verdict == v for check in self.checks) for v in ("pass", "warn", "fail")}
        lines = [
            f"template audit {self.hash}: {count['pass']} passed, {count['warn']} warned, {count['fail']} failed",
            *(
                f"  {c.verdict}  {c.name:<15} {c.finding}{_under(c)}"
                for c in self.checks
                if not (only_doubts and c.verdict == "pass")
            ),
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
    probe = Probe(tokenizer, _stop_ids(generation_config), template_kwargs or {})
    checks: list[Check] = []
    for first in FIRST:
        checks.append(first(probe))
        if checks[-1].verdict == "fail":
            break
    else:
        checks += [check(probe) for check in OTHERS]
    return TemplateAudit(tuple(checks), _identity(probe))


def _identity(probe: Probe) -> str:
    tokenizer = probe.tokenizer
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items() if token is not None}
    described = json.dumps([tokenizer.chat_template, named, ids, probe.template.kwargs], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


def _stop_ids(generation_config: Any) -> frozenset[int] | None:
    value = getattr(generation_config, "eos_token_id", None)
    if value is None:
        return None
    return frozenset(int(token) for token in (value if isinstance(value, Iterable) else [value]))


def audit_policy(value: str | Sequence[str]) -> tuple[str, frozenset[str]]:
    """The config field `template_audit` as (policy, names of accepted checks).

    e.g. "error" -> ("error", {}); "warn" -> ("warn", {}); ["stop_token"] or "stop_token" -> ("error", {"stop_token"})
    Raises `ConfigError` for a name that is neither a policy nor a check.
    """
    names = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    if len(names) == 1 and names[0] in POLICIES:
        return names[0], frozenset()
    for name in names:
        if name not in CHECKS:
            known = (*POLICIES, *CHECKS)
            raise ConfigError(
                f"`template_audit` is {value!r}; write error, warn, off, or names of checks to accept "
                f"({', '.join(CHECKS)}).{suggest(str(name), known)}"
            )
    return "error", frozenset(names)
