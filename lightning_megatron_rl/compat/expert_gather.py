"""Tokens of all ranks gathered for their experts, where Megatron sends each token once per expert.

Megatron's own dispatcher that gathers (megatron-core 0.19.2) needs as many tokens on each rank, but packed
micro-batches differ in length between replicas. It also adds up what experts return in the precision of the routing
weights, fp32, which doubles the bytes. Here each rank's tokens are padded to the most that a rank has, and no padding
goes to an expert. Results travel in the precision of activations and are added in fp32 where they arrive.

Ranks agree on that number once for a packed micro-batch, in its first layer of experts: that waits for the GPU. Each
layer waits for the numbers of its experts' tokens, which are on their way before the tokens are.

A layer that is recomputed for its backward pass ends with that sum, and nothing asks for its numbers then: they do not
travel a second time, and the sum is NaN, so that whoever asks after all gets no wrong numbers.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from lightning_megatron_rl.compat.torch_names import is_in_backward

_ELSEWHERE = -1.0  # a token's weight for an expert to which it does not go
_LONGEST = "longest_of_expert_ranks"  # attribute of a packed micro-batch


def gather_tokens(chunks: Iterable[nn.Module], *, ends_layer: bool) -> None:
    """Let layers of experts gather tokens, in place.

    Megatron's `TransformerConfig` refuses its gathering dispatcher with `variable_seq_lengths`, so layers are built
    with its all-to-all and get another dispatcher afterwards.

    Args:
        chunks: Model chunks on several expert-parallel and one expert tensor-parallel rank, before they are wrapped for
            training.
        ends_layer: Whether a layer only adds what its experts return; False: it has a norm behind them.
    """
    for chunk in chunks:
        for module in chunk.modules():
            layer: Any = module
            experts: Any = getattr(layer, "mlp", None)
            if type(getattr(experts, "token_dispatcher", None)) is MoEAlltoAllTokenDispatcher:
                experts.token_dispatcher = GatheringDispatcher(experts, ends_layer=ends_layer)
                layer.register_forward_pre_hook(experts.token_dispatcher.begin_layer, with_kwargs=True)


class GatheringDispatcher(MoEAllGatherTokenDispatcher):
    """Gathers the tokens of all expert-parallel ranks, whatever number each of them has.

    Megatron's layer calls `dispatch_preprocess`, `token_dispatch`, `dispatch_postprocess`, its experts,
    `combine_preprocess`, `token_combine` and `combine_postprocess`, in this order; what is not here is Megatron's.

    Args:
        layer: Megatron's `MoELayer` with its all-to-all dispatcher.
        ends_layer: See `gather_tokens`.
    """

    routing_map: Any  # of this rank's tokens, [tokens, experts] bool
    microbatch: Any = None  # Megatron's `PackedSeqParams` of what comes next, made anew for each forward pass

    def __init__(self, layer: Any, *, ends_layer: bool) -> None:
        given, config = layer.token_dispatcher, layer.config
        groups = ProcessGroupCollection(ep=given.ep_group, expt_tp=given.tp_group, tp_ep=given.tp_ep_group)
        super().__init__(layer.num_local_experts, layer.local_expert_indices, config=config, pg_collection=groups)
        assert (self.tp_size, self.ep_size > 1) == (1, True), "anything else is refused before the model is built"
        # ranks that share a micro-batch have equal parts of it: it is padded to a multiple of their number
        sharers = parallel_state.get_tensor_and_context_parallel_group()
        self.counts_are_equal = _ranks(self.ep_group) <= _ranks(sharers)
        several = config.recompute_method == "uniform" and config.recompute_num_layers > 1  # are recomputed at once
        self.ends_recomputation = ends_layer and not several

    def begin_layer(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take the micro-batch of a transformer layer that begins; a hook of its forward pass, also when recomputed."""
        self.microbatch = named.get("packed_seq_params")

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of all ranks, [ranks * longest, hidden], and their weights for this rank's experts.

        Args:
            hidden_states: This rank's tokens, [tokens, hidden].
            probs: Weight of each token for each expert, [tokens, experts]; none is negative.
        """
        self.num_tokens = len(hidden_states)
        longest = self._longest(probs.device)
        weights = self._of_local_experts(torch.where(self.routing_map, probs, _ELSEWHERE), longest)
        self.routing_map = None
        self.local_map = ~(weights.detach() < 0)  # a weight that is not a number stays one
        counts = self.local_map.sum(dim=0).to("cpu", non_blocking=True)
        self.counts = counts, torch.cuda.current_stream().record_event() if weights.is_cuda else None
        return _Gather.apply(hidden_states, longest, self.ep_group), weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens in the order of this rank's experts, the number of each, on the CPU, and their weights."""
        self.hidden_shape_before_permute = hidden_states.shape
        tokens_per_expert, is_there = self.counts
        if is_there is not None:
            is_there.synchronize()
        permuted, permuted_probs, self.reversed_local_input_permutation_mapping, *_ = permute(
            hidden_states,
            self.local_map,
            probs=probs,
            num_out_tokens=int(tokens_per_expert.sum()),
            fused=self.config.moe_permute_fusion,
        )
        return permuted, tokens_per_expert, permuted_probs

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return for this rank's tokens, [tokens, hidden], the sum of what the experts of all ranks return."""
        is_needed = not (self.ends_recomputation and is_in_backward())
        return _AddUp.apply(hidden_states, self.num_tokens, self.ep_group, is_needed)

    def _longest(self, device: torch.device) -> int:
        """Return the most tokens that a rank has; all ranks ask, or none of them."""
        # experts that are recomputed without their layer find none: another's may have begun since
        microbatch, self.microbatch = self.microbatch, None
        if self.counts_are_equal:
            return self.num_tokens
        if microbatch is None:
            return _largest(self.num_tokens, device, self.ep_group)
        known = vars(microbatch)
        if _LONGEST not in known:
            known[_LONGEST] = _largest(self.num_tokens, device, self.ep_group)
        return int(known[_LONGEST])

    def _of_local_experts(self, weights: Tensor, longest: int) -> Tensor:
        """Send each rank the columns of its experts: [tokens, experts] to [ranks * longest, experts / ranks]."""
        columns = _padded(weights, longest, _ELSEWHERE).unflatten(1, (self.ep_size, -1)).transpose(0, 1)
        return all_to_all(self.ep_group, columns.flatten(0, 1))


