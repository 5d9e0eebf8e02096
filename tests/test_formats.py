"""Dataset types: recognised by columns, refused with the columns seen."""

from __future__ import annotations

import pytest

from posttrain.data.formats import detect, is_conversational, is_conversational_from_value, maybe_convert_to_chatml
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
