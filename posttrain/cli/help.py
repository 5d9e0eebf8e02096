"""What --help prints."""

from __future__ import annotations

import shutil
import textwrap

from posttrain.cli.schema import Option, Options

_RULES = """Every field below is a flag and a key of the YAML file. The command line wins over the file, the file over
the default. Write --name value or --name=value, with dashes or underscores; --name and --no-name for true and false;
several values for a list; JSON for a mapping, or --name.key=value for one key of it; none for no value.
--show_config [all | json] prints each value with where it comes from; --dry_run does everything but train."""
_WORDS = {"str": "text", "dict": "mapping"}


def command_help(program: str, about: str, options: Options) -> str:
    """The help of one command: its options under the class that declares them."""
    width = min(shutil.get_terminal_size().columns, 120)
    groups: dict[str, list[Option]] = {}
    for cls, items in options.items():
        # Fields come inherited ones first; a user looks for the command's own first.
        inherited = reversed(list(dict.fromkeys(item.group for item in items)))
        for group in sorted(inherited, key=lambda group: group != cls):
            groups[group] = [item for item in items if item.group == group]
    parts = [f"usage: {program} [--config FILE] [--field value ...]", about, textwrap.fill(_RULES, width)]
    parts.append(
        "--config FILE\n"
        + _indent("YAML file of fields. `env:` in it sets environment variables, `datasets:` lists the sources.", width)
    )
    for group, items in groups.items():
        parts.append(f"{group}\n{'─' * len(group)}\n" + "\n".join(_entry(item, width) for item in items))
    return "\n\n".join(part for part in parts if part)


def _entry(option: Option, width: int) -> str:
    kind = " | ".join(option.choices) if _are_words(option) else option.type.removesuffix(" | none")
    kind = " | ".join(_WORDS.get(word, word) for word in kind.split(" | "))
    state = "required" if option.required else f"default: {_default(option.default)}"
    lines = _indent(option.help, width)
    keys = ", ".join(item.name for item in option.fields)
    return "\n".join(
        part
        for part in (
            textwrap.fill(f"--{option.name}  <{kind}>  ({state})", width, subsequent_indent=" " * 4),
            lines,
            _indent(f"Keys: {keys}.", width) if keys else "",
        )
        if part
    )


def _are_words(option: Option) -> bool:
    return bool(option.choices) and all(isinstance(choice, str) for choice in option.choices)


def _default(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value) if value != "" else '""'


def _indent(text: str, width: int) -> str:
    return textwrap.fill(
        text, width, initial_indent=" " * 4, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False
    )
