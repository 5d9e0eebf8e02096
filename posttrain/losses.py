"""The public fused losses, by the name under which users of TRL look for them."""

from __future__ import annotations

from posttrain.loss.fused import FusedLinearDPOLoss, FusedLinearGRPOLoss, FusedLinearJSDLoss, FusedLinearKTOLoss

__all__ = ["FusedLinearDPOLoss", "FusedLinearGRPOLoss", "FusedLinearJSDLoss", "FusedLinearKTOLoss"]
