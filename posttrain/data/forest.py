"""Sequences → TokenBatch: tokens that several sequences start with are laid, and computed, once.

Letters: T tokens, N read-outs, S sequences, K segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from posttrain.types import Distinct, Row, Segments, TokenBatch

MIN_SHARED = 16
"""Shorter common prefixes are computed again: a segment costs an attention call in every layer."""


@dataclass(eq=False)
class _Node:
    """Tokens that follow a parent's; `children` are found by the first `min_shared` tokens they start with."""

    tokens: np.ndarray
    children: list[_Node] = field(default_factory=list)
    by_start: dict[bytes, _Node] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)  # sequences that end here

    def adopt(self, child: _Node, min_shared: int) -> None:
        self.children.append(child)
        if len(child.tokens) >= min_shared:
            self.by_start.setdefault(child.tokens[:min_shared].tobytes(), child)

    def split(self, at: int, min_shared: int) -> None:
        """Keep the first `at` tokens; a new only child takes the rest, the children and the ends."""
        rest = _Node(self.tokens[at:], self.children, self.by_start, self.ends)
        self.tokens, self.children, self.by_start, self.ends = self.tokens[:at], [], {}, []
        self.adopt(rest, min_shared)


def build_forest(
    rows: Sequence[Row],
    share: bool = True,
    sources: Sequence[int] | None = None,
    min_shared: int = MIN_SHARED,
    units: Sequence[int] = (),
    own: bool = False,
) -> TokenBatch:
    """Lay sequences side by side, common prefixes once.

    A read-out is made for every token after the first whose weight is not 0, where the token is predicted; with `own`
    at the token itself, the first one's too. `sources[s]` is the row of the data set
    that sequence s came from, `units[s]` the pair or group it is part of. No rows give a batch of one token and no
    read-outs, so that a rank without data still runs.

    e.g. [1, 2, 3, 4] and [1, 2, 5] with min_shared=1 -> input_ids [1, 2, 3, 4, 5], position_ids [0, 1, 2, 3, 2],
    parent [-1, 0, 0]
    """
    if not rows:
        return _empty_batch()
    ids = [np.asarray(row.input_ids, dtype=np.int64) for row in rows]
    root = _Node(np.empty(0, dtype=np.int64))
    for s, tokens in enumerate(ids):
        _insert(root, tokens, s, max(1, min_shared), share)
    batch = _lay_out(root, ids, rows, [-1] * len(rows) if sources is None else list(sources), own)
    values = torch.tensor([row.values for row in rows]) if rows[0].values else None
    return replace(batch, unit=tuple(units), values=values)


def _insert(node: _Node, tokens: np.ndarray, sequence: int, min_shared: int, share: bool) -> None:
    while True:
        if len(tokens) == 0 and node.tokens.size:
            node.ends.append(sequence)
            return
        child = node.by_start.get(tokens[:min_shared].tobytes()) if share and len(tokens) >= min_shared else None
        if child is None:
            node.adopt(_Node(tokens, ends=[sequence]), min_shared)
            return
        common = _common_prefix(child.tokens, tokens)
        if common < len(child.tokens):
            child.split(common, min_shared)
        node, tokens = child, tokens[common:]


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _lay_out(root: _Node, ids: list[np.ndarray], rows: Sequence[Row], sources: list[int], own: bool) -> TokenBatch:
    start, end, parent, tokens, depths = [], [], [], [], []
    leaf = [0] * len(rows)
    stack = [(child, -1, 0) for child in reversed(root.children)]
    at = 0
    while stack:
        node, up, depth = stack.pop()
        k, n = len(start), len(node.tokens)
        start.append(at), end.append(at + n), parent.append(up)
        tokens.append(node.tokens), depths.append(np.arange(depth, depth + n))
        for s in node.ends:
            leaf[s] = k
        at += n
        stack.extend((child, k, depth + n) for child in reversed(node.children))
    segments = Segments(tuple(start), tuple(end), tuple(parent))
    read_from, targets, weights, sequence = [], [], [], []
    for s, row in enumerate(rows):
        weight = np.asarray(row.weights, dtype=np.float32)
        wanted = np.flatnonzero(weight) if own else np.flatnonzero(weight[1:]) + 1
        read_from.append(segments.positions(leaf[s])[wanted - (not own)])
        targets.append(ids[s][wanted])
        weights.append(weight[wanted])
        sequence.append(np.full(len(wanted), s))
    read, target = _tensor(read_from), _tensor(targets)
    return TokenBatch(
        input_ids=_tensor(tokens),
        position_ids=_tensor(depths),
        segments=segments,
        read_from=read,
        targets=target,
        weights=torch.from_numpy(np.concatenate(weights)),
        sequence=_tensor(sequence),
        leaf=tuple(leaf),
        source=tuple(sources),
        unshared_tokens=sum(len(x) for x in ids),
        distinct=_find_distinct(read, target),
        own=own,
    )


