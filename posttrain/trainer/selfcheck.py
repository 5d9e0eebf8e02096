"""Checks of the real model on the first rows of the run, before its first step.

accumulation  N rows in one micro-batch, and in N of one row, give the same loss and the same gradient
gradients     there are trainable tensors, and each receives a gradient
forest        two rows side by side score as each does alone
template      the audit of the chat template, made when the trainer was built

They leave no trace: a run with them and one without end in the same bits. At most `TOKENS` tokens are used, about
four forwards and two backwards of them; gradients are compared by their norms and a sample, so no copy is made.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from posttrain.data.forest import build_forest, rows_of
from posttrain.errors import ConfigError, SelfCheckError, suggest
from posttrain.model.load import dropout_of
from posttrain.parallel.params import whole
from posttrain.parallel.ranks import all_max, gather_objects, say
from posttrain.parallel.strategy import Replicated, Sharded
from posttrain.trainer.experience import Experience, Window
from posttrain.trainer.meter import Meter
from posttrain.trainer.randomness import preserved_rng
from posttrain.trainer.run_record import write_beside
from posttrain.trainer.tolerance import HALF, tolerance
from posttrain.types import Row, ScoreRequest, TokenBatch

NAMES = ("accumulation", "gradients", "forest", "template")
FILE_NAME = "selfcheck.json"
TOKENS, ROWS = 1024, 4
SAMPLE = 256
"""Elements of each gradient that are compared, beside its norm."""


_NOT_FINITE = "a loss is not finite; the first step names its rows"


@dataclass(frozen=True)
class Finding:
    """What one check found. verdict: pass, warn, fail or skip."""

    name: str
    verdict: str
    text: str


class SelfCheck(NamedTuple):
    """A check of a method, beside those all trainers share: put into the trainer's `more_self_checks`.

    run: called in evaluation mode and without gradients, with the first experiences of the run, each of one unit and as
    many on every rank; returns its verdict and what it found.
    """

    name: str
    run: Callable[[Sequence[Any]], tuple[str, str]]


class _Checked(BaseException):
    """The checks are done, and nothing else was wanted: no failure of the run."""


class SelfChecks(TrainerCallback):
    """Runs the checks in the first window of a run, and writes what they found into each checkpoint."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.findings: list[Finding] = []
        self._due = self._only = False

    def only(self) -> list[Finding]:
        """Load, check, and stop before the first step. Nothing is raised for a check that fails."""
        self._only = True
        try:
            self.engine.train()
        except _Checked:
            pass
        finally:
            self._only = False
        return self.findings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.findings, self._due = [], True

    def refuse_unknown(self) -> None:
        """Raise `ConfigError` for a name in `skip_self_checks` that is no check's."""
        known = (*NAMES, *(check.name for check in self.engine.more_self_checks), "all")
        for name in self.engine.args.skip_self_checks or ():
            if name not in known:
                raise ConfigError(
                    f"`skip_self_checks` holds {name!r}; the checks are {', '.join(known[:-1])}, or all."
                    f"{suggest(str(name), known)}"
                )

    def write_state(self, folder: Path) -> None:
        """Into a checkpoint, while it is written."""
        if self.findings:
            (folder / FILE_NAME).write_text(self._text(), encoding="utf-8")

    def _text(self) -> str:
        return json.dumps([asdict(finding) for finding in self.findings], indent=2) + "\n"

    def run(self, micro: Sequence[Sequence[Experience]]) -> None:
        """Check once, with the first window. Raises `SelfCheckError` on every rank when a check fails on one."""
        if not self._due:
            return
        self._due = False
        skipped = set(self.engine.args.skip_self_checks or ())
        extra = {check.name: check.run for check in self.engine.more_self_checks}
        wanted = [name for name in (*NAMES, *extra) if not skipped & {name, "all"}]
        if not wanted and not self._only:
            return
        with _untouched(self.engine):
            self.findings = _together(list(_run(self.engine, micro, wanted, extra)))
        failed = [f"{f.name}: {f.text}" for f in self.findings if f.verdict == "fail"]
        if self._only:
            raise _Checked
        say(_summary(self.findings))
        if self.engine.state.is_world_process_zero:
            write_beside(self.engine.args, FILE_NAME, self._text())
        if failed:
            raise SelfCheckError(
                f"self-checks failed before the first step. {'; '.join(failed)}. docs/troubleshooting.md says what "
                "each means; `skip_self_checks` leaves one out by name."
            )


