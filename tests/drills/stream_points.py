"""The points at which drills end a run that streams; see `kill_streams`."""

from typing import Literal

from tests.drills.faults import Point

PLACEMENTS = ("separate", "shared")
_PLAN, _STREAM, _VLLM = "rollout/stream.py", "rollout/streaming.py", "rollout/vllm/supervision.py"
_ENGINE, _GRPO, _REWARDS = "SupervisedEngine", "modules/grpo.py", "tests/modules/runs.py"
_MEGATRON, _OWN = "megatron/core/optimizer/optimizer.py", "lightning_megatron_rl/checkpoints/"


def _at(
    name: str, file: str, function: str, moment: Literal["start", "return"] = "start", occurrence: int = 1
) -> Point:
    return Point(name, file, function, moment, occurrence, ranks=(0,))


# Each drill is one run that is killed at one point after the other. A process counts from its own start, so that it has
# got some steps further, behind a checkpoint or two, when it dies; those of loading come after another kill.
DRILLS = [
    (
        _at("news of responses", _VLLM, f"{_ENGINE}.collect", "return", 25),
        _at("a response has grown", _PLAN, "Response.add", "return", 30),
        _at("reward", _REWARDS, "parity", "start", 9),
        _at("a group is ready", _PLAN, "StreamPlan.finish", "return", 11),
        _at("before a batch is waited for", _STREAM, "RolloutStream.next_batch", "start", 4),
        _at("a batch is taken", _PLAN, "StreamPlan.take", "return", 4),
    ),
    (
        _at("save: staged, training goes on", f"{_OWN}save_queue.py", "SaveQueue.submit", "return", 4),
        _at("save: shards written", f"{_OWN}shards.py", "StagedShards.write", "return", 4),
        _at("save: before it is complete", f"{_OWN}format.py", "PendingCheckpoint._publish", "start", 4),
        _at("save: complete", f"{_OWN}format.py", "PendingCheckpoint._publish", "return", 4),
        _at("the next batch of data", "data/loader.py", "GlobalBatches.__getitem__", "start", 5),
    ),
    (
        _at("responses put away for a validation", _STREAM, "RolloutStream.put_away", "return", 2),
        _at("validation", _GRPO, "GRPOModule.validation_step", "start", 2),
        _at("the validation is over, nothing is in the engine", "modules/evaluation.py", "Evaluation.finish", "return"),
        _at("save: before anything", f"{_OWN}saving.py", "CheckpointSaver.save", "start", 4),
        _at("save: what is under way is told", _STREAM, "RolloutStream.state", "return", 4),
    ),
    (
        _at("prompts admitted", _PLAN, "StreamPlan.admit", "return", 4),
        _at("load: before", f"{_OWN}saving.py", "CheckpointSaver.load"),
        _at("load: the stream is there again", _STREAM, "RolloutStream.load_state", "return"),
        _at("groups begun", _PLAN, "StreamPlan.begin", "return", 9),
        _at("responses on their way to the engine", _VLLM, f"{_ENGINE}.submit", "start", 3),
        _at("responses in the engine", _VLLM, f"{_ENGINE}.submit", "return", 4),
    ),
    (
        _at("old log-probs", _GRPO, "GRPOModule.score_rollout", "start", 4),
        _at("update", "strategy/schedule.py", "forward_backward", "start", 10),
        _at("optimizer step: before", _MEGATRON, "ChainedOptimizer.step_with_ready_grads", "start", 4),
        _at("optimizer step: after", _MEGATRON, "ChainedOptimizer.step_with_ready_grads", "return", 5),
        _at("weights on their way", _VLLM, f"{_ENGINE}._update_through_host", "start", 4),
        _at("weights there", _VLLM, f"{_ENGINE}.update_weights", "return", 5),
    ),
]
SHORT = {
    "separate": [(DRILLS[0][3],)],  # a group is ready
    "shared": [(DRILLS[2][4],)],  # the stream was told to a checkpoint, which is not complete
}
