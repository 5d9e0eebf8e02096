"""Supervised fine-tuning of SmolLM2-135M-Instruct: real tokens a second, against TRL at its defaults and at its best.

python benchmarks/sft.py [--quick] [--peer-root DIR] [--model DIR] [--only full lora tools]

Every run is its own process and trains one epoch on the same pre-tokenized rows (log-normal lengths, median 200, at
most 1,024; every token a target) with the same optimizer batch and gradient checkpointing (on: everyone's default).
Imports and first touches happen before the clock starts; with native bf16 the first step is left out too.
Repetitions are interleaved. Memory is the highest resident size over what the process held before loading the model.

The default precision follows the processor: bf16 autocast over fp32 weights (everyone's default) where it multiplies
bfloat16 natively; elsewhere fp32 for every side, which is not TRL's default but much faster for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import peers
import rows as data
from common import CLOCKS, add_run_arguments, describe, machine, note, run_once, save, table

NAMES = {"ours": "posttrain", "trl-1.13.0": "TRL 1.13", "trl-1.16.0": "TRL 1.16"}
TRL = ["trl-1.13.0", "trl-1.16.0"]
# How a micro-batch is made. `size`: rows in it (None: the whole optimizer batch).
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"size": 8},
    "1 row": {"size": 1},
    "2 rows": {"size": 2},
    "4 rows": {"size": 4},
    "grouped by length": {"size": 8, "train_sampling_strategy": "group_by_length"},
    "packing": {"size": 1, "packing": True},
    "one micro-batch": {"size": None},
}
# What runs: scenario -> side -> settings. A setting equal to another at this optimizer batch runs once.
SOME = ["default", "1 row", "grouped by length", "packing"]
ALL = [*SOME, "2 rows", "4 rows"]
Plan = dict[str, dict[str, list[str]]]
PLAN: Plan = {
    "full": {"ours": ["default", "one micro-batch", "packing"], **dict.fromkeys(TRL, SOME)},
    "lora": {"ours": ["default"], **{side: ["default", "1 row"] for side in TRL}},
    "tools": {"ours": ["default", "one micro-batch"], **{side: ["default"] for side in TRL}},
}
EVERYTHING: Plan = {
    "full": {"ours": ["default", "one micro-batch", "1 row", "packing"], **dict.fromkeys(TRL, ALL)},
    "lora": {"ours": ["default", "one micro-batch", "packing"], **dict.fromkeys(TRL, ALL)},
    "tools": PLAN["tools"],
}
QUICK: Plan = {
    "full": {"ours": ["default"], "trl-1.13.0": ["1 row"], "trl-1.16.0": ["default"]},
    "lora": {"ours": ["default"], "trl-1.13.0": ["default"]},
    "tools": {"ours": ["default"], "trl-1.16.0": ["default"]},
}
TITLES = {
    "full": "Full fine-tuning",
    "lora": "LoRA, rank 16, every linear layer",
    "tools": "Full fine-tuning, every row begins with the same 300-token tool schema",
}
# Wanted: (scenario, peer, "default" or "best") -> at least so many times its tokens a second.
TARGETS = {
    **{(s, "trl-1.16.0", "default"): 2.5 for s in ("full", "lora")},
    **{(s, "trl-1.13.0", "default"): 1.7 for s in ("full", "lora")},
    **{(s, "trl-1.16.0", "best"): 2.0 for s in ("full", "lora")},
    **{(s, "trl-1.13.0", "best"): 1.3 for s in ("full", "lora")},
    ("tools", "trl-1.16.0", "default"): 4.0,
}


class Bench:
    def __init__(self, args: argparse.Namespace, info: dict[str, Any], folder: str) -> None:
        self.args, self.info, self.folder = args, info, Path(folder)
        self.native = info["native_bf16"]
        self.bf16 = self.native if args.dtype == "auto" else args.dtype == "bf16"
        self.batch = args.batch or (16 if self.native else 8)
        # The trainer thrown away before the clock starts has warmed the process; what is left to the first step
        # (optimizer state, gradients) is noise beside steps of half a minute.
        self.warmup = 1 if self.native else 0
        self.steps = args.steps or ((3 if self.native else 2) if not args.quick else 1 + self.warmup)

    def rows(self, scenario: str) -> list[list[int]]:
        make = data.tools if scenario == "tools" else data.varied
        return make(self.batch * self.steps, self.args.seed)

    def config(self, side: str, setting: str) -> dict[str, Any]:
        config = dict(SETTINGS[setting])
        size = config.pop("size") or self.batch
        if config.get("packing"):  # as many bins of 1,024 as hold about the tokens of an optimizer batch
            tokens = sum(map(len, self.rows("full"))) / self.steps
            accumulate = max(1, round(tokens / 1024)) if self.steps > 1 else 64
        else:
            accumulate = max(1, self.batch // size)
        if not self.bf16:
            config["bf16"] = False
        elif self.args.dtype == "bf16":
            config["bf16"] = True
        return {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate, **config}

    def distinct(self, side: str, settings: list[str]) -> list[str]:
        """The settings asked for, without those that come to the same arguments at this optimizer batch."""
        asked = [s for s in settings if not self.args.settings or s in self.args.settings]
        found: dict[str, str] = {}
        for setting in asked:
            found.setdefault(json.dumps(self.config(side, setting), sort_keys=True), setting)
        return list(found.values())

    def job(self, scenario: str, side: str, setting: str) -> dict[str, Any]:
        path = self.folder / f"{scenario}.json"
        if not path.exists():
            path.write_text(json.dumps(self.rows(scenario)))
        return {
            "side": side,
            "model": self.args.model,
            "rows": str(path),
            "config": self.config(side, setting),
            "lora": 16 if scenario == "lora" else 0,
            "threads": self.args.threads,
            "prewarm": True,
        }

    def run(self, scenario: str, side: str, setting: str) -> dict[str, Any]:
        job = self.job(scenario, side, setting)
        result = run_once(peers.interpreter(side, self.args.peer_root), "sft_worker.py", job, self.args.limit)
        if "failed" in result:
            return result
        steps = result["steps"][self.warmup :] or result["steps"]
        seconds, tokens = sum(s[CLOCKS[self.args.clock]] for s in steps), sum(s["tokens"] for s in steps)
        computed = sum(s["computed"] for s in steps)
        return {**result, "config": job["config"], "rate": tokens / seconds, "computed_share": computed / tokens}

    def leaks(self, side: str) -> dict[str, Any]:
        """Whether packed rows see each other: what a neighbour's tokens move in a row's logits."""
        job = {**self.job("full", side, "packing"), "leak": True}
        job["config"] = {**job["config"], "bf16": False}
        return run_once(peers.interpreter(side, self.args.peer_root), "sft_worker.py", job, self.args.limit)

    def peak(self) -> float:
        return self.info["bf16_gflops" if self.bf16 else "fp32_gflops"] * 1e9

    def flops_per_token(self, scenario: str) -> float:
        rows = self.rows(scenario)
        return data.train_flops(self.args.model, rows, scenario == "lora") / sum(map(len, rows))


def scenario_results(bench: Bench, scenario: str, plan: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Every (side, setting), its repetitions interleaved with all the others'."""
    order = [(side, setting) for side in plan for setting in plan[side]]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in order}
    for repetition in range(bench.args.repeat):
        for side, setting in order:
            note(f"{scenario}, repetition {repetition + 1}, {NAMES[side]}, {setting}")
            runs[side, setting].append(bench.run(scenario, side, setting))
    entries = []
    for (side, setting), results in runs.items():
        good = [r for r in results if "failed" not in r]
        entry: dict[str, Any] = {"side": side, "setting": setting, "runs": results}
        if good:
            entry["rate"] = statistics.median(r["rate"] for r in good)
            entry["peak_mib"] = max(r["peak_over_baseline_mib"] for r in good)
        entries.append(entry)
    return entries


