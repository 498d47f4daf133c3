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
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_megatron_rl.models.layers.backend import expert_layers
from lightning_megatron_rl.models.layers.moe import MoESettings, balance_loss, balance_metrics, z_loss

RoutingMode = Literal["free", "record", "replay"]
"""Experts are chosen by the router; chosen and written down; or those given with each token."""


@dataclass
class _Pass:
    """What one pass over the micro-batches of a share is about."""

    mode: RoutingMode
    lengths: list[int]  # of the sequences
    starts: Tensor  # [sequences + 1] where each begins in `routing`
    routing: Tensor  # [tokens of all sequences, layers, topk] written or replayed; no tokens where neither
    loss_scale: float  # N/T
    to_recompute: list[deque[Tensor]]  # of each layer, the rows of forward passes without gradients
    rows: Tensor | None = None  # of the micro-batch entered last: token of each position, -1 on padding


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
        self._has_losses = bool(settings.aux_loss_coeff or settings.z_loss_coeff)
        self.config = get_model_config(chunks[0])
        if settings.expert_bias_update_rate and not self.config.moe_router_enable_expert_bias:
            raise ValueError(
                f"train.moe.expert_bias_update_rate={settings.expert_bias_update_rate}: this model's routers have no"
                " expert bias. Set it to 0, or balance with train.moe.aux_loss_coeff."
            )
        self.routers: list[Any] = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
        for layer, router in enumerate(self.routers):
            if settings.freeze_router:
                router.requires_grad_(False)
            router.register_forward_pre_hook(partial(self._before, layer))
            router.register_forward_hook(partial(self._after, layer))
        # of the updates since the last `metrics`: tokens routed, chosen and the sums of scores, by layer and expert
        shape = (3, len(self.routers), self.config.num_moe_experts)
        self._counts = torch.zeros(shape, dtype=torch.float64, device=device)
        self._pass: _Pass | None = None
        self._rows_of_call: list[Tensor | None] = [None] * len(self.routers)

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
            ValueError: Anything but "free" where the settings have no replay; a sequence without routing to replay, or
                with one of another shape or of experts that are not.
        """
        if mode != "free" and self.settings.router_replay == "none":
            raise ValueError(f"routing={mode!r} needs train.moe.router_replay='R2'; this run has 'none'")
        tokens = sum(lengths) if mode == "record" else 0
        shape = (tokens, len(self.routers), self.config.moe_router_topk)
        whole = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if mode == "replay":
            parts = [self._checked(index, length, routing[index]) for index, length in enumerate(lengths)]
            whole = torch.cat([whole.cpu(), *parts]).to(self.device)
        self._pass = _Pass(
            mode=mode,
            lengths=list(lengths),
            starts=torch.tensor([0, *lengths]).cumsum(0).to(self.device),
            routing=whole,
            loss_scale=loss_scale,
            to_recompute=[deque() for _ in self.routers],
        )

    def enter(self, sequence_index: Tensor, position_ids: Tensor) -> None:
        """Say which micro-batch the next forward pass of a chunk is of.

        Args:
            sequence_index: Sequence of each position of this context-parallel rank, ``[b, s]``, -1 on padding.
            position_ids: Position in its sequence, ``[b, s]``.
        """
        from megatron.core import parallel_state as ps

        assert self._pass is not None, "begin() starts a pass"
        token = self._pass.starts[sequence_index.clamp(min=0)] + position_ids
        rows = torch.where(sequence_index >= 0, token, -1).t()  # routers see [s, b]
        if self.config.sequence_parallel:
            rows = rows.chunk(ps.get_tensor_model_parallel_world_size())[ps.get_tensor_model_parallel_rank()]
        self._pass.rows = rows.flatten()

    def end(self) -> list[Tensor]:
        """End the pass; return what was recorded, as `begin` takes it (int16, on the CPU); a collective then."""
        from megatron.core import parallel_state

        ended, self._pass = self._pass, None
        assert ended is not None, "begin() starts a pass"
        assert not any(ended.to_recompute), "a recomputation did not come: its micro-batches are out of step"
        if ended.mode != "record":
            return []
        group = parallel_state.get_tensor_and_context_parallel_group()
        if ended.routing.numel() and group.size() > 1:  # each token's choices lie on one rank, the others have zeros
            dist.all_reduce(ended.routing, group=group)
        return list(ended.routing.cpu().to(torch.int16).split(ended.lengths))

    def metrics(self) -> dict[str, float]:
        """Return `moe/*` of the updates since the last call, equal on all ranks; a collective of the world."""
        counts = self._counts.new_zeros((3, self.config.num_layers, self.config.num_moe_experts))
        for layer, router in enumerate(self.routers):
            counts[:, router.layer_number - 1] = self._counts[:, layer]
        self._counts.zero_()
        dist.all_reduce(counts)  # a token's count of a layer lies on one rank of all
        routed, chosen, score_sums = counts.cpu()
        return balance_metrics(routed, chosen, score_sums, self.config.moe_router_topk)

    def describe(self) -> list[tuple[str, str]]:
        """Return rows for the table at start: what is in force."""
        learns = all(parameter.requires_grad for router in self.routers for parameter in router.parameters())
        return self.settings.describe(has_expert_bias=self.config.moe_router_enable_expert_bias, learns=learns)

    def stage_routing(self, routing: Tensor) -> Tensor:
        """Return this pipeline stage's part of choices in all layers: recorded elsewhere, to be replayed.

        Args:
            routing: ``[tokens, expert layers of the whole model, topk]``, e.g. of the sampler.
        """
        ordinal = [sum(expert_layers(self.config)[: router.layer_number - 1]) for router in self.routers]
        return routing[:, ordinal]

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

        current = self._pass
        rows = self._rows_of_call[layer] = None if current is None else self._find_rows(current, layer, router)
        if router.router_replay is None:
            return
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()
        if current is None or rows is None:
            return
        if current.mode == "record":
            router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
        elif current.mode == "replay":
            # Megatron's cursor for the backward pass is not used: `rows` are of the right micro-batch already
            router.router_replay.set_target_indices(self._choices(current.routing, layer, rows))
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def _find_rows(self, current: _Pass, layer: int, router: Any) -> Tensor | None:
        """Rows of the micro-batch that a call is of; see the module's docstring."""
        waiting = current.to_recompute[layer]
        if current.rows is None or not router.training:
            return current.rows
        if not torch.is_grad_enabled():  # inside a checkpoint: the call will come again
            waiting.append(current.rows)
            return current.rows
        return waiting.popleft() if waiting else current.rows

    def _choices(self, routing: Tensor, layer: int, rows: Tensor) -> Tensor:
        """Experts to replay, ``[positions, topk]``; padding is spread evenly, each position over different experts."""
        topk, experts = self.config.moe_router_topk, self.config.num_moe_experts
        positions = torch.arange(len(rows), device=rows.device)
        spread = (positions[:, None] + torch.arange(topk, device=rows.device)) % experts
        if not len(routing):  # a replica without a sequence
            return spread
        return torch.where(rows[:, None] >= 0, routing[rows.clamp(min=0), layer].long(), spread)

    def _after(self, layer: int, router: Any, args: Any, output: Any) -> Any:
        """Write choices down; in an update, count tokens and attach the losses."""
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss

        current, rows = self._pass, self._rows_of_call[layer]
        if current is None or rows is None:
            return None
        if current.mode == "record":
            own = rows >= 0
            recorded = router.router_replay.get_recorded_indices()
            current.routing[rows[own], layer] = recorded[own].to(torch.int32)
        if not router.training or not torch.is_grad_enabled():
            return None
        probs, routing_map = output
        own = rows >= 0
        with torch.set_grad_enabled(self._has_losses):
            logits = router.gating(args[0]).view(-1, self.config.num_moe_experts)
            choice_map, scores = compute_routing_scores_for_aux_loss(
                logits, router.topk, router.score_function, padding_mask=~own
            )
        with torch.no_grad():
            routed = (routing_map & own[:, None]).sum(0)
            self._counts[:, layer] += torch.stack([routed, choice_map.sum(0), scores.sum(0)])
            if router.enable_expert_bias:  # Megatron has counted padding, too
                router.local_tokens_per_expert -= (routing_map & ~own[:, None]).sum(0)
        if self._has_losses:
            loss = self._losses(router, logits, own, choice_map, scores) * current.loss_scale
            probs = MoEAuxLossAutoScaler.apply(probs, loss)  # Megatron's schedule multiplies by the loss scale of fp16
        return probs, routing_map

    def _losses(self, router: Any, logits: Tensor, own: Tensor, choice_map: Tensor, scores: Tensor) -> Tensor:
        """This rank's part of the losses of one layer, times the tokens of the micro-batch, a scalar."""
        loss = self.settings.z_loss_coeff * z_loss(logits, own)
        if self.settings.aux_loss_coeff:
            # the micro-batch lies on all tensor- and context-parallel ranks: their counts, this one's scores
            chosen = choice_map.sum(0).to(torch.float32)
            if router.tp_cp_group.size() > 1:
                dist.all_reduce(chosen, group=router.tp_cp_group)
            tokens = chosen.sum() / router.topk
            loss = loss + self.settings.aux_loss_coeff * tokens * balance_loss(chosen, scores.sum(0), router.topk)
        return loss