def _summary(findings: Sequence[Finding]) -> str:
    """One line of what passed, and one for each check that did not."""
    passed = ", ".join(f.name for f in findings if f.verdict == "pass") or "none"
    said = {"warn": "", "skip": "skipped, "}
    rest = [f"\nself-check {f.name}: {said[f.verdict]}{f.text}" for f in findings if f.verdict in said]
    return f"self-checks passed: {passed}{''.join(rest)}"


def report(findings: Sequence[Finding]) -> str:
    """A line a check."""
    return "\n".join(f"  {f.verdict}  {f.name:<13} {f.text}" for f in findings)


def _together(mine: list[Finding]) -> list[Finding]:
    """The worst verdict of any rank on each check."""
    order = ("skip", "pass", "warn", "fail")
    ranks = gather_objects([(f.name, f.verdict, f.text) for f in mine])
    return [Finding(*max(each, key=lambda f: order.index(f[1]))) for each in zip(*ranks, strict=True)]


def _run(engine: Any, micro: Any, wanted: list[str], extra: dict[str, Any]) -> Iterator[Finding]:
    chosen = _chosen(engine, micro)
    if {"accumulation", "gradients"} & set(wanted):
        for name, finding in _accumulation(engine, micro, chosen):
            if name in wanted:
                yield Finding(name, *finding)
    if "forest" in wanted:
        yield Finding("forest", *_forest(engine, chosen))
    if "template" in wanted:
        yield Finding("template", *_template(engine))
    for name, check in extra.items():
        if name in wanted:
            engine.model_wrapped.eval()
            with torch.no_grad():
                found = check(chosen)
            yield Finding(name, *found)


def _chosen(engine: Any, micro: Any) -> list[Experience]:
    """The first units that fit, as many on every rank, since under FSDP2 every forward is taken together."""
    found: list[Experience] = []
    left = TOKENS
    for whole_unit in (u for pieces in micro for e in pieces for u in e.split(1) if u.batch.num_sequences):
        unit = _cut(whole_unit)
        if unit.batch.num_tokens <= left and float(engine.unit(unit)) > 0:
            found.append(unit)
            left -= unit.batch.num_tokens
        if len(found) == ROWS:
            break
    return found[: -all_max([-len(found)], engine.args.device)[0]]


