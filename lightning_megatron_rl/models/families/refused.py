"""Architectures that Megatron-Bridge converts and that are refused, each with the reason that was found."""

from collections.abc import Iterable

_NO_TRANSFORMERS = "Transformers {transformers} has no class for it, so nothing says what Megatron must compute"
_NO_VLLM = "vLLM {vllm} has no class under this name, so nothing could sample from it"
_NOT_TEXT = "it takes images, sound or video, and only models of text alone are supported"
VERSIONS = {"transformers": "5.12.1", "vllm": "0.26.0"}
"""Those that were looked at; tests/models/test_refused.py looks at the installed ones."""


def _same(reason: str, *architectures: str) -> dict[str, str]:
    return dict.fromkeys(architectures, reason.format(**VERSIONS))


WITHOUT_TRANSFORMERS = _same(
    _NO_TRANSFORMERS,
    "BailingMoeV2ForCausalLM",
    "DeciLMForCausalLM",
    "KimiK2ForCausalLM",
    "MiMoForCausalLM",
    "MiMoV2FlashForCausalLM",
    "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
    "Step3p5ForCausalLM",
)
WITHOUT_VLLM = _same(_NO_VLLM, "ExaoneMoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
MULTIMODAL = _same(
    _NOT_TEXT,
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
)
DIFFERENT = {
    "DeepseekV2ForCausalLM": "the released models have YaRN, whose factor mscale^2 Transformers leaves out of the scale"
    " of attention's scores; Megatron and vLLM have it: log-probs of a tiny model differ by 0.97",
    "Ernie4_5_MoeForCausalLM": "Transformers chooses experts by a softmax plus a bias per expert; Megatron has such"
    " biases with sigmoids only (ValueError: Expert bias for aux-loss-free routing), which Megatron-Bridge sets",
    "Glm4MoeLiteForCausalLM": "Transformers norms the latents of attention with an epsilon of 1e-6, Megatron and vLLM"
    " with rms_norm_eps, 1e-5 in the released model: log-probs of a tiny model differ by 3e-5",
}
WITHOUT_LAYERS = {
    "DeepseekV4ForCausalLM": "its first layers choose experts by a table of tokens (tid2eid, of integers), which is not"
    " among the weights that are checked, trained and pushed here, so nothing compared it with Transformers",
    "FalconH1ForCausalLM": "its layers in Megatron-Bridge need Transformer Engine and cannot be built of torch modules"
    " (ImportError: Transformer Engine is not installed), so nothing compared them with Transformers",
    "Gemma4ForCausalLM": "its attention in Megatron-Bridge takes no packed sequences (AssertionError: Packed sequence"
    " is not supported by DotProductAttention), and training packs them",
    "GlmMoeDsaForCausalLM": "Megatron-Bridge reads indexer_rope_interleave, which Transformers' config does not have"
    " (AttributeError), so nothing compared its sparse attention with Transformers",
    "NemotronHForCausalLM": "Megatron-Bridge makes it a HybridModel with Mamba layers; the layers of torch modules here"
    " are those of a GPTModel, so nothing compared it with Transformers",
    "Qwen3NextForCausalLM": "its linear attention exists in Megatron's layers of Transformer Engine only (without it"
    " NameError: TESpecProvider), so nothing compared it with Transformers",
}
REFUSED: dict[str, str] = WITHOUT_TRANSFORMERS | WITHOUT_VLLM | MULTIMODAL | DIFFERENT | WITHOUT_LAYERS
"""By name in `architectures` of config.json."""


def refuse_architectures(architectures: Iterable[str]) -> None:
    """Raise `ValueError`, with the reason, if an architecture of a config.json is known not to work."""
    for name in architectures:
        if name in REFUSED:
            raise ValueError(f"model architecture {name!r} is not supported: {REFUSED[name]}")


def refused_table() -> str:
    """The refused architectures as a Markdown table, for docs/models.md: those with the same reason in one row."""
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {', '.join(sorted(names))} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(["| `architectures` | why not |", "|---|---|", *rows]) + "\n"
