"""Rows → token ids and weights, with the numbers of the cases."""

from __future__ import annotations

import json

import pytest
from data_fixtures import (
    CHATML,
    CHATML_MARKED,
    CHATML_TOOLS,
    LLAMA2,
    THINKING,
    byte_tokenizer,
    trained_text,
    word_tokenizer,
)
from datasets import Dataset, IterableDataset

from posttrain.data.rows import SFTRowOptions, in_memory, prepare_sft
from posttrain.errors import ConfigError, DataError, EmptyDataError


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def prepare(rows, tokenizer=None, **options):
    prepared, report = prepare_sft(rows, tokenizer or byte_tokenizer(), SFTRowOptions(**options))
    return list(prepared), report


def targets(row):
    return sum(1 for weight in row["weights"] if weight)


THREE = {"messages": [user("a"), says("one"), user("b"), says("two"), user("c"), says("three")]}
ASSISTANT = {"assistant_only_loss": True}


def test_columns_and_types():
    prepared, report = prepare_sft([{"text": "hi", "id": "x"}], byte_tokenizer(), SFTRowOptions())
    assert prepared.column_names == ["input_ids", "weights", "source"]
    assert {name: str(kind) for name, kind in prepared.features.items()} == {
        "input_ids": "List(Value('int32'))",
        "weights": "List(Value('float32'))",
        "source": "Value('int64')",
    }
    assert report.summary() == "train: 1 of 1 rows, 3 tokens, 2 targets"


# Text


def test_c12_eos_on_plain_text_exactly_once():
    tokenizer = byte_tokenizer()
    rows, _ = prepare([{"text": "hi"}, {"text": "hi<|im_end|>"}], tokenizer)
    assert rows[0]["input_ids"] == rows[1]["input_ids"] == [*tokenizer.encode("hi"), tokenizer.eos_token_id]
    assert rows[0]["weights"] == [0, 1, 1]


def test_c14_one_bos_on_text_also_when_it_is_spelled_out():
    tokenizer = byte_tokenizer(bos="<s>", eos="</s>", add_bos=True)
    rows, _ = prepare([{"text": "hi"}, {"text": "<s>hi"}], tokenizer)
    for row in rows:
        assert tokenizer.decode(row["input_ids"]) == "<s>hi</s>"


def test_c14_one_bos_when_the_template_writes_it_and_the_tokenizer_adds_it():
    tokenizer = byte_tokenizer(template=LLAMA2, bos="<s>", eos="</s>", add_bos=True)
    chat = [user("a"), says("b")]
    for row in ({"messages": chat}, {"prompt": chat[:1], "completion": chat[1:]}):
        rows, _ = prepare([row], tokenizer)
        assert tokenizer.decode(rows[0]["input_ids"]) == "<s>[INST] a [/INST] b </s>"


def test_c11_pad_equal_to_eos_masks_nothing():
    tokenizer = byte_tokenizer(pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    end = tokenizer.eos_token_id
    rows, _ = prepare([{"input_ids": [5, 6, end]}, {"input_ids": [7, end]}], tokenizer)
    assert [(row["input_ids"], row["weights"]) for row in rows] == [([5, 6, end], [0, 1, 1]), ([7, end], [0, 1])]
    rows, _ = prepare([{"text": "ab"}], tokenizer)
    assert rows[0]["weights"] == [0, 1, 1]
    rows, _ = prepare([{"messages": THREE["messages"]}], byte_tokenizer(template=CHATML, pad="<|im_end|>"), **ASSISTANT)
    assert targets(rows[0]) == 4 + 4 + 6


# Chats


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["unmarked", "marked"])
def test_c07_c13_c19_chat_ids_are_the_templates_and_turns_are_trained(template):
    tokenizer = byte_tokenizer(template=template)
    rows, report = prepare([THREE], tokenizer, **ASSISTANT)
    assert rows[0]["input_ids"] == tokenizer.apply_chat_template(THREE["messages"])["input_ids"]
    stops = [w for t, w in zip(rows[0]["input_ids"], rows[0]["weights"], strict=True) if t == tokenizer.eos_token_id]
    assert sum(stops) == 3 and len(stops) == 6
    expected = ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == expected
    assert report.targets == 4 + 4 + 6


