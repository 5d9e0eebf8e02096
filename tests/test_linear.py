"""The head against full logits in float64."""

import pytest
import torch

from posttrain.loss.linear import HeadSpec, linear_scores
from posttrain.loss.nll import TOKEN_LOSSES, nll
from posttrain.types import ScoreRequest

N, H, V = 17, 24, 61


def make(seed=0, bias=False, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) * 0.3).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(V, (N,), generator=g)
    weights = torch.rand(N, generator=g)
    return hidden, weight, b, targets, weights


def reference(hidden, weight, bias, targets, spec, temperature=1.0):
    """Full logits in float64; returns leaves and log-probabilities, with grad."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    b = None if bias is None else bias.detach().double().requires_grad_()
    z = (h @ w.t() + (0 if b is None else b)) * spec.scale
    if spec.softcap is not None:
        z = spec.softcap * torch.tanh(z / spec.softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return (h, w, b), logp, logp.gather(1, targets[:, None])[:, 0]


SPECS = [
    HeadSpec(),
    HeadSpec(scale=0.5),
    HeadSpec(softcap=3.0),
    HeadSpec(scale=0.5, softcap=3.0, memory_bytes=1),  # nothing may be kept: everything is recomputed
]


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("planned", [True, False])
def test_c27_equals_full_logits(loss, bias, spec, planned):
    hidden, weight, b, targets, weights = make(bias=bias)
    fn = TOKEN_LOSSES[loss]
    (h, w, rb), logp, at = reference(hidden, weight, b, targets, spec, temperature=0.7)
    (fn(at, weights.double()).sum() * 0.25).backward()
    request = ScoreRequest(
        objective=(lambda lp, i: fn(lp, weights[i])) if planned else None,
        entropy=True,
        top1=True,
        mean_logit=True,
        log_collision=True,
        temperature=0.7,
    )
    scores = linear_scores(hidden, weight, targets, b, spec, request)
    total = scores.total if planned else fn(scores.logps, weights).sum()
    (total * 0.25).backward()
    assert torch.allclose(scores.logps.double(), at, atol=1e-5)
    assert torch.allclose(scores.entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-5)
    assert torch.allclose(scores.log_collision.double(), torch.logsumexp(2 * logp, -1), atol=1e-5)
    assert torch.equal(scores.top1.bool(), logp.argmax(-1) == targets)
    assert torch.allclose(hidden.grad.double(), h.grad, atol=1e-6)
    assert torch.allclose(weight.grad.double(), w.grad, atol=1e-6)
    if b is not None:
        assert torch.allclose(b.grad.double(), rb.grad, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 17, 64])
def test_c26_chunk_size_is_only_a_memory_knob(chunk):
    hidden, weight, _, targets, weights = make()
    (h, w, _), _, at = reference(hidden, weight, None, targets, HeadSpec())
    nll(at, weights.double()).sum().backward()
    scores = linear_scores(
        hidden, weight, targets, None, HeadSpec(chunk_tokens=chunk), ScoreRequest(lambda lp, i: nll(lp, weights[i]))
    )
    scores.total.backward()
    assert scores.logps.shape == (17,)
    assert torch.allclose(scores.total.double(), nll(at, weights.double()).sum(), atol=1e-5)
    assert torch.allclose(hidden.grad.double(), h.grad, atol=1e-6)
    assert torch.allclose(weight.grad.double(), w.grad, atol=1e-6)


def test_frozen_head_skips_the_weight_gradient():
    hidden, weight, _, targets, weights = make()
    weight.requires_grad_(False)
    products = profile(hidden, weight, targets, weights)
    assert weight.grad is None and hidden.grad is not None
    assert len(products) == 2  # logits and d hidden


def profile(hidden, weight, targets, weights):
    """(shape, dtype) of every large product of a planned forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
                a, b = args[-2:]
                if a.numel() + b.numel() > V:
                    seen.append((a.dtype, b.dtype))
            return func(*args, **(kwargs or {}))

    with Watch():
        scores = linear_scores(
            hidden, weight, targets, None, HeadSpec(), ScoreRequest(lambda lp, i: nll(lp, weights[i]))
        )
        scores.total.backward()
    return seen


