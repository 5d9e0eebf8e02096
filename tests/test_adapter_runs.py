"""Adapters through `SFTTrainer`: only theirs moves, the loss is the model's own, and what is saved, gone on with or
merged gives the same logits."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from data_fixtures import CHATML, byte_tokenizer
from datasets import Dataset
from laws.runs import FIELDS, Run, bit_equal, run, same, scratch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from pool import POOL
from tiny import SHAPE, tiny_model, token_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from posttrain import (
    ModelConfig,
    SFTConfig,
    SFTTrainer,
    clone_chat_template,
    get_peft_config,
    get_quantization_config,
)
from posttrain.cli.main import main
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.model.load import LoadOptions, base_model, prepare_model
from posttrain.model.merge import merge_adapter

IDS = torch.tensor([[5, 9, 11, 200, 7, 33, 250]])
ON: dict[str, Any] = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": ["q_proj"]}


@dataclass(frozen=True)
class Kind:
    """An adapter, and the base it goes on."""

    base: str
    config: Any


TOKENS = [*range(3, 120), 33 + 128]
KINDS = {
    "lora": Kind("llama", LoraConfig(**ON)),
    "rslora": Kind("llama", LoraConfig(**ON, use_rslora=True)),
    "dora": Kind("llama", LoraConfig(**ON | {"target_modules": ["q_proj", "down_proj"]}, use_dora=True)),
    "on the head": Kind("llama", LoraConfig(**ON | {"target_modules": ["q_proj", "lm_head"]})),
    "dora on the head": Kind("llama", LoraConfig(**ON | {"target_modules": ["q_proj", "lm_head"]}, use_dora=True)),
    "head alone": Kind("llama", LoraConfig(**ON | {"target_modules": ["lm_head"]})),
    "dora, head alone": Kind("llama", LoraConfig(**ON | {"target_modules": ["lm_head"]}, use_dora=True)),
    "pissa": Kind("llama", LoraConfig(**ON, init_lora_weights="pissa")),
    "on a tied head": Kind("tied", LoraConfig(**ON | {"target_modules": ["q_proj", "lm_head"]})),
    "on both ends, tied": Kind("tied", LoraConfig(**ON | {"target_modules": ["embed_tokens", "lm_head"]})),
    "on both ends, kept tied": Kind(
        "tied", LoraConfig(**ON | {"target_modules": ["embed_tokens", "lm_head"]}, ensure_weight_tying=True)
    ),
    "modules to save": Kind("llama", LoraConfig(**ON, modules_to_save=["embed_tokens", "lm_head"])),
    "head to save, tied": Kind("tied", LoraConfig(**ON, modules_to_save=["lm_head"])),
    "tokens": Kind("llama", LoraConfig(**ON, trainable_token_indices=TOKENS)),
    "tokens, tied": Kind("tied", LoraConfig(**ON, trainable_token_indices=TOKENS)),
    "ia3": Kind("llama", IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha on the head": Kind("llama", LoHaConfig(r=2, target_modules=["q_proj", "lm_head"])),
    "experts": Kind(
        "moe",
        LoraConfig(
            **ON | {"target_modules": ["o_proj"]},
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ),
}


@pytest.fixture(scope="module")
def bases() -> dict[str, str]:
    """Folders that load by name."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    models = {
        "llama": tiny_model("llama"),
        "tied": tiny_model("llama", tie_word_embeddings=True),
        "moe": AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **experts)),
        "bfloat16": tiny_model("llama").bfloat16(),
        "wide": tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16),
        "small vocabulary": tiny_model("llama", vocab_size=257),
        "small vocabulary, tied": tiny_model("llama", vocab_size=257, tie_word_embeddings=True),
    }
    found = {}
    for name, model in models.items():
        found[name] = scratch()
        model.save_pretrained(found[name])
        small = name.startswith("small")
        (byte_tokenizer(special=(), eos="<pad>") if small else byte_tokenizer()).save_pretrained(found[name])
    return found


def trainer(model: Any, peft_config: Any = None, rows: Any = None, **given: Any) -> SFTTrainer:
    named = {k: given.pop(k) for k in ("quantization_config", "processing_class", "eval_dataset") if k in given}
    fields = {"output_dir": scratch(), "router_aux_loss_coef": 0.0} | FIELDS | given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = SFTConfig(**fields)
        return SFTTrainer(model, args, train_dataset=rows or token_rows(), peft_config=peft_config, **named)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.detach().float()