def test_chat_without_assistant_only_trains_on_all_of_it():
    rows, _ = prepare([THREE], byte_tokenizer(template=CHATML))
    assert targets(rows[0]) == len(rows[0]["input_ids"]) - 1


def test_c20_stop_token_spelled_out_by_the_user_is_kept_and_untrained():
    tokenizer = byte_tokenizer(template=CHATML)
    chat = [user("print <|im_end|> please"), says("ok")]
    rows, _ = prepare([{"messages": chat}], tokenizer, **ASSISTANT)
    assert rows[0]["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["ok<|im_end|>"]


def test_c08_assistant_turn_cut_by_the_limit():
    # 4 prompt tokens and the header's 2 are "prompt 6"; 9 letters and the stop token are "assistant 10".
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
        "{% else %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    rows, report = prepare(
        [{"messages": [user("abc"), says("123456789")]}], byte_tokenizer(template=template), max_length=10, **ASSISTANT
    )
    assert rows[0]["weights"] == [0] * 6 + [1] * 4
    assert (report.rows_cut, report.tokens_cut) == (1, 6)


def test_c44_tools_reach_the_prompt_also_as_json():
    tools = [{"type": "function", "function": {"name": "look", "description": "Look it up"}}]
    tokenizer = byte_tokenizer(template=CHATML_TOOLS)
    rows, _ = prepare([{**THREE, "tools": tools}], tokenizer, **ASSISTANT)
    as_json, _ = prepare([{**THREE, "tools": json.dumps(tools)}], tokenizer, **ASSISTANT)
    assert "Look it up" in tokenizer.decode(rows[0]["input_ids"])
    assert rows == as_json
    assert targets(rows[0]) == 14


