"""Faults that a reviewer found by hand, each held down."""

import numpy as np
import pytest
import torch
from data_fixtures import byte_tokenizer
from datasets import Dataset
from peft import PromptTuningConfig
from tiny import tiny_model, token_rows

from posttrain import SFTConfig, SFTTrainer
from posttrain.data.packing import drop_untrained, plan_bins
from posttrain.errors import ConfigError, ModelError


def trainer(tmp_path, model=None, rows=None, evaluation=None, peft_config=None, compute_metrics=None, **settings):
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | settings
    return SFTTrainer(
        model or tiny_model(),
        SFTConfig(output_dir=str(tmp_path), **settings),
        train_dataset=rows or token_rows(),
        eval_dataset=evaluation,
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
        compute_metrics=compute_metrics,
    )


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_follows_the_longest_row_does_not_depend_on_the_batch(tmp_path, kind, layout):
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rows = Dataset.from_list([{"input_ids": list(range(3, 103))}, {"input_ids": list(range(40, 60))}])
    model = tiny_model(max_position_embeddings=128 if kind == "longrope" else 32, rope_parameters=scaling)
    losses = []
    for size in (1, 2):
        built = trainer(tmp_path, model, evaluation=rows, per_device_eval_batch_size=size, layout=layout, bf16=False)
        assert built.layout == layout
        losses.append(built.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_head_with_a_forward_of_its_own_is_scored_by_it(tmp_path):
    class Tripled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3

    model = tiny_model()
    model.lm_head = Tripled(32, 300, bias=False)
    built = trainer(tmp_path, model, bf16=False)
    rows = Dataset.from_list([{"input_ids": list(range(3, 23)), "labels": list(range(3, 23))}])
    ids = torch.tensor(rows["input_ids"][:])
    want = model.eval()(input_ids=ids, labels=ids).loss.item()
    assert built.evaluate(rows)["eval_loss"] == pytest.approx(want, abs=1e-5)
    before = model.lm_head.weight.detach().clone()
    built.train()
    assert not torch.equal(before, model.lm_head.weight)


def test_prompt_learning_is_refused_by_name(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ModelError, match="PromptTuningConfig"):
        trainer(tmp_path, peft_config=config)


def test_a_resized_model_is_bound_again(tmp_path):
    model = tiny_model()
    trainer(tmp_path, model).train()
    model.resize_token_embeddings(310)
    trainer(tmp_path, model).train()


def test_a_checkpoint_without_optimizer_is_not_resumed(tmp_path):
    trainer(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True).train()
    with pytest.raises(ConfigError, match="save_only_model"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_speed_is_never_negative(tmp_path):
    built = trainer(tmp_path, logging_steps=1)
    built.train()
    built.train()
    assert all(line["tokens_per_second"] > 0 for line in built.state.log_history if "loss" in line)


def test_pieces_without_targets_are_dropped_and_counted():
    bins = plan_bins([24, 9], 8, "bfd_split")
    weights = [[0.0] * 16 + [1.0] * 8, [0.0] + [1.0] * 8]
    kept, dropped = drop_untrained(bins, weights)
    assert dropped == 2  # two masked pieces of the first row
    assert sorted(piece for pieces in kept for piece in pieces) == [(0, 14, 22), (0, 21, 24), (1, 0, 8), (1, 7, 9)]


def test_predictions_come_in_the_order_of_the_rows(tmp_path):
    rows = token_rows(5, masked=False)
    built = trainer(
        tmp_path, evaluation=rows, per_device_eval_batch_size=2, eval_packing=True, compute_metrics=lambda p: {}
    )
    labels = built.predict(rows).label_ids
    assert [row[row >= 0].tolist() for row in np.asarray(labels)] == [row["input_ids"][1:] for row in rows]


def test_half_precision_objects_are_announced(tmp_path, capsys):
    trainer(tmp_path, tiny_model().to(torch.bfloat16))
    assert "float32 master" in capsys.readouterr().err
