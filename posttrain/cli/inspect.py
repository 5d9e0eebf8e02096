"""`posttrain inspect`: rows as the model will see them, and what is wrong with them. Loads no weights."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from posttrain.cli.launch import LaunchArguments
from posttrain.cli.method import choose, possible
from posttrain.cli.parse import Values, construct
from posttrain.cli.run import config_of
from posttrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from posttrain.report.finding import Facts
    from posttrain.report.findings import Inspection
    from posttrain.report.survey import Packing, Rows, RowView, Survey

# Fields of a run that say which rows go into which micro-batch. The others say how it trains, and may not even be
# valid on the machine where rows are looked at.
_BESIDES = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "dataset_num_proc")
_BESIDES += ("share_prefixes", "trust_remote_code", "model_init_kwargs", "dataloader_drop_last", "template_audit")
_BESIDES += ("train_sampling_strategy",)
_BATCHES = 32  # micro-batches whose prefixes are looked at


@dataclass
class InspectArguments:
    """What to look at, and where to write it."""

    html: str | None = None
    """File to write the page to. Unset: only the terminal."""
    rows: int = 20_000
    """Most rows read of a set: evenly spread over it, or the first of a stream. 0: all."""
    show: int = 3
    """Rows of each set to show, beside those that findings name."""


class InspectLaunch(LaunchArguments):
    """Accepted, so that the file of a run can be inspected as it is; one process looks at the rows."""


def inspect(values: Values) -> None:
    """`posttrain inspect`."""
    check_inspect(values)

    from posttrain.cli.reading import read_set
    from posttrain.data.tokenizer import set_up_tokenizer
    from posttrain.model.config import ModelConfig
    from posttrain.model.load import load_tokenizer
    from posttrain.report.data import page
    from posttrain.report.page import write_page
    from posttrain.report.terminal import console, show
    from posttrain.trainer.config import load_options

    asked: InspectArguments = construct(InspectArguments, values["InspectArguments"])
    model: ModelConfig = construct(ModelConfig, values["ModelConfig"])
    loaded = _load(values)
    method = choose(values, loaded["train"])
    args = _training_arguments(method, values[config_of(method)], model)
    source = str(model.model_name_or_path)
    fields = (getattr(args, name, None) for name in ("eos_token", "pad_token", "chat_template_path"))
    tokenizer = set_up_tokenizer(load_tokenizer(source, load_options(args)), *fields)
    reader, facts = _parts(method)
    sets = [read_set(reader(tokenizer, args, name), data, asked.rows) for name, data in loaded.items()]
    found = _inspection(sets, facts, tokenizer, args, source, _shown_source(values), method)
    first = [(rows.name, view) for rows in sets for view in rows.view(range(min(asked.show, len(rows.numbers))))]
    show(found, tokenizer, first, console())
    if asked.html is not None:
        write_page(asked.html, page(found, tokenizer, first, _examples(found)), "html")
        print(f"\nwrote {asked.html}")


def check_inspect(values: Values) -> None:
    """Refuse what cannot be inspected, before anything heavy is imported."""
    from posttrain.cli.run import check

    # A stream needs no end here: its first rows are read.
    config = config_of(possible(values)[0])
    check({**values, config: {**values[config], "max_steps": 1}}, config)
    asked = values["InspectArguments"]
    for name in ("rows", "show"):
        if asked.get(name, 0) < 0:
            raise ConfigError(f"`{name}` is {asked[name]}; give a number of rows, at least 0.")


def _parts(method: str) -> tuple[Any, Callable[[Survey], Facts]]:
    """What reads the method's rows, and what it wants known of them."""
    from posttrain.cli.reading import SFTReader
    from posttrain.cli.reading_labels import PairReader, StepReader, UnpairedReader
    from posttrain.report import pairs, sft, steps, unpaired

    return {
        "sft": (SFTReader, sft.facts),
        "dpo": (PairReader, pairs.facts),
        "kto": (UnpairedReader, unpaired.facts),
        "prm": (StepReader, steps.facts),
        "reward": (partial(PairReader, is_reward=True), pairs.facts),
    }[method]


