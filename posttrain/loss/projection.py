"""The products of the head, and the gradients of what they multiply.

Letters: n read-outs of a chunk, H hidden, V vocabulary, r rank of an adapter, R replaced rows of the weight.

Raw logits are h W'ᵀ + u Bᵀ + b: W' is the weight with the rows at `index` replaced by `rows` (trained tokens),
u = s·h Aᵀ the narrow side of a LoRA adapter, and B its wide side. Neither W' nor B·A is ever formed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from posttrain.loss.softmax import chunks


@dataclass(frozen=True)
class Operands:
    """What the head multiplies. e.g. Operands(hidden, weight) for a plain linear head"""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    narrow: Tensor | None = None  # [N, r]   s·h Aᵀ
    wide: Tensor | None = None  # [V, r]   B
    index: Tensor | None = None  # [R]   different rows of the weight
    rows: Tensor | None = None  # [R, H]   what they are replaced by

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the fields."""
        return tuple(getattr(self, f.name) for f in fields(self))

    def wanted(self) -> tuple[bool, ...]:
        """Which of them need a gradient, in the order of the fields."""
        return tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in self.tensors())


class Projection:
    """The operands in the dtype of the products, and the gradients of those that want one, added up by chunk."""

    def __init__(self, given: Operands, dtype: torch.dtype, wanted: tuple[bool, ...]) -> None:
        self._given, self._dtype = given, dtype
        cast = [x if name in ("hidden", "narrow") else self._cast(x) for name, x in vars(given).items()]
        self._used = Operands(*cast)  # pyright: ignore[reportArgumentType]
        self._wanted = dict(zip((f.name for f in fields(given)), wanted, strict=True))
        self._found: dict[str, Tensor] = {}
        for name in ("hidden", "narrow"):
            if self._wanted[name]:
                self._found[name] = torch.empty_like(getattr(given, name))

    def _cast(self, x: Tensor | None) -> Tensor | None:
        return x.to(self._dtype) if x is not None and x.is_floating_point() else x

    def logits(self, part: slice) -> Tensor:
        """[n, V] in the product dtype, before scale and soft cap."""
        use = self._used
        h = use.hidden[part].to(self._dtype)
        if use.narrow is None or use.wide is None:
            z = h @ use.weight.t() if use.bias is None else torch.addmm(use.bias, h, use.weight.t())
            small = use.bias
        else:
            # The small summand first: it is rounded by its own size, and the large product is added to it unrounded.
            u = use.narrow[part].to(self._dtype)
            small = u @ use.wide.t() if use.bias is None else torch.addmm(use.bias, u, use.wide.t())
            z = torch.addmm(small, h, use.weight.t())
        if use.index is not None and use.rows is not None:
            replaced = h @ use.rows.t()
            z[:, use.index] = replaced if small is None else replaced + small[..., use.index]
        return z

    def add(self, part: slice, d_logits: Tensor) -> None:
        """Take the gradient of one chunk's raw logits [n, V]. With replaced rows it is written over."""
        use, wanted = self._used, self._wanted
        h = use.hidden[part].to(self._dtype)
        if wanted["bias"]:
            self._add("bias", d_logits.sum(0, dtype=torch.float32))
        if use.narrow is not None and use.wide is not None:
            if wanted["narrow"]:
                self._put("narrow", part, d_logits @ use.wide)
            if wanted["wide"]:
                self._accumulate("wide", d_logits, use.narrow[part].to(self._dtype))
        replaced = None
        if use.index is not None and use.rows is not None:
            replaced = d_logits[:, use.index]
            d_logits[:, use.index] = 0
            if wanted["rows"]:
                self._accumulate("rows", replaced, h)
        if wanted["hidden"]:
            d_hidden = d_logits @ use.weight
            if replaced is not None and use.rows is not None:
                d_hidden.addmm_(replaced, use.rows)
            self._put("hidden", part, d_hidden)
        if wanted["weight"]:
            self._accumulate("weight", d_logits, h)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """One an operand: None where it is not wanted, 0 where there was no chunk. Sums are fp32 or the products'."""
        for name, wanted in self._wanted.items():
            if wanted and name not in self._found:
                self._found[name] = torch.zeros_like(getattr(self._given, name))
        return tuple(self._found.get(name) for name in self._wanted)

    def _put(self, name: str, part: slice, value: Tensor) -> None:
        into: Any = self._found[name]
        into[part] = value.to(into.dtype)

    def _add(self, name: str, value: Tensor) -> None:
        before = self._found.get(name)
        self._found[name] = value if before is None else before + value

    def _accumulate(self, name: str, d_logits: Tensor, h: Tensor) -> None:
        self._found[name] = accumulate_product(self._found.get(name), d_logits, h)


WEIGHT_BLOCK_BYTES = 2 << 20
"""Rows of the weight gradient whose summand is formed at once, in fp32: products of more rows are no faster."""


def accumulate_product(d_weight: Tensor | None, d_logits: Tensor, h: Tensor) -> Tensor:
    """d_weight + d_logitsᵀ h [V, H]. Chunks are summed in fp32; one chunk alone stays in the product dtype."""
    if d_weight is None:
        return d_logits.t() @ h
    if d_logits.dtype == torch.float32:
        return d_weight.addmm_(d_logits.t(), h)
    d_weight = d_weight.float()
    for rows in _weight_blocks(d_weight):
        d_weight[rows] += d_logits[:, rows].t() @ h
    return d_weight


def scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient · factor, a matrix in blocks: no second copy in fp32 at the moment when the first one and the result
    are both alive."""
    if gradient is None or gradient.ndim != 2:
        return None if gradient is None else (gradient.float() * factor).to(dtype)
    out = torch.empty_like(gradient, dtype=dtype)
    for rows in _weight_blocks(gradient):
        out[rows] = (gradient[rows].float() * factor).to(dtype)
    return out


def _weight_blocks(weight: Tensor) -> Iterator[slice]:
    """Rows of a [V, H] matrix, WEIGHT_BLOCK_BYTES in fp32 at once; 128 times that off the CPU."""
    block = WEIGHT_BLOCK_BYTES if weight.device.type == "cpu" else 128 * WEIGHT_BLOCK_BYTES
    return chunks(weight.shape[0], max(1, block // (4 * max(weight.shape[1], 1))))
