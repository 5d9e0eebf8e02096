"""Bins over the whole data set."""
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a row of the data set."""
    row: int
    start: int
    end: int

def plan_bins(lengths: list[int], capacity: int, strategy: str = "bfd") -> list[list[Piece]]: ...
