"""The same small run under every strategy, on two ranks, and in one process: what each did."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import build as build_family
from laws.mutants import applied
from laws.runs import Run, same, scratch, sft
from peft import LoraConfig
from pool import POOL, PoolError
from safetensors.torch import load_file
from tiny import tiny_model, token_rows
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from posttrain.data.forest import build_forest
from posttrain.errors import NonFiniteError
from posttrain.model import scoring
from posttrain.model.load import prepare_model
from posttrain.parallel.params import whole
from posttrain.parallel.ranks import barrier
from posttrain.parallel.roles import prepare_role
from posttrain.trainer.config import load_options
from posttrain.trainer.manifest import damage, read_manifest
from posttrain.types import Row, ScoreRequest

ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    # ZeRO-3 would keep parameters as small as these whole.
    sizes_kept = {"stage3_param_persistence_threshold": 0}
    return {"deepspeed": {"zero_optimization": {"stage": stage, **sizes_kept}, **dict.fromkeys(sizes, "auto"), **more}}


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True},
    "fsdp2-sharded": {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
}


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Models built after a ZeRO-3 run are whole."""
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        gc.collect()


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """A fault is caught by comparing numbers, not by an exception on a rank."""
    with pytest.raises(AssertionError) as raised:
        yield
    assert not isinstance(raised.value, PoolError)


class _Gradients(TrainerCallback):
    """Those of the first step, whole. Under ZeRO they are not clipped yet."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.found:
            return
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.found[name] = _gradient(p, bool(args.deepspeed)).clone()


def _gradient(p: Any, deepspeed: bool) -> torch.Tensor:
    if not deepspeed:
        return whole(p.grad)
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(p)


def train(mutant: str | None = None, resume: str | None = None, **settings: Any) -> tuple[Run, dict[str, Any]]:
    """Train, save, load what was saved. The run's weights are the loaded ones."""
    with applied(mutant), clean():
        trainer = sft(**settings)
        gradients = _Gradients()
        trainer.add_callback(gradients)
        trainer.train(resume_from_checkpoint=resume)
        folder = f"{trainer.args.output_dir}/final"
        trainer.save_model(folder)
        barrier()
        parameters = list(trainer.model.parameters())
        facts = {
            "kind": str(trainer.accelerator.distributed_type),
            "wrapper": type(trainer.model_wrapped).__name__,
            "shards": sum(isinstance(p, DTensor) for p in parameters),
            "partitioned": sum("ds_id" in vars(p) for p in parameters),
            "parameters": len(parameters),
        }
        logs = [line for line in trainer.state.log_history if "loss" in line]
        evals = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        facts["evals"] = evals
        unset_hf_deepspeed_config()
        weights = reloaded(folder)
    return Run([line["loss"] for line in logs], gradients.found, weights, logs), facts


