"""GRPO over several turns: a calculator to call, a number to guess or a way to find, and an environment of one's own.

Usage, with a small model whose tokenizer knows the characters of all games::

    python examples/demo/build_model.py runs/games/model --characters $'0123456789+-*=[];:<>?SGUDLR#.\\n'
    python examples/environments_script.py --game guessing
"""

import argparse

import lightning as L
from environments.grid import GridGame, GridRows
from environments.guessing import GuessingRows, NumberGuessing
from lightning.pytorch.loggers import CSVLogger
from megatron.core.optimizer import OptimizerConfig

from lightning_megatron_rl import (
    GRPOModule,
    MegatronStrategy,
    Prompt,
    PromptDataModule,
    RolloutSamples,
    RunProgress,
    TrainingSettings,
    VLLMEngine,
)
from lightning_megatron_rl.environments import (
    Action,
    Calculator,
    CalculatorRows,
    Ending,
    Environment,
    Episode,
    EpisodeSettings,
    Reply,
)
from lightning_megatron_rl.rollout.protocol import SamplingParams


class Countdown(Environment):
    """An environment of one's own: the policy is to say the numbers from the prompt's answer down to 0, one a turn."""

    def start(self, prompt: Prompt, seed: int) -> Episode:
        return CountdownEpisode(int(prompt.answer or 0))


class CountdownEpisode(Episode):
    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, action: Action) -> Reply:
        if action.text.strip() != str(self.number):
            return Reply(done=True)
        self.number -= 1
        return Reply(done=True, reward=0.1) if self.number < 0 else Reply(";", reward=0.1)

    def finish(self, reason: str) -> Ending:
        return Ending(reward=float(self.number < 0), success=self.number < 0)


GAMES = {  # environment, rows, most turns, tokens of a turn
    "calculator": (Calculator(), CalculatorRows("train", size=512), 3, 16),
    "guessing": (NumberGuessing(consistent_reward=0.1), GuessingRows(size=512, high=9), 5, 2),
    "grid": (GridGame(progress_reward=0.1), GridRows(size=512), 4, 4),
    "countdown": (Countdown(), GuessingRows(size=512, high=3), 5, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", choices=GAMES, default="guessing")
    parser.add_argument("--model", default="runs/games/model", help="directory or hub name of the model")
    parser.add_argument("--steps", type=int, default=20, help="rollouts")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a rollout")
    parser.add_argument("--out", default="runs/games", help="directory of metrics and samples")
    options = parser.parse_args()

    L.seed_everything(1234)
    environment, rows, max_turns, turn_tokens = GAMES[options.game]
    module = GRPOModule(
        model=options.model,
        rewards=[],  # functions would come on top of the environment's reward
        environment=environment,
        episodes=EpisodeSettings(max_turns=max_turns, max_turn_tokens=turn_tokens, deadline_s=10.0),
        num_generations=8,
        sampling=SamplingParams(max_tokens=max_turns * turn_tokens, stop=("]",)),  # tokens of all turns
        engine=VLLMEngine(max_model_len=128, kv_cache_memory_gb=0.25),
        train=TrainingSettings(optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0, adam_beta2=0.98)),
    )
    data = PromptDataModule(
        train=rows, tokenizer=options.model, batch_size=options.prompts, add_special_tokens=False, max_prompt_length=32
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(timeout_s=600),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(options.out, name=options.game, version=""),
        callbacks=[RunProgress(), RolloutSamples(every_n_steps=5)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(
        f"{options.game}: after {trainer.global_step} steps reward {metrics['reward/mean']:.3f}, success"
        f" {metrics['episode/success_frac']:.3f}, {metrics['episode/turns_mean']:.2f} turns"
    )


if __name__ == "__main__":
    main()
