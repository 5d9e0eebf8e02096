"""The public fused losses against the plain formula on full logits in float64: values, gradients, products."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear import count_products

import posttrain.losses
from posttrain.errors import ConfigError
from posttrain.loss import fused
from posttrain.loss.divergence import generalized_jsd
from posttrain.loss.fused import FusedLinearDPOLoss, FusedLinearGRPOLoss, FusedLinearJSDLoss, FusedLinearKTOLoss
from posttrain.loss.policy import POLICY, PolicyOptions, Sampled, policy_losses
from posttrain.loss.preference import PREFERENCE, Options, Pairs, aot_partners
from posttrain.loss.unpaired import UNPAIRED, Unpaired, UnpairedOptions

P, T, H, V, IGNORED = 3, 7, 12, 61, -100
LENGTHS = [5, 3, 1, 4, 6, 2, 3, 5, 2]  # trained positions of each row, after a prompt of at least one


class Case:
    """Random rows, their head, and the same in float64."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(rows, T, H, generator=g)
        self.weight = torch.randn(V, H, generator=g) * 0.4
        self.bias = torch.randn(V, generator=g) * 0.2
        self.ref_hidden = self.hidden + 0.3 * torch.randn(rows, T, H, generator=g)
        self.ref_weight = self.weight + 0.05 * torch.randn(V, H, generator=g)
        self.ref_bias = self.bias + 0.1
        self.target = torch.randint(V, (rows, T), generator=g)
        self.trained = torch.arange(T) >= T - torch.tensor(LENGTHS[:rows])[:, None]
        self.target[~self.trained] = IGNORED
        self.leaves = [x.requires_grad_() for x in (self.hidden, self.weight, self.bias)]
        self.exact = [x.detach().double().requires_grad_() for x in self.leaves]

    def logps(self, temperature: float = 1.0) -> torch.Tensor:
        """log π of each target [rows, T] from full logits in float64, 0 where it is not trained."""
        return self._at_target(*self.exact, temperature)

    def ref_logps(self, temperature: float = 1.0) -> torch.Tensor:
        exact = (x.detach().double() for x in (self.ref_hidden, self.ref_weight, self.ref_bias))
        return self._at_target(*exact, temperature)

    def _at_target(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, temperature: float) -> Any:
        logp = torch.log_softmax((hidden @ weight.t() + bias) / temperature, -1)
        return logp.gather(-1, self.target.clamp(min=0)[..., None])[..., 0] * self.trained

    @property
    def reference(self) -> dict[str, torch.Tensor]:
        return {"ref_input": self.ref_hidden, "ref_weight": self.ref_weight, "ref_bias": self.ref_bias}

    def agrees(self, loss: torch.Tensor, wanted: torch.Tensor, atol: float = 2e-6) -> None:
        """Same loss, and after backward passes of 0.5 times it the same gradients."""
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
        (0.5 * loss).backward()
        (0.5 * wanted).backward()
        for found, exact in zip(self.leaves, self.exact, strict=True):
            size = max(1.0, float(exact.grad.abs().max()))
            assert torch.allclose(found.grad.double(), exact.grad, atol=atol * size) and exact.grad.abs().max() > 1e-6


EXTRA = {"simpo": {"simpo_gamma": 0.3}, "cpo": {"cpo_alpha": 0.7}, "alphapo": {"alpha": 0.4}, "tpo": {"tpo_alpha": 0.6}}


