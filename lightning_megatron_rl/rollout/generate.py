"""From prompts to samples: requests with their own seeds, responses decoded and kept in groups."""

from typing import TYPE_CHECKING

from lightning_megatron_rl.rollout.protocol import GenerationRequest, RolloutEngine, SamplingParams, derive_seed
from lightning_megatron_rl.rollout.replay import ReplayEngine
from lightning_megatron_rl.sample import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate_samples(
    engine: RolloutEngine,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    num_generations: int,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    step: int,
) -> list[Sample]:
    """Sample `num_generations` responses to each prompt; those of one prompt stand together.

    Args:
        engine: A started engine.
        prompts: This replica's prompts.
        params: Temperature, limits and stop strings.
        num_generations: Responses per prompt.
        tokenizer: Decodes responses for rewards and logs; token ids are never made from text again.
        seed: The run's seed. Each (step, prompt) gets a seed of its own, so a resumed run samples the same.
        step: The `global_step`.

    Raises:
        ValueError: A prompt and its response may be longer than the engine's `max_model_len`.
    """
    for prompt in prompts:
        length = len(prompt.token_ids)
        if not isinstance(engine, ReplayEngine) and length + params.max_tokens > engine.max_model_len:
            raise ValueError(
                f"row {prompt.index} of {prompt.dataset!r}: prompt ({length}) + max_tokens ({params.max_tokens}) ="
                f" {length + params.max_tokens} > max_model_len ({engine.max_model_len}): shorten the prompt, lower"
                " max_tokens, or raise the engine's max_model_len"
            )
    requests = [
        GenerationRequest(
            token_ids=prompt.token_ids,
            seed=derive_seed(seed, step, prompt.index, prompt.dataset),
            num_generations=num_generations,
        )
        for prompt in prompts
    ]
    return [
        Sample(
            prompt=prompt,
            response_ids=generation.token_ids,
            response_logprobs=generation.logprobs,
            response=str(tokenizer.decode(generation.token_ids, skip_special_tokens=True)),
            finish_reason=generation.finish_reason,
            weight_version=engine.weight_version,
            turns=list(generation.turns),
            outcome=generation.outcome,
        )
        for prompt, group in zip(prompts, engine.generate(requests, params), strict=True)
        for generation in group
    ]
