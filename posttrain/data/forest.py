"""Sequences → TokenBatch."""
from __future__ import annotations
from collections.abc import Sequence
from posttrain.types import Row, TokenBatch

def build_forest(rows: Sequence[Row], share: bool = True, sources: Sequence[int] | None = None) -> TokenBatch: ...
def split_forest(batch: TokenBatch, max_tokens: int) -> list[TokenBatch]: ...
