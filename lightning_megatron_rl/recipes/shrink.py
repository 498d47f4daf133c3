"""`fit --shrink`: the same family, layout and settings with small widths, few layers and short lengths, on a CPU.

The whole config is parsed as `fit` does it, changed, and written as one YAML file beside a model with random weights, a
tokenizer of bytes, and data sets with the same columns; `fit` then runs that file.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron_rl.models.published import raw_config, short_name
from lightning_megatron_rl.plan.config import FromConfig
from lightning_megatron_rl.recipes.datasets import DATASETS
from lightning_megatron_rl.sample import Sample

FLAG = "--shrink"
DIRECTORY = Path("runs/shrunk")
MOST_RANKS = 4  # replicas beyond one are left out above it
STEPS = 2
ROWS = 16
PROMPT_BYTES, RESPONSE_TOKENS = 480, 8  # a byte is a token
VOCABULARY = 320
HEAD_DIM = 32  # at most, where heads make the model's width: 32 heads of Llama's 405B would make 4,096
_TILE = 32  # of vLLM's kernel for experts on a CPU: their width is a multiple
_ENGINE = "VLLMEngine"
_SPECIAL = ["<pad>", "<eos>", "<bos>"]
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_FEWER_LAYERS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
log = logging.getLogger(__name__)


def shrink_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line of `fit` for the small run, after its files are written.

    Args:
        arguments: Of `fit`, with `--shrink` among them.

    Raises:
        ValueError: The model is unknown, or of a family that is refused.
        SystemExit: The parser refuses the config, as in `fit`.
    """
    own = [argument for argument in arguments if argument != FLAG]
    built = FromConfig(own)
    config = built.settings()
    name = built.model.model_path
    lora = "-lora" if built.model.train_settings.lora is not None else ""
    method = type(built.model).__name__.removesuffix("Module").lower()
    directory = DIRECTORY / f"{short_name(name) or Path(name).name}-{method}{lora}"
    directory.mkdir(parents=True, exist_ok=True)
    world = int(built.devices) * built.nodes if str(built.devices).isdecimal() else 1
    file = directory / "shrunk.yaml"
    file.write_text(yaml.safe_dump(shrink_config(config, directory, world), sort_keys=False))
    print(f"{file}: the same run with a small model, on a CPU", file=sys.stderr)
    if is_slow_here(str(config["trainer"]["precision"] or "32-true")):
        print(
            "this CPU has no AVX-512, without which products in 16 bits take many times as long:"
            " --trainer.precision 32-true",
            file=sys.stderr,
        )
    return ["fit", "--config", str(file)]


def is_slow_here(precision: str) -> bool:
    """Whether a Trainer's precision has 16-bit products, and this CPU only AVX2 for them."""
    import torch

    return not precision.startswith(("32", "64")) and torch.backends.cpu.get_cpu_capability() == "AVX2"


def shrink_config(config: dict[str, Any], directory: Path, world: int) -> dict[str, Any]:
    """Return a small config; its model, tokenizer and data are written into a directory.

    Args:
        config: Every setting of `fit`, as plain data; it is changed.
        directory: For files of the run.
        world: GPUs of the whole run.
    """
    trainer, model, data = config["trainer"], config["model"]["init_args"], config["data"]["init_args"]
    strategy = trainer["strategy"]["init_args"]
    ranks, replicas = shrink_layout(strategy, world)
    model["train"] = model.get("train") or {}
    fields = model["train"].get("model_config") or {}
    layers = _layers(strategy, fields)
    raw = small_config(model["model"], layers)
    path = str(write_model(directory / "model", raw, variables=data.get("chat_template_kwargs") or {}))
    trainer |= {
        "accelerator": "cpu",
        "devices": ranks,
        "num_nodes": 1,
        "max_steps": STEPS,
        "val_check_interval": STEPS,
        "limit_val_batches": 1,
        "callbacks": _moved(trainer["callbacks"], directory),
        "logger": _moved(trainer["logger"], directory),
    }
    strategy |= {"offload_while_sampling": None, "timeout_s": 300.0}  # on a CPU there is nothing to move away
    model["model"] = path
    model["train"] |= {"max_tokens_per_microbatch": 2 * (PROMPT_BYTES + RESPONSE_TOKENS), "logprob_chunk_size": 128}
    data["tokenizer"] = path
    if "engine" in model:
        _shrink_sampling(model, raw)
        batch = 2 * replicas * (model.get("updates_per_rollout") or 1)
        data["max_prompt_length"], data["on_long_prompt"] = PROMPT_BYTES, "truncate_left"
    else:
        batch = 4 * replicas
        data["max_length"] = PROMPT_BYTES + RESPONSE_TOKENS
        if "chosen_column" not in data:  # pairs are not truncated
            data["overlong"], data["max_tokens_per_batch"] = "truncate", None
    data["batch_size"] = data["val_batch_size"] = batch
    data["train"] = _write_rows(directory / "train.jsonl", data["train"], data)
    for name, source in (data.get("val") or {}).items():
        data["val"][name] = _write_rows(directory / f"{name}.jsonl", source, data)
    return config