def scenario_table(bench: Bench, scenario: str, entries: list[dict[str, Any]]) -> str:
    mine = max((e.get("rate", 0.0) for e in entries if e["side"] == "ours"), default=0.0)
    flops, out = bench.flops_per_token(scenario), []
    for entry in entries:
        label = f"{NAMES[entry['side']]}, {entry['setting']}"
        if "rate" not in entry:
            out.append([label, entry["runs"][0]["failed"], "", "", "", ""])
            continue
        share = entry["runs"][0]["computed_share"]
        ratio = f"{mine / entry['rate']:.2f}×" if entry["side"] != "ours" and mine else ""
        use = f"{100 * entry['rate'] * flops / bench.peak():.0f}%"
        out.append([label, f"{entry['rate']:.1f}", ratio, f"{share:.2f}", use, f"{entry['peak_mib']:.0f}"])
    header = ["", "real tokens/s", "posttrain's best is faster by", "positions computed per token", "MFU", "peak MiB"]
    return table(header, out)


def verdicts(scenario: str, entries: list[dict[str, Any]]) -> list[str]:
    """Each number wanted beside the one found. Ours at its default for the first kind, at its best for the second."""

    def rate(side: str, kind: str) -> float:
        rates = [e.get("rate", 0.0) for e in entries if e["side"] == side and kind in ("best", e["setting"])]
        return max(rates, default=0.0)

    lines = []
    for (name, side, kind), wanted in TARGETS.items():
        if name == scenario and rate(side, kind) and rate("ours", kind):
            found = rate("ours", kind) / rate(side, kind)
            mark = "met" if found >= wanted else "NOT met"
            lines.append(f"- {NAMES[side]}, {kind}: {found:.2f}× (wanted {wanted}×, {mark})")
    return lines


