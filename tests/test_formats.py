"""Dataset types: recognised by columns, refused with the columns seen."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from posttrain.data.formats import (
    detect,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
)
from posttrain.data.preference import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)
from posttrain.errors import DataError

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "text"),
        ({"messages": [USER], "id": "x"}, "messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "messages"),
        ({"prompt": "a", "completion": "b", "weight": 2.0}, "prompt_completion"),
        ({"input_ids": [1], "text": "a"}, "tokenized"),
    ],
)
def test_type_follows_from_columns(row, kind):
    assert detect(list(row), row) == kind


def test_text_field_can_be_named():
    assert detect(["body"], {"body": "a"}, text_field="body") == "text"


def test_misspelt_column_is_named_with_the_nearest():
    with pytest.raises(DataError, match=r"\['mesages'\].*Did you mean 'messages'\?"):
        detect(["mesages"], {"mesages": []})


def test_half_a_pair_names_the_other_half():
    with pytest.raises(DataError, match="'prompt' needs 'completion'"):
        detect(["prompt"], {"prompt": "a"})


@pytest.mark.parametrize("column", ["image", "images", "pixel_values"])
def test_image_columns_are_refused_by_name(column):
    with pytest.raises(DataError, match=f"'{column}': images are not supported: text only for now"):
        detect(["messages", column], {"messages": [USER], column: None})


def test_image_parts_are_refused():
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}
    with pytest.raises(DataError, match=r"'image'.*text only"):
        detect(list(row), row)


def test_conversational():
    assert is_conversational({"prompt": [USER], "completion": [USER]})
    assert not is_conversational({"prompt": "Hi"})
    assert not is_conversational({"messages": []})


def test_from_value_is_converted():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}], "id": 1}
    assert is_conversational_from_value(row)
    assert maybe_convert_to_chatml(row) == {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
        "id": 1,
    }


def test_chatml_is_returned_as_it_is():
    row = {"messages": [USER]}
    assert maybe_convert_to_chatml(row) == row
    assert not is_conversational_from_value(row)


# Preference pairs


def says(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "left", "right"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is", " blue.", " green."),
        ("Yes", "No", "", "Yes", "No"),
        ("ab", "abc", "ab", "", "c"),
        ([USER, says("a")], [USER, says("b")], [USER], [says("a")], [says("b")]),
        ([USER, says("a"), USER, says("b")], [USER, says("a"), USER, says("c")], [USER, says("a"), USER],
         [says("b")], [says("c")]),
        ([says("a")], [says("b")], [], [says("a")], [says("b")]),
        # A chat is cut so that neither side is left without a message.
        ([USER, says("a")], [USER, says("a")], [USER], [says("a")], [says("a")]),
        ([USER, says("a")], [USER, says("a"), USER], [USER], [says("a")], [says("a"), USER]),
    ],
)  # fmt: skip
def test_prompt_is_what_both_begin_with(chosen, rejected, prompt, left, right):
    row = {"chosen": chosen, "rejected": rejected, "id": 1}
    assert extract_prompt(row) == {"prompt": prompt, "chosen": left, "rejected": right}
    assert prompt + left == chosen and prompt + right == rejected
    assert maybe_extract_prompt(row) == extract_prompt(row)


def test_a_text_and_a_chat_are_no_pair():
    with pytest.raises(DataError, match="write both alike"):
        extract_prompt({"chosen": "a", "rejected": [says("a")]})


def test_prompt_is_extracted_only_where_it_is_inside():
    assert maybe_extract_prompt({"messages": [USER]}) == {"messages": [USER]}
    for row in ({"prompt": "a", "chosen": "b", "rejected": "c"},
                {"prompt": [USER], "chosen": [says("b")], "rejected": [says("c")]}):  # fmt: skip
        assert maybe_extract_prompt(row) == row
    row = {"prompt": "Hi", "chosen": [USER, says("a")], "rejected": [USER, says("b")]}
    assert maybe_extract_prompt(row) == {"prompt": [USER], "chosen": [says("a")], "rejected": [says("b")]}


def test_extract_prompt_maps_over_a_data_set():
    rows = Dataset.from_list([{"chosen": [USER, says("a")], "rejected": [USER, says("b")], "id": 3}])
    assert rows.map(extract_prompt)[0] == {
        "prompt": [USER], "chosen": [says("a")], "rejected": [says("b")], "id": 3,
    }  # fmt: skip


PAIRS = [
    {"prompt": "p", "chosen": "c", "rejected": "r", "id": 1},
    {"prompt": "q", "chosen": "d", "rejected": "s", "id": 2},
]
UNPAIRED = [("p", "c", True, 1), ("q", "d", True, 2), ("p", "r", False, 1), ("q", "s", False, 2)]


def as_tuples(rows):
    return [(row["prompt"], row["completion"], row["label"], row["id"]) for row in rows]


def test_a_pair_becomes_two_rows():
    rows = unpair_preference_dataset(Dataset.from_list(PAIRS), num_proc=None, desc="unpair")
    assert as_tuples(rows) == UNPAIRED and set(rows.column_names) == {"prompt", "completion", "label", "id"}
    both = unpair_preference_dataset(DatasetDict(train=Dataset.from_list(PAIRS), test=Dataset.from_list(PAIRS[:1])))
    assert as_tuples(both["train"]) == UNPAIRED and len(both["test"]) == 2
    stream = unpair_preference_dataset(IterableDataset.from_generator(lambda: iter(PAIRS)))
    assert as_tuples(stream) == UNPAIRED


def test_what_is_no_pair_is_left_alone():
    rows = Dataset.from_list([{"prompt": "p", "completion": "c", "label": True}])
    assert maybe_unpair_preference_dataset(rows) is rows
    both = DatasetDict(train=rows)
    assert maybe_unpair_preference_dataset(both) is both
    assert as_tuples(maybe_unpair_preference_dataset(Dataset.from_list(PAIRS), 1, "unpair")) == UNPAIRED
    assert len(maybe_unpair_preference_dataset(DatasetDict(train=Dataset.from_list(PAIRS)))["train"]) == 4