def test_arrow_nulls_do_not_reach_the_template():
    # The second row has no tool calls, so Arrow gives its messages the key with None.
    call = {"type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
    template = (
        "{% for m in messages %}{{ m.content }}{{ '!' + m.tool_calls[0].function.arguments.q if 'tool_calls' in m }}"
    )
    template += "{{ '<|im_end|>' }}{% endfor %}"
    tokenizer = byte_tokenizer(template=template)
    rows, _ = prepare(
        [{"messages": [user("a"), {**says("b"), "tool_calls": [call]}]}, {"messages": [user("c")]}], tokenizer
    )
    assert [tokenizer.decode(r["input_ids"]) for r in rows] == ["a<|im_end|>b!x<|im_end|>", "c<|im_end|>"]


def test_sharegpt_and_row_kwargs():
    tokenizer = byte_tokenizer(template="{{ mood }}" + CHATML)
    row = {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        "chat_template_kwargs": {"mood": "calm"},
    }
    rows, _ = prepare([row], tokenizer, **ASSISTANT)
    assert tokenizer.decode(rows[0]["input_ids"]).startswith("calm<|im_start|>user")
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["b<|im_end|>"]


# Prompt and completion


def test_c18_every_completion_token_is_trained_and_no_prompt_token():
    tokenizer = byte_tokenizer()
    rows, _ = prepare([{"prompt": "ab", "completion": "cd"}], tokenizer)
    assert rows[0]["input_ids"] == [*tokenizer.encode("abcd"), tokenizer.eos_token_id]
    assert rows[0]["weights"] == [0, 0, 1, 1, 1]
    rows, _ = prepare([{"prompt": "ab", "completion": "cd"}], tokenizer, completion_only_loss=False)
    assert rows[0]["weights"] == [0, 1, 1, 1, 1]


def test_c12_prompt_never_gets_an_eos_and_the_completion_one():
    tokenizer = byte_tokenizer()
    rows, _ = prepare([{"prompt": "ab", "completion": "c<|im_end|>"}], tokenizer)
    assert tokenizer.decode(rows[0]["input_ids"]) == "abc<|im_end|>"


def test_c15_merge_across_the_border():
    tokenizer = byte_tokenizer(merges=[(".", "m"), ("e", "m")])
    assert len(tokenizer.encode("x.mem")) == 3  # x, .m, em
    rows, _ = prepare([{"prompt": "x.", "completion": "mem"}], tokenizer)
    ids = rows[0]["input_ids"]
    assert ids[:2] == tokenizer.encode("x.")
    assert rows[0]["weights"][:3] == [0, 0, 1]
    assert tokenizer.decode(ids) == "x.mem<|im_end|>"
    rows, _ = prepare([{"prompt": "x.", "completion": "em"}], tokenizer)
    assert rows[0]["input_ids"][:3] == tokenizer.encode("x.em")  # no merge across: one tokenization


def test_c15_prompt_ids_that_depend_on_what_follows():
    tokenizer = word_tokenizer(["question\n\n", "answer how\n\n"] * 20)
    alone, whole = tokenizer.encode("question\n\n"), tokenizer.encode("question\n\nanswer")
    assert whole[: len(alone)] != alone  # "\n\n" is one token at the end, two before a word
    rows, _ = prepare([{"prompt": "question\n\n", "completion": "answer how"}], tokenizer)
    assert rows[0]["input_ids"][: len(alone)] == alone
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["answer how<|im_end|>"]


def test_c15_spaces_at_the_border_of_a_word_tokenizer():
    tokenizer = word_tokenizer(["the cat sat on the mat"] * 20)
    for prompt, completion in (("the", " cat"), ("the ", "cat"), ("the  ", " cat"), ("", "cat")):
        rows, _ = prepare([{"prompt": prompt, "completion": completion}], tokenizer)
        ids, weights = rows[0]["input_ids"], rows[0]["weights"]
        before = tokenizer.encode(prompt)
        assert ids[: len(before)] == before
        assert tokenizer.decode(ids) == f"{prompt}{completion}<|im_end|>"
        assert weights == [0] * max(1, len(before)) + [1] * (len(ids) - max(1, len(before)))


def test_pairs_of_a_template_that_writes_an_empty_thinking_block():
    tokenizer = byte_tokenizer(template=THINKING)
    rows, _ = prepare([{"prompt": [user("a")], "completion": [says("b")]}], tokenizer)
    opened = tokenizer.apply_chat_template([user("a")], add_generation_prompt=True)["input_ids"]
    assert rows[0]["input_ids"][: len(opened)] == opened
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["<think>\n\n</think>\n\nb<|im_end|>"]


def test_pairs_of_a_template_whose_prompt_opens_more_than_the_turn_repeats():
    opens = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    tokenizer = byte_tokenizer(template=opens)
    rows, _ = prepare([{"prompt": [user("a")], "completion": [says("<b>")]}], tokenizer)
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["<b><|im_end|>"]


def test_c15_merge_across_the_header_of_a_turn():
    tokenizer = byte_tokenizer(template=CHATML, merges=[("Ċ", "x")])  # "\n" + "x"
    for row, options in (
        ({"messages": [user("a"), says("xy")]}, ASSISTANT),
        ({"prompt": [user("a")], "completion": [says("xy")]}, {}),
    ):
        rows, _ = prepare([row], tokenizer, **options)
        opened = tokenizer.apply_chat_template([user("a")], add_generation_prompt=True)["input_ids"]
        assert rows[0]["input_ids"][: len(opened)] == opened
        assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["xy<|im_end|>"]


def test_c16_masked_count_is_the_prompt_length():
    rows, _ = prepare([{"prompt": "p" * n, "completion": "cc"} for n in range(1, 21)])
    assert [row["weights"].index(1) for row in rows] == list(range(1, 21))
    tokenizer = byte_tokenizer(template=CHATML)
    chats = [{"prompt": [user("p" * n)], "completion": [says("cc")]} for n in range(1, 21)]
    rows, _ = prepare(chats, tokenizer)
    for row, chat in zip(rows, chats, strict=True):
        opened = tokenizer.apply_chat_template(chat["prompt"], add_generation_prompt=True)["input_ids"]
        assert row["input_ids"][: len(opened)] == opened
        assert row["weights"].index(1) == len(opened)
        assert targets(row) == 3  # two letters and the stop token, not the newline after it


def test_pairs_of_chats_with_assistant_only_leave_out_what_others_say_in_the_completion():
    tokenizer = byte_tokenizer(template=CHATML)
    row = {"prompt": [user("a"), says("b"), user("c")], "completion": [says("d"), user("e"), says("f")]}
    rows, _ = prepare([row], tokenizer, **ASSISTANT)
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["d<|im_end|>", "f<|im_end|>"]


def test_c17_keep_end_moves_the_prompt_border():
    rows, _ = prepare([{"prompt": "pppppp", "completion": "ccc"}], max_length=7, truncation_mode="keep_end")
    assert rows[0]["weights"] == [0, 0, 0, 1, 1, 1, 1]


def test_c09_rows_with_nothing_left_are_dropped_and_counted():
    long, short = {"prompt": "p" * 8, "completion": "c"}, {"prompt": "p", "completion": "c"}
    rows, report = prepare([long] * 3 + [short] * 7, max_length=8)
    assert [row["source"] for row in rows] == [3, 4, 5, 6, 7, 8, 9]
    assert (report.rows_in, report.rows_kept, report.rows_without_targets) == (10, 7, 3)
    assert "7 of 10 rows" in report.summary() and "3 rows without targets dropped" in report.summary()
    with pytest.raises(
        EmptyDataError, match="all 10 rows have nothing to train: in 10 the prompt fills `max_length`=8"
    ):
        prepare([long] * 10, max_length=8)


def test_c05_cut_tokens_are_counted():
    _, report = prepare([{"text": "abcde"}, {"text": "a"}], max_length=5)
    assert (report.rows_cut, report.tokens_cut, report.tokens) == (1, 1, 7)
    assert "1 token cut from 1 row" in report.summary()
    rows, report = prepare([{"text": "abcde"}], max_length=5, keep_long=True)
    assert len(rows[0]["input_ids"]) == 6 and report.rows_cut == 0


# Token ids


def test_c22_labels_are_respected_and_ids_untouched():
    rows, _ = prepare([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}])
    assert rows[0]["input_ids"] == [5, 6, 7, 8]
    assert rows[0]["weights"] == [0, 0, 1, 1]
    rows, _ = prepare([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}], max_length=3)
    assert rows[0]["weights"] == [0, 0, 1]


