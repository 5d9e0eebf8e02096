"""One way to prepare a model, whatever it is for: the trained one, and those it is compared with."""

from __future__ import annotations

from typing import Any, Literal, get_args

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from posttrain.errors import ConfigError
from posttrain.parallel.deepspeed import Zero
from posttrain.parallel.strategy import Replicated, Sharded, Strategy

Role = Literal["policy", "value", "reference", "teacher", "reward"]
_TRAINED: tuple[Role, ...] = ("policy", "value")
_STRATEGIES: dict[DistributedType, type[Strategy]] = {DistributedType.FSDP: Sharded, DistributedType.DEEPSPEED: Zero}


def find_strategy(accelerator: Accelerator) -> Strategy:
    return _STRATEGIES.get(accelerator.distributed_type, Replicated)(accelerator)


def prepare_role(model: nn.Module, role: Role, accelerator: Accelerator) -> Any:
    """Place a model as the run's strategy places the policy: sharded under FSDP2 and ZeRO-3, else whole on the rank's
    device, in the run's precision.

    A reference, teacher or reward model is frozen, in evaluation mode, and holds neither gradients nor optimizer
    states. A trained model comes back ready to score; the optimizer is joined to it when training begins. Raises
    `ConfigError` for an unknown role.
    """
    if role not in get_args(Role):
        raise ConfigError(f"`role` is {role!r}; expected {', '.join(get_args(Role))}.")
    if role not in _TRAINED:
        model.requires_grad_(False)
        model.eval()
    known = list(accelerator._models)
    prepared = find_strategy(accelerator).prepare(model)
    if role != "policy":
        # accelerate compares every model of its list with what it clips; and the trainer asks if the list is empty.
        accelerator._models[:] = known
    return prepared
