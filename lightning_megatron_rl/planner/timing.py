"""Seconds of each phase of a step, what it waits for, and what travels over which link, by arithmetic.

A kernel's time is operations over what products reach plus bytes over what memory reaches. The shares below were fitted
once to the rows of benchmarks/results (docs/planning.md says how well they fit); they hold for all devices.
"""

import math
from dataclasses import dataclass

from lightning_megatron_rl.planner.hardware import Hardware
from lightning_megatron_rl.planner.memory import ModelSize, Split

PRODUCTS = 0.77  # of the data sheet's operations: a product of 8192 x 8192 in benchmarks/results has 0.74 to 0.81
SCORES = 0.45  # the same for attention's products of queries, keys and values: a sequence of 65,536 tokens has 0.45
EXPERT_PRODUCTS = 0.4  # the same for grouped products of experts: they are small, and weight gradients are smaller
MEMORY = 0.88  # of the data sheet's bytes per second: a copy in benchmarks/results
LINK = 0.7  # of a link's: transfers to experts on another GPU, profile_h200_30b_24_layers.txt
BYTES_PER_NUMBER = 10.0  # that a forward pass moves for each number that it keeps: written once, read some four times
BACKWARD_BYTES = 2.4  # times as many move in the backward pass
# of vLLM's Python for one token of all sequences, beside the GPU, from rows of 1 to 512 sequences:
STEP_OF_SAMPLER_S = 1.6e-3
SEQUENCE_OF_SAMPLER_S = 1.4e-5  # for each of them
BESIDE = 1.25  # exponent of how both add up: 1 is one after the other, a large one only the longer
ALL_REDUCE_S = 8e-6  # of a small message within a machine; a layer of the sampler has two
# of Python for the kernels of one layer and micro-batch, from the rows of 2,048 and 4,096 tokens, where the GPU waits:
LAUNCH_S = 2.0e-3  # forward
LAUNCH_BACKWARD_S = 2.6e-3
LAUNCH_AGAIN_S = 3.5e-3  # a forward pass that recomputes: the state of random numbers is saved and set
LAUNCH_EXPERT_S = 3e-5  # in each forward pass, for each expert that a rank has
LAUNCH_EXPERT_BACKWARD_S = 1.6e-4  # in the backward pass, likewise: each has weights, and so gradients, of its own
# in each pass, where ranks exchange tokens of experts, for each doubling of their number up to four (of more nothing
# was measured), and where they share a layer: the slowest one is waited for
LAUNCH_EXCHANGE_S = 2.4e-3
LAUNCH_TENSOR_S = 1.0e-3
PUSH_S = 1.5e-3  # of messages of a push of a whole model
BUCKET_S = 2.8e-3  # of one bucket of a split model
BUCKET = 2**28  # bytes
HOST_BYTES_PER_S = 55e9  # PCIe 5 to pinned memory
DISK_BYTES_PER_S = 2e9  # of a node, written beside training
SHARE_OF_REST = 0.04  # of a step: rewards' Python, packing, metrics, logs


