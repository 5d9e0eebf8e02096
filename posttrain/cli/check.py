"""`posttrain check`: load all that a run would, run its self-checks on the real model and rows, and train nothing."""

from __future__ import annotations

import tempfile
from typing import Any

from posttrain.cli.parse import Values
from posttrain.cli.run import build, say


def check(values: Values) -> None:
    """Print what each check proved. Raises `SystemExit(1)` when one failed."""
    from posttrain.trainer.selfcheck import report

    trainer: Any = None
    with tempfile.TemporaryDirectory(prefix="posttrain-check-") as folder:
        # Nothing is written where the run will write.
        trainer, _, _ = build("sft", {**values, "SFTConfig": _quiet(values["SFTConfig"], folder)})
        findings = trainer.selfchecks.only()
    counts = {verdict: sum(found.verdict == verdict for found in findings) for verdict in ("pass", "warn", "fail")}
    say(report(findings))
    say(f"{counts['pass']} passed, {counts['warn']} warned, {counts['fail']} failed, of {len(findings)} self-checks")
    if counts["fail"]:
        raise SystemExit(1)


def _quiet(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The run's own fields, without what reaches beyond this process: folders, trackers, the hub, a checkpoint."""
    kept = {name: value for name, value in config.items() if name not in ("resume_from_checkpoint", "hub_model_id")}
    return {**kept, "output_dir": folder, "report_to": "none", "push_to_hub": False, "eval_on_start": False}
