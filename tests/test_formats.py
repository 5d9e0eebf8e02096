"""Dataset types: recognised by columns, refused with the columns seen."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from posttrain.data.formats import (
    TYPES,
    Format,
    detect,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    validate,
    validate_row,
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


# Formats of rows


STANDARD = {
    "tokenized": {"input_ids": [1, 2]},
    "language_modeling": {"text": "a"},
    "prompt_only": {"prompt": "a"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "implicit_preference": {"chosen": "ab", "rejected": "ac"},
    "unpaired_preference": {"prompt": "a", "completion": "b", "label": False},
    "stepwise_supervision": {"prompt": "a", "completions": ["b"], "labels": [True]},
}
CONVERSATIONAL = {
    "language_modeling": {"messages": [USER, says("a")]},
    "prompt_only": {"prompt": [USER]},
    "prompt_completion": {"prompt": [USER], "completion": [says("a")]},
    "preference": {"prompt": [USER], "chosen": [says("a")], "rejected": [says("b")]},
    "implicit_preference": {"chosen": [USER, says("a")], "rejected": [USER, says("b")]},
    "unpaired_preference": {"prompt": [USER], "completion": [says("a")], "label": True},
    "stepwise_supervision": {"prompt": [USER], "completions": ["b"], "labels": [True]},
}


def from_value(value):
    """Messages as ShareGPT files have them."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        names = {"user": "human", "assistant": "gpt"}
        return [{"from": names[message["role"]], "value": message["content"]} for message in value]
    return value


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_found_in_every_form(kind, conversational):
    row = (CONVERSATIONAL if conversational else STANDARD).get(kind)
    if row is None:
        assert kind == "tokenized"
        return
    beside = {"id": 3, "tools": '[{"name": "f"}]', "chat_template_kwargs": {"enable_thinking": False}, "label_2": None}
    for given in (row, {**beside, **row}, {**row, "tools": [{"name": "f"}]}, dict.fromkeys(["text", "chosen"]) | row):
        assert validate_row(given) == Format(kind, conversational)
        assert validate([given, given]) == Format(kind, conversational)
    sharegpt = {name.replace("messages", "conversations"): from_value(value) for name, value in row.items()}
    assert validate_row(sharegpt) == Format(kind, conversational)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"'messages' is an empty list"),
        ({"messages": "Hi"}, r"'messages' is 'Hi'; write text or a list of messages"),
        ({"messages": ["Hi"]}, r"'messages', message 0 is 'Hi'; write a mapping with 'role' and 'content'"),
        ({"messages": [USER, {"content": "a"}]}, r"message 1 is .*'role'"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 1 \(assistant\) has no content"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, r"message 1 .* no content"),
        ({"messages": [{"role": "user", "content": 5}]}, r"content is 5; write text"),
        ({"messages": [{"role": "User", "content": "a"}]}, r"unknown role 'User'.*Did you mean 'user'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"unknown role 'bot'.*Did you mean 'assistant'"),
        ({"messages": [{"role": "", "content": "a"}]}, r"unknown role ''"),
        ({"conversations": [{"from": "humn", "value": "a"}, {"from": "usr", "value": "a"}]}, r"unknown role 'usr'"),
        ({"prompt": "a", "completion": [says("b")]}, r"'prompt' is text and 'completion' a chat; write both alike"),
        ({"prompt": "a", "completion": 5}, r"'completion' is 5"),
        ({"chosen": [USER, says("a")], "rejected": []}, r"'rejected' is an empty list"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, r"'chosen' is text and 'prompt' a chat"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, r"'label' is 'yes'; write true or false"),
        ({"prompt": "a", "completions": "b", "labels": [True]}, r"'completions' is 'b'; write a list of texts"),
        ({"prompt": "a", "completions": ["b"], "labels": ["good"]}, r"'labels' is \['good'\]"),
        ({"prompt": "a", "completions": ["b", "c"], "labels": [True]}, r"has 2 steps and 'labels' 1"),
        ({"text": 5}, r"'text' is 5; write text"),
        ({"text": "a", "tools": "[{"}, r"'tools' is '\[\{', not valid JSON"),
        ({"text": "a", "tools": {"name": "f"}}, r"'tools' is .*a list of tool schemas"),
        ({"text": "a", "chat_template_kwargs": [1]}, r"'chat_template_kwargs' is \[1\]; write a mapping"),
        ({"question": "a"}, r"No dataset type fits the columns \['question'\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"'image'.*text only"),
    ],
)  # fmt: skip
def test_rows_that_are_not_whole_name_column_value_and_fix(row, message):
    with pytest.raises(DataError, match=message):
        validate_row(row)
    with pytest.raises(DataError, match=r"^Row 0 of the eval set: "):
        validate([row], name="eval")


def test_roles_of_ones_own_are_left_to_the_template():
    assert validate_row({"messages": [{"role": "critic", "content": "a"}]}).conversational


def test_a_message_may_call_tools_or_think_in_the_place_of_content():
    for name in ("tool_calls", "reasoning_content", "thinking"):
        assert validate_row({"messages": [USER, {"role": "assistant", "content": None, name: [1]}]})


def test_rows_of_two_formats_are_both_named():
    rows = [STANDARD["prompt_completion"], STANDARD["prompt_completion"], STANDARD["prompt_only"]]
    with pytest.raises(DataError, match=r"Row 2 of the train set is standard prompt_only .* Row 0 of the train set is"):
        validate(rows)
    assert validate([]) is None
    assert validate([{"body": "a"}], text_field="body") == Format("language_modeling", False)
