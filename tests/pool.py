"""Two processes that stay up for the whole session: distributed tests send them functions.

Each is a rank of a gloo group, found by accelerate through the usual environment variables. A call that hangs kills the
pool and fails the test.

e.g. POOL.run(rank_and_sum, values=[1, 2]) -> [result of rank 0, result of rank 1]
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

RANKS = 2
HANG_SECONDS = 60.0
START_SECONDS = 120.0  # the first answer waits for two imports of torch and transformers


class PoolError(AssertionError):
    """A rank raised, died or hung."""


class Pool:
    """Workers are started by the first call."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[Any] = []
        self._calls: list[Any] = []
        self._answers: Any = None

    def run(self, function: Callable[..., Any], hang_seconds: float = HANG_SECONDS, **kwargs: Any) -> list[Any]:
        """Call a module-level function on both ranks; return their results in order."""
        if not self._workers:
            self._start()
        for calls in self._calls:
            calls.put((function, kwargs))
        return self._collect(hang_seconds, function.__name__)

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._answers = self._context.Queue()
        self._calls = [self._context.Queue() for _ in range(RANKS)]
        self._workers = [
            self._context.Process(target=_work, args=(rank, port, self._calls[rank], self._answers), daemon=True)
            for rank in range(RANKS)
        ]
        for worker in self._workers:
            worker.start()
        self._collect(START_SECONDS, "start")

    def _collect(self, seconds: float, what: str) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(results) + len(failures) < RANKS:
            try:
                rank, ok, value = self._answers.get(timeout=0.5)
                (results if ok else failures)[rank] = value
            except queue.Empty:
                dead = [r for r, worker in enumerate(self._workers) if not worker.is_alive()]
                if dead or time.monotonic() > deadline:
                    self.close()
                    why = f"ranks {dead} died" if dead else f"no answer after {seconds:.0f} s"
                    raise PoolError(f"{what}: {why}; answered: {sorted(results)}; {failures}") from None
        if failures:
            # The other rank may be waiting in a collective for the one that failed, or have answered from another step.
            self.close()
            raise PoolError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
        return [pickle.loads(results[rank]) for rank in range(RANKS)]

    def close(self, patience: float = 0.0) -> None:
        """End the workers: asked to, they tidy up; after `patience` seconds they are killed."""
        for calls in self._calls if patience else ():
            calls.put((None, {}))
        for worker in self._workers:
            worker.join(patience)
            worker.kill()
            worker.join()
        self._workers = []


POOL = Pool()
atexit.register(POOL.close, patience=10.0)


def _work(rank: int, port: int, calls: Any, answers: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
    }
    try:
        import datasets  # noqa: F401  imported here, so that no call waits for it
        import peft  # noqa: F401
        import torch
        from accelerate import PartialState

        import posttrain.trainer.sft  # noqa: F401

        torch.set_num_threads(1)
        PartialState(cpu=True)
        answers.put((rank, True, pickle.dumps(None)))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
        return
    while True:
        function, kwargs = calls.get()
        if function is None:
            return
        try:
            answers.put((rank, True, pickle.dumps(function(**kwargs))))  # by value: no shared memory
        except BaseException:
            answers.put((rank, False, traceback.format_exc()))