def own_loss(model: Any, rows: Any) -> float:
    """Mean over the targets, from the model's own forward."""
    total = count = 0.0
    model.eval()
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        with torch.no_grad():
            targets = int((labels[0, 1:] != -100).sum())
            total += model(input_ids=ids, labels=labels, use_cache=False).loss.item() * targets
            count += targets
    return total / count


@pytest.mark.parametrize("name", KINDS)
def test_trained_saved_gone_on_with_and_merged(name: str, bases: dict[str, str]):
    kind = KINDS[name]
    built = trainer(bases[kind.base], kind.config)
    before = {n: p.detach().clone() for n, p in built.model.named_parameters()}
    assert built.evaluate(token_rows(4, seed=9))["eval_loss"] == pytest.approx(
        own_loss(built.model, token_rows(4, seed=9)), abs=1e-5
    )
    run(built)
    moved = {n for n, p in built.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in built.model.named_parameters() if p.requires_grad} != set()
    own = ("lora_", "ia3_", "hada_", "modules_to_save", "trainable_tokens_delta")
    assert all(any(part in n for part in own) for n in moved)
    loss = built.evaluate(token_rows(4, seed=9))["eval_loss"]
    assert loss == pytest.approx(own_loss(built.model, token_rows(4, seed=9)), abs=1e-5)

    built.save_model(folder := scratch())
    want = logits(built.model)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[kind.base]), folder)
    assert torch.equal(logits(plain), want)  # loads without us
    again = trainer(folder)  # its folder is a model's name
    assert torch.equal(logits(again.model), want)
    assert again.evaluate(token_rows(4, seed=9))["eval_loss"] == pytest.approx(loss, abs=1e-6)
    held = {n: p.detach().clone() for n, p in again.model.named_parameters()}
    run(again)
    assert {n for n, p in again.model.named_parameters() if not torch.equal(p, held[n])} == moved

    merged = merge_adapter(plain)
    torch.testing.assert_close(logits(merged), want, rtol=0, atol=1e-5 * want.abs().max().item())
    merged.save_pretrained(whole := scratch())
    loaded = AutoModelForCausalLM.from_pretrained(whole)
    assert torch.equal(logits(loaded), logits(merged))
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (name in ("on both ends, kept tied", "tokens, tied"))