def test_c22_masks_and_padding_of_tokenized_rows():
    row = {"input_ids": [5, 6, 7, 0], "completion_mask": [0, 1, 1, 1], "attention_mask": [1, 1, 1, 0]}
    rows, _ = prepare([row])
    assert (rows[0]["input_ids"], rows[0]["weights"]) == ([5, 6, 7], [0, 1, 1])
    rows, _ = prepare([{"input_ids": [5, 6, 7], "assistant_masks": [0, 0, 1]}], **ASSISTANT)
    assert rows[0]["weights"] == [0, 0, 1]


def test_c22_bad_labels_are_named():
    with pytest.raises(DataError, match=r"Row 0 .*'labels' is 6 at token 0 and 'input_ids' is 5"):
        prepare([{"input_ids": [5, 6, 7], "labels": [6, 7, -100]}])
    with pytest.raises(DataError, match="'labels' has 1 values and 'input_ids' 2"):
        prepare([{"input_ids": [5, 6], "labels": [5]}])


# Options, columns and broken rows


def test_c23_extra_columns_are_ignored():
    rows, _ = prepare([{"text": "ab", "id": "x", "difficulty": 0.5, "weight": 2.0}])
    assert set(rows[0]) == {"input_ids", "weights", "source"}
    assert rows[0]["weights"] == [0, 1, 1]


def test_options_that_do_not_fit_the_rows():
    with pytest.raises(ConfigError, match="assistant_only_loss"):
        prepare([{"text": "a"}], **ASSISTANT)
    with pytest.raises(ConfigError, match="assistant_only_loss"):
        prepare([{"prompt": "a", "completion": "b"}], **ASSISTANT)
    with pytest.raises(ConfigError, match="completion_only_loss"):
        prepare([{"text": "a"}], completion_only_loss=True)
    with pytest.raises(ConfigError, match=r"completion_only_loss.*assistant_only_loss"):
        prepare([THREE], byte_tokenizer(template=CHATML), completion_only_loss=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "Row 1 of the train set: column 'messages' is an empty list"),
        ({"messages": [user("a"), says(None)]}, r"Row 1 .*message 1 \(assistant\) has no content"),
        ({"messages": None}, "Row 1 .*'messages' is None"),
    ],
)
def test_broken_chats_name_the_row(row, message):
    with pytest.raises(DataError, match=message):
        prepare([{"messages": [user("a"), says("b")]}, row], byte_tokenizer(template=CHATML))


