"""`posttrain check`: load all that a run would, run its self-checks on the real model and rows, and train nothing."""

from __future__ import annotations

import tempfile
from typing import Any

from posttrain.cli import run
from posttrain.cli.method import choose, possible
from posttrain.cli.parse import Values, construct
from posttrain.cli.run import build, config_of, load_data, say


def check(values: Values) -> None:
    """Print what each check proved. Raises `SystemExit(1)` when one failed."""
    from posttrain.trainer.selfcheck import report

    check_fields(values)
    method = _method(values)
    trainer: Any = None
    with tempfile.TemporaryDirectory(prefix="posttrain-check-") as folder:
        # Nothing is written where the run will write.
        config = config_of(method)
        trainer, _, _ = build(method, {**values, config: _quiet(values[config], folder)})
        findings = trainer.selfchecks.only()
    counts = {verdict: sum(found.verdict == verdict for found in findings) for verdict in ("pass", "warn", "fail")}
    say(report(findings))
    say(
        f"{counts['pass']} passed, {counts['warn']} warned, {counts['fail']} failed, of {len(findings)} self-checks of "
        f"{method}"
    )
    if counts["fail"]:
        raise SystemExit(1)


def check_fields(values: Values) -> None:
    """Refuse what cannot run, before anything heavy is imported."""
    run.check(values, config_of(possible(values)[0]))


def _method(values: Values) -> str:
    """The method meant; the rows are read for it only where the fields leave it open."""
    from posttrain.data.config import DatasetMixtureConfig, ScriptArguments

    methods = possible(values)
    if len(methods) == 1:
        return methods[0]
    script: ScriptArguments = construct(ScriptArguments, values["ScriptArguments"])
    mixture: DatasetMixtureConfig = construct(DatasetMixtureConfig, values["DatasetMixtureConfig"])
    return choose(values, load_data(script, mixture, wants_eval=False)[0])


def _quiet(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The run's own fields, without what reaches beyond this process: folders, trackers, the hub, a checkpoint."""
    kept = {name: value for name, value in config.items() if name not in ("resume_from_checkpoint", "hub_model_id")}
    return {**kept, "output_dir": folder, "report_to": "none", "push_to_hub": False, "eval_on_start": False}