@pytest.mark.parametrize("memory_mb", [1024, 1e-3])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", PREFERENCE)
def test_dpo_equals_full_logits(name: str, average: bool, memory_mb: float):
    row = PREFERENCE[name]
    case = Case(P * (3 if row.third else 2))
    constants = {"beta": 0.3} if "beta" in row.reads else {}
    constants |= {"label_smoothing": 0.1} if "label_smoothing" in row.reads else {}
    extra = EXTRA.get(name, {})
    loss_fn = FusedLinearDPOLoss(
        loss_type=name, average_log_prob=average, memory_mb=memory_mb, options=extra, **constants
    )
    given = case.reference if row.reference else {}
    loss, metrics = loss_fn(
        case.weight, case.hidden, case.target, case.bias, **given, delta=0.1 if row.batch == "delta" else 0.0
    )

    tokens = case.trained.sum(1)
    used, ref = case.logps().sum(1), case.ref_logps().sum(1)
    if average:
        used, ref, tokens = used / tokens, ref / tokens, torch.ones_like(tokens)
    used, ref, tokens = (x.split(P) for x in (used, ref, tokens))
    pairs = {"ref_chosen": ref[0], "ref_rejected": ref[1]} if row.reference else {}
    pairs |= {"third": used[2], "third_tokens": tokens[2]} if row.third else {}
    pairs = Pairs(used[0], used[1], tokens[0], tokens[1], **pairs, delta=0.1)
    pairs = Pairs(**{**vars(pairs), **aot_partners(pairs)})
    options = Options(**constants, **extra)
    wanted = row(pairs, options).mean()
    assert torch.allclose(metrics[0].double(), used[0]) and torch.allclose(metrics[1].double(), used[1])
    c, r = pairs.log_ratios()
    assert torch.allclose(metrics[5].double(), options.beta * c, atol=1e-5)
    assert torch.allclose(metrics[6].double(), options.beta * r, atol=1e-5)
    assert not any(x.requires_grad for x in metrics)
    case.agrees(loss, wanted)


def test_a_mix_the_nll_a_margin_and_weights():
    case = Case(2 * P)
    loss_fn = FusedLinearDPOLoss(
        loss_type=["sigmoid", "sft"], loss_weights=[0.8, 0.2], compute_nll_loss=True, alpha=0.5
    )
    margin, weights = torch.tensor([0.1, 0.0, 0.3]), torch.tensor([1.0, 0.5, 2.0])
    loss, metrics = loss_fn(case.weight, case.hidden, case.target, case.bias, **case.reference, pair_weights=weights)
    logps, tokens = case.logps().sum(1), case.trained.sum(1)
    c, r = (logps - case.ref_logps().sum(1)).split(P)
    nll = -logps[:P].sum() / tokens[:P].sum()
    per_pair = 0.8 * -F.logsigmoid(0.1 * (c - r)) + 0.2 * -logps[:P] / tokens[:P]
    assert metrics[4].item() == pytest.approx(nll.item(), rel=1e-5)
    case.agrees(loss, (per_pair * weights).mean() + 0.5 * nll)
    with_margin = FusedLinearDPOLoss()(
        case.weight, case.hidden, case.target, case.bias, **case.reference, margin=margin
    )
    assert with_margin[0].item() == pytest.approx(-F.logsigmoid(0.1 * (c - r) - margin).mean().item(), rel=1e-5)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", UNPAIRED)
def test_kto_equals_full_logits(name: str, average: bool):
    case, row = Case(5), UNPAIRED[name]
    labels = torch.tensor([True, False, False, True, False])
    given = {"kl": torch.tensor(0.4)} if row.batch == "kl" else {"delta": 0.2} if row.batch == "delta" else {}
    given |= {"udm": torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5])} if row.udm else {}
    loss_fn = FusedLinearKTOLoss(
        beta=0.3, use_ref_model=True, average_log_prob=average, loss_type=name, desirable_weight=1.4
    )
    loss, metrics = loss_fn(case.hidden, case.weight, case.target, case.bias, labels, **case.reference, **given)
    tokens = case.trained.sum(1) if average else 1
    logps, ref = case.logps().sum(1) / tokens, case.ref_logps().sum(1) / tokens
    wanted = UNPAIRED[name](
        Unpaired(logps, ref, labels, given.get("kl", 0.0), given.get("delta", 0.0), given.get("udm")),
        UnpairedOptions(0.3, 1.4, 1.0),
    ).mean()
    assert metrics[0].item() == pytest.approx(logps[labels].sum().item(), rel=1e-5)
    assert metrics[1].item() == pytest.approx(logps[~labels].sum().item(), rel=1e-5)
    assert metrics[4].item() == pytest.approx(0.3 * (logps - ref)[labels].sum().item(), rel=1e-4)
    case.agrees(loss, wanted)


def units(name: str, mask: torch.Tensor) -> float:
    unit = POLICY[name].unit
    return {"tokens": mask.sum().item(), "sequences": len(mask), "max_length": 9 * len(mask)}[unit]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", POLICY)