def _cut(unit: Experience) -> Experience:
    """A long row, from a little before its first target on: the checks ask nothing of all of it."""
    size = TOKENS // ROWS
    if type(unit) is not Experience or unit.batch.num_tokens <= size or unit.batch.num_sequences != 1:
        return unit
    (row,) = rows_of(unit.batch)
    start = max(0, int(np.flatnonzero(row.weights)[0]) - size // 2) if any(row.weights) else 0
    part = Row(row.input_ids[start : start + size], row.weights[start : start + size])
    return Experience(build_forest([part], sources=unit.batch.source, own=unit.batch.own))


@contextlib.contextmanager
def _untouched(engine: Any) -> Iterator[None]:
    """Run inside, and give back what was there: random generators, window, metrics, modes, gradients."""
    model = engine.model_wrapped
    modes = {module: module.training for module in model.modules()}
    window, meter, loss = engine.window, engine.meter, engine._window_loss
    engine.meter, engine.window = Meter(), Window(units=0.0)
    try:
        with preserved_rng():
            yield
    finally:
        engine.window, engine.meter, engine._window_loss = window, meter, loss
        if isinstance(engine.strategy, Replicated | Sharded):
            model.zero_grad(set_to_none=True)
        for module, mode in modes.items():
            module.training = mode


# ---- accumulation and gradients --------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    loss: float
    norms: dict[str, float | None]  # of each trainable tensor; None: no gradient
    samples: Tensor  # [elements] scaled so that their norm is near the gradient's
    size: float  # sum of the norms of each experience's samples, which does not cancel


def _accumulation(engine: Any, micro: Any, chosen: list[Experience]) -> Iterator[tuple[str, tuple[str, str]]]:
    trainable = [name for name, p in engine.model.named_parameters() if p.requires_grad]
    if not trainable:
        yield "accumulation", ("skip", "nothing is trainable")
        yield "gradients", ("fail", "no tensor is trainable; check `peft_config` and what is frozen")
        return
    joined, apart = _joined(engine, micro, chosen)
    # ZeRO keeps gradients in buffers that only its step clears.
    backward = isinstance(engine.strategy, Replicated | Sharded)
    one = _pass(engine, [joined], backward) if joined is not None else None
    many = _pass(engine, apart, backward) if apart else None
    yield "accumulation", _compare(engine, one, many, sum(e.batch.num_sequences > 0 for e in apart))
    if many is None:
        yield "gradients", ("skip", f"no row of the first step has targets and at most {TOKENS} tokens")
    elif not backward:
        yield "gradients", ("skip", "not under ZeRO, whose gradient buffers only its step clears")
    else:
        yield "gradients", _receiving(many)


def _joined(engine: Any, micro: Any, chosen: list[Experience]) -> tuple[Experience | None, list[Experience]]:
    """Some units in one experience, and each in its own; as many on every rank, since each is a forward that all take
    part in. An experience with tensors of its own is only cut, never joined: one micro-batch must hold several units.
    """
    if chosen and all(type(unit) is Experience for unit in chosen):
        rows = [row for unit in chosen for row in rows_of(unit.batch)]
        sources = [source for unit in chosen for source in unit.batch.source]
        share = getattr(engine.collator, "share", False)
        forest = Experience(build_forest(rows, share=share, sources=sources))
        return (forest if len(chosen) > 1 else None), chosen
    joined, apart = None, []
    for piece in (p for pieces in micro for e in pieces for p in e.split(TOKENS)):
        units = [u for u in piece.split(1) if u.batch.num_sequences]
        if len(units) > 1 and piece.batch.num_tokens <= TOKENS and isinstance(engine.strategy, Replicated):
            joined, apart = piece, units
            break
    most, none = all_max([len(apart), int(joined is None)], engine.args.device)
    if none or joined is None:
        return None, chosen
    return joined, apart + [replace(apart[0], batch=build_forest([]))] * (most - len(apart))


def _pass(engine: Any, experiences: list[Experience], backward: bool) -> _Pass:
    """One optimizer step's forwards and backwards through the engine, as micro-batches of their own, without the
    step. Under DDP nothing is exchanged; under FSDP2 gradients are whole only where the last pass exchanges them."""
    model, sharded = engine.model_wrapped, isinstance(engine.strategy, Sharded)
    units = float(sum(engine.unit(e) for e in experiences))
    engine.window = Window(units, float(sum(e.batch.num_sequences for e in experiences)))
    # Checkpointing is for training mode only; dropout would draw other numbers for other micro-batches.
    model.train(not dropout_of(engine.model) and engine.args.neftune_noise_alpha is None)
    total, size, before = 0.0, 0.0, torch.zeros(1)
    for i, experience in enumerate(experiences):
        synchronise = sharded and i == len(experiences) - 1
        quiet = contextlib.nullcontext() if synchronise else engine.accelerator.no_sync(model=model)
        with quiet, engine.tuning.offload(), engine.compute_loss_context_manager():
            loss = engine.compute_loss(model, {"batch": experience.to(engine.args.device)})
            total += float(loss.detach())
            if backward and loss.requires_grad:
                engine.strategy.backward(model, loss, synchronise)
                if not sharded:
                    now = _gradients(engine)[1]
                    size, before = size + float((now - before).norm()), now
    norms, samples = _gradients(engine) if backward else ({}, torch.zeros(0))
    if backward:
        model.zero_grad(set_to_none=True)
    return _Pass(total, norms, samples, size)


def _gradients(engine: Any) -> tuple[dict[str, float | None], Tensor]:
    norms: dict[str, float | None] = {}
    samples = []
    for name, p in engine.model.named_parameters():
        if not p.requires_grad:
            continue
        grad = torch.zeros(1).expand(p.numel()) if p.grad is None else whole(p.grad).flatten()
        norms[name] = None if p.grad is None else float(grad.float().norm())
        every = max(1, grad.numel() // SAMPLE)
        samples.append(grad[::every][:SAMPLE].float().cpu() * every**0.5)
    return norms, torch.cat(samples) if samples else torch.zeros(0)


def _compare(engine: Any, one: _Pass | None, many: _Pass | None, count: int) -> tuple[str, str]:
    if one is None or many is None:
        return "skip", f"the first step has no two rows with targets and at most {TOKENS} tokens together"
    if not (math.isfinite(one.loss) and math.isfinite(many.loss)):
        return "skip", _NOT_FINITE
    allowed = tolerance(engine)
    if allowed is HALF and engine.more_self_checks:  # the loss is of sums over responses, which add roundings up
        allowed = allowed._replace(loss=allowed.logp)
    loss = abs(one.loss - many.loss) / max(abs(one.loss), 1e-6)
    text = f"1 micro-batch of {count} units against {count} of 1: loss {one.loss:.6g} and {many.loss:.6g}"
    bad = not loss <= allowed.loss
    if len(one.samples):
        size = max(float(one.samples.norm()), many.size, 1e-12)  # what units cancel, rounding does not
        gradient = float((one.samples - many.samples).norm()) / size
        text += f", gradients differ by {gradient:.1e} (at most {allowed.gradient:.0e})"
        bad = bad or not gradient <= allowed.gradient
    else:
        text += "; gradients were not compared"
    return ("fail" if bad else "pass"), text


def _receiving(found: _Pass) -> tuple[str, str]:
    # Few tokens may reach few experts.
    missing = [name for name, norm in found.norms.items() if norm is None and "expert" not in name]
    if not all(norm is None or math.isfinite(norm) for norm in found.norms.values()):
        return "skip", _NOT_FINITE
    zero = [name for name, norm in found.norms.items() if norm == 0.0]
    if missing:
        return "fail", f"{len(missing)} of {len(found.norms)} trainable tensors receive no gradient: {_few(missing)}"
    if len(zero) == len(found.norms):
        return "fail", f"the gradients of all {len(zero)} trainable tensors are 0"
    # The first half of an adapter, while the second is 0, is as it should be.
    odd = [name for name in zero if "lora_" not in name]
    text = f"{len(found.norms)} trainable tensors receive a gradient"
    return ("warn", f"{text}; 0 for {_few(odd)}") if odd else ("pass", text)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")


# ---- forest and template ---------------------------------------------------------------------------------------------


def _forest(engine: Any, chosen: list[Experience]) -> tuple[str, str]:
    rows = [row for unit in chosen[:2] for row in rows_of(unit.batch)][:2]
    if all_max([int(len(rows) < 2)], engine.args.device)[0]:
        return "skip", f"the first step has no two rows of at most {TOKENS} tokens together"
    rows = [Row(row.input_ids, [1.0] * len(row.input_ids)) for row in rows]
    share = getattr(engine.collator, "share", False)
    model = engine.model_wrapped
    model.eval()
    with torch.no_grad():
        together = _logps(engine, build_forest(rows, share=share))
        alone = torch.cat([_logps(engine, build_forest([row])) for row in rows])
    if not bool(alone.isfinite().all()):
        return "skip", _NOT_FINITE
    difference = float((together - alone).abs().mean())
    allowed = tolerance(engine).logp
    text = f"{len(alone)} log-probabilities of two rows side by side differ from each alone by {difference:.1e}"
    return ("pass" if difference <= allowed else "fail"), f"{text} on average (at most {allowed:.0e})"


def _logps(engine: Any, batch: TokenBatch) -> Tensor:
    scores = engine.model_wrapped(token_batch=batch.to(engine.args.device), score_request=ScoreRequest())
    return scores.logps.float().cpu()


def _template(engine: Any) -> tuple[str, str]:
    audits = [cb.audit for cb in engine.callback_handler.callbacks if "audit" in vars(cb)]
    if not audits:
        return "skip", "the rows are not rendered with a chat template, or its audit is off"
    audit = audits[0]
    if audit.ok:
        return "pass", f"audit {audit.hash}: no check failed"
    return "warn", f"audit {audit.hash}: accepted although they fail: {', '.join(c.name for c in audit.failed)}"
