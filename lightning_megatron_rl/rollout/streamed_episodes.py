"""`StreamedEpisodes`: each episode of a stream goes on when its own environment has replied, whatever the others do."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.rewards.deadline import DaemonPool
from lightning_megatron_rl.rollout.episodes import Transcript, report_failures, take_reply
from lightning_megatron_rl.rollout.protocol import SamplingParams
from lightning_megatron_rl.rollout.stream import Response
from lightning_megatron_rl.sample import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Play:
    """An episode under way: what it waits for, or that the policy writes."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.pending: Future[list[Any]] | None = None  # a call of the environment
        self.take = "_started"  # the method that takes what the call returns


class StreamedEpisodes:
    """The episodes of a stream's responses. Calls of the environment run beside sampling, `concurrency` at a time.

    `begin` starts an episode; while `is_sampling`, a turn is sampled, at most `room` tokens; `end_turn` hands it to the
    environment; `poll` takes what environments have said. An episode that is over has filled in its response.

    Args:
        environment: Replies.
        params: `max_tokens` limits what the policy writes in all turns of an episode together.
        tokenizer: Decodes turns for the environment, and encodes replies that are text.
        max_model_len: Limit of prompt, turns and replies. # [tokens]
    """

    def __init__(
        self,
        environment: GuardedEnvironment,
        params: SamplingParams,
        tokenizer: "PreTrainedTokenizerBase",
        max_model_len: int,
    ) -> None:
        self._environment = environment
        self._params = params
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._pool = DaemonPool("environment", environment.settings.concurrency)
        self._plays: dict[int, _Play] = {}  # by the identity of the response
        self._over: dict[int, Transcript] = {}  # until the group is complete

    @property
    def num_pending(self) -> int:
        """Calls of the environment that are waited for."""
        return sum(play.pending is not None for play in self._plays.values())

    def begin(self, prompt: Prompt, number: int, response: Response, seed: int) -> None:
        """Start the episode of a response, unless it has one."""
        if id(response) in self._plays:
            return
        play = _Play(Transcript(prompt, number, RuntimeError("not started"), response))
        play.pending = self._pool.submit(self._environment.start, [prompt], [seed])
        self._plays[id(response)] = play

    def is_sampling(self, response: Response) -> bool:
        """Whether the policy has to write."""
        return self._plays[id(response)].pending is None

    def room(self, response: Response) -> int:
        """Return the tokens that the policy may write in this turn."""
        transcript = self._plays[id(response)].transcript
        return transcript.room(self._params, self._max_model_len, self._environment.settings.max_turn_tokens)

    def turn_start(self, response: Response) -> int:
        """Return the place of the turn that the policy writes, in the response."""
        return self._plays[id(response)].transcript.turn_start

    def end_turn(self, response: Response) -> None:
        """The engine has ended a turn: the environment replies to it."""
        play = self._plays[id(response)]
        action = play.transcript.end_turn(self._tokenizer, is_cut=response.finish_reason == "length")
        response.finish_reason = None  # of the turn, not of the episode
        play.take = "_replied"
        play.pending = self._pool.submit(self._environment.step, [play.transcript.game], [action])  # type: ignore[list-item]

    def poll(self) -> None:
        """Take what environments have said.

        Raises:
            EnvironmentSetupError: What the environment needs is not there.
        """
        for play in list(self._plays.values()):
            if play.pending is not None and play.pending.done():
                (answer,) = play.pending.result()
                play.pending = None
                getattr(self, play.take)(play, answer)

    def _started(self, play: _Play, answer: Any) -> None:
        play.transcript.game = answer
        if isinstance(answer, BaseException):
            play.transcript.fail(answer)
            self._end(play, None)

    def _replied(self, play: _Play, answer: Any) -> None:
        transcript, settings = play.transcript, self._environment.settings
        is_last = len(transcript.response.turns) == settings.max_turns
        take_reply(
            transcript, answer, self._environment, self._tokenizer, self._params, self._max_model_len, is_last=is_last
        )
        if transcript.cause is not None:
            self._end(play, None)
        elif transcript.reason:
            play.take = "_end"
            play.pending = self._pool.submit(self._environment.finish, [transcript.game], [transcript.reason])  # type: ignore[list-item]

    def _end(self, play: _Play, answer: Any) -> None:
        response = play.transcript.response
        play.transcript.finish(answer, self._environment.settings.default_reward)
        del self._plays[id(response)]
        self._over[id(response)] = play.transcript

    def report(self, responses: Sequence[Response], samples: list[Sample]) -> None:
        """Name the episodes of a group whose environment failed, or raise for the first."""
        pairs = [(self._over.pop(id(r), None), sample) for r, sample in zip(responses, samples, strict=True)]
        known = [(transcript, sample) for transcript, sample in pairs if transcript is not None]  # none of a checkpoint
        report_failures([transcript for transcript, _ in known], [sample for _, sample in known], self._environment)

    def forget(self, response: Response) -> None:
        """Leave an episode where it is."""
        play = self._plays.pop(id(response), None)
        if play is not None and play.pending is not None:
            play.pending.cancel()
        self._over.pop(id(response), None)

    def close(self) -> None:
        """End the threads, but for calls that do not return."""
        self._pool.close()
