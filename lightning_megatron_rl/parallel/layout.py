"""The parallel layout: how the ranks of a run are divided, checked by arithmetic before anything is built."""

from dataclasses import dataclass, fields

from torch import distributed as dist

from lightning_megatron_rl.utilities.ranges import COUNT, check_ranges


@dataclass(frozen=True)
class ParallelLayout:
    """How many ways each dimension of Megatron's parallelism splits the model and the batch.

    The world is ``tensor x pipeline x context x data``; the data-parallel size is what is left of the world size.
    Expert layers divide the same ranks as ``expert_tensor x expert x pipeline x expert_data``.

    Args:
        tensor_model_parallel_size: Ways each weight matrix is split.
        pipeline_model_parallel_size: Number of pipeline stages.
        virtual_pipeline_model_parallel_size: Model chunks per stage (interleaved schedule), ``None`` for one.
        context_parallel_size: Ways each sequence is split.
        expert_model_parallel_size: Ways the experts of an MoE layer are distributed.
        expert_tensor_parallel_size: Ways each expert's matrices are split; ``None`` means as the dense layers.
        sequence_parallel: Split activations between tensor-parallel regions along the sequence.

    Raises:
        ValueError: A size below one, or sequence parallelism without tensor parallelism.

    Example:
        ``ParallelLayout(tensor_model_parallel_size=2).data_parallel_size(world_size=8) == 4``
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        sizes = [field.name for field in fields(self) if field.name != "sequence_parallel"]
        check_ranges(dict.fromkeys(sizes, COUNT), vars(self))
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True with tensor_model_parallel_size=1: sequence parallelism splits activations over"
                " the tensor-parallel ranks. Set tensor_model_parallel_size > 1 or sequence_parallel=False."
            )
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size} with"
                " pipeline_model_parallel_size=1: the interleaved schedule needs at least 2 pipeline stages."
            )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model: tensor x pipeline x context."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the model's weights."""
        split = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.expert_model_parallel_size)
        return split == (1, 1, 1) and self.expert_tensor_parallel_size in (None, 1)

    def chunk_layers(self, layers: int) -> int:
        """Return how many of a model's layers a chunk of a pipeline stage has, rounded up."""
        return -(-layers // (self.pipeline_model_parallel_size * (self.virtual_pipeline_model_parallel_size or 1)))

    def gathers_tokens(self, experts_per_token: int) -> bool:
        """Whether expert-parallel ranks gather each other's tokens by default: fewer ranks than experts of a token.

        Then a token is sent less often than to each of its experts. Experts have to be whole.
        """
        whole = (self.expert_tensor_parallel_size or self.tensor_model_parallel_size) == 1
        return whole and 1 < self.expert_model_parallel_size < experts_per_token

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas in `world_size` ranks.

        Raises:
            ValueError: The layout does not divide the world, with the arithmetic.
        """
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"tp({tp}) x pp({pp}) x cp({cp}) = {self.model_parallel_size} does not divide the world size"
                f" {world_size}: launch a multiple of {self.model_parallel_size} processes"
                " (Trainer(devices=..., num_nodes=...)) or change the parallel sizes."
            )
        ep = self.expert_model_parallel_size
        etp = self.expert_tensor_parallel_size or tp
        if world_size % (etp * ep * pp):
            raise ValueError(
                f"etp({etp}) x ep({ep}) x pp({pp}) = {etp * ep * pp} does not divide the world size {world_size}:"
                " change expert_model_parallel_size or expert_tensor_parallel_size"
                + (
                    f" (not given, so it follows tp({tp}): 1 leaves experts whole)."
                    if self.expert_tensor_parallel_size is None and tp > 1
                    else "."
                )
            )
        return world_size // self.model_parallel_size

    def describe(self, world_size: int) -> str:
        """Return the layout as its own arithmetic, e.g. ``world 8 = tp 2 x pp 2 x cp 1 x dp 2``."""
        dp = self.data_parallel_size(world_size)
        text = (
            f"world {world_size} = tp {self.tensor_model_parallel_size} x pp {self.pipeline_model_parallel_size}"
            f" x cp {self.context_parallel_size} x dp {dp}"
        )
        if self.sequence_parallel:
            text += ", sequence parallel"
        if self.virtual_pipeline_model_parallel_size:
            text += f", {self.virtual_pipeline_model_parallel_size} chunks per stage"
        if self.expert_model_parallel_size > 1:
            text += f", ep {self.expert_model_parallel_size}"
        if self.expert_tensor_parallel_size:
            text += f", etp {self.expert_tensor_parallel_size}"
        return text

    def initialize(self, timeout_s: float) -> None:
        """Create Megatron's process groups for this layout; groups of another layout are destroyed first.

        Args:
            timeout_s: Seconds after which a collective of one of these groups fails.
        """
        from megatron.core import parallel_state

        self.data_parallel_size(dist.get_world_size())
        if parallel_state.model_parallel_is_initialized():
            if self._is_initialized():
                return
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            distributed_timeout_minutes=timeout_s / 60,
        )

    def _is_initialized(self) -> bool:
        from megatron.core import parallel_state as ps

        return (
            ps.get_tensor_model_parallel_world_size() == self.tensor_model_parallel_size
            and ps.get_pipeline_model_parallel_world_size() == self.pipeline_model_parallel_size
            and ps.get_virtual_pipeline_model_parallel_world_size() == self.virtual_pipeline_model_parallel_size
            and ps.get_context_parallel_world_size() == self.context_parallel_size
            and ps.get_expert_model_parallel_world_size() == self.expert_model_parallel_size
            and ps.get_expert_tensor_parallel_world_size()
            == (self.expert_tensor_parallel_size or self.tensor_model_parallel_size)
        )
