"""Chat templates written here, one for each habit that makes turns hard to find; and tokenizers for the real ones.

The templates that models ship are tested too where they are at hand, in REAL; none of them is copied into the project.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data_fixtures import CHATML, CHATML_MARKED, CHATML_TOOLS, GEMMA, LLAMA2, THINKING, byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

REAL = {path.stem: path for path in sorted(Path("/work/shared/templates").glob("*.jinja"))}

GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a careful helper.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
) + GENERATION
MERGES_SYSTEM = (
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + (system if loop.first else '') + m.content + '<|im_end|>\n' }}{% endfor %}"
) + GENERATION
MERGES_TURNS = (
    "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% else %}{{ '\n\n' }}{% endif %}{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != m.role %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
) + GENERATION
ENDS_TEXT = (  # as Phi's: a newline after the stop token, and an end of text after the last turn
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MARKS_NEWLINE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
) + GENERATION
OPENS_THINKING = (  # thinking is cut out of content, and the prompt opens a block that rows without thinking lack
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
RESULTS_INSIDE = (  # what a tool says is written inside the turn that called it, as Gemma 4's
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set on = loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}"
    "{% if not on %}{{ '<|im_start|>' + m.role + '\n' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}"
    "{% endfor %}{% if m.tool_calls %}{{ '<result>' }}{% for r in messages[loop.index0 + 1:loop.index0 + 2] %}"
    "{{ r.content + '</result>' }}{% endfor %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHANNELS = (  # as harmony: thinking in a message of its own, another stop token in the last turn
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
KEEPS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content | trim + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
) + GENERATION
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
) + GENERATION
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + '|' + c.function.arguments + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
) + GENERATION


@dataclass(frozen=True)
class Habits:
    """What a template does, known by reading it."""

    system: bool = True
    tools: bool = False
    thinks: str = "no"  # no: thinking under a key is not written; last: in the last turns only; kept
    stop: str = "<|im_end|>"
    last_stop: str | None = None
    bos: str | None = None
    eos: str | None = None
    template: str = ""


OWN: dict[str, Habits] = {
    "chatml": Habits(template=CHATML),
    "marked": Habits(template=CHATML_MARKED),
    "marks_newline": Habits(template=MARKS_NEWLINE),
    "chatml_tools": Habits(template=CHATML_TOOLS, tools=True),
    "llama2": Habits(template=LLAMA2, system=False, stop="</s>", bos="<s>"),
    "gemma": Habits(template=GEMMA, system=False, stop="<end_of_turn>", bos="<bos>"),
    "thinking": Habits(template=THINKING, thinks="last"),
    "keeps_thinking": Habits(template=KEEPS_THINKING, thinks="kept"),
    "opens_thinking": Habits(template=OPENS_THINKING),
    "default_system": Habits(template=DEFAULT_SYSTEM),
    "merges_system": Habits(template=MERGES_SYSTEM),
    "merges_turns": Habits(template=MERGES_TURNS),
    "ends_text": Habits(template=ENDS_TEXT, eos="<|endoftext|>"),
    "results_inside": Habits(template=RESULTS_INSIDE, tools=True),
    "channels": Habits(template=CHANNELS, thinks="last", stop="<|end|>", last_stop="<|return|>"),
    "parts": Habits(template=PARTS),
    "text_arguments": Habits(template=TEXT_ARGUMENTS, tools=True),
}
CHATML_THINKS = Habits(tools=True, thinks="last")
OFFICIAL: dict[str, Habits] = {
    "cohere": Habits(stop="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "cohere2": Habits(stop="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "deepseek_r1_distill": Habits(stop="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "deepseekv3": Habits(tools=True, stop="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "diffusion_gemma": Habits(tools=True, thinks="last", stop="<turn|>", bos="<bos>"),
    "gemma": Habits(system=False, stop="<end_of_turn>", bos="<bos>"),
    "gemma3": Habits(stop="<end_of_turn>", bos="<bos>"),
    "gemma4": Habits(tools=True, thinks="calls", stop="<turn|>", bos="<bos>"),
    "glm4moe": Habits(tools=True, thinks="last", stop=""),
    "gptoss": Habits(tools=True, thinks="last", stop="<|end|>", last_stop="<|return|>"),
    "idefics3": Habits(stop="<end_of_utterance>", bos="<|begin_of_text|>"),
    "lfm2": Habits(bos="<|startoftext|>"),
    "lfm2_2_5": Habits(tools=True, thinks="last", bos="<|startoftext|>"),
    "lfm2_2_5_vl": Habits(tools=True, thinks="last", bos="<|startoftext|>"),
    "llama3": Habits(stop="<|eot_id|>", bos="<|begin_of_text|>"),
    "llama3_1": Habits(tools=True, stop="<|eot_id|>", bos="<|begin_of_text|>"),
    "llama3_2": Habits(tools=True, stop="<|eot_id|>", bos="<|begin_of_text|>"),
    "llava_next": Habits(stop="</s>"),
    "muse_glimmer": Habits(tools=True, thinks="kept", stop="<|eot|>", bos="<|begin_of_text|>"),
    "nemotron_3_5_lightning": CHATML_THINKS,
    "nemotron_3_nano": CHATML_THINKS,
    "nemotron_3_super": CHATML_THINKS,
    "nemotron_3_ultra": CHATML_THINKS,
    "phi3": Habits(stop="<|end|>", eos="<|endoftext|>"),
    "phi3_5": Habits(stop="<|end|>", eos="<|endoftext|>"),
    "qwen2_5": Habits(tools=True),
    "qwen2_5_vl": Habits(),
    "qwen3": CHATML_THINKS,
    "qwen3_5_nothink": CHATML_THINKS,
    "qwen3_5_think": CHATML_THINKS,
    "qwen3_6": CHATML_THINKS,
    "qwen3_8": Habits(tools=True, thinks="kept"),
    "qwen3_instruct_2507": Habits(tools=True),
    "qwen3_vl": Habits(tools=True),
}
EVERY = {**{name: OWN[name] for name in OWN}, **{f"real:{name}": OFFICIAL[name] for name in REAL}}
_TOKENS = re.compile(r"<[|｜][^<>'\" ]*>|<[a-z_]+\|>|</?s>|<(?:start|end)_of_\w+>|<[A-Z_]+_TOKEN>")


def source(name: str) -> str:
    return REAL[name[5:]].read_text(encoding="utf-8") if name.startswith("real:") else OWN[name].template


@cache
def tokenizer_for(name: str, kind: str = "byte") -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of a template. byte: a token a byte. word: a BPE with merges of words."""
    habits, text = EVERY[name], source(name)
    named = [token for token in (habits.stop, habits.last_stop, habits.bos, habits.eos) if token]
    written = sorted({*_TOKENS.findall(text), *(["<|im_start|>"] if "<|im_start|>" in text else []), *named})
    eos = habits.eos or habits.last_stop or habits.stop or "<|endoftext|>"
    if kind == "byte":
        return byte_tokenizer(written, text, bos=habits.bos, eos=eos)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = ["assistant\nuser\n\nsystem <think>\n\n</think>\n\n model tool functions call arguments name content", text]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(words, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens(
        [AddedToken(n, special=True, normalized=False) for n in dict.fromkeys(["<pad>", eos, *written])]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=habits.bos, eos_token=eos, pad_token="<pad>")
    made.chat_template = text
    return made


# ---- conversations of words that nothing else writes -----------------------------------------------------------------

MARK = re.compile(r"(?:SYS|USER|SAY|ARG|TOOL|WHY)\d+z")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
        },
    }
]


