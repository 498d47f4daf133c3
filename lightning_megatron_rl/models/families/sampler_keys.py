"""Settings of config.json that vLLM reads and Transformers does not know: with them vLLM computes another model.

Transformers keeps keys that it does not know and ignores them, so neither a proof nor the probe sees what vLLM does.
"""

from typing import Any

# Keys that vLLM 0.26 reads from the config of any model, or of several families, with the values that change nothing.
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None, 0),  # of every layer that has no window of its own
    "logit_scale": (1,),
    "rotary_pct": (None, 1),  # other names of partial_rotary_factor
    "rotary_emb_fraction": (None, 1),
    "llama_4_scaling": (None,),
    "dual_chunk_attention_config": (None,),
    "is_causal": (True,),
}


def refuse_sampler_keys(config: Any) -> None:
    """Raise `ValueError` if a Hugging Face config has a setting that only vLLM would go by."""
    known = {*vars(type(config)()), *type(config).attribute_map}
    for name, value in config.to_dict().items():
        if name in NO_EFFECT and name not in known and value not in NO_EFFECT[name]:
            raise ValueError(only_vllm(f"{name}={value!r}", config.model_type))


def only_vllm(setting: str, model_type: str) -> str:
    """Say what is wrong with a setting that Transformers ignores in a family, and what to do."""
    return (
        f"config.json of this {model_type} model has {setting}, which Transformers ignores and vLLM does not: another"
        " model would be sampled than is trained. Remove it from config.json"
    )
