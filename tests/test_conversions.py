"""Conversions between dataset types: each by hand, and properties over all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.conversions import CONVERSIONS, Options
from posttrain.data.convert import PAIRED, ConversionReport, convert, targets_of
from posttrain.data.formats import TYPES, Format, format_of, validate_row
from posttrain.errors import ConfigError, DataError


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


TOOL = {"role": "tool", "content": "4"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]}
ROWS = {
    "language_modeling": {"messages": [user("a"), says("b"), user("2+2"), CALL, TOOL, says("4")]},
    "prompt_completion": {"prompt": "2+2=", "completion": "4"},
    "preference": {"prompt": [user("a")], "chosen": [says("b")], "rejected": [says("c")]},
    "implicit_preference": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "unpaired_preference": {"prompt": "a", "completion": "b", "label": True},
    "stepwise_supervision": {"prompt": "2+2+1", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]},
}
WANTED = {
    ("language_modeling", "prompt_completion"): [
        {"prompt": [user("a"), says("b"), user("2+2")], "completion": [CALL, TOOL, says("4")]}
    ],
    ("language_modeling", "prompt_only"): [{"prompt": [user("a"), says("b"), user("2+2")]}],
    ("prompt_completion", "language_modeling"): [{"text": "2+2=4"}],
    ("prompt_completion", "prompt_only"): [{"prompt": "2+2="}],
    ("preference", "unpaired_preference"): [
        {"prompt": [user("a")], "completion": [says("b")], "label": True},
        {"prompt": [user("a")], "completion": [says("c")], "label": False},
    ],
    ("preference", "prompt_completion"): [{"prompt": [user("a")], "completion": [says("b")]}],
    ("preference", "prompt_only"): [{"prompt": [user("a")]}],
    ("preference", "language_modeling"): [{"messages": [user("a"), says("b")]}],
    ("preference", "implicit_preference"): [{"chosen": [user("a"), says("b")], "rejected": [user("a"), says("c")]}],
    ("implicit_preference", "preference"): [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}],
    ("implicit_preference", "unpaired_preference"): [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sky is", "completion": " green.", "label": False},
    ],
    ("implicit_preference", "prompt_completion"): [{"prompt": "The sky is", "completion": " blue."}],
    ("implicit_preference", "prompt_only"): [{"prompt": "The sky is"}],
    ("implicit_preference", "language_modeling"): [{"text": "The sky is blue."}],
    ("unpaired_preference", "prompt_completion"): [{"prompt": "a", "completion": "b"}],
    ("unpaired_preference", "language_modeling"): [{"text": "ab"}],
    ("unpaired_preference", "prompt_only"): [{"prompt": "a"}],
    ("stepwise_supervision", "unpaired_preference"): [
        {"prompt": "2+2+1", "completion": "2+2=4\n4+1=6", "label": False}
    ],
    ("stepwise_supervision", "prompt_completion"): [{"prompt": "2+2+1", "completion": "2+2=4"}],
    ("stepwise_supervision", "prompt_only"): [{"prompt": "2+2+1"}],
    ("stepwise_supervision", "language_modeling"): [{"text": "2+2+12+2=4"}],
}  # fmt: skip


def test_every_conversion_of_the_table_is_written_out_here():
    assert set(WANTED) == set(CONVERSIONS) and len(CONVERSIONS) + len(PAIRED) >= 19
    assert all(fn.__doc__ for fn in CONVERSIONS.values())


@pytest.mark.parametrize(("source", "to"), CONVERSIONS)
def test_rows_by_hand(source, to):
    row = {**ROWS[source], "id": 7, "tools": [{"name": "add"}]}
    before = repr(row)
    report = ConversionReport()
    made = list(convert([row], to, report=report))
    assert made == [{**wanted, "id": 7, "tools": [{"name": "add"}]} for wanted in WANTED[source, to]]
    assert CONVERSIONS[source, to](row, Options()) == made
    assert repr(row) == before  # what is given is left alone
    assert report.source is not None and report.source.type == source
    assert (report.rows_in, report.rows_out, report.dropped) == (1, len(made), {})


# Rows without a counterpart


@pytest.mark.parametrize(
    ("row", "to", "reason"),
    [
        ({"text": "a"}, "prompt_completion", "only chats can be split"),
        ({"messages": [user("a")]}, "prompt_completion", "does not end with the assistant"),
        ({"messages": [says("a")]}, "prompt_completion", "no prompt"),
        ({"chosen": "Yes", "rejected": "No"}, "preference", "no beginning in common"),
        ({"prompt": "a", "completion": "b", "label": False}, "prompt_completion", "label is false"),
        ({"prompt": "a", "completion": "b", "label": False}, "language_modeling", "label is false"),
        ({"prompt": "a", "completions": ["b"], "labels": [False]}, "prompt_completion", "first step is wrong"),
        ({"prompt": "a", "completion": "b", "label": True}, "preference", "no answer with label false"),
        ({"prompt": "a", "completion": "b", "label": False}, "implicit_preference", "no answer with label true"),
    ],
)
def test_rows_without_a_counterpart_are_counted_with_the_reason(row, to, reason):
    report = ConversionReport()
    assert list(convert([row, row], to, report=report)) == []
    ((text, count),) = report.dropped.items()
    assert reason in text and count == 2
    assert f"2 rows in ({format_of(row)}), 0 rows out; 2 rows dropped: {text}" == report.summary()


def test_a_prompt_is_what_stands_before_the_last_turn():
    assert list(convert([{"messages": [user("a"), says("b"), user("c")]}], "prompt_only")) == [
        {"prompt": [user("a"), says("b"), user("c")]}
    ]


# Pairing


def test_answers_to_one_prompt_are_paired_in_order():
    rows = [
        {"prompt": "p", "completion": "a", "label": True, "by": "x", "score": 1},
        {"prompt": "q", "completion": "e", "label": False, "by": "y", "score": 5},
        {"prompt": "p", "completion": "b", "label": False, "by": "x", "score": 2},
        {"prompt": "p", "completion": "c", "label": False, "by": "x", "score": 3},
        {"prompt": "p", "completion": "d", "label": True, "by": "x", "score": 4},
    ]
    report = ConversionReport()
    assert list(convert(rows, "preference", report=report)) == [
        {"prompt": "p", "chosen": "a", "rejected": "b", "by": "x", "chosen_score": 1, "rejected_score": 2},
        {"prompt": "p", "chosen": "d", "rejected": "c", "by": "x", "chosen_score": 4, "rejected_score": 3},
    ]
    assert (report.rows_in, report.rows_out, report.rows_paired, sum(report.dropped.values())) == (5, 2, 4, 1)
    assert [row["chosen"] for row in convert(rows, "implicit_preference")] == ["pa", "pd"]


# Ways of writing


def test_from_and_value_become_role_and_content():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 1}
    assert list(convert([row], "language_modeling")) == [{"messages": [user("a"), says("b")], "id": 1}]
    assert list(convert([row], "prompt_completion")) == [{"prompt": [user("a")], "completion": [says("b")], "id": 1}]


@pytest.mark.parametrize("to", ["prompt_completion", "unpaired_preference", "implicit_preference"])
def test_text_becomes_chats(to):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "n": 1}
    (made, *_) = convert([row], to, conversational=True)
    assert format_of(made) == Format(to, True)
    assert made[next(iter(set(made) & {"completion", "chosen"}))][-1] == says("b")


def test_steps_become_one_turn_of_a_chat():
    row = ROWS["stepwise_supervision"]
    (made,) = convert([row], "unpaired_preference", conversational=True, options=Options(step_separator=" "))
    assert made == {"prompt": [user("2+2+1")], "completion": [says("2+2=4 4+1=6")], "label": False}


def test_text_without_speakers_makes_no_chat():
    report = ConversionReport()
    assert list(convert([{"text": "a"}], "language_modeling", conversational=True, report=report)) == []
    assert "who speaks" in next(iter(report.dropped))


def test_a_text_prompt_that_the_answers_repeat():
    row = {"prompt": "Hi", "chosen": [user("Hi"), says("a")], "rejected": [user("Hi"), says("b")], "id": 1}
    assert list(convert([row], "preference")) == [
        {"prompt": [user("Hi")], "chosen": [says("a")], "rejected": [says("b")], "id": 1}
    ]


# What cannot be


def test_types_there_is_no_way_to():
    with pytest.raises(ConfigError, match=r"`to` is 'preferences'; expected .* Did you mean 'preference'"):
        list(convert([{"text": "a"}], "preferences"))
    with pytest.raises(ConfigError, match="the rows are prompt_only, which can become prompt_only"):
        list(convert([{"prompt": "a"}], "prompt_completion"))
    with pytest.raises(DataError, match=r"Row 1 of the train set is .* and Row 0"):
        list(convert([{"text": "a"}, {"prompt": "a"}], "language_modeling"))


# Properties

TEXT = st.text("ab ", min_size=1, max_size=4)
TURNS = st.lists(st.builds(lambda a, b: [user(a), says(b)], TEXT, TEXT), min_size=1, max_size=3).map(
    lambda turns: [message for turn in turns for message in turn]
)
EXTRA = st.dictionaries(st.sampled_from(["id", "score", "tools"]), st.lists(st.integers(0, 9), max_size=2))


def one_of(kind):
    """Rows of a type, standard or conversational, with extra columns."""
    prompts = {False: TEXT, True: TURNS.map(lambda messages: messages[:-1])}
    answers = {False: TEXT, True: TEXT.map(lambda text: [says(text)])}

    def rows(chat):
        prompt, answer = prompts[chat], answers[chat]
        label = st.booleans()
        columns = {
            "language_modeling": {"messages": TURNS} if chat else {"text": TEXT},
            "prompt_only": {"prompt": prompt},
            "prompt_completion": {"prompt": prompt, "completion": answer},
            "preference": {"prompt": prompt, "chosen": answer, "rejected": answer},
            "implicit_preference": {"chosen": TURNS, "rejected": TURNS} if chat else {"chosen": TEXT, "rejected": TEXT},
            "unpaired_preference": {"prompt": prompt, "completion": answer, "label": label},
        }
        steps = st.lists(st.tuples(TEXT, label), min_size=1, max_size=3)
        if kind == "stepwise_supervision":
            own = st.builds(
                lambda p, s: {"prompt": p, "completions": [t for t, _ in s], "labels": [k for _, k in s]}, prompt, steps
            )
        else:
            own = st.fixed_dictionaries(columns[kind])
        return st.lists(st.builds(lambda row, extra: {**extra, **row}, own, EXTRA), max_size=6)

    return st.booleans().flatmap(rows)


def extras(row):
    own = {"text", "messages", *(column for columns in TYPES.values() for column in columns)}
    return {name: value for name, value in row.items() if name not in own}


@pytest.mark.parametrize(("source", "to"), CONVERSIONS)
def test_no_row_is_lost_and_none_loses_its_columns(source, to):
    @settings(deadline=None, max_examples=25)
    @given(one_of(source))
    def check(rows):
        report = ConversionReport()
        made = list(convert(rows, to, report=report))
        each = 2 if to == "unpaired_preference" and source != "stepwise_supervision" else 1
        assert report.rows_in == len(rows) and report.rows_out == len(made)
        assert len(made) == each * (len(rows) - sum(report.dropped.values()))
        for row in made:
            assert validate_row(row).type == to
        # In order, each with the extra columns of a row that it came from.
        given = iter(rows)
        for row in made[::each]:
            assert any(extras(row) == extras(candidate) for candidate in given)

    check()


@settings(deadline=None, max_examples=60)
@given(one_of("unpaired_preference"))
def test_pairing_loses_no_answer(rows):
    report = ConversionReport()
    pairs = list(convert(rows, "preference", report=report))
    assert report.rows_paired + sum(report.dropped.values()) == len(rows) and report.rows_paired == 2 * len(pairs)
    answers = {(str(row["prompt"]), str(row["completion"]), row["label"]) for row in rows}
    for pair in pairs:
        assert (str(pair["prompt"]), str(pair["chosen"]), True) in answers
        assert (str(pair["prompt"]), str(pair["rejected"]), False) in answers


@settings(deadline=None, max_examples=60)
@given(one_of("preference"))
def test_pairs_come_back(rows):
    """Unpaired and paired again; the prompt put in and found again."""
    again = list(convert(convert(rows, "unpaired_preference"), "preference")) if rows else []
    key = lambda row: repr((row["prompt"], row["chosen"], row["rejected"]))  # noqa: E731
    if len({repr(row["prompt"]) for row in rows}) == len(rows):
        assert sorted(map(key, again)) == sorted(map(key, rows))
    whole = convert(rows, "implicit_preference")
    for row, there in zip(rows, convert(whole, "implicit_preference"), strict=True):
        assert there["chosen"] == row["prompt"] + row["chosen"] and there["rejected"] == row["prompt"] + row["rejected"]
        found = list(convert([there], "preference"))
        # A text prompt of spaces alone cannot be told from the space before the answer.
        assert len(found) == 1 or not str(row["prompt"]).strip()
        for back in found:
            assert back["prompt"] + back["chosen"] == there["chosen"]
            assert isinstance(row["prompt"], str) or len(back["prompt"]) >= len(row["prompt"])


@settings(deadline=None, max_examples=60)
@given(one_of("language_modeling"))
def test_chats_come_back(rows):
    report = ConversionReport()
    pairs = list(convert(rows, "prompt_completion", report=report))
    if rows and "messages" in rows[0]:
        assert list(convert(pairs, "language_modeling")) == rows
    else:
        assert not pairs and sum(report.dropped.values()) == len(rows)


def test_targets():
    assert targets_of("tokenized") == ["tokenized"]
    assert "preference" in targets_of("unpaired_preference")