class _Gather(torch.autograd.Function):
    """Rows of all ranks, each rank's padded to one number; the other direction of `_AddUp`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, longest: int, group: Any) -> Tensor:
        ctx.num_rows, ctx.group = len(rows), group
        return _gather(rows, longest, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _add_up(gradient, ctx.num_rows, ctx.group), None, None


class _AddUp(torch.autograd.Function):
    """The sum over ranks of what each has for this rank's rows, without their padding."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, num_rows: int, group: Any, is_needed: bool) -> Tensor:
        ctx.longest, ctx.group = len(parts) // group.size(), group
        return _add_up(parts, num_rows, group) if is_needed else parts.new_full((num_rows, *parts.shape[1:]), math.nan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _gather(gradient, ctx.longest, ctx.group), None, None, None


def _gather(rows: Tensor, longest: int, group: Any) -> Tensor:
    """Return the rows of all ranks, [tokens, hidden] each, as [ranks * longest, hidden]."""
    gathered = rows.new_empty(group.size() * longest, *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, _padded(rows, longest).contiguous(), group=group)
    return gathered


def _add_up(parts: Tensor, num_rows: int, group: Any) -> Tensor:
    """Return the sum over ranks for this rank's rows, [num_rows, hidden]; `parts` is for those of all, padded.

    A reduce-scatter in 16 bits would round after each addition, and one in fp32 send twice as many bytes.
    """
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received.unflatten(0, (group.size(), -1))[:, :num_rows].sum(0, dtype=torch.float32).to(parts.dtype)


def _padded(rows: Tensor, longest: int, value: float = 0.0) -> Tensor:
    """Return rows followed by rows of one value."""
    return rows if len(rows) == longest else F.pad(rows, (0, 0, 0, longest - len(rows)), value=value)


def _largest(count: int, device: torch.device, group: Any) -> int:
    """Return the largest number that a rank of the group has."""
    largest = torch.tensor(count, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def _ranks(group: Any) -> set[int]:
    """The global ranks of a group."""
    return set(dist.get_process_group_ranks(group))
