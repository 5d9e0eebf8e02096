"""One side of the benchmark of the fused losses, kept alive: `run` on stdin is answered by a line of JSON.

python fused_worker.py '{"side": "ours", "loss": "dpo", "rows": 8, "length": 256, ...}'

    run     loss and gradients once -> {"seconds", "cpu_seconds", "loss", "peak_mib"}

Sides: `ours`, `trl-1.13.0` (its `trl.losses`), and `full`: all logits of all positions in the weight's dtype, the
log-softmax of their float32 copy, as transformers does. The three compute the same loss from the same inputs.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


class Inputs:
    """Rows of hidden states with a prompt that is not trained; the reference's; advantages, labels, a teacher."""

    def __init__(self, job: dict) -> None:
        g = torch.Generator().manual_seed(job["seed"])
        B, T, H, V = job["rows"], job["length"], job["hidden"], job["vocab"]

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g) * scale).to(getattr(torch, job["dtype"]))

        self.hidden, self.weight = random(B, T, H).requires_grad_(), random(V, H, scale=0.05)
        self.weight.requires_grad_(not job["frozen"])
        self.ref_hidden = random(B, T, H)
        self.ref_weight = self.weight.detach()
        self.target = torch.randint(V, (B, T), generator=g)
        self.target[:, : int(job["prompt"] * T)] = IGNORED
        self.mask = (self.target != IGNORED).long()
        self.advantages = torch.randn(B, generator=g)
        self.labels = torch.arange(B) % 2 == 0

    @property
    def reference(self) -> dict[str, Tensor]:
        return {"ref_input": self.ref_hidden, "ref_weight": self.ref_weight}


def public(job: dict) -> Callable[[Inputs], Tensor]:
    """Ours and TRL's have the same calls."""
    module: Any = importlib.import_module("posttrain.losses" if job["side"] == "ours" else "trl.losses")
    more = {"compiled": job["compiled"]}
    if job["loss"] == "dpo":
        dpo = module.FusedLinearDPOLoss(**more)
        return lambda x: dpo(x.weight, x.hidden, x.target, **x.reference)[0]
    if job["loss"] == "kto":
        kto = module.FusedLinearKTOLoss(use_ref_model=True, **more)
        return lambda x: kto(x.hidden, x.weight, x.target, preference_labels=x.labels, **x.reference)[0]
    if job["loss"] == "grpo":
        grpo = module.FusedLinearGRPOLoss(**more)
        return lambda x: grpo(x.hidden, x.weight, x.target.clamp(min=0), x.mask, x.advantages, **x.reference)[0]
    jsd = module.FusedLinearJSDLoss(**more)

    def distil(x: Inputs) -> Tensor:
        return jsd(x.hidden.flatten(0, 1), x.weight, x.ref_hidden.flatten(0, 1), x.ref_weight, x.target.flatten())

    return distil


def full(job: dict) -> Callable[[Inputs], Tensor]:
    def distribution(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.log_softmax(F.linear(hidden, weight).float(), -1)

    def at_target(x: Inputs, logp: Tensor) -> Tensor:
        return logp.gather(-1, x.target.clamp(min=0)[..., None])[..., 0] * x.mask

    def loss(x: Inputs) -> Tensor:
        student = distribution(x.hidden, x.weight)
        logps = at_target(x, student)
        with torch.no_grad():
            teacher = distribution(x.ref_hidden, x.ref_weight)
            ref = at_target(x, teacher)
        ratio = (logps - ref).sum(1)
        if job["loss"] == "dpo":
            return -F.logsigmoid(0.1 * (ratio[: len(ratio) // 2] - ratio[len(ratio) // 2 :])).mean()
        if job["loss"] == "kto":
            return torch.sigmoid(0.1 * torch.where(x.labels, -ratio, ratio)).mean()
        if job["loss"] == "grpo":
            kl = (torch.exp(ref - logps) - 1 - ref + logps) * x.mask
            gain = torch.exp(logps - logps.detach()) * x.advantages[:, None]
            return (-gain * x.mask + 0.04 * kl).sum() / x.mask.sum()
        kept = x.mask.bool()
        p, q = student[kept], teacher[kept]
        m = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0))
        jsd = 0.5 * (
            F.kl_div(m, p, log_target=True, reduction="sum") + F.kl_div(m, q, log_target=True, reduction="sum")
        )
        return 0.5 * (jsd - logps.sum()) / kept.sum()

    return loss


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    device, inputs = measure.Device("cpu"), Inputs(job)
    loss_fn = full(job) if job["side"] == "full" else public(job)
    device.reset_peak()
    baseline = device.held_mib()
    print(json.dumps({"ready": True, "torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        inputs.hidden.grad = inputs.weight.grad = None
        start, cpu = time.perf_counter(), time.process_time()
        loss = loss_fn(inputs)
        loss.backward()
        took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        peak = device.peak_mib() - baseline
        print(json.dumps({**took, "loss": float(loss.detach()), "peak_mib": peak}), flush=True)


if __name__ == "__main__":
    main()