@dataclass(frozen=True)
class Work:
    """What one step (one rollout, or one batch of supervised sequences) does, over all ranks.

    Example:
        32 prompts of 128 tokens with 8 responses of 512: ``Work(256, 640, 32, 128, 512)``.
    """

    sequences: int  # that are trained on
    tokens: int  # of each, prompt and response
    prompts: int = 0  # that are sampled from; 0: nothing is
    prompt_tokens: int = 0
    response_tokens: int = 0
    updates: int = 1  # optimizer steps
    scored: int = 0  # passes for log-probs before the updates: the old policy's, and the reference's
    longest: int = 0  # tokens that a sequence may have, for which there is to be memory; 0: `tokens`
    rows: int = 0  # of the data, which replicas share; 0: each prompt or sequence is one

    @property
    def sampled(self) -> bool:
        """Whether there is a rollout."""
        return self.prompts > 0

    @property
    def batch(self) -> int:
        """The data module's `batch_size`."""
        return self.rows or self.prompts or self.sequences

    def most_tokens(self, replicas: int) -> int:
        """Return the tokens that one of so many replicas has in an update if all sequences are the longest.

        Example:
            Eight sequences over four replicas, of up to 100 tokens: 200.
        """
        return -(-self.sequences // (replicas * self.updates)) * max(self.longest, self.tokens)


@dataclass(frozen=True)
class Phase:
    """Seconds of a phase, and what they are made of."""

    name: str
    parts: tuple[tuple[str, float], ...]  # what it does or waits for, seconds

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(self.parts, key=lambda part: part[1])[0]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends in a step."""

    what: str
    link: str
    size: float  # bytes
    seconds: float


@dataclass(frozen=True)
class Cluster:
    """GPUs of a run, and how many of them are in one machine."""

    kind: Hardware
    world: int

    def link(self, stretch: int) -> tuple[str, float]:
        """Return name and bytes per second of the link between ranks of a group that spans `stretch` ranks."""
        if self.world == 1 or stretch <= self.kind.per_node:
            return "GPUs of a machine", self.kind.link_bytes_per_s * LINK
        return "network", self.kind.network_bytes_per_s * LINK


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as time depends on it."""

    size: ModelSize
    split: Split
    cluster: Cluster
    work: Work
    microbatch_tokens: int  # of one data-parallel replica
    gradient_bytes: float
    optimizer_bytes: float  # that an optimizer step moves, per parameter
    weight_bytes: int = 2
    recompute: float = 0.0  # share of the layers that are computed again in the backward pass
    adapters: bool = False
    stage_layers: tuple[int, ...] = ()  # of each pipeline stage; (): equal shares
    gathers_tokens: bool = False  # each token is sent to all expert-parallel ranks, not to each of its experts
    launch_factor: float = 1.0  # times the seconds of kernels' launches

    @property
    def data_parallel(self) -> int:
        """Replicas of the model."""
        return self.split.replicas // self.split.context

    @property
    def replica_tokens(self) -> float:
        """Tokens of a replica in one update."""
        return self.work.sequences * self.work.tokens / self.data_parallel / self.work.updates

    @property
    def microbatches(self) -> int:
        """Micro-batches of an update, per replica."""
        return max(1, -(-int(self.replica_tokens) // max(self.microbatch_tokens, 1)))

    def scoring(self, name: str) -> Phase:
        """Log-probs of all sequences, once."""
        return Phase(name, self._passes(forward=1, backward=0, updates=self.work.updates))

    def update(self) -> Phase:
        """All updates of a step: forward, backward, gradients over replicas, optimizer."""
        parts = list(self._passes(1 + self.recompute, backward=1, updates=self.work.updates))
        if not self.adapters:
            parts += self._step()
        return Phase("update", tuple(parts))

    def _passes(self, forward: float, backward: int, updates: int) -> tuple[tuple[str, float], ...]:
        """Seconds of passes over all micro-batches; a backward pass has twice the products of a forward pass."""
        size, split, kind, work = self.size, self.split, self.cluster.kind, self.work
        tokens = self.replica_tokens * updates / split.context
        shared = split.tensor * split.pipeline
        products = forward + backward * (1 if self.adapters else 2)
        moves = forward + backward * BACKWARD_BYTES
        met = 2.0 * size.experts_met
        seconds = products * (size.linear_flops - met) * tokens / shared / (kind.tensor_flops * PRODUCTS)
        pairs = size.quadratic_flops * work.tokens * tokens
        attention = (forward + 2 * backward) * pairs / shared / (kind.tensor_flops * SCORES)
        experts = products * met * tokens / shared / (kind.tensor_flops * EXPERT_PRODUCTS)
        numbers = size.layers * size.activation_width(split) / split.pipeline
        moved = moves * BYTES_PER_NUMBER * numbers * tokens * self.weight_bytes / 2 / (kind.memory_bytes_per_s * MEMORY)
        travel = self._travel(tokens, forward, backward)
        sent = sum(item.seconds for item in travel)
        busy = seconds + attention + experts + moved + sent
        launched = self._launch(forward, backward) * size.layers / split.pipeline * self.microbatches * updates
        # some kernels wait for Python, others for the kernel before: where both take as long, 19 % more than either
        waits = (busy**4 + launched**4) ** 0.25 - busy
        idle = self._idle() * (busy + waits)
        found = [("products with weights", seconds), ("attention", attention), ("memory of the GPU", moved)]
        if experts:
            found.insert(1, ("products with experts", experts))
        found += [(item.what, item.seconds) for item in travel]
        found += [("kernels' launch in Python", waits), ("stages that wait in the pipeline", idle)]
        return tuple((name, value) for name, value in found if value > 0)

    def _launch(self, forward: float, backward: int) -> float:
        """Seconds of Python for one layer and micro-batch."""
        own = self.size.num_experts / self.split.expert
        ranks = self.split.expert * self.split.expert_tensor if self.size.experts else 1
        exchange = LAUNCH_EXCHANGE_S * math.log2(min(ranks, 4))
        each = exchange + (LAUNCH_TENSOR_S if self.split.tensor > 1 else 0.0)
        once = LAUNCH_S + LAUNCH_EXPERT_S * own
        again = LAUNCH_AGAIN_S + LAUNCH_EXPERT_S * own
        back = LAUNCH_BACKWARD_S + LAUNCH_EXPERT_BACKWARD_S * own
        return self.launch_factor * (once + (forward - 1) * again + backward * back + (forward + backward) * each)

    def _idle(self) -> float:
        """Time of the pipeline beyond that of an average stage, as a share of it.

        Stages wait for the first and last micro-batch, and for the stage with the output layer.
        """
        stages = self.split.pipeline
        if stages == 1:
            return 0.0
        bubble = (stages - 1) / (self.microbatches * self.split.chunks)
        size = self.size
        output = 2.0 * size.vocabulary * size.hidden
        shares = [count / size.layers for count in self.stage_layers] or [1 / stages] * stages
        work = [share * (size.linear_flops - output) for share in shares]
        work[-1] += output
        slowest = max(work) / (size.linear_flops / stages)
        return (1 + bubble) * slowest - 1

    def travel(self) -> list[Traffic]:
        """Return what a GPU sends in the forward and backward passes and steps of all updates."""
        tokens = self.replica_tokens * self.work.updates / self.split.context
        passes = self._travel(tokens, 1 + self.recompute, 1)
        return [*passes, *([] if self.adapters else self._gradients())]

    def _travel(self, tokens: float, forward: float, backward: int) -> list[Traffic]:
        size, split, element = self.size, self.split, self.weight_bytes
        layers = size.layers / split.pipeline
        found = []

        def add(what: str, stretch: int, count: float) -> None:
            link, rate = self.cluster.link(stretch)
            found.append(Traffic(what, link, count, count / rate))

        directions = forward + backward
        if split.tensor > 1:
            part = (split.tensor - 1) / split.tensor
            # gathered before and scattered behind attention and MLP, and gathered once more for weight gradients
            times = 4 * forward + 6 * backward
            add("tensor parallelism", split.tensor, times * layers * tokens * size.hidden * element * part)
        if split.context > 1:
            part = (split.context - 1) * size.key_value_width / split.tensor
            add("context parallelism", split.tensor * split.context, directions * layers * tokens * part * element)
        if split.expert > 1:
            part = (split.expert - 1) / split.expert
            width, ways = size.routed_width, 2 * directions
            if self.gathers_tokens:
                width, ways = split.expert * size.hidden, ways - (forward - 1)  # results do not travel again
            sent = ways * layers * tokens / split.tensor * width * element * part
            add("tokens to experts", split.expert * split.expert_tensor, sent)
        if split.pipeline > 1:
            stretch = self.cluster.world  # of several machines some neighbouring stages are on two
            sent = directions * split.chunks * tokens * size.hidden / split.sequence * element
            add("pipeline", stretch, sent)
        return found

    def _gradients(self) -> list[Traffic]:
        """Gradients are scattered over replicas, parameters gathered, once per update; or gradients, which all need."""
        size, split = self.size, self.split
        each = self.gradient_bytes + (self.weight_bytes if split.sharded else self.gradient_bytes)
        shared = split.tensor * split.pipeline
        found = []
        for what, count, replicas in (
            ("gradients and parameters", (size.dense + size.embeddings) / shared, split.replicas),
            (
                "gradients and parameters of experts",
                size.experts / (split.pipeline * split.expert * split.expert_tensor),
                split.expert_replicas,
            ),
        ):
            if replicas > 1 and count:
                sent = count * each * (replicas - 1) / replicas
                link, rate = self.cluster.link(split.tensor * split.replicas)
                found.append(Traffic(what, link, sent * self.work.updates, sent * self.work.updates / rate))
        return found

    def _step(self) -> list[tuple[str, float]]:
        size, split = self.size, self.split
        dense = (size.dense + size.embeddings) / (split.tensor * split.pipeline)
        experts = size.experts / (split.pipeline * split.expert * split.expert_tensor)
        if split.sharded:
            dense, experts = dense / split.replicas, experts / max(split.expert_replicas, 1)
        moved = (dense + experts) * self.optimizer_bytes * self.work.updates
        seconds = moved / (self.cluster.kind.memory_bytes_per_s * MEMORY)
        return [("optimizer", seconds), *((item.what, item.seconds) for item in self._gradients())]


def rollout(
    size: ModelSize, work: Work, kind: Hardware, *, engines: int, tensor: int, sequences: int, element: int
) -> Phase:
    """Sampling of all responses; engines work beside each other on equal shares.

    For each token an engine reads its weights and the cache of all its sequences, or computes, whichever takes longer.
    Part of vLLM's Python runs beside that.

    Args:
        size: The model's.
        work: Of a step.
        kind: The GPUs.
        engines: That share the prompts.
        tensor: GPUs of each.
        sequences: Most that one samples at a time.
        element: Bytes of a weight.
    """
    samples = work.sequences / engines
    at_once = max(1.0, min(samples, sequences))
    rounds = samples / at_once
    reached = kind.tensor_flops * PRODUCTS * tensor
    memory = kind.memory_bytes_per_s * MEMORY
    context = work.prompt_tokens + work.response_tokens / 2
    touched = size.experts * min(1.0, at_once * size.experts_met / size.experts) if size.experts else 0.0
    weights = (size.dense + touched + size.vocabulary * size.hidden) * element / tensor / memory
    per_token = size.layers * element * (size.cache_width or size.key_value_width / tensor)
    cache = at_once * context * per_token / memory
    computed = at_once * (size.linear_flops + 2 * size.quadratic_flops * context) / reached
    steps = rounds * work.response_tokens
    busy = max(computed, weights + cache)
    reduced = 2 * (tensor - 1) / tensor * at_once * size.hidden * element / (kind.link_bytes_per_s * LINK)
    gpu = busy + (2 * size.layers * (ALL_REDUCE_S + reduced) if tensor > 1 else 0.0)
    python = STEP_OF_SAMPLER_S + SEQUENCE_OF_SAMPLER_S * at_once
    step = (gpu**BESIDE + python**BESIDE) ** (1 / BESIDE)
    prefill = work.prompts / engines * size.linear_flops * work.prompt_tokens / reached
    parts = [("vLLM's Python and messages", (step - busy) * steps), ("prompts", prefill)]
    if computed > weights + cache:
        parts.append(("products of the sampler", computed * steps))
    else:
        parts += [("reading weights", weights * steps), ("reading the cache", cache * steps)]
    return Phase("rollout", tuple(parts))


def weight_sync(
    size: ModelSize, split: Split, cluster: Cluster, *, tensor: int, element: int, in_place: bool, trained: int | None
) -> tuple[Phase, list[Traffic]]:
    """Weights from the trainer to the samplers.

    Args:
        size: The model's.
        split: The trainer's.
        cluster: The GPUs.
        tensor: GPUs of each sampler.
        element: Bytes of a weight.
        in_place: Whether one engine is on all GPUs of a replica, and its workers read weights where they lie.
        trained: Parameters that are sent, if not all: adapters'.
    """
    kind = cluster.kind
    whole = split.tensor * split.pipeline * split.expert == 1
    size_bytes = (size.parameters if trained is None else trained) * element
    copies = 2 * size_bytes / tensor / (kind.memory_bytes_per_s * MEMORY)
    if whole:
        return Phase("weight_sync", (("copies", copies), ("messages", PUSH_S))), []
    ranks = split.tensor * split.pipeline * split.context
    away = size_bytes / tensor * (ranks - 1) / ranks
    link, rate = cluster.link(split.tensor * split.pipeline * split.replicas if split.pipeline > 1 else ranks)
    sent = Traffic("weights to samplers", link, away, away / rate)
    messages = 3 * PUSH_S if in_place else -(-size_bytes // BUCKET) * BUCKET_S
    return Phase("weight_sync", (("copies", copies), (f"link: {link}", sent.seconds), ("messages", messages))), [sent]
