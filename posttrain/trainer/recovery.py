"""The forwards and backwards of a micro-batch, and what happens when one runs out of memory.

One process, and DDP until the gradients are being exchanged: the gradients are thrown away, every random generator is
set back, and the step so far is run again in smaller pieces. The smaller budget is kept. A step that was replayed is,
to the bit, the step of a run whose `max_tokens_per_forward` had been the smaller number from its beginning.

FSDP2 and ZeRO exchange weights in every layer: a rank that fails leaves the others waiting, so nothing is replayed.
There, and where a replay is too late, the run ends with an `OutOfMemoryError` that names the batch and a budget.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from posttrain.errors import OutOfMemoryError, TrainingError
from posttrain.parallel.ranks import gather_objects, rank, say, world_size
from posttrain.parallel.strategy import Replicated
from posttrain.trainer.budget import MEASURED_STEP, Memory, Probe, device_memory, first_pieces, longest_row
from posttrain.trainer.experience import Experience, shown
from posttrain.trainer.meter import Meter
from posttrain.trainer.randomness import preserved_rng, restore_rng, rng_state
from posttrain.types import Mean, TokenBatch

NO_GRADIENT = "step {}: no trainable weight received a gradient; check `peft_config` and what is frozen."
_UNLIMITED = 1 << 62
_EVENTS = ("out_of_memory", "memory_budget")
# What allocators say that do not raise torch.OutOfMemoryError: torch's on the host, numpy's, Ascend's, cuBLAS's.
_PHRASES = ("out of memory", "can't allocate memory", "unable to allocate", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed, on any device."""
    if isinstance(error, OutOfMemoryError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


@dataclass
class _Failure:
    """Where memory ran out."""

    piece: Experience
    part: str  # "moving", "forward" or "backward"
    synchronising: bool
    text: str  # what the allocator said


class Recovery:
    """Runs the micro-batches of a step, and holds them until it is done."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.budget: int | None = None  # tokens of a forward, once memory has run out
        self.held: list[list[Experience]] = []  # micro-batches of this step that were run, in pieces
        self.losses: list[tuple[Experience, Tensor]] = []  # of their pieces
        self._events: list[dict[str, Any]] = []  # that the other ranks do not know of
        self._rng: Any = None
        self._fits = -1  # tokens of the largest piece whose gradients were exchanged during its backward pass
        self._at: _Failure | None = None
        self._probe: Probe | None = None
        self._measured_at = MEASURED_STEP
        self._highest = 0  # bytes, of the probe that is done, until a line of the log has them
        self.memory: Callable[[], Memory | None] = device_memory

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: nothing of it has been run."""
        self.held, self.losses, self._rng = [], [], None

    def start(self, history: list[dict[str, Any]]) -> None:
        """A run begins; one that is resumed with the budget that it had found, as its checkpoint's log tells. The
        user's field beats that: a larger device may have more, and after an `OutOfMemoryError` less is asked for."""
        asked = self.engine.args.max_tokens_per_forward
        found = [line["max_tokens_per_forward"] for line in history if line.get("event") in _EVENTS]
        self.budget = found[-1] if found and asked is None else None
        memory = self.memory()
        measured = self._replays or asked is not None or bool(found)
        self._probe = None if measured or memory is None else Probe(memory)
        self._measured_at = self.engine.state.global_step + MEASURED_STEP

    def highest_peak(self) -> int:
        """Bytes of the highest peak since the last call that the probe put back to nothing; 0 without one."""
        found, self._highest = self._highest, 0
        if self._probe is not None:
            found, self._probe.highest = max(found, self._probe.highest), 0
        return found

    def limit(self, window: list[TokenBatch]) -> int | None:
        """Tokens of a forward, at most. Few while memory is being measured."""
        if self._probe is not None:
            return first_pieces(window)
        return min(self._budgets(), default=None)

    def _budgets(self) -> list[int]:
        return [budget for budget in (self.budget, self.engine.args.max_tokens_per_forward) if budget]

    def run(self, model: Any, pieces: list[Experience]) -> Tensor:
        """Forward and backward of one micro-batch, piece by piece. [] its share of the step's loss."""
        if self._rng is None:
            self._rng = rng_state()
        self.held.append(pieces)
        before = self.engine.meter.snapshot()
        total = self._attempt(model, [pieces])
        while total is None:
            self._rewind(model, before)
            total = self._attempt(model, self.held)
        self._at = None  # what fails from here on is no piece of this
        return total

    def _attempt(self, model: Any, micro_batches: list[list[Experience]]) -> Tensor | None:
        """Run micro-batches, of which the last is new: the others were counted before. None: memory ran out."""
        try:
            for pieces in micro_batches[:-1]:
                with self._uncounted():
                    self._micro_batch(model, pieces, last=False)
            return self._micro_batch(model, micro_batches[-1], last=True)
        except Exception as error:
            if not is_out_of_memory(error) or self._at is None:
                raise
            text = str(error).strip()
        # Outside of `except`: the exception's frames hold the activations.
        self._at.text = text.splitlines()[0] if text else "no message"
        return None

    def _micro_batch(self, model: Any, pieces: list[Experience], last: bool) -> Tensor:
        engine = self.engine
        if self._replays:
            pieces = [small for piece in pieces for small in self._cut(piece)]
        synchronise = last and engine.accelerator.sync_gradients
        largest = max(piece.batch.num_tokens for piece in pieces)
        careful = synchronise and self._replays and world_size() > 1 and largest > self._fits
        total = torch.zeros((), device=engine.args.device)
        for i, piece in enumerate(pieces):
            total += self._piece(model, piece, synchronise and not careful and i == len(pieces) - 1)
        if careful:
            self._exchange(model, pieces[0])
        if synchronise:
            self._fits = max(self._fits, largest)
        return total

    def _piece(self, model: Any, piece: Experience, synchronise: bool) -> Tensor:
        engine = self.engine
        self._at = _Failure(piece, "moving", synchronise, "")
        if self._probe is not None:
            self._probe.begin()
        # Leaving our no_sync leaves the caller's too, so the last piece of a quiet micro-batch asks again.
        quiet = contextlib.nullcontext() if synchronise else engine.accelerator.no_sync(model=model)
        with quiet, engine.tuning.offload():
            batch = piece.to(engine.args.device)
            self._at.part = "forward"
            with engine.compute_loss_context_manager():
                loss = engine.compute_loss(model, {"batch": batch}, num_items_in_batch=None)
            if not loss.requires_grad:
                raise TrainingError(NO_GRADIENT.format(engine.state.global_step + 1))
            self._at.part = "backward"
            engine.strategy.backward(model, loss, synchronise)
        if self._probe is not None and engine.state.global_step + 1 == self._measured_at:
            self._probe.note(piece.batch.num_tokens)
        self.losses.append((piece, loss.detach()))
        return loss.detach()

    def _exchange(self, model: Any, like: Experience) -> None:
        """Exchange the gradients in a pass of their own, over an empty batch, which draws and counts nothing.

        A pass that fails while it exchanges cannot be run again: the others have had a part of its gradients. So the
        pieces that may fail, those larger than any that fitted, go before.
        """
        held = len(self.losses)
        with preserved_rng(), self._uncounted():
            self._piece(model, like.part([]), synchronise=True)
        del self.losses[held:]

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        engine = self.engine
        meter, engine.meter = engine.meter, Meter()
        try:
            yield
        finally:
            engine.meter = meter

    # ---- after a failure ---------------------------------------------------------------------------------------------

    @property
    def _replays(self) -> bool:
        return isinstance(self.engine.strategy, Replicated)

    def _cut(self, piece: Experience) -> list[Experience]:
        return [piece] if self.budget is None else list(piece.split(self.budget))

    def _rewind(self, model: Any, meter: Any) -> None:
        """Back to where the step began, with a smaller budget. Raises `OutOfMemoryError` when there is no way on."""
        failed = self._at
        assert failed is not None
        tokens = failed.piece.batch.num_tokens
        if not self._replays or (failed.synchronising and failed.part == "backward" and world_size() > 1):
            raise OutOfMemoryError(self.ended(failed))
        self.budget = max(1, min(tokens // 2, (self.budget or tokens) - 1))
        if len(failed.piece.split(self.budget)) == 1:
            raise OutOfMemoryError(self._too_long(failed))
        step = self.engine.state.global_step + 1
        event = {"event": "out_of_memory", "step": step, "rank": rank(), "tokens": tokens, "part": failed.part}
        self._events.append({**event, "max_tokens_per_forward": self.budget})
        print(
            f"rank {rank()}, step {step}: out of memory in the {failed.part} of {tokens} tokens; the step is run again "
            f"with at most {self.budget} a forward, and so are those to come. Set `max_tokens_per_forward` to it.",
            flush=True,
        )
        self.engine.meter.restore(meter)
        self.losses, self._at = [], None
        model.zero_grad(set_to_none=True)
        if isinstance(model, DistributedDataParallel) and failed.part != "moving":
            # The failed forward began with DDP's broadcast of buffers; a second one would wait for the others.
            model.require_forward_param_sync = False
        del failed
        gc.collect()
        clear_device_cache()
        restore_rng(self._rng)

    def _too_long(self, failed: _Failure) -> str:
        source, tokens = shown(failed.piece.batch.source), failed.piece.batch.num_tokens
        return (
            f"step {self.engine.state.global_step + 1}: out of memory in the {failed.part} of row {source} of the "
            f"training set alone, {tokens} tokens ({failed.text}). Set `max_length` below {tokens}, or turn on "
            "what saves memory: `activation_checkpointing`, `activation_offloading`, `use_peft`; see "
            "docs/troubleshooting.md."
        )

    def ended(self, failed: _Failure | None = None, text: str = "") -> str:
        """What to say when memory ran out and the step cannot be run again."""
        step = self.engine.state.global_step + 1
        failed = failed or self._at
        head = f"step {step}, rank {rank()}: out of memory"
        if failed is None:
            phase = self.engine.stops.phase
            less = "`per_device_eval_batch_size`" if phase == "evaluation" else "`max_tokens_per_forward`"
            return f"{head} outside of a training pass, in: {phase} ({text}). Set a lower {less}, or save memory."
        tokens = failed.piece.batch.num_tokens
        smaller = max(1, min([tokens, *self._budgets()]) // 2)
        return (
            f"{head} in the {failed.part} of {tokens} tokens, rows {shown(failed.piece.batch.source)} of the training "
            f"set ({failed.text or text}). Other ranks may have used a part of it, so it is not run again. The last "
            f"checkpoint in {self.engine.args.output_dir!r} is unharmed: resume with `max_tokens_per_forward` "
            f"{smaller}."
        )

    # ---- what the ranks tell each other, at the end of a step --------------------------------------------------------

    def votes(self) -> list[int]:
        """Joined by maximum: whether there is news, and the smallest budget."""
        step = self.engine.state.global_step + 1
        if self._probe is not None and step == self._measured_at:
            self._highest, self.budget, self._probe = self._probe.highest, self._probe.budget(), None
            self._events.append({"event": "memory_budget", "step": step, "rank": rank()})
        return [len(self._events), -(self.budget or _UNLIMITED)]

    def agree(self, votes: list[int]) -> None:
        """Take the smallest budget of all ranks, and log what happened."""
        if not votes[0]:
            return
        self.budget = None if votes[1] == -_UNLIMITED else -votes[1]
        events = [event for each in gather_objects(self._events) for event in each]
        self._events = []
        for event in events:
            self.engine.state.log_history.append({**event, "max_tokens_per_forward": self.budget})
        # On one rank: the metric is then the number of events, not their mean over ranks.
        count = sum(event["event"] == "out_of_memory" for event in events)
        if count and rank() == 0:
            self.engine.meter.add({"out_of_memory": Mean(float(count), 1.0)})
        longest = longest_row(self.engine.train_dataset)
        say(
            f"all ranks go on with `max_tokens_per_forward` {self.budget}"
            + (f"; rows of up to {longest} tokens may not fit" if self.budget and longest > self.budget else "")
        )
