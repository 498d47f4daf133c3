"""The GPU memory that a run will take, part by part with the arithmetic, before it starts.

The formulas are in docs/memory.md. They count what a run is certain to hold, so a plan that does not fit is
refused with reason, and one that fits may still run out by what allocators round up.
"""

from dataclasses import dataclass

from lightning_megatron_rl.planner.moments import (
    ACTIVATIONS,
    EXPERT_OPTIMIZER,
    GIB,
    GRADIENTS,
    OPTIMIZER,
    PROCESS,
    PUSH,
    SAMPLER_PROCESS,
    SECOND_WEIGHTS,
    STEP_COPIES,
    WEIGHTS,
    Part,
)

# per process on the GPU: the CUDA context, cuBLAS's and NCCL's workspaces; measured 0.5 to 1.2 GiB
PROCESS_BYTES = 1 * GIB
_ELEMENT_BYTES = {"32-true": 4, "bf16-mixed": 2, "16-mixed": 2, "bf16-true": 2}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that the memory of its weights, activations and cache depends on.

    Example:
        A tiny dense model: ``ModelSize(dense=10_000, experts=0, vocabulary=128, hidden=64, layers=4, ...)``
    """

    dense: int  # parameters of all layers, experts apart
    experts: int  # parameters of all experts
    embeddings: int  # parameters of the input and the output embedding (one matrix if they are tied)
    hidden: int
    layers: int
    query_width: int  # heads times their width
    key_value_width: int  # groups of keys times their width, of the keys and of the values together
    ffn_width: int  # of the MLPs that one token meets: of a mixture, of the experts it is routed to
    vocabulary: int
    routed_width: int = 0  # of what one token sends to its experts: the hidden width times their number
    experts_met: int = 0  # parameters of the experts that one token meets, in all layers
    cache_width: int = 0  # numbers that a token keeps in the sampler's cache, per layer; 0: `key_value_width`
    score_width: int = 0  # heads times (key + value), by which scores cost; 0: twice `query_width`

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.embeddings

    @property
    def num_experts(self) -> float:
        """Of a layer; 0 of a model without."""
        return self.experts / self.experts_met * self.routed_width / self.hidden if self.experts_met else 0.0

    @property
    def linear_flops(self) -> float:
        """Operations of a forward pass for one token, attention's scores left out: two for each weight it meets."""
        return 2.0 * (self.dense + self.experts_met + self.vocabulary * self.hidden)

    @property
    def quadratic_flops(self) -> float:
        """Operations per squared token of a sequence: half of the scores of causal attention, and their products."""
        return float(self.layers * (self.score_width or 2 * self.query_width))

    def activation_width(self, split: "Split", *, fused: bool = True) -> float:
        """Return the numbers that one token leaves for the backward pass in one layer, per GPU."""
        wide = 3 * self.query_width + 2 * self.key_value_width + (3 if fused else 5) * self.ffn_width
        routed = self.routed_width * split.expert_tensor / split.tensor  # an experts' part is sent the tokens of all
        return 4 * self.hidden / split.sequence + wide / split.tensor + routed


@dataclass(frozen=True)
class Split:
    """The ways a model is divided over the GPUs."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # of a pipeline stage
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    replicas: int = 1  # over which optimizer state is sharded: data-parallel times context-parallel
    expert_replicas: int = 1  # the same of experts: world / (pipeline times expert times expert-tensor)
    sharded: bool = True  # the distributed optimizer
    sequence_parallel: bool = False  # norms and residuals are split over the tensor-parallel ranks, too

    @property
    def sequence(self) -> int:
        """GPUs that share what is as wide as the hidden state."""
        return self.tensor if self.sequence_parallel else 1

    def kept_microbatches(self, stage: int, microbatches: int) -> float:
        """Return the micro-batches of all its layers that a pipeline stage keeps until their backward pass, at most.

        Cut in chunks, it is further ahead by Megatron's interleaved schedule.

        Args:
            stage: The first is 0.
            microbatches: Of an update.

        Example:
            The last of two stages keeps one; where each has two chunks, three chunks of them: 1.5.
        """
        behind = self.pipeline - stage - 1
        if self.chunks == 1:
            return min(behind + 1, microbatches)
        ahead = 2 * behind + (self.chunks - 1) * self.pipeline  # passes of a chunk before the first backward pass
        return min((ahead + 1) / self.chunks, microbatches)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trained parameter; those of the optimizer are divided by the replicas that share it.

    Example:
        ``StateBytes(weights=2, gradients=4, optimizer=12)``: Adam under bf16-mixed
    """

    weights: float
    gradients: float
    optimizer: float
    step: float = 0.0  # copies in fp32 that the optimizer makes for its step alone


