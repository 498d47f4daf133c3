"""The points at which drills end a run, in the order in which a step comes by."""

from dataclasses import dataclass

from tests.drills.faults import Point

_ENGINE, _REWARDS = "tests/drills/job.py", "tests/modules/runs.py"
_GRPO = "modules/grpo.py"
_CORE, _OWN = "megatron/core/", "lightning_megatron_rl/checkpoints/"
_SAVER, _PENDING = "CheckpointSaver", "PendingCheckpoint"


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
    _one("reference log-probs, rank 1 only", "modules/reference.py", "Reference.score", ranks=(1,)),
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
    _one("validation", _GRPO, "GRPOModule.validation_step"),
    _one("validation: done", "modules/evaluation.py", "Evaluation.finish", "return"),
]
# A save writes three directories, `step=<n>`, `last` and the best by validation; those of the second save are 4, 5, 6.
SAVE = [
    _one("save: before anything", f"{_OWN}saving.py", f"{_SAVER}.save", occurrence=4),
    _one("save: directory made", f"{_OWN}format.py", f"{_PENDING}.__init__.<locals>.prepare", "return", 4, (0,)),
    _one("save: staged, rank 1 only", f"{_OWN}shards.py", "stage", "return", 3, (1,)),
    _one("save: staged, training goes on", f"{_OWN}save_queue.py", "SaveQueue.submit", "return", 4),
    _one("save: before the shards, rank 1 only", f"{_OWN}shards.py", "StagedShards.write", occurrence=3, ranks=(1,)),
    _one("save: half the shards", f"{_OWN}manifest.py", "HashedFile.write", occurrence=60),
    _one("save: shards written, rank 0 only", f"{_OWN}shards.py", "StagedShards.write", "return", 3, (0,)),
    _one("save: before it is complete", f"{_OWN}format.py", f"{_PENDING}._publish", "start", 4, (0,)),
    _one("save: before the manifest", f"{_OWN}manifest.py", "write_manifest", "start", 4, (0,)),
    _one("save: half the manifest", f"{_OWN}manifest.py", "_content_checksum", "return", 4, (0,)),
    _one("save: before the rename", f"{_OWN}directories.py", "replace", "start", 4, (0,)),
    _one("save: old and new exchanged", f"{_OWN}directories.py", "_exchange", "return", 1, (0,)),
    _one("save: complete", f"{_OWN}format.py", f"{_PENDING}._publish", "return", 4, (0,)),
    _one("save: the last one linked, not complete", f"{_OWN}directories.py", "share_files", "return", 2, (0,)),
    _one("save: before an old one is removed", f"{_OWN}directories.py", "remove", "start", 1, (0,)),
    _one("save: an old one half removed", f"{_OWN}directories.py", "_delete", "start", 3, (0,)),
    _one("save: weights by validation", f"{_OWN}format.py", f"{_PENDING}._publish", "start", 6, (0,)),
]
_LATE = Point("fifth step", "strategy/optimizer.py", "MegatronOptimizer.step", occurrence=10)
LOAD = [
    Drill((_LATE, Point("load: before", f"{_OWN}saving.py", f"{_SAVER}.load"))),
    Drill(
        (
            _LATE,
            Point("load: half way, rank 1 only", f"{_OWN}saving.py", "Contents.load_weights", ranks=(1,)),
        )
    ),
]
DRILLS = [*STEP, *SAVE, *LOAD]
# One rank behind an optimizer step; then, resumed, the other one when its next checkpoint is all but complete.
SHORT = [
    Drill(
        (
            Point(
                "optimizer step: after",
                f"{_CORE}optimizer/optimizer.py",
                "ChainedOptimizer.step_with_ready_grads",
                "return",
                8,
                (1,),
            ),
            Point("save: before it is complete", f"{_OWN}format.py", f"{_PENDING}._publish", "start", 1, (0,)),
        )
    )
]
_VLLM = "rollout/vllm/supervision.py"
VLLM_DRILLS = [
    _one("vLLM: weights on their way", _VLLM, "SupervisedEngine._update_through_host", occurrence=4),
    _one("vLLM: weights there, rank 1 only", _VLLM, "SupervisedEngine.update_weights", "return", 4, (1,)),
    _one("vLLM: rollout", _VLLM, "SupervisedEngine.generate", occurrence=4),
    _one("vLLM: rollout done, rank 0 only", _VLLM, "SupervisedEngine.generate", "return", 4, (0,)),
]
