"""The commands that take fields: adding one is adding a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What a command reads and what it runs. Places are `module:name`, so that --help imports none of them."""

    about: str
    configs: tuple[str, ...]  # dataclasses whose fields are the flags, in the order help shows them
    run: str  # function that takes {class name: {field: value}}
    check: str = ""  # function of the same values that refuses what cannot run, and imports nothing heavy
    dry_run: str = ""  # function of the same values that does all but train and writes nothing
    any_method: bool = False  # `--method` names the method whose fields it takes; the last config is SFT's


_COMMON = (
    "posttrain.model.config:ModelConfig",
    "posttrain.data.config:ScriptArguments",
    "posttrain.data.config:DatasetMixtureConfig",
    "posttrain.cli.launch:LaunchArguments",
)

COMMANDS = {
    "sft": Command(
        "Supervised fine-tuning.",
        (*_COMMON, "posttrain.trainer.sft:SFTConfig"),
        "posttrain.cli.run:sft",
        "posttrain.cli.run:check_sft",
        "posttrain.cli.run:dry_sft",
    ),
    "dpo": Command(
        "Preference optimisation, on pairs of responses: DPO and its kin.",
        (*_COMMON, "posttrain.trainer.dpo:DPOConfig"),
        "posttrain.cli.run:dpo",
        "posttrain.cli.run:check_dpo",
        "posttrain.cli.run:dry_dpo",
    ),
    "kto": Command(
        "Preference optimisation, on responses that are each desirable or not: KTO and its kin.",
        (*_COMMON, "posttrain.trainer.kto:KTOConfig"),
        "posttrain.cli.run:kto",
        "posttrain.cli.run:check_kto",
        "posttrain.cli.run:dry_kto",
    ),
    "reward": Command(
        "A reward model, on pairs of responses of which one is preferred.",
        (*_COMMON, "posttrain.trainer.reward:RewardConfig"),
        "posttrain.cli.run:reward",
        "posttrain.cli.run:check_reward",
        "posttrain.cli.run:dry_reward",
    ),
    "prm": Command(
        "A process reward model, on answers whose steps are each labelled correct or not.",
        (*_COMMON, "posttrain.trainer.prm:PRMConfig"),
        "posttrain.cli.run:prm",
        "posttrain.cli.run:check_prm",
        "posttrain.cli.run:dry_prm",
    ),
    "score": Command(
        "Write the rewards that a reward model gives to rows.",
        ("posttrain.cli.score:ScoreArguments", *_COMMON[:3]),
        "posttrain.cli.score:score",
        "posttrain.cli.score:check_score",
    ),
    "inspect": Command(
        "Look at the rows of a run, and find what is wrong with them.",
        (
            "posttrain.cli.inspect:InspectArguments",
            "posttrain.cli.method:MethodArguments",
            *_COMMON[:3],
            "posttrain.cli.inspect:InspectLaunch",
            "posttrain.trainer.sft:SFTConfig",
        ),
        "posttrain.cli.inspect:inspect",
        "posttrain.cli.inspect:check_inspect",
        any_method=True,
    ),
    "check": Command(
        "Load all that a run would and run its self-checks, without training.",
        ("posttrain.cli.method:MethodArguments", *_COMMON, "posttrain.trainer.sft:SFTConfig"),
        "posttrain.cli.check:check",
        "posttrain.cli.check:check_fields",
        any_method=True,
    ),
    "merge": Command(
        "Merge an adapter into its base.", ("posttrain.model.config:MergeConfig",), "posttrain.cli.merge:merge"
    ),
    "convert": Command(
        "Rows of one dataset type to another.",
        ("posttrain.data.config:ConvertArguments",),
        "posttrain.cli.convert:convert",
    ),
}
