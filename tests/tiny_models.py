"""Tiny random models and a character tokenizer, built from configs: nothing is downloaded."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GptOssConfig,
    HYV3Config,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_megatron_rl.models.families.llama import LLAMA3_ROPE

FILE = "model.safetensors"
VOCAB_SIZE = 128
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LATENT = {  # what deepseek_v3 has and others have not: latent attention, shared experts, groups of experts
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",  # which vLLM reads, and Transformers does not; released ones have both
    "scoring_func": "sigmoid",
}
SIGMOID = {  # sigmoid routers without groups
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, padded with unused tokens to `VOCAB_SIZE`."""
    tokens = SPECIAL_TOKENS + [chr(i) for i in range(32, 127)] + ["\n"]
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_sentencepiece_tokenizer(*, legacy: bool) -> PreTrainedTokenizerFast:
    """One token per letter after SentencePiece's manner, which puts a space before a text as Llama 2 and Mistral do.

    Args:
        legacy: Behind a special token as well.
    """
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", *(chr(i) for i in range(33, 127))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "[INST] {{ message['content'] }} [/INST]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )
    return tokenizer


def tiny_config(family: str) -> PretrainedConfig:
    """A config of `family` (a model_type, or one with a suffix) that Megatron can split over TP=2, PP=4 and EP=4."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.1,
    }
    match family:
        case "llama":
            return LlamaConfig(**sizes, head_dim=32, tie_word_embeddings=False)
        case "qwen2":
            return Qwen2Config(**{**sizes, "hidden_size": 128}, tie_word_embeddings=False)
        case "qwen2_tied":
            return Qwen2Config(**{**sizes, "hidden_size": 128}, tie_word_embeddings=True)
        case "qwen3":
            return Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=False)
        case "qwen3_moe":
            experts: dict[str, Any] = {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            }
            return Qwen3MoeConfig(**sizes, **experts, head_dim=32, tie_word_embeddings=False)
        case "mistral":
            return MistralConfig(**sizes, head_dim=32, sliding_window=None)
        case "mistral_window":
            return MistralConfig(**sizes, head_dim=32, sliding_window=8)
        case "mixtral":
            return MixtralConfig(**sizes, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        case "deepseek_v3":
            rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64}
            rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.9}
            return DeepseekV3Config(
                **sizes | LATENT,
                q_lora_rank=32,
                first_k_dense_replace=1,
                num_nextn_predict_layers=1,
                rope_parameters=rope,
            )
        case "deepseek_v3_plain":
            return DeepseekV3Config(**sizes | LATENT, q_lora_rank=None, first_k_dense_replace=2)
        case "gemma3":
            layers = {"sliding_window": 8, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}
            rope = {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
            return Gemma3TextConfig(
                **sizes | layers | {"num_hidden_layers": 12},
                head_dim=32,
                query_pre_attn_scalar=24,
                rope_parameters=rope,
            )
        case "gpt_oss":
            # as wide as the model, like the released ones: Megatron-Bridge tells matrices and transposed ones by shape
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
            return GptOssConfig(**sizes | experts, head_dim=32, sliding_window=8)
        case "glm4_moe":
            return Glm4MoeConfig(
                **sizes | SIGMOID,
                head_dim=32,
                attention_bias=True,
                use_qk_norm=True,
                first_k_dense_replace=1,
                num_nextn_predict_layers=1,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            )
        case "olmoe":
            return OlmoeConfig(
                **sizes | {"hidden_size": 128, "intermediate_size": 32}, num_experts=4, num_experts_per_tok=2
            )
        case "minimax_m2":
            rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
            # which vLLM reads, and Transformers does not
            vllm = {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}
            return MiniMaxM2Config(**sizes | experts, head_dim=32, rope_parameters=rope, **vllm)
        case "nemotron":
            rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            return NemotronConfig(**sizes, head_dim=32, rope_parameters=rope)
        case "gemma":
            return GemmaConfig(**sizes, head_dim=32)
        case "gemma2":
            caps = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}  # so low that they count
            return Gemma2Config(**sizes, **caps, head_dim=32, query_pre_attn_scalar=24, sliding_window=8)
        case "exaone4":
            layers = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
            rope = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, **LLAMA3_ROPE}
            return Exaone4Config(**sizes, **layers, head_dim=32, tie_word_embeddings=True, rope_parameters=rope)
        case "hy_v3":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 2}
            return HYV3Config(**sizes, **experts, head_dim=32)
    raise ValueError(f"unknown family {family!r}")


def save_tiny_model(directory: Path, family: str, seed: int = 0, **fields: Any) -> Path:
    """Write a random fp32 model of `family` and the tokenizer into `directory`; norms are made distinct from one.

    `fields` are of its config.
    """
    config = tiny_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith(("bias", "sinks")):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def save_without_numbers(source: Path, directory: Path) -> Path:
    """Write a copy of a model whose weights are all NaN: whoever reads them raises an error."""
    shutil.copytree(source, directory)
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(source / FILE).items()}
    save_file(tensors, directory / FILE, {"format": "pt"})
    return directory
