"""Prompts with responses to other prompts: what KTO estimates its KL from (arXiv 2402.01306, section 4.1)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_TRIES = 32  # shifts looked at


def mismatched(prompts: Sequence[Hashable], responses: Sequence[Hashable]) -> list[int]:
    """[S] for each row another row, whose response it is to be given; each row's is used once.

    All rows look equally far ahead: of the distances 1, 2, … the first at which fewest rows meet their own prompt or
    response. Never a row itself.   e.g. prompts "aabb" -> [2, 3, 0, 1]
    Raises `ValueError` for fewer than two rows.
    """
    n = len(prompts)
    if n < 2:
        raise ValueError("one row has no other")

    def meetings(ahead: int) -> int:
        others = [(i + ahead) % n for i in range(n)]
        return sum(prompts[i] == prompts[j] or responses[i] == responses[j] for i, j in enumerate(others))

    best = min(range(1, min(n, _TRIES + 1)), key=meetings)
    return [(i + best) % n for i in range(n)]