def leak_lines(bench: Bench) -> tuple[list[str], dict[str, Any]]:
    lines, found = [], {}
    for side in [s for s in TRL if s in bench.args.sides]:
        note(f"packing, does a neighbour leak, {NAMES[side]}")
        found[side] = result = bench.leaks(side)
        if "failed" in result:
            lines.append(f"- {NAMES[side]} packing: could not be checked ({result['failed']})")
            continue
        moved = result["moved_by_neighbour"] / result["scale"]
        verdict = "correct on a CPU" if moved < 1e-3 else "NOT correct on a CPU, left out"
        lines.append(
            f"- {NAMES[side]} packing: a neighbour moves a row's logits by {moved:.1e} of their size: {verdict}"
        )
    return lines, found


def without_leaks(plan: Plan, found: dict[str, Any]) -> Plan:
    leaking = {side for side, r in found.items() if r.get("moved_by_neighbour", 0) > 1e-3 * r.get("scale", 1)}
    return {
        scenario: {
            side: [s for s in settings if not (s == "packing" and side in leaking)] for side, settings in sides.items()
        }
        for scenario, sides in plan.items()
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(parser)
    cache = Path(os.environ.get("POSTTRAIN_CACHE", "~/.cache/posttrain")).expanduser()
    parser.add_argument("--model", default=str(cache / "smollm2-135m-instruct"), help="made by demo/model.py")
    parser.add_argument("--quick", action="store_true", help="few settings, few steps")
    parser.add_argument("--all", action="store_true", help="every setting of every side")
    parser.add_argument("--only", nargs="+", choices=list(PLAN), default=list(PLAN))
    parser.add_argument("--sides", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), help="only these")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--batch", type=int, help="rows in an optimizer batch (default 16, 8 without native bf16)")
    parser.add_argument("--steps", type=int, help="optimizer steps in a run (default 3, 2 without native bf16)")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions, interleaved")
    add_run_arguments(parser, "sft")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    info = machine(args.threads, args.clock)
    print(describe(info), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, info, folder)
        rows = bench.rows("full")
        sizes = [len(row) for row in rows]
        print(
            f"{'bf16' if bench.bf16 else 'fp32, every side'}; {bench.batch} rows an optimizer step, "
            f"{bench.steps} step(s), {sum(sizes)} tokens in rows of {min(sizes)} to {max(sizes)}; "
            f"gradient checkpointing on; repetitions {args.repeat}, {args.clock} clock\n",
            flush=True,
        )
        result: dict[str, Any] = {"machine": info, "bf16": bench.bf16, "batch": bench.batch, "steps": bench.steps}
        plan = QUICK if args.quick else EVERYTHING if args.all else PLAN
        if not args.quick and (not args.settings or "packing" in args.settings):
            lines, result["packing"] = leak_lines(bench)
            print("\n".join(lines) + "\n", flush=True)
            plan = without_leaks(plan, result["packing"])
        for scenario in args.only:
            sides = {side: bench.distinct(side, plan[scenario].get(side, [])) for side in args.sides}
            entries = scenario_results(bench, scenario, sides)
            result[scenario] = entries
            print(f"**{TITLES[scenario]}**\n\n{scenario_table(bench, scenario, entries)}\n", flush=True)
            print("\n".join(verdicts(scenario, entries)) + "\n", flush=True)
            if args.save:
                save(args.save, result)


if __name__ == "__main__":
    main()
