"""The public fused losses: hidden states and the head's weight in, loss and metrics out, never a whole logits tensor.

They take the constructor and call arguments that users of Liger's `chunked_loss` and of TRL's `trl.losses` know. What
they add is keyword-only. docs/losses.md says where the values differ. `chunk_size` and `compiled` are accepted and
change nothing: chunks are sized by `memory_mb`, and nothing is compiled.

Call them where the weight is whole: in the wrapped model's forward, or on a gathered weight. A DTensor is refused,
since only the caller knows how its gradient is to be reduced.
"""

from __future__ import annotations

from posttrain.loss.fused_divergence import FusedLinearJSDLoss
from posttrain.loss.fused_policy import FusedLinearGRPOLoss
from posttrain.loss.fused_preference import FusedLinearDPOLoss, FusedLinearKTOLoss

__all__ = ["FusedLinearDPOLoss", "FusedLinearGRPOLoss", "FusedLinearJSDLoss", "FusedLinearKTOLoss"]
