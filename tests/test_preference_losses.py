"""Losses of pairs and of single completions: hand-computed numbers, float64 gradients, extremes, the tables."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.errors import ConfigError
from posttrain.loss.fdivergence import F_DIVERGENCES, FDivergence
from posttrain.loss.preference import (
    PREFERENCE,
    Options,
    Pairs,
    PreferenceLoss,
    aot_partners,
    check_options,
    mix,
)
from posttrain.loss.reweight import ld_weights, wpo_pair_weights, wpo_weights
from posttrain.loss.unpaired import (
    UNPAIRED,
    Unpaired,
    UnpairedLoss,
    UnpairedOptions,
    check_unpaired,
    kl_estimate,
    running_mean,
    udm_weights,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# One pair: log π −4 and −9, log π_ref −5 and −7, so c = 1, r = −2, Δ = 3; lengths 2 and 4; β = ½.
PAIR = Pairs(
    chosen=tensor(-4),
    rejected=tensor(-9),
    chosen_tokens=torch.tensor([2]),
    rejected_tokens=torch.tensor([4]),
    ref_chosen=tensor(-5),
    ref_rejected=tensor(-7),
    third=tensor(-6),
    third_tokens=torch.tensor([3]),
    delta=0.25,
)
PAIR = replace(PAIR, **aot_partners(PAIR))
OPTIONS = Options(
    beta=0.5, label_smoothing=0.1, discopop_tau=0.5, simpo_gamma=0.2, cpo_alpha=2.0, alpha=0.5, tpo_alpha=3.0
)


def ls(x: float) -> float:
    return -math.log1p(math.exp(-x))


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ODDS = math.log(math.exp(-2) / (1 - math.exp(-2))) - math.log(math.exp(-2.25) / (1 - math.exp(-2.25)))
WANTED = {
    "sigmoid": -0.9 * ls(1.5) - 0.1 * ls(-1.5),  # 0.351413
    "hinge": 0.0,
    "ipo": (1 / 2 + 2 / 4 - 1) ** 2,
    "exo_pair": s(1.5) * (ls(1.5) - math.log(0.9)) + s(-1.5) * (ls(-1.5) - math.log(0.1)),
    "nca_pair": -ls(0.5) - 0.5 * ls(-0.5) - 0.5 * ls(1.0),
    "robust": (-0.9 * ls(1.5) + 0.1 * ls(-1.5)) / 0.8,
    "bco_pair": -ls(0.25) - ls(1.25),
    "sppo_hard": (1 - 1) ** 2 + (-2 + 1) ** 2,
    "aot": -0.9 * ls(1.5) - 0.1 * ls(-1.5),
    "aot_unpaired": -0.9 * ls(1.5) - 0.1 * ls(-1.5),
    "apo_zero": 1 - s(0.5) + s(-1.0),
    "apo_down": s(0.5) + 1 - s(1.5),
    "discopop": (1 - s(3.0)) * -ls(1.5) + s(3.0) * math.exp(-1.5),
    "sft": 2.0,
    "sigmoid_norm": -ls(0.5 * (1 / 2 + 2 / 4)),
    "simpo": -ls(0.5 * (-2 + 2.25) - 0.2),
    "orpo": 2.0 - 0.5 * ls(ODDS),
    "cpo": -ls(2.5) + 2.0 * 2.0,
    "alphapo": -ls(0.5 * (math.exp(1.125) - math.exp(1.0)) / 0.5 - 0.2),
    "tpo": -ls(2.5) + 3.0 * 2.0,
}


@pytest.mark.parametrize("name", PREFERENCE)
def test_a_pair_by_hand(name: str):
    assert float(PREFERENCE[name](PAIR, OPTIONS)) == pytest.approx(WANTED[name], abs=1e-9)


def test_some_numbers_of_the_papers_forms():
    assert WANTED["sigmoid"] == pytest.approx(0.351413, abs=1e-6)
    assert WANTED["apo_zero"] == pytest.approx(0.377541 + 0.268941, abs=1e-6)
    equal = replace(PAIR, ref_chosen=PAIR.chosen, ref_rejected=PAIR.rejected)
    assert float(PREFERENCE["sigmoid"](equal, Options())) == pytest.approx(0.693147, abs=1e-6)


def test_the_table_is_the_literal():
    assert tuple(PREFERENCE) == get_args(PreferenceLoss) == tuple(WANTED)
    assert tuple(UNPAIRED) == get_args(UnpairedLoss)
    assert tuple(F_DIVERGENCES) == get_args(FDivergence)


def leaves(pairs: Pairs) -> tuple[Pairs, list[torch.Tensor]]:
    found = [x.clone().requires_grad_() for x in (pairs.chosen, pairs.rejected, pairs.third)]
    return replace(pairs, chosen=found[0], rejected=found[1], third=found[2]), found


ANOTHER = {  # a value of each option that is not OPTIONS' and that every loss accepts
    "beta": 0.7,
    "label_smoothing": 0.2,
    "discopop_tau": 0.8,
    "f_divergence_type": "alpha_divergence",
    "f_alpha_divergence_coef": 0.3,
    "simpo_gamma": 0.9,
    "cpo_alpha": 1.0,
    "alpha": 0.7,
    "tpo_alpha": 1.0,
}


@pytest.mark.parametrize("name", PREFERENCE)
@pytest.mark.parametrize("field", [f.name for f in fields(Options)])
def test_a_row_says_which_options_it_reads(name: str, field: str):
    base = replace(OPTIONS, f_divergence_type="alpha_divergence") if field == "f_alpha_divergence_coef" else OPTIONS
    if field == "f_alpha_divergence_coef" and field not in PREFERENCE[name].reads:
        base = OPTIONS
    pair = replace(PAIR, rejected=tensor(-7.5))  # off the kink of hinge and the zero of ipo
    before, after = (float(PREFERENCE[name](pair, o)) for o in (base, replace(base, **{field: ANOTHER[field]})))
    assert (before != after) == (field in PREFERENCE[name].reads)


@pytest.mark.parametrize("name", PREFERENCE)
def test_a_row_says_what_of_the_pair_it_reads(name: str):
    row = PREFERENCE[name]
    moved = replace(PAIR, ref_chosen=tensor(-5.5), rejected=tensor(-7.5))
    moved = replace(moved, **aot_partners(moved))
    base = replace(PAIR, rejected=tensor(-7.5))
    base = replace(base, **aot_partners(base))

    def value(pairs: Pairs) -> float:
        return float(row(pairs, OPTIONS))

    assert (value(moved) != value(base)) == row.reference
    assert (value(replace(base, margin=tensor(0.3))) != value(base)) == row.margin
    assert (value(replace(base, third=tensor(-7))) != value(base)) == row.third
    assert (value(replace(base, delta=0.5)) != value(base)) == (row.batch == "delta")
    other = {name: tensor(0.7) for name in ("partner", "chosen_partner", "rejected_partner")}
    assert (value(replace(base, **other)) != value(base)) == (row.batch == "partners")


def test_margin_shifts_the_logit():
    pair = replace(PAIR, margin=tensor(0.4))
    assert float(PREFERENCE["sigmoid"](pair, Options(beta=0.5))) == pytest.approx(-ls(1.1))
    assert float(PREFERENCE["hinge"](pair, Options(beta=0.1))) == pytest.approx(1.1)


EXTREME = [-1e4, -30.0, 0.0, 30.0, 1e4]


CASES = [(n, d) for n in PREFERENCE for d in F_DIVERGENCES]
CASES = [(n, d) for n, d in CASES if d == "reverse_kl" or "f_divergence_type" in PREFERENCE[n].reads]


@pytest.mark.parametrize(("name", "divergence"), CASES)
@pytest.mark.parametrize("length", [0, 1])
def test_extremes_are_finite(name: str, divergence: str, length: int):
    row = PREFERENCE[name]
    grid = torch.cartesian_prod(torch.tensor(EXTREME), torch.tensor(EXTREME)).float()
    chosen, rejected = (x.clone().requires_grad_() for x in grid.unbind(1))
    zero, tokens = torch.zeros_like(chosen), torch.full_like(chosen, length)
    pairs = Pairs(chosen, rejected, tokens, tokens, zero, zero, third=chosen, third_tokens=tokens)
    pairs = replace(pairs, **aot_partners(pairs))
    smoothing = 0.1 if "label_smoothing" in row.reads else 0.0
    loss = row(pairs, Options(label_smoothing=smoothing, f_divergence_type=divergence))
    loss.sum().backward()
    assert loss.shape == (25,) and loss.isfinite().all()
    assert chosen.grad.isfinite().all() and (rejected.grad is None or rejected.grad.isfinite().all())


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*PREFERENCE]),
    values=st.lists(st.floats(-6, -0.1), min_size=4, max_size=4),
    beta=st.floats(0.05, 1.0),
)
def test_gradients_are_the_derivatives(name: str, values: list[float], beta: float):
    c, r, ref_c, ref_r = (tensor(v) for v in values)
    pairs = replace(PAIR, ref_chosen=ref_c, ref_rejected=ref_r, **dict.fromkeys(PARTNERS, tensor(-1.0)))
    options = replace(OPTIONS, beta=beta)

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        found = PREFERENCE[name](replace(pairs, chosen=chosen, rejected=rejected), options)
        # aot_unpaired: the value of half of it is a constant; see the test of its whole batch.
        return found * (2 if name == "aot_unpaired" else 1)

    if (name == "hinge" and abs(1 - beta * (c - ref_c - r + ref_r)) < 1e-3) or name == "aot_unpaired":
        return
    assert torch.autograd.gradcheck(loss, (c.requires_grad_(), r.requires_grad_()), eps=1e-6, atol=1e-5)


PARTNERS = ("partner", "chosen_partner", "rejected_partner")


# ---- losses of the whole batch ---------------------------------------------------------------------------------------


def batch(P: int = 6) -> Pairs:
    g = torch.Generator().manual_seed(3)
    chosen, rejected, ref_c, ref_r = (torch.randn(4, P, generator=g, dtype=torch.float64) * 3).unbind(0)
    return Pairs(chosen, rejected, torch.full((P,), 2), torch.full((P,), 3), ref_c, ref_r)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("cut", [1, 2, 4, 6])
def test_aot_sorts_over_the_whole_batch_however_it_is_cut(name: str, cut: int):
    pairs = batch()
    options = Options(beta=0.3, label_smoothing=0.1)
    chosen, rejected = pairs.chosen.clone().requires_grad_(), pairs.rejected.clone().requires_grad_()
    if name == "aot":
        z = (chosen - rejected).sort().values - (pairs.ref_chosen - pairs.ref_rejected).sort().values
    else:
        z = (chosen - pairs.ref_chosen).sort().values - (rejected - pairs.ref_rejected).sort().values
    z = 0.3 * z
    wanted = (-0.9 * torch.nn.functional.logsigmoid(z) - 0.1 * torch.nn.functional.logsigmoid(-z)).sum()
    wanted.backward()
    c, r = pairs.chosen.clone().requires_grad_(), pairs.rejected.clone().requires_grad_()
    partners = aot_partners(pairs)
    total = torch.zeros((), dtype=torch.float64)
    for part in torch.arange(6).split(cut):
        piece = {f.name: getattr(pairs, f.name) for f in fields(Pairs)} | partners | {"chosen": c, "rejected": r}
        piece = {k: v[part] if isinstance(v, torch.Tensor) else v for k, v in piece.items()}
        total = total + PREFERENCE[name](Pairs(**piece), options).sum()
    total.backward()
    assert total.item() == pytest.approx(wanted.item())
    assert torch.allclose(c.grad, chosen.grad) and torch.allclose(r.grad, rejected.grad)


def test_mix_adds_losses_and_weighs_pairs():
    pairs = batch(2)
    total, each = mix(["sigmoid", "sft"], pairs, Options(), [1.0, 0.5], torch.tensor([2.0, 0.0]))
    assert float(total[0]) == pytest.approx(2 * float(each["sigmoid"][0] + 0.5 * each["sft"][0]))
    assert float(total[1]) == 0 and set(each) == {"sigmoid", "sft"}
    with pytest.raises(ConfigError, match="1 weights for 2 losses"):
        mix(["sigmoid", "sft"], pairs, Options(), [1.0])


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["sigmoyd"], Options(), "Did you mean 'sigmoid'"),
        (["ipo"], Options(label_smoothing=0.1), r"label_smoothing=0\.1 has no effect.*sigmoid"),
        (["simpo"], Options(simpo_gamma=1.0, discopop_tau=0.1), "discopop_tau"),
        (["sft"], Options(beta=0.2), r"beta=0\.2 has no effect"),
        (["exo_pair"], Options(), r"must be in \(0, 1\)"),
        (["robust"], Options(label_smoothing=0.5), r"must be in \[0, 0.5\)"),
        (["nca_pair"], Options(f_divergence_type="forward_kl"), "f_divergence_type='forward_kl' has no effect"),
        (["sigmoid"], Options(beta=0.0), "above 0"),
    ],
)
def test_what_a_loss_ignores_is_an_error(names: list[str], options: Options, words: str):
    with pytest.raises(ConfigError, match=words):
        check_options(names, options)


def test_options_that_one_of_a_mix_reads_are_taken():
    check_options(["ipo", "sigmoid"], Options(label_smoothing=0.1))
    with pytest.raises(ConfigError, match=r"beta=0\.1 has no effect"):
        check_options(["sft"], Options(), given=["beta"])


# ---- f-divergences and weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("reverse_kl", math.log(3)),
        ("forward_kl", 1 - 1 / 3),
        ("js_divergence", math.log(2 * 3 / 4)),
        ("alpha_divergence", (1 - 3**-0.5) / 0.5),
    ],
)
def test_f_divergences_by_hand(name: str, wanted: float):
    transform = F_DIVERGENCES[name]
    assert float(transform(tensor(math.log(3)), 0.5)) == pytest.approx(wanted)
    assert float(transform(tensor(0.0), 0.5)) == pytest.approx(0)
    x = torch.linspace(-50, 50, 101, dtype=torch.float64)
    assert (transform(x, 0.5).diff() >= 0).all()


def test_alpha_divergence_meets_its_limits():
    x = tensor(-1.0, 0.3, 2.0)
    assert torch.allclose(F_DIVERGENCES["alpha_divergence"](x, 1.0), F_DIVERGENCES["forward_kl"](x, 0.0))
    assert torch.allclose(F_DIVERGENCES["alpha_divergence"](x, 1e-7), x, atol=1e-6)
    assert torch.equal(F_DIVERGENCES["alpha_divergence"](x, 0.0), x)


def test_alphapo_meets_simpo():
    small, simpo = Options(alpha=1e-7), Options(alpha=0.0)
    assert float(PREFERENCE["alphapo"](PAIR, small)) == pytest.approx(float(PREFERENCE["simpo"](PAIR, simpo)), abs=1e-6)
    assert float(PREFERENCE["alphapo"](PAIR, simpo)) == float(PREFERENCE["simpo"](PAIR, simpo))


def test_wpo_weights_by_hand():
    # A uniform distribution of 4: log p = −log 4 and log Σp² = −log 4, so any token weighs 1.
    logps = torch.tensor([-math.log(4), -math.log(4), math.log(0.5), math.log(0.1)], requires_grad=True)
    collision = torch.tensor([-math.log(4), -math.log(4), math.log(0.25), math.log(0.4)])
    found = wpo_weights(logps, collision, torch.tensor([0, 0, 1, 1]), 3)
    assert found.tolist() == pytest.approx([1.0, math.sqrt(2 * 0.25), 1.0]) and not found.requires_grad
    assert wpo_pair_weights(torch.tensor([0.5, 2.0]), torch.tensor([0.5, 3.0])).tolist() == [0.25, 1.0]


def test_ld_weights_by_hand():
    found = ld_weights(torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 2, 2]), 0.3)
    assert found.tolist() == pytest.approx([1, 1, 0.3, 1])


# ---- unpaired --------------------------------------------------------------------------------------------------------

ROWS = Unpaired(tensor(-4, -9), tensor(-5, -7), torch.tensor([True, False]), kl=0.5, delta=0.25)  # ρ = 1, −2


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("kto", [1.5 * (1 - s(0.5 * 0.5)), 0.5 * (1 - s(0.5 * 2.5))]),
        ("apo_zero_unpaired", [1.5 * (1 - s(0.5)), 0.5 * s(-1.0)]),
        ("bco", [-1.5 * ls(0.25), -0.5 * ls(1.25)]),
    ],
)
def test_completions_by_hand(name: str, wanted: list[float]):
    options = UnpairedOptions(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)
    assert UNPAIRED[name](ROWS, options).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("name", UNPAIRED)
def test_unpaired_rows_say_what_they_read(name: str):
    row, options = UNPAIRED[name], UnpairedOptions(beta=0.5)
    base = row(ROWS, options).tolist()
    assert (row(replace(ROWS, kl=0.1), options).tolist() != base) == (row.batch == "kl")
    assert (row(replace(ROWS, delta=0.1), options).tolist() != base) == (row.batch == "delta")
    assert (row(replace(ROWS, udm=tensor(2.0, 2.0)), options).tolist() != base) == row.udm
    if row.udm:
        assert row(replace(ROWS, udm=tensor(2.0, 2.0)), options).tolist() == pytest.approx([base[0], 2 * base[1]])


@pytest.mark.parametrize("name", UNPAIRED)
def test_unpaired_extremes_are_finite(name: str):
    logps = torch.tensor(EXTREME * 2, requires_grad=True)
    loss = UNPAIRED[name](Unpaired(logps, None, torch.arange(10) < 5), UnpairedOptions())
    loss.sum().backward()
    assert loss.isfinite().all() and logps.grad.isfinite().all()


def test_the_kl_estimate():
    ratios = torch.tensor([1.0, 0.5, -0.3], requires_grad=True)
    assert float(kl_estimate(ratios)) == pytest.approx(0.4) and not kl_estimate(ratios).requires_grad
    assert float(kl_estimate(-ratios)) == 0 and float(kl_estimate(ratios[:0])) == 0


def test_udm_weights_and_running_mean():
    assert udm_weights(torch.tensor([0.5, 0.6, 0.01, 1.0])).tolist() == pytest.approx([1.0, 1.5, 0.5, 2.0])
    mean, count = running_mean(torch.tensor(1.0), torch.tensor(2.0), torch.tensor([4.0, 4.0]))
    assert (float(mean), float(count)) == (2.5, 4)


def test_unpaired_constants_are_checked():
    with pytest.raises(ConfigError, match="Did you mean 'kto'"):
        check_unpaired("ktoo", UnpairedOptions())
    with pytest.raises(ConfigError, match="desirable_weight=-1"):
        check_unpaired("kto", UnpairedOptions(desirable_weight=-1))
