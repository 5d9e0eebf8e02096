"""How a model is loaded: the fields a user sets on the command line or in a file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ModelConfig:
    """What to load and which adapter to put on it."""

    model_name_or_path: str | None = None
    """Hub id or local folder of the model, or of an adapter, which is then trained on."""
    model_revision: str = "main"
    """Branch, tag or commit on the hub."""
    dtype: str | None = None
    """Dtype of the weights in memory: float32, bfloat16, float16, or auto (as stored). Unset: float32 master weights
    for full fine-tuning, the stored dtype for LoRA."""
    attn_implementation: str | None = None
    """Attention back end. Unset: forest attention, with sdpa for calls without a forest."""
    use_peft: bool = False
    """Train a LoRA adapter instead of the weights."""
    lora_r: int = 16
    """Rank of the adapter."""
    lora_alpha: int = 32
    """Scale of the adapter: its product is multiplied by alpha / r."""
    lora_dropout: float = 0.05
    """Dropout before the adapter. Above 0, prefix sharing is off: shared and separate continuations would differ."""
    lora_target_modules: list[str] | None = None
    """Names of the modules to adapt. Unset: peft's default for the family; `all-linear` for every linear layer."""
    lora_target_parameters: list[str] | None = None
    """Names of parameters to adapt directly (experts kept as one tensor)."""
    lora_modules_to_save: list[str] | None = None
    """Modules trained in full and saved with the adapter."""
    lora_task_type: str = "CAUSAL_LM"
    """peft task type."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (rsLoRA)."""
    use_dora: bool = False
    """Split the weight into magnitude and direction (DoRA)."""
    load_in_8bit: bool = False
    """Quantize the frozen base to 8 bits with bitsandbytes."""
    load_in_4bit: bool = False
    """Quantize the frozen base to 4 bits with bitsandbytes."""
    bnb_4bit_quant_type: str = "nf4"
    """4-bit data type: nf4 or fp4."""
    use_bnb_nested_quant: bool = False
    """Quantize the quantization constants too."""
    bnb_4bit_quant_storage: str | None = None
    """Dtype that stores the packed 4-bit weights."""


@dataclass
class MergeConfig:
    """What to merge, and where to."""

    model_name_or_path: str | None = None
    """Folder or hub id of the adapter, or the output folder of a run that trained one."""
    output_dir: str | None = None
    """New folder for the merged model and its tokenizer."""
    dtype: str | None = None
    """Dtype of the saved weights: float32, bfloat16 or float16. Unset: as the base is stored. The merge itself is in
    float32."""
    model_revision: str = "main"
    """Branch, tag or commit of the adapter on the hub."""
    trust_remote_code: bool = False
    """Allow code that comes with the base to run."""
