"""Compare Megatron with Transformers on each config below and write proofs.json.

`python scripts/model_proofs.py`. `tests/models/test_signature.py` repeats the comparisons and asks for the same file.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning_megatron_rl.models.families.registry import FAMILIES, bridges
from lightning_megatron_rl.models.verification.signature import LIBRARIES, PROOFS, Signature, signature
from lightning_megatron_rl.utilities.versions import installed_versions
from tests.tiny_models import tiny_config

TINY = (
    *("llama", "qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "mistral", "mistral_window", "mixtral"),
    *("deepseek_v3", "deepseek_v3_plain", "gemma3", "gpt_oss"),
    *("glm4_moe", "olmoe", "minimax_m2", "nemotron", "gemma", "gemma2", "exaone4", "hy_v3"),
)


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    """Rotary embeddings as config.json has them."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def llama3(factor: float) -> dict[str, Any]:
    """Those of Llama 3.1 and later."""
    constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return rope(5e5, rope_type="llama3", factor=factor, **constants)


def shape(hidden: int, width: int, layers: int, heads: int, groups: int, **more: int) -> dict[str, int]:
    """Sizes of a model; `more` are those that not all families have."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**dict(zip(names, (hidden, width, layers, heads, groups), strict=True)), **more}


TIED, APART = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
FINE, COARSE = {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-5}
_LLAMA = {"model_type": "llama", **COARSE}
_QWEN2 = {"model_type": "qwen2"}
_QWEN3 = {"model_type": "qwen3", **FINE}
_MISTRAL = {"model_type": "mistral", **COARSE, **APART}
_QWEN3_MOE = {"model_type": "qwen3_moe", **FINE, **APART, "norm_topk_prob": True}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_DEEPSEEK = {
    **{"model_type": "deepseek_v3", **FINE, **APART, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1},
}
_YARN = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_DEEPSEEK_ROPE = rope(1e4, rope_type="yarn", **_YARN, mscale=1.0, mscale_all_dim=1.0)
_GPT_OSS_YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS = {
    **{"model_type": "gpt_oss", **COARSE, **APART, "head_dim": 64, "sliding_window": 128, "attention_bias": True},
    **{"num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0, "initial_context_length": 4096},
    **rope(1.5e5, rope_type="yarn", **_GPT_OSS_YARN, original_max_position_embeddings=4096),
}

# What decides how released models are computed; sizes and tokens do not, and many models share an entry.
RELEASED: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {**_LLAMA, **APART, **rope(1e4), **shape(4096, 11008, 32, 32, 32)},
    "Llama-3-8B": {**_LLAMA, **APART, **rope(5e5), **shape(4096, 14336, 32, 32, 8)},
    "Llama-3.1-8B": {**_LLAMA, **APART, **llama3(8.0), **shape(4096, 14336, 32, 32, 8)},
    "Llama-3.2-1B": {**_LLAMA, **TIED, **llama3(32.0), **shape(2048, 8192, 16, 32, 8, head_dim=64)},
    "Llama-3.2-3B": {**_LLAMA, **TIED, **llama3(32.0), **shape(3072, 8192, 28, 24, 8, head_dim=128)},
    "Mistral-7B-v0.1": {**_MISTRAL, **rope(1e4), "sliding_window": 4096, **shape(4096, 14336, 32, 32, 8)},
    "Mistral-7B-v0.3": {**_MISTRAL, **rope(1e6), "sliding_window": None, **shape(4096, 14336, 32, 32, 8)},
    "Mistral-Nemo": {**_MISTRAL, **rope(1e6), "sliding_window": None, **shape(5120, 14336, 40, 32, 8, head_dim=128)},
    "Mixtral-8x7B": {
        **{**_MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        **{**rope(1e6), "sliding_window": None, **shape(4096, 14336, 32, 32, 8)},
    },
    "Qwen2.5-0.5B": {**_QWEN2, **FINE, **TIED, **rope(1e6), **shape(896, 4864, 24, 14, 2)},
    "Qwen2.5-7B": {**_QWEN2, **FINE, **APART, **rope(1e6), **shape(3584, 18944, 28, 28, 4)},
    "Qwen2.5-14B": {**_QWEN2, **COARSE, **APART, **rope(1e6), **shape(5120, 13824, 48, 40, 8)},
    "Qwen2.5-Math-1.5B": {**_QWEN2, **FINE, **TIED, **rope(1e4), **shape(1536, 8960, 28, 12, 2)},
    "Qwen2.5-Math-7B": {**_QWEN2, **FINE, **APART, **rope(1e4), **shape(3584, 18944, 28, 28, 4)},
    "Qwen3-0.6B": {**_QWEN3, **TIED, **rope(1e6), **shape(1024, 3072, 28, 16, 8, head_dim=128)},
    "Qwen3-1.7B": {**_QWEN3, **TIED, **rope(1e6), **shape(2048, 6144, 28, 16, 8, head_dim=128)},
    "Qwen3-4B-2507": {**_QWEN3, **TIED, **rope(5e6), **shape(2560, 9728, 36, 32, 8, head_dim=128)},
    "Qwen3-8B": {**_QWEN3, **APART, **rope(1e6), **shape(4096, 12288, 36, 32, 8, head_dim=128)},
    "Qwen3-14B": {**_QWEN3, **APART, **rope(1e6), **shape(5120, 17408, 40, 40, 8, head_dim=128)},
    "Qwen3-32B": {**_QWEN3, **APART, **rope(1e6), **shape(5120, 25600, 64, 64, 8, head_dim=128)},
    "Qwen3-30B-A3B": {
        **{**_QWEN3_MOE, **rope(1e6), "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **shape(2048, 6144, 48, 32, 4, head_dim=128),
    },
    "Qwen3-30B-A3B-2507": {
        **{**_QWEN3_MOE, **rope(1e7), "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **shape(2048, 6144, 48, 32, 4, head_dim=128),
    },
    "DeepSeek-V3": {
        **{**_DEEPSEEK, **_DEEPSEEK_ROPE, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        **{"ep_size": 1, **shape(7168, 18432, 61, 128, 128)},
    },
    "DeepSeek-V3, as Transformers saves it": {**_DEEPSEEK, **_DEEPSEEK_ROPE, **shape(7168, 18432, 61, 128, 128)},
    "Gemma-3-1B": {**_GEMMA3, **shape(1152, 6912, 26, 4, 1, head_dim=256)},
    "GPT-OSS": {**_GPT_OSS, "num_local_experts": 32, **shape(2880, 2880, 24, 64, 8)},
}
OTHERS = {  # those of examples, benchmarks and tests
    "demo": {**_QWEN3, **APART, **rope(1e4), **shape(128, 256, 4, 4, 2, head_dim=32)},
    "linear": {**tiny_config("llama").to_diff_dict(), **rope(5e5, rope_type="linear", factor=2.0)},
    "llama3": {**tiny_config("llama").to_diff_dict(), **llama3(8.0)},
    "benchmark": {**_QWEN3, **TIED, **rope(1e4), **shape(1024, 3072, 28, 16, 8, head_dim=128)},
}


def config_files() -> dict[str, dict[str, Any]]:
    """Contents of the config.json of every model, by name."""
    tiny = {f"tiny {family}": tiny_config(family).to_diff_dict() for family in TINY}
    found = {**tiny, **RELEASED, **OTHERS}
    return {name: {**raw, "architectures": [FAMILIES[raw["model_type"]].architecture]} for name, raw in found.items()}


def signature_of(raw: dict[str, Any]) -> Signature:
    """The signature of the model of a config.json, without weights."""
    from transformers import AutoConfig

    from lightning_megatron_rl.compat.bridge import import_auto_bridge

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        provider = import_auto_bridge(bridges()).from_hf_pretrained(directory).to_megatron_provider(load_weights=False)
        return signature(AutoConfig.from_pretrained(directory), provider)


def difference(raw: dict[str, Any]) -> Any:
    """How far Megatron is from Transformers on a miniature of a config.json; inside `single_process`."""
    from transformers import AutoConfig

    from lightning_megatron_rl.models.verification.miniature import shrink
    from lightning_megatron_rl.models.verification.probe import compare

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        return compare(shrink(raw, AutoConfig.from_pretrained(directory)))


def content(signatures: dict[str, Signature]) -> str:
    """What proofs.json says."""
    return (
        json.dumps({"versions": installed_versions(LIBRARIES), "proofs": signatures}, indent=1, sort_keys=True) + "\n"
    )


def main() -> None:
    """Compare, print and write."""
    from lightning_megatron_rl.compat.single_process import single_process

    signatures = {}
    with single_process():
        for name, raw in config_files().items():
            with contextlib.redirect_stdout(sys.stderr):
                found = difference(raw)
                signatures[name] = signature_of(raw)
            print(f"{name}: {found}", flush=True)
            if not found.agrees:
                raise SystemExit(f"{name} is computed differently from Transformers")
    PROOFS.write_text(content(signatures))


if __name__ == "__main__":
    main()
