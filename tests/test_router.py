"""The balance loss of experts: transformers' value for each sequence alone, and the laws with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import EVERY, build
from forests import close, forest, sequences
from laws.runs import Run, run, same, sft
from pool import POOL
from tiny import token_rows
from torch import Tensor

from posttrain.model.load import LoadOptions, prepare_model
from posttrain.model.router import balance_coefficient, balance_losses, experts_per_token
from posttrain.types import ScoreRequest

BALANCED = [name for name in EVERY if experts_per_token(build(name)) is not None]
UNBALANCED = ["deepseek-v3", "glm4-moe", "hunyuan-moe", "llama-4"]


def scored(family: str, layout: str = "auto", recompute: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The balance loss of the forest's sequences and its gradients, by our forward."""
    model = prepare_model(build(family), LoadOptions(layout=layout)).model.train()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss = model(token_batch=forest(), score_request=ScoreRequest(aux_loss=True)).aux_loss
    loss.backward()
    return loss.detach(), gradients(model)


def plain(family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by transformers, a batch a row."""
    model = build(family).train()
    total = torch.zeros(())
    for row in sequences():
        loss = model(input_ids=torch.tensor([row]), output_router_logits=True, use_cache=False).aux_loss
        loss.backward()
        total += loss.detach()
    return total, gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert got[1].keys() == want[1].keys() and want[1]
    for name, gradient in want[1].items():
        close(got[1][name], gradient, name)


def test_by_hand():
    """2 layers, 3 tokens in 2 segments, 2 experts, 1 a token; the sequences are both segments and the first alone."""
    first, second = torch.tensor([[0.0, 0.0], [3.0, 3.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0]] * 3)
    first[:2, 0] += 1e-6
    owner, paths = torch.tensor([0, 0, 1]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    a, b = torch.tensor([2.0, 0.0]).softmax(0), torch.tensor([0.0, 1.0]).softmax(0)
    half = torch.tensor([0.5, 0.5])
    # Expert 0 is chosen by all tokens of the first layer, expert 1 by all of the second.
    both = 2 * (half * (2 * half + a + 3 * b) / 6).sum()
    alone = 2 * (half * (2 * half + 2 * b) / 4).sum()
    got = balance_losses([first, second], owner, paths, top_k=1)
    torch.testing.assert_close(got, torch.stack([both, alone]), rtol=1e-5, atol=0)
    # Skewed to one expert it is dearer; padding counts nothing.
    skewed = balance_losses([torch.tensor([[9.0, 0.0]] * 3)], torch.tensor([0, 0, 1]), torch.tensor([[1.0]]), top_k=1)
    assert skewed.item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("family", BALANCED)
def test_equals_transformers_on_each_sequence(family):
    assert_same(scored(family), plain(family))


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "qwen3.5-moe"])
def test_padded_and_recomputed(family):
    want = plain(family)
    assert_same(scored(family, layout="padded"), want)
    assert_same(scored(family, recompute=True), want)


def test_families_with_a_balance_loss():
    assert {"qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "olmoe", "qwen3.5-moe", "phimoe"} <= set(BALANCED)


@pytest.mark.parametrize("family", UNBALANCED)
def test_families_without_one_say_so(family, capsys):
    assert balance_coefficient(build(family), 0.001) == 0
    assert f"{type(build(family)).__name__} has no balance loss" in capsys.readouterr().err


def test_dense_models_say_nothing(capsys):
    assert balance_coefficient(build("llama"), 0.001) == 0
    assert not capsys.readouterr().err


# ---- the laws, with a mixture of experts -----------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"max_steps": 2, "router_aux_loss_coef": 0.5, "per_device_train_batch_size": 4}


def train(**settings: Any) -> Run:
    rows = token_rows(prefix=20)
    return run(sft(model=build("qwen3-moe"), rows=rows, **SETTINGS | settings))


def alike(one: Run, other: Run) -> None:
    same(one, other)
    for left, right in zip(one.logs, other.logs, strict=True):
        assert left["aux_loss"] == pytest.approx(right["aux_loss"], rel=1e-5)


def test_memory_knobs_do_not_change_it():
    one = train()
    assert one.logs[0]["shared_share"] > 0.2
    assert one.logs[0]["aux_loss"] > 4  # 4 of 8 experts a token; evenly spread it is 4
    alike(one, train(per_device_train_batch_size=1, gradient_accumulation_steps=4))
    alike(one, train(max_tokens_per_forward=60))
    alike(one, train(layout="padded"))
    alike(one, train(gradient_checkpointing=True))


def test_two_processes():
    first, second = POOL.run(train, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    alike(first, second)
    alike(train(), first)


def test_it_is_a_mean_over_sequences_and_not_evaluated():
    """Loss = task loss + coefficient × mean over the step's sequences; evaluation has the task loss alone."""
    settings: dict[str, Any] = {"max_steps": 1, "learning_rate": 0.0, "eval_rows": token_rows(prefix=20)}
    with_it, without = train(**settings), train(**settings | {"router_aux_loss_coef": 0.0})
    assert with_it.losses[0] == pytest.approx(without.losses[0] + 0.5 * with_it.logs[0]["aux_loss"], rel=1e-5)
    assert "aux_loss" not in without.logs[0]
    trainer = sft(model=build("qwen3-moe"), eval_rows=token_rows(4), router_aux_loss_coef=0.5)
    plain = sft(model=build("qwen3-moe"), eval_rows=token_rows(4), router_aux_loss_coef=0.0)
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_mutant_sum_instead_of_mean_fails(monkeypatch):
    from posttrain.trainer.engine import Engine

    own = Engine._set_window
    monkeypatch.setattr(Engine, "_set_window", lambda self, **values: own(self, **values | {"sequences": 1.0}))
    one = train()
    with pytest.raises(AssertionError):
        alike(one, train(per_device_train_batch_size=1, gradient_accumulation_steps=2))


def test_mutant_shared_tokens_counted_once_fails(monkeypatch):
    """A prompt that several sequences share belongs to the first of them alone."""
    import posttrain.model.body as body

    own = body.balance_losses

    def once(logits: Any, owner: Tensor, paths: Tensor, top_k: int) -> Tensor:
        return own(logits, owner, paths * (paths.cumsum(0) == 1), top_k)

    monkeypatch.setattr(body, "balance_losses", once)
    with pytest.raises(AssertionError):
        assert_same(scored("qwen3-moe"), plain("qwen3-moe"))
