"""One side of the head benchmark, kept alive. A line on stdin is a command; a line of JSON on stdout answers it.

python head_worker.py '{"side": "ours", "case": "fp32", "tokens": 2048, ...}'

    run [<tokens>]  loss and gradients once, of all tokens or the first few
                    -> {"seconds", "cpu_seconds", "loss", "peak_mib"}
    error <file>    relative error of the gradients against a float64 reference saved there (made if missing)

Sides: `ours`, `trl-1.13.0`, `trl-1.16.0`, and `full`, which forms all logits in the compute dtype and takes the
cross-entropy of their float32 copy, as transformers does.

Cases: `bf16` hidden states and weight in bfloat16; `autocast` both in float32 under bfloat16 autocast, which is how a
trainer with float32 master weights calls the head; `fp32`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(job: dict) -> Loss:
    from posttrain.loss.linear import HeadSpec, linear_scores
    from posttrain.types import ScoreRequest

    spec = HeadSpec(chunk_tokens=job.get("chunk_tokens"))

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # What the engine asks for: the read-outs alone, with the objective known before the forward.
        read_from = (labels != IGNORED).nonzero().squeeze(1)
        count = read_from.shape[0]
        request = ScoreRequest(objective=lambda logps, index: -logps / count)
        scores = linear_scores(hidden[read_from], weight, labels[read_from], None, spec, request)
        assert scores.total is not None
        return scores.total

    return loss


def trl_1_13(job: dict) -> Loss:
    from trl.trainer import sft_trainer

    # The size its SFT trainer passes. It also returns accuracy and entropy: there is no way to ask for the loss alone.
    size = sft_trainer._CHUNKED_LM_HEAD_CHUNK_SIZE

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return sft_trainer._chunked_cross_entropy_loss(hidden[None], weight, size, shift_labels=labels[None])[0]

    return loss


def trl_1_16(job: dict) -> Loss:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    # What its SFT trainer asks for; without Triton (on a CPU) its fused head scores masked positions too.
    outputs = ("log_probs", "entropy", "is_top1")
    size = utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        mask = labels != IGNORED
        scores = ChunkedLogProbFunction.apply(hidden, weight, None, labels.clamp(min=0), 1.0, size, None, 1.0, outputs)
        return -scores[0].masked_fill(~mask, 0).sum() / mask.sum()

    return loss


def full(job: dict) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED)

    return loss


SIDES = {"ours": ours, "trl-1.13.0": trl_1_13, "trl-1.16.0": trl_1_16, "full": full}


def inputs(job: dict) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    dtype = torch.bfloat16 if job["case"] == "bf16" else torch.float32
    weight = (torch.randn(job["vocab"], job["hidden"], generator=generator) * 0.05).bfloat16().to(dtype)
    hidden = torch.randn(job["tokens"], job["hidden"], generator=generator).bfloat16().to(dtype)
    labels = torch.randint(job["vocab"], (job["tokens"],), generator=generator)
    masked = torch.randperm(job["tokens"], generator=generator)[: int(job["tokens"] * job["masked"])]
    labels[masked] = IGNORED
    hidden, weight, labels = (x.to(job.get("device", "cpu")) for x in (hidden, weight, labels))
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The two gradients in float64, a few tokens at a time."""
    hidden, weight = hidden.detach().double(), weight.detach().double()
    valid = (labels != IGNORED).nonzero().squeeze(1)
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for index in valid.split(128):
        grad = torch.softmax(hidden[index] @ weight.t(), dim=-1)
        grad[torch.arange(len(index)), labels[index]] -= 1
        grad /= len(valid)
        grad_hidden[index] = grad @ weight
        grad_weight.addmm_(grad.t(), hidden[index])
    return grad_hidden, grad_weight


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


class Worker:
    def __init__(self, job: dict) -> None:
        torch.set_num_threads(job["threads"])
        self.device = measure.Device(job.get("device", "cpu"))
        self.loss = SIDES[job["side"]](job)
        self.context: Callable = contextlib.nullcontext
        if job["case"] == "autocast":
            self.context = lambda: torch.autocast(self.device.name, dtype=torch.bfloat16)
        self.hidden, self.weight, self.labels = inputs(job)
        self.device.reset_peak()
        # Imports and the inputs are there; everything above this is what a call costs, gradients included.
        self.baseline = self.device.held_mib()

    def once(self, tokens: int | None = None) -> dict:
        self.hidden.grad = self.weight.grad = None
        hidden, labels = self.hidden[:tokens], self.labels[:tokens]
        self.device.wait()
        start, cpu = time.perf_counter(), time.process_time()
        with self.context():
            loss = self.loss(hidden, self.weight, labels)
        loss.backward()
        self.device.wait()
        took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        return {**took, "loss": float(loss.detach())}

    def run(self, tokens: str | None = None) -> dict:
        return {**self.once(int(tokens) if tokens else None), "peak_mib": self.device.peak_mib() - self.baseline}

    def error(self, path: str) -> dict:
        if not Path(path).exists():
            torch.save(reference(self.hidden, self.weight, self.labels), path)
        grad_hidden, grad_weight = torch.load(path)
        self.once()
        assert self.hidden.grad is not None and self.weight.grad is not None
        return {
            "hidden": relative(self.hidden.grad, grad_hidden),
            "weight": relative(self.weight.grad, grad_weight),
        }


def main() -> None:
    worker = Worker(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = worker.run(*arguments) if command == "run" else worker.error(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