def _find_distinct(read_from: torch.Tensor, targets: torch.Tensor) -> Distinct | None:
    pairs = (read_from.numpy() << 32) | targets.numpy()
    _, first, slot, counts = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)
    if len(first) == len(pairs):
        return None
    members = np.argsort(slot, kind="stable")
    bounds = (0, *np.cumsum(counts).tolist())
    return Distinct(torch.from_numpy(first), torch.from_numpy(slot), torch.from_numpy(members), bounds)


def _tensor(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _empty_batch() -> TokenBatch:
    one, none = torch.zeros(1, dtype=torch.long), torch.empty(0, dtype=torch.long)
    segments = Segments((0,), (1,), (-1,))
    return TokenBatch(one, one.clone(), segments, none, none.clone(), torch.empty(0), none.clone(), (), (), 0)


def rows_of(batch: TokenBatch) -> list[Row]:
    """The sequences of a batch, each whole, with its weights."""
    found = []
    for s, leaf in enumerate(batch.leaf):
        at = batch.segments.positions(leaf)
        weights = np.zeros(len(at), dtype=np.float32)
        mine = batch.sequence == s
        weights[np.searchsorted(at, batch.read_from[mine].numpy()) + (not batch.own)] = batch.weights[mine].numpy()
        found.append(Row(batch.input_ids[torch.from_numpy(at)].tolist(), weights.tolist()))
    return found


def split_forest(batch: TokenBatch, max_tokens: int) -> list[TokenBatch]:
    """Cut a batch between units into pieces of at most `max_tokens` tokens. A unit that is longer is a piece of its
    own; a shared prefix is laid once in each piece that needs it."""
    parts = split_sequences(batch, max_tokens)
    return [batch] if len(parts) == 1 else [select(batch, part) for part in parts]


def split_sequences(batch: TokenBatch, max_tokens: int) -> list[list[int]]:
    """The sequences of each piece that `split_forest` makes; those of a unit stay together, in their order."""
    everything = list(range(batch.num_sequences))
    units = _units(batch)
    if batch.num_tokens <= max_tokens or len(units) <= 1:
        return [everything]
    return list(_groups(batch, units, max_tokens))


def _units(batch: TokenBatch) -> list[list[int]]:
    if not batch.unit:
        return [[s] for s in range(batch.num_sequences)]
    found: dict[int, list[int]] = {}
    for s, unit in enumerate(batch.unit):
        found.setdefault(unit, []).append(s)
    return list(found.values())


def _groups(batch: TokenBatch, units: list[list[int]], max_tokens: int) -> Iterator[list[int]]:
    size = batch.segments.sizes

    def needed(unit: list[int]) -> set[int]:
        return {k for s in unit for k in batch.segments.path(batch.leaf[s])}

    group: list[int] = []
    held: set[int] = set()
    tokens = 0
    for unit in sorted(units, key=lambda unit: min(batch.leaf[s] for s in unit)):
        more = needed(unit) - held
        cost = sum(size[k] for k in more)
        if group and tokens + cost > max_tokens:
            yield group
            group, held, tokens = [], set(), 0
            more = needed(unit)
            cost = sum(size[k] for k in more)
        group += unit
        held |= more
        tokens += cost
    yield group


def select(batch: TokenBatch, sequences: list[int]) -> TokenBatch:
    """The part of a forest that some of its sequences need, in the order given."""
    old = batch.segments
    kept = sorted({k for s in sequences for k in old.path(batch.leaf[s])})
    new = {k: i for i, k in enumerate(kept)}
    ends = np.cumsum([old.end[k] - old.start[k] for k in kept]).tolist()
    segments = Segments((0, *ends[:-1]), tuple(ends), tuple(new.get(old.parent[k], -1) for k in kept))
    index = torch.from_numpy(np.concatenate([np.arange(old.start[k], old.end[k]) for k in kept]))
    moved = torch.zeros(batch.num_tokens, dtype=torch.long)
    moved[index] = torch.arange(len(index))
    renumbered = torch.full((batch.num_sequences,), -1)
    renumbered[torch.tensor(sequences)] = torch.arange(len(sequences))
    wanted = torch.nonzero(renumbered[batch.sequence] >= 0)[:, 0]
    read_from, targets = moved[batch.read_from[wanted]], batch.targets[wanted]
    lengths = {s: sum(old.end[k] - old.start[k] for k in old.path(batch.leaf[s])) for s in sequences}
    return TokenBatch(
        input_ids=batch.input_ids[index],
        position_ids=batch.position_ids[index],
        segments=segments,
        read_from=read_from,
        targets=targets,
        weights=batch.weights[wanted],
        sequence=renumbered[batch.sequence[wanted]],
        leaf=tuple(new[batch.leaf[s]] for s in sequences),
        source=tuple(batch.source[s] for s in sequences),
        unshared_tokens=sum(lengths.values()),
        distinct=_find_distinct(read_from, targets),
        unit=tuple(batch.unit[s] for s in sequences) if batch.unit else (),
        values=None if batch.values is None else batch.values[torch.tensor(sequences)],
        own=batch.own,
    )