def test_broken_text_names_the_row():
    with pytest.raises(DataError, match="Row 1 of the train set: column 'text' holds None"):
        prepare([{"text": "a"}, {"text": None}])
    with pytest.raises(DataError, match="No dataset type fits"):
        prepare([{"txet": "a"}])
    with pytest.raises(DataError, match=r"Row 0 .*chat_template_path"):
        prepare([THREE])


def test_empty_sets():
    with pytest.raises(EmptyDataError, match="no rows"):
        prepare([])
    with pytest.raises(EmptyDataError, match="every token is masked"):
        prepare([{"input_ids": [1, 2], "labels": [-100, -100]}])


def test_formatting_func():
    rows, _ = prepare([{"q": "a", "a": "b"}], formatting_func=lambda row: row["q"] + row["a"])
    assert rows[0]["weights"] == [0, 1, 1]
    tokenizer = byte_tokenizer(template=CHATML)
    rows, _ = prepare(
        [{"q": "a", "a": "b"}], tokenizer, formatting_func=lambda row: [user(row["q"]), says(row["a"])], **ASSISTANT
    )
    assert trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"]) == ["b<|im_end|>"]
    with pytest.raises(DataError, match="`formatting_func` returned a int"):
        prepare([{"q": "a"}], formatting_func=lambda row: 3)


def test_several_processes_give_the_same_rows():
    data = Dataset.from_list([{"text": "a" * n} for n in range(1, 9)])
    one, report = prepare_sft(data, byte_tokenizer(), SFTRowOptions())
    two, other = prepare_sft(data, byte_tokenizer(), SFTRowOptions(), num_proc=2)
    assert list(one) == list(two) and report == other


# Streams


def test_c24_streams_are_read_as_rows_are_needed():
    pulled = []

    def source():
        for i in range(1000):
            pulled.append(i)
            yield {"text": "abc", "id": i, "odd": None}

    stream = IterableDataset.from_generator(source)
    prepared, report = prepare_sft(stream, byte_tokenizer(), SFTRowOptions(), num_proc=4)
    rows = list(prepared.take(3))
    assert [row["source"] for row in rows] == [0, 1, 2]
    assert set(rows[0]) == {"input_ids", "weights", "source"}
    assert isinstance(rows[0]["input_ids"], list)
    assert len(pulled) <= 100
    assert 3 <= report.rows_in <= 64


def test_c24_a_stream_drops_rows_too():
    data = [{"prompt": "p" * n, "completion": "c"} for n in (8, 1, 8, 1)]
    stream = IterableDataset.from_generator(lambda: iter(data))
    prepared, report = prepare_sft(stream, byte_tokenizer(), SFTRowOptions(max_length=8))
    assert [row["source"] for row in prepared] == [1, 3]
    assert (report.rows_in, report.rows_without_targets) == (4, 2)


def test_rows_that_pack_dataset_joined_are_trained_apart():
    from datasets import Dataset

    from posttrain.data.packing import pack_dataset

    rows = Dataset.from_list([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [4, 3, 2, 1]}])
    packed = pack_dataset(rows, 8)
    prepared, report = prepare_sft(packed, byte_tokenizer(), SFTRowOptions(max_length=8))
    assert sorted(prepared["input_ids"]) == [[4, 3, 2, 1], [5, 6, 7], [8, 9]]
    assert report.targets == 3 + 2 + 1


def test_rows_packed_elsewhere_are_refused():
    rows = [{"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}]
    with pytest.raises(DataError, match="position_ids"):
        prepare_sft(rows, byte_tokenizer(), SFTRowOptions())


def test_a_column_that_the_first_row_lacks_is_kept():
    found = in_memory([{"text": "a"}, {"text": "b", "sample_weight": 2.0}], "train")
    assert found["sample_weight"][:] == [None, 2.0]
