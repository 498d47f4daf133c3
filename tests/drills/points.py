"""The points at which drills end a run, in the order in which a step comes by."""

from dataclasses import dataclass

from tests.drills.faults import Point

_ENGINE, _REWARDS = "tests/drills/job.py", "tests/modules/runs.py"
_GRPO, _SAMPLING = "modules/grpo.py", "modules/sampling.py"
_CORE = "megatron/core/"


@dataclass(frozen=True)
class Drill:
    """A run that ends at each of `faults`, attempt by attempt, and is resumed each time.

    Args:
        faults: At least one.
    """

    faults: tuple[Point, ...]

    @property
    def name(self) -> str:
        """Of the first fault, and of what follows it."""
        return ", then ".join(fault.name for fault in self.faults)


def _one(*args: object, **kwargs: object) -> Drill:
    return Drill((Point(*args, **kwargs),))  # type: ignore[arg-type]


STEP = [
    _one("data: next batch", "data/loader.py", "GlobalBatches.__getitem__", occurrence=5),
    _one("sync: start, rank 1 only", _ENGINE, "WeighedEngine.update_weights", occurrence=4, ranks=(1,)),
    _one("sync: done, not yet sampled", _ENGINE, "WeighedEngine.update_weights", "return", occurrence=4),
    _one("rollout: before sampling", _ENGINE, "WeighedEngine.generate", occurrence=4),
    _one("rollout: after sampling, rank 0 only", _ENGINE, "WeighedEngine.generate", "return", occurrence=4, ranks=(0,)),
    _one("reward", _REWARDS, "parity", occurrence=4),
    _one("old log-probs", _GRPO, "GRPOModule.score_rollout", occurrence=4),
    _one("reference refreshed", "modules/reference.py", "copy_weights", "return", occurrence=1),
    _one("reference log-probs, rank 1 only", "modules/reference.py", "HoldsReference.score_reference", ranks=(1,)),
    _one("first update of a rollout", "strategy/schedule.py", "forward_backward", occurrence=19),
    _one(
        "gradients, rank 0 only",
        f"{_CORE}distributed/finalize_model_grads.py",
        "finalize_model_grads",
        occurrence=7,
        ranks=(0,),
    ),
    _one("between two updates of a rollout", "strategy/optimizer.py", "MegatronOptimizer.step", "return", occurrence=7),
    _one(
        "optimizer step: before",
        f"{_CORE}optimizer/optimizer.py",
        "ChainedOptimizer.step_with_ready_grads",
        occurrence=8,
    ),
    _one(
        "optimizer step: after, rank 1 only",
        f"{_CORE}optimizer/optimizer.py",
        "ChainedOptimizer.step_with_ready_grads",
        "return",
        occurrence=8,
        ranks=(1,),
    ),
    _one("schedule", "lr_scheduler.py", "LinearLR.get_lr", occurrence=5),
    _one("validation", _SAMPLING, "SamplesResponses.validation_step"),
    _one("validation: done", "modules/evaluation.py", "Evaluation.finish", "return"),
]
SAVE = [
    _one("save: before anything", "strategy/saving.py", "DistributedCheckpointStrategy.save_checkpoint", occurrence=3),
    _one("save: state gathered", "strategy/checkpoint.py", "save", occurrence=3),
    _one("save: directory made", "strategy/checkpoint.py", "save.<locals>.prepare", "return", occurrence=3, ranks=(0,)),
    _one("save: shards, rank 1 only", f"{_CORE}dist_checkpointing/serialization.py", "save", occurrence=3, ranks=(1,)),
    _one("save: shards written", f"{_CORE}dist_checkpointing/serialization.py", "save", "return", occurrence=3),
    _one("save: generators written", "strategy/checkpoint.py", "save.<locals>.write_rng_state", "return", occurrence=3),
    _one("save: before it is complete", "strategy/checkpoint.py", "save.<locals>.publish", occurrence=3, ranks=(0,)),
    _one("save: before the rename", "strategy/checkpoint.py", "_fsync_tree", "return", occurrence=4, ranks=(0,)),
    _one("save: between two renames", "pathlib.py", "Path.rename", "return", occurrence=3, ranks=(0,)),
    _one("save: complete", "strategy/checkpoint.py", "save.<locals>.publish", "return", occurrence=3, ranks=(0,)),
    _one("save: the old one half deleted", "strategy/checkpoint.py", "remove", ranks=(0,)),
]
_LATE = Point("fifth step", "strategy/optimizer.py", "MegatronOptimizer.step", occurrence=10)
LOAD = [
    Drill((_LATE, Point("load: before", "strategy/saving.py", "DistributedCheckpointStrategy.load_checkpoint"))),
    Drill(
        (
            _LATE,
            Point(
                "load: half way, rank 1 only",
                "strategy/saving.py",
                "DistributedCheckpointStrategy._load_weights",
                ranks=(1,),
            ),
        )
    ),
]
DRILLS = [*STEP, *SAVE, *LOAD]
SHORT: list[Drill] = [STEP[4], STEP[12], SAVE[6]]
VLLM_DRILLS = [
    _one("vLLM: rollout", "rollout/vllm_supervision.py", "SupervisedEngine.generate", occurrence=4),
]
