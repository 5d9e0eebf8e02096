"""The forest: layout, sharing, splitting."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.forest import build_forest, split_forest
from posttrain.model.padding import pad_rows
from posttrain.types import Row


def row(*ids, weights=None):
    return Row(list(ids), weights or [0.0] + [1.0] * (len(ids) - 1))


def test_c02_c03_positions_restart_and_first_tokens_are_no_targets():
    batch = build_forest([row(5, 6, 7), row(8, 9)])
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.targets.tolist() == [6, 7, 9]
    assert batch.read_from.tolist() == [0, 1, 3]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.segments.parent == (-1, -1)


def test_common_prefix_is_laid_once_and_read_once_per_sequence():
    batch = build_forest([row(1, 2, 3, 4), row(1, 2, 5)], min_shared=1)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert batch.segments.parent == (-1, 0, 0)
    assert batch.targets.tolist() == [2, 3, 4, 2, 5]
    assert batch.read_from.tolist() == [0, 1, 2, 0, 1]
    assert batch.unshared_tokens == 7


def test_a_sequence_may_end_inside_another():
    batch = build_forest([row(1, 2, 3), row(1, 2), row(1, 2, 3)], min_shared=1)
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert batch.leaf == (1, 0, 1)


def test_no_rows_give_one_token_without_readouts():
    batch = build_forest([])
    assert batch.num_tokens == 1 and len(batch.targets) == 0 and batch.num_sequences == 0
    assert split_forest(batch, 1) == [batch]


def test_padding_sides_read_the_same_tokens():
    batch = build_forest([row(1, 2, 3, 4), row(1, 2, 5)], min_shared=1)
    for side in ("left", "right"):
        padded = pad_rows(batch, side, multiple=8)
        assert padded.index.shape == (2, 8)
        at = padded.index[padded.read_row, padded.read_column]
        assert at.tolist() == batch.read_from.tolist()


sequences = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=8)


def triples(batch):
    """(source, context, target, weight) of every read-out."""
    found = []
    for n in range(len(batch.targets)):
        s = int(batch.sequence[n])
        positions = batch.segments.positions(batch.leaf[s])
        upto = positions[: list(positions).index(int(batch.read_from[n])) + 1]
        context = tuple(batch.input_ids[torch.from_numpy(upto)].tolist())
        found.append((batch.source[s], context, int(batch.targets[n]), float(batch.weights[n])))
    return sorted(found)


@settings(deadline=None, max_examples=150)
@given(sequences, st.integers(1, 4), st.booleans(), st.integers(1, 20))
def test_every_readout_keeps_its_context(ids, min_shared, share, max_tokens):
    rows = [Row(x, [0.0] + [float(t + 1) for t in x[1:]]) for x in ids]
    want = sorted((s, tuple(x[:i]), x[i], float(x[i] + 1)) for s, x in enumerate(ids) for i in range(1, len(x)))
    batch = build_forest(rows, share=share, sources=range(len(ids)), min_shared=min_shared)
    assert triples(batch) == want
    for s, x in enumerate(ids):
        assert batch.input_ids[torch.from_numpy(batch.segments.positions(batch.leaf[s]))].tolist() == x
    pieces = split_forest(batch, max_tokens)
    assert sorted(t for piece in pieces for t in triples(piece)) == want
    for piece in pieces:
        assert piece.num_tokens <= max_tokens or piece.num_sequences == 1 or (piece is batch and len(ids) == 1)
        for k, up in enumerate(piece.segments.parent):
            assert up < k
