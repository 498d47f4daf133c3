"""`RolloutStream`: keeps an engine at work on a `StreamPlan`, rewards groups that are complete, gives out batches.

It lives in one process, the leader of a replica. `StreamPlan` says what is sampled when; an engine samples; nothing
here knows of the trainer.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.environments.base import NAME as ENVIRONMENT
from lightning_megatron_rl.environments.guard import GuardedEnvironment
from lightning_megatron_rl.rewards.deadline import DaemonPool
from lightning_megatron_rl.rollout.protocol import (
    Progress,
    ResponsesLostError,
    SamplingParams,
    StreamingEngine,
    StreamRequest,
    WeightsLostError,
    derive_seed,
)
from lightning_megatron_rl.rollout.stream import Group, Response, SparePrompts, StreamPlan, find_prompts, rows_of
from lightning_megatron_rl.rollout.streamed_episodes import StreamedEpisodes
from lightning_megatron_rl.rollout.watch import StreamWatch
from lightning_megatron_rl.sample import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

POLL_S = 0.05  # between two looks at an engine that samples in the background, while a batch is waited for
BESIDE_S = 0.2  # the same while the trainer works, whose time each look takes
WAIT_S = 1.0  # longest wait within an engine that samples only then
LOOK_S = 0.05  # the same while other replicas are waited for
END_S = 5.0  # that `close` waits for the thread
TELL_S = 2.0  # so old is what is known of unfinished responses at most, which go on from there if the engine dies


class RolloutStream:
    """Samples groups of responses that may outlive several versions of the policy.

    Args:
        engine: Started, with a `StreamMode`.
        plan: Says which groups are sampled and trained on when.
        params: How tokens are drawn.
        tokenizer: Decodes responses for rewards and logs.
        seed: The run's.
        reward: Fills in the rewards of a group's samples.
        background: Go on while nobody waits for a batch: the engine samples then, too.
        environment: Replies to what the policy writes; None: a response is one turn.
        spares: Prompts that take the place of groups without spread; None: such groups are trained on.
        watch: Follows the number of groups, and the rewards.
        arrive: Says that this replica has a batch; what it returns tells whether all replicas have one. Until then it
            samples on, for later batches. None: nobody is waited for.
        judged_by: Names the rewards; groups of a checkpoint that others judged are judged again.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        plan: StreamPlan,
        params: SamplingParams,
        *,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        reward: Callable[[list[Sample]], None],
        background: bool = False,
        environment: GuardedEnvironment | None = None,
        spares: SparePrompts | None = None,
        watch: StreamWatch | None = None,
        arrive: Callable[[], Callable[[], bool]] | None = None,
        judged_by: str = "",
    ) -> None:
        self.plan = plan
        self.num_passed_over = 0  # groups without spread, since the last batch but one
        self._engine = engine
        self._params = params
        self._tokenizer = tokenizer
        self._seed = seed
        self._judged_by = judged_by
        self._watch = watch or StreamWatch()
        self._reward = self._watch.timed(reward)
        self._background = background
        self._episodes = (
            None
            if environment is None
            else StreamedEpisodes(environment, params, tokenizer, max_model_len=engine.max_model_len)
        )
        self._spares = spares
        self._passed_over = 0  # since the last batch
        self._born: dict[int, int] = {}  # when a prompt was last begun, by row
        self._arrive = arrive
        self._have_all_come: Callable[[], bool] | None = None  # since this replica has, for the batch that comes next
        self._version = 0
        self._names: dict[str, Response] = {}  # what the engine has
        self._judged: dict[int, Future[None]] = {}  # groups whose rewards are computed, by number
        self._judge = DaemonPool("rewards")
        self._told_at = 0.0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._ended = False
        self._is_held = False
        self._awaited = threading.Event()  # whether a batch is
        self._error: BaseException | None = None

    # ---- batches ---------------------------------------------------------------------------------------------------

    def next_batch(self, prompts: list[Prompt], version: int) -> list[Sample]:
        """Admit `prompts` and wait for the batch that `version` of the policy is trained on; its groups, rewarded.

        If the plan has several parts it is the next one, and `prompts` come with the first.

        Raises:
            WeightsLostError: The engine's process was replaced and has no weights; call again, without prompts, when it
                has some.
            RuntimeError: Sampling or a reward failed.
        """
        with self._lock:
            self.plan.admit(prompts)
            self._version = version
            for group in self.plan.drop_stale(version):
                self._forget(group)
            self._is_held = False
            if isinstance(self._error, WeightsLostError):
                self._error = None  # they have come since; if not, the next turn says so again
        if self._background:
            self._start_thread()
        self._awaited.set()
        try:
            return self._wait_for_batch(version)
        finally:
            self._awaited.clear()

    def _wait_for_batch(self, version: int) -> list[Sample]:
        with self._changed:
            try:
                self._wait_for_all(version)
            finally:
                self._hold()
            self._have_all_come = None
            groups = self.plan.take(version)
            if not self.plan.num_taken:  # the batch is complete
                self.num_passed_over, self._passed_over = self._passed_over, 0
            self._watch.note_batch(self.plan, version, groups)
            return [sample for group in groups for sample in group.samples]

    def _wait_for_all(self, version: int) -> None:
        """Sample until every replica has its batch."""
        while not (has_batch := self.plan.can_take(version)) or not self.have_all_come():
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not has_batch and not self.plan.under_way and not self.plan.waiting:
                raise RuntimeError(f"version {version} has no batch: {self.plan.describe()}")
            if self._background:
                self._changed.wait(POLL_S)
            else:
                self._turn(LOOK_S if has_batch else WAIT_S)
                if has_batch and not self._names:
                    time.sleep(LOOK_S)  # others are waited for, and there is nothing more to sample

    def _hold(self) -> None:
        """Let the engine sample nothing while the trainer works, unless it is to do that, too."""
        if self._background:
            return
        try:
            self._engine.hold()
        except ResponsesLostError:
            self._names.clear()  # they go on from what is known of them

    def have_all_come(self) -> bool:
        """Say, once for each batch, that no replica has to wait for this one; return whether that is so of all."""
        if self._arrive is None:
            return True
        if self._have_all_come is None:
            self._have_all_come = self._arrive()
        return self._have_all_come()

    def _turn(self, wait_s: float, *, begins: bool = True) -> None:
        """Give the engine what may begin, take what it has sampled, and reward what is complete."""
        try:
            if begins:
                self._born |= {group.prompt.index: group.born for group in self.plan.begin(self._version)}
            self._submit()
            self._watch.note(self.plan)
            now = time.monotonic()
            everything = now - self._told_at > TELL_S
            if everything:
                self._told_at = now
            waits = min(wait_s, POLL_S) if self._has_calls else wait_s
            self._add(self._engine.collect(waits, everything=everything))
        except ResponsesLostError:
            self._names.clear()  # they go on from what is known of them
        if not self._names and self._has_calls:
            time.sleep(POLL_S / 10)  # nothing else is waited for
        self._finish_groups()

    @property
    def _has_calls(self) -> bool:
        """Whether rewards or an environment are waited for."""
        return bool(self._judged) or (self._episodes is not None and self._episodes.num_pending > 0)

    def _add(self, news: list[Progress]) -> None:
        for progress in news:
            if (response := self._names.get(progress.name)) is None:  # its group was dropped
                continue
            response.add(progress)
            if self._episodes is not None and response.finish_reason is not None:
                del self._names[progress.name]
                self._episodes.end_turn(response)

    def _submit(self) -> None:
        """Give the engine all responses of groups under way that it does not have."""
        requests = []
        submitted = {id(response) for response in self._names.values()}
        fresh: dict[str, Response] = {}
        for group in self.plan.under_way.values():
            for place, response in enumerate(group.responses):
                if response.finish_reason is None and id(response) not in submitted and self._wants(group, place):
                    request = self._request(group, place, response)
                    requests.append(request)
                    fresh[request.name] = response
        if requests:
            self._engine.submit(requests, self._params)
            self._names |= fresh

    def _wants(self, group: Group, place: int) -> bool:
        """Whether the policy has to write in a response, rather than its environment."""
        if self._episodes is None:
            return True
        prompt, response = group.prompt, group.responses[place]
        seed = derive_seed(self._seed, group.born, prompt.index, f"{prompt.dataset}/{ENVIRONMENT}")
        self._episodes.begin(prompt, place, response, seed)
        return self._episodes.is_sampling(response)

    def _request(self, group: Group, place: int, response: Response) -> StreamRequest:
        """Ask for the rest of a response or turn; what is sampled at once gets the seed that it has in a batch."""
        prompt, done = group.prompt, len(response.token_ids)
        room, in_turn, key = self._params.max_tokens - done, done, f"{prompt.dataset}/{place}"
        if self._episodes is not None:
            room, in_turn = self._episodes.room(response), done - self._episodes.turn_start(response)
            key += f"/{len(response.turns)}"
        if in_turn:  # the noise of the first tokens must not come again
            seed = derive_seed(self._seed, self._version, prompt.index, f"{key}/{in_turn}")
        elif self._episodes is not None:
            seed = derive_seed(self._seed, group.born, prompt.index, key)
        else:
            seed = derive_seed(self._seed, group.born, prompt.index, prompt.dataset) + place
        name = f"{group.number}/{place}/{done}/{self._version}"
        return StreamRequest(name, prompt.token_ids + response.token_ids, seed, room)

    def _finish_groups(self) -> None:
        """Send complete groups to be rewarded; those that are, are ready."""
        self._names = {name: response for name, response in self._names.items() if response.finish_reason is None}
        if self._episodes is not None:
            self._episodes.poll()
        for group in list(self.plan.under_way.values()):
            future = self._judged.get(group.number)
            if future is None:
                if group.is_complete:
                    group.samples = [self._sample(group, response) for response in group.responses]
                    if self._episodes is not None:
                        self._episodes.report(group.responses, group.samples)
                    self._judged[group.number] = self._judge.submit(self._reward, group.samples)
            elif future.done():
                del self._judged[group.number]
                future.result()
                self._finish_group(group)
        self._watch.note(self.plan)
        self._changed.notify_all()

    def _finish_group(self, group: Group) -> None:
        """A group is rewarded: it is ready, or makes room for another prompt because all its rewards are equal."""
        is_flat = all(sample.reward == group.samples[0].reward for sample in group.samples)
        if self._spares is None or not is_flat or self._passed_over >= self._spares.limit:
            self.plan.finish(group)
            return
        others = [*self.plan.under_way.values(), *self.plan.ready]
        without = {prompt.index for prompt in [*(g.prompt for g in others), *self.plan.waiting]}
        # with the same seeds and weights the same responses would come again
        spare = self._spares.draw(without | {row for row, born in self._born.items() if born == self._version})
        if spare is None:
            self.plan.finish(group)
            return
        self._passed_over += 1
        self.plan.replace(group, spare)

    def _sample(self, group: Group, response: Response) -> Sample:
        assert response.finish_reason is not None
        return Sample(
            prompt=group.prompt,
            response_ids=response.token_ids,
            response_logprobs=response.logprobs,
            response=str(self._tokenizer.decode(response.token_ids, skip_special_tokens=True)),
            finish_reason=response.finish_reason,
            weight_version=response.segments[0][0] if response.segments else group.born,
            segments=response.segments,
            turns=response.turns,
            outcome=response.outcome,
        )

    def _forget(self, group: Group) -> None:
        self._names = {name: kept for name, kept in self._names.items() if all(kept is not r for r in group.responses)}
        self._judged.pop(group.number, None)
        if self._episodes is not None:
            for response in group.responses:
                self._episodes.forget(response)

    # ---- pauses ----------------------------------------------------------------------------------------------------

    def finish_under_way(self) -> None:
        """Sample what is under way to its end, and begin nothing new before the next batch is asked for."""
        with self._lock:
            while not all(group.is_complete for group in self.plan.under_way.values()):
                self._turn(WAIT_S, begins=False)
            self._hold()
            self._is_held = True

    def put_away(self) -> None:
        """Take everything out of the engine, which may sleep or do other things then; `next_batch` goes on with it."""
        with self._lock:
            self._is_held = True
            with suppress(ResponsesLostError):  # they go on from what is known of them
                self._add(self._engine.withdraw())
            self._names.clear()

    def close(self, *, engine_ends: bool = False) -> bool:
        """End the threads; return whether `known_state` will stay as it is: False if a thread hangs in a call.

        Args:
            engine_ends: The engine is closed next, or cannot be asked for anything: it keeps what it has until then.
        """
        self._ended, hangs = True, False
        if self._thread is not None:
            self._thread.join(timeout=END_S)  # longer only within a call that the engine's `close` cuts off
            hangs = self._thread.is_alive()
            self._thread = None
        if not engine_ends and not hangs:
            with suppress(RuntimeError):  # it has lost everything, or says so when it is needed again
                self._add(self._engine.withdraw())
        self._judge.close()
        if self._episodes is not None:
            self._episodes.close()
        if self.plan.ready or self.plan.under_way:
            log.info("the stream of rollouts ends with %s", self.plan.describe())
        return not hangs

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollout stream", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._ended:
                    return  # what is under way is nobody's now
                if not self._is_held and self._error is None:
                    try:
                        self._turn(0.0)
                    except BaseException as error:  # for the trainer, which will ask
                        self._error = error
                        self._changed.notify_all()
            time.sleep(POLL_S)
            self._awaited.wait(BESIDE_S - POLL_S)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """Return as JSON what was admitted and not yet trained on: prompts by their rows, responses by their tokens.

        Nobody knows how to keep an environment's state: an episode that is not over begins anew.
        """
        with self._lock:
            try:
                self._add(self._engine.collect(0.0, everything=True))
            except ResponsesLostError:
                self._names.clear()
            except WeightsLostError:  # what is known of them is saved; they go on when it has weights again
                pass
            return self.known_state()

    def known_state(self) -> str:
        """Return what `state` does, without asking the engine."""
        ready = {group.number for group in self.plan.ready}
        groups = [
            {
                "number": group.number,
                "row": group.prompt.index,
                "born": group.born,
                "responses": [
                    asdict(response if self._episodes is None or response.finish_reason else Response())
                    for response in group.responses
                ],
                "rewards": [
                    {"rewards": s.rewards, "reward": s.reward, "errors": s.reward_errors} for s in group.samples
                ]
                if group.number in ready
                else None,
            }
            for group in sorted([*self.plan.ready, *self.plan.under_way.values()], key=lambda group: group.number)
        ]
        waiting = [prompt.index for prompt in self.plan.waiting]
        counts = {
            "num_born": self.plan.num_born,
            "num_spares": 0 if self._spares is None else self._spares.num_drawn,
            "judged_by": self._judged_by,
        }
        return json.dumps({"waiting": waiting, "groups": groups, **counts})

    def load_state(self, text: str, prompts: Mapping[int, Prompt]) -> None:
        """Go on from what `state` returned.

        Args:
            text: Of a checkpoint.
            prompts: The training set, by row.

        Raises:
            ValueError: A row that the training set does not have.
        """
        state: dict[str, Any] = json.loads(text)
        find_prompts(rows_of(text), prompts)
        with self._lock:
            self.plan.waiting.clear()
            self.plan.under_way.clear()
            self.plan.ready.clear()
            self.plan.admit(prompts[row] for row in state["waiting"])
            self.plan.num_born = state["num_born"]
            if self._spares is not None:
                self._spares.num_drawn = state.get("num_spares", 0)
            same_judges = state.get("judged_by") in (None, self._judged_by)
            anew: list[Prompt] = []  # of groups of another kind
            for saved in state["groups"]:
                if not self._is_of_this_kind(saved["responses"]):
                    anew.append(prompts[saved["row"]])
                    continue
                responses = [self._load_response(response) for response in saved["responses"]]
                group = Group(saved["number"], prompts[saved["row"]], saved["born"], responses)
                self.plan.under_way[group.number] = group
                if saved["rewards"] is not None and same_judges:  # else they are judged again
                    group.samples = [self._sample(group, response) for response in responses]
                    for sample, judged in zip(group.samples, saved["rewards"], strict=True):
                        sample.rewards, sample.reward = judged["rewards"], judged["reward"]
                        sample.reward_errors = judged["errors"]
                    self.plan.finish(group)
            self.plan.waiting.extendleft(reversed(anew))
            if anew:
                log.warning(
                    "the checkpoint's stream has %d groups of another number of responses than %d, or of episodes where"
                    " there is no environment, or the other way round: they are sampled anew",
                    len(anew),
                    self.plan.num_generations,
                )

    def _is_of_this_kind(self, responses: list[dict[str, Any]]) -> bool:
        """Whether saved responses are as many as those of a group here, and episodes only if there is an environment.

        An episode that is not over is saved as an empty response.
        """
        begun = [saved for saved in responses if saved["token_ids"] or saved["finish_reason"] is not None]
        are_episodes = [saved.get("outcome") is not None for saved in begun]
        return len(responses) == self.plan.num_generations and are_episodes == [self._episodes is not None] * len(begun)

    def _load_response(self, saved: dict[str, Any]) -> Response:
        """Return a saved response; one that is not complete and has no room left under `max_tokens` begins anew."""
        response = Response.load(saved)
        is_full = response.finish_reason is None and len(response.token_ids) >= self._params.max_tokens
        return Response() if is_full else response
