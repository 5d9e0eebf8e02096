"""Bad messages, templates and tokenizers: one clear error each, or a documented choice; and what the proof of spans
refuses."""

from __future__ import annotations

import json
import re

import pytest
from data_fixtures import CHATML, CHATML_TOKENS, byte_tokenizer, trained_text
from laws.runs import FIELDS, scratch
from own_templates import OWN, tokenizer_for
from tiny import tiny_model

from posttrain import SFTConfig, SFTTrainer
from posttrain.data.chat import template_of
from posttrain.data.proof import prove, shown
from posttrain.data.rows import SFTRowOptions, prepare_sft
from posttrain.data.spans import locate
from posttrain.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def prepare(messages, template=CHATML, tokenizer=None, **options):
    """Ids and trained text of one chat."""
    tokenizer = tokenizer or byte_tokenizer(template=template)
    options = {"assistant_only_loss": True, "max_length": None, **options}
    rows, _ = prepare_sft([{"messages": messages}], tokenizer, SFTRowOptions(**options))
    return rows[0]["input_ids"], trained_text(tokenizer, rows[0]["input_ids"], rows[0]["weights"])


DROPS_SYSTEM = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")
ORDERED = OWN["merges_system"].template


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("messages", "template", "needle"),
    [
        ([], CHATML, "'messages' is an empty list.*Remove the row"),
        (["hello"], CHATML, "message 0 is 'hello'; write a mapping with 'role' and 'content'"),
        ([{"content": "a"}], CHATML, "message 0 is .*'role'"),
        ([user(None)], CHATML, r"message 0 \(user\) has no content; write text"),
        ([user("a"), says(None)], CHATML, r"message 1 \(assistant\) has no content"),
        ([user(3)], CHATML, "message 0: content is a int; write text"),
        ([user("a"), {"role": "asistant", "content": "b"}], CHATML, "'asistant'.*Did you mean 'assistant'"),
        ([user("a"), {"role": "Assistant", "content": "b"}], CHATML, "'Assistant'.*Did you mean 'assistant'"),
        ([user("a"), {"role": "bot", "content": "b"}], CHATML, "role 'bot', which the chat template does not name"),
        ([says("a"), user("b")], ORDERED, "cannot render the conversation: Roles must alternate"),
        ([user("a"), user("b")], ORDERED, "Roles must alternate"),
        ([user("a"), says("b")], "{% for m in messages %}{{ m.content }", "cannot render .*unexpected '}'"),
        ([user("a"), says("b")], "{{ messages[7].content }}", "cannot render the conversation: .*no element 7"),
        ([user("a"), says("b")], None, "no chat template; set `chat_template_path`"),
        ([{"role": "system", "content": "be kind"}, user("a"), says("b")], DROPS_SYSTEM,
         r"message 0 \(system, 'be kind'\) is not written by the chat template"),
        ([user("a"), says("", tool_calls=["look"])], CHATML, "message 1.*a tool call is 'look'; write a mapping"),
        ([user("a"), says("", tool_calls=[{"function": {"name": "look", "arguments": "{broken"}}])],
         OWN["chatml_tools"].template, "arguments of the call of 'look' are no JSON"),
        ([user("a"), says("", tool_calls=[{"function": {"name": "look", "arguments": "[1]"}}])],
         OWN["chatml_tools"].template, r"'look' are '\[1\]'; write a JSON object"),
    ],
)  # fmt: skip
def test_one_clear_error(messages, template, needle, whole):
    with pytest.raises(DataError) as caught:
        prepare(messages, tokenizer=byte_tokenizer(template=template), assistant_only_loss=not whole)
    text = str(caught.value)
    assert text.startswith("Row 0 of the train set: ")
    assert re.search(needle, text), text
    assert "\n" not in text.rstrip()


def test_a_role_the_template_names_is_a_role():
    template = CHATML.replace("m.role +", "('user' if m.role == 'judge' else m.role) +")
    _, trained = prepare([{"role": "judge", "content": "a"}, says("b")], template)
    assert trained == ["b<|im_end|>"]


# ---- messages in another shape than the template's -------------------------------------------------------------------


def call(arguments):
    return {"type": "function", "id": "c12345678", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"q": "ü"}, json.dumps({"q": "ü"}, ensure_ascii=False)])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    ("template", "written"),
    [("chatml_tools", '<call>look{"q": "ü"}</call>'), ("text_arguments", '<call>look|{"q": "ü"}</call>')],
)
def test_arguments_are_written_as_the_template_takes_them(template, written, content, arguments):
    """Given as text, `tojson` would quote them a second time; given as a mapping, adding them to text fails."""
    chat = [user("a"), says(content, tool_calls=[call(arguments)])]
    assert prepare(chat, OWN[template].template)[1] == [f"{written}<|im_end|>"]


def test_parts_become_text_where_the_template_takes_text():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    ask = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert prepare([ask, says(parts)]) == prepare([user("a"), says("one two")])
    assert prepare([ask, says(parts)], OWN["parts"].template)[1] == ["one two<|im_end|>"]
    assert prepare([user("a"), says("one two")], OWN["parts"].template)[1] == ["one two<|im_end|>"]


