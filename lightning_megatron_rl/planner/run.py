"""`Run`: everything that a plan depends on, and the plan: memory by stage and phase, seconds, traffic, changes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_megatron_rl.parallel.layout import ParallelLayout
from lightning_megatron_rl.planner.divisibility import DividedSizes, PipelineSplit, check_layout
from lightning_megatron_rl.planner.hardware import GIB, Hardware
from lightning_megatron_rl.planner.memory import STATE_BYTES, ModelSize, Split, StateBytes, output_bytes, trainer_parts
from lightning_megatron_rl.planner.moments import (
    ACTIVATIONS,
    COMPUTING,
    EXPERT_OPTIMIZER,
    GRADIENTS,
    OPTIMIZER,
    PROCESS,
    PUSH,
    PUSHING,
    SAMPLER_PROCESS,
    SAMPLING,
    STEPPING,
    WEIGHTS,
    MemoryPlan,
    Part,
)
from lightning_megatron_rl.planner.needs import EngineNeeds
from lightning_megatron_rl.planner.timing import (
    BUCKET,
    DISK_BYTES_PER_S,
    HOST_BYTES_PER_S,
    SHARE_OF_REST,
    Cluster,
    Phase,
    Traffic,
    Training,
    Work,
    rollout,
    weight_sync,
)

SCORING, SAVING = "log-probs", "save"
_ELEMENT = {"32-true": 4}  # bytes of a weight; others have 2
_COLUMNS = {  # of the table, and the parts that each sums
    "parameters": (WEIGHTS, "trainer: reference", "trainer: weights, old and new"),
    "gradients": (GRADIENTS,),
    "optimizer": (OPTIMIZER, EXPERT_OPTIMIZER, "trainer: copies for the step"),
    "activations": (ACTIVATIONS,),
    "buffers": (PROCESS, PUSH, SAMPLER_PROCESS),
    "sampler's weights": ("sampler: weights",),
    "cache": ("sampler: key/value cache", "sampler: weights and cache"),
}
COLUMNS = tuple(_COLUMNS)


@dataclass(frozen=True)
class Sampling:
    """The samplers of a run.

    Args:
        needs: What each describes of itself.
        sequences: Most that one samples at a time.
        tokens: Longest prompt and response together.
        sleeps: Whether it leaves its memory to the trainer while that works.
    """

    needs: EngineNeeds
    sequences: int
    tokens: int
    sleeps: bool


@dataclass(frozen=True)
class Run:
    """A run as the planner sees it: a model, its layout, the GPUs, and what a step does."""

    model: str
    size: ModelSize
    divided: DividedSizes
    layout: ParallelLayout
    kind: Hardware
    world: int
    work: Work
    precision: str = "bf16-mixed"
    state: StateBytes = STATE_BYTES["bf16-mixed"]
    sharded: bool = True  # the distributed optimizer
    pipeline_split: PipelineSplit = field(default_factory=PipelineSplit)
    microbatch_tokens: int = 8192
    logprob_chunk: int = 2048
    recompute: float = 0.0  # share of the layers whose activations are computed again
    fused_activation: bool = True
    adapter_parameters: int = 0  # of low-rank adapters that are trained alone; 0: all weights are
    frozen_copies: int = 0  # references on the GPU
    sampling: Sampling | None = None
    servers: EngineNeeds | None = None  # that samples come from, if they come from servers
    offloads: tuple[str, ...] = ()
    stored: str = "bfloat16"  # the checkpoint's dtype
    dispatcher: str | None = None  # of tokens to experts; None: the default of the layout
    launch_factor: float = 1.0  # times the seconds of kernels' launches, which are those of a fast host
    margin: float = field(default=1.0, compare=False)  # of the free memory that the trainer may take

    @property
    def data_parallel(self) -> int:
        """Replicas of the model."""
        return self.layout.data_parallel_size(self.world)

    @property
    def split(self) -> Split:
        """The layout as the memory plan sees it."""
        return make_split(self.layout, self.world, sharded=self.sharded)

    @property
    def chunk_layers(self) -> int:
        """Layers of a chunk of a pipeline stage, rounded up."""
        return self.layout.chunk_layers(self.size.layers)

    @property
    def recompute_setting(self) -> Literal["none", "full"] | int:
        """What `train.recompute` is for it."""
        if self.recompute in (0, 1):
            return "full" if self.recompute else "none"
        return round(self.recompute * self.chunk_layers)

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return _ELEMENT.get(self.precision, 2)

    def check(self) -> None:
        """Refuse a layout that does not divide model, GPUs or batch.

        Raises:
            ValueError: With the arithmetic and the remedy.
        """
        replicas = self.data_parallel
        check_layout(self.divided, self.layout, self.pipeline_split)
        batch = self.work.batch
        if batch % replicas:
            raise ValueError(
                f"data.batch_size={batch} over {replicas} data-parallel replicas: {batch} % {replicas} ="
                f" {batch % replicas}: use a multiple of {replicas}"
            )
        if self.sampling is not None and self.sampling.tokens > self.microbatch_tokens:
            raise ValueError(
                f"train.max_tokens_per_microbatch={self.microbatch_tokens} < engine.max_model_len="
                f"{self.sampling.tokens}: a sampled sequence may not fit into a micro-batch. Raise"
                " train.max_tokens_per_microbatch or lower max_model_len."
            )
        if self.work.tokens > self.microbatch_tokens:
            raise ValueError(
                f"train.max_tokens_per_microbatch={self.microbatch_tokens} holds no sequence of {self.work.tokens}"
                " tokens: raise it, or lower sampling.max_tokens"
            )
        if self.sampling is not None:
            self.sampling.needs.check_ranks(self.layout, replicas)
            self._check_cache(self.sampling)

    def _check_cache(self, sampling: Sampling) -> None:
        """Refuse a sampler whose memory does not hold the model and one sequence, as vLLM would."""
        held, needs = self.cache_tokens, sampling.needs
        if held < sampling.tokens:
            weights = self.size.parameters * needs.element_bytes(self.stored) / needs.tensor_parallel_size / GIB
            given = (
                f"gpu_memory_utilization={needs.gpu_memory_utilization:g} of {self.kind.memory_gib:g} GiB"
                if needs.kv_cache_memory_gb is None
                else f"kv_cache_memory_gb={needs.kv_cache_memory_gb:g}"
            )
            raise ValueError(
                f"the sampler's cache holds {held} tokens, engine.max_model_len={sampling.tokens}: {given}, of which"
                f" weights take {weights:.1f} GiB on each of {needs.tensor_parallel_size} GPU(s): raise the engine's"
                " gpu_memory_utilization or tensor_parallel_size, or lower max_model_len"
            )

    @property
    def cache_tokens(self) -> int:
        """Tokens that one sampler's cache holds; 0 without a sampler."""
        if self.sampling is None:
            return 0
        return self.sampling.needs.cache_tokens(self.size, self.stored, self.kind.total) or 0

    def layers(self) -> list[int]:
        """Layers of each pipeline stage."""
        stages, split, total = self.layout.pipeline_model_parallel_size, self.pipeline_split, self.size.layers
        first, last = split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage
        rest = [None] * stages
        found: list[int | None] = [*rest]
        if first is not None:
            found[0] = first
        if last is not None:
            found[-1] = last
        extra = split.account_for_embedding_in_pipeline_split + split.account_for_loss_in_pipeline_split
        open_stages = found.count(None)
        given = sum(count for count in found if count is not None)
        each = (total + extra - given) // open_stages if open_stages else 0
        layers = [each if count is None else count for count in found]
        layers[0] -= split.account_for_embedding_in_pipeline_split
        layers[-1] -= split.account_for_loss_in_pipeline_split
        return layers

    def stages(self) -> Iterator[tuple[int, MemoryPlan]]:
        """Yield each pipeline stage with the memory plan of its GPUs; equal stages in between only once."""
        layers = self.layers()
        last = len(layers) - 1
        for stage, count in enumerate(layers):
            if 1 < stage < last and count == layers[stage - 1]:
                continue
            yield stage, self._stage(stage, count, is_first=stage == 0, is_last=stage == last)

    def _stage(self, stage: int, layers: int, *, is_first: bool, is_last: bool) -> MemoryPlan:
        size, stages = self.size, self.layout.pipeline_model_parallel_size
        share = layers / size.layers
        one = size.vocabulary * size.hidden
        embeddings = size.embeddings if stages == 1 else one * (is_first or is_last)
        kept = self.split.kept_microbatches(stage, self.most_microbatches)
        here = replace(
            size,
            dense=int(size.dense * share),
            experts=int(size.experts * share),
            embeddings=embeddings,
            layers=int(layers * kept),
        )
        options = {
            "precision": self.precision,
            "tokens": self.full_microbatch,
            "recompute": self._recomputed(layers),
            "fused_activation": self.fused_activation,
            "frozen_copies": self.frozen_copies,
            "adapters": bool(self.adapter_parameters),
            "state": self.state,
        }
        parts = trainer_parts(
            here,
            replace(self.split, pipeline=1),
            logprob_chunk=self.logprob_chunk if is_last else 0,
            push_bucket=BUCKET if self._puts_together else 0,
            message_bytes=self._message_bytes,
            **options,  # type: ignore[arg-type]
        )
        return MemoryPlan(
            parts,
            self._samplers(self._engines_on_stage(stage)),
            free=self.kind.free,
            apart=self.sampling is not None and self.sampling.sleeps,
            offloads=self.offloads if self.sampling is not None else (),
            gpu=f"a GPU of pipeline stage {stage} ({self.kind.name})" if stages > 1 else self.kind.name,
        )

    def _recomputed(self, layers: int) -> float:
        """Share of the layers of one stage, which may have more of them than others."""
        if isinstance(setting := self.recompute_setting, str):
            return self.recompute
        chunks = self.layout.virtual_pipeline_model_parallel_size or 1
        return min(1.0, setting * chunks / max(layers, 1))

    @property
    def microbatches(self) -> int:
        """Of an update, on each replica."""
        return self._training().microbatches

    @property
    def full_microbatch(self) -> int:
        """Tokens of the fullest micro-batch: the budget, or all that a replica has."""
        return max(1, min(self.microbatch_tokens, self.work.most_tokens(self.data_parallel)))

    @property
    def most_microbatches(self) -> int:
        """Of an update, on each replica, if all sequences are as long as they may be."""
        return -(-self.work.most_tokens(self.data_parallel) // self.microbatch_tokens)

    @property
    def _puts_together(self) -> bool:
        return self.sampling is not None and not self.layout.is_whole and not self.adapter_parameters

    @property
    def _message_bytes(self) -> int:
        if self.servers is None:
            return 0
        return self.servers.message_bytes(self.data_parallel, adapters=bool(self.adapter_parameters))

    @property
    def engines_on_gpu(self) -> int:
        """Engines with a worker on the same GPU: of neighbours larger than a replica, or on the same `devices`."""
        return max(self._engines_of_node(0).values(), default=0)

    @property
    def _per_node(self) -> int:
        return min(self.world, self.kind.per_node)

    def _engines_of_node(self, node: int) -> Counter[int]:
        """Engines by the number of a machine's GPU, as at the start of a run: the first rank of a replica has one."""
        if self.sampling is None:
            return Counter()
        neighbours = self.layout.tensor_model_parallel_size * self.layout.context_parallel_size
        before, each = node * self._per_node, min(self._per_node, self.world - node * self._per_node)
        firsts = range(-before % neighbours, min(each, self.data_parallel * neighbours - before), neighbours)
        return self.sampling.needs.engines_on(range(each), firsts)

    def _engines_on_stage(self, stage: int) -> int:
        """The most on a GPU of a pipeline stage, whose ranks stand behind each other; its machines are alike."""
        ranks = self.world // self.layout.pipeline_model_parallel_size
        node, first = divmod(stage * ranks, self._per_node)
        engines = self._engines_of_node(node)
        return max(engines[number] for number in range(first, min(first + ranks, self._per_node)))

    def _samplers(self, engines: int) -> tuple[Part, ...]:
        if self.sampling is None:
            return ()
        return self.sampling.needs.parts(self.size, engines=engines, stored=self.stored, total=self.kind.total)

    def samplers_alone(self) -> MemoryPlan | None:
        """Return the plan of the fullest GPU that has samplers and no trainer; None if there is none."""
        engines = max((count for gpu, count in self._engines_of_node(0).items() if gpu >= self._per_node), default=0)
        if self.sampling is None or not engines:
            return None
        return MemoryPlan(
            (), self._samplers(engines), free=self.kind.free, apart=self.sampling.sleeps, gpu="a GPU of samplers alone"
        )

    def plans(self) -> list[MemoryPlan]:
        """Return the plans of all GPUs that differ."""
        alone = self.samplers_alone()
        return [*(plan for _, plan in self.stages()), *([] if alone is None else [alone])]

    def memory(self) -> MemoryPlan:
        """Return the plan of the fullest GPU."""
        return max(self.plans(), key=lambda plan: plan.needed)

    @property
    def has_room(self) -> bool:
        """Whether every GPU holds its part, and leaves what is to be left of it."""
        return all(plan.leaves(self.margin) for plan in self.plans())

    @property
    def fits(self) -> bool:
        """Whether its layout divides everything, and every GPU holds its part."""
        try:
            self.check()
        except ValueError:
            return False
        return self.has_room

    def phases(self, plan: MemoryPlan) -> dict[str, dict[str, float]]:
        """Return bytes by column of the table for each phase of a step, on the GPUs of a stage's plan."""
        found = {}
        sampled = self.sampling is not None
        for phase, moment in (("sampling", SAMPLING), ("sync", PUSHING), (SCORING, COMPUTING), ("update", COMPUTING)):
            if (not sampled and phase != "update") or (phase == SCORING and not self.work.scored):
                continue
            there = plan.at(moment)
            if phase == SCORING:
                there = {part: self._scored() if part.name == ACTIVATIONS else size for part, size in there.items()}
            found[phase] = there
        stepping = plan.at(STEPPING)
        if sum(stepping.values()) > sum(found["update"].values()):
            found["update"] = stepping
        found[SAVING] = {part: 0 if part.name == ACTIVATIONS else size for part, size in plan.at(COMPUTING).items()}
        table = {}
        for phase, there in found.items():
            row = {
                column: sum(size for part, size in there.items() if part.name in names)
                for column, names in _COLUMNS.items()
            }
            table[phase] = {**row, "free": plan.free - sum(there.values())}
        return table

    def _scored(self) -> float:
        """Activations of a pass without gradients: a chunk of logits, and one layer's vectors."""
        tokens = self.full_microbatch
        layer = self.size.activation_width(self.split, fused=self.fused_activation) * self.element * tokens
        chunk = min(self.logprob_chunk, tokens)
        logits = output_bytes(self.size, self.split, chunk=chunk, element_bytes=self.element, trained=False)
        return layer / self.layout.context_parallel_size + logits

    # ---- time ------------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        """Its GPUs."""
        return Cluster(self.kind, self.world)

    def _training(self) -> Training:
        main = self.state.optimizer + self.state.step
        moved = self.state.gradients + 2 * main + self.state.weights  # gradients and state in, state and weights out
        return Training(
            size=self.size,
            split=self.split,
            cluster=self.cluster,
            work=self.work,
            microbatch_tokens=self.microbatch_tokens,
            gradient_bytes=self.state.gradients,
            optimizer_bytes=moved,
            weight_bytes=self.element,
            recompute=self.recompute,
            adapters=bool(self.adapter_parameters),
            stage_layers=tuple(self.layers()),
            gathers_tokens=self._gathers_tokens,
            launch_factor=self.launch_factor,
        )

    @property
    def _gathers_tokens(self) -> bool:
        if self.dispatcher is not None:
            return self.dispatcher == "allgather"
        return self.layout.gathers_tokens(self.size.routed_width // self.size.hidden)

    def seconds(self) -> list[Phase]:
        """Return the phases of a step with their seconds."""
        training, sampling, work = self._training(), self.sampling, self.work
        phases: list[Phase] = []
        if sampling is not None and work.sampled:
            tensor = sampling.needs.tensor_parallel_size
            sync, _ = self._sync(sampling)
            engines = self.data_parallel / self.engines_on_gpu  # those that share GPUs share their time
            held = self.cache_tokens // max(1, work.prompt_tokens + work.response_tokens)
            phases.append(
                rollout(
                    self.size,
                    work,
                    self.kind,
                    engines=max(1, int(engines)),
                    tensor=tensor,
                    sequences=max(1, min(sampling.sequences, held)),
                    element=self.element,
                )
            )
            phases.append(sync)
        phases += [training.scoring(SCORING if one == 0 else "reference") for one in range(work.scored)]
        phases.append(training.update())
        moved = self._moved()
        if moved:
            phases.append(Phase("hand-over of memory", (("host memory", 2 * moved / HOST_BYTES_PER_S),)))
        total = sum(phase.seconds for phase in phases)
        phases.append(Phase("everything else", (("Python", SHARE_OF_REST * total),)))
        return phases

    @property
    def step_seconds(self) -> float:
        """All phases, one after the other."""
        return sum(phase.seconds for phase in self.seconds())

    def saving(self) -> Phase:
        """A checkpoint, beside training: weights and optimizer state once, of adapters alone; each node has a share."""
        trained = self.adapter_parameters or self.size.parameters
        again = 4 if self.element == 4 and self.sharded else 0  # the sharded optimizer's weights, in any precision
        each = self.state.weights + self.state.optimizer + again
        return Phase(SAVING, (("disk", trained * each * self._per_node / self.world / DISK_BYTES_PER_S),))

    def traffic(self) -> list[Traffic]:
        """Return what one GPU sends in a step."""
        sent = self._training().travel()
        if self.sampling is not None and self.work.sampled:
            sent += self._sync(self.sampling)[1]
        moved = self._moved()
        if moved:
            sent.append(Traffic("memory that changes hands", "host memory", 2 * moved, 2 * moved / HOST_BYTES_PER_S))
        return sent

    def _sync(self, sampling: Sampling) -> tuple[Phase, list[Traffic]]:
        replica = self.layout.model_parallel_size
        return weight_sync(
            self.size,
            self.split,
            self.cluster,
            tensor=sampling.needs.tensor_parallel_size,
            element=self.element,
            in_place=sampling.needs.tensor_parallel_size == replica
            and sampling.needs.devices is None
            and "parameters" not in self.offloads,
            trained=self.adapter_parameters or None,
        )

    def _moved(self) -> float:
        """Bytes that leave the fullest GPU for a rollout; gradients, which nobody needs then, are dropped."""
        if self.sampling is None:
            return 0.0
        names = {"optimizer": (OPTIMIZER, EXPERT_OPTIMIZER), "parameters": (WEIGHTS,)}
        away = {name for offload in self.offloads for name in names.get(offload, ())}
        return sum(part.size for part in self.memory().trainer if part.name in away)

    # ---- what to change --------------------------------------------------------------------------------------------

    def changes(self) -> Iterator[tuple[str, "Run"]]:
        """Yield changes that lower memory, the smallest first, each with the run that it makes."""
        sampling = self.sampling
        if sampling is not None and not sampling.sleeps:
            yield "engine.sleep_level=2", replace(self, sampling=replace(sampling, sleeps=True))
        tokens = self.microbatch_tokens // 2
        while tokens >= self.work.tokens:
            yield f"train.max_tokens_per_microbatch={tokens}", replace(self, microbatch_tokens=tokens)
            tokens //= 2
        if self.recompute < 1:
            yield "train.recompute=full", replace(self, recompute=1.0)
        if sampling is not None and sampling.sleeps and len(self.offloads) < 3:
            every = ("optimizer", "gradients", "parameters")
            yield f"strategy.offload_while_sampling={list(every)}", replace(self, offloads=every)
        if self.state.optimizer == 12 and self.precision == "bf16-mixed" and not self.adapter_parameters:
            yield "Adam's moments in bf16 (docs/precision.md)", replace(self, state=replace(self.state, optimizer=6))
        for factor in (2, 4, 8):
            more = replace(self, world=self.world * factor)
            yield f"{more.world} GPUs, so that {more.data_parallel} replicas share the optimizer's state", more
        for factor in (2, 4, 8):
            tensor = self.layout.tensor_model_parallel_size * factor
            if tensor <= self.kind.per_node:
                layout = replace(self.layout, tensor_model_parallel_size=tensor, sequence_parallel=True)
                world = max(self.world, layout.model_parallel_size)
                yield f"tensor_model_parallel_size={tensor} on {world} GPUs", replace(self, layout=layout, world=world)

    def smallest_change(self) -> str | None:
        """Return the first change that makes it fit: alone, else all of the small ones together; None if none does."""
        for name, changed in self.changes():
            if changed.fits:
                return name
        names, run = [], self
        for _ in range(12):
            step = next(((name, changed) for name, changed in run.changes() if changed != run), None)
            if step is None:
                return None
            names.append(step[0])
            run = step[1]
            if run.fits:
                return "; ".join(names)
        return None

    def require(self) -> None:
        """Refuse a run that does not divide, or does not fit, with the smallest change that would.

        Raises:
            ValueError: With every part's arithmetic.
        """
        self.check()
        if self.has_room:
            return
        change, plan = self.smallest_change(), self.memory()
        found = f"The smallest change that fits: {change}" if change else "No change known here makes it fit"
        try:
            plan.check()
        except ValueError as error:
            raise ValueError(f"{error}\n{found}") from None
        raise ValueError(
            f"auto leaves {1 - self.margin:.0%} of the free memory while the trainer works, and no setting does:\n"
            f"{plan.describe()}\n{found}"
        )

    def advice(self) -> str:
        """Return the first thing to change, for speed: what the longest phase waits for."""
        longest = max(self.seconds(), key=lambda phase: phase.seconds)
        bound = longest.bound
        share = longest.seconds / self.step_seconds
        return f"{longest.name} takes {share:.0%} of a step, most of it {bound}: {_ADVICE.get(bound, _NOTHING)}"


_NOTHING = "this is what the hardware takes; more GPUs (data parallel) shorten it"
_ADVICE = {
    "vLLM's Python and messages": "sample more sequences at a time (data.batch_size, engine.max_num_seqs), or stream",
    "reading weights": "sample more sequences at a time, or fewer GPUs per engine",
    "reading the cache": "this is what the hardware takes; shorter responses or more engines shorten it",
    "memory of the GPU": "no recompute if memory allows it; otherwise this is what the hardware takes",
    "tensor parallelism": "lower tensor_model_parallel_size, or raise train.max_tokens_per_microbatch",
    "tokens to experts": "lower expert_model_parallel_size, within one machine",
    "kernels' launch in Python": "raise train.max_tokens_per_microbatch",
    "stages that wait in the pipeline": "lower train.max_tokens_per_microbatch, or cut stages in chunks",
    "gradients and parameters": "more tokens per update",
}


def make_split(layout: ParallelLayout, world: int, *, sharded: bool) -> Split:
    """Return how a layout divides a model over so many GPUs."""
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    expert, expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size or tensor
    return Split(
        tensor=tensor,
        pipeline=pipeline,
        chunks=layout.virtual_pipeline_model_parallel_size or 1,
        context=layout.context_parallel_size,
        expert=expert,
        expert_tensor=expert_tensor,
        replicas=layout.data_parallel_size(world) * layout.context_parallel_size,
        expert_replicas=world // (pipeline * expert * expert_tensor),
        sharded=sharded,
        sequence_parallel=layout.sequence_parallel,
    )


def gib(size: float) -> float:
    """Return bytes as GiB."""
    return size / GIB
