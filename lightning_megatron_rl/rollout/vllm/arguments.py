"""`engine.vllm_args`: arguments of vLLM's own, checked against the installed vLLM without importing it."""

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

_MODEL = "the sampler loads what is trained, from the module's `model`"
_LOGPROBS = "the trainer would score another distribution than the one that was sampled from"
_PROCESSES = "the engine starts and places vLLM's processes itself; use tensor_parallel_size and devices"
_SAMPLER = "the engine samples text with a policy and needs nothing else"
_CACHE = "with keys and values of fewer bits than the weights, log-probs were not compared with the trainer's"
_OFFLOADED = "weights that vLLM keeps on the host were not tested with updates; lower kv_cache_memory_gb"
_OTHER_CODE = "updates and log-probs were tested with vLLM's own code of a model alone"
# Why an argument is not passed through, by its name or a pattern of names
REFUSED: dict[str, str] = {
    "max_model_len": "set the engine's max_model_len",
    "dtype": "set the engine's dtype",
    "kv_cache_memory_bytes": "set the engine's kv_cache_memory_gb",
    "gpu_memory_utilization": "set the engine's gpu_memory_utilization or kv_cache_memory_gb",
    "num_gpu_blocks_override": "set the engine's kv_cache_memory_gb",
    "max_num_seqs": "set the engine's max_num_seqs",
    "enforce_eager": "set the engine's enforce_eager",
    "seed": "set the engine's seed",
    "tensor_parallel_size": "set the engine's tensor_parallel_size",
    "device_ids": "set the engine's devices",
    "enable_sleep_mode": "set the engine's sleep_level",
    "enable_cumem_allocator": "set the engine's sleep_level",
    "model": _MODEL,
    "model_weights": _MODEL,
    "model_class_overrides": _MODEL,
    "served_model_name": _MODEL,
    "tokenizer": _MODEL,
    "tokenizer_mode": _MODEL,
    "tokenizer_revision": _MODEL,
    "skip_tokenizer_init": _MODEL,
    "tokens_only": _MODEL,
    "hf_config_path": _MODEL,
    "hf_overrides": _MODEL,
    "hf_token": _MODEL,
    "config_format": _MODEL,
    "load_format": _MODEL,
    "download_dir": _MODEL,
    "ignore_patterns": _MODEL,
    "model_loader_extra_config": _MODEL,
    "revision": _MODEL,
    "code_revision": _MODEL,
    "trust_remote_code": "code of a model directory has one switch, for model, tokenizer and engine together",
    "quantization*": "the sampler would quantise the weights that it gets, and sample from another model",
    "allow_deprecated_quantization": "the sampler samples with the weights that are trained",
    "kv_cache_dtype*": _CACHE,
    "calculate_kv_scales": _CACHE,
    "cpu_offload_*": _OFFLOADED,
    "offload_*": _OFFLOADED,
    "model_impl": _OTHER_CODE,
    "override_attention_dtype": _OTHER_CODE,
    "*lora*": "adapters are merged into the weights before these are sent",
    "logprobs_mode": _LOGPROBS,
    "generation_config": _LOGPROBS,
    "override_generation_config": _LOGPROBS,
    "logits_processors": _LOGPROBS,
    "speculative_config": _LOGPROBS,
    "spec_*": _LOGPROBS,
    "diffusion_config": _LOGPROBS,
    "reasoning_*": _SAMPLER,
    "structured_outputs_config": _LOGPROBS,
    "runner": _SAMPLER,
    "convert": _SAMPLER,
    "pooler_config": _SAMPLER,
    "enable_prompt_embeds": _SAMPLER,
    "enable_return_routed_experts": _SAMPLER,
    "io_processor_plugin": _SAMPLER,
    "distributed_executor_backend": _PROCESSES,
    "pipeline_parallel_size": _PROCESSES,
    "prefill_context_parallel_size": _PROCESSES,
    "decode_context_parallel_size": _PROCESSES,
    "data_parallel_*": _PROCESSES,
    "enable_expert_parallel": _PROCESSES,
    "enable_elastic_ep": _PROCESSES,
    "enable_eplb": _PROCESSES,
    "master_*": _PROCESSES,
    "nnodes": _PROCESSES,
    "node_rank": _PROCESSES,
    "worker_cls": _PROCESSES,
    "worker_extension_cls": "it takes the trainer's weights",
    "weight_transfer_config": "it takes the trainer's weights; set the engine's weight_transfer",
    "kv_transfer_config": _PROCESSES,
    "ec_transfer_config": _PROCESSES,
    "kv_offloading_*": "keys and values on the host would outlive an update of the weights",
    "scheduler_cls": "the engine's order of requests is what its seeds were tested with",
    "_*": "it is vLLM's own",
}
_PLAIN = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "None": (type(None),)}


def check_vllm_args(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that vLLM does not have, that the engine sets itself, or whose value has another type.

    Args:
        arguments: By their names in `vllm.EngineArgs`.

    Raises:
        ValueError: With the name, why, and what to set instead or the nearest name that exists.
    """
    for name, value in arguments.items():
        reason = _refusal(name)
        if reason is not None:
            raise ValueError(f"engine.vllm_args: {name} is not passed through: {reason}.")
        known = engine_arguments()
        if known is None:  # no vLLM: `start` says so
            continue
        if name not in known:
            offered = [other for other in known if _refusal(other) is None]
            near = difflib.get_close_matches(name, offered, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "vllm.EngineArgs has the names."
            raise ValueError(f"engine.vllm_args: the installed vLLM has no argument {name}; {hint}")
        kinds = known[name]
        is_flag = isinstance(value, bool) and bool not in kinds
        if kinds and (is_flag or not isinstance(value, kinds)):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(
                f"engine.vllm_args: {name}={value!r} is a {type(value).__name__}; vLLM's {name} is {expected}."
            )


@cache
def engine_arguments() -> dict[str, tuple[type, ...]] | None:
    """Return the types of each argument of the installed vLLM, none where it is no plain one; None without vLLM.

    The class is read from its file: importing vLLM takes many seconds and changes the process.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    source = Path(next(iter(found.submodule_search_locations))) / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return {
        node.target.id: _plain_types(node.annotation)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _plain_types(annotation: ast.expr) -> tuple[type, ...]:
    names = [part.strip() for part in ast.unparse(annotation).split("|")]
    if not all(name in _PLAIN for name in names):
        return ()
    return tuple(dict.fromkeys(kind for name in names for kind in _PLAIN[name]))


def _refusal(name: str) -> str | None:
    if name in REFUSED:
        return REFUSED[name]
    patterns = (pattern for pattern in REFUSED if "*" in pattern and fnmatchcase(name, pattern))
    return next((REFUSED[pattern] for pattern in patterns), None)