# of Adam as Megatron has it, see docs/precision.md
STATE_BYTES = {
    "32-true": StateBytes(4, 4, 8),
    "bf16-mixed": StateBytes(2, 4, 12),
    "16-mixed": StateBytes(2, 4, 12),
    "bf16-true": StateBytes(2, 2, 4),
}
_SPLIT = "raise tensor_model_parallel_size or pipeline_model_parallel_size"
_ADAPTERS = "train adapters (lora)"
_SHARD = "use_distributed_optimizer=True on more GPUs, or an optimizer with less on the GPU (docs/overlap.md)"
_SHARD_EXPERTS = "more GPUs than pipeline x expert x expert-tensor parallel size, over which experts' state is sharded"
_APART = (
    "keep the engines of several replicas on GPUs of their own: no `devices`, and a tensor_parallel_size of the engine"
    " of at most the trainer's tensor x context parallel size"
)
_RECOMPUTE = "train.recompute=full"


def parameters_per_gpu(size: ModelSize, split: Split) -> tuple[float, float]:
    """Return the parameters of the dense part and of the experts on the fullest GPU.

    Pipeline stages share the layers; with several, input and output embedding are on different ones.

    Example:
        1000 parameters in layers and 100 in two embeddings on TP 2, PP 2: ``(1000 / 2 + 50) / 2 == 275``.
    """
    embeddings = size.embeddings if split.pipeline == 1 else min(size.embeddings, size.vocabulary * size.hidden)
    dense = (size.dense / split.pipeline + embeddings) / split.tensor
    experts = size.experts / (split.pipeline * split.expert * split.expert_tensor)
    return dense, experts


def state_bytes(
    precision: str, *, sharded: bool, replicas: int, state: StateBytes | None = None
) -> tuple[float, float, float]:
    """Return the bytes per trained parameter of weights, gradients and optimizer state; see docs/precision.md.

    Args:
        precision: A `MegatronPrecision` by name.
        sharded: The distributed optimizer.
        replicas: Those that share its state.
        state: What the user's settings make of it; None: Adam as Megatron has it.

    Example:
        ``state_bytes("bf16-mixed", sharded=True, replicas=4) == (2, 4, 3)``
    """
    state = state or STATE_BYTES[precision]
    return state.weights, state.gradients, state.optimizer / (replicas if sharded else 1)


def activation_bytes(
    size: ModelSize,
    split: Split,
    *,
    tokens: int,
    element_bytes: int,
    recompute: float,
    fused_activation: bool = True,
) -> float:
    """Return what the backward pass of one micro-batch keeps per GPU.

    Per token and layer (after Korthikanti et al., 2022, for gated MLPs, grouped keys and an attention that keeps no
    scores): four vectors of the hidden width (inputs of the two norms, and what they give), queries, keys and values
    before and after their rotation, attention's output, and three vectors of the MLP's width, five where its gate is
    not computed by one kernel. Of a layer that is recomputed only its input; if all are, one layer's whole as well.
    Tensor parallelism divides what is as wide as heads and MLP, with sequence parallelism the rest as well. Of a
    mixture each layer keeps the vectors that went to experts, and one layer has four more of them: before and after
    they travel, on both ways. A pipeline keeps as many micro-batches on its first stage as it has stages, each of
    1/stages of the layers.

    Example:
        Hidden 1024, 16 heads of 128, 8 groups, MLP 3072, 28 layers, 8192 tokens in bf16: 11.4 GiB.
    """
    routed = size.routed_width * split.expert_tensor / split.tensor
    per_layer = size.activation_width(split, fused=fused_activation)
    again = size.layers * recompute
    kept = again * size.hidden / split.sequence + max(1.0, size.layers - again) * per_layer
    kept += 4 * routed
    return kept * element_bytes * tokens / split.context


