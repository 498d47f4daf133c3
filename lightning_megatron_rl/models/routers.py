"""The routers of a model during a pass: their losses and statistics without padding, recorded and replayed choices.

Gradient of the losses
----------------------
Megatron multiplies its own router losses by the positions of a micro-batch and leaves the division to
`finalize_model_grads`, which divides by the number N of *target* tokens: prompts and padding then change the weight of
the loss, and a micro-batch of padding alone makes it 0/0. Those losses are off. Here, with T the tokens of the
mini-batch (prompts included, padding not, all replicas) and T_m those of micro-batch m, the gradient is that of

    mean token loss + sum over layers of (aux_loss_coeff * sum_m T_m/T * balance_loss_m + z_loss_coeff * mean z-loss)

A rank contributes its tokens' part of ``T_m * balance_loss_m``, times N/T; DDP and `finalize_model_grads` sum over
ranks and divide by N. The z-loss does not depend on the division in micro-batches or ranks. The balance loss is not
linear in it: it is the same for all layouts that have the same micro-batches.

Which micro-batch a call belongs to
-----------------------------------
A forward pass belongs to the micro-batch that was entered last. Activation recomputation calls a router a second time,
in the backward pass, when other micro-batches have been entered since: it runs without gradients first and with them
the second time, in the order of the first. So each router has a queue of the micro-batches still to recompute.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_megatron_rl.models.backend import expert_layers
from lightning_megatron_rl.models.moe import MoESettings, balance_loss, balance_metrics, z_loss

RoutingMode = Literal["free", "record", "replay"]
"""Experts are chosen by the router; chosen and written down; or those given with each token."""


class RouterHooks:
    """Forward hooks on all routers of one rank's chunks; inert outside a pass.

    Args:
        chunks: The chunks, before Megatron wraps them.
        settings: In force, see `resolve_moe_settings`.
        device: Of this rank.

    Raises:
        ValueError: An expert-bias update of a model without expert bias.

    Example:
        ``hooks.begin([5, 3], "record")``, for each forward pass of a chunk ``hooks.enter(sequence_index,
        position_ids)``, then ``hooks.end()`` returns two tensors, [5, layers, topk] and [3, layers, topk].
    """

    def __init__(self, chunks: Sequence[nn.Module], settings: MoESettings, device: torch.device) -> None:
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.utils import get_model_config

        self.settings, self.device = settings, device
        self.config = get_model_config(chunks[0])
        if settings.expert_bias_update_rate and not self.config.moe_router_enable_expert_bias:
            raise ValueError(
                f"moe.expert_bias_update_rate={settings.expert_bias_update_rate}: this model's routers have no expert"
                " bias. Set it to 0, or balance with moe.aux_loss_coeff."
            )
        self.routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        for layer, router in enumerate(self.routers):
            router.frozen_expert_bias = settings.expert_bias_update_rate == 0
            if settings.freeze_router:
                router.requires_grad_(False)
            router.register_forward_pre_hook(partial(self._before, layer))
            router.register_forward_hook(partial(self._after, layer))
        # of the updates since the last `metrics`: tokens routed, chosen and the sums of scores, by layer and expert
        shape = (3, len(self.routers), self.config.num_moe_experts)
        self._counts = torch.zeros(shape, dtype=torch.float64, device=device)
        self._forget()

    # ---- a pass ----------------------------------------------------------------------------------------------------

    def begin(
        self,
        lengths: Sequence[int],
        mode: RoutingMode = "free",
        routing: Sequence[Tensor | None] = (),
        loss_scale: float = 0.0,
    ) -> None:
        """Start a pass over sequences of `lengths` tokens.

        Args:
            lengths: Of the sequences that `sequence_index` of `enter` refers to.
            mode: What becomes of choices.
            routing: To replay: experts of each token, ``[tokens, expert layers of this stage, topk]`` per sequence.
            loss_scale: N/T of the module's docstring.

        Raises:
            ValueError: A sequence without routing to replay, or with one of another shape or of experts that are not.
        """
        self._forget()
        self._mode, self._lengths, self._loss_scale = mode, list(lengths), loss_scale
        self._starts = torch.tensor([0, *lengths]).cumsum(0).to(self.device)
        shape = (sum(lengths), len(self.routers), self.config.moe_router_topk)
        whole = torch.zeros(shape, dtype=torch.int32)
        if mode == "replay":
            parts = [self._checked(index, length, routing[index]) for index, length in enumerate(lengths)]
            whole = torch.cat([whole[:0], *parts])
        self._routing = whole.to(self.device)

    def enter(self, sequence_index: Tensor, position_ids: Tensor) -> None:
        """Say which micro-batch the next forward pass of a chunk is of.

        Args:
            sequence_index: Sequence of each position of this context-parallel rank, ``[b, s]``, -1 on padding.
            position_ids: Position in its sequence, ``[b, s]``.
        """
        from megatron.core import parallel_state as ps

        token = self._starts[sequence_index.clamp(min=0)] + position_ids
        rows = torch.where(sequence_index >= 0, token, -1).t()  # routers see [s, b]
        if self.config.sequence_parallel:
            rows = rows.chunk(ps.get_tensor_model_parallel_world_size())[ps.get_tensor_model_parallel_rank()]
        self._rows = rows.flatten()

    def end(self) -> list[Tensor]:
        """End the pass; return what was recorded, as `begin` takes it (int16, on the CPU); a collective then."""
        from megatron.core import parallel_state

        assert not any(self._to_recompute), "a recomputation did not come: its micro-batches are out of step"
        recorded: list[Tensor] = []
        if self._mode == "record":
            if self._routing.numel():  # each token's choices lie on one rank, the others have zeros
                dist.all_reduce(self._routing, group=parallel_state.get_tensor_and_context_parallel_group())
            recorded = list(self._routing.cpu().to(torch.int16).split(self._lengths))
        self._forget()
        return recorded

    def metrics(self) -> dict[str, float]:
        """Return `moe/*` of the updates since the last call, equal on all ranks; a collective of the world."""
        counts = self._counts.new_zeros((3, self.config.num_layers, self.config.num_moe_experts))
        for layer, router in enumerate(self.routers):
            counts[:, router.layer_number - 1] = self._counts[:, layer]
        self._counts.zero_()
        dist.all_reduce(counts)  # a token's count of a layer lies on one rank of all
        return balance_metrics(*counts.cpu(), topk=self.config.moe_router_topk)

    def stage_routing(self, routing: Tensor) -> Tensor:
        """Return this pipeline stage's part of choices in all layers: what somebody else recorded, to be replayed.

        Args:
            routing: ``[tokens, expert layers of the whole model, topk]``, e.g. of the sampler.
        """
        ordinal = [sum(expert_layers(self.config)[: router.layer_number - 1]) for router in self.routers]
        return routing[:, ordinal]

    def _forget(self) -> None:
        self._mode: RoutingMode = "free"
        self._loss_scale = 0.0
        self._lengths: list[int] = []
        self._rows: Tensor | None = None  # of the micro-batch entered last: token of each position, -1 on padding
        self._rows_of_call: list[Tensor | None] = [None] * len(self.routers)
        self._to_recompute: list[deque[Tensor]] = [deque() for _ in self.routers]
        self._starts = self._routing = torch.empty(0)

    def _checked(self, index: int, length: int, routing: Tensor | None) -> Tensor:
        """The routing of sequence `index`, if it can be replayed."""
        if routing is None:
            raise ValueError(f"sequence {index} has no routing to replay: record it when the sequences are scored")
        expected = [length, len(self.routers), self.config.moe_router_topk]
        if list(routing.shape) != expected:
            raise ValueError(
                f"sequence {index} has routing of shape {list(routing.shape)}, but this stage replays"
                f" [tokens, expert layers, topk] = {expected}; `stage_routing` cuts out the layers of a stage"
            )
        if routing.numel() and not 0 <= int(routing.min()) <= int(routing.max()) < self.config.num_moe_experts:
            raise ValueError(
                f"sequence {index} has routing to experts {int(routing.min())} to {int(routing.max())}, but the model"
                f" has experts 0 to {self.config.num_moe_experts - 1}"
            )
        return routing.to(torch.int32)

    # ---- a call of a router ----------------------------------------------------------------------------------------

    def _before(self, layer: int, router: Any, args: Any) -> None:
        """Find the call's micro-batch, and tell Megatron's replay what to do."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        rows = self._rows_of_call[layer] = self._find_rows(layer, router)
        if router.router_replay is None:
            return
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()
        if rows is None:
            return
        if self._mode == "record":
            router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
        elif self._mode == "replay":
            # Megatron's cursor for the backward pass is not used: `rows` are of the right micro-batch already
            router.router_replay.set_target_indices(self._choices(layer, rows))
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def _find_rows(self, layer: int, router: Any) -> Tensor | None:
        if self._rows is None or not router.training:
            return self._rows
        if not torch.is_grad_enabled():  # inside a checkpoint: the call will come again
            self._to_recompute[layer].append(self._rows)
            return self._rows
        return self._to_recompute[layer].popleft() if self._to_recompute[layer] else self._rows

    def _choices(self, layer: int, rows: Tensor) -> Tensor:
        """Experts to replay, ``[positions, topk]``; padding is spread evenly, each position over different experts."""
        topk, experts = self.config.moe_router_topk, self.config.num_moe_experts
        positions = torch.arange(len(rows), device=rows.device)
        spread = (positions[:, None] + torch.arange(topk, device=rows.device)) % experts
        if not len(self._routing):
            return spread
        return torch.where(rows[:, None] >= 0, self._routing[rows.clamp(min=0), layer].long(), spread)

    def _after(self, layer: int, router: Any, args: Any, output: Any) -> Any:
        """Write choices down; in an update, count tokens and attach the losses."""
        rows = self._rows_of_call[layer]
        if rows is None:
            return None
        if self._mode == "record":
            own = rows >= 0
            self._routing[rows[own], layer] = router.router_replay.get_recorded_indices()[own].to(torch.int32)
        if not router.training or not torch.is_grad_enabled():
            return None
        probs, routing_map = output
        return self._count_and_attach(layer, router, args[0], rows >= 0, probs, routing_map), routing_map

    def _count_and_attach(
        self, layer: int, router: Any, hidden: Tensor, own: Tensor, probs: Tensor, routing_map: Tensor
    ) -> Tensor:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss

        aux_coeff, z_coeff = self.settings.aux_loss_coeff or 0.0, self.settings.z_loss_coeff
        with torch.set_grad_enabled(bool(aux_coeff or z_coeff)):
            logits = router.gating(hidden).view(-1, self.config.num_moe_experts)
            choice_map, scores = compute_routing_scores_for_aux_loss(
                logits, router.topk, router.score_function, padding_mask=~own
            )
        with torch.no_grad():
            chosen, score_sums = choice_map.sum(0), scores.sum(0)
            routed = (routing_map & own[:, None]).sum(0)
            self._counts[:, layer] += torch.stack([routed, chosen, score_sums])
            if router.enable_expert_bias:  # Megatron has counted padding, too
                router.local_tokens_per_expert -= (routing_map & ~own[:, None]).sum(0)
        if not (aux_coeff or z_coeff):
            return probs
        loss = z_coeff * z_loss(logits, own)
        if aux_coeff:
            # the micro-batch lies on tensor- and context-parallel ranks: counts of all, scores of this one
            chosen = chosen.to(torch.float32)
            dist.all_reduce(chosen, group=router.tp_cp_group)
            tokens = chosen.sum() / router.topk
            loss = loss + aux_coeff * tokens * balance_loss(chosen, scores.sum(0), router.topk)
        return MoEAuxLossAutoScaler.apply(probs, loss * self._loss_scale)
