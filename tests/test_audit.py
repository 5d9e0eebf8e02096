"""The template audit: each check with a template that passes it and one that does not; and what a run does with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import templates_page
from data_fixtures import CHATML, CHATML_MARKED, CHATML_TOKENS, LLAMA2, byte_tokenizer
from laws.runs import FIELDS, scratch
from own_templates import EVERY, GENERATION, OFFICIAL, OWN, tokenizer_for
from tiny import tiny_model

from posttrain import SFTConfig, SFTTrainer
from posttrain.data.audit import CHECKS, POLICIES, audit_policy, audit_template, write_audit
from posttrain.errors import ConfigError, DataError

NO_STOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}" + GENERATION
TWO_STOPS = CHATML.replace("'<|im_end|>\n'", "'<|im_end|><|im_end|>\n'")
TWO_BOS = "{{ bos_token + bos_token }}" + CHATML
DATED = "{{ strftime_now('%Y') }}" + CHATML
DROPS_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
OTHER_PROMPT = CHATML.replace(
    "{% if add_generation_prompt %}", "{% if add_generation_prompt %}{{ '<|im_start|>system\nNow answer.' }}"
)
MARKS_CONTENT = OWN["chatml_tools"].template.replace(
    "m.role + '\n' + (m.content or '') }}",
    "m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% endgeneration %}"
    "{% else %}{{ m.content or '' }}{% endif %}",
)
REPEATS = CHATML.replace(
    "m.content +", "m.content + ('!' if m.role == 'assistant' and '<|im_end|>' in messages[0].content else '') +"
)
SAYS_NONE = CHATML.replace("m.content", "(m.content or 'None')")
ESCAPES = CHATML.replace("m.content", "m.content | replace('<|', '< |')")
MARKS_ALL = CHATML_MARKED.replace("{{ m.content + '<|im_end|>\n' }}{% endif %}", "{% generation %}{{ m.content }}"
                                  "{% endgeneration %}{{ '<|im_end|>\n' }}{% endif %}")  # fmt: skip
BROKEN = "{% for m in messages %}{{ m.content }"


def audited(template, bos=None, eos="<|im_end|>", special=CHATML_TOKENS, **more):
    return audit_template(byte_tokenizer(special, template, bos=bos, eos=eos, **more))


def test_chatml_passes_every_check():
    audit = audited(CHATML)
    assert tuple(check.name for check in audit.checks) == CHECKS
    assert {check.verdict for check in audit.checks} == {"pass"}
    assert audit.ok
    assert audit.text().splitlines()[0] == f"template audit {audit.hash}: 16 passed, 0 warned, 0 failed"
    assert audit.text(only_doubts=True) == audit.text().splitlines()[0]


@pytest.mark.parametrize(
    ("name", "template", "more", "verdict", "finding", "evidence"),
    [
        ("renders", BROKEN, {}, "fail", "no", "unexpected '}'"),
        ("renders", "{{ raise_exception('never') }}", {}, "fail", "no", "never"),
        ("turns", MARKS_ALL, {}, "fail", "not found", "holds what the user"),
        ("stop_token", NO_STOP, {}, "fail", "none", "no token is trained that would end generation"),
        ("stop_token", TWO_STOPS, {}, "fail", "2 a turn", "<|im_end|><|im_end|>"),
        ("stop_token", CHATML, {"special": (), "eos": "<eos>"}, "warn", "not a token", "'<|im_end|>' ends a turn"),
        ("stop_token", CHATML, {}, "pass", "<|im_end|>", "once"),
        ("one_bos", TWO_BOS, {"bos": "<s>"}, "fail", "2", "<s><s>"),
        ("one_bos", CHATML, {"bos": "<s>", "add_bos": True}, "warn", "0", "chats do not"),
        ("one_bos", "{{ bos_token }}" + CHATML, {"bos": "<s>", "add_bos": True}, "pass", "1", "<s>"),
        ("one_bos", CHATML, {"bos": "<|im_start|>"}, "pass", "opens each turn", "<|im_start|>"),
        ("eos", CHATML, {"eos": "<eos>"}, "warn", "differs", "set `eos_token`"),
        ("prompt_ids", OTHER_PROMPT, {}, "fail", "differ", "Now answer."),
        ("prompt_ids", OWN["opens_thinking"].template, {}, "warn", "opens more", "<think>"),
        ("history", OWN["thinking"].template, {}, "warn", "rewritten", "plain turns"),
        ("reasoning", OWN["opens_thinking"].template, {}, "warn", "dropped", "strips"),
        ("reasoning", OWN["thinking"].template, {}, "pass", "last turn only", "reasoning_content"),
        ("reasoning", OWN["keeps_thinking"].template, {}, "pass", "kept", "reasoning_content"),
        ("reasoning", CHATML, {}, "pass", "as content", "no key"),
        ("system", DROPS_SYSTEM, {}, "warn", "dropped", "left out"),
        ("default_system", OWN["default_system"].template, {}, "pass", "written", "careful helper"),
        ("date", DATED, {}, "warn", "today's", "another day"),
        ("order", OWN["merges_system"].template, {}, "pass", "must alternate", "error"),
        ("content", OWN["default_system"].template, {}, "pass", "trimmed", "taken off"),
        ("none_content", SAYS_NONE, {}, "fail", "written as a word", "None<|im_end|>"),
        ("tools", OWN["chatml_tools"].template, {}, "pass", "calls and results", "probeval"),
        ("tools", CHATML, {}, "pass", "none", "errors"),
        ("tools", MARKS_CONTENT, {}, "fail", "calls not trained", "probeend"),
        ("special_text", REPEATS, {}, "fail", "moves the turns", "trained: 'probesay' |"),
        ("special_text", ESCAPES, {}, "pass", "read as tokens", ""),
    ],
)  # fmt: skip
def test_each_check(name, template, more, verdict, finding, evidence):
    check = audited(template, **more)[name]
    assert (check.verdict, check.finding) == (verdict, finding), check
    assert evidence in check.evidence


def test_llama2_opens_every_question_with_bos():
    check = audited(LLAMA2, special=(), bos="<s>", eos="</s>")["one_bos"]
    assert (check.verdict, check.finding) == ("pass", "1")


def test_what_the_generation_config_says_counts():
    tokenizer = byte_tokenizer(template=CHATML, eos="<eos>")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for ids in (stop, [tokenizer.eos_token_id, stop]):
        config = SimpleNamespace(eos_token_id=ids)
        assert audit_template(tokenizer, generation_config=config)["eos"].finding == "generation config"
    config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)
    assert audit_template(tokenizer, generation_config=config)["eos"].verdict == "warn"


@pytest.mark.parametrize("kind", ["byte", "word"])
@pytest.mark.parametrize("name", EVERY)
def test_audit_of_every_template_agrees_with_reading_it(name, kind):
    habits, audit = EVERY[name], audit_template(tokenizer_for(name, kind))
    assert [check.name for check in audit.failed] == ([] if habits.stop else ["stop_token"]), audit.text()
    assert audit["eos"].verdict == ("warn" if habits.eos or not habits.stop else "pass"), audit.text()
    assert audit["one_bos"].finding == ("no BOS token" if habits.bos is None else "1"), audit.text()
    assert (audit["tools"].finding == "calls and results") is habits.tools, audit.text()
    assert (audit["system"].finding == "written") is habits.system, audit.text()
    wanted = {"no": ("as content", "dropped"), "calls": ("as content",), "last": ("last turn only",), "kept": ("kept",)}
    assert audit["reasoning"].finding in wanted[habits.thinks], audit.text()


# ---- identity --------------------------------------------------------------------------------------------------------


def test_hash_is_the_same_in_another_process_and_changes_with_template_tokens_and_arguments():
    script = (
        "from data_fixtures import *; from posttrain.data.audit import audit_template\n"
        "print(audit_template(byte_tokenizer(template=CHATML)).hash)"
    )
    here = Path(__file__).parent  # run from there, it finds the fixtures
    ran = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    other = ran.stdout.split()
    base = audited(CHATML).hash
    assert other == [base]
    kwargs = audit_template(byte_tokenizer(template=CHATML), template_kwargs={"enable_thinking": False}).hash
    assert len({base, audited(CHATML + " ").hash, audited(CHATML, eos="<eos>").hash, kwargs}) == 4


def test_report_is_written_as_json(tmp_path):
    audit = audited(NO_STOP)
    path = write_audit(audit, tmp_path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "template_audit.json"
    assert (found["hash"], found["ok"]) == (audit.hash, False)
    assert [check["name"] for check in found["checks"]] == list(CHECKS)


# ---- in a run --------------------------------------------------------------------------------------------------------

CHAT = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}] * 4


def trainer(template, rows=None, **fields):
    config = SFTConfig(**FIELDS | {"output_dir": scratch(), "max_steps": 1} | fields)
    tokenizer = byte_tokenizer(template=template)
    return SFTTrainer(tiny_model("qwen3"), config, train_dataset=rows or CHAT, processing_class=tokenizer)


def test_a_template_that_fails_stops_the_run_before_anything_is_loaded():
    with pytest.raises(DataError, match=r"stop_token \(none\).*template_audit: \[stop_token\]"):
        trainer(NO_STOP)


@pytest.mark.parametrize("value", ["warn", "off", ["stop_token"], "stop_token,eos"])
def test_it_goes_on_when_told_to(value, capsys):
    trainer(NO_STOP, template_audit=value)
    printed = capsys.readouterr()
    assert ("fail  stop_token" in printed.out + printed.err) is (value != "off")


def test_rows_that_use_no_template_are_not_audited():
    trainer(NO_STOP, rows=[{"text": "hello"}] * 4)
    trainer(NO_STOP, rows=[{"input_ids": [3, 4, 5]}] * 4)


def test_the_report_is_kept_with_the_run_and_each_checkpoint():
    made = trainer(CHATML, save_strategy="steps", save_steps=1)
    made.train()
    for folder in ("", "/checkpoint-1"):
        with open(f"{made.args.output_dir}{folder}/template_audit.json", encoding="utf-8") as file:
            assert json.load(file)["ok"] is True


def test_unknown_names_are_refused_with_a_hint():
    with pytest.raises(ConfigError, match=r"`template_audit`.*Did you mean 'stop_token'"):
        SFTConfig(**FIELDS | {"output_dir": scratch(), "template_audit": "stop_tokn"})
    assert audit_policy("off") == ("off", frozenset())
    assert audit_policy(["eos", "date"]) == ("error", {"eos", "date"})


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_audit_finds():
    assert templates_page.PAGE.read_text(encoding="utf-8") == templates_page.page(), "run tests/templates_page.py"


def test_the_page_explains_every_check_and_knows_every_template():
    text = templates_page.PAGE.read_text(encoding="utf-8")
    for name in (*CHECKS, *POLICIES):
        assert f"| `{name}` |" in text
    for name in OFFICIAL:
        assert f"\n| {name} |" in text