def shrink_layout(strategy: dict[str, Any], world: int) -> tuple[int, int]:
    """Make every size of a layout that is above one two, and return ranks and data-parallel replicas.

    Replicas become two, but one where the model alone takes more than two ranks, unless experts need them.

    Example:
        TP 8 and PP 4 on 128 GPUs become TP 2 and PP 2 on four ranks.
    """
    full = 1
    for name in _SIZES[:3]:
        full *= strategy.get(name) or 1
    had_replicas = world // full > 1
    for name in _SIZES:
        strategy[name] = min(strategy.get(name) or 1, 2)
    tp, pp, cp, ep = (strategy[name] for name in _SIZES)
    if strategy.get("expert_tensor_parallel_size"):
        strategy["expert_tensor_parallel_size"] = min(strategy["expert_tensor_parallel_size"], 2)
    etp = strategy.get("expert_tensor_parallel_size") or tp
    ranks = tp * pp * cp
    replicas = 2 if had_replicas and 2 * ranks <= MOST_RANKS else 1
    while ranks * replicas % (etp * ep * pp):
        replicas *= 2
    return ranks * replicas, replicas


def _layers(strategy: dict[str, Any], fields: dict[str, Any]) -> int:
    """Layers that every stage and chunk has its share of; where the config gives a stage fewer, one fewer there."""
    stages = strategy["pipeline_model_parallel_size"]
    chunks = strategy.get("virtual_pipeline_model_parallel_size") or 1
    if chunks > 1:
        strategy["virtual_pipeline_model_parallel_size"] = chunks = 2
    given = [name for name in _FEWER_LAYERS if fields.get(name) is not None]
    for name in given:
        fields[name] = chunks
    layers = max(4, 2 * stages * chunks)
    if given:
        return chunks * len(given) + (layers // 2 if stages > len(given) else 0)
    extra = sum(bool(fields.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    return layers - extra


def small_config(name: str, layers: int) -> dict[str, Any]:
    """Return the config.json of a model with the same settings, small widths and so many layers.

    Raises:
        ValueError: The model is unknown, or of a family that is refused.
    """
    from transformers import AutoConfig

    from lightning_megatron_rl.models.families.check import check_family
    from lightning_megatron_rl.models.families.registry import FAMILIES
    from lightning_megatron_rl.models.verification.miniature import shrink

    raw = raw_config(name)
    config = AutoConfig.for_model(**raw)
    try:
        check_family(config)
    except ValueError as error:
        raise ValueError(f"{name} cannot be shrunk, since it is refused at full size: {error}") from error
    small = shrink(raw, config, HEAD_DIM)
    small |= {"vocab_size": VOCABULARY, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 258}
    small |= {"num_hidden_layers": layers, "dtype": "float32"}
    if isinstance(raw.get("layer_types"), list):
        small["layer_types"] = raw["layer_types"][:layers]
    experts = FAMILIES[config.model_type].experts
    if experts is not None and small[experts.width] % _TILE:
        small[experts.width] = 5 * _TILE  # related to no other size
    dense = FAMILIES[config.model_type].dense_layers
    if dense and small.get(dense):
        small[dense] = 1
    return small


def write_model(directory: Path, raw: dict[str, Any], variables: dict[str, Any]) -> Path:
    """Write a model with random weights in fp32 and a tokenizer of bytes; one that is there is left as it is.

    Args:
        directory: Of the model.
        raw: Its config.json.
        variables: That the chat template must read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    mark = directory / "shrunk.json"
    wanted = json.dumps({"config": raw, "variables": sorted(variables)}, sort_keys=True)
    if mark.is_file() and mark.read_text() == wanted:
        return directory
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).save_pretrained(directory)
    _tokenizer(variables).save_pretrained(directory)
    mark.write_text(wanted)
    return directory


def _tokenizer(variables: dict[str, Any]) -> Any:
    """One token for each byte, three special ones, and a chat template that reads the given variables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIAL)
    read = "".join(f"{{% if {name} is defined %}}{{% endif %}}" for name in sorted(variables))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=read
        + "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eos>{% endfor %}"
        + "{% if add_generation_prompt %}assistant: {% endif %}",
    )


def spread(samples: list[Sample]) -> list[float]:
    """Reward responses of random weights by their tokens: they are never right, and groups need a spread to learn."""
    return [(sum(sample.response_ids) % 7) / 6 for sample in samples]


def _shrink_sampling(model: dict[str, Any], raw: dict[str, Any]) -> None:
    model["rewards"] = [*model["rewards"], f"{spread.__module__}.{spread.__qualname__}"]
    if model.get("reward_weights") is not None:
        model["reward_weights"] = [*model["reward_weights"], 1.0]
    model["num_generations"] = min(model.get("num_generations") or 2, 4)
    for name in ("sampling", "validation_sampling"):
        if model.get(name):
            model[name]["max_tokens"] = RESPONSE_TOKENS
    engine = model.get("engine") or {"class_path": _ENGINE, "init_args": {}}
    kind = engine["class_path"].rpartition(".")[2]
    if kind != _ENGINE:
        log.warning("model.engine: a %s in place of %s, for the small model", _ENGINE, kind)
        engine = {"class_path": _ENGINE, "init_args": {}}
    model["engine"] = {**engine, "init_args": engine.get("init_args") or {}}
    model["engine"]["init_args"] |= {
        "device": "cpu",
        "devices": None,
        "weight_transfer": "auto",
        "max_model_len": PROMPT_BYTES + RESPONSE_TOKENS + 8,
        "max_num_seqs": 16,
        "kv_cache_memory_gb": 0.1,
        "tensor_parallel_size": 1,  # one process is enough for a CPU
        "sleep_level": 0,
    }
    if raw["model_type"] == "gpt_oss":  # vLLM's attention with sinks is for bf16 alone on a CPU
        model["engine"]["init_args"]["dtype"] = "bfloat16"
    if raw.get("kv_lora_rank"):  # on a CPU vLLM has latent attention in its plain form alone
        own = model["engine"]["init_args"].get("env") or {}
        model["engine"]["init_args"]["env"] = {**own, "VLLM_MLA_DISABLE": "1"}


def _moved(callbacks: Any, directory: Path) -> Any:
    """Callbacks or loggers whose files are in a directory."""
    if isinstance(callbacks, list):
        return [_moved(callback, directory) for callback in callbacks]
    if not isinstance(callbacks, dict):
        return callbacks
    arguments = callbacks.get("init_args") or {}
    for name in ("dirpath", "save_dir"):
        if arguments.get(name):
            arguments[name] = str(directory / Path(arguments[name]).name)
    for name in ("every_n_train_steps", "every_n_steps"):
        if arguments.get(name):
            arguments[name] = min(arguments[name], STEPS)
    if callbacks.get("class_path", "").endswith("HFExport"):
        arguments["overwrite"] = True
    return callbacks


def _write_rows(file: Path, source: Any, data: dict[str, Any]) -> str:
    """Write rows with the columns that the data module reads: the data set's own where it is known."""
    path = source.get("path") if isinstance(source, dict) else source
    known = DATASETS.get(path) if isinstance(path, str) else None
    rows = known.rows if known is not None else (_made_up(data), _made_up(data))
    file.write_text("".join(json.dumps(rows[number % len(rows)]) + "\n" for number in range(ROWS)))
    return str(file)


def _made_up(data: dict[str, Any]) -> dict[str, Any]:
    """A row with every column that the settings name."""
    text = {
        data.get("prompt_column") or "prompt": "What is 1 + 1?",
        data.get("answer_column") or "answer": "2",
        data.get("completion_column") or "completion": "It is 2.",
        data.get("chosen_column") or "chosen": "It is 2.",
        data.get("rejected_column") or "rejected": "It is 3.",
    }
    messages = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    return text | ({data["messages_column"]: messages} if data.get("messages_column") else {})