def test_grpo_equals_full_logits(name: str, level: str, old: bool):
    if level not in POLICY[name].levels:
        level = "token"
    case = Case(5)
    advantages = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.8])
    high = 1.1 if name == "cispo" else 0.25
    before = (case.logps(0.8) + 0.15 * torch.randn(5, T, generator=torch.Generator().manual_seed(4))).detach()
    ratio = 0.5 + torch.rand(5, T, generator=torch.Generator().manual_seed(5))
    loss_fn = FusedLinearGRPOLoss(
        beta=0.05, loss_type=name, epsilon_high=high, importance_sampling_level=level, temperature=0.8,
        max_completion_length=9, delta=1.5, use_bias_correction_kl=True,
    )  # fmt: skip
    ids, mask = case.target.clamp(min=0), case.trained.long()
    given = {"old_per_token_logps": before.float()} if old else {}
    loss, metrics = loss_fn(
        case.hidden, case.weight, ids, mask, advantages, case.bias, **case.reference, **given, vllm_is_ratio=ratio
    )
    row, position = case.trained.nonzero(as_tuple=True)
    tokens = Sampled(
        case.logps(0.8)[row, position], advantages.double()[row], row, 5, before[row, position] if old else None,
        case.ref_logps(0.8)[row, position], ratio.double()[row, position],
    )  # fmt: skip
    options = PolicyOptions(0.05, 0.2, high, 1.5, level, use_bias_correction_kl=True)  # pyright: ignore[reportArgumentType]
    wanted = policy_losses(name, tokens, options).sum() / units(name, mask)
    assert len(metrics) == 2 and not any(x.requires_grad for x in metrics)
    case.agrees(loss, wanted, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("hard", [0.0, 0.4])
@pytest.mark.parametrize("memory_mb", [1024, 1e-3])
def test_jsd_equals_full_logits(beta: float, hard: float, memory_mb: float):
    case = Case(4)
    G = 9
    teacher_hidden, teacher_weight = torch.randn(4, T, G), torch.randn(V, G)
    loss_fn = FusedLinearJSDLoss(hard, 0.7, beta, temperature=1.5, return_soft_hard_loss=True, memory_mb=memory_mb)
    loss, soft, hard_loss = loss_fn(case.hidden, case.weight, teacher_hidden, teacher_weight, case.target, case.bias)
    hidden, weight, bias = case.exact
    student = torch.log_softmax((hidden @ weight.t() + bias) / 1.5, -1)[case.trained]
    teacher = torch.log_softmax(teacher_hidden.double() @ teacher_weight.double().t() / 1.5, -1)[case.trained]
    wanted_soft = generalized_jsd(student, teacher, beta).mean()
    wanted_hard = -case.logps().sum() / case.trained.sum()
    assert soft.item() == pytest.approx(wanted_soft.item(), rel=1e-5)
    assert hard_loss.item() == pytest.approx(wanted_hard.item(), rel=1e-5)
    case.agrees(loss, hard * wanted_hard + 0.7 * wanted_soft)
    student_flat, teacher_flat = case.hidden.flatten(0, 1), teacher_hidden.flatten(0, 1)
    flat_fn = FusedLinearJSDLoss(hard, 0.7, beta, temperature=1.5)
    flat = flat_fn(student_flat, case.weight, teacher_flat, teacher_weight, case.target.flatten(), case.bias)
    assert flat.item() == pytest.approx(loss.item())


# ---- what is projected -----------------------------------------------------------------------------------------------


def test_positions_that_are_not_trained_are_not_projected():
    case = Case(2 * P)
    case.hidden.data[~case.trained] = math.nan
    loss, _ = FusedLinearDPOLoss(use_ref_model=False)(case.weight, case.hidden, case.target, case.bias)
    loss.backward()
    assert loss.isfinite() and case.weight.grad.isfinite().all()
    assert (case.hidden.grad[~case.trained] == 0).all() and case.hidden.grad[case.trained].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "frozen", "products"),
    [("dpo", False, 3), ("dpo", True, 2), ("kto", True, 2), ("dapo", False, 3), ("dapo", True, 2), ("gspo", True, 2)],
)
def test_no_product_is_repeated(name: str, frozen: bool, products: int):
    case = Case(2 * P)
    case.weight.requires_grad_(not frozen), case.bias.requires_grad_(not frozen)
    labels, mask = torch.arange(2 * P) < P, case.trained.long()

    def run() -> None:
        if name == "dpo":
            loss = FusedLinearDPOLoss(use_ref_model=False)(case.weight, case.hidden, case.target, case.bias)[0]
        elif name == "kto":
            loss = FusedLinearKTOLoss()(case.hidden, case.weight, case.target, case.bias, labels)[0]
        else:
            grpo = FusedLinearGRPOLoss(beta=0.0, loss_type=name)
            ids = case.target.clamp(min=0)
            loss = grpo(case.hidden, case.weight, ids, mask, torch.ones(2 * P), case.bias)[0]
        loss.backward()

    assert count_products(run) == products
    assert (case.weight.grad is None) == frozen


def test_products_are_in_the_autocast_dtype(monkeypatch: pytest.MonkeyPatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
                seen.update(x.dtype for x in args[-2:])
            return func(*args, **(kwargs or {}))

    case = Case(2 * P)
    with Watch(), torch.autocast("cpu", torch.bfloat16):
        loss, _ = FusedLinearDPOLoss()(case.weight, case.hidden, case.target, case.bias, **case.reference)
        teacher = torch.randn(2 * P, T, H), torch.randn(V, H)
        loss = loss + FusedLinearJSDLoss()(case.hidden, case.weight, *teacher, case.target, case.bias)
    with Watch():
        loss.backward()
    assert seen == {torch.bfloat16} and case.weight.grad.dtype == torch.float32


def test_rows_of_one_position():
    case = Case(2 * P)
    hidden, target = case.hidden[:, -1:], case.target[:, -1:]
    loss, (chosen, *_) = FusedLinearDPOLoss(use_ref_model=False)(case.weight, hidden, target, case.bias)
    loss.backward()
    assert torch.allclose(chosen.double(), case.logps()[:P, -1]) and case.hidden.grad[:, -1].abs().sum() > 0


def test_an_empty_completion_is_a_finite_zero():
    case = Case(2 * P)
    case.target[0] = IGNORED
    for name in PREFERENCE:
        if not PREFERENCE[name].third and name != "exo_pair":
            given = case.reference if PREFERENCE[name].reference else {}
            loss, _ = FusedLinearDPOLoss(loss_type=name)(case.weight, case.hidden, case.target, case.bias, **given)
            loss.backward()
            assert loss.isfinite() and case.hidden.grad.isfinite().all() and (case.hidden.grad[0] == 0).all()


@pytest.mark.parametrize("name", [*POLICY])
def test_a_batch_without_a_trained_token_has_a_graph(name: str):
    case = Case(2)
    grpo = FusedLinearGRPOLoss(beta=0.0, loss_type=name, max_completion_length=4)
    loss, _ = grpo(
        case.hidden, case.weight, case.target.clamp(min=0), torch.zeros(2, T, dtype=torch.long), torch.ones(2)
    )
    loss.backward()
    assert loss == 0 and case.weight.grad.abs().sum() == 0 and case.hidden.grad.abs().sum() == 0


# ---- bad calls -------------------------------------------------------------------------------------------------------


def test_a_call_that_cannot_be_right_is_an_error():
    case = Case(2 * P)
    plain = (case.weight, case.hidden, case.target, case.bias)
    dpo = FusedLinearDPOLoss
    with pytest.raises(ConfigError, match="ref_input and ref_weight are needed"):
        dpo()(*plain)
    with pytest.raises(ConfigError, match="ref_input has no effect"):
        dpo(loss_type="simpo")(*plain, **case.reference)
    with pytest.raises(ConfigError, match=r"margin has no effect.*It is read by"):
        dpo(loss_type="ipo")(*plain, **case.reference, margin=torch.zeros(P))
    with pytest.raises(ConfigError, match="5 rows"):
        dpo(use_ref_model=False)(case.weight, case.hidden[:5], case.target[:5])
    with pytest.raises(ConfigError, match="Shift the targets first"):
        dpo(use_ref_model=False)(case.weight, case.hidden, case.target[:, 1:])
    with pytest.raises(ConfigError, match="lin_weight 11"):
        dpo(use_ref_model=False)(case.weight[:, 1:], case.hidden, case.target)
    with pytest.raises(ConfigError, match=r"'gamma'\] is not among"):
        dpo(options={"gamma": 1.0})
    with pytest.raises(ConfigError, match="need as many weights"):
        dpo(loss_type=["sigmoid", "sft"], loss_weights=[1.0])
    with pytest.raises(ConfigError, match="memory_mb=0"):
        dpo(memory_mb=0)
    kto = (case.hidden, case.weight, case.target, case.bias)
    with pytest.raises(ConfigError, match=r"bool tensor \[6\], not torch.int64"):
        FusedLinearKTOLoss()(*kto, torch.ones(6, dtype=torch.long))
    with pytest.raises(ConfigError, match="They go together"):
        FusedLinearKTOLoss(use_ref_model=True)(*kto, torch.ones(6, dtype=torch.bool))
    with pytest.raises(ConfigError, match="kl has no effect"):
        FusedLinearKTOLoss(loss_type="bco")(*kto, torch.ones(6, dtype=torch.bool), kl=torch.tensor(0.1))
    with pytest.raises(ConfigError, match="use_ref_model=False"):
        FusedLinearGRPOLoss(use_ref_model=False)
    with pytest.raises(ConfigError, match="max_completion_length=None"):
        FusedLinearGRPOLoss(loss_type="dr_grpo")
    with pytest.raises(ConfigError, match="pass ref_per_token_logps"):
        FusedLinearGRPOLoss()(case.hidden, case.weight, case.target.clamp(min=0), case.trained, torch.ones(6))


def test_c66_vocabularies_that_differ_are_named():
    case = Case(2)
    with pytest.raises(ConfigError, match="student_weight has 61 rows and teacher_weight 72"):
        FusedLinearJSDLoss()(case.hidden, case.weight, torch.randn(2, T, 5), torch.randn(72, 5), case.target)


def test_a_sharded_weight_is_refused():
    class DTensor(torch.Tensor):
        pass

    case = Case(2 * P)
    with pytest.raises(ConfigError, match="lin_weight is a DTensor"):
        FusedLinearDPOLoss(use_ref_model=False)(case.weight.detach().as_subclass(DTensor), case.hidden, case.target)


def test_the_public_module_has_the_same_names():
    assert posttrain.losses.__all__ == fused.__all__
    assert all(getattr(posttrain.losses, name) is getattr(fused, name) for name in fused.__all__)


# ---- two processes ---------------------------------------------------------------------------------------------------


def averaged_gradients(name: str, strategy: str) -> list[torch.Tensor]:
    """On a rank: gradients of the head's weight and of a layer below, by DDP or FSDP2, of this rank's rows."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: Any = Model(name)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    rows = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)  # uneven ranks
    model(rows).backward()
    found = [p.grad for p in model.parameters()]
    return [(g.full_tensor() if strategy == "fsdp2" else g).detach() for g in found]


class Model(torch.nn.Module):
    """A layer and a head, whose forward is a fused loss of some of five rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.case = Case(5)
        g = torch.Generator().manual_seed(9)
        self.layer = torch.nn.Parameter(torch.randn(H, H, generator=g) * 0.3)
        self.weight = torch.nn.Parameter(self.case.weight.detach().clone())
        self.loss = FusedLinearGRPOLoss(beta=0.0, loss_type=name)

    def forward(self, rows: slice) -> torch.Tensor:
        case = self.case
        hidden, ids = case.hidden.detach()[rows] @ self.layer, case.target.clamp(min=0)[rows]
        return self.loss(hidden, self.weight, ids, case.trained.long()[rows], torch.arange(1.0, 6.0)[rows])[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["dapo", "vespo"])
def test_gradients_averaged_over_uneven_ranks_are_those_of_the_batch(name: str, strategy: str):
    from pool import POOL

    model = Model(name)
    model(slice(0, 5)).backward()
    for found in POOL.run(averaged_gradients, name=name, strategy=strategy):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, atol=1e-6) and parameter.grad.abs().max() > 1e-3
