"""Gradients of an optimizer's chunks: whether a step may use them, and `parameter.grad` for hooks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist


class Gradients:
    """The gradients that Megatron keeps in `parameter.main_grad`, and their life from one step to the next.

    They are "none" until a forward and backward pass over a whole mini-batch is done, then "computed". Lightning zeroes
    gradients between `training_step` and `backward`: what `training_step` computed is "held" over that, and "computed"
    again in `backward`. "dropped" means that the step is to be skipped, as torch's optimizers skip a parameter without
    a gradient: `training_step` returned None, or the gradients were zeroed. A step uses them up.

    Args:
        chunks: As `wrap_for_training` returned them.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.chunks = list(chunks)
        self._trained = [parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()]
        self.state: Literal["none", "computed", "held", "dropped"] = "none"
        self._shown = False

    def begin(self) -> None:
        """Start a new mini-batch.

        Raises:
            RuntimeError: Other parameters are trainable than when the optimizer was made.
        """
        if self._trained != [parameter.requires_grad for chunk in self.chunks for parameter in chunk.parameters()]:
            raise RuntimeError(
                "requires_grad of some parameters has changed since the optimizer was made: Megatron goes on stepping"
                " those that were trainable then, with no gradient but momentum and weight decay, and no others. Freeze"
                " parameters in configure_model, after super().configure_model()."
            )
        self._hide()
        self.state = "none"

    @contextmanager
    def computing(self, *, in_full: bool = True) -> Iterator[None]:
        """Mark gradients as computed when the body has computed them, `in_full`, not in part; see `begin`."""
        self.begin()
        yield
        if in_full:
            self.state = "computed"

    def hold(self) -> None:
        """Keep computed gradients when Lightning zeroes gradients after `training_step`."""
        if self.state == "computed":
            self.state = "held"

    def release(self) -> None:
        """Use the held gradients for the loss that `backward` is called with."""
        if self.state == "held":
            self.state = "computed"

    def drop(self) -> None:
        """Leave the next step out, unless other gradients are computed before it."""
        self._hide()
        self.state = "dropped"

    def zero(self) -> None:
        """Drop computed gradients; without any, a step remains an error."""
        if self.state == "computed":
            self.drop()

    def use(self) -> bool:
        """Take the gradients for a step, with hooks' changes of `parameter.grad`; False if the step is skipped.

        Raises:
            RuntimeError: There are none, or some parameters' were removed.
        """
        state, self.state = self.state, "none"
        if state == "dropped":
            return False
        if state != "computed":
            raise RuntimeError(
                "an optimizer step without new gradients: each step needs a forward and backward pass of its own over a"
                " whole mini-batch, and the last step has used its gradients up (or the pass failed). Compute them with"
                " self.update(...) or self.trainer.strategy.forward_backward(...) before self.optimizers().step() and"
                " before training_step returns; return None from training_step to skip a step."
            )
        return self._take_back()

    @torch.no_grad()
    def show(self) -> None:
        """Let `parameter.grad` be the gradient, in the memory of `main_grad`; a collective of all replicas.

        Under the distributed optimizer each replica has the reduced gradients of its shard: they are gathered first.
        """
        if self._shown or self.state != "computed":
            return
        for chunk in self.chunks:
            _gather(chunk)
        for _, parameter in self._parameters():
            parameter.grad_dtype = None  # type: ignore[attr-defined]  # fp32 gradients of 16-bit parameters
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]
        self._shown = True

    @torch.no_grad()
    def _take_back(self) -> bool:
        """Copy gradients that hooks replaced; False if they removed all of them."""
        if not self._shown:
            return True
        removed = [name for name, parameter in self._parameters() if parameter.grad is None]
        count = sum(1 for _ in self._parameters())
        if removed and len(removed) < count:
            raise RuntimeError(
                f"a hook removed the gradients of {len(removed)} of {count} parameters ({', '.join(removed[:3])}, ...):"
                " Megatron steps all parameters of its optimizer. Set them to zero in place (parameter.grad.zero_()),"
                " or freeze these parameters from the start (requires_grad_(False) in configure_model)."
            )
        for _, parameter in self._parameters():
            main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            if parameter.grad is not None and parameter.grad.data_ptr() != main.data_ptr():
                main.copy_(parameter.grad)
        self._hide()
        return not removed

    def _hide(self) -> None:
        """Leave no `parameter.grad`: the next backward pass would add to it, and Megatron the sum to `main_grad`."""
        if not self._shown:
            return
        for _, parameter in self._parameters():
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype  # type: ignore[attr-defined]
        self._shown = False

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        from megatron.core.utils import unwrap_model

        for chunk in unwrap_model(self.chunks):
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    yield name, parameter


def _gather(chunk: nn.Module) -> None:
    """Fill a wrapped chunk's gradient buffers with the shards that the distributed optimizer's replicas have."""
    if not chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
        return
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:  # type: ignore[misc]
        replicas = group.intra_distributed_optimizer_instance_group
        size, rank = dist.get_world_size(replicas), dist.get_rank(replicas)
        for bucket in group.buckets if size > 1 else ():
            dist.all_gather_into_tensor(bucket.grad_data, bucket.grad_data.chunk(size)[rank], group=replicas)
