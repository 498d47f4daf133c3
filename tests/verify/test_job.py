"""What stands in for sampler, rewards and environment when a recorded rollout is verified."""

from examples.environments.guessing import NumberGuessing
from lightning_megatron_rl.modules.grpo import GRPOModule
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.sample import Outcome, Prompt, Sample, Turn


def test_recorded_episodes_are_replayed_without_their_environment():
    module = GRPOModule("nothing", rewards=[], environment=NumberGuessing(), num_generations=2)
    prompt = Prompt([5, 6], "p")
    sample = Sample(prompt, [7, 8, 8, 9], [-0.1, 0, 0, -0.2], reward=2.0, turns=[Turn(0, 1), Turn(3, 4)])
    sample.outcome = Outcome("done")
    module.replay([sample])
    assert module.environment is None
    assert isinstance(module.engine, ReplayEngine)
    assert module.rewards[0]([sample]) == [2.0]
    assert module.sampling.max_tokens == 2  # what the policy wrote
