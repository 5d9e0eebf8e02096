"""Fields every trainer shares, on top of `transformers.TrainingArguments`."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch
from transformers import TrainingArguments

from posttrain.data.audit import audit_policy
from posttrain.errors import ConfigError, suggest
from posttrain.model.load import LoadOptions, Prepared
from posttrain.parallel.deepspeed import join_ranks
from posttrain.parallel.device import native_bf16
from posttrain.parallel.ranks import say


@dataclass
class BaseConfig(TrainingArguments):
    """Training arguments with the fields of the engine: layout, memory knobs, precision."""

    task: ClassVar[str] = "CAUSAL_LM"  # what the model's head gives, as peft names it

    logging_steps: float = 10
    """Log every so many optimizer steps; below 1, a share of all steps. Entropy and accuracy are measured on the
    steps that log."""
    gradient_checkpointing: bool | None = True
    """Recompute activations in the backward pass instead of keeping them (alias of `activation_checkpointing`)."""
    bf16: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Compute in bfloat16 over float32 master weights. Unset: on where the hardware multiplies bfloat16 natively and
    `fp16` is off."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    """Arguments of the learning-rate schedule."""
    use_liger_kernel: bool = False
    """Use Liger's kernels for the model's own layers. The head stays ours."""
    torch_empty_cache_steps: int | None = None
    """Release cached device memory every so many steps."""
    model_init_kwargs: dict[str, Any] | str | None = None
    """Arguments of `from_pretrained`, used when the model is given as a name or a path."""
    trust_remote_code: bool = False
    """Allow code that comes with a model or a data set to run."""
    router_aux_loss_coef: float = 0.001
    """Weight of the balance loss of a mixture-of-experts model: a mean over the step's sequences, part of the training
    loss and logged as `aux_loss`; 0 turns it off."""
    dataset_num_proc: int | None = None
    """Processes that tokenize. Unset: one."""
    shuffle_dataset: bool = False
    """Shuffle the rows once, with `data_seed`, before packing; a stream in each pass, see `shuffle_buffer_size`."""
    shuffle_buffer_size: int = 1000
    """Rows of a stream that `shuffle_dataset` draws the next one from. They are saved with each checkpoint."""
    resume_with_changes: bool = False
    """Go on from a checkpoint although the data, their order or the batch sizes changed since: rows may come twice or
    never. Off: an error that names what changed."""
    overwrite_output_dir: bool = False
    """Let a new run write into an `output_dir` that holds checkpoints of another; they count as older ones."""
    pad_to_multiple_of: int | None = None
    """Round the length of padded rows up to a multiple. Only the padded layout pads."""
    activation_checkpointing_policy: Literal["full", "attention", "matmul"] = "full"
    """What a checkpointed layer recomputes. full: everything. attention: everything but attention. matmul: neither
    attention nor matrix products, only what is cheap."""
    activation_memory_mb: int | None = None
    """Memory for layers that keep all their activations although checkpointing is on, in MiB: as many of the last
    layers as fit, from bytes measured in the first step. Unset: every layer is checkpointed."""
    activation_offloading: bool = False
    """Keep activations in host memory between forward and backward; with checkpointing, the inputs of layers. Nothing
    changes on a CPU."""
    template_audit: str | list[str] = "error"
    """What to do when the audit of the chat template finds a fault: error, warn (print it and go on), off (make no
    audit), or the names of the checks whose failure is accepted. Rows that are no chats need no audit."""
    layout: Literal["auto", "packed", "packed-unshared", "padded"] = "auto"
    """How sequences lie in a micro-batch: side by side with common prefixes computed once, side by side without
    sharing, or padded. `auto` takes the first that the model can do exactly, found by a probe."""
    share_prefixes: bool | None = None
    """Compute common prefixes once. Unset: on, unless dropout would make shared and separate continuations differ."""
    max_tokens_per_forward: int | None = None
    """Run a micro-batch of more tokens in pieces. A memory knob: it cannot change the result."""
    head_chunk_tokens: int | None = None
    """Read-outs the head projects at once. Unset: as many as fit in `head_memory_mb`."""
    head_memory_mb: int | None = None
    """Memory the head may take, in MiB: a chunk of logits, and the gradient of its weight when formed in the forward
    pass (else it costs a fourth product). Unset: 1,024 on a CPU, 4,096 elsewhere."""

    skip_self_checks: list[str] | None = None
    """Checks to leave out before the first step, by name: accumulation, gradients, forest, template; or all."""
    handle_signals: bool = True
    """On SIGTERM, SIGINT or SIGUSR1, save a checkpoint at the end of the step and end the run; on a second, end it at
    once."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.bf16 is None:
            self.bf16 = not self.fp16 and native_bf16()
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        if self.activation_checkpointing_kwargs is None and self.gradient_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = {"use_reentrant": False}
        # A NaN is an error here, never a value to filter out of the log; and the filter waits for the device.
        self.logging_nan_inf_filter = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated")
            super().__post_init__()
        self._check_choices()
        audit_policy(self.template_audit)
        self._check_geometry()
        self._check_activations()
        if self.use_liger_kernel:
            self.liger_kernel_config = _liger_config(self.liger_kernel_config)
        if self.deepspeed_plugin is not None and self.use_cpu:
            join_ranks()

    def _check_choices(self) -> None:
        """Hold the values of our own fields to their `Literal`s."""
        for cls in type(self).__mro__:
            if not issubclass(cls, BaseConfig):
                continue
            for name, hint in inspect.get_annotations(cls, eval_str=True).items():
                literals = (
                    [hint] if get_origin(hint) is Literal else [h for h in get_args(hint) if get_origin(h) is Literal]
                )
                choices = [value for literal in literals for value in get_args(literal)]
                value = getattr(self, name)
                if choices and value is not None and value not in choices:
                    known = ", ".join(map(str, choices))
                    raise ConfigError(
                        f"`{name}` is {value!r}; expected {known}.{suggest(str(value), map(str, choices))}"
                    )

    def _check_geometry(self) -> None:
        positive = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        optional = (
            "shuffle_buffer_size",
            "head_memory_mb",
            "max_tokens_per_forward",
            "head_chunk_tokens",
            "activation_memory_mb",
            "pad_to_multiple_of",
            "dataset_num_proc",
        )
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1.")
        for name in ("learning_rate", "weight_decay", "warmup_steps", "router_aux_loss_coef"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; it cannot be negative.")
        if self.max_steps < 1 and self.num_train_epochs <= 0:
            raise ConfigError(f"`num_train_epochs` is {self.num_train_epochs}; set it, or `max_steps`, above 0.")
        if self.n_gpu > 1:
            # One process with several GPUs would be wrapped in nn.DataParallel by the base class.
            self._n_gpu = 1
            warnings.warn(
                f"{torch.cuda.device_count()} GPUs are visible to one process; using one. To use all of them: "
                f"posttrain … --num_processes {torch.cuda.device_count()}, or `accelerate launch` with a script.",
                stacklevel=3,
            )

    def _check_activations(self) -> None:
        """Fields of checkpointing that would have no effect, or contradict each other."""
        kwargs: Any = self.activation_checkpointing_kwargs or {}
        tuned = "activation_memory_mb" if self.activation_memory_mb is not None else "activation_checkpointing_policy"
        if self.activation_memory_mb is None and self.activation_checkpointing_policy == "full":
            return
        value = getattr(self, tuned)
        if not self.activation_checkpointing:
            raise ConfigError(
                f"`{tuned}` is {value!r} and `activation_checkpointing` is off: nothing is recomputed; drop one."
            )
        if kwargs.get("use_reentrant") and self.activation_checkpointing_policy != "full":
            raise ConfigError(f"`{tuned}` is {value!r}, which needs `use_reentrant` off in the checkpointing kwargs.")
        clash = sorted({"every_n_layers", "offload", "context_fn"} & set(kwargs))
        if clash:
            raise ConfigError(
                f"`{tuned}` is {value!r} and `activation_checkpointing_kwargs` has {clash[0]!r}; keep one of them "
                "(for offloading, `activation_offloading`)."
            )
        if self.torch_compile and self.activation_checkpointing_policy != "full":
            raise ConfigError(
                f"`{tuned}` is {value!r} and `torch_compile` is on: what a compiled layer keeps cannot be chosen; drop "
                "one (`activation_memory_mb` with the policy 'full' works)."
            )


def _liger_config(given: dict[str, bool] | None) -> dict[str, bool]:
    """The user's choice of Liger's kernels; those that would replace the forward that holds our head are off."""
    ours = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    asked = sorted(name for name in ours if (given or {}).get(name))
    if asked:
        raise ConfigError(
            f"`liger_kernel_config` turns {asked[0]!r} on, which would replace the head; leave it out: the head here "
            "never holds all logits either."
        )
    return (given or {}) | ours


def load_options(args: BaseConfig) -> LoadOptions:
    """What the model room needs of the config."""
    if isinstance(args.model_init_kwargs, str):
        raise ConfigError(
            f"`model_init_kwargs` is {args.model_init_kwargs!r}; give a mapping, or JSON that starts with {{."
        )
    return LoadOptions(
        init_kwargs=args.model_init_kwargs,
        trust_remote_code=args.trust_remote_code,
        layout=args.layout,
        chunk_tokens=args.head_chunk_tokens,
        memory_bytes=(args.head_memory_mb or (1024 if args.use_cpu else 4096)) << 20,
        pad_to_multiple_of=args.pad_to_multiple_of,
        disable_dropout=getattr(args, "disable_dropout", False),
        task=args.task,
    )


def share_prefixes(args: BaseConfig, prepared: Prepared) -> bool:
    """Whether common prefixes are computed once: where the layout can and, unless asked, where no dropout would tell
    shared from separate continuations."""
    if prepared.layout != "packed":
        if args.share_prefixes:
            raise ConfigError(
                f"`share_prefixes` is on, and the layout of this model is {prepared.layout!r}; leave it out."
            )
        return False
    if args.neftune_noise_alpha is not None:
        if args.share_prefixes:
            raise ConfigError(
                "`share_prefixes` and `neftune_noise_alpha` are both on; noise is per sequence: drop one."
            )
        return False
    if args.share_prefixes is None and prepared.dropout > 0:
        say(f"prefix sharing is off: dropout {prepared.dropout} would tell shared from separate continuations apart.")
        return False
    return args.share_prefixes is not False
