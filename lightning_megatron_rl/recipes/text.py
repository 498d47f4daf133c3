"""The text of a recipe: YAML in which every setting that is not a default has its reason beside it."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from lightning_megatron_rl.planner.report import summary
from lightning_megatron_rl.planner.run import Run
from lightning_megatron_rl.recipes.datasets import Dataset

Method = Literal["sft", "grpo", "grpo_lora"]
METHODS: tuple[Method, ...] = ("sft", "grpo", "grpo_lora")
SFT_LONGEST = 2048  # tokens of a row that is not dropped
MARK = "# plan: "  # how the lines begin that `make_header` writes
_TASK = '"{prompt} Reason step by step, and put the final answer in \\\\boxed{}."'


@dataclass(frozen=True)
class Choices:
    """What is chosen for a recipe, beside its layout.

    Args:
        method: What is trained how.
        model: Hub name or directory.
        short: What files of the run are called.
        data: Training rows.
        response_tokens: Of a response, at most.
        batch: Prompts of a rollout, or sequences of a step.
        note: Something that the user must do before, as a comment.
        thinking_off: Whether the model's template has a mode with long thoughts, which is switched off.
    """

    method: Method
    model: str
    short: str
    data: Dataset
    response_tokens: int = 1024
    batch: int = 64
    note: str = ""
    thinking_off: bool = False


def write_recipe(choices: Choices, run: Run) -> str:
    """Return the YAML of a recipe with the layout, samplers and micro-batches of a run."""
    lines = [
        f"# {_TITLES[choices.method]}: {choices.model}",
        *(f"# {line}" for line in choices.note.splitlines()),
        "seed_everything: 1234  # the same samples again",
        *_trainer(choices, run),
        *_model(choices, run),
        *_data(choices),
    ]
    return "\n".join(lines) + "\n"


def make_header(run: Run) -> list[str]:
    """Return the comment lines that state what a recipe is planned for."""
    samplers = ""
    if run.sampling is not None:
        engines = max(1, run.data_parallel // run.engines_on_gpu)
        samplers = f"; {engines} sampler(s) of {run.sampling.needs.tensor_parallel_size} GPU(s)"
    nodes = max(1, run.world // run.kind.per_node)
    each = min(run.world, run.kind.per_node)
    return [
        f"{MARK}--device {run.kind.name} --devices {each} --nodes {nodes}",
        f"{MARK}{run.layout.describe(run.world)}{samplers}",
        f"{MARK}{summary(run)}",
    ]


_TITLES = {
    "sft": "Supervised fine-tuning of the whole model",
    "grpo": "GRPO on all weights",
    "grpo_lora": "GRPO on low-rank adapters",
}


def _trainer(choices: Choices, run: Run) -> list[str]:
    layout, kind = run.layout, run.kind
    each = min(run.world, kind.per_node)
    sizes = {
        "tensor_model_parallel_size": (layout.tensor_model_parallel_size, 1, "splits each matrix, within a machine"),
        "sequence_parallel": (layout.sequence_parallel, False, "splits norms and residuals, too; experts need it"),
        "pipeline_model_parallel_size": (
            layout.pipeline_model_parallel_size,
            1,
            "splits the layers into stages, which send each other little",
        ),
        "context_parallel_size": (layout.context_parallel_size, 1, "splits long sequences"),
        "expert_model_parallel_size": (layout.expert_model_parallel_size, 1, "shares out the experts"),
        "expert_tensor_parallel_size": (
            layout.expert_tensor_parallel_size,
            None,
            "experts stay whole",
        ),
    }
    strategy = [
        f"      {name}: {_plain(value)}  # {why}" for name, (value, default, why) in sizes.items() if value != default
    ]
    if run.offloads:
        strategy.append(
            f"      offload_while_sampling: [{', '.join(run.offloads)}]  # so that the sampler's cache fits"
        )
    steps = 200 if choices.method != "sft" else 1000
    directory = f"runs/{choices.short}/{choices.method}"
    samples = _quoted(f"{directory}/samples")
    return [
        "trainer:",
        "  accelerator: gpu  # plans and times are for GPUs",
        f"  devices: {each}  # of each node",
        *(
            [f"  num_nodes: {run.world // each}  # start one process per node, with torchrun or SLURM"]
            if run.world > each
            else []
        ),
        "  precision: bf16-mixed  # weights in bf16, main parameters and gradients in fp32",
        "  strategy:",
        "    class_path: MegatronStrategy  # by its short name",
        *(["    init_args:", *strategy] if strategy else []),
        f"  max_steps: {steps}  # {'rollouts' if choices.method != 'sft' else 'optimizer steps'}",
        "  gradient_clip_val: 1.0  # unset means no clipping",
        f"  val_check_interval: {20 if choices.method != 'sft' else 200}  # steps",
        "  check_val_every_n_epoch: null  # count steps, not epochs",
        "  num_sanity_val_steps: 0  # the first validation comes soon enough",
        "  log_every_n_steps: 1  # a step takes seconds to minutes",
        "  logger:",
        "    class_path: lightning.pytorch.loggers.CSVLogger  # any Lightning logger does",
        f"    init_args: {{save_dir: {_quoted(directory)}, name: log}}  # beside the checkpoints",
        "  callbacks:",
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint  # to resume from",
        "      init_args:",
        f"        dirpath: {_quoted(f'{directory}/checkpoints')}  # a directory for each checkpoint",
        f"        every_n_train_steps: {20 if choices.method != 'sft' else 200}  # written beside training",
        "        save_last: link  # for --ckpt_path last",
        "    - class_path: HFExport  # the result, as Transformers and vLLM load it",
        f"      init_args: {{dirpath: {_quoted(f'{directory}/hf')}}}  # at the end of the run",
        *(
            [
                "    - class_path: RolloutSamples  # read them: a reward can be right for the wrong reason",
                f"      init_args: {{num_samples: 4, every_n_steps: 20, dirpath: {samples}}}  # a few",
            ]
            if choices.method != "sft"
            else []
        ),
    ]


def _model(choices: Choices, run: Run) -> list[str]:
    lora = choices.method == "grpo_lora"
    fields = {name: value for name, value in vars(run.pipeline_split).items() if value}
    config = [f"        {name}: {_plain(value)}  # stages with equal work" for name, value in fields.items()]
    learning_rate = {"sft": "1.0e-5", "grpo": "1.0e-6", "grpo_lora": "1.0e-5"}[choices.method]
    why = {
        "sft": "usual for a whole model",
        "grpo": "a policy moves far with little",
        "grpo_lora": "adapters take ten times that of a whole model",
    }[choices.method]
    train = [
        "    train:",
        "      max_tokens_per_microbatch: auto  # the fastest that fits; it changes memory and time alone",
        "      recompute: auto  # only where nothing faster fits",
        f"      optimizer: {{lr: {learning_rate}, weight_decay: 0.0, adam_beta2: 0.98}}  # {why}",
        *(["      model_config:", *config] if config else []),
    ]
    if lora:
        rank = max(16, run.layout.tensor_model_parallel_size)
        targets, reason = "linear_qkv, linear_proj, linear_fc1, linear_fc2", "all linear layers"
        if run.size.experts:
            targets, reason = "linear_qkv, linear_proj", "attention alone: adapters of every expert are many"
        if run.size.cache_width:
            targets = "linear_q_up_proj, linear_kv_up_proj, linear_proj"  # latent attention
        train.append(f"      lora: {{rank: {rank}, alpha: {2 * rank}, target_modules: [{targets}]}}  # {reason}")
    if choices.method == "sft":
        return [
            "model:",
            "  class_path: SFTModule  # supervised",
            "  init_args:",
            f"    model: {_quoted(choices.model)}  # {_WHERE}",
            *train,
        ]
    assert run.sampling is not None
    sampling = run.sampling
    engine = [
        f"        max_model_len: {sampling.tokens}  # prompt and response",
        f"        max_num_seqs: {sampling.sequences}  # as many as the cache has room for",
        f"        gpu_memory_utilization: {sampling.needs.gpu_memory_utilization:g}  # weights and cache",
    ]
    if sampling.needs.tensor_parallel_size > 1:
        engine.append(f"        tensor_parallel_size: {sampling.needs.tensor_parallel_size}  # GPUs of one sampler")
    if sampling.sleeps:
        engine.append("        sleep_level: 2  # its memory is the trainer's while that works")
    return [
        "model:",
        "  class_path: GRPOModule  # or another method of docs/algorithms.md",
        "  init_args:",
        f"    model: {_quoted(choices.model)}  # {_WHERE}",
        "    rewards: [lightning_megatron_rl.rewards.math_equal]  # 1 for the right final answer, by math-verify",
        f"    num_generations: {run.work.sequences // run.work.prompts}  # responses per prompt",
        *(
            [f"    updates_per_rollout: {run.work.updates}  # more steps out of one rollout"]
            if run.work.updates > 1
            else []
        ),
        f"    sampling: {{temperature: 1.0, max_tokens: {choices.response_tokens}}}  # longer ones are cut",
        "    loss: {clip_high: 0.28}  # room for rare tokens (DAPO); without KL no reference is needed",
        "    engine:",
        "      class_path: VLLMEngine  # one for each replica of the model",
        "      init_args:",
        *engine,
        *train,
    ]


_WHERE = "a hub name or a local directory"


def _data(choices: Choices) -> list[str]:
    data = choices.data
    source = yaml.safe_dump(
        {"path": data.path, **data.source}, default_flow_style=True, sort_keys=False, width=200
    ).strip()
    columns = data.prompts if choices.method != "sft" else data.sequences
    lines = [
        "data:",
        f"  class_path: {'PromptDataModule' if choices.method != 'sft' else 'SFTDataModule'}  # reads and checks rows",
        "  init_args:",
        f"    tokenizer: {_quoted(choices.model)}  # the model's own",
        f"    train: {source}  # a hub name, a directory or a file",
    ]
    if choices.method != "sft":
        held_out = data.path == "openai/gsm8k"
        val = "gsm8k: {path: openai/gsm8k, name: main, split: test, limit: 200}" if held_out else ""
        if val:
            lines.append(f"    val: {{{val}}}  # held out, one greedy response each")
        lines += [
            f"    prompt_template: {_TASK}  # as the reward reads it",
            "    on_long_prompt: drop  # a few rows are longer than all others",
        ]
    if "messages_column" not in columns:
        lines.append("    apply_chat_template: true  # the model was trained with it")
    if choices.thinking_off and "messages_column" not in columns:
        lines.append("    chat_template_kwargs: {enable_thinking: false}  # thoughts would not fit into the response")
    lines += [f"    {name}: {_plain(value)}  # {why}" for name, (value, why) in columns.items()]
    if choices.method == "sft":
        lines.append(f"    max_length: {SFT_LONGEST}  # longer rows are dropped, and counted")
    what = "prompts per rollout" if choices.method != "sft" else "sequences per step"
    lines.append(f"    batch_size: {choices.batch}  # {what}, over all replicas")
    return lines


def _quoted(path: str) -> str:
    """A path as YAML, in quotes if it would not be read as what it is."""
    return path if re.fullmatch(r"[\w~./][\w~./ +-]*[\w./+-]", path) else json.dumps(path, ensure_ascii=False)


def _plain(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )
