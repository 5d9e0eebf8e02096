"""A tiny random model of every family that is tested: 2 to 4 layers, float32, every window shorter than the rows.

`EVERY[name]()` is its config; `build(name)` the model that `AutoModelForCausalLM` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tiny import SHAPE

from posttrain.model.load import auto_class

WINDOW = 8
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
MIXED: dict[str, Any] = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERT: dict[str, Any] = {"shared_expert_intermediate_size": 16}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 40,
    "factor": 8.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 8.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
STILL: dict[str, Any] = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
MULTIMODAL_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
VISION_BLOCKS: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 8,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def shape(*groups: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    merged = SHAPE | {"initializer_range": 0.1}
    for group in groups:
        merged |= group
    return merged | overrides


def gemma3_multimodal() -> Any:
    text = hf.Gemma3TextConfig(**shape(MIXED))
    return hf.Gemma3Config(text_config=text.to_dict(), vision_config=dict(VISION), mm_tokens_per_image=4)


def mistral3() -> Any:
    text = hf.MistralConfig(**shape())
    vision = VISION | {"model_type": "pixtral", "head_dim": 8}
    return hf.Mistral3Config(text_config=text.to_dict(), vision_config=vision)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**shape()),
    "llama-3.1": lambda: hf.LlamaConfig(
        **shape(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        )
    ),
    "llama-4": lambda: hf.Llama4TextConfig(
        **shape(
            LOCAL_EXPERTS,
            num_experts_per_tok=1,
            intermediate_size_mlp=48,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            attention_chunk_size=WINDOW,
            moe_layers=[0, 1],
            attn_temperature_tuning=True,
            floor_scale=4,
        )
    ),
    "qwen2": lambda: hf.Qwen2Config(**shape()),
    "qwen2-sliding": lambda: hf.Qwen2Config(**shape(SLIDING, use_sliding_window=True, max_window_layers=1)),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**shape(EXPERTS, SHARED_EXPERT, decoder_sparse_step=1)),
    "qwen2-moe-sliding": lambda: hf.Qwen2MoeConfig(
        **shape(EXPERTS, SHARED_EXPERT, SLIDING, decoder_sparse_step=1, use_sliding_window=True, max_window_layers=2)
    ),
    "qwen3": lambda: hf.Qwen3Config(**shape()),
    "qwen3-dynamic": lambda: hf.Qwen3Config(
        **shape(
            max_position_embeddings=32,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        )
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **shape(EXPERTS, num_experts=8, num_experts_per_tok=4, decoder_sparse_step=1, norm_topk_prob=True)
    ),
    "qwen3-next": lambda: hf.Qwen3NextConfig(**shape(EXPERTS, SHARED_EXPERT, DELTA, decoder_sparse_step=1)),
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(**shape(DELTA)),
    "qwen3.5-moe": lambda: hf.Qwen3_5MoeTextConfig(**shape(EXPERTS, SHARED_EXPERT, DELTA)),
    "gemma": lambda: hf.GemmaConfig(**shape()),
    # Caps small enough to bite on a random model.
    "gemma2": lambda: hf.Gemma2Config(
        **shape(MIXED, final_logit_softcapping=0.5, attn_logit_softcapping=0.5, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**shape(MIXED)),
    "gemma3-multimodal": gemma3_multimodal,
    "mistral": lambda: hf.MistralConfig(**shape(SLIDING)),
    "mistral3": mistral3,
    "ministral": lambda: hf.MinistralConfig(**shape(MIXED)),
    "ministral3": lambda: hf.Ministral3Config(**shape(rope_parameters=YARN | {"llama_4_scaling_beta": 0.1})),
    "mixtral": lambda: hf.MixtralConfig(**shape(LOCAL_EXPERTS)),
    "mixtral-sliding": lambda: hf.MixtralConfig(**shape(LOCAL_EXPERTS, SLIDING)),
    "phi": lambda: hf.PhiConfig(**shape()),
    "phi3": lambda: hf.Phi3Config(**shape(SLIDING)),
    "phi3-longrope": lambda: hf.Phi3Config(
        **shape(original_max_position_embeddings=40, rope_parameters=dict(LONG_ROPE))
    ),
    "phimoe": lambda: hf.PhimoeConfig(**shape(LOCAL_EXPERTS, STILL)),
    "phimoe-sliding": lambda: hf.PhimoeConfig(**shape(LOCAL_EXPERTS, STILL, SLIDING)),
    "gpt-oss": lambda: hf.GptOssConfig(**shape(MIXED, LOCAL_EXPERTS, rope_parameters=YARN)),
    "cohere": lambda: hf.CohereConfig(**shape(logit_scale=0.25)),
    "cohere2": lambda: hf.Cohere2Config(**shape(MIXED, logit_scale=0.25)),
    "olmo2": lambda: hf.Olmo2Config(**shape()),
    "olmo3": lambda: hf.Olmo3Config(**shape(MIXED)),
    "olmoe": lambda: hf.OlmoeConfig(**shape(EXPERTS)),
    "granite": lambda: hf.GraniteConfig(
        **shape(logits_scaling=4.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2)
    ),
    "granite-moe": lambda: hf.GraniteMoeConfig(**shape(LOCAL_EXPERTS, logits_scaling=4.0)),
    "granite-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **shape(
            LOCAL_EXPERTS,
            logits_scaling=4.0,
            layer_types=["mamba", "attention"],
            shared_intermediate_size=16,
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_chunk_size=16,
        )
    ),
    "smollm3": lambda: hf.SmolLM3Config(**shape(no_rope_layers=[1, 0])),
    "deepseek-v2": lambda: hf.DeepseekV2Config(**shape(MLA, GROUPED, topk_method="group_limited_greedy")),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**shape(MLA, GROUPED)),
    "glm4": lambda: hf.Glm4Config(**shape()),
    "glm4-moe": lambda: hf.Glm4MoeConfig(**shape(GROUPED)),
    "ernie4.5-moe": lambda: hf.Ernie4_5_MoeConfig(
        **shape(moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0)
    ),
    "hunyuan-dense": lambda: hf.HunYuanDenseV1Config(**shape()),
    "hunyuan-moe": lambda: hf.HunYuanMoEV1Config(**shape(num_experts=4, moe_topk=2)),
    "seed-oss": lambda: hf.SeedOssConfig(**shape(attention_dropout=0.0, residual_dropout=0.0)),
    "exaone4": lambda: hf.Exaone4Config(**shape(MIXED)),
    "apertus": lambda: hf.ApertusConfig(**shape()),
    "minimax-m2": lambda: hf.MiniMaxM2Config(**shape(LOCAL_EXPERTS)),
    "nemotron": lambda: hf.NemotronConfig(**shape()),
    "stablelm": lambda: hf.StableLmConfig(**shape()),
    "starcoder2": lambda: hf.Starcoder2Config(**shape(SLIDING, residual_dropout=0.0, embedding_dropout=0.0)),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        new_decoder_architecture=True,
        num_kv_heads=2,
        initializer_range=0.1,
    ),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**shape()),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=300,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        dropout=0.0,
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4),
    "lfm2": lambda: hf.Lfm2Config(**shape(layer_types=["conv", "full_attention"])),
    "falcon-h1": lambda: hf.FalconH1Config(
        **shape(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=16)
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(
        **shape(
            hybrid_override_pattern="M*",
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=16,
        )
    ),
    "mamba": lambda: hf.MambaConfig(vocab_size=300, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=300,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=16,
        pad_token_id=0,
    ),
}


# Fewer of the tests run on these.
MORE: dict[str, Callable[[], Any]] = {
    "olmo": lambda: hf.OlmoConfig(**shape()),
    "arcee": lambda: hf.ArceeConfig(**shape()),
    "helium": lambda: hf.HeliumConfig(**shape()),
    "glm": lambda: hf.GlmConfig(**shape()),
    "gpt-j": lambda: hf.GPTJConfig(vocab_size=300, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=256),
    "gpt-neo": lambda: hf.GPTNeoConfig(
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=256,
        initializer_range=0.1,
    ),
    "dots1": lambda: hf.Dots1Config(**shape(GROUPED, MIXED, n_shared_experts=1)),
    "ernie4.5": lambda: hf.Ernie4_5Config(**shape()),
    "exaone-moe": lambda: hf.ExaoneMoeConfig(
        **shape(MIXED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "flex-olmo": lambda: hf.FlexOlmoConfig(**shape(EXPERTS)),
    "cohere2-moe": lambda: hf.Cohere2MoeConfig(**shape(MIXED, EXPERTS)),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **shape(
            MIXED,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=300,
            num_kv_shared_layers=0,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0, 0.0],
            intermediate_size=48,
        )
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **shape(MIXED, hidden_size_per_layer_input=8, vocab_size_per_layer_input=300, num_kv_shared_layers=0)
    ),
    "vaultgemma": lambda: hf.VaultGemmaConfig(**shape(MIXED)),
    "granite-swa": lambda: hf.GraniteSWAConfig(**shape(MIXED)),
    "granite-moe-shared": lambda: hf.GraniteMoeSharedConfig(**shape(LOCAL_EXPERTS, shared_intermediate_size=16)),
    "mimo-v2-flash": lambda: hf.MiMoV2FlashConfig(**shape(MIXED, GROUPED)),
    "bamba": lambda: hf.BambaConfig(
        **shape(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=16, attn_layer_indices=[1])
    ),
    "jamba": lambda: hf.JambaConfig(
        **shape(
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
        )
    ),
    "minimax": lambda: hf.MiniMaxConfig(
        **shape(LOCAL_EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=16)
    ),
    "lfm2-moe": lambda: hf.Lfm2MoeConfig(**shape(EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1)),
    "olmo-hybrid": lambda: hf.OlmoHybridConfig(**shape(DELTA)),
    "falcon-mamba": lambda: hf.FalconMambaConfig(vocab_size=300, hidden_size=32, state_size=8, num_hidden_layers=2),
    "nanochat": lambda: hf.NanoChatConfig(**shape()),
    "gpt-bigcode": lambda: hf.GPTBigCodeConfig(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "mpt": lambda: hf.MptConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
    "persimmon": lambda: hf.PersimmonConfig(**shape()),
    "diffllama": lambda: hf.DiffLlamaConfig(**shape()),
    "jetmoe": lambda: hf.JetMoeConfig(
        **shape(LOCAL_EXPERTS, kv_channels=8, num_key_value_heads=2, num_attention_heads=4)
    ),
    "glm4-moe-lite": lambda: hf.Glm4MoeLiteConfig(**shape(MLA, GROUPED)),
    "longcat-flash": lambda: hf.LongcatFlashConfig(
        **shape(
            MLA,
            ffn_hidden_size=48,
            num_layers=2,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=1,
            expert_ffn_hidden_size=16,
        )
    ),
    "solar-open": lambda: hf.SolarOpenConfig(**shape(GROUPED)),
    "minicpm3": lambda: hf.MiniCPM3Config(**shape(MLA)),
    "afmoe": lambda: hf.AfmoeConfig(
        **shape(MIXED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1)
    ),
    "bitnet": lambda: hf.BitNetConfig(**shape()),
    "cwm": lambda: hf.CwmConfig(**shape(MIXED)),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(**shape()),
    "youtu": lambda: hf.YoutuConfig(**shape(MLA)),
    "doge": lambda: hf.DogeConfig(**shape()),
    "qwen2.5-vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=shape(rope_parameters=MULTIMODAL_ROPE | {"mrope_section": [1, 1, 2]}),
        vision_config=VISION_BLOCKS | {"fullatt_block_indexes": [0]},
    ),
    "qwen3-vl": lambda: hf.Qwen3VLConfig(
        text_config=shape(
            head_dim=12,
            rope_parameters=MULTIMODAL_ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            model_type="qwen3_vl_text",
        ),
        vision_config=VISION_BLOCKS | {"deepstack_visual_indexes": [0]},
    ),
}

# What `AutoModelForCausalLM` makes of a multimodal checkpoint of these is its text model.
MORE |= {
    "qwen3.5-checkpoint": lambda: hf.Qwen3_5Config(text_config=shape(DELTA), vision_config=VISION_BLOCKS),
    "qwen3.5-moe-checkpoint": lambda: hf.Qwen3_5MoeConfig(
        text_config=shape(DELTA, EXPERTS, SHARED_EXPERT), vision_config=VISION_BLOCKS
    ),
    "qwen3-vl-moe": lambda: hf.Qwen3VLMoeConfig(
        text_config=shape(
            EXPERTS,
            head_dim=12,
            rope_parameters=MULTIMODAL_ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            model_type="qwen3_vl_moe_text",
        ),
        vision_config=VISION_BLOCKS | {"deepstack_visual_indexes": [0]},
    ),
}

EVERY = FAMILIES | MORE


def build(name: str, seed: int = 0) -> Any:
    """A random model; the global generators are left as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = EVERY[name]()
        model = auto_class(config).from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("linear_attn.A_log"):
            # Long memories: a leak between sequences shows. At random some are so short that fp32 cancels.
            torch.nn.init.constant_(parameter, -2.0)
    return model
