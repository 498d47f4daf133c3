"""The signature of a model (all that decides how it is computed), and the signatures that proofs cover.

The signature of a model has every setting of its config.json (known to Transformers or not), every field of Megatron's
config that is made of it, and relations between its sizes. Sizes themselves are left out, and so is what belongs to one
run or to training alone. `proofs.json` has the signatures for which Megatron was compared with Transformers;
`scripts/model_proofs.py` writes it.
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from lightning_megatron_rl.models.families.registry import FAMILIES
from lightning_megatron_rl.models.overrides import RULES
from lightning_megatron_rl.models.verification.miniature import head_dim, pattern, per_layer
from lightning_megatron_rl.utilities.versions import installed_versions

Signature = dict[str, Any]
"""Names of settings, as messages have them, with values that JSON knows."""

PROOFS = Path(__file__).with_name("proofs.json")
LIBRARIES = ("transformers", "megatron-core", "megatron-bridge")  # a proof is one of these versions
_SHORTEST_WINDOW = 4  # tokens; shorter ones are special
BUILT = "TransformerConfig."  # begins the names of Megatron's fields

# Keys of config.json that do not change what a forward pass computes.
_IGNORED_KEYS = (
    "architectures",  # the family's, `layout_check.check_family`
    "transformers_version",
    "_*",
    "auto_map",
    "quantization_config",  # weights are read as the numbers that they stand for, or refused: `models.quantised`
    "dtype",
    "torch_dtype",
    "use_cache",
    "*_token_id",
    "initializer_range",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "return_dict",
    "output_*",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "attention_dropout",
    "router_aux_loss_coef",  # training of routers has settings of its own, `models.moe`
    "aux_loss_alpha",
    "seq_aux",
    "num_nextn_predict_layers",  # multi-token prediction is neither loaded nor trained
    "max_window_layers",  # `layer_types` says what comes of it
)
SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_shared_experts",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "sliding_window",
    "max_position_embeddings",
)
# Fields of Megatron's config that follow from sizes.
SIZE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "vocab_size",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "window_size",
)
# Fields that belong to a run, its layout, precision, kernels or memory, or to training; those of `settings.RULES` too.
_RUN_FIELDS = (
    "_*",
    "*parallel*",
    "pipeline_*",
    "*_pipeline_*",
    "num_layers_in_*",
    "microbatch_group_size_per_vp_stage",
    "bf16",
    "fp16*",
    "*_dtype",
    "num_layers_at_*_in_bf16",
    "recompute_*",
    "distribute_saved_activations",
    "*offload*",
    "*_fusion",
    "*init_method*",
    "*initialization",
    "*_dropout",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
    "moe_enable_routing_replay",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_expert_rank_capacity_factor",
    "moe_token_*",
    "moe_pad_*",
    "moe_per_layer_logging",
    "moe_router_padding_*",
    "moe_single_grouped_*",
    "moe_grad_scale_func",
    "*_grad_scale_func",
    "grad_*_func",
    "grad_scale_func",
    "no_sync_func",
    "param_sync_func",
    "finalize_model_grads_func",
    "calculate_per_token_loss",
    "variable_seq_lengths",
    "deallocate_pipeline_outputs",
    "overlap_p2p_*",
    "batch_p2p_*",
    "clone_scatter_output_in_embedding",
    "scatter_embedding_sequence_parallel",
    "should_pad_vocab",
    "make_vocab_size_divisible_by",
    "transformer_layer_spec",
    "deterministic_mode",
    "timers",
    "test_mode",
    "barrier_with_L1_time",
    "config_logger_dir",
    "hf_model_*",
    "hetereogenous_dist_checkpoint",
    "tp_only_amax_red",
)


def signature(config: Any, provider: Any, overrides: Mapping[str, Any] | None = None) -> Signature:
    """Return what decides how the model of a Hugging Face config is computed.

    Args:
        config: Transformers' config, which has unknown keys of config.json too.
        provider: Megatron-Bridge's config of the same model, before a run's settings are put into it.
        overrides: The user's, of the latter.
    """
    found: Signature = {"model_type": config.model_type}
    values = config.to_dict() | {name: pattern(value) for name, value in per_layer(config).items()}
    kind: type = type(config)
    sizes = _known_keys(kind).intersection(SIZE_KEYS)  # others are none of this family's
    for name, value in values.items():
        if value is not None and name not in sizes and not _matches(name, _IGNORED_KEYS):
            found |= _flat(name, value)
    found |= _relations(config)
    given = dict(overrides or {})
    for field in dataclasses.fields(provider):
        value = given.get(field.name, getattr(provider, field.name))
        if field.name in SIZE_FIELDS and field.name not in given:
            found |= {BUILT + field.name: "set"} if value else {}
        elif is_computed(field.name) and value != _default(field):
            found |= _flat(BUILT + field.name, value)
    return found


@cache
def _known_keys(kind: type) -> frozenset[str]:
    """Keys of config.json that Transformers has a meaning for in a family."""
    return frozenset(vars(kind())) | frozenset(getattr(kind, "attribute_map", {}))


def is_computed(name: str) -> bool:
    """Whether a field of Megatron's config says what a forward pass computes, not how or in which layout."""
    return not _matches(name, (*RULES, *_RUN_FIELDS))


