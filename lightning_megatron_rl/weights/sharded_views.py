"""Weights of a model that is split over ranks, planned once: lent where they lie if all agree, else put in buckets."""

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from lightning_megatron_rl.parallel.distributed import ReplicaGroup
from lightning_megatron_rl.weights.buckets import BUCKET_BYTES, BucketMemory, Buckets
from lightning_megatron_rl.weights.direct import DirectPush, DirectRanks
from lightning_megatron_rl.weights.lending import Lending
from lightning_megatron_rl.weights.lent import LentWeights, Readiness
from lightning_megatron_rl.weights.messages import HeldPart, HeldTensor
from lightning_megatron_rl.weights.pieces import Groups, Piece, TensorPlan
from lightning_megatron_rl.weights.source import CollectiveIterator, WeightSource, WeightViews


class ShardedViews:
    """All Hugging Face tensors of a model that is split over ranks.

    Args:
        plans: What each consists of; the same names, shapes and order on all ranks, the same pieces within a group.
        parameters: This rank's, by number of the conversion task; None is another rank's.
        groups: The ranks that share a model without its experts, and those that share its experts.
        held: By plan: all pieces of its tensor that this rank has, also those that the plan takes from another.
        bucket_bytes: Of the tensors that are put together at a time; a larger one is alone.
    """

    def __init__(
        self,
        plans: Sequence[TensorPlan],
        parameters: Sequence[Tensor | None],
        groups: Groups,
        held: Sequence[Sequence[Piece]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._plans = plans
        self._held = held
        self._sharing = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
        self._direct: DirectRanks | None = None
        self._parameters = parameters
        self._buckets = Buckets(plans, parameters, groups, bucket_bytes)
        self._places: list[int] = []
        self._memory: BucketMemory | None = None
        self._lending = Lending(plans, parameters, groups, held)

    def weights(self, *, stays: bool = False, replica: ReplicaGroup | None = None) -> WeightSource:
        """Return the weights in the parameters' dtype, for one push, in which all ranks take part.

        Args:
            replica: The ranks that share a replica, if they are to send to servers what each has; experts that are with
                ranks of other replicas cannot be sent so.
            stays: Whether buckets are put together in the same memory in all pushes, which is kept between them: that
                of two buckets, of the largest tensor if it is larger than a bucket (of two that follow each other), and
                of the largest message, which is one rank's part of a bucket or of such a tensor.
        """
        places = [0 if parameter is None else parameter.data_ptr() for parameter in self._parameters]
        memory = self._memory
        if memory is None or not stays or places != self._places:
            memory = self._buckets.memory(stays=stays)
        self._memory, self._places = (memory, places) if stays else (None, [])
        direct = None
        if replica is not None and self._sharing <= set(replica.ranks):
            self._direct = self._direct or DirectRanks(self.held, self._buckets.device, replica)
            direct = DirectPush(self._direct)
        push = _Push(self, self._buckets, memory, self._lending if stays else None, direct, places)
        return WeightSource(
            self._buckets.device,
            push.tensors,
            lender=push if stays else None,
            direct=direct,
            buckets=push.buckets,
            run_collectives=push.run_collectives,
            finish_collectives=push.finish_collectives,
        )

    def held(self) -> dict[str, HeldTensor]:
        """Return what this rank has of each tensor, where it lies now."""
        found = {}
        for plan, pieces in zip(self._plans, self._held, strict=True):
            parameter = self._parameters[plan.task]
            if pieces and parameter is not None:
                parts = tuple(HeldPart(piece.rectangle, piece.of(parameter.detach())) for piece in pieces)
                found[plan.name] = HeldTensor(plan.shape, plan.dtype, parts)
        return found

    def let_go(self) -> None:
        """Drop the memory of pushes, whose readers have let go of it, and the connections to servers."""
        if self._direct is not None:
            self._direct.close()
        self.free()
        self._lending.let_go()

    def free(self) -> None:
        """Drop the memory for buckets; it has no reader."""
        self._memory, self._places = None, []


class _Push:
    """One push: what makes its `WeightSource`, and the `Lender` of it; all methods are collectives.

    Args:
        views: The model's tensors.
        buckets: How they are put together.
        memory: Where.
        lending: Agreements between the ranks; None: nothing is lent in this push.
        direct: Sends to servers; None: nothing is sent in this push.
        places: Where this rank's parameters are.
    """

    def __init__(
        self,
        views: ShardedViews,
        buckets: Buckets,
        memory: BucketMemory,
        lending: Lending | None,
        direct: DirectPush | None,
        places: Sequence[int],
    ) -> None:
        self._direct = direct
        self._views = views
        self._buckets = buckets
        self._memory = memory
        self._lending = lending
        self._places = list(places)
        self._way: Literal["open", "lent", "buckets"] = "open" if lending is not None else "buckets"
        self._next = 0

    @property
    def gpus(self) -> frozenset[str]:
        """See `Lender`."""
        return frozenset() if self._lending is None else self._lending.gpus

    def lend(self, readiness: Readiness, readers: int, *, in_process: bool = False) -> LentWeights | None:
        """See `Lender`; a collective."""
        if self._way != "open":
            return None
        assert self._lending is not None
        self._way = "buckets"  # whatever happens, there is one agreement
        agreed, lent = self._lending.agree(readiness, readers, self._places, in_process=in_process)
        if agreed:
            self._way = "lent"
        return lent

    def settle(self, loaded: bool, *, apart: bool = False) -> bool:
        """See `Lender`; a collective."""
        assert self._way == "lent"
        assert self._lending is not None
        self._way = "buckets"
        done = self._lending.settle(loaded, apart=apart)
        if done:
            self._next = len(self._buckets)
            self._views.free()
        return done

    def buckets(self) -> CollectiveIterator[WeightViews]:
        """See `WeightSource`."""
        self._choose_buckets()
        assemblies = self._memory.assemblies
        while self._next < len(self._buckets):
            number = self._next
            if number not in assemblies:
                assemblies[number] = self._buckets.assembly(number, self._memory)
            self._next += 1
            yield assemblies[number].run()

    def tensors(self) -> CollectiveIterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        self._choose_buckets()
        while self._next < len(self._buckets):
            number = self._next
            self._next += 1
            yield from self._buckets.assembly(number).run()  # which is held no longer than its tensors

    def run_collectives(self) -> None:
        """See `WeightSource`; other ranks' samplers may read what this rank lends, or has sent."""
        if self._direct is not None:
            self._direct.run()
        self.lend(Readiness.KNOWS_PLACES, readers=0)
        self.finish_collectives()

    def finish_collectives(self) -> None:
        """See `WeightSource`."""
        for _ in self.buckets():
            pass

    def _choose_buckets(self) -> None:
        """Take no more than buckets from here on; what is lent has been read, or its reader is gone."""
        if self._direct is not None:
            self._direct.finish()
            if not self._direct.buckets_follow:
                self._next = len(self._buckets)
                self._views.free()
        self.lend(Readiness.CANNOT, readers=0)
        if self._way == "lent":
            self.settle(loaded=True)
