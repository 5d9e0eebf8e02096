"""Weights of rows, turns and tokens: where they end up, what the loss and its gradient become, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer, word_tokenizer
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.runs import FIELDS, run, same, scratch, sft
from own_templates import OWN, tokenizer_for
from tiny import tiny_model

from posttrain import SFTConfig, SFTTrainer
from posttrain.data.rows import SFTRowOptions, prepare_sft
from posttrain.errors import DataError


def user(text, **more):
    return {"role": "user", "content": text, **more}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def prepare(rows, tokenizer=None, **options):
    return prepare_sft(rows, tokenizer or byte_tokenizer(template=CHATML), SFTRowOptions(max_length=None, **options))


def weighed(row, tokenizer=None, **options):
    """The runs of equal weight other than 0. e.g. [("one<|im_end|>", 0.5), ("two<|im_end|>", 1.0)]"""
    tokenizer = tokenizer or byte_tokenizer(template=CHATML)
    prepared, _ = prepare([row], tokenizer, **options)
    ids, weights = prepared[0]["input_ids"], prepared[0]["weights"]
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[start:end]), round(weights[start], 6)) for start, end in pairwise(edges) if weights[start]
    ]


CHAT = [user("a"), says("one", weight=0.5), user("b"), says("two"), user("c"), says("three", train=False)]
ASSISTANT = {"assistant_only_loss": True}


def test_a_row_weighs_all_of_its_targets():
    assert weighed({"prompt": "x", "completion": "yz", "sample_weight": 0.25}) == [("yz<|im_end|>", 0.25)]
    assert weighed({"text": "abc", "sample_weight": 3}) == [("bc<|im_end|>", 3.0)]
    assert weighed({"text": "abc", "sample_weight": None}) == [("bc<|im_end|>", 1.0)]
    tokens = {"input_ids": [65, 66, 67, 68], "labels": [-100, -100, 67, 68], "sample_weight": 2.0}
    prepared, _ = prepare([tokens])
    assert prepared[0]["weights"] == [0.0, 0.0, 2.0, 2.0]


def test_a_turn_has_the_weight_its_message_gives():
    assert weighed({"messages": CHAT}, **ASSISTANT) == [("one<|im_end|>", 0.5), ("two<|im_end|>", 1.0)]
    chat = [user("a", train=False), says("one", train=True, weight=2), user("b", weight=0), says("two", weight=0.0)]
    assert weighed({"messages": chat, "sample_weight": 0.5}, **ASSISTANT) == [("one<|im_end|>", 1.0)]
    assert weighed(
        {"messages": [user("a"), says("one", train=False, weight=3), user("b"), says("c")]}, **ASSISTANT
    ) == [("c<|im_end|>", 1.0)]


def test_turns_have_their_weight_also_where_the_whole_chat_is_trained():
    runs = weighed({"messages": CHAT[:4]})
    assert runs == [
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"[len("<|im_start|>") :], 1.0),
        ("one<|im_end|>", 0.5),
        ("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n", 1.0),
    ]


def test_turns_of_a_completion():
    row = {"prompt": [user("a")], "completion": [says("one", weight=0.5), user("b"), says("two")]}
    between = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    assert weighed(row) == [("one<|im_end|>", 0.5), (between, 1.0)]
    assert weighed(row, **ASSISTANT) == [("one<|im_end|>", 0.5), ("two<|im_end|>", 1.0)]


def test_keys_of_ours_do_not_reach_the_template():
    template = "{% for m in messages %}{{ m | tojson }}{{ '<|im_end|>' }}{% endfor %}"
    [(text, _)] = weighed({"messages": [user("a"), says("b", weight=2.0)]}, byte_tokenizer(template=template))[-1:]
    assert "weight" not in text


def test_tokens_have_the_weights_their_row_gives():
    row = {"input_ids": [65, 66, 67, 68], "loss_weights": [9.0, 0.0, 0.5, 2], "labels": [65, 66, 67, -100]}
    prepared, _ = prepare([{**row, "sample_weight": 2.0}])
    assert prepared[0]["weights"] == [0.0, 0.0, 1.0, 0.0]
    masked = {**row, "attention_mask": [1, 1, 1, 0]}
    assert prepare([masked])[0][0]["weights"] == [0.0, 0.0, 0.5]


def test_rows_of_weight_zero_are_dropped_and_counted():
    rows = [{"text": "abc", "sample_weight": 0.0}, {"text": "abc", "sample_weight": 1.0}]
    prepared, report = prepare(rows)
    assert (len(prepared), report.rows_without_targets) == (1, 1)


def test_streams_are_weighed_too():
    stream = IterableDataset.from_generator(lambda: iter([{"text": "abc", "sample_weight": 0.5}]))
    prepared, _ = prepare(stream)
    assert next(iter(prepared))["weights"] == [0.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("row", "needle"),
    [
        ({"text": "a", "sample_weight": -1.0}, r"'sample_weight' is -1.0; a weight is a finite number, 0 or more"),
        ({"text": "a", "sample_weight": math.nan}, "'sample_weight' is nan"),
        ({"text": "a", "sample_weight": math.inf}, "'sample_weight' is inf"),
        ({"text": "a", "sample_weight": "big"}, "'sample_weight' is 'big'"),
        ({"text": "a", "sample_weight": True}, "'sample_weight' is True"),
        ({"messages": [user("a"), says("b", weight=-0.5)]}, "message 1: 'weight' is -0.5"),
        ({"messages": [user("a"), says("b", weight=math.nan)]}, "message 1: 'weight' is nan"),
        ({"messages": [user("a"), says("b", train="no")]}, "message 1: 'train' is 'no'; write true or false"),
        ({"messages": [user("a", weight=1.0), says("b")]}, r"message 0 \(user\) has a weight"),
        ({"messages": [user("a", train=True), says("b")]}, r"message 0 \(user\) has a weight"),
        ({"input_ids": [1, 2], "loss_weights": [1.0]}, "'loss_weights' has 1 values and 'input_ids' 2"),
        ({"input_ids": [1, 2], "loss_weights": [1.0, -2.0]}, "'loss_weights', token 1, is -2.0"),
        ({"input_ids": [1, 2], "loss_weights": [1.0, math.nan]}, "'loss_weights', token 1, is nan"),
        ({"input_ids": [1, 2], "loss_weights": [1.0, None]}, "'loss_weights' is None"),
    ],
)
def test_what_is_no_weight_is_refused(row, needle):
    options = ASSISTANT if "messages" in row else {}
    with pytest.raises(DataError, match="Row 0 of the train set: .*" + needle):
        prepare([row], **options)


def test_a_user_left_out_of_a_chat_that_is_trained_as_a_whole():
    with pytest.raises(DataError, match="assistant_only_loss"):
        prepare([{"messages": [user("a", train=False), says("b")]}])


def test_a_weight_where_the_template_marks_fewer_turns():
    tokenizer = tokenizer_for("marked")
    only_last = OWN["marked"].template.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    tokenizer = byte_tokenizer(template=only_last)
    chat = [user("a"), says("one"), user("b"), says("two")]
    assert weighed({"messages": chat}, tokenizer, **ASSISTANT) == [("two<|im_end|>", 1.0)]
    with pytest.raises(DataError, match="marks 1 of 2 turns"):
        prepare([{"messages": [*chat[:3], says("two", weight=0.5)]}], tokenizer, **ASSISTANT)


# ---- turns whose thinking was left out -------------------------------------------------------------------------------


def thinks(text, why, **more):
    return says(text, reasoning_content=why, **more)


def test_a_turn_whose_thinking_the_history_leaves_out_is_not_trained():
    tokenizer = tokenizer_for("thinking")
    chat = [user("a"), thinks("one", "because"), user("b"), thinks("two", "therefore")]
    last = ("<think>\ntherefore\n</think>\n\ntwo<|im_end|>", 1.0)
    assert weighed({"messages": chat}, tokenizer, **ASSISTANT) == [last]
    inline = [user("a"), says("<think>\nbecause\n</think>\n\none"), *chat[2:]]
    assert weighed({"messages": inline}, tokenizer, **ASSISTANT) == [last]
    # Asked for by name, it is trained as it is written.
    chat[1]["train"] = True
    assert weighed({"messages": chat}, tokenizer, **ASSISTANT) == [("one<|im_end|>", 1.0), last]
    # A turn that thought nothing is written as a model without thinking writes it.
    plain = [user("a"), says("one"), *chat[2:]]
    assert weighed({"messages": plain}, tokenizer, **ASSISTANT) == [("one<|im_end|>", 1.0), last]


def test_nor_where_the_whole_chat_is_trained():
    chat = [user("a"), thinks("one", "because"), user("b"), thinks("two", "therefore")]
    runs = weighed({"messages": chat}, tokenizer_for("thinking"))
    assert [text for text, _ in runs if "one" in text] == []
    assert "therefore" in runs[-1][0]


def test_an_answer_whose_thinking_is_not_written_at_all_is_refused():
    for options in (ASSISTANT, {}):
        with pytest.raises(DataError, match=r"message 1 \(assistant\) thinks \('because'\).*chat_template_path"):
            prepare([{"messages": [user("a"), thinks("one", "because")]}], **options)
    row = {"messages": [user("a"), thinks("one", "because", train=True)]}
    assert weighed(row, **ASSISTANT) == [("one<|im_end|>", 1.0)]


def test_thinking_is_kept_where_the_template_keeps_it():
    chat = [user("a"), thinks("one", "because"), user("b"), thinks("two", "therefore")]
    assert weighed({"messages": chat}, tokenizer_for("keeps_thinking"), **ASSISTANT) == [
        ("<think>because</think>one<|im_end|>", 1.0),
        ("<think>therefore</think>two<|im_end|>", 1.0),
    ]


# ---- the prompt of a turn has the ids it has at inference ------------------------------------------------------------


def test_a_header_has_the_ids_a_prompt_ends_with():
    template = CHATML.replace("m.role + '\n'", "m.role + '\n\n'").replace("assistant\n'", "assistant\n\n'")
    tokenizer = word_tokenizer(["assistant\n\n", "user\n\nhello there\n\n"] * 50, template)
    opened = tokenizer.apply_chat_template([user("a")], add_generation_prompt=True, tokenize=False)
    alone = tokenizer(opened, add_special_tokens=False)["input_ids"]
    whole = tokenizer(opened + "hello", add_special_tokens=False)["input_ids"]
    assert whole[: len(alone)] != alone, "a tokenizer that tells the two apart"
    prepared, _ = prepare([{"messages": [user("a"), says("hello")]}], tokenizer, **ASSISTANT)
    ids, weights = prepared[0]["input_ids"], prepared[0]["weights"]
    assert ids[: weights.index(1.0)] == alone


# ---- loss and gradient -----------------------------------------------------------------------------------------------

ONE_STEP = {"per_device_train_batch_size": 4, "max_steps": 1, "train_sampling_strategy": "sequential"}
ROWS = [{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [15, 16, 17]}, {"input_ids": [25, 26, 27, 28]}]


def test_a_row_of_weight_two_is_two_rows():
    twice = [{**row, "sample_weight": weight} for row, weight in zip(ROWS, (2.0, 1.0, 0.0), strict=True)]
    same(run(sft(rows=Dataset.from_list(twice), **ONE_STEP)), run(sft(rows=Dataset.from_list(
        [ROWS[0], ROWS[0], ROWS[1]]), **ONE_STEP)), tolerance=1e-6)  # fmt: skip


def test_the_loss_is_the_weighted_mean_and_its_gradient_follows():
    weights = [[0.0, 0.5, 2.0, 0.0, 1.0], [1.0, 0.25, 3.0], [0.0, 1.0, 0.0, 0.75]]
    rows = [{**row, "loss_weights": w} for row, w in zip(ROWS, weights, strict=True)]
    found = run(sft(rows=Dataset.from_list(rows), **ONE_STEP))
    model = tiny_model("qwen3").double()
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for row, w in zip(ROWS, weights, strict=True):
        ids = torch.tensor([row["input_ids"]])
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total = total - (torch.tensor(w[1:]) * logps.gather(1, ids[0, 1:, None])[:, 0]).sum()
        units += sum(w[1:])
    (total / units).backward()
    assert found.losses[0] == pytest.approx((total / units).item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        if name in found.gradients:
            torch.testing.assert_close(found.gradients[name].double(), parameter.grad, atol=1e-5, rtol=1e-4)


def test_c18_the_loss_of_a_completion_is_the_mean_over_all_of_its_tokens():
    """2 prompt and 3 response tokens: loss = -(logp R1 + logp R2 + logp R3) / 3."""
    row = {"input_ids": [5, 6, 7, 8, 9], "completion_mask": [0, 0, 1, 1, 1]}
    found = run(sft(rows=Dataset.from_list([row]), **{**ONE_STEP, "per_device_train_batch_size": 1}))
    with torch.no_grad():
        logps = tiny_model("qwen3").double()(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
    assert found.losses[0] == pytest.approx(
        -sum(logps[at - 1, row["input_ids"][at]] for at in (2, 3, 4)).item() / 3, 1e-5
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 4, width=16), st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_any_weights_of_turns(turns):
    chat, expected = [], []
    for at, (weight, given_weight, train) in enumerate(turns):
        chat += [
            user("q"),
            says(f"a{at}", **({"weight": weight} if given_weight else {}), **({} if train else {"train": False})),
        ]
        value = (weight if given_weight else 1.0) * train
        expected += [(f"a{at}<|im_end|>", round(float(np.float32(value)), 6))] if value else []
    if not expected:
        return
    assert weighed({"messages": chat}, **ASSISTANT) == expected


def test_packed_rows_keep_their_weights():
    rows = [{"text": "abc", "sample_weight": 0.5}, {"text": "de", "sample_weight": 2.0}]
    trainer = SFTTrainer(
        tiny_model("qwen3"),
        SFTConfig(**FIELDS | {"output_dir": scratch(), "packing": True, "max_length": 16}),
        train_dataset=rows,
        processing_class=byte_tokenizer(template=CHATML),
    )
    batch = next(iter(trainer.get_train_dataloader()))["batch"]
    assert sorted(batch.weights.tolist()) == [0.5] * 3 + [2.0] * 2