def reloaded(folder: str) -> dict[str, torch.Tensor]:
    """Weights of the model, or of the adapter, in a folder, as others load them."""
    adapter = Path(folder) / "adapter_model.safetensors"
    if adapter.exists():
        assert not (Path(folder) / "model.safetensors").exists()
        return load_file(adapter)
    return {n: p.detach().clone() for n, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


def on_two(strategy: str, **settings: Any) -> tuple[Run, dict[str, Any]]:
    """By two ranks, which must end alike."""
    settings.setdefault("output_dir", scratch())
    (first, facts), (second, _) = POOL.run(train, **STRATEGIES[strategy], **settings)
    assert first.losses == second.losses
    same(first, second, tolerance=0.0)
    return first, facts


def norms(one: Run) -> list[float]:
    return [line["grad_norm"] for line in one.logs]


def one_is_two(strategy: str, rows_a_step: int = 4, split: int = 1, mutant: str | None = None, **settings: Any) -> dict:
    """One process = two ranks: losses, first gradients, norms and saved weights. Returns what is known of the ranks."""
    one, _ = train(per_device_train_batch_size=rows_a_step, output_dir=scratch(), **copy.deepcopy(settings))
    two, facts = on_two(
        strategy,
        mutant=mutant,
        per_device_train_batch_size=rows_a_step // 2 // split,
        gradient_accumulation_steps=split,
        **settings,
    )
    same(one, two)
    assert norms(two) == pytest.approx(norms(one), rel=1e-5)
    return facts


def clipped_one_is_two(strategy: str) -> None:
    """As above with clipping at a third of the norm. ZeRO clips after the callback, so gradients are left out."""
    settings: dict[str, Any] = {"max_grad_norm": 0.5, "learning_rate": 2.0}
    one, _ = train(per_device_train_batch_size=4, output_dir=scratch(), **settings)
    two, _ = on_two(strategy, per_device_train_batch_size=2, **settings)
    assert norms(two) == pytest.approx(norms(one), rel=1e-5)
    assert min(norms(one)) > 1.0
    same(replace(one, gradients=one.weights), replace(two, gradients=two.weights))


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def adapted_one_is_two(strategy: str) -> None:
    """As above under LoRA, saved as an adapter alone."""
    one_is_two(strategy, peft_config=lora())


def mixture_one_is_two(strategy: str) -> None:
    """As above with experts and their balance loss, which weighs as much as the rest."""
    one_is_two(strategy, split=2, model=build_family("qwen3-moe"), router_aux_loss_coef=1.0)


def long_rope_one_is_two(strategy: str) -> None:
    """As above with rows on both sides of LongRoPE's border, all of the long ones on one rank in some steps."""
    lengths = (5, 50, 7, 9, 6, 8, 45, 44, 10, 5, 6, 7)  # the original context is 40
    rows = Dataset.from_list([{"input_ids": [(7 * i + j) % 250 for j in range(n)]} for i, n in enumerate(lengths)])
    settings = {"model": build_family("phi3-longrope"), "rows": rows, "train_sampling_strategy": "sequential"}
    one_is_two(strategy, split=2, gradient_checkpointing=True, **settings)


def head_adapted_one_is_two(strategy: str) -> None:
    """As above with an adapter on the head, whose own frozen weight peft then saves too."""
    one_is_two(strategy, peft_config=LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))


def half_copy_one_is_two(strategy: str) -> None:
    """Modules trained in full beside LoRA on a base in bfloat16: as one process, but for rounding."""
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["down_proj", "lm_head"])
    made = {"model": tiny_model("qwen3").bfloat16(), "peft_config": config, "bf16": True}
    one, _ = train(per_device_train_batch_size=4, **copy.deepcopy(made))
    two, _ = on_two(strategy, per_device_train_batch_size=2, **made)
    rounded = [name for name, w in two.weights.items() if w.dtype != torch.float32 or torch.equal(w, w.bfloat16())]
    assert not any("down_proj" in name or "lm_head" in name for name in rounded)
    same(one, two, tolerance=0.05)


def evaluated(strategy: str) -> dict[str, float]:
    with clean():
        trainer = sft(eval_rows=token_rows(5, seed=3), per_device_eval_batch_size=2, **STRATEGIES[strategy])
        before = trainer.evaluate()["eval_loss"]
        prepared = trainer.model_wrapped
        assert (trainer.evaluate()["eval_loss"], trainer.model_wrapped) == (before, prepared)
        trainer.train()
        return {"before": before, "after": trainer.evaluate()["eval_loss"]}