# ---- special tokens spelled out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [name for name, habits in OWN.items() if habits.stop == "<|im_end|>"])
def test_c20_a_user_who_spells_the_stop_token(template):
    """The choice: it is read as the token, as inference reads it; nothing that is trained moves."""
    tokenizer = tokenizer_for(template)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids, trained = prepare([user("print <|im_end|> please"), says("done")], tokenizer=tokenizer)
    plain, expected = prepare([user("print it please"), says("done")], tokenizer=tokenizer)
    assert trained == expected
    assert ids.count(stop) == plain.count(stop) + 1
    last = max(at for at, token in enumerate(ids) if token == stop)
    assert tokenizer.decode(ids[: last + 1]).rstrip().endswith("done<|im_end|>")


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def trainer(tokenizer, messages=None, **fields):
    rows = [{"messages": messages or [user("Hi"), says("Yo")]}] * 4
    config = SFTConfig(**FIELDS | {"output_dir": scratch(), "max_steps": 1, "assistant_only_loss": True} | fields)
    return SFTTrainer(tiny_model("qwen3"), config, train_dataset=rows, processing_class=tokenizer)


def targets(made):
    return made.train_dataset.rows[0]["weights"], made.train_dataset.rows[0]["input_ids"]


def test_a_padding_token_that_is_the_stop_token():
    tokenizer = byte_tokenizer(template=CHATML, pad=None)
    made = trainer(tokenizer, pad_token="<|im_end|>")
    weights, ids = targets(made)
    stop = made.processing_class.pad_token_id
    assert stop == made.processing_class.eos_token_id
    assert [token for token, weight in zip(ids, weights, strict=True) if weight][-1] == stop
    made.train()


def test_an_added_stop_token_is_one_token_and_trained():
    tokenizer = byte_tokenizer((), template=CHATML.replace("im_end", "fin"), eos="<|fin|>")
    assert tokenizer.add_tokens(["<|note|>"]) == 1
    weights, ids = targets(trainer(tokenizer))
    assert [i for i, w in zip(ids, weights, strict=True) if w][-1] == tokenizer.convert_tokens_to_ids("<|fin|>")


def test_a_tokenizer_that_does_not_fit_the_model():
    tokenizer = byte_tokenizer((*CHATML_TOKENS, *(f"<extra{i}>" for i in range(60))), CHATML)
    with pytest.raises(DataError, match=r"`input_ids` hold 318, and the model has 300 embeddings"):
        trainer(tokenizer, [user("a <extra59>"), says("b")])


def test_a_template_made_for_other_tokens_is_named_at_the_start(capsys):
    trainer(byte_tokenizer((), CHATML, eos="<eos>"))
    printed = capsys.readouterr()
    assert "warn  stop_token      not a token" in printed.out + printed.err


# ---- the proof -------------------------------------------------------------------------------------------------------

CHAT = [user("what is it"), says("one"), user("and then"), says("two")]


def moved(spans, turn, start, end):
    return [(a + start, b + end) if at == turn else (a, b) for at, (a, b) in enumerate(spans)]


def test_the_proof_takes_what_is_right_and_refuses_what_is_not():
    template = template_of(byte_tokenizer(template=CHATML), {})
    text, spans = locate(template, CHAT)
    prove(template, CHAT, text, spans, marked=False)
    header = len("<|im_start|>assistant\n")
    for wrong, why in (
        (moved(spans, 1, -header - 14, 0), "turn 1 of the assistant holds what the user or a tool said"),
        (moved(spans, 0, 0, 40), "turn 0 of the assistant holds"),
        (moved(spans, 0, 1, 0), "outside its turns"),
        (moved(spans, 1, 0, -12), "outside its turns"),
        (spans[:1], "outside its turns"),
        (spans[1:], "outside its turns"),
    ):
        with pytest.raises(DataError, match=why) as caught:
            prove(template, CHAT, text, wrong, marked=False)
        assert "⟦" in str(caught.value)


def test_a_turn_that_cannot_be_found_shows_the_place():
    upper = CHATML.replace("m.content", "(m.content | length if m.role == 'assistant' else m.content)")
    with pytest.raises(DataError, match=r"message 1 \(assistant, 'one'\) cannot be located.*⟦.*generation"):
        prepare(CHAT, upper.replace("m.content | length", "'x' * (m.content | length)"))


def test_a_template_that_repeats_an_answer_elsewhere():
    leaky = CHATML.replace("{% endfor %}", "{% endfor %}{{ '<note>' + messages[1].content + '</note>' }}", 1)
    with pytest.raises(DataError, match=r"cannot be (?:proved|located)"):
        prepare(CHAT, leaky)


def test_a_place_is_shown_in_one_line():
    assert shown("abc\ndef", 4, 6) == repr("abc\n⟦de⟧f")
    assert len(shown("x" * 1000, 200, 800)) < 300
