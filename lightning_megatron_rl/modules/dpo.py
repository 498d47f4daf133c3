"""`DPOModule`: direct preference optimisation, a policy from preference pairs without a reward model."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Optional

import torch
from lightning.pytorch.cli import LRSchedulerCallable
from torch import Tensor, nn

from lightning_megatron_rl.algorithms.preferences import dpo_sigmoid, ipo
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.lora import LoRASettings, adapters_off
from lightning_megatron_rl.models.moe import MoESettings
from lightning_megatron_rl.modules.pairs import PairModule
from lightning_megatron_rl.modules.policy import PolicyModule, Scores
from lightning_megatron_rl.ranges import POSITIVE, Range, check_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig

_RANGES = {
    "beta": POSITIVE.called("0.1 is usual, a smaller one ties less"),
    "label_smoothing": Range(
        least=0, below=0.5, note="at 0.5 preferences say nothing, beyond it they are the wrong way round"
    ),
}


class DPOModule(PairModule, PolicyModule):
    """Train a policy to prefer the chosen responses, tied to a reference: the model as it was at the start.

    The reference is a frozen copy or, with LoRA, the policy without its adapters. Formulas in docs/algorithms.md.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        beta: Strength of the tie to the reference.
        loss: "sigmoid" (DPO, log-ratios summed over the response) or "ipo" (log-ratios averaged over it).
        label_smoothing: Share of preferences taken to be the wrong way round; "sigmoid" only.
        optimizer: Megatron's own `OptimizerConfig` (lr, weight_decay, adam_beta2, ...).
        lr_scheduler: Called with the optimizer; stepped once per `global_step`.
        max_tokens_per_microbatch: Token budget of one micro-batch, padding included.
        packing: Lay sequences end to end in a micro-batch instead of padding each to the longest.
        layer_backend: "auto", "torch" or "transformer_engine"; auto takes TransformerEngine on CUDA if installed.
        model_config: Overrides of Megatron's `TransformerConfig`.
        logprob_chunk_size: Tokens whose logits exist at one time.
        moe: How the routers of a mixture-of-experts model are trained.
        lora: Train low-rank adapters and leave the model's own weights as they are; these then are the reference.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.

    Raises:
        ValueError: An unknown loss; a beta or a label smoothing out of range, or smoothing that the loss has not.

    Example:
        ``Trainer(strategy=MegatronStrategy()).fit(DPOModule(model="Qwen/Qwen3-0.6B"), PreferenceDataModule(...))``
    """

    def __init__(
        self,
        model: str,
        beta: float = 0.1,
        loss: Literal["sigmoid", "ipo"] = "sigmoid",
        label_smoothing: float = 0.0,
        optimizer: Optional["OptimizerConfig"] = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_tokens_per_microbatch: int = 8192,
        packing: bool = True,
        layer_backend: Literal["auto", "torch", "transformer_engine"] = "auto",
        model_config: dict[str, Any] | None = None,
        logprob_chunk_size: int = 2048,
        moe: MoESettings | None = None,
        lora: LoRASettings | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]  # PairModule's is PolicyModule's here
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            packing=packing,
            layer_backend=layer_backend,
            model_config=model_config,
            logprob_chunk_size=logprob_chunk_size,
            moe=moe,
            lora=lora,
            init_from=init_from,
        )
        check_ranges(_RANGES, locals())
        if loss not in ("sigmoid", "ipo"):
            raise ValueError(f"unknown loss {loss!r}: choose one of ipo, sigmoid")
        if loss == "ipo" and label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing} with loss='ipo', which has none: set it to 0.")
        self.beta = beta
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.reference: list[nn.Module] | None = None  # a list, not a submodule: it is neither trained nor saved

    def configure_model(self) -> None:
        """Build the policy and the frozen reference; with LoRA the policy holds it."""
        super().configure_model()
        if self.lora is None and self.reference is None:
            self.reference = [chunk.requires_grad_(False).eval() for chunk in self.build_chunks()]

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of log-ratios ``[pairs]``, see `side_values`."""
        if self.loss == "ipo":
            return ipo(chosen, rejected, self.beta)
        return partial(dpo_sigmoid, beta=self.beta, label_smoothing=self.label_smoothing)(chosen, rejected)

    def side_values(self, sequences: list[TokenSequence]) -> Tensor:
        """Return log π_θ / π_ref of each response, summed over its tokens or, for "ipo", averaged; ``[sequences]``."""
        policy = self.score(sequences).logprobs
        reference = self.score_reference(sequences).logprobs
        ratios = [
            (mine.double() - theirs.double())[sequence.loss_mask].sum() * self.token_share(sequence)
            for sequence, mine, theirs in zip(sequences, policy, reference, strict=True)
        ]
        return torch.stack(ratios) if ratios else torch.empty(0)

    def score_reference(self, sequences: list[TokenSequence]) -> Scores:
        """Score under the reference policy."""
        if self.lora is None:
            return self.score(sequences, self.reference)
        with adapters_off(self.model):
            return self.score(sequences)

    def token_share(self, sequence: TokenSequence) -> float:
        """Return 1, or for "ipo" 1 / length of the response."""
        return 1 / int(sequence.loss_mask.sum()) if self.loss == "ipo" else 1.0

    def preference_scale(self) -> float:
        """Return beta: the implicit reward of a response is beta times its log-ratio."""
        return self.beta
