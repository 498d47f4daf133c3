"""Episodes: transcripts of token ids, masks, seeds, limits and failures; log-probs over turns against Hugging Face."""

from typing import Any

import pytest
import torch

from lightning_megatron_rl.environments import Action, Ending, Environment, EpisodeSettings, GuardedEnvironment, Reply
from lightning_megatron_rl.modules.rollout_batch import to_sequence, turn_rewards
from lightning_megatron_rl.rollout.episodes import add_episode_rewards, play_episodes
from lightning_megatron_rl.rollout.protocol import GenerationRequest, SamplingParams, derive_seed
from lightning_megatron_rl.rollout.record import record_line
from lightning_megatron_rl.sample import Prompt, Sample, Turn
from lightning_megatron_rl.utilities.text_files import parse_json
from tests.environments.games import Bad, Sums
from tests.modules.runs import prompts
from tests.notices import told
from tests.rollout.conftest import MAX_MODEL_LEN, hf_logprobs, make_requests
from tests.rollout.seeded_engine import SeededEngine
from tests.rollout.test_vllm import CACHE_BLOCK, TOLERANCE
from tests.tiny_models import VOCAB_SIZE, make_sentencepiece_tokenizer, make_tokenizer


def play(
    environment: Any,
    engine: Any = None,
    *,
    prompts: list[Prompt],
    max_tokens: int = 40,
    num_generations: int = 2,
    step: int = 3,
    **settings: Any,
) -> list[Sample]:
    guarded = GuardedEnvironment(environment, EpisodeSettings(**settings), vocab_size=VOCAB_SIZE)
    return play_episodes(
        engine or SeededEngine(),
        guarded,
        prompts,
        SamplingParams(max_tokens=max_tokens),
        num_generations=num_generations,
        tokenizer=make_tokenizer(),
        seed=5,
        step=step,
    )


class Noting(Sums):
    """Notes each reply by the action that it was given to."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: dict[tuple[int, ...], Reply] = {}

    def start(self, prompt: Prompt, seed: int) -> Any:
        episode = super().start(prompt, seed)
        step = episode.step

        def noted(action: Any) -> Reply:
            reply = step(action)
            self.replies[tuple(action.token_ids)] = reply
            return reply

        episode.step = noted  # type: ignore[method-assign]
        return episode


def test_transcript_is_what_was_sampled_and_what_was_replied():
    """Each turn's context is the prompt and all tokens so far, to the token; the mask is exactly the sampled ones."""
    engine, game = SeededEngine(), Noting()
    samples = play(game, engine, prompts=prompts(6), max_turns=5)
    tokenizer = make_tokenizer()
    reached = set()
    for index, sample in enumerate(samples):
        # written down again from the engine's and the environment's own notes
        prompt, number = sample.prompt, index % 2
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for turn in range(5):
            seed = derive_seed(5, 3, prompt.index, f"{prompt.dataset}/{number}/{turn}")
            ((request, drawn),) = [pair for pair in engine.calls[turn] if pair[0].seed == seed]
            assert request.token_ids == prompt.token_ids + ids
            ids += drawn.token_ids
            mask += [True] * len(drawn.token_ids)
            logprobs += drawn.logprobs
            reply = game.replies[tuple(drawn.token_ids)]
            assert sample.turns[turn].reward == reply.reward
            assert sample.turns[turn].text == tokenizer.decode(drawn.token_ids, skip_special_tokens=True)
            if len(sample.turns) == turn + 1:
                break
            said = reply.token_ids or tokenizer(reply.text, add_special_tokens=False)["input_ids"]
            ids += said
            mask += [False] * len(said)
            logprobs += [0.0] * len(said)
        assert (sample.response_ids, sample.response_mask, sample.response_logprobs) == (ids, mask, logprobs)
        assert mask[-1], "nobody reads a reply at the end"
        assert sample.outcome is not None
        reached.add(sample.outcome.reason)
        sequence = to_sequence(sample)
        assert sequence.loss_mask.tolist() == [False] * len(prompt.token_ids) + mask
        assert sequence.fields["rollout_logprobs"][~sequence.loss_mask].abs().sum() == 0
    assert {"done", "max_turns"} <= reached
    assert sum(len(sample.turns) > 1 for sample in samples) > 5


def test_all_live_episodes_take_their_turn_in_one_call():
    engine = SeededEngine()
    samples = play(Sums(), engine, prompts=prompts(8), max_turns=4)
    lengths = [len(sample.turns) for sample in samples]
    assert [len(call) for call in engine.calls] == [sum(length > turn for length in lengths) for turn in range(4)]
    assert len(set(lengths)) > 2


