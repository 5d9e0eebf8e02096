"""`posttrain inspect`: rows as the model will see them, and what is wrong with them. Loads no weights."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from posttrain.cli.launch import LaunchArguments
from posttrain.cli.parse import Values, construct
from posttrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from posttrain.data.audit import TemplateAudit
    from posttrain.data.rows import SFTRowOptions
    from posttrain.report.findings import Inspection
    from posttrain.report.survey import Packing, Rows, RowView

# Fields of a run that say which rows go into which micro-batch. The others say how it trains, and may not even be
# valid on the machine where rows are looked at.
_BESIDES = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "dataset_num_proc")
_BESIDES += ("share_prefixes", "trust_remote_code", "model_init_kwargs", "dataloader_drop_last")
_BESIDES += ("train_sampling_strategy",)
SEARCHED = 2000  # rows tried one by one when one of them cannot be encoded
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

    from posttrain.data.tokenizer import set_up_tokenizer
    from posttrain.model.config import ModelConfig
    from posttrain.model.load import load_tokenizer
    from posttrain.report.data import page
    from posttrain.report.page import write_page
    from posttrain.report.terminal import console, show
    from posttrain.trainer.config import load_options
    from posttrain.trainer.sft import SFTConfig

    asked: InspectArguments = construct(InspectArguments, values["InspectArguments"])
    model: ModelConfig = construct(ModelConfig, values["ModelConfig"])
    args = _training_arguments(SFTConfig, values["SFTConfig"], model)
    source = str(model.model_name_or_path)
    tokenizer = set_up_tokenizer(
        load_tokenizer(source, load_options(args)), args.eos_token, args.pad_token, args.chat_template_path
    )
    sets = [_rows(data, name, tokenizer, args, asked.rows) for name, data in _load(values).items()]
    found = _inspection(sets, tokenizer, args, source, _shown_source(values))
    first = [(rows.name, view) for rows in sets for view in rows.view(range(min(asked.show, len(rows.numbers))))]
    show(found, tokenizer, first, console())
    if asked.html is not None:
        write_page(asked.html, page(found, tokenizer, first, _examples(found)), "html")
        print(f"\nwrote {asked.html}")


def check_inspect(values: Values) -> None:
    """Refuse what cannot be inspected, before anything heavy is imported."""
    from posttrain.cli.run import check

    # A stream needs no end here: its first rows are read.
    check({**values, "SFTConfig": {**values["SFTConfig"], "max_steps": 1}}, "SFTConfig")
    asked = values["InspectArguments"]
    for name in ("rows", "show"):
        if asked.get(name, 0) < 0:
            raise ConfigError(f"`{name}` is {asked[name]}; give a number of rows, at least 0.")


def _training_arguments(config: Any, given: dict[str, Any], model: Any) -> Any:
    from posttrain.cli.run import model_init_kwargs

    kept = {name: value for name, value in given.items() if name in {*config.__annotations__, *_BESIDES}}
    args = construct(config, {**kept, "output_dir": "inspect", "use_cpu": True, "bf16": False, "report_to": "none"})
    args.model_init_kwargs = model_init_kwargs(model, args)
    return args


def _load(values: Values) -> dict[str, Any]:
    """The sets by name. An evaluation set that the run does not ask for is read where there is one."""
    from posttrain.cli.run import load_data
    from posttrain.data.config import DatasetMixtureConfig, ScriptArguments

    script: ScriptArguments = construct(ScriptArguments, values["ScriptArguments"])
    mixture: DatasetMixtureConfig = construct(DatasetMixtureConfig, values["DatasetMixtureConfig"])
    config = values["SFTConfig"]
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


# Rows


def _read(dataset: Any, limit: int, name: str) -> tuple[Any, list[int], int | None]:
    """The rows to look at, their numbers in the source, and how many it has."""
    import numpy as np
    from datasets import IterableDataset

    from posttrain.data.rows import in_memory

    if isinstance(dataset, IterableDataset):
        rows = list(islice(iter(dataset), limit or None))
        return in_memory([dict(row) for row in rows], name), list(range(len(rows))), None
    total = len(dataset)
    if not limit or total <= limit:
        return dataset, list(range(total)), total
    numbers = np.linspace(0, total - 1, limit).round().astype(int).tolist()
    return dataset.select(numbers), numbers, total


def _rows(dataset: Any, name: str, tokenizer: Any, args: Any, limit: int) -> Rows:
    """Prepare a set with the code that trains. Rows that cannot be encoded are set aside."""
    from posttrain.report.survey import Rows
    from posttrain.trainer.options import sft_row_options

    raw, numbers, total = _read(dataset, limit, name)
    options = sft_row_options(args, args.packing, name)
    overflow = options.overflow
    if overflow == "error":  # the run would stop at the first; here all are counted
        options = replace(options, overflow="drop")
    raw, numbers, broken, prepared, report = _prepared(raw, numbers, tokenizer, options, args, name)
    return Rows(
        name=name,
        kind=_kind(raw, tokenizer, options, name),
        prepared=prepared,
        report=report,
        raw=raw,
        numbers=numbers,
        total=total,
        view=lambda places: [_view(raw, at, numbers[at], tokenizer, options, name) for at in places],
        max_length=args.max_length,
        overflow=overflow,
        keep=args.truncation_mode,
        broken=broken,
    )


def _prepared(raw: Any, numbers: list[int], tokenizer: Any, options: SFTRowOptions, args: Any, name: str) -> Any:
    """(raw rows, their numbers, the broken ones, prepared rows, the report)."""
    from posttrain.data.overflow import PreparationReport
    from posttrain.data.rows import prepare_sft, whole_rows

    try:
        found = prepare_sft(raw, tokenizer, options, args.dataset_num_proc, name, allow_empty=True)
        return raw, numbers, [], *found
    except DataError:
        if not len(raw):
            raise
    raw, numbers = raw.select(range(min(len(raw), SEARCHED))), numbers[:SEARCHED]
    broken: list[tuple[int, str]] = []
    good = []
    for at, number in enumerate(numbers):
        try:
            whole_rows(raw, [at], tokenizer, options, name)
            good.append(at)
        except DataError as error:
            broken.append((number, str(error).replace(f"Row {at} of", f"Row {number} of")))
    if not good or good[0]:  # what the rows are is read from the first one
        return raw, numbers, broken, _no_rows(), PreparationReport(name, rows_in=len(raw))
    prepared, report = prepare_sft(raw.select(good), tokenizer, options, None, name, allow_empty=True)
    sources = [good[at] for at in prepared["source"]]
    prepared = prepared.remove_columns("source").add_column("source", sources)
    report.examples = {key: [good[at] for at in places] for key, places in report.examples.items()}
    return raw, numbers, broken, prepared, report


def _no_rows() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [], "weights": [], "source": []})


def _kind(raw: Any, tokenizer: Any, options: SFTRowOptions, name: str) -> str:
    from posttrain.data.rows import whole_rows

    try:
        return whole_rows(raw, [], tokenizer, options, name)[0].replace("_", "-")
    except DataError:
        return "unknown"


def _view(raw: Any, at: int, number: int, tokenizer: Any, options: SFTRowOptions, name: str) -> RowView:
    """A row before and after `max_length`."""
    from posttrain.data.overflow import CONTINUED, FILLED, KEPT, MASKED
    from posttrain.data.rows import whole_rows
    from posttrain.report.survey import Laid, RowView

    try:
        _, [(ids, weights)] = whole_rows(raw, [at], tokenizer, options, name)
    except DataError:
        return RowView(number, "cannot be encoded", ())
    pieces = options.limit.apply(ids, weights)
    whole = (Laid(ids.tolist(), [0.0, *weights[1:].tolist()]),)
    state, cut = pieces[0][2:]
    if len(pieces) > 1:
        laid = [(piece, kept) for piece in pieces if (kept := piece[2]) in (KEPT, CONTINUED)]
        parts = tuple(
            Laid(part[0].tolist(), part[1].tolist(), f"piece {i} of {len(laid)}") for i, (part, _) in enumerate(laid, 1)
        )
        return RowView(number, f"split in {len(laid)} pieces", parts)
    if state == KEPT:
        fate = f"cut to {len(pieces[0][0]):,} of {len(ids):,} tokens" if cut else "kept"
        return RowView(number, fate, (Laid(pieces[0][0].tolist(), pieces[0][1].tolist()),))
    why = {FILLED: f"the prompt fills max_length={options.max_length}", MASKED: "nothing is trained"}
    return RowView(number, f"dropped: {why.get(state, f'longer than max_length={options.max_length}')}", whole)


# What is found


def _inspection(sets: Sequence[Rows], tokenizer: Any, args: Any, model: str, source: str) -> Inspection:
    from posttrain.report.findings import Inspection, find
    from posttrain.report.survey import Specials, survey

    specials = Specials.of(tokenizer)
    surveys = tuple(survey(rows, specials) for rows in sets)
    packing, audit = _packing(sets[0], args), _audit(sets[0], tokenizer, args, model)
    return Inspection(surveys, find(surveys, packing, audit), packing, audit, source, model)


def _packing(rows: Rows, args: Any) -> Packing | None:
    from posttrain.data.packing import plan_bins
    from posttrain.data.sampling import Collator, RowItems, row_lengths
    from posttrain.report.survey import Packing
    from posttrain.trainer.loading import make_items, train_loader

    if not len(rows.prepared):
        return None
    items = typing.cast(RowItems, make_items(rows.prepared, args, args.packing, "train"))
    share = args.share_prefixes is not False
    batches = [b["batch"] for b in islice(train_loader(items, args, Collator(share)), _BATCHES)]
    bins = items.bins
    lengths = row_lengths(rows.prepared)
    if bins is None and args.max_length is not None and max(lengths) <= args.max_length:
        bins = plan_bins(lengths, args.max_length)
    return Packing(
        is_on=args.packing,
        capacity=args.max_length,
        bins=len(bins or ()),
        tokens=sum(p.end - p.start for pieces in bins or () for p in pieces),
        batches=len(batches),
        laid_tokens=sum(batch.num_tokens for batch in batches),
        unshared_tokens=sum(batch.unshared_tokens for batch in batches),
    )


def _audit(rows: Rows, tokenizer: Any, args: Any, model: str) -> TemplateAudit | None:
    """The audit of the template, where rows are chats."""
    from transformers import GenerationConfig

    from posttrain.data.audit import audit_template
    from posttrain.data.formats import is_conversational, maybe_convert_to_chatml

    first = dict(rows.raw[0])
    if not tokenizer.chat_template or not is_conversational(maybe_convert_to_chatml(first)):
        return None
    try:
        generation = GenerationConfig.from_pretrained(model, **(args.model_init_kwargs or {}))
    except Exception:  # many models have none, and reading one from the hub fails in many ways
        generation = None
    return audit_template(tokenizer, generation_config=generation)


def _examples(found: Inspection) -> dict[tuple[str, int], RowView]:
    """The rows that findings name, as the model sees them."""
    out = {}
    for each in found.sets:
        place = {number: at for at, number in enumerate(each.rows.numbers)}
        wanted = {row for f in found.findings if f.where == each.rows.name for row in f.rows if row in place}
        for row in sorted(wanted):
            out[(each.rows.name, row)] = each.rows.view([place[row]])[0]
    return out