def output_bytes(size: ModelSize, split: Split, *, chunk: int, element_bytes: int, trained: bool) -> float:
    """Return what log-probs take per GPU: the logits of a chunk of tokens, and the output layer's gradient.

    The gradient is summed over the chunks in fp32, and handed on in the model's precision.

    Example:
        Hidden 1024, vocabulary 151,936, chunks of 2048 tokens in bf16: 0.58 GiB, in training 1.45 GiB.
    """
    gradient = (4 + element_bytes) * size.vocabulary * size.hidden if trained else 0
    return (element_bytes * chunk * size.vocabulary + gradient) / split.tensor


def trainer_parts(
    size: ModelSize,
    split: Split,
    *,
    precision: str,
    tokens: int,
    logprob_chunk: int,
    recompute: float = 0.0,
    fused_activation: bool = True,
    frozen_copies: int = 0,
    training: bool = True,
    adapters: bool = False,
    state: StateBytes | None = None,
    push_bucket: int = 0,
    message_bytes: int = 0,
) -> tuple[Part, ...]:
    """Return what the trainer's process takes of the fullest GPU.

    Args:
        size: The model's.
        split: How it is divided.
        precision: A `MegatronPrecision` by name.
        tokens: Of one micro-batch, over all context-parallel ranks.
        logprob_chunk: Tokens whose logits exist at one time; 0: a model without an output layer.
        recompute: Share of the layers whose activations are computed again.
        fused_activation: Whether one kernel computes the MLP's gate.
        frozen_copies: Reference policies on the GPU.
        training: Whether there is a backward pass; without, weights and one chunk of logits are all.
        adapters: Whether low-rank adapters are trained alone. Their own state, a thousandth of a model's or so, is left
            out.
        state: Bytes per trained parameter under the user's settings; None: those of `precision`.
        push_bucket: Size of the buckets in which a sampler's weights are put together from several ranks; 0: they are
            not. # bytes
        message_bytes: That messages with weights to servers take at most; 0: there are no servers. # bytes
    """
    dense, experts = parameters_per_gpu(size, split)
    parameters = dense + experts
    state = state or STATE_BYTES[precision]
    weights, gradients = state.weights, state.gradients
    text = f"{parameters / 1e9:.3f}e9 parameters"
    parts = [
        Part(PROCESS, PROCESS_BYTES, "CUDA context and workspaces", ""),
        Part(WEIGHTS, parameters * weights, f"{text} x {weights:g} bytes", _SPLIT),
    ]
    if training and not adapters:
        arithmetic = f"{text} x {gradients:g} bytes"
        parts.append(Part(GRADIENTS, parameters * gradients, arithmetic, f"{_ADAPTERS}, or {_SPLIT}"))
        parts += _optimizer_parts(precision, dense, experts, split, state)
        if split.sharded:
            parts.append(_second_weights(dense, experts, split, state))
    element = _ELEMENT_BYTES[precision]
    trained = training and not adapters and logprob_chunk > 0
    kept = output_bytes(size, split, chunk=min(logprob_chunk, tokens), element_bytes=element, trained=trained)
    if training:
        kept += activation_bytes(
            size,
            split,
            tokens=tokens,
            element_bytes=element,
            recompute=recompute,
            fused_activation=fused_activation,
        )
    arithmetic = f"{tokens} tokens, {size.layers} layers{describe_recompute(recompute)}"
    remedy = "lower train.max_tokens_per_microbatch" + ("" if recompute == 1 else f", or {_RECOMPUTE}")
    parts.append(Part(ACTIVATIONS, kept, arithmetic, remedy))
    if frozen_copies:
        copies = parameters * weights * frozen_copies
        remedy = "set reference.offload=true, or loss.kl_coef=0"
        parts.append(Part("trainer: reference", copies, f"{frozen_copies} x {text} x {weights:g} bytes", remedy))
    if push_bucket:
        parts.append(_push_part(size, split, weights, push_bucket))
    if message_bytes:
        arithmetic = "messages to servers, bucket_mb for each"
        kept = min(message_bytes, 2 * parameters * weights)
        parts.append(Part(PUSH, kept, arithmetic, "lower the engine's bucket_mb"))
    return tuple(parts)


def describe_recompute(share: float) -> str:
    """Return that so many layers are computed again, to stand behind something else; "" if none are."""
    return "" if not share else ", recomputed" if share == 1 else f", {share:.0%} of the layers recomputed"


