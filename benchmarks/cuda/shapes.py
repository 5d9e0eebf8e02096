"""Shapes of public models, for random weights: nothing is downloaded. Standard library only.

Numbers are those of the models' published configurations; `tiny` of each keeps the architecture and shrinks the sizes.
"""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen3.6-35B-A3B": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
}

# What is trained, and the dtype of the weights: float32 masters where they fit on one GPU of 80 GB with Adam's state.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma-3-270m": {"full": {"dtype": "float32"}, "lora": {"dtype": "bfloat16"}},
    "Qwen3-0.6B": {"full": {"dtype": "float32"}, "lora": {"dtype": "bfloat16"}},
    "Qwen3-8B": {"full": {"dtype": "bfloat16"}, "lora": {"dtype": "bfloat16"}},
    "Qwen3-30B-A3B": {"lora": {"dtype": "bfloat16", "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
    "Qwen3.6-35B-A3B": {"lora": {"dtype": "bfloat16", "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
}

_TINY: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
}


def shape(name: str, tiny: bool = False) -> dict[str, Any]:
    full = SHAPES[name]
    return full | {key: min(size, full[key]) for key, size in _TINY.items() if key in full} if tiny else full