def test_every_large_product_runs_in_bf16_and_none_is_repeated(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    hidden, weight, _, targets, weights = make()
    with torch.autocast("cpu", torch.bfloat16):
        products = profile(hidden, weight, targets, weights)
    assert products == [(torch.bfloat16, torch.bfloat16)] * 3
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("chunk", [None, 5])
def test_bf16_gradient_error_is_no_larger_than_full_logits_in_bf16(monkeypatch, chunk):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    hidden, weight, _, targets, weights = make()  # fp32 master weights, bf16 products
    (h, w, _), _, at = reference(hidden, weight, None, targets, HeadSpec())
    nll(at, weights.double()).sum().backward()
    full_h, full_w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        logp = torch.log_softmax(torch.nn.functional.linear(full_h, full_w).float(), -1).gather(1, targets[:, None])
        nll(logp[:, 0], weights).sum().backward()
        objective = ScoreRequest(lambda lp, i: nll(lp, weights[i]))
        linear_scores(hidden, weight, targets, None, HeadSpec(chunk_tokens=chunk), objective).total.backward()
    for ours, full, exact in ((hidden, full_h, h), (weight, full_w, w)):
        assert (ours.grad.double() - exact.grad).norm() <= 1.02 * (full.grad.double() - exact.grad).norm()


def test_cpu_without_bf16_units_multiplies_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    hidden, weight, _, targets, weights = make(dtype=torch.bfloat16)
    assert set(profile(hidden, weight, targets, weights)) == {(torch.float32, torch.float32)}


def test_nothing_is_formed_when_grad_is_off():
    hidden, weight, _, targets, weights = make()
    with torch.no_grad():
        products = []
        scores = linear_scores(
            hidden, weight, targets, None, HeadSpec(), ScoreRequest(lambda lp, i: nll(lp, weights[i]))
        )
    assert not scores.total.requires_grad and not products


def test_no_readouts_still_backpropagates():
    hidden, weight, _, _, _ = make()
    scores = linear_scores(
        hidden[:0], weight, torch.empty(0, dtype=torch.long), None, HeadSpec(), ScoreRequest(lambda lp, i: lp)
    )
    scores.total.backward()
    assert scores.total == 0 and weight.grad.abs().sum() == 0 and hidden.grad.abs().sum() == 0


# ---- gradients known late --------------------------------------------------------------------------------------------


def count_products(run):
    """How many products with the weight a call makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    ops = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default)

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in ops and args[-2].numel() + args[-1].numel() > V:
                Watch.seen += 1
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return Watch.seen


def late(hidden, weight, bias, targets, spec):
    """The loss of a sequence: a function of the sum of its log-probabilities."""
    logps = linear_scores(hidden, weight, targets, bias, spec, ScoreRequest(temperature=0.7)).logps
    return torch.nn.functional.softplus(-0.1 * logps.sum() - 4)


@pytest.mark.parametrize("spec", [*SPECS, HeadSpec(chunk_tokens=5), HeadSpec(softcap=3.0, chunk_tokens=5)])
def test_frozen_head_free_has_the_gradient_of_full_logits(spec):
    hidden, weight, _, targets, _ = make()
    weight.requires_grad_(False)
    (h, _, _), _, at = reference(hidden, weight, None, targets, spec, temperature=0.7)
    wanted = torch.nn.functional.softplus(-0.1 * at.sum() - 4)
    wanted.backward()
    found = late(hidden, weight, None, targets, spec)
    found.backward()
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert torch.allclose(hidden.grad.double(), h.grad, atol=1e-6) and h.grad.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("frozen", "spec", "products"),
    [
        (True, HeadSpec(), 2),  # logits, d hidden
        (True, HeadSpec(memory_bytes=1, chunk_tokens=64), 2),  # free: no budget is needed
        (False, HeadSpec(), 3),  # kept
        (False, HeadSpec(memory_bytes=1, chunk_tokens=64), 4),  # projected again
    ],
)
def test_products_of_a_loss_known_late(frozen, spec, products):
    hidden, weight, _, targets, _ = make()
    weight.requires_grad_(not frozen)
    assert count_products(lambda: late(hidden, weight, None, targets, spec).backward()) == products


def test_frozen_head_free_keeps_neither_logits_nor_weight():
    hidden, weight, bias, targets, _ = make(bias=True)
    weight.requires_grad_(False), bias.requires_grad_(False)
    logps = linear_scores(hidden, weight, targets, bias, HeadSpec(), ScoreRequest()).logps
    node = logps.grad_fn
    assert node.kept == [] and [None if x is None else tuple(x.shape) for x in node.saved_tensors][:3] == [
        (N, H),
        None,
        None,
    ]


def test_a_trained_bias_of_a_frozen_weight_gets_its_gradient():
    hidden, weight, bias, targets, _ = make(bias=True)
    weight.requires_grad_(False)
    (h, _, b), _, at = reference(hidden, weight, bias, targets, HeadSpec(), temperature=0.7)
    torch.nn.functional.softplus(-0.1 * at.sum() - 4).backward()
    late(hidden, weight, bias, targets, HeadSpec()).backward()
    assert torch.allclose(hidden.grad.double(), h.grad, atol=1e-6)
    assert torch.allclose(bias.grad.double(), b.grad, atol=1e-6)


def test_scores_of_a_frozen_head_form_nothing_without_grad():
    hidden, weight, _, targets, _ = make()
    with torch.no_grad():
        assert count_products(lambda: linear_scores(hidden, weight, targets, None, HeadSpec(), ScoreRequest())) == 1


def test_log_collision_is_the_log_of_the_sum_of_squares():
    from posttrain.loss.softmax import log_collision

    z = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1e4, 0.0, -1e4, 0.0]])
    assert log_collision(z).tolist() == pytest.approx([-1.386294, 0.0], abs=1e-6)
