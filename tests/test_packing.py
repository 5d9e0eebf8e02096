"""Bins: nothing over capacity, no token lost or doubled."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.filling import full_bins
from posttrain.data.overflow import KEPT, MASKED, Limit
from posttrain.data.packing import Piece, _fit_decreasing, pack_dataset, plan_bins
from posttrain.errors import ConfigError, DataError

ROWS = st.lists(st.integers(0, 30), max_size=60)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@given(lengths=ROWS, capacity=st.integers(1, 40))
def test_c04_no_bin_over_capacity_and_every_token_once(strategy, lengths, capacity):
    if strategy == "bfd":
        lengths = [min(length, capacity) for length in lengths]
    bins = plan_bins(lengths, capacity, strategy, carry=0)
    fills = [sum(p.end - p.start for p in pieces) for pieces in bins]
    assert all(0 < fill <= capacity for fill in fills)
    tokens = sorted((p.row, t) for pieces in bins for p in pieces for t in range(p.start, p.end))
    assert tokens == [(row, t) for row, length in enumerate(lengths) for t in range(length)]
    assert bins == plan_bins(lengths, capacity, strategy, carry=0)
    if strategy == "wrapped":
        assert all(fill == capacity for fill in fills[:-1])
    else:  # no two bins could be one
        assert all(a + b > capacity for i, a in enumerate(fills) for b in fills[:i])


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@given(lengths=ROWS, capacity=st.integers(2, 40))
def test_every_target_is_trained_once_however_rows_are_cut(strategy, lengths, capacity):
    if strategy == "bfd":
        lengths = [min(length, capacity) for length in lengths]
    bins = plan_bins(lengths, capacity, strategy)
    fills = [sum(p.end - p.start for p in pieces) for pieces in bins]
    assert all(0 < fill <= capacity for fill in fills)
    pieces = sorted(p for pieces in bins for p in pieces)
    targets = [(p.row, t) for p in pieces for t in range(p.start + 1, p.end)]
    assert targets == [(row, t) for row, length in enumerate(lengths) for t in range(1, length)]
    assert {p.row for p in pieces} == {row for row, length in enumerate(lengths) if length}
    assert all(p.end - p.start > 1 or lengths[p.row] == 1 for p in pieces)
    if strategy == "wrapped":  # a last free token would hold a piece without a target
        assert all(fill >= capacity - 1 for fill in fills[:-1])


@given(length=st.integers(0, 60), capacity=st.integers(2, 20), data=st.data())
def test_split_keeps_the_weight_of_every_target(length, capacity, data):
    weights = np.asarray(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=length, max_size=length)))
    ids = np.arange(length)
    made = Limit(capacity, "split").apply(ids, weights)
    assert all(len(part) <= capacity and w[0] == 0 for part, w, *_ in made if len(part))
    found = sorted((int(t), float(x)) for part, w, *_ in made for t, x in zip(part, w, strict=True) if x)
    assert found == [(t, x) for t, x in enumerate(weights.tolist()) if x and t]
    states = [state for *_, state, _ in made]
    assert states.count(KEPT) == bool(found) and states.count(MASKED) == (not found)


@pytest.mark.parametrize("capacity", [8, 9])
def test_c04_six_rows_of_four(capacity):
    assert len(plan_bins([4] * 6, capacity)) == 3


def test_best_fit_takes_the_fullest_bin():
    # 7 and 5 open bins with 3 and 5 free; 3 goes where it fits exactly.
    assert plan_bins([5, 3, 7], 10) == [[Piece(2, 0, 7), Piece(1, 0, 3)], [Piece(0, 0, 5)]]


def test_long_rows():
    with pytest.raises(DataError, match="Row 1 has 6 tokens and a bin holds 5"):
        plan_bins([2, 6], 5)
    assert plan_bins([12], 5, "bfd_split") == [
        [Piece(0, 0, 5)],
        [Piece(0, 4, 9)],
        [Piece(0, 8, 12)],
    ]
    assert plan_bins([12], 5, "bfd_split", carry=0) == [[Piece(0, 0, 5)], [Piece(0, 5, 10)], [Piece(0, 10, 12)]]
    assert plan_bins([3, 4], 5, "wrapped") == [[Piece(0, 0, 3), Piece(1, 0, 2)], [Piece(1, 1, 4)]]
    assert plan_bins([3, 4], 5, "wrapped", carry=0) == [[Piece(0, 0, 3), Piece(1, 0, 2)], [Piece(1, 2, 4)]]


def test_unknown_strategy_and_capacity():
    with pytest.raises(ConfigError, match="bfd_split"):
        plan_bins([1], 5, "bfd_spilt")
    with pytest.raises(ConfigError, match="max_length"):
        plan_bins([1], 0)
    assert plan_bins([], 5) == []


@pytest.mark.parametrize("capacity", [1024, 65536])
@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.3, 0.5, 0.8, 1.2])
def test_bins_of_log_normal_lengths_are_full(capacity, sigma):
    draw = np.random.default_rng(0).standard_normal(20_000)
    lengths = np.clip(np.round(capacity / 8 * np.exp(sigma * draw)), 1, capacity).astype(int).tolist()
    bins = plan_bins(lengths, capacity)
    assert -(-sum(lengths) // capacity) / len(bins) >= 0.995


@given(sizes=st.lists(st.integers(0, 30), max_size=80), capacity=st.integers(30, 60))
def test_full_bins_are_full_and_no_row_is_in_two(sizes, capacity):
    bins, rest = full_bins(np.asarray(sizes, dtype=np.int64), capacity)
    assert all(sum(sizes[at] for at in places) == capacity for places in bins)
    assert sorted([at for places in bins for at in places] + rest.tolist()) == list(range(len(sizes)))


def test_gaps_of_best_fit_decreasing_are_filled():
    # Seven rows of 10 leave 2 of 72 tokens free, which no row fits; four of 10 and four of 8 fill a bin.
    lengths = [10] * 40 + [8] * 40
    assert len(plan_bins(lengths, 72)) == 10
    assert len(_fit_decreasing([Piece(i, 0, n) for i, n in enumerate(lengths)], np.asarray(lengths), 72)) > 10


def rows(lengths):
    ids = [list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)]
    return {
        "input_ids": ids,
        "labels": [[t + 100 for t in row] for row in ids],
        "id": [str(i) for i in range(len(ids))],
    }


def test_c05_overflow_is_accounted_for(caplog):
    packed = pack_dataset(Dataset.from_dict(rows([6, 2, 3, 2])), 5)
    assert sum(len(ids) for ids in packed["input_ids"]) == 12
    assert len(packed) == 3
    assert "dropped 1 tokens from 1 rows" in caplog.text


def test_pack_dataset_keeps_columns_aligned():
    packed = pack_dataset(Dataset.from_dict(rows([4, 3, 2, 1])), 5)
    assert set(packed.column_names) == {"input_ids", "labels", "seq_lengths"}
    for row in packed:
        assert row["labels"] == [t + 100 for t in row["input_ids"]]
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 5
    assert sorted(map(tuple, packed["seq_lengths"])) == [(3, 2), (4, 1)]


def test_pack_dataset_of_a_stream_and_of_splits():
    data = rows([4, 3, 2, 1])
    stream = IterableDataset.from_generator(lambda: ({k: v[i] for k, v in data.items()} for i in range(4)))
    assert [row["seq_lengths"] for row in pack_dataset(stream, 5)] == [[4, 1], [3, 2]]
    splits = pack_dataset(DatasetDict({"train": Dataset.from_dict(data)}), 5, "wrapped")
    assert [len(ids) for ids in splits["train"]["input_ids"]] == [5, 5]


def test_pack_dataset_names_what_does_not_fit():
    with pytest.raises(DataError, match="'input_ids'"):
        pack_dataset(Dataset.from_dict({"text": ["a"]}), 5)
    with pytest.raises(DataError, match="Row 0: column 'labels' has 1 values and 'input_ids' 2"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1]]}), 5)
