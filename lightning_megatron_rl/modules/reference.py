"""The reference that KL is measured to: none, a frozen copy, a teacher, an average, the policy without adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from lightning_megatron_rl.checkpoints.manifest import MANIFEST_FILE, record_file
from lightning_megatron_rl.data.packing import TokenSequence
from lightning_megatron_rl.models.layers.lora import adapters_off
from lightning_megatron_rl.strategy.averaging import AveragedWeights
from lightning_megatron_rl.strategy.optimizer import MegatronOptimizer
from lightning_megatron_rl.utilities.notices import tell_loss
from lightning_megatron_rl.utilities.ranges import COUNT, Range, check_ranges, check_words
from lightning_megatron_rl.utilities.text_files import user_path

if TYPE_CHECKING:
    from lightning_megatron_rl.models.hf.model import HFModel
    from lightning_megatron_rl.modules.policy import PolicyModule, Scores

ReferenceKind = Literal["none", "frozen_copy", "adapters_off", "average"]
ReferenceChoice = Literal["auto", ReferenceKind]


@dataclass
class ReferenceSettings:
    """Which policy the KL divergence is measured to, and where it lives.

    Args:
        kind: "frozen_copy" is a second model with the weights of `model`; "adapters_off" is the policy without its LoRA
            adapters; "average" is a running average of the policy (EMA), which starts as the policy does and takes the
            place of its weights while the reference scores; "none" is none. "auto" takes the cheapest that is right:
            none without `loss.kl_coef`, else the policy without its adapters if it has any, else a copy.
        model: Another model with the same tokenizer, hub name or directory, which then is the reference: KL to it is
            on-policy distillation from a teacher. Unset: the model that training starts from.
        refresh_every_n_steps: Give the copy the policy's weights every so many `global_step`s; unset: never. An average
            is updated every so many; unset: every step.
        average_decay: ``average = average_decay * average + (1 - average_decay) * policy``; with kind "average" only.
        offload: Keep the copy in the host's memory while it is not used (on CUDA; two transfers per rollout).

    Raises:
        ValueError: A number of steps below 1, a refresh of something that is no copy, a teacher that would not be used,
            or a decay without an average, outside (0, 1), or missing.
    """

    kind: ReferenceChoice = "auto"
    model: str | None = None
    refresh_every_n_steps: int | None = None
    average_decay: float | None = None
    offload: bool = True

    def __post_init__(self) -> None:
        check_words({"kind": ReferenceChoice}, vars(self), "reference.")
        steps = self.refresh_every_n_steps
        ranges = {"refresh_every_n_steps": COUNT.called("null for never"), "average_decay": Range(above=0, below=1)}
        check_ranges(ranges, vars(self), "reference.")
        if steps is not None and self.kind in ("none", "adapters_off"):
            raise ValueError(
                f"refresh_every_n_steps={steps} with kind={self.kind}: only a frozen copy can be given new weights."
            )
        if (self.average_decay is not None) != (self.kind == "average"):
            raise ValueError(
                f"reference.kind={self.kind} with average_decay={self.average_decay}: an average needs a decay, and"
                " nothing else has one. Set both, e.g. kind=average and average_decay=0.99, or neither."
            )
        if self.model is not None and (steps is not None or self.kind in ("none", "adapters_off", "average")):
            raise ValueError(
                f"reference.model={self.model!r} with kind={self.kind}, refresh_every_n_steps={steps}: a teacher is a"
                " model of its own that stays as it is. Set kind=auto and no refresh, or leave reference.model out."
            )

    def resolve(self, *, kl_coef: float, has_adapters: bool) -> ReferenceKind:
        """Return the kind that is in force.

        Raises:
            ValueError: KL without a reference, adapters off without adapters, a copy of a model with adapters.
        """
        if self.model is not None:  # with kl_coef=0, to log the KL without a penalty
            return "frozen_copy"
        kind = self.kind
        if kind == "average":
            return kind
        if kind == "auto":
            kind = "none" if not kl_coef else "adapters_off" if has_adapters else "frozen_copy"
        if kind == "none" and kl_coef:
            raise ValueError(
                f"loss.kl_coef={kl_coef} with reference.kind=none: there is nothing to measure the KL to. Set"
                " reference.kind=auto, or loss.kl_coef=0."
            )
        if kind == "adapters_off" and not has_adapters:
            raise ValueError(
                "reference.kind=adapters_off without lora: there are no adapters to leave out. Set reference.kind=auto"
                " for a frozen copy, or give lora settings."
            )
        if has_adapters and (kind == "frozen_copy" or self.refresh_every_n_steps is not None):
            raise ValueError(
                f"reference.kind={self.kind}, refresh_every_n_steps={self.refresh_every_n_steps} with lora: the policy"
                " without its adapters is the reference, a second copy of the frozen weights would be the same. Set"
                " reference.kind=auto and no refresh."
            )
        if kind == "none" and self.refresh_every_n_steps is not None:
            raise ValueError(
                f"reference.refresh_every_n_steps={self.refresh_every_n_steps} with loss.kl_coef=0: no reference is"
                " built. Set loss.kl_coef, or reference.kind=frozen_copy to log policy/kl_ref without a penalty."
            )
        return kind


class Reference:
    """The policy that KL is measured to, beside the one that is trained.

    Args:
        policy: The module that is trained.
        settings: Where the reference comes from.
        kind: In force, see `ReferenceSettings.resolve`.
    """

    def __init__(self, policy: "PolicyModule", settings: ReferenceSettings, kind: ReferenceKind) -> None:
        self._policy = policy
        self._settings = settings
        self.kind = kind
        self.chunks: list[nn.Module] | None = None  # of the frozen copy, which is neither trained nor a submodule
        self._teacher: HFModel | None = None  # where the copy comes from, if not from the policy's start
        self._made_of: str | None = None  # checksum of the weights of the copy
        self._average: AveragedWeights | None = None  # of a fit, with kind "average"

    @property
    def num_on_gpu(self) -> int:
        """Models that stay on the GPU beside the policy."""
        return int(self.kind == "frozen_copy" and not self._settings.offload)

    def setup(self) -> None:
        """Find and check the teacher, if there is one, before weights are loaded."""
        if self._settings.model is not None and self._teacher is None:
            self._teacher = self._find_teacher(self._settings.model)

    def _find_teacher(self, model: str) -> "HFModel":
        from lightning_megatron_rl.models.hf.model import HFModel

        policy = self._policy
        teacher = HFModel(model, verify=policy.train_settings.verify_model)
        theirs, ours = teacher.config.vocab_size, policy.hf_model.config.vocab_size
        if theirs < ours or teacher.tokenizer.get_vocab() != policy.hf_model.tokenizer.get_vocab():
            raise ValueError(
                f"reference.model={model!r} has a vocabulary of {theirs} tokens, {policy.model_path!r} of {ours}: a"
                " teacher scores the policy's tokens, so it must have the same tokenizer and at least as many of them."
            )
        try:
            policy.check_model(teacher, {})
        except ValueError as error:
            raise ValueError(f"reference.model={model!r}: {error}") from error
        return teacher

    def build(self) -> None:
        """Build the frozen copy, if there is to be one; called again, it does nothing."""
        if self.kind != "frozen_copy":
            return
        policy, teacher = self._policy, self._teacher
        if self.chunks is None:
            chunks = policy.build_chunks() if teacher is None else teacher.build_chunks(**policy.build_options)
            self.chunks = [chunk.requires_grad_(False).eval() for chunk in chunks]
            self._offload()
            self._made_of = self._source()
        if self._settings.refresh_every_n_steps is not None:
            policy.strategy.saved_with_model = {**policy.strategy.saved_with_model, "reference": self.chunks}

    def _source(self) -> str:
        init_from = self._policy.init_from
        if self._teacher is None and init_from is not None:  # the manifest names checksums of all weights
            return record_file(user_path(init_from) / MANIFEST_FILE).sha256
        return (self._teacher or self._policy.hf_model).fingerprint

    @property
    def state(self) -> str | None:
        """What tells the weights of a copy that no checkpoint holds, for it is never given new ones."""
        return self._made_of if self._settings.refresh_every_n_steps is None else None

    def check_state(self, saved: str | None) -> None:
        """Warn if a checkpoint's run had another reference.

        Args:
            saved: Its `state`.
        """
        if saved is not None and self.state not in (None, saved):
            rank_zero_only(tell_loss)(
                "the reference is another one than in the run that saved the checkpoint: it is made of the weights that"
                " model, init_from and reference.model name, and these are others now, so any KL is measured to another"
                " model. Name those of that run again, or start a new run with the checkpoint's weights."
            )

    def begin_fit(self) -> None:
        """Let an average start as the policy is now; a checkpoint's is loaded after this."""
        if self.kind == "average":
            optimizer = self._policy.optimizers(use_pl_optimizer=False)
            assert isinstance(optimizer, MegatronOptimizer)
            self._average = optimizer.add_average("reference", counts_start=True)

    def score(self, sequences: list[TokenSequence]) -> "Scores":
        """Score under the frozen copy, the teacher, the average, or the policy without its adapters; a collective."""
        policy = self._policy
        if self.kind == "average":
            assert self._average is not None, "begin_fit() makes it"
            with self._average.in_place():
                return policy.score(sequences)
        if self.chunks is None:
            with adapters_off(policy.model):
                return policy.score(sequences)
        for chunk in self.chunks:
            chunk.to(policy.strategy.root_device)
        try:
            return policy.score(sequences, self.chunks, model=self._teacher)
        finally:
            self._offload()

    def refresh(self) -> None:
        """Give the frozen copy or the average the policy's weights if this step is one that does so; a collective."""
        every, step = self._settings.refresh_every_n_steps, self._policy.trainer.global_step
        if self._average is not None and step > 0 and step % (every or 1) == 0:
            self._average.update(self._settings.average_decay)
        if self.chunks is not None and every is not None and step > 0 and step % every == 0:
            self._policy.strategy.gather_parameters()
            copy_weights(list(self._policy.model), self.chunks)

    def _offload(self) -> None:
        if self._settings.offload:
            for chunk in self.chunks or []:
                chunk.to("cpu")


@torch.no_grad()
def copy_weights(source: Sequence[nn.Module], target: Sequence[nn.Module]) -> None:
    """Give `target` the weights and buffers of `source`, chunk by chunk, without Megatron's wrappers around them."""
    from megatron.core.utils import unwrap_model

    for giver, taker in zip(unwrap_model(list(source)), unwrap_model(list(target)), strict=True):
        given = dict([*giver.named_parameters(), *giver.named_buffers()])
        taken = dict([*taker.named_parameters(), *taker.named_buffers()])
        assert given.keys() == taken.keys(), given.keys() ^ taken.keys()
        for name, tensor in taken.items():
            tensor.copy_(given[name])
