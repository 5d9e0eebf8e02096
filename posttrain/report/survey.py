"""What is in a set of rows, counted: what the findings, the page and the terminal are made from.

Letters: R rows laid (after `max_length`), T their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.data.overflow import PreparationReport
from posttrain.report.texts import text_flags

EMPTY_TEXT = ("completion", "messages", "chosen", "rejected")


@dataclass(frozen=True)
class Laid:
    """One sequence as a model sees it. A row that has several tells them apart by `label`. start: the place of its
    first token, where it goes on from another."""

    ids: Sequence[int]
    weights: Sequence[float]
    label: str = ""
    start: int = 0


@dataclass(frozen=True)
class RowView:
    """A row to look at: its number in the data set, and what became of it."""

    row: int
    fate: str  # "kept", "cut to 128 of 300 tokens", "dropped: …"
    sequences: tuple[Laid, ...]
    shared: Laid | None = None  # what all of them begin with; they go on from there


@dataclass(frozen=True)
class Packing:
    """How the rows fill micro-batches, planned by the code that trains."""

    is_on: bool
    capacity: int | None
    bins: int
    tokens: int
    batches: int  # micro-batches looked at for prefixes
    laid_tokens: int  # of those, after sharing
    unshared_tokens: int  # of those, before

    @property
    def fill(self) -> float:
        """Share of the bins' tokens that are used."""
        return self.tokens / (self.bins * self.capacity) if self.bins and self.capacity else 1.0

    @property
    def of_bound(self) -> float:
        """Fewest bins that could hold the tokens ÷ bins."""
        return -(-self.tokens // self.capacity) / self.bins if self.bins and self.capacity else 1.0

    @property
    def saved(self) -> float:
        """Share of tokens that are not computed, because another row has the same prefix."""
        return 1 - self.laid_tokens / self.unshared_tokens if self.unshared_tokens else 0.0


@dataclass(frozen=True)
class Rows:
    """A set before it is counted: what `posttrain inspect` hands over.

    numbers: the row's number in the source, for each row that was read. total: rows of the source; None for a stream.
    broken: rows that cannot be encoded, and why. view: places among the rows read → how they look. per_row: sequences
    that a row has. writes: whether what is trained is what the model will write, its end included. weighted: what
    tokens with a weight are. marks: what is marked in a row that is shown, and what weights below 0 stand for.
    """

    name: str
    kind: str
    prepared: Any  # columns input_ids, weights, source
    report: PreparationReport
    raw: Any
    numbers: Sequence[int]
    total: int | None
    view: Callable[[Sequence[int]], list[RowView]]
    max_length: int | None = None
    overflow: str = "truncate"
    keep: str = "keep_start"
    broken: Sequence[tuple[int, str]] = ()
    per_row: int = 1
    writes: bool = True
    weighted: str = "trained"
    marks: tuple[str, str] = ("trained tokens", "")


@dataclass
class Survey:
    """Counts of one set. Every list of rows holds numbers of the source."""

    rows: Rows
    lengths: np.ndarray  # [R] tokens
    targets: np.ndarray  # [R] trained tokens
    weight_sums: np.ndarray  # [R]
    weight_values: dict[float, int]  # weight → tokens that have it; at most `MANY` of them
    flagged: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


MANY = 12


@dataclass(frozen=True)
class Specials:
    """Token ids that mean something."""

    bos: int | None
    stops: frozenset[int]
    known: int  # ids are below this
    texts: frozenset[str]  # how the special tokens are spelt

    @staticmethod
    def of(tokenizer: Any) -> Specials:
        """The tokens of a tokenizer. Any special token but BOS may end a turn: base models end a text with another
        token than a chat's turn."""
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        bos = tokenizer.bos_token_id
        stops = special - {bos} | ({tokenizer.eos_token_id} - {None})
        known = max(tokenizer.get_vocab().values(), default=-1) + 1
        texts = frozenset(map(str, tokenizer.convert_ids_to_tokens(list(special))))
        return Specials(bos, frozenset(stops), known, texts)


def survey(rows: Rows, specials: Specials) -> Survey:
    """Count a set. Reads the prepared rows once."""
    found = Survey(rows, *_empty_arrays(), {})
    lengths, targets, sums = [], [], []
    flagged: dict[str, list[int]] = {}
    values: dict[float, int] = {}
    for ids, weights, source in laid_rows(rows.prepared):
        lengths.append(len(ids))
        targets.append(int(np.count_nonzero(weights)))
        sums.append(float(weights.sum()))
        may_be_cut = rows.max_length is not None and len(ids) >= rows.max_length
        for name in _flags(ids, weights, specials, may_be_cut, rows.writes):
            held, number = flagged.setdefault(name, []), rows.numbers[source]
            if number not in held[-1:]:  # the row's other sequence may have it too
                held.append(number)
        for value, count in zip(*np.unique(weights, return_counts=True), strict=True):
            if float(value) in values or len(values) < MANY:
                values[float(value)] = values.get(float(value), 0) + int(count)
    found.lengths, found.targets = np.asarray(lengths, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    found.weight_sums, found.weight_values = np.asarray(sums), dict(sorted(values.items()))
    flagged["empty"] = [rows.numbers[at] for at in _empty_answers(rows.raw)]
    for name, places in (*text_flags(rows.raw, specials.texts).items(), *rows.report.examples.items()):
        flagged[name] = [rows.numbers[at] for at in places]
    found.flagged = flagged
    return found


def _empty_arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)


def laid_rows(prepared: Any) -> Iterable[tuple[np.ndarray, np.ndarray, int]]:
    """Token ids, weights and place in the set of every prepared row."""
    for batch in prepared.with_format("numpy").iter(batch_size=256) if len(prepared) else ():
        for ids, weights, source in zip(batch["input_ids"], batch["weights"], batch["source"], strict=True):
            yield np.asarray(ids), np.asarray(weights), int(source)


def whole_rows(rows: Rows) -> Iterable[tuple[np.ndarray, np.ndarray, int]]:
    """As `laid_rows`, the sequences of a row one after another."""
    held: list[tuple[np.ndarray, np.ndarray, int]] = []
    for each in laid_rows(rows.prepared):
        held.append(each)
        if len(held) == rows.per_row:
            yield np.concatenate([x[0] for x in held]), np.concatenate([x[1] for x in held]), each[2]
            held = []


def _flags(ids: np.ndarray, weights: np.ndarray, specials: Specials, may_be_cut: bool, writes: bool) -> Iterable[str]:
    if specials.bos is not None and len(ids) > 1 and ids[0] == ids[1] == specials.bos:
        yield "double_bos"
    if len(ids) and (int(ids.max()) >= specials.known or int(ids.min()) < 0):
        yield "unknown_ids"
    trained = np.flatnonzero(weights) if writes else []
    if not len(trained) or not specials.stops:
        return
    # A template may write a newline after the stop token, which is trained where whole chats are.
    ending = trained[-3:]
    if len(ending) and not any(int(ids[at]) in specials.stops for at in ending):
        following = int(trained[-1]) + 1
        if following < len(ids) and int(ids[following]) in specials.stops:
            yield "stop_masked"
        elif not may_be_cut:
            yield "no_stop"
    if len(trained) <= 2 and all(int(ids[at]) in specials.stops for at in trained):
        yield "only_stop"


def _empty_answers(raw: Any) -> Iterable[int]:
    """Places of rows with a completion or an assistant's message of no text, no call and no reasoning."""
    columns = [name for name in EMPTY_TEXT if name in raw.column_names]
    if not columns:
        return
    at = 0
    for batch in raw.select_columns(columns).iter(batch_size=256):
        for values in zip(*(batch[name] for name in columns), strict=True):
            if any(_is_empty(value) for value in values):
                yield at
            at += 1


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    if not isinstance(value, list):
        return False
    said = [m for m in value if isinstance(m, dict) and (m.get("role") or m.get("from")) in ("assistant", "gpt")]
    return any(not any(_has_content(v) for k, v in m.items() if k not in ("role", "from", "name")) for m in said)


def _has_content(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else bool(value)