def test_peft_would_add_to_both_ends_of_a_tied_model(bases: dict[str, str]):
    """What `merge_adapter` is for: peft's own merge of a tied head moves the embedding too."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["tied"]), KINDS["on a tied head"].config)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p += 0.3
    want = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = logits(model.merge_and_unload())
    assert (wrong - want).abs().max() > 0.01 * want.abs().max()


# ---- laws: adapters on the head and modules trained in full ----------------------------------------------------------

LAWFUL = ["on the head", "modules to save", "tokens, tied", "dora on the head"]


def lawful(name: str, bases: dict[str, str], **fields: Any) -> Any:
    return trainer(bases[KINDS[name].base], KINDS[name].config, **fields)


@pytest.mark.parametrize("name", LAWFUL)
def test_accumulation_chunks_and_checkpointing_change_nothing(name: str, bases: dict[str, str]):
    one = run(lawful(name, bases, per_device_train_batch_size=4))
    for fields in (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "head_chunk_tokens": 3},
        {"per_device_train_batch_size": 4, "max_tokens_per_forward": 30},
        {"per_device_train_batch_size": 4, "gradient_checkpointing": True},
        {
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        {"per_device_train_batch_size": 4, "layout": "padded"},
    ):
        same(one, run(lawful(name, bases, **fields)))


def run_on(base: str, name: str, size: int) -> Run:
    return run(trainer(base, KINDS[name].config, per_device_train_batch_size=size, head_chunk_tokens=4))


@pytest.mark.parametrize("name", LAWFUL)
def test_two_processes_are_one(name: str, bases: dict[str, str]):
    base = bases[KINDS[name].base]
    one = run_on(base, name, size=2)
    first, second = POOL.run(run_on, base=base, name=name, size=1)
    for two in (first, second):
        two.gradients = {n.removeprefix("module."): g for n, g in two.gradients.items()}
        same(one, two)


@pytest.mark.parametrize("name", LAWFUL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_is_bit_equal(name: str, dtype: str, bases: dict[str, str]):
    folder = bases["bfloat16"] if dtype == "bfloat16" and KINDS[name].base == "llama" else bases[KINDS[name].base]
    fields = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "bf16": dtype == "bfloat16",
        "optim": "adamw_torch",
    }
    fields["learning_rate"] = 1e-2
    whole = run(first := trainer(folder, KINDS[name].config, **fields))
    resumed = trainer(folder, KINDS[name].config, **fields)
    second = run(resumed, resume=f"{first.args.output_dir}/checkpoint-2")
    bit_equal(whole, second)


# ---- half precision bases --------------------------------------------------------------------------------------------


def test_modules_trained_in_full_have_float32_weights_over_a_bfloat16_base(bases: dict[str, str]):
    """In bfloat16 an update a thousandth of a weight is lost."""
    kind = KINDS["modules to save"]
    built = trainer(bases["bfloat16"], kind.config, learning_rate=1e-6, optim="adamw_torch", bf16=True)
    base = base_model(built.model)
    saved = [base.model.embed_tokens.modules_to_save.default.weight, base.lm_head.modules_to_save.default.weight]
    before = [w.detach().clone() for w in saved]
    assert {p.dtype for p in built.model.parameters() if p.requires_grad} == {torch.float32}
    run(built)
    for was, now in zip(before, saved, strict=True):
        assert not torch.equal(was, now) and torch.equal(was.bfloat16(), was)
    want = logits(built.model)
    built.save_model(folder := scratch())
    again = trainer(folder, bf16=True)
    for was, now in zip(saved, base_model(again.model).lm_head.modules_to_save.parameters(), strict=False):
        assert now.dtype == was.dtype == torch.float32
    assert torch.equal(base_model(again.model).lm_head.modules_to_save.default.weight, saved[1])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(again.model), want, rtol=0, atol=1e-2)
    # Outside of autocast, the model takes and gives what its base does.
    plain = prepare_model(bases["bfloat16"], LoadOptions(), kind.config).model
    base_logits = AutoModelForCausalLM.from_pretrained(bases["bfloat16"])(input_ids=IDS).logits
    assert plain(input_ids=IDS).logits.dtype == base_logits.dtype == torch.bfloat16
    torch.testing.assert_close(plain(input_ids=IDS).logits, base_logits, rtol=0, atol=1e-2)


# ---- quantized bases -------------------------------------------------------------------------------------------------

QUANTIZED = [{"load_in_4bit": True}, {"load_in_4bit": True, "use_bnb_nested_quant": True}, {"load_in_8bit": True}]


def quantized(base: str, **fields: Any) -> dict[str, Any]:
    config = ModelConfig(use_peft=True, lora_dropout=0.0, lora_target_modules=["q_proj", "down_proj"], **fields)
    return {
        "model": base,
        "peft_config": get_peft_config(config),
        "quantization_config": get_quantization_config(config),
    }


@pytest.mark.parametrize("fields", QUANTIZED, ids=lambda f: "-".join(f))
def test_quantized_base(fields: dict[str, Any], bases: dict[str, str], caplog: pytest.LogCaptureFixture):
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    given = quantized(bases["wide"], **fields)
    built = trainer(**given)
    base = base_model(built.model)
    assert type(base.model.layers[0].self_attn.q_proj.base_layer).__name__ in ("Linear4bit", "Linear8bitLt")
    assert type(base.lm_head) is torch.nn.Linear  # bitsandbytes leaves the head
    before = {n: p.detach().clone() for n, p in built.model.named_parameters()}
    rows = token_rows(4, seed=9)
    assert built.evaluate(rows)["eval_loss"] == pytest.approx(own_loss(built.model, rows), abs=1e-5)
    run(built)
    moved = {n for n, p in built.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all("lora_" in n for n in moved)
    assert built.evaluate(rows)["eval_loss"] == pytest.approx(own_loss(built.model, rows), abs=1e-5)
    built.save_model(folder := scratch())
    again = trainer(folder, quantization_config=given["quantization_config"])  # without `use_peft`
    assert torch.equal(logits(again.model), logits(built.model))
    run(again)


def test_evaluating_leaves_a_4_bit_base_as_it_was(bases: dict[str, str]):
    """bitsandbytes packs the weights anew at the first evaluation on some CPUs, with scales in bfloat16."""
    plain = run(trainer(**quantized(bases["wide"], load_in_4bit=True)))
    rows = token_rows(4, seed=9)
    looked = run(
        trainer(**quantized(bases["wide"], load_in_4bit=True), eval_dataset=rows, eval_strategy="steps", eval_steps=1)
    )
    bit_equal(plain, looked)


def test_the_dtype_4_bit_weights_are_multiplied_in(monkeypatch: pytest.MonkeyPatch):
    for native, want in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("posttrain.model.adapters.native_bf16", lambda native=native: native)
        config: Any = get_quantization_config(ModelConfig(load_in_4bit=True))
        assert config.bnb_4bit_compute_dtype == want
    config = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="float16"))
    assert config.bnb_4bit_compute_dtype == torch.float16


def test_quantization_without_an_adapter_is_refused(bases: dict[str, str]):
    with pytest.raises(ConfigError, match=r"quantized weights cannot be trained; give `peft_config`"):
        trainer(bases["wide"], quantization_config=quantized("x", load_in_4bit=True)["quantization_config"])


# ---- new tokens ------------------------------------------------------------------------------------------------------

CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo" * i}]} for i in range(1, 5)
]
NEW_TOKENS = {
    "full": None,
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved, kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": None},
    "tokens of both": {"trainable_token_indices": "both"},
    "not trained": {},
}


def with_new_tokens(base: str) -> tuple[Any, Any, list[int]]:
    source = scratch()
    byte_tokenizer(template=CHATML).save_pretrained(source)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    return clone_chat_template(model, tokenizer, source)


def for_tokens(fields: dict[str, Any], added: list[int]) -> LoraConfig:
    tokens = {"both": {"embed_tokens": added, "lm_head": added}, None: added}
    fields = {k: tokens[v] if k == "trainable_token_indices" else v for k, v in fields.items()}
    return LoraConfig(**ON, **fields)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", NEW_TOKENS)
def test_new_tokens_trained_saved_merged_and_reloaded(
    how: str, tied: bool, bases: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    model, tokenizer, added = with_new_tokens(bases["small vocabulary" + ", tied" * tied])
    assert tokenizer.convert_ids_to_tokens(added) == ["<|im_end|>", "<|im_start|>"]  # in the source's order
    assert tokenizer.eos_token == "<|im_end|>" and model.config.eos_token_id == tokenizer.eos_token_id == added[0]
    assert model.get_input_embeddings().weight.shape[0] == 320 == model.config.vocab_size
    fields = NEW_TOKENS[how]
    config = None if fields is None else for_tokens(fields, added)
    built = trainer(model, config, Dataset.from_list(CHATS), processing_class=tokenizer)
    start = effective_rows(built.model, added)
    run(built)
    captured = capsys.readouterr()
    assert ("does not train them" in captured.out + captured.err) == (how == "not trained")
    for was, now in zip(start, effective_rows(built.model, added)[:1], strict=False):
        assert torch.equal(was, now) == (how == "not trained")
    built.save_model(folder := scratch())
    ids = torch.tensor([tokenizer.apply_chat_template(CHATS[1]["messages"])["input_ids"]])
    want = logits(built.model, ids)
    again = trainer(folder, rows=Dataset.from_list(CHATS))
    assert torch.equal(logits(again.model, ids), want)
    assert again.processing_class.chat_template == CHATML
    if config is None:
        return
    whole = scratch() + "/merged"
    assert main(["merge", "--model_name_or_path", folder, "--output_dir", whole]) == 0
    merged = AutoModelForCausalLM.from_pretrained(whole)
    torch.testing.assert_close(logits(merged, ids), want, rtol=0, atol=1e-5 * want.abs().max().item())
    assert merged.config.eos_token_id == added[0] == merged.generation_config.eos_token_id


def effective_rows(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """What the embedding gives for some tokens, and what the head makes of them: [R, H]."""
    base = base_model(model)
    embedded = base.get_input_embeddings()(torch.tensor(ids)).detach().clone()
    return [embedded, base.get_output_embeddings()(torch.eye(32)).detach().t()[ids].clone()]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", ["full", "lora", "lora, head in full"])
def test_a_template_by_its_model_comes_with_its_tokens(how: str, tied: bool, bases: dict[str, str], tmp_path: Path):
    byte_tokenizer(template=CHATML).save_pretrained(tmp_path)
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]} if how != "lora" else {}
    config = None if how == "full" else LoraConfig(**ON, **saved)
    base = bases["small vocabulary" + ", tied" * tied]
    built = trainer(base, config, Dataset.from_list(CHATS), chat_template_path=str(tmp_path))
    assert built.processing_class.eos_token == "<|im_end|>" and built.processing_class.eos_token_id == 257
    assert base_model(built.model).get_input_embeddings().weight.shape[0] == 320
    start = effective_rows(built.model, [257, 258])
    run(built)
    end = effective_rows(built.model, [257, 258])
    assert all(not torch.equal(was, now) for was, now in zip(start, end, strict=True))
    if how == "lora":
        want = {"embed_tokens": [257, 258]} | ({} if tied else {"lm_head": [257, 258]})
        assert built.model.active_peft_config.trainable_token_indices == want
        assert config is not None and config.trainable_token_indices is None  # the caller's stays as it is
    built.save_model(folder := scratch())
    ids = torch.tensor([built.processing_class.apply_chat_template(CHATS[1]["messages"])["input_ids"]])
    assert {257, 258} <= set(ids[0].tolist())
    again = trainer(folder, rows=Dataset.from_list(CHATS), chat_template_path=str(tmp_path))
    assert torch.equal(logits(again.model, ids), logits(built.model, ids))
    named = trainer(base, config, Dataset.from_list(CHATS), chat_template_path=str(tmp_path), eos_token="<pad>")
    assert named.processing_class.eos_token == "<pad>"


def test_a_template_with_tokens_that_an_adapter_has_no_rows_for(bases: dict[str, str], tmp_path: Path):
    byte_tokenizer(template=CHATML).save_pretrained(tmp_path)
    trainer(bases["small vocabulary"], LoraConfig(**ON), Dataset.from_list([{"text": "abc"}] * 2)).save_model(
        f := scratch()
    )
    with pytest.raises(ModelError, match=r"`chat_template_path` brings 2 tokens.*posttrain merge"):
        trainer(f, rows=Dataset.from_list(CHATS), chat_template_path=str(tmp_path))


def test_a_template_whose_tokens_are_there_changes_no_size(bases: dict[str, str]):
    source = scratch()
    byte_tokenizer(template=CHATML).save_pretrained(source)
    model, tokenizer, added = clone_chat_template(tiny_model(), byte_tokenizer(), source)
    assert added == [] and model.get_input_embeddings().weight.shape[0] == 300
    assert tokenizer.chat_template == CHATML
    with pytest.raises(ConfigError, match="has no chat template"):
        clone_chat_template(model, tokenizer, bases["llama"])
    with pytest.raises(ConfigError, match="has no tokenizer"):
        clone_chat_template(model, tokenizer, scratch())


def test_new_tokens_without_room_are_refused(bases: dict[str, str]):
    tokenizer = AutoTokenizer.from_pretrained(bases["small vocabulary"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    rows = Dataset.from_list([{"text": "a<|new|>b"}])
    with pytest.raises(DataError, match=r"257 embeddings.*clone_chat_template"):
        trainer(bases["small vocabulary"], rows=rows, processing_class=tokenizer)


def test_new_rows_that_peft_would_not_save_are_refused(bases: dict[str, str]):
    model, tokenizer, _ = with_new_tokens(bases["small vocabulary"])
    config = LoraConfig(**ON | {"target_modules": ["lm_head"]})
    with pytest.raises(ModelError, match=r"resized from 257 to 320 rows.*those of the embedding"):
        trainer(model, config, Dataset.from_list(CHATS), processing_class=tokenizer)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        AdaLoraConfig(target_modules=["q_proj"], total_step=3),
        LoraConfig(**ON, alora_invocation_tokens=[5], task_type="CAUSAL_LM"),
    ],
    ids=lambda c: type(c).__name__,
)
def test_kinds_that_a_packed_row_cannot_train(config: Any, bases: dict[str, str]):
    with pytest.raises(ModelError, match=r"`peft_config`.*(use LoRA|leave it out)"):
        trainer(bases["llama"], config, rows=Dataset.from_list([{"text": ""}]))  # before the rows are read


def test_an_adapter_of_transformers_own_is_refused(bases: dict[str, str]):
    get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), LoraConfig(**ON)).save_pretrained(
        f := scratch()
    )
    model = AutoModelForCausalLM.from_pretrained(bases["llama"])
    model.load_adapter(f, is_trainable=True)
    with pytest.raises(ModelError, match=r"`load_adapter`.*give the adapter's folder"):
        trainer(model, processing_class=byte_tokenizer())


def test_a_merged_adapter_is_refused(bases: dict[str, str]):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), LoraConfig(**ON))
    model.merge_adapter()
    with pytest.raises(ModelError, match="unmerge_adapter"):
        trainer(model, processing_class=byte_tokenizer())


def test_an_adapter_named_as_on_the_hub(bases: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a cache, as when it was downloaded before."""
    built = trainer(bases["llama"], LoraConfig(**ON))
    run(built)
    snapshot = tmp_path / "models--someone--adapter" / "snapshots" / ("0" * 40)
    built.save_model(str(snapshot))
    (tmp_path / "models--someone--adapter" / "refs").mkdir()
    (tmp_path / "models--someone--adapter" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    again = trainer("someone/adapter", model_init_kwargs={"revision": "main"})
    assert torch.equal(logits(again.model), logits(built.model))
    assert again.processing_class.get_vocab() == built.processing_class.get_vocab()
    with pytest.raises(ModelError, match="cannot be read"):
        trainer("someone/else")


def test_a_second_adapter_on_a_saved_one_is_refused(bases: dict[str, str]):
    built = trainer(bases["llama"], LoraConfig(**ON))
    built.save_model(folder := scratch())
    with pytest.raises(ModelError, match=r"already has an adapter.*`use_peft`.*posttrain merge"):
        trainer(folder, LoraConfig(**ON))


def test_the_active_one_of_several_adapters_is_trained(bases: dict[str, str]):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), LoraConfig(**ON))
    model.add_adapter("other", LoraConfig(**ON | {"target_modules": ["q_proj", "lm_head"]}))
    model.set_adapter("other")
    built = trainer(model, processing_class=byte_tokenizer())
    before = {n: p.detach().clone() for n, p in built.model.named_parameters()}
    run(built)
    moved = {n for n, p in built.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(".other." in n for n in moved)


def test_an_adapter_that_does_not_fit_its_base(bases: dict[str, str]):
    get_peft_model(tiny_model("llama", hidden_size=64), LoraConfig(**ON)).save_pretrained(folder := scratch())
    config = Path(folder, "adapter_config.json")
    config.write_text(
        config.read_text().replace('"base_model_name_or_path": ""', f'"base_model_name_or_path": "{bases["llama"]}"')
    )
    config.write_text(
        config.read_text().replace('"base_model_name_or_path": null', f'"base_model_name_or_path": "{bases["llama"]}"')
    )
    with pytest.raises(ModelError, match="does not fit its base"):
        prepare_model(folder, LoadOptions())


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_goes_on_with_an_adapter_and_quantizes(bases: dict[str, str], tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "hello there"}\n' * 8)
    common = [f"--{k}={v}" for k, v in FIELDS.items() if k not in ("bf16", "gradient_checkpointing")]
    common += ["--dataset_name", str(data), "--max_steps", "1", "--no-bf16"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with contextlib.redirect_stdout(io.StringIO()):
        lora = ["--use_peft", "--lora_r", "2", "--load_in_4bit"]
        assert main(["sft", "--model_name_or_path", bases["wide"], "--output_dir", first, *lora, *common]) == 0
        went_on = ["sft", "--model_name_or_path", first, "--output_dir", second, *common, "--load_in_4bit"]
        assert main(went_on) == 0
        assert main([*went_on[:-1], "--use_peft"]) == 0
    a, b = (PeftModel.from_pretrained(tiny_wide(bases), f) for f in (first, second))
    assert not torch.equal(logits(a), logits(b))
    assert main([*went_on, "--use_peft", "--lora_r", "4"]) == 2


def tiny_wide(bases: dict[str, str]) -> Any:
    return AutoModelForCausalLM.from_pretrained(bases["wide"])
