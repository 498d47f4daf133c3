"""How much memory of a GPU a run will take, part by part and with the arithmetic, before any of it is taken.

The formulas are in docs/performance.md. They count what a run is certain to hold, so a plan that does not fit is
refused with reason, and one that fits may still run out by what allocators round up.
"""

from dataclasses import dataclass

GIB = 2**30
# per process on the GPU: the CUDA context, cuBLAS's and NCCL's workspaces; measured 0.5 to 1.2 GiB
PROCESS_BYTES = 1 * GIB
_ELEMENT_BYTES = {"32-true": 4, "bf16-mixed": 2, "16-mixed": 2, "bf16-true": 2}


@dataclass(frozen=True)
class ModelSize:
    """What the memory of a model's weights, activations and cache depends on.

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


@dataclass(frozen=True)
class Split:
    """The ways a model is divided over the GPUs."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    replicas: int = 1  # over which optimizer state is sharded: data-parallel times context-parallel
    sharded: bool = True  # the distributed optimizer


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    size: float  # bytes
    arithmetic: str
    remedy: str  # what makes it smaller

    def line(self) -> str:
        """Return the part as a line of a table."""
        return f"{self.name:34s} {self.size / GIB:8.2f} GiB  {self.arithmetic}"


@dataclass(frozen=True)
class MemoryPlan:
    """What trainer and sampler take of one GPU, against what is free on it.

    Example:
        ``MemoryPlan(trainer_parts(...), sampler_parts(...), free=80 * GIB).check()`` raises what does not fit.
    """

    trainer: tuple[Part, ...]
    sampler: tuple[Part, ...]
    free: int  # bytes, before the run has taken any
    apart: bool = False  # the sampler sleeps while the trainer works: its memory is free then

    @property
    def needed(self) -> float:
        """Bytes at the fullest moment."""
        trainer, sampler = (sum(part.size for part in parts) for parts in (self.trainer, self.sampler))
        if not self.apart:
            return trainer + sampler
        resident = sum(part.size for part in self.trainer if part.name != ACTIVATIONS)
        return max(trainer, resident + sampler)

    def describe(self) -> str:
        """Return the arithmetic as lines."""
        joined = "the larger of: trainer; trainer without activations + sampler" if self.apart else "trainer + sampler"
        lines = [part.line() for part in (*self.trainer, *self.sampler)]
        total = f"{'needed':34s} {self.needed / GIB:8.2f} GiB  {joined}"
        return "\n".join([*lines, total, f"{'free':34s} {self.free / GIB:8.2f} GiB"])

    def check(self) -> None:
        """Refuse a run that cannot fit.

        Raises:
            ValueError: With every part's arithmetic, and what to lower, the largest part first.
        """
        if self.needed <= self.free:
            return
        parts = sorted((*self.trainer, *self.sampler), key=lambda part: part.size, reverse=True)
        remedies = list(dict.fromkeys(part.remedy for part in parts if part.remedy))
        raise ValueError(
            f"this run needs {self.needed / GIB:.1f} GiB of a GPU that has {self.free / GIB:.1f} GiB free:\n"
            f"{self.describe()}\nWhat lowers it, the largest part first:\n"
            + "\n".join(f"- {remedy}" for remedy in remedies)
        )


ACTIVATIONS = "trainer: activations"
_SPLIT = "raise tensor_model_parallel_size or pipeline_model_parallel_size"
_ADAPTERS = "train adapters (lora)"
_SHARD = "use_distributed_optimizer=True on more GPUs, or precision='bf16-true'"
_RECOMPUTE = "model_config={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"


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


def state_bytes(precision: str, *, sharded: bool, replicas: int) -> tuple[float, float, float]:
    """Return the bytes per trained parameter of weights, gradients and optimizer state; see docs/precision.md.

    Example:
        ``state_bytes("bf16-mixed", sharded=True, replicas=4) == (2, 4, 3)``
    """
    weights, gradients, optimizer = {
        "32-true": (4.0, 4.0, 8.0),
        "bf16-mixed": (2.0, 4.0, 12.0),
        "16-mixed": (2.0, 4.0, 12.0),
        "bf16-true": (2.0, 2.0, 4.0),
    }[precision]
    return weights, gradients, optimizer / (replicas if sharded else 1)


