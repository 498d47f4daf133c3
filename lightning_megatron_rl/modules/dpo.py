"""`DPOModule`: direct preference optimisation, a policy from preference pairs without a reward model."""

from typing import Literal

import torch
from torch import Tensor

from lightning_megatron_rl.algorithms.preferences import DPO_LOSSES
from lightning_megatron_rl.algorithms.registry import lookup
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.modules.pairs import PairModule
from lightning_megatron_rl.modules.policy import PolicyModule
from lightning_megatron_rl.modules.reference import Reference, ReferenceKind, ReferenceSettings
from lightning_megatron_rl.modules.training import TrainingSettings
from lightning_megatron_rl.utilities.ranges import POSITIVE, Range, check_ranges

_RANGES = {
    "beta": POSITIVE.called("0.1 is usual, a smaller one ties less"),
    "label_smoothing": Range(
        least=0, below=0.5, note="at 0.5 preferences say nothing, beyond it they are the wrong way round"
    ),
    "discopop_tau": Range(
        above=0, most=1, note="0.05 is usual; above 1 a pair far the wrong way round has an exponential loss"
    ),
}


class DPOModule(PairModule, PolicyModule):  # trained on pairs as a reward model is, scored as a policy is
    """Train a policy to prefer the chosen responses, tied to a reference: the model as it was at the start.

    The reference is a frozen copy or, with LoRA, the policy without its adapters. Formulas in docs/algorithms.md.

    Args:
        model: Hugging Face hub name, or a directory that `save_pretrained` wrote.
        beta: Strength of the tie to the reference.
        loss: "sigmoid" (DPO), "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
            "apo_down" or "discopop", of log-ratios summed over the response; "ipo" or "sigmoid_norm", of log-ratios
            averaged over it.
        label_smoothing: Share of preferences taken to be the wrong way round; "sigmoid", "sigmoid_norm", "robust" and
            "exo_pair" only, which needs it (1e-3 is usual).
        discopop_tau: How sharply "discopop" goes over from its logistic to its exponential part.
        train: How the model is built and trained.
        init_from: Distributed checkpoint of a run of this model, in any layout, whose weights replace those of `model`.

    Raises:
        ValueError: An unknown loss; a beta, a label smoothing or a discopop_tau out of range; smoothing that the loss
            does not have, or lacks.
    """

    reference: Reference

    def __init__(
        self,
        model: str,
        beta: float = 0.1,
        loss: Literal[
            "sigmoid",
            "sigmoid_norm",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
        ] = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        train: TrainingSettings | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__(model=model, train=train, init_from=init_from)
        check_ranges(_RANGES, locals())
        self.pair_loss_kind = lookup(DPO_LOSSES, loss, "loss")
        if label_smoothing and not self.pair_loss_kind.smooths:
            smoothed = ", ".join(sorted(name for name, kind in DPO_LOSSES.items() if kind.smooths))
            raise ValueError(
                f"label_smoothing={label_smoothing} with loss={loss!r}, which has none: set it to 0, or choose one of"
                f" {smoothed}."
            )
        if loss == "exo_pair" and not label_smoothing:
            raise ValueError(
                "label_smoothing=0 with loss='exo_pair', which takes its logarithm: set it to a small share, 1e-3 is"
                " usual."
            )
        self.beta = beta
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.discopop_tau = discopop_tau
        kind: ReferenceKind = "frozen_copy" if self.train_settings.lora is None else "adapters_off"
        self.reference = Reference(self, ReferenceSettings(kind=kind, offload=False), kind)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of log-ratios ``[pairs]``, see `side_values`."""
        kind = self.pair_loss_kind
        options = {"label_smoothing": self.label_smoothing} if kind.smooths else {}
        if kind.takes_tau:
            options["tau"] = self.discopop_tau
        return kind.function(chosen, rejected, beta=self.beta, **options)

    def side_values(self, sequences: list[TokenSequence]) -> Tensor:
        """Return log π_θ / π_ref of each response, summed over its tokens or averaged, as the loss takes them."""
        policy = self.score(sequences).logprobs
        reference = self.reference.score(sequences).logprobs
        ratios = [
            (mine.double() - theirs.double())[sequence.loss_mask].sum() * self.token_share(sequence)
            for sequence, mine, theirs in zip(sequences, policy, reference, strict=True)
        ]
        return torch.stack(ratios) if ratios else torch.empty(0)

    def prepare_side(self, sequence: TokenSequence) -> TokenSequence:
        """Return the sequence.

        Raises:
            ValueError: It has no target: a response without tokens has no log-ratio.
        """
        if not sequence.loss_mask.any():
            raise ValueError(
                f"{sequence.origin or 'a side of a pair'} has no target among its {len(sequence)} tokens: a response"
                " without tokens has no log-ratio of policy and reference. Leave such pairs out."
            )
        return sequence

    def token_share(self, sequence: TokenSequence) -> float:
        """Return 1, or 1 / length of the response if the loss is of averages."""
        return 1 / int(sequence.loss_mask.sum()) if self.pair_loss_kind.averages else 1.0

    def preference_scale(self) -> float:
        """Return beta: the implicit reward of a response is beta times its log-ratio."""
        return self.beta