def evaluation_is_ones(strategy: str) -> None:
    """Evaluation before and after training, 5 rows, 2 at a time: one rank ends with an empty micro-batch."""
    one = sft(eval_rows=token_rows(5, seed=3), per_device_train_batch_size=4)  # the ranks have 2 rows each
    before = one.evaluate()["eval_loss"]
    one.train()
    after = one.evaluate()["eval_loss"]
    for two in POOL.run(evaluated, strategy=strategy):
        assert two["before"] == pytest.approx(before, rel=1e-5)
        assert two["after"] == pytest.approx(after, rel=1e-5)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def going_on(strategy: str, **settings: Any) -> tuple[Run, dict[str, Any], str]:
    """5 steps on two ranks that save after 2; their folder."""
    folder = scratch()
    settings = ADAM | {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, **settings}
    run, _ = on_two(strategy, per_device_train_batch_size=2, output_dir=folder, **copy.deepcopy(settings))
    manifest = read_manifest(Path(folder) / "checkpoint-2")
    assert manifest is not None
    assert manifest.ranks == 2
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= manifest.files.keys()
    assert damage(Path(folder) / "checkpoint-2") == []
    return run, settings, f"{folder}/checkpoint-2"


def resumed_is_whole(strategy: str, tolerance: float = 1e-6, **settings: Any) -> None:
    """Resumed by the same two ranks."""
    whole_run, settings, checkpoint = going_on(strategy, **settings)
    rest, _ = on_two(strategy, per_device_train_batch_size=2, resume=checkpoint, **settings)
    ends_alike(whole_run, rest, tolerance)


def resumed_by_one(strategy: str, **settings: Any) -> None:
    """Resumed by one process, which knows nothing of the strategy."""
    whole_run, settings, checkpoint = going_on(strategy, **settings)
    rest, _ = train(per_device_train_batch_size=4, resume=checkpoint, output_dir=scratch(), **settings)
    ends_alike(whole_run, rest)