def _relations(config: Any) -> Signature:
    """What relations between sizes may change: special cases of shapes and numbers."""
    hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    found: Signature = {
        "heads per key-value head": "all" if groups == 1 < heads else _share(heads, groups),
        "hidden_size / num_attention_heads": "whole" if hidden % heads == 0 else "not whole",
        "hidden_size": "heads x head_dim" if hidden == heads * head_dim(config) else "another",
    }
    if head_dim(config) % 2:  # rotary embeddings turn pairs
        found["width of heads"] = "odd"
    window = getattr(config, "sliding_window", None)
    if window is not None:
        found["sliding_window"] = window if window < _SHORTEST_WINDOW else "a number of tokens"
    family = FAMILIES[config.model_type]
    if family.experts is not None:
        experts = getattr(config, family.experts.count)
        found["all experts chosen"] = config.num_experts_per_tok >= experts
        if getattr(config, "n_group", None):
            found["experts per group"] = _share(experts, config.n_group)
    return found | family.relations(config)


def _share(number: int, parts: int) -> str:
    """How many of a number come to each of its parts."""
    if number % parts:
        return "no whole number"
    return "one" if number == parts else "some"


def _flat(name: str, value: Any) -> Signature:
    """A setting, or each of the settings of a dictionary, as JSON has it."""
    if isinstance(value, Mapping):
        return {key: item for inner, entry in value.items() for key, item in _flat(f"{name}.{inner}", entry).items()}
    return {name: _plain(value)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__qualname__", str(value))


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


@cache
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


# ---- proofs ----------------------------------------------------------------------------------------------------------


@cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PROOFS.read_text())
    return found


def proofs() -> dict[str, Signature]:
    """Return the signatures that are proved with the installed libraries, by name; none for other versions of these."""
    found = _stored()
    return found["proofs"] if found["versions"] == installed_versions(LIBRARIES) else {}


def departures(found: Signature) -> list[str] | None:
    """Return how a signature differs from the proof that is nearest to it, as ``name=value (proved: value)``.

    An empty list if a proof covers it, None if no proof is of its family.
    """
    covered = [proof for proof in proofs().values() if proof["model_type"] == found["model_type"]]
    differences = [_differences(found, proof) for proof in covered]
    return min(differences, key=len, default=None)


def _differences(found: Signature, proof: Signature) -> list[str]:
    names = [name for name in {**found, **proof} if found.get(name) != proof.get(name)]
    return [f"{name}={_shown(found, name)} (proved: {_shown(proof, name)})" for name in names]


def _shown(settings: Signature, name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"