def test_seeds_differ_between_steps_prompts_samples_and_turns():
    engine, game = SeededEngine(), Sums()
    for step in (0, 1):
        play(game, engine, prompts=prompts(4), step=step)
    seeds = [request.seed for call in engine.calls for request, _ in call]
    assert len(set(seeds)) == len(seeds)
    # of environments: one for the samples of a prompt, which are to be compared
    assert len(set(game.seeds)) == len(game.seeds) // 2 == 8
    again = SeededEngine()
    play(Sums(), again, prompts=prompts(4)[2:], step=0)
    first = {request.seed: request.token_ids for call in engine.calls for request, _ in call}
    assert all(first[request.seed] == request.token_ids for call in again.calls for request, _ in call)


def test_lengths_stay_within_all_limits():
    engine = SeededEngine(max_model_len=24)
    samples = play(Sums(), engine, prompts=prompts(12), max_tokens=9, max_turn_tokens=3, max_turns=8)
    for sample in samples:
        assert len(sample.prompt.token_ids) + len(sample.response_ids) <= 24
        assert len(sample.policy_ids) <= 9
        assert all(1 <= turn.stop - turn.start <= 3 for turn in sample.turns)
        assert sample.outcome is not None
        assert sample.is_truncated or sample.outcome.reason != "length"
    assert any(sample.is_truncated and len(sample.policy_ids) == 9 for sample in samples)
    assert any(sample.is_truncated and len(sample.policy_ids) < 9 for sample in samples), "max_model_len"


class OneTurn(Environment):
    """Calls whatever it gets an answer, and notes which it got in part."""

    def start(self, prompt: Prompt, seed: int) -> Any:
        return OneTurnEpisode()


class OneTurnEpisode:
    def step(self, action: Action) -> Reply:
        self.is_cut = action.is_cut
        return Reply(done=True)

    def finish(self, reason: str) -> Ending:
        return Ending(float(self.is_cut))


def test_an_answer_that_a_limit_cut_is_truncated_whatever_the_environment_calls_it():
    samples = play(OneTurn(), prompts=prompts(8), max_tokens=2)
    assert {sample.outcome.reason for sample in samples if sample.outcome is not None} == {"done"}
    assert [sample.is_truncated for sample in samples] == [
        bool(sample.outcome.reward) for sample in samples if sample.outcome is not None
    ]
    assert len({sample.is_truncated for sample in samples}) == 2


def test_prompt_without_room_for_a_turn_is_refused():
    with pytest.raises(ValueError, match=r"prompt 0 of 'train' has \d+ tokens: max_model_len=2 leaves no room"):
        play(Sums(), SeededEngine(max_model_len=2), prompts=prompts(1))


def test_reply_template_is_around_text_and_not_around_token_ids():
    samples = play(Bad(None), prompts=prompts(1), max_turns=2, reply_template="\n<|im_start|>{reply}\n")
    first, second = samples[0].turns
    between = make_tokenizer().convert_ids_to_tokens(samples[0].response_ids[first.stop : second.start])
    assert between == ["\n", "<|im_start|>", "o", "k", "\n"]
    (sample,) = play(
        Bad(Reply(token_ids=[50])), prompts=prompts(2)[1:], max_turns=3, num_generations=1, reply_template="x{reply}"
    )
    assert sample.response_ids[sample.turns[1].stop : sample.turns[2].start] == [50]


@pytest.mark.parametrize("legacy", [True, False])
def test_reply_does_not_begin_with_a_space_that_the_tokenizer_puts_before_texts(monkeypatch, legacy):
    """Tokenizers after SentencePiece's manner begin every text with a space; a reply goes on from a turn."""
    tokenizer = make_sentencepiece_tokenizer(legacy=legacy)
    monkeypatch.setattr("tests.rollout.test_episodes.make_tokenizer", lambda: tokenizer)
    (sample,) = play(Bad(None), prompts=prompts(1), max_turns=2, num_generations=1)
    first, second = sample.turns
    between = sample.response_ids[first.stop : second.start]
    assert tokenizer.convert_ids_to_tokens(between) == ["o", "k"]


def test_failed_episode_costs_the_default_and_the_others_go_on():
    with told(r"Bad failed in 2 of 6 episodes, which get -2: turn 2 of the sample of prom"):
        samples = play(Bad(ZeroDivisionError("no")), prompts=prompts(3), max_turns=3, default_reward=-2.0)
    add_episode_rewards(samples)
    assert [sample.reward for sample in samples] == [1.75, 1.75, -2, -2, 1.75, 1.75]  # 3 x 0.25 + 1
    assert samples[2].rewards == {"environment": -2.0}
    assert samples[2].reward_errors == {"environment": "ZeroDivisionError: no"}
    assert samples[0].reward_errors == {}
    assert [len(sample.turns) for sample in samples] == [3, 3, 2, 2, 3, 3]
    assert turn_rewards(samples[2]) == {}
    start = len(samples[0].prompt.token_ids)
    assert turn_rewards(samples[0]) == {start + turn.stop - 1: 0.25 for turn in samples[0].turns}