def ones_resumed_by_two(strategy: str) -> None:
    """A checkpoint of one process goes on under a strategy."""
    folder = scratch()
    settings = ADAM | {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    whole_run, _ = train(per_device_train_batch_size=4, output_dir=folder, **settings)
    rest, _ = on_two(strategy, per_device_train_batch_size=2, resume=f"{folder}/checkpoint-2", **settings)
    ends_alike(whole_run, rest)


def ends_alike(a: Run, b: Run, tolerance: float = 1e-5) -> None:
    same(replace(a, gradients=a.weights), replace(b, gradients=b.weights), tolerance)


# ---- roles, rounding, bad steps --------------------------------------------------------------------------------------


def score_reference(strategy: str | None) -> dict[str, Any]:
    """A frozen second model beside a trained one: its scores before and after, and what it holds."""
    with clean():
        other = tiny_model("qwen3", seed=5)
        trainer = sft(max_steps=2, **ADAM, **STRATEGIES.get(strategy or "", {}))
        reference = prepare_model(other, load_options(trainer.args)).model
        if strategy is not None:
            reference = prepare_role(reference, "reference", trainer.accelerator)
        batch = build_forest([Row(list(range(5, 25)), [1.0] * 20)])

        @torch.no_grad()
        def score() -> torch.Tensor:
            return reference(token_batch=batch, score_request=ScoreRequest()).logps.clone()

        before = score()
        trainer.train()
        after = score()
        parameters = list(reference.parameters())
        stepped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        return {
            "before": before,
            "after": after,
            "frozen": not any(p.requires_grad or p.grad is not None for p in parameters),
            "unoptimized": not stepped & {id(p) for p in parameters},
            "shards": all(isinstance(p, DTensor) for p in parameters),
            "partitioned": all("ds_id" in vars(p) and p.numel() == 0 for p in parameters),
        }


def reference_scores_alike(strategy: str) -> dict[str, Any]:
    one = score_reference(None)
    first, second = POOL.run(score_reference, strategy=strategy)
    for two in (first, second):
        torch.testing.assert_close(two["before"], one["before"], rtol=1e-5, atol=1e-6)
        assert torch.equal(two["before"], two["after"])
        assert two["frozen"]
        assert two["unoptimized"]
    return first


FINE = 1 + 2**-12  # bfloat16 would make it 1


def pass_through(strategy: str, mutant: str | None = None) -> dict[str, Any]:
    """One step in bfloat16; then floats into the wrapped model, and scores out of it."""
    seen: dict[str, Any] = {}
    own = scoring._score

    def score(model: Any, batch: Any, request: Any) -> Any:
        seen["weights"], seen["temperature"] = batch.weights.clone(), request.temperature
        return own(model, batch, request)

    with applied(mutant), clean(), pytest.MonkeyPatch.context() as patch:
        trainer = sft(bf16=True, max_steps=1, **STRATEGIES[strategy])
        trainer.train()
        head = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings()
        head.register_forward_pre_hook(
            lambda module, args: seen.update(hidden=args[0].dtype, weight=module.weight.dtype)
        )
        patch.setattr(scoring, "_score", score)
        batch = build_forest([Row([5, 6, 7, 8, 9], [FINE] * 5)])
        request = ScoreRequest(objective=lambda logps, i: batch.weights[i] + 0 * logps, temperature=FINE)
        with torch.no_grad():
            scores = trainer.model_wrapped(token_batch=batch, score_request=request)
    return seen | {"total": scores.total, "logps": scores.logps, "count": len(batch.weights)}


def nothing_is_rounded(strategy: str, mutant: str | None = None) -> None:
    for seen in POOL.run(pass_through, strategy=strategy, mutant=mutant):
        assert seen["weights"].dtype == torch.float32
        assert (seen["weights"] == FINE).all()
        assert seen["temperature"] == FINE
        assert seen["total"].dtype == seen["logps"].dtype == torch.float32
        assert seen["total"].item() == seen["count"] * FINE
        assert not torch.equal(seen["logps"], seen["logps"].bfloat16().float())
        if strategy != "ddp":  # under autocast the last norm gives float32
            assert seen["hidden"] == seen["weight"] == torch.bfloat16


def train_poisoned(strategy: str) -> str:
    """Two rows a step, one a rank; the second meets a token whose embedding is NaN."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 299, 10]}])
    settings = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}
    with clean():
        trainer = sft(model=model, rows=rows, **settings, **STRATEGIES[strategy])
        try:
            trainer.train()
        except NonFiniteError as error:
            return str(error)
    return ""


def train_with_an_empty_step(strategy: str, rows_a_step: int) -> tuple[list[float], list[bool]]:
    """Three steps of Adam, the second without units. Losses, and whether weights moved in each step."""
    with clean():
        trainer = sft(per_device_train_batch_size=rows_a_step, **ADAM, **STRATEGIES[strategy])
        own_unit, own_loss = trainer.unit, trainer.loss_step
        watch = _Watch()
        trainer.add_callback(watch)
        empty = lambda: float(trainer.state.global_step != 1)  # noqa: E731
        trainer.unit = lambda exp: own_unit(exp) * empty()

        def loss_step(model: Any, exp: Any) -> Any:
            output = own_loss(model, exp)
            return replace(output, total=output.total * empty())

        trainer.loss_step = loss_step
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line], watch.moved


class _Watch(TrainerCallback):
    def __init__(self) -> None:
        self.moved: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._before = _probe(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.moved.append(not torch.equal(self._before, _probe(model)))


def _probe(model: Any) -> torch.Tensor:
    parameter = next(p for p in model.parameters() if p.requires_grad)
    if "ds_id" in vars(parameter):
        return parameter.ds_tensor.detach().clone()
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()


def an_empty_step_changes_nothing(strategy: str) -> None:
    losses, moved = train_with_an_empty_step("ddp", 4)
    assert moved == [True, False, True]
    for two, two_moved in POOL.run(train_with_an_empty_step, strategy=strategy, rows_a_step=2):
        assert two == pytest.approx(losses, rel=1e-5)
        assert two_moved == moved


def named_is_object(strategy: str) -> None:
    """A model loaded by name, which ZeRO-3 cuts as it is read."""
    folder = scratch()
    tiny_model("qwen3").save_pretrained(folder)
    one, _ = train(per_device_train_batch_size=4, output_dir=scratch())
    two, _ = on_two(strategy, model=folder, per_device_train_batch_size=2)
    same(one, two)
