"""GPT-OSS's experts for Megatron-Bridge 0.6.2, which tells a matrix from its transpose by its shape.

Where `hidden_size == 2 * intermediate_size` the gate and up projections are square and are loaded as they are stored,
that is transposed. What says the layout is how a tensor is stored: plain weights are `[experts, in, out]`, and those
made from MXFP4 blocks `[experts, out, in]`. Importing this module registers a bridge that goes by that.
"""

from collections.abc import Mapping
from typing import Any

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.gpt_oss.gpt_oss_bridge import GPTOSSBridge
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import GptOssForCausalLM

_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


@MegatronModelBridge.register_bridge(source=GptOssForCausalLM, target=GPTModel, model_type="gpt_oss")
class OrientedGptOssBridge(GPTOSSBridge):
    """Hands every expert's matrix to the mappings as `[experts, out, in]`, which is Megatron's layout."""

    def maybe_modify_loaded_hf_weight(
        self, hf_param: str | dict[str, str], hf_state_dict: Mapping[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Return a tensor of the checkpoint, or several of them by role."""
        if isinstance(hf_param, str) and hf_param.endswith(_EXPERTS) and hf_param in hf_state_dict:
            return hf_state_dict[hf_param].transpose(-1, -2).contiguous()
        found: Any = super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
        return found
