"""A reward and an environment of your own.

A reward is any callable from samples to one number each; an environment replies to what the policy says. With
``PYTHONPATH=examples/extending``::

    lightning-megatron-rl fit --config configs/demo/grpo.yaml --model.init_args.rewards '[rewards.ends_with_answer]'
"""

from lightning_megatron_rl import Prompt, Sample
from lightning_megatron_rl.environments import Action, Ending, Environment, Episode, Reply


def ends_with_answer(samples: list[Sample]) -> list[float]:
    """Return 1 for a response that ends in the prompt's answer; logged as ``reward/ends_with_answer``."""
    return [float(sample.response.strip().endswith(str(sample.prompt.answer))) for sample in samples]


class SecondChance(Environment):
    """Ask again, once, after a wrong answer.

    Args:
        remark: What the policy is told then.
    """

    def __init__(self, remark: str = "=") -> None:
        self.remark = remark

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """Begin an episode; `seed` is there for environments that draw numbers."""
        return _Chances(str(prompt.answer), self.remark)


class _Chances(Episode):
    def __init__(self, answer: str, remark: str) -> None:
        self.answer, self.remark = answer, remark
        self.tries, self.is_right = 0, False

    def step(self, action: Action) -> Reply:
        self.tries += 1
        self.is_right = action.text.strip() == self.answer
        return Reply(done=True) if self.is_right or self.tries == 2 else Reply(self.remark)

    def finish(self, reason: str) -> Ending:
        return Ending(reward=self.is_right / self.tries if self.tries else 0.0, success=self.is_right)