def activation_bytes(
    size: ModelSize,
    split: Split,
    *,
    tokens: int,
    element_bytes: int,
    recompute: bool,
    fused_activation: bool = True,
) -> float:
    """Return what the backward pass of one micro-batch keeps per GPU.

    Per token and layer (after Korthikanti et al., 2022, for gated MLPs, grouped keys and an attention that keeps no
    scores): four vectors of the hidden width (inputs of the two norms, and what they give), queries, keys and values
    before and after their rotation, attention's output, and three vectors of the MLP's width, five where its gate is
    not computed by one kernel. With full recompute one vector of the hidden width, and one layer's whole. Tensor
    parallelism divides what is as wide as heads and MLP.
    A pipeline keeps as many micro-batches on its first stage as it has stages, each of 1/stages of the layers.

    Example:
        Hidden 1024, 16 heads of 128, 8 groups, MLP 3072, 28 layers, 8192 tokens in bf16: 11.4 GiB.
    """
    wide = 3 * size.query_width + 2 * size.key_value_width + (3 if fused_activation else 5) * size.ffn_width
    per_layer = 4 * size.hidden + wide / split.tensor
    kept = size.layers * size.hidden + per_layer if recompute else size.layers * per_layer
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
    recompute: bool = False,
    fused_activation: bool = True,
    frozen_copies: int = 0,
    training: bool = True,
    adapters: bool = False,
) -> tuple[Part, ...]:
    """Return what the trainer's process takes of the fullest GPU.

    Args:
        size: The model's.
        split: How it is divided.
        precision: A `MegatronPrecision` by name.
        tokens: Of one micro-batch, over all context-parallel ranks.
        logprob_chunk: Tokens whose logits exist at one time; 0: a model without an output layer.
        recompute: `recompute_granularity="full"`.
        fused_activation: Whether one kernel computes the MLP's gate.
        frozen_copies: Reference policies on the GPU.
        training: Whether there is a backward pass; without, weights and one chunk of logits are all.
        adapters: Whether low-rank adapters are trained alone. Their own state, a thousandth of a model's or so, is left
            out.
    """
    dense, experts = parameters_per_gpu(size, split)
    parameters = dense + experts
    weights, gradients, optimizer = state_bytes(precision, sharded=split.sharded, replicas=split.replicas)
    text = f"{parameters / 1e9:.3f}e9 parameters"
    parts = [
        Part("trainer: process", PROCESS_BYTES, "CUDA context and workspaces", ""),
        Part("trainer: weights", parameters * weights, f"{text} x {weights:g} bytes", _SPLIT),
    ]
    if training and not adapters:
        sharers = split.replicas if split.sharded else 1
        optimizer_text = f"{text} x {optimizer:g} bytes ({sharers} replicas share it)"
        parts += [
            Part(
                "trainer: gradients",
                parameters * gradients,
                f"{text} x {gradients:g} bytes",
                f"{_ADAPTERS}, or {_SPLIT}",
            ),
            Part("trainer: optimizer state", parameters * optimizer, optimizer_text, f"{_ADAPTERS}, or {_SHARD}"),
        ]
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
    arithmetic = f"{tokens} tokens, {size.layers} layers" + (", recomputed" if recompute else "")
    remedy = "lower max_tokens_per_microbatch" + ("" if recompute else f", or {_RECOMPUTE}")
    parts.append(Part(ACTIVATIONS, kept, arithmetic, remedy))
    if frozen_copies:
        copies = parameters * weights * frozen_copies
        remedy = "set reference.offload=true, or loss.kl_coef=0"
        parts.append(Part("trainer: reference", copies, f"{frozen_copies} x {text} x {weights:g} bytes", remedy))
    return tuple(parts)


def sampler_parts(
    size: ModelSize,
    *,
    tensor: int,
    total: int,
    utilization: float,
    cache_bytes: int | None,
    element_bytes: int,
    own_process: bool = True,
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
    """
    weights = (size.dense + size.embeddings + size.experts) * element_bytes / tensor
    process = Part("sampler: process", PROCESS_BYTES if own_process else 0, "CUDA context and workspaces", "")
    if cache_bytes is not None:
        return (
            process,
            Part(
                "sampler: weights",
                weights,
                f"x {element_bytes} bytes / {tensor}",
                "raise the engine's tensor_parallel_size",
            ),
            Part(
                "sampler: key/value cache", cache_bytes, "kv_cache_memory_gb", "lower the engine's kv_cache_memory_gb"
            ),
        )
    filled = Part(
        "sampler: weights and cache",
        max(utilization * total, weights),
        f"gpu_memory_utilization {utilization:g} x {total / GIB:.1f} GiB",
        "lower the engine's gpu_memory_utilization, or set its kv_cache_memory_gb",
    )
    return (process, filled)
