"""Forest attention's back ends on one GPU: outputs, gradients and speed of varlen beside sdpa, one call a segment.

python benchmarks/cuda/varlen.py
python benchmarks/cuda/varlen.py --tiny --device cpu      (to try the script: without varlen, which needs CUDA)

The reference is a plain masked softmax in float64, its mask read off the forest. Errors are relative to the largest
value. Speed is forward and backward of one layer, the median of `--rounds`. The script ends with status 1 when an error
is over its bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import device
import rows as data
import torch
from common import note, save, table
from torch import Tensor

from posttrain.data.forest import build_forest
from posttrain.model import attention
from posttrain.types import Row, Segments

BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
# heads, key-value heads, size of a head, window
HEADS: dict[str, tuple[int, int, int, int | None]] = {
    "Qwen3-0.6B": (16, 8, 128, None),
    "gemma-3-270m, window": (4, 1, 256, 512),
    "Qwen3-8B": (32, 8, 128, None),
}


def forests(tiny: bool, seed: int) -> dict[str, Segments]:
    """Separate rows, rows with one common prefix, and groups of answers to one prompt each."""
    count, median, longest = (6, 12, 40) if tiny else (32, 370, 4096)
    prefix = data.varied(1, seed + 1, median=20 if tiny else 500)[0]
    rows = data.varied(count, seed, median=median, longest=longest)
    prompts = data.varied(count // 2, seed + 2, median=median, longest=longest)
    groups = [prompt + rows[(2 * i + j) % count][: median // 2] for i, prompt in enumerate(prompts) for j in range(4)]
    cases = {"separate": rows, "common prefix": [prefix + row for row in rows], "groups of 4": groups}
    return {name: build_forest([Row(r, [1.0] * len(r)) for r in each]).segments for name, each in cases.items()}


def reference(q: Tensor, k: Tensor, v: Tensor, forest: Segments, window: int | None) -> Tensor:
    """[1, T, heads, D] in float64: token t sees the tokens of its own path up to itself, the last `window` of them."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = torch.zeros_like(q)
    for leaf in range(len(forest.start)):
        path = torch.from_numpy(forest.positions(leaf)).to(q.device)
        own = path[path >= forest.start[leaf]]
        depth = torch.arange(len(path), device=q.device)
        lag = depth[-len(own) :, None] - depth[None]
        seen = (lag >= 0) & (lag < (window or len(path)))
        scores = q[:, :, own] @ k[:, :, path].transpose(-1, -2) * q.shape[-1] ** -0.5
        out = out.index_copy(2, own, scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, :, path])
    return out.transpose(1, 2)


def backend(name: str, window: int | None) -> Any:
    if name == "reference":
        return lambda q, k, v, forest: reference(q, k, v, forest, window)

    def call(q: Tensor, k: Tensor, v: Tensor, forest: Segments) -> Tensor:
        own = attention._can_use_varlen
        attention._can_use_varlen = lambda *_: name == "varlen"
        try:
            out, _ = attention.forest_attention(
                torch.nn.Module(), q, k, v, None, scaling=q.shape[-1] ** -0.5, forest=forest, sliding_window=window
            )
        finally:
            attention._can_use_varlen = own
        return out

    return call


def gradients(call: Any, inputs: list[Tensor], forest: Segments, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves, forest)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max() / wanted.abs().max())


def milliseconds(call: Any, inputs: list[Tensor], forest: Segments, grad: Tensor, rounds: int) -> float:
    taken = []
    for _ in range(rounds + 2):
        if grad.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        gradients(call, inputs, forest, grad)
        if grad.is_cuda:
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[2:])


def measure(args: argparse.Namespace, name: str, forest: Segments) -> dict[str, dict[str, float]]:
    heads, kv_heads, size, window = HEADS[name]
    if args.tiny:
        heads, kv_heads, size, window = 4, 2, 16, window and 8
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(args.seed)
    total = forest.end[-1]
    shapes = ((1, heads, total, size), (1, kv_heads, total, size), (1, kv_heads, total, size), (1, total, heads, size))
    *inputs, grad = (torch.randn(s, generator=generator).to(args.device, dtype) for s in shapes)
    wanted = gradients(backend("reference", window), inputs, forest, grad)
    found = {}
    for side in ["sdpa", *(["varlen"] if args.device == "cuda" else [])]:
        call = backend(side, window)
        errors = [relative(a, b) for a, b in zip(gradients(call, inputs, forest, grad), wanted, strict=True)]
        taken = milliseconds(call, inputs, forest, grad, args.rounds)
        found[side] = {**dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)), "ms": taken, "bound": BOUNDS[dtype]}
    return found


def main() -> None:
    parser = device.parser(__doc__ or "", "cuda-varlen")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    device.check(args)
    torch.set_num_threads(args.threads)
    found = device.info(args.device)
    print(f"{device.describe(found)}\n", flush=True)
    result: dict[str, Any] = {"machine": found, "cases": {}}
    lines, wrong = [], []
    for case, forest in forests(args.tiny, args.seed).items():
        for name in HEADS:
            note(f"{case}, {name}")
            sides = result["cases"][f"{case}|{name}"] = measure(args, name, forest)
            for side, values in sides.items():
                errors = [values[key] for key in ("out", "dq", "dk", "dv")]
                if not max(errors) <= values["bound"]:
                    wrong.append(f"{case}, {name}, {side}: {max(errors):.1e} is over {values['bound']:.0e}")
                times = f"{sides['sdpa']['ms'] / values['ms']:.1f}×" if side != "sdpa" else ""
                segments = f"{forest.end[-1]:,} in {len(forest.start)}"
                shown = [f"{e:.0e}" for e in errors]
                lines.append([f"{case}, {name}, {side}", segments, *shown, f"{values['ms']:.2f}", times])
    header = ["", "tokens in segments", "out", "dq", "dk", "dv", "ms", "faster than sdpa by"]
    print(table(header, lines), flush=True)
    if args.save:
        note(f"saved {save(args.save, result)}")
    if wrong:
        sys.exit("NOT equal to the reference: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