def _training_arguments(method: str, given: dict[str, Any], model: Any) -> Any:
    from posttrain.cli.run import model_init_kwargs
    from posttrain.trainer.config import BaseConfig

    config = getattr(import_module(f"posttrain.trainer.{method}"), config_of(method))
    own = takewhile(lambda cls: cls is not BaseConfig, config.__mro__)
    about_rows = {*_BESIDES, *(name for cls in own for name in cls.__annotations__)}
    kept = {name: value for name, value in given.items() if name in about_rows}
    args = construct(config, {**kept, "output_dir": "inspect", "use_cpu": True, "bf16": False, "report_to": "none"})
    args.model_init_kwargs = model_init_kwargs(model, args)
    return args


def _load(values: Values) -> dict[str, Any]:
    """The sets by name. An evaluation set that the run does not ask for is read where there is one."""
    from posttrain.cli.run import load_data
    from posttrain.data.config import DatasetMixtureConfig, ScriptArguments

    script: ScriptArguments = construct(ScriptArguments, values["ScriptArguments"])
    # Unchecked: every row that would stop the run is to be shown, not the first alone.
    unchecked = values["DatasetMixtureConfig"] | {"check_formats": False}
    mixture: DatasetMixtureConfig = construct(DatasetMixtureConfig, unchecked)
    config = values[config_of(possible(values)[0])]
    wanted = config.get("eval_strategy", "no") != "no" or config.get("do_eval") or config.get("eval_on_start")
    try:
        train, evaluation = load_data(script, mixture, wants_eval=True)
    except (ConfigError, DataError):
        if wanted:
            raise
        train, evaluation = load_data(script, mixture, wants_eval=False)
    return {"train": train} if evaluation is None else {"train": train, "eval": evaluation}


def _shown_source(values: Values) -> str:
    script, mixture = values["ScriptArguments"], values["DatasetMixtureConfig"]
    sources = [source.get("path", "") for source in mixture.get("datasets") or ()]
    return str(script.get("dataset_name") or ", ".join(map(str, sources)))


# What is found


def _inspection(
    sets: Sequence[Rows],
    facts: Callable[[Survey], Facts],
    tokenizer: Any,
    args: Any,
    model: str,
    source: str,
    method: str,
) -> Inspection:
    from posttrain.report.findings import Inspection, find
    from posttrain.report.survey import Specials, survey
    from posttrain.trainer.auditing import audit_of

    specials = Specials.of(tokenizer)
    surveys = tuple(survey(rows, specials) for rows in sets)
    known = tuple(map(facts, surveys))
    packing = _packing(sets[0], args, method)
    audit, accepted = audit_of(tokenizer, args, model, sets[0].raw) or (None, frozenset[str]())
    findings = find(surveys, known, packing, audit, accepted)
    return Inspection(surveys, known, findings, packing, audit, source, model, method)


def _packing(rows: Rows, args: Any, method: str) -> Packing | None:
    from posttrain.data.packing import plan_bins
    from posttrain.data.sampling import Collator, RowItems, row_lengths
    from posttrain.report.survey import Packing
    from posttrain.trainer.loading import grouped_items, make_items, train_loader

    if not len(rows.prepared):
        return None
    packs = method == "sft"
    if packs:
        items = typing.cast(RowItems, make_items(rows.prepared, args, args.packing, "train"))
    else:
        items = grouped_items(rows.prepared, rows.per_row)
    collator = Collator(args.share_prefixes is not False, grouped=rows.per_row > 1, own=method == "prm")
    batches = [b["batch"] for b in islice(train_loader(items, args, collator), _BATCHES)]
    bins = items.bins if packs else None
    lengths = row_lengths(rows.prepared)
    if packs and bins is None and args.max_length is not None and max(lengths) <= args.max_length:
        bins = plan_bins(lengths, args.max_length)
    return Packing(
        is_on=packs and args.packing,
        capacity=args.max_length,
        bins=len(bins or ()),
        tokens=sum(p.end - p.start for pieces in bins or () for p in pieces),
        batches=len(batches),
        laid_tokens=sum(batch.num_tokens for batch in batches),
        unshared_tokens=sum(batch.unshared_tokens for batch in batches),
    )


def _examples(found: Inspection) -> dict[tuple[str, int], RowView]:
    """The rows that findings name, as the model sees them."""
    out = {}
    for each in found.sets:
        place = {number: at for at, number in enumerate(each.rows.numbers)}
        wanted = {row for f in found.findings if f.where == each.rows.name for row in f.rows if row in place}
        for row in sorted(wanted):
            out[(each.rows.name, row)] = each.rows.view([place[row]])[0]
    return out