def _push_part(size: ModelSize, split: Split, element_bytes: float, bucket: int) -> Part:
    """What is kept from one push to the next: two buckets, a larger embedding, and one rank's part of the larger."""
    whole = (size.dense + size.embeddings + size.experts) * element_bytes
    embedding = size.vocabulary * size.hidden * element_bytes
    kept = min(2 * bucket, whole) + (embedding if embedding > bucket else 0)
    sent = max(min(bucket, whole), embedding) / split.tensor
    return Part(PUSH, kept + sent, f"two buckets of {bucket / GIB:g} GiB, a larger tensor, a rank's part", "")


def _second_weights(dense: float, experts: float, split: Split, state: StateBytes) -> Part:
    """What is there beside weights and gradients while Megatron lays the last chunk's weights out as one block.

    Each kind of parameters has a block of its own: first that of the dense part, when gradients of experts are not
    there yet, then that of the experts.
    """
    most = max(dense * state.weights - experts * state.gradients, experts * state.weights) / split.chunks
    return Part(SECOND_WEIGHTS, most, "while they are laid out as one block", _SPLIT)


def _optimizer_parts(precision: str, dense: float, experts: float, split: Split, state: StateBytes) -> list[Part]:
    """What the optimizers of the dense part and of the experts hold, which have other replicas; see `trainer_parts`."""
    parts, copies = [], []
    for name, count, replicas, kind, remedy in (
        (OPTIMIZER, dense, split.replicas, "parameters", _SHARD),
        (EXPERT_OPTIMIZER, experts, split.expert_replicas, "parameters of experts", _SHARD_EXPERTS),
    ):
        if not count:
            continue
        *_, each = state_bytes(precision, sharded=split.sharded, replicas=replicas, state=state)
        sharers = replicas if split.sharded else 1
        arithmetic = f"{count / 1e9:.3f}e9 {kind} x {each:g} bytes ({sharers} replicas share it)"
        parts.append(Part(name, count * each, arithmetic, f"{_ADAPTERS}, or {remedy}"))
        copies.append((count * state.step / sharers, f"{count / 1e9:.3f}e9 {kind} x {state.step / sharers:g} bytes"))
    if state.step:
        size, arithmetic = max(copies)  # Megatron's optimizers may step one after the other: the larger is certain
        parts.append(
            Part(STEP_COPIES, size, arithmetic, "set grad_reduce_in_fp32=True, and moments to fp32 or both to bf16")
        )
    return parts


def sampler_parts(
    size: ModelSize,
    *,
    tensor: int,
    total: int,
    utilization: float,
    cache_bytes: int | None,
    element_bytes: int,
    own_process: bool = True,
    engines: int = 1,
) -> tuple[Part, ...]:
    """Return what vLLM takes of a GPU.

    Args:
        size: The model's.
        tensor: GPUs that share the engine's model.
        total: Memory of the GPU. # bytes
        utilization: Share of it that vLLM fills with weights and cache if `cache_bytes` is None.
        cache_bytes: Size of the key/value cache, if it is given.
        element_bytes: Of a weight.
        own_process: Whether the engine has a CUDA context of its own.
        engines: Engines that are on the GPU, all alike.
    """
    weights = (size.dense + size.embeddings + size.experts) * element_bytes / tensor
    apart = _APART if engines > 1 else ""
    process = (Part(SAMPLER_PROCESS, PROCESS_BYTES, "CUDA context and workspaces", apart),) if own_process else ()
    if cache_bytes is not None:
        arithmetic, lower = "kv_cache_memory_gb", "lower the engine's kv_cache_memory_gb"
        parts = (
            *process,
            Part(
                "sampler: weights",
                weights,
                f"x {element_bytes} bytes / {tensor}",
                apart or "raise the engine's tensor_parallel_size",
            ),
            Part("sampler: key/value cache", cache_bytes, arithmetic, lower, pushed=0),
        )
        return tuple(_of_engines(part, engines) for part in parts)
    filled = Part(
        "sampler: weights and cache",
        max(utilization * total, weights),
        f"gpu_memory_utilization {utilization:g} x {total / GIB:.1f} GiB",
        "lower the engine's gpu_memory_utilization, or set its kv_cache_memory_gb",
        pushed=weights,
    )
    return tuple(_of_engines(part, engines) for part in (*process, filled))


def _of_engines(part: Part, engines: int) -> Part:
    """One engine's part as that of all engines on the GPU."""
    if engines == 1:
        return part
    pushed = None if part.pushed is None else part.pushed * engines
    return Part(part.name, part.size * engines, f"({part.arithmetic}) x {engines} engines", part.remedy, pushed)
