"""Activation offload: what autograd saves waits in host memory from the forward pass to the backward pass.

On an accelerator the copies run on a stream of their own, from and to pinned memory, beside the computation; the
backward pass fetches ahead in the reverse of the order of saving. On a CPU activations are in host memory already, and
stay where they are.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

SMALL = 4096
"""Bytes: tensors up to this size stay, since a copy costs more than it frees."""

IN_FLIGHT = 4
"""Copies to the host that may be unfinished at once; each holds its device memory until it is done."""

AHEAD = 2
"""Tensors fetched before they are asked for."""


class Transport(Protocol):
    """Where the copies go."""

    def store(self, tensor: Tensor) -> Any: ...

    def fetch(self, stored: Any) -> None:
        """Begin to bring a stored tensor back; may return before it is there."""

    def load(self, stored: Any) -> Tensor:
        """The stored tensor on its device, in order with the current stream."""
        ...

    def same(self, stored: Any, tensor: Tensor) -> bool:
        """Whether `tensor` is what was stored; only of stores that still hold its device memory."""
        ...


class HostTransport:
    """For tensors that are in host memory: they stay."""

    def store(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, stored: Tensor) -> None: ...

    def load(self, stored: Tensor) -> Tensor:
        return stored

    def same(self, stored: Tensor, tensor: Tensor) -> bool:
        return _alias(stored, tensor)


class _Copy:
    """A tensor on its way to the host, there, or on its way back."""

    def __init__(self, host: Tensor, source: Tensor, done: torch.Event) -> None:
        self.host, self.done = host, done
        self.source: Tensor | None = source  # until the copy to the host is done
        self.device = source.device
        self.back: Tensor | None = None
        self.version = source._version


class StreamTransport:
    """Copies between an accelerator and pinned memory on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.Stream(device)
        self.flying: deque[_Copy] = deque()

    def store(self, tensor: Tensor) -> _Copy:
        host = torch.empty_strided(
            tensor.size(), _dense_strides(tensor), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True
        )
        self.side.wait_stream(torch.accelerator.current_stream(self.device))
        with self.side:
            host.copy_(tensor, non_blocking=True)
        copy = _Copy(host, tensor, self.side.record_event())
        self.flying.append(copy)
        while len(self.flying) > IN_FLIGHT:
            self._land(self.flying.popleft())
        return copy

    def _land(self, copy: _Copy) -> None:
        # Memory let go of here may be written by the next kernel of the current stream, so that one waits first.
        torch.accelerator.current_stream(self.device).wait_event(copy.done)
        copy.source = None

    def fetch(self, stored: _Copy) -> None:
        copy = stored
        if copy.source is not None or copy.back is not None:
            return
        # Made on the current stream, which also frees it; its memory may have been used there a moment ago.
        copy.back = torch.empty_strided(copy.host.size(), copy.host.stride(), dtype=copy.host.dtype, device=copy.device)
        self.side.wait_stream(torch.accelerator.current_stream(self.device))
        with self.side:
            copy.back.copy_(copy.host, non_blocking=True)
        copy.done = self.side.record_event()

    def load(self, stored: _Copy) -> Tensor:
        copy = stored
        if copy.source is not None:  # not gone yet: the last ones saved are the first ones wanted
            return copy.source
        self.fetch(copy)
        assert copy.back is not None
        torch.accelerator.current_stream(self.device).wait_event(copy.done)
        return copy.back

    def same(self, stored: _Copy, tensor: Tensor) -> bool:
        source = stored.source
        return source is not None and stored.version == tensor._version and _alias(source, tensor)


class Weights:
    """Tells what autograd saves of a module's weights from what it saves of its activations."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        local = [t for t in tensors if t.device.type != "meta"]
        self._storages = {t.untyped_storage().data_ptr() for t in local if type(t) in (Tensor, nn.Parameter)}
        # Casts of weights, which autocast makes once and keeps.
        shapes = (tuple(getattr(t, "ds_shape", t.shape)) for t in local)  # ZeRO-3 leaves empty tensors here
        self._shapes = {tuple(sorted(shape)) for shape in shapes if len(shape) >= 2}

    def hold(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        if tensor.dim() >= 2 and tuple(sorted(tensor.shape)) in self._shapes:
            return True
        return tensor.untyped_storage().data_ptr() in self._storages


class _Saved:
    """One stored tensor and how many saved variables share it."""

    def __init__(self, stored: Any, position: int) -> None:
        self.stored, self.position, self.users = stored, position, 1


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """While entered, tensors saved for the backward pass are stored by the transport.

    `exempt` tensors (weights) and those of at most `SMALL` bytes stay, and a tensor saved several times in a row is
    stored once. Enter it around forward and backward of one micro-batch.
    """

    def __init__(self, exempt: Iterable[Tensor], transport: Transport) -> None:
        self._weights = Weights(exempt)
        self.transport = transport
        self.paused = False
        self.stored_bytes = 0
        self._order: list[_Saved | None] = []
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if self.paused or not self._worth(tensor):
            return tensor
        for saved in reversed(self._order[-IN_FLIGHT:]):
            if saved is not None and self.transport.same(saved.stored, tensor):
                saved.users += 1
                return saved
        saved = _Saved(self.transport.store(tensor), len(self._order))
        self._order.append(saved)
        self.stored_bytes += tensor.numel() * tensor.itemsize
        return saved

    def _worth(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor  # not of another kind: sharded, quantized
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.itemsize > SMALL
            and not self._weights.hold(tensor)
        )

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor = self.transport.load(saved.stored)
        for earlier in reversed(self._order[max(0, saved.position - AHEAD) : saved.position]):
            if earlier is not None:
                self.transport.fetch(earlier.stored)
        saved.users -= 1
        if saved.users <= 0:
            self._order[saved.position] = None
        return tensor

    @contextlib.contextmanager
    def pausing_in(self, module: nn.Module | None) -> Iterator[ActivationOffload]:
        """Leave out what this module saves: the head's gradients are used first in the backward pass."""
        if module is None:
            yield self
            return

        def pause(*_: Any) -> None:
            self.paused = True

        def go_on(*_: Any) -> None:
            self.paused = False

        handles = [module.register_forward_pre_hook(pause), module.register_forward_hook(go_on, always_call=True)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def offloaded(model: nn.Module, head: nn.Module | None, device: torch.device) -> Iterator[ActivationOffload]:
    """Offload the activations of a model's forward and backward; those of its head stay."""
    transport: Transport = HostTransport() if device.type == "cpu" else StreamTransport(device)
    offload = ActivationOffload((*model.parameters(), *model.buffers()), transport)
    with offload.pausing_in(head), offload:
        yield offload


def _alias(a: Tensor, b: Tensor) -> bool:
    same = a.data_ptr() == b.data_ptr() and a.dtype == b.dtype
    return same and a.size() == b.size() and a.stride() == b.stride()


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a copy: the tensor's own where it is dense, so that views made of it stay cheap."""
    return torch.empty_like(tensor, device="meta").stride()
