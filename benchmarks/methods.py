"""What the benchmarks of preference methods share: the rows, the settings, the tables.

Every run is its own process and trains one epoch on the same rows with the same optimizer batch, and gradient
checkpointing on, everyone's default. Imports and first touches happen before the clock starts, and the first step is
left out. Repetitions are interleaved. Memory is the highest resident size over what the process held before loading
the model. Speed is in rows a second: every side has the same rows, whatever it computes of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import peers
import rows as data
from common import CLOCKS, add_run_arguments, describe, machine, note, run_once, save, table

NAMES = {"ours": "posttrain", "trl-1.13.0": "TRL 1.13", "trl-1.16.0": "TRL 1.16"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"size": 8},
    "1 a micro-batch": {"size": 1},
    "2 a micro-batch": {"size": 2},
    "4 a micro-batch": {"size": 4},
    "grouped by length": {"size": 8, "train_sampling_strategy": "group_by_length"},
}
SHORT = ["default", "2 a micro-batch"]
SCENARIOS = {
    "fixed": "prompt of 512 tokens, responses of 128",
    "varied": "prompt of 128 tokens, responses of varied length, median 256",
}
Targets = dict[tuple[str, str, str], float]
"""(scenario, side, "default" or "best") -> at least so many times its rows a second."""


def pairs(scenario: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of numbers, one a token: prompt, chosen, rejected."""
    draw = random.Random(seed)
    if scenario == "fixed":
        prompt, sizes = 512, [128] * (2 * count)
    else:
        prompt, sizes = 128, data.lengths(2 * count, seed, median=256, sigma=0.6, longest=800)

    def tokens(size: int) -> list[int]:
        return [draw.randrange(10**6) for _ in range(size)]

    return [
        {"prompt": tokens(prompt), "chosen": tokens(sizes[2 * i]), "rejected": tokens(sizes[2 * i + 1])}
        for i in range(count)
    ]


def labelled(scenario: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Both responses of half as many pairs, one desirable and one not."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs(scenario, count // 2, seed)
        for side in ("chosen", "rejected")
    ]


class Bench:
    def __init__(self, method: str, args: argparse.Namespace, folder: str) -> None:
        self.method, self.args, self.folder = method, args, Path(folder)

    def config(self, setting: str) -> dict[str, Any]:
        config = dict(SETTINGS[setting])
        size = min(config.pop("size"), self.args.batch)
        config |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": self.args.batch // size}
        return config if self.args.dtype == "auto" else config | {"bf16": self.args.dtype == "bf16"}

    def run(self, scenario: str, side: str, setting: str) -> dict[str, Any]:
        path = self.folder / f"{scenario}.json"
        if not path.exists():
            make = labelled if self.method == "kto" else pairs
            path.write_text(json.dumps(make(scenario, self.args.batch * self.args.steps, self.args.seed)))
        job = {"method": self.method, "side": side, "model": self.args.model, "rows": str(path)}
        job |= {"config": self.config(setting), "threads": self.args.threads}
        found = run_once(peers.interpreter(side, self.args.peer_root), "method_worker.py", job, self.args.limit)
        if "failed" in found:
            return found
        steps = found["steps"][1:]
        seconds = sum(step[CLOCKS[self.args.clock]] for step in steps)
        return {**found, "config": job["config"], "rate": self.args.batch * len(steps) / seconds}


def measure(bench: Bench, scenario: str, plan: dict[str, list[str]]) -> list[dict[str, Any]]:
    order = [(side, setting) for side in plan for setting in plan[side]]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in order}
    for repetition in range(bench.args.repeat):
        for side, setting in order:
            note(f"{scenario}, repetition {repetition + 1}, {NAMES[side]}, {setting}")
            runs[side, setting].append(bench.run(scenario, side, setting))
    entries = []
    for (side, setting), results in runs.items():
        good = [each for each in results if "failed" not in each]
        entry: dict[str, Any] = {"side": side, "setting": setting, "runs": results}
        if good:
            entry["rate"] = statistics.median(each["rate"] for each in good)
            entry["peak_mib"] = statistics.median(each["peak_over_baseline_mib"] for each in good)
        entries.append(entry)
    return entries


def report(entries: list[dict[str, Any]]) -> str:
    mine = next((e for e in entries if e["side"] == "ours" and "rate" in e), None)
    lines = []
    for entry in entries:
        label = f"{NAMES[entry['side']]}, {entry['setting']}"
        if "rate" not in entry:
            lines.append([label, entry["runs"][0]["failed"], "", "", ""])
            continue
        peer = entry["side"] != "ours" and mine
        lines.append(
            [
                label,
                f"{entry['rate']:.3f}",
                f"{mine['rate'] / entry['rate']:.2f}×" if peer else "",
                f"{entry['peak_mib']:.0f}",
                f"{mine['peak_mib'] / entry['peak_mib']:.2f}×" if peer else "",
            ]
        )
    return table(["", "rows/s", "posttrain is faster by", "peak MiB", "posttrain's memory is"], lines)


def verdicts(scenario: str, entries: list[dict[str, Any]], targets: Targets, memory: float) -> list[str]:
    """Each number wanted beside the one found, ours at its default."""
    mine = next((e for e in entries if e["side"] == "ours" and "rate" in e), None)
    if mine is None:
        return []
    lines = []
    for (name, side, kind), wanted in targets.items():
        theirs = [e for e in entries if e["side"] == side and kind in ("best", e["setting"]) and "rate" in e]
        if name != scenario or not theirs:
            continue
        fastest = max(theirs, key=lambda e: e["rate"])
        found, mark = mine["rate"] / fastest["rate"], lambda met: "met" if met else "NOT met"
        lines.append(f"- {NAMES[side]}, {kind}: {found:.2f}× (wanted {wanted}×, {mark(found >= wanted)})")
        if kind == "default" and memory:
            share = mine["peak_mib"] / fastest["peak_mib"]
            lines.append(f"  memory {share:.2f}× (wanted at most {memory}×, {mark(share <= memory)})")
    return lines


def main(method: str, about: str, targets: Targets, memory: float = 0.0) -> None:
    """Run a benchmark. memory: wanted at most so much of the peer's at its default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(parser)
    cache = Path(os.environ.get("POSTTRAIN_CACHE", "~/.cache/posttrain")).expanduser()
    parser.add_argument("--model", default=str(cache / "smollm2-135m-instruct"), help="made by demo/model.py")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--sides", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument(
        "--settings", nargs="+", choices=list(SETTINGS), help="of the peers; default: all where lengths vary"
    )
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--batch", type=int, default=8, help="rows in an optimizer batch")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps in a run; the first is left out")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions, interleaved")
    add_run_arguments(parser, method)
    args = parser.parse_args()
    info = machine(args.threads, args.clock)
    print(f"{describe(info)}\n{args.batch} rows an optimizer step, {args.steps} steps, {args.repeat} repetition(s)\n")
    result: dict[str, Any] = {"machine": info, "batch": args.batch, "steps": args.steps}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(method, args, folder)
        for scenario in args.only:
            settings = args.settings or (list(SETTINGS) if scenario == "varied" else SHORT)
            plan = {side: ["default"] if side == "ours" else settings for side in args.sides}
            result[scenario] = entries = measure(bench, scenario, plan)
            print(f"**{SCENARIOS[scenario]}**\n\n{report(entries)}\n", flush=True)
            print("\n".join(verdicts(scenario, entries, targets, memory)) + "\n", flush=True)
            if args.save:
                save(args.save, result)
