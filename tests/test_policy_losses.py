"""Policy-gradient losses, KL estimators and divergences: hand-computed numbers, gradients, extremes, the tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.loss.divergence import forward_kl, generalized_jsd, jsd_and_gradient, linear_jsd, reverse_kl
from posttrain.loss.kl import KL
from posttrain.loss.policy import (
    POLICY,
    PolicyLoss,
    PolicyOptions,
    Sampled,
    check_policy,
    clip_fraction,
    policy_kl,
    policy_losses,
)
from posttrain.loss.projection import Operands
from posttrain.loss.softmax import HeadSpec


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two completions: log-ratios ln 1.5 and ln 0.9 with A = 1, and ln 0.5 alone with A = −2. π_old is e⁻¹ everywhere.
TOKENS = Sampled(
    logps=tensor(math.log(1.5) - 1, math.log(0.9) - 1, math.log(0.5) - 1),
    advantages=tensor(1, 1, -2),
    sequence=torch.tensor([0, 0, 1]),
    count=2,
    old=tensor(-1, -1, -1),
    ref=tensor(-1, -1, -1),
)
SEQUENCE = math.sqrt(1.5 * 0.9)  # 1.161895, inside the clip; the other completion's is 0.5, below it


def gate(ratio: float, tau: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def phi(w: float, k: float, rate: float) -> float:
    return w**k * math.exp(rate - rate * w)


WANTED = {
    "grpo": [-1.2 / 2, -0.9 / 2, 1.6],
    "bnpo": [-1.2, -0.9, 1.6],
    "dr_grpo": [-1.2, -0.9, 1.6],
    "dapo": [-1.2, -0.9, 1.6],
    "luspo": [-SEQUENCE, -SEQUENCE, 1.6],
    "cispo": [-1.2 * (math.log(1.5) - 1), -0.9 * (math.log(0.9) - 1), 0.5 * 2 * (math.log(0.5) - 1)],
    "sapo": [-gate(1.5, 1.0) / 2, -gate(0.9, 1.0) / 2, 2 * gate(0.5, 1.05)],
    "vespo": [
        -phi(1.35, 2, 3) * (math.log(1.5) - 1),
        -phi(1.35, 2, 3) * (math.log(0.9) - 1),
        2 * phi(0.5, 3, 2) * (math.log(0.5) - 1),
    ],
    "gspo": [-SEQUENCE / 2, -SEQUENCE / 2, 1.6],
    "gmpo": [-math.exp((0.2 + math.log(0.9)) / 2) / 2] * 2 + [2 * math.exp(-0.2)],
}


def options(name: str, **more: object) -> PolicyOptions:
    return PolicyOptions(epsilon_high=1.2 if name == "cispo" else 0.2, **more)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", POLICY)
def test_tokens_by_hand(name: str):
    assert policy_losses(name, TOKENS, options(name)).tolist() == pytest.approx(WANTED[name], abs=1e-9)


def test_the_table_is_the_literal():
    assert tuple(POLICY) == get_args(PolicyLoss) == tuple(WANTED)


def test_c61_token_mean_at_ratio_one():
    tokens = Sampled(torch.zeros(6), tensor(1, 1, -1, -1, -1, -1), torch.tensor([0, 0, 1, 1, 1, 1]), 2)
    assert float(policy_losses("dapo", tokens, PolicyOptions()).sum() / 6) == pytest.approx(1 / 3)
    assert float(policy_losses("grpo", tokens, PolicyOptions()).sum() / 2) == pytest.approx(0)


def test_a_two_sided_bound_and_sequence_level():
    found = policy_losses("dapo", replace(TOKENS, advantages=tensor(-1, -1, -1)), options("dapo", delta=1.3))
    assert found.tolist() == pytest.approx([1.3, 0.9, 0.8])  # ρ = 1.5 would be 1.5: a negative advantage has no bound
    found = policy_losses("grpo", TOKENS, options("grpo", importance_sampling_level="sequence"))
    assert found.tolist() == pytest.approx(WANTED["gspo"])


@pytest.mark.parametrize("name", POLICY)
def test_the_kl_is_added_with_the_weight_of_the_token(name: str):
    with_kl = policy_losses(name, TOKENS, options(name, beta=0.1))
    k3 = [math.exp(-x) - 1 + x for x in (math.log(1.5), math.log(0.9), math.log(0.5))]
    share = [0.5, 0.5, 1] if POLICY[name].average else [1, 1, 1]
    wanted = [0.1 * k * s for k, s in zip(k3, share, strict=True)]
    assert (with_kl - policy_losses(name, TOKENS, options(name))).tolist() == pytest.approx(wanted)


def test_the_bias_corrected_kl_is_times_the_ratio():
    plain = policy_kl(TOKENS, PolicyOptions(beta=0.1))
    corrected = policy_kl(TOKENS, PolicyOptions(beta=0.1, use_bias_correction_kl=True))
    assert corrected.tolist() == pytest.approx((plain * tensor(1.5, 0.9, 0.5)).tolist())


@pytest.mark.parametrize("name", POLICY)
def test_a_mismatch_correction_multiplies_the_term(name: str):
    half = replace(TOKENS, correction=tensor(0.5, 0.5, 0.5))
    found = policy_losses(name, half, options(name))
    if name == "vespo":  # there it is part of w
        wanted = [-phi(1.35 / 4, 2, 3) * (math.log(x) - 1) for x in (1.5, 0.9)]
        assert found.tolist() == pytest.approx([*wanted, 2 * phi(0.25, 3, 2) * (math.log(0.5) - 1)])
    else:
        assert found.tolist() == pytest.approx([x / 2 for x in WANTED[name]])


@pytest.mark.parametrize("name", POLICY)
def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient(name: str):
    logps = TOKENS.logps.clone().requires_grad_()
    tokens = replace(TOKENS, logps=logps, old=None)
    policy_losses(name, tokens, options(name)).sum().backward()
    share = [0.5, 0.5, 1] if POLICY[name].average else [1, 1, 1]
    wanted = [-a * s for a, s in zip([1, 1, -2], share, strict=True)]
    assert logps.grad.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("name", [n for n in POLICY if n not in ("cispo", "vespo")])
def test_gradients_are_the_derivatives(name: str):
    tokens = replace(TOKENS, old=tensor(-1.05, -0.95, -1.1) + TOKENS.logps + 1)

    def loss(logps: torch.Tensor) -> torch.Tensor:
        return policy_losses(name, replace(tokens, logps=logps), options(name, beta=0.1)).sum()

    assert torch.autograd.gradcheck(loss, (TOKENS.logps.clone().requires_grad_(),), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("size", [-1e4, 0.0, 1e4])
def test_extremes_and_empty_completions_are_finite(name: str, size: float):
    logps = torch.tensor([size, -1.0], requires_grad=True)
    tokens = Sampled(logps, torch.tensor([1.0, -1.0]), torch.tensor([0, 2]), 3, -torch.ones(2), -torch.ones(2))
    loss = policy_losses(name, tokens, options(name, beta=0.1))
    loss.sum().backward()
    assert loss.isfinite().all() and logps.grad.isfinite().all()


@pytest.mark.parametrize("name", POLICY)
def test_the_clip_fraction_counts_tokens_without_gradient(name: str):
    logps = TOKENS.logps.clone().requires_grad_()
    policy_losses(name, replace(TOKENS, logps=logps), options(name)).sum().backward()
    found = clip_fraction(name, TOKENS, options(name))
    wanted = {"luspo": [0, 0, 1], "gspo": [0, 0, 1], "sapo": [0, 0, 0], "vespo": [0, 0, 0], "cispo": [1, 0, 0]}
    assert found.tolist() == wanted.get(name, [1, 0, 1])
    if name not in ("cispo",):
        assert torch.equal(logps.grad == 0, found.bool())


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("gropo", {}, "Did you mean 'grpo'"),
        ("cispo", {"importance_sampling_level": "sequence"}, "does not go with loss_type='cispo'"),
        ("dapo", {"importance_sampling_level": "word"}, "must be 'token' or 'sequence'"),
        ("sapo", {"sapo_temperature_neg": 0.0}, "sapo_temperature_neg=0.0"),
        ("dapo", {"delta": -1.0}, "delta=-1.0"),
        ("dapo", {"kl_estimator": "k4"}, "kl_estimator='k4'"),
    ],
)
def test_constants_are_checked(name: str, given: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        check_policy(name, PolicyOptions(**given))


# ---- KL and divergences ----------------------------------------------------------------------------------------------


def test_c48_kl_estimators():
    logp, ref = tensor(-1.0), tensor(-1.5)
    wanted = {"k1": 0.5, "k2": 0.125, "k3": 0.106531}
    assert {name: round(float(fn(logp, ref)), 6) for name, fn in KL.items()} == wanted


@pytest.mark.parametrize("name", KL)
def test_estimators_have_the_kl_as_their_mean(name: str):
    p, q = tensor(0.7, 0.2, 0.1), tensor(0.6, 0.25, 0.15)
    mean = float((p * KL[name](p.log(), q.log())).sum())
    assert mean == pytest.approx(float((p * (p / q).log()).sum()), rel=0.1 if name == "k2" else 1e-9)


TEACHER, STUDENT = tensor(0.9, 0.1).log()[None], tensor(0.5, 0.5).log()[None]


def test_c67_divergences():
    assert float(forward_kl(STUDENT, TEACHER)) == pytest.approx(0.368064, abs=1e-6)
    assert float(reverse_kl(STUDENT, TEACHER)) == pytest.approx(0.510826, abs=1e-6)
    assert float(generalized_jsd(STUDENT, TEACHER, 0.5)) == pytest.approx(0.101749, abs=1e-6)
    assert float(generalized_jsd(STUDENT, TEACHER, 0.0)) == pytest.approx(0.368064, abs=1e-6)
    assert float(generalized_jsd(STUDENT, TEACHER, 1.0)) == pytest.approx(0.510826, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_gradient_by_logits_is_the_derivative(beta: float, size: float):
    g = torch.Generator().manual_seed(0)
    z, t = (torch.randn(2, 5, 7, generator=g, dtype=torch.float64) * size).unbind(0)
    z.requires_grad_()
    student, teacher = torch.log_softmax(z, -1), torch.log_softmax(t, -1)
    wanted = generalized_jsd(student, teacher, beta)
    wanted.sum().backward()
    loss, gradient = jsd_and_gradient(student.detach(), teacher, beta)
    assert torch.allclose(loss, wanted.detach()) and loss.isfinite().all()
    assert torch.allclose(gradient, z.grad, atol=1e-9) and gradient.isfinite().all()


def test_a_chunked_jsd_multiplies_four_times_and_keeps_no_logits():
    from test_linear import H, N, V, count_products, make

    hidden, weight, _, targets, _ = make()
    teacher = Operands(torch.randn(N, H), torch.randn(V, H))
    found = []

    def run() -> None:
        found.append(linear_jsd(Operands(hidden, weight), teacher, targets, HeadSpec(chunk_tokens=64), hard=1.0)[0])
        found[0].backward()

    assert count_products(run) == 4  # the student's logits, dh and dW; the teacher's logits
    weight.requires_grad_(False)
    found.clear()
    assert count_products(run) == 3
