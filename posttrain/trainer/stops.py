"""How a run ends before its last step: a signal, a rank that failed, a collective that waits for ever.

A signal (SIGTERM, SIGINT, and SIGUSR1, which SLURM can send ahead of time) is noted; the ranks agree on it at the end
of the step, in the reduction that looks for NaN anyway; then a checkpoint is saved and the run ends with 128 + the
signal's number. A second signal ends the process at once.

A thread looks after the run, since python runs no handler while the main thread waits inside a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from posttrain.errors import OutOfMemoryError, PosttrainError, TrainingError
from posttrain.parallel.ranks import rank, say, world_size
from posttrain.trainer.recovery import is_out_of_memory

SAME_SECONDS = 1.0
"""A launcher and a scheduler may both pass one signal on: the same one within this time counts once."""

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""How long a rank may take to raise an error of its own once another has failed. Then its process is ended."""

IN_STEP = ("forward and backward", "optimizer step")
"""Phases in which ranks wait for each other all the time: one that stands still there is stuck, or keeps the others."""

_HANDLED = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if name in dir(signal)]
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
# What the backends say when the time is over, or when the other side is gone.
_BROKEN = ("timed out", "timeout", "connection closed by peer", "connection reset", "broken pipe", "aborted")
_runs = 0


class Stops(TrainerCallback):
    """Notes signals, keeps the watch informed of what the run does, and stops it at the end of a step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.received = 0  # the first signal that reached this rank
        self.agreed = 0  # the one all ranks stop for
        self.phase, self.beat = "start", time.monotonic()
        self.over = False  # the last step and what follows it is done; an upload may take its time

    def at(self, phase: str) -> None:
        """The run goes on: it now does this."""
        self.phase, self.beat = phase, time.monotonic()

    @property
    def where(self) -> str:
        return f"step {self.engine.state.global_step + 1}, {self.phase}"

    def votes(self) -> list[int]:
        return [self.received]

    def agree(self, votes: list[int]) -> None:
        self.agreed = votes[0]

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.recovery.start(state.log_history)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("forward and backward")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("forward and backward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("optimizer step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("log, evaluation, checkpoint or data")
        if self.agreed:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # whoever sent the signal may not wait that long

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.agreed:  # the step's end has saved already
            control.should_save = control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("checkpoint or data")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("data")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at("end")
        self.over = True


@contextlib.contextmanager
def guarded(engine: Any) -> Iterator[None]:
    """Run training inside: signals are noted, failures named and told to the other ranks.

    Raises `KeyboardInterrupt` after a run that SIGINT stopped, `SystemExit(128 + n)` after one that signal n did,
    `OutOfMemoryError` and `TrainingError` for what an allocator or a collective raised.
    """
    stops: Stops = engine.stops
    stops.received = stops.agreed = 0
    stops.over = False
    stops.at("start")
    with Watch(stops, engine.args) as watch, _noted(stops, watch, engine.args.handle_signals):
        try:
            yield
        except Exception as error:
            named = _named(engine, error)
            watch.tell(str(named))
            engine.run_files.failed(named)
            if named is error:
                raise
            raise named from error
    if stops.agreed:
        name, step = signal.Signals(stops.agreed).name, engine.state.global_step
        saved = "could not be saved" if step in engine.failed_saves else f"is saved in {engine.args.output_dir}"
        say(f"stopped by {name}: checkpoint-{step} {saved}")
        raise KeyboardInterrupt if stops.agreed == signal.SIGINT else SystemExit(128 + stops.agreed)
    if stops.received:
        say(f"{signal.Signals(stops.received).name} came after the last step: the run is done")


def _named(engine: Any, error: Exception) -> Exception:
    """The error that says where the run was, for one that an allocator or a collective raised."""
    stops: Stops = engine.stops
    if isinstance(error, PosttrainError):
        return error
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if is_out_of_memory(error):
        if stops.phase != "optimizer step":
            return OutOfMemoryError(engine.recovery.ended(text=text))
        return OutOfMemoryError(
            f"{stops.where}, rank {rank()}: out of memory in the optimizer, some of whose weights may have changed "
            f"already ({text}). Resume from the last checkpoint in {engine.args.output_dir!r} with less: `use_peft`, "
            "`optim` adafactor or adamw_8bit, `max_tokens_per_forward`, FSDP2 or ZeRO; see docs/troubleshooting.md."
        )
    if world_size() > 1 and isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _BROKEN):
        return TrainingError(f"rank {rank()}, {stops.where}: a collective did not end ({text}).")
    return error


@contextlib.contextmanager
def _noted(stops: Stops, watch: Watch, wanted: bool) -> Iterator[None]:
    """Note signals instead of dying of them. A handler that somebody else has set stays."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, _: Any) -> None:
        if not stops.received:
            stops.received = number
            print(
                f"rank {rank()}: {signal.Signals(number).name}: a checkpoint is saved at the end of the step; a second "
                "signal ends the run at once",
                file=sys.stderr,
                flush=True,
            )

    before = {number: signal.signal(number, note) for number in _HANDLED if signal.getsignal(number) in _DEFAULTS}
    woken = signal.set_wakeup_fd(watch.wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


class Watch:
    """The thread that looks after a run. It ends the process (and says why) when a second signal comes, when another
    rank has failed, and when no rank has moved for `ddp_timeout` seconds and one may wait for another: in a step, or
    where they stand at different places. Ranks that all prepare data, save or evaluate may take as long as they like;
    the backend's own time-out ends what waits in a collective there."""

    def __init__(self, stops: Stops, args: Any) -> None:
        global _runs
        _runs += 1
        self._stops, self._limit, self._key = stops, float(args.ddp_timeout), f"posttrain/{_runs}"
        # A client of its own: the main thread may hold the other one while it waits.
        self._store: Any = _default_store().clone() if world_size() > 1 else None
        self._done = threading.Event()
        self._signals: list[tuple[int, float]] = []
        self._told, self._failed_at, self._why = ("", 0.0), 0.0, ""
        self._moves, self._moved_at = -1, 0.0  # of all ranks; when they were last seen to grow
        self._thread = threading.Thread(target=self._look, name="posttrain-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._read, self.wake_fd = os.pipe()
        for end in (self._read, self.wake_fd):
            os.set_blocking(end, False)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        with contextlib.suppress(OSError):
            os.write(self.wake_fd, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self.wake_fd)

    def tell(self, text: str) -> None:
        """Let the other ranks know that this one ends, and why."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # whoever holds the store may be gone
                self._store.set(f"{self._key}/failed", f"rank {rank()}, {self._stops.where}: {text}")

    def _look(self) -> None:
        while not self._done.is_set():
            ready, _, _ = select.select([self._read], [], [], POLL_SECONDS)
            if ready:
                self._count(os.read(self._read, 64))
            if self._store is not None and not self._done.is_set():
                self._ask()
                self._time()

    def _count(self, numbers: bytes) -> None:
        now = time.monotonic()
        for number in numbers:
            if number not in _HANDLED:
                continue
            if any(number != other or now - at > SAME_SECONDS for other, at in self._signals):
                self._end(f"a second signal ({signal.Signals(number).name}): nothing more is saved", 128 + number)
            self._signals.append((number, now))

    def _ask(self) -> None:
        """Tell the others where this rank is, and see whether one has failed."""
        try:
            now = (self._stops.where, self._stops.beat)
            if self._told != now:
                if self._told[0] != now[0]:
                    self._store.set(f"{self._key}/{rank()}", now[0])
                self._told = now
                self._store.add(f"{self._key}/moves", 1)
            if self._store.check([f"{self._key}/failed"]):
                self._why = self._store.get(f"{self._key}/failed").decode()
        except RuntimeError as error:
            self._why = self._why or f"the rank that holds the store is gone ({str(error).splitlines()[0]})"
        if not self._why:
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > GRACE_SECONDS:
            self._end(f"another rank has failed: {self._why}", 1)

    def _time(self) -> None:
        waited = time.monotonic() - self._stops.beat
        if self._stops.over or waited <= self._limit / 10:  # the others are asked only by a rank that may be stuck
            return
        if not self._still() or waited <= self._limit:
            return
        others = self._others()
        alone = any(place != self._stops.where for place in others.values())
        if not alone and self._stops.phase not in IN_STEP:
            return
        faulthandler.dump_traceback(all_threads=True)
        places = "; ".join(f"rank {other}: {place}" for other, place in others.items())
        text = f"nothing has moved for {waited:.0f} s (`ddp_timeout` {self._limit:.0f}); the others: {places}"
        self.tell(text)
        self._end(text, 1)

    def _still(self) -> bool:
        """Whether no rank has moved for the limit."""
        with contextlib.suppress(RuntimeError):
            moves = self._store.add(f"{self._key}/moves", 0)
            if moves != self._moves:
                self._moves, self._moved_at = moves, time.monotonic()
        return time.monotonic() - self._moved_at > self._limit

    def _others(self) -> dict[int, str]:
        """Where each other rank says it is."""
        found = {}
        for other in (r for r in range(world_size()) if r != rank()):
            with contextlib.suppress(RuntimeError):
                key = f"{self._key}/{other}"
                found[other] = self._store.get(key).decode() if self._store.check([key]) else "not started"
        return found

    def _end(self, text: str, code: int) -> None:
        print(f"posttrain: error: [rank {rank()}] {self._stops.where}: {text}", file=sys.stderr, flush=True)
        os._exit(code)