def conversation(
    draw: random.Random,
    system: bool = False,
    tools: bool = False,
    thinks: bool = False,
    noise: bool = False,
    turns: int | None = None,
) -> list[dict[str, Any]]:
    """Messages, each with a word of its own. noise: spaces, newlines and spelled-out tokens around the words."""
    count = itertools.count()

    def words(kind: str) -> str:
        word = f"{kind}{next(count)}z"
        if not noise:
            return word
        before = draw.choice(["", "  ", "\n", "x\n\n", "assistant\n"])
        return before + word + draw.choice(["", "  ", "\n", "\n\ny", " <|im_end|>", " </s> a", "user"])

    def think() -> dict[str, Any]:
        if not thinks or draw.random() < 0.4:
            return {}
        return dict.fromkeys(("reasoning_content", "thinking", "reasoning"), f"WHY{next(count)}z")

    messages = [{"role": "system", "content": words("SYS")}] if system else []
    for _ in range(turns or draw.randint(1, 3)):
        messages.append({"role": "user", "content": words("USER")})
        for _ in range(draw.randint(1, 2) if tools else 0):
            function = {"name": "look", "arguments": {"q": f"ARG{next(count)}z"}}
            call = {"id": "c12345678", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call], **think()})
            messages.append({"role": "tool", "name": "look", "tool_call_id": "c12345678", "content": words("TOOL")})
        messages.append({"role": "assistant", "content": words("SAY"), **think()})
    return messages