def test_what_a_tool_prints_in_another_encoding_costs_its_episode_alone():
    """Bytes that are no UTF-8 are halves of characters in the names of files, say; no tokenizer takes these."""
    with told("ContractError: Reply.text holds"):
        samples = play(Bad(Reply(b"caf\xe9".decode(errors="surrogateescape"))), prompts=prompts(2), max_turns=2)
    assert [sample.outcome.reason for sample in samples if sample.outcome] == ["max_turns"] * 2 + ["error"] * 2


def test_an_error_in_another_encoding_can_be_written_and_read_again():
    with told("OSError: no file caf"):
        samples = play(Bad(OSError("no file caf\udce9")), prompts=prompts(2), max_turns=2)
    add_episode_rewards(samples)
    record = parse_json(record_line(samples[2], step=1), "a record")
    assert record["reward_errors"] == {"environment": "OSError: no file caf\\udce9"}


def test_episode_that_cannot_start_is_an_empty_response():
    with told("turn 0 of the sample of prompt 1"):
        samples = play(Bad("hang", "start"), prompts=prompts(2), max_turns=1, deadline_s=0.2)
    assert [sample.response_ids == [] for sample in samples] == [False, False, True, True]
    assert not to_sequence(samples[2]).loss_mask.any()


@pytest.mark.parametrize("where", ["start", "step", "finish"])
def test_failure_ends_the_run_on_request(where):
    with pytest.raises(RuntimeError, match=r"Bad failed in turn \d of the sample of prompt 1 .*KeyError: 'x'"):
        play(Bad(KeyError("x"), where), prompts=prompts(2), max_turns=2, on_error="raise")


def test_reply_of_no_token_is_refused(monkeypatch):
    """A tokenizer may drop what it does not know; the policy would go on as if it had not been answered."""
    tokenizer = make_tokenizer()
    monkeypatch.setattr("tests.rollout.test_episodes.make_tokenizer", lambda: _Deaf(tokenizer))
    with told("ContractError: the tokenizer makes no token of the reply 'ok'"):
        samples = play(Bad(None), prompts=prompts(1), max_turns=2)
    assert all(sample.outcome is not None and sample.outcome.reason == "error" for sample in samples)


class _Deaf:
    def __init__(self, tokenizer: Any) -> None:
        self.decode = tokenizer.decode
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": []}


def test_logprobs_over_turns_are_those_of_the_whole_transcript(harness):
    """Real vLLM with its prefix cache on: later turns reuse the keys and values of earlier ones.

    Fails if a reply is retokenised, left out of the context or put at another place than where it was said.
    """
    harness.push_random_weights(21)
    longer = [
        Prompt(request.token_ids, f"prompt {index}", index=index) for index, request in enumerate(make_requests(4))
    ]
    assert all(len(prompt.token_ids) > CACHE_BLOCK for prompt in longer)
    samples = play(Sums(), harness.engine, prompts=longer, max_tokens=60, max_turn_tokens=8, max_turns=6)
    assert max(len(sample.turns) for sample in samples) >= 3
    for sample in samples:
        assert len(sample.prompt.token_ids) + len(sample.response_ids) <= MAX_MODEL_LEN
        table = hf_logprobs(harness.model, sample.prompt.token_ids, sample.response_ids)
        expected = table.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        mask = torch.tensor(sample.response_mask)
        error = (torch.tensor(sample.response_logprobs) - expected)[mask].abs().max().item()
        assert error <= TOLERANCE


def test_requests_have_limits_of_their_own(harness):
    """In one call: each is cut where it says."""
    requests = [GenerationRequest([7] * 20, seed=1, max_tokens=size) for size in (1, 5, 9)]
    results = harness.engine.generate(requests, SamplingParams(max_tokens=9, ignore_eos=True))
    assert [len(generations[0].token_ids) for generations in results] == [1, 5, 9]
    with pytest.raises(ValueError, match=r"request 0: max_tokens=10 must be in \[1, 9\]"):
        harness.engine.generate([GenerationRequest([7], seed=1, max_tokens=10)], SamplingParams(max_tokens=9))


def test_sample_knows_its_own_tokens():
    prompt = Prompt([1], "p")
    whole = Sample(prompt, [7, 8], [-0.1, -0.2], "ab")
    assert (whole.response_mask, whole.policy_ids, whole.final_text) == ([True, True], [7, 8], "ab")
    turns = [Turn(0, 1, "a"), Turn(3, 4, "b")]
    sample = Sample(prompt, [7, 8, 9, 5], [0.0] * 4, "a..b", turns=turns)
    assert (sample.response_mask, sample.policy_ids) == ([True, False, False, True], [7, 5])
    assert sample.final_text == "b"
