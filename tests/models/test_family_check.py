"""Model variants that are refused, each by the name of what is not supported."""

from typing import Any

import pytest
from transformers import (
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
    NemotronConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_megatron_rl.models.families.check import check_family
from lightning_megatron_rl.models.families.gpt_oss import GPT_OSS_ROPE
from lightning_megatron_rl.models.families.llama import LLAMA3_ROPE


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Qwen3Config(architectures=["MambaForCausalLM"]),
            r"\['MambaForCausalLM'\] is not supported; .*Qwen3ForCausalLM",
        ),
        (Qwen2Config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True), "use_sliding_window"),
        (Qwen3Config(architectures=["Qwen3ForCausalLM"], attention_bias=True), "attention_bias"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], mlp_bias=True), "mlp_bias"),
        (MistralConfig(architectures=["MistralForCausalLM"], hidden_act="gelu"), "activation 'gelu' of a mistral"),
        (Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
        (Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=2), "decoder_sparse_step=2"),
        (DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], norm_topk_prob=False), "norm_topk_prob=False"),
        (
            DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], attention_bias=True),
            "deepseek_v3 with attention_bias",
        ),
        (
            Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], final_logit_softcapping=30.0),
            "final_logit_softcapping=30",
        ),
        (Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], tie_word_embeddings=False), "tie_word_embeddings=False"),
        (
            Gemma3TextConfig(
                architectures=["Gemma3ForCausalLM"], num_hidden_layers=2, layer_types=["full_attention"] * 2
            ),
            "must have a sliding window but every 6. one",
        ),
        (GptOssConfig(architectures=["GptOssForCausalLM"], sliding_window=None), "sliding_window=None"),
        (Gemma2Config(architectures=["Gemma2ForCausalLM"], layer_types=["full_attention"] * 26), "but every 2. one"),
        (Gemma2Config(architectures=["Gemma2ForCausalLM"], tie_word_embeddings=False), "tie_word_embeddings=False"),
        (
            GemmaConfig(architectures=["GemmaForCausalLM"], use_bidirectional_attention=True),
            "use_bidirectional_attention=True",
        ),
        (GemmaConfig(architectures=["GemmaForCausalLM"], hidden_act="gelu"), "activation 'gelu' of a gemma"),
        (Glm4MoeConfig(architectures=["Glm4MoeForCausalLM"], n_group=2), "n_group=2"),
        (Glm4MoeConfig(architectures=["Glm4MoeForCausalLM"], norm_topk_prob=False), "norm_topk_prob=False"),
        (OlmoeConfig(architectures=["OlmoeForCausalLM"], clip_qkv=8.0), "clip_qkv=8"),
        (OlmoeConfig(architectures=["OlmoeForCausalLM"], rms_norm_eps=1e-6), "rms_norm_eps=1e-06"),
        (NemotronConfig(architectures=["NemotronForCausalLM"], mlp_bias=True), "mlp_bias"),
        (Exaone4Config(architectures=["Exaone4ForCausalLM"], tie_word_embeddings=True), "sliding_window=4096"),
        (
            Exaone4Config(architectures=["Exaone4ForCausalLM"], tie_word_embeddings=False),
            "tie_word_embeddings=false",
        ),
        (
            MiniMaxM2Config(architectures=["MiniMaxM2ForCausalLM"], rotary_dim=64),
            r"rotary_dim=64, .*1\.0 x 128 = 128 is not 64",
        ),
        (HYV3Config(architectures=["HYV3ForCausalLM"], mlp_bias=True), "mlp_bias"),
        (
            GptOssConfig(
                architectures=["GptOssForCausalLM"],
                rope_parameters={"rope_type": "yarn", "rope_theta": 1.5e5, **GPT_OSS_ROPE, "factor": 8.0},
            ),
            "factor=8.0: Megatron has 32.0 built in",
        ),
        (
            Qwen3Config(
                architectures=["Qwen3ForCausalLM"],
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                    "attention_factor": 1.3,
                },
            ),
            "attention_factor=1.3: vLLM does not read it",
        ),
        (
            LlamaConfig(
                architectures=["LlamaForCausalLM"],
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    **LLAMA3_ROPE,
                    "low_freq_factor": 2.0,
                },
            ),
            r"low_freq_factor=2.0: Megatron has 1.0",
        ),
        # what Transformers ignores in these families and vLLM reads: log-probs differed by 1.3 to 6.6
        (LlamaConfig(architectures=["LlamaForCausalLM"], sliding_window=8), "llama model has sliding_window=8"),
        (GemmaConfig(architectures=["GemmaForCausalLM"], sliding_window=8), "gemma model has sliding_window=8"),
        (Glm4MoeConfig(architectures=["Glm4MoeForCausalLM"], sliding_window=8), "sliding_window=8"),
        (OlmoeConfig(architectures=["OlmoeForCausalLM"], sliding_window=8), "sliding_window=8"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], logit_scale=0.5), "logit_scale=0.5"),
        (NemotronConfig(architectures=["NemotronForCausalLM"], logit_scale=0.5), "logit_scale=0.5"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], rotary_pct=0.5), "rotary_pct=0.5"),
        (LlamaConfig(architectures=["LlamaForCausalLM"], partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        # log-probs of the tiny model differed by 4e-4
        (GemmaConfig(architectures=["GemmaForCausalLM"], hidden_activation="gelu"), "hidden_activation='gelu', which"),
        # vLLM does not start on a CPU: its attention for encoders
        (Qwen3Config(architectures=["Qwen3ForCausalLM"], is_causal=False), "qwen3 model has is_causal=False"),
        (  # not sampled: by vLLM's code
            Qwen2Config(architectures=["Qwen2ForCausalLM"], dual_chunk_attention_config={"chunk_size": 262144}),
            r"dual_chunk_attention_config=\{'chunk_size': 262144\}, which Transformers ignores and vLLM does not",
        ),
    ],
)
def test_variants_that_would_be_computed_wrongly_are_refused(config: Any, message: str):
    with pytest.raises(ValueError, match=message):
        check_family(config)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            architectures=["LlamaForCausalLM"], sliding_window=None, logit_scale=1.0, partial_rotary_factor=1.0
        ),
        MistralConfig(architectures=["MistralForCausalLM"], sliding_window=8),
        Qwen2Config(architectures=["Qwen2ForCausalLM"], sliding_window=8, use_sliding_window=False),
        NemotronConfig(architectures=["NemotronForCausalLM"], partial_rotary_factor=0.25),
        GemmaConfig(architectures=["GemmaForCausalLM"], hidden_activation="gelu_pytorch_tanh", is_causal=True),
    ],
)
def test_what_changes_nothing_or_is_known_is_taken(config: Any):
    check_family(config)
