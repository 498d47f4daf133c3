"""`RolloutStream`: keeps an engine at work on a `StreamPlan`, rewards groups that are complete, gives out batches.

It lives in one process, the leader of a replica. `StreamPlan` says what is sampled when; an engine samples; nothing
here knows of the trainer.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_megatron_rl.rollout.protocol import (
    Progress,
    ResponsesLostError,
    SamplingParams,
    StreamingEngine,
    StreamRequest,
    derive_seed,
)
from lightning_megatron_rl.rollout.stream import Group, Response, StreamPlan
from lightning_megatron_rl.rollout.watch import StreamWatch
from lightning_megatron_rl.sample import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

POLL_S = 0.05  # between two looks at an engine that samples in the background
WAIT_S = 1.0  # longest wait within an engine that samples only then
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
        watch: Follows the number of groups, and the rewards.
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
        watch: StreamWatch | None = None,
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._params = params
        self._tokenizer = tokenizer
        self._seed = seed
        self._watch = watch or StreamWatch()
        self._reward = self._watch.timed(reward)
        self._background = background
        self._version = 0
        self._names: dict[str, Response] = {}  # what the engine has
        self._judged: dict[int, Future[None]] = {}  # groups whose rewards are computed, by number
        self._judge = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._told_at = 0.0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._ended = False
        self._is_held = False
        self._error: BaseException | None = None

    # ---- batches ---------------------------------------------------------------------------------------------------

    def next_batch(self, prompts: list[Prompt], version: int) -> list[Sample]:
        """Admit `prompts` and wait for the batch that `version` of the policy is trained on; its groups, rewarded.

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
        if self._background:
            self._start_thread()
        with self._changed:
            while not self.plan.can_take(version):
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if not self.plan.under_way and not self.plan.waiting:
                    raise RuntimeError(f"version {version} has no batch: {self.plan.describe()}")
                if self._background:
                    self._changed.wait(POLL_S)
                else:
                    self._turn(WAIT_S)
            groups = self.plan.take(version)
            self._watch.note_batch(self.plan, version)
            return [sample for group in groups for sample in group.samples]

    def _turn(self, wait_s: float, *, begins: bool = True) -> None:
        """Give the engine what may begin, take what it has sampled, and reward what is complete."""
        try:
            if begins:
                self.plan.begin(self._version)
            self._submit()
            self._watch.note(self.plan)
            now = time.monotonic()
            everything = now - self._told_at > TELL_S
            if everything:
                self._told_at = now
            waits = wait_s if not self._judged else min(wait_s, POLL_S)
            self._add(self._engine.collect(waits, everything=everything))
        except ResponsesLostError:
            self._names.clear()  # they go on from what is known of them
        if not self._names and self._judged:
            time.sleep(POLL_S / 10)  # only rewards are waited for
        self._finish_groups()

    def _add(self, news: list[Progress]) -> None:
        for progress in news:
            if (response := self._names.get(progress.name)) is not None:  # else its group was dropped
                response.add(progress)

    def _submit(self) -> None:
        """Give the engine all responses of groups under way that it does not have."""
        requests = []
        submitted = {id(response) for response in self._names.values()}
        fresh: dict[str, Response] = {}
        for group in self.plan.under_way.values():
            for place, response in enumerate(group.responses):
                if response.finish_reason is None and id(response) not in submitted:
                    request = self._request(group, place, response)
                    requests.append(request)
                    fresh[request.name] = response
        if requests:
            self._engine.submit(requests, self._params)
            self._names |= fresh

    def _request(self, group: Group, place: int, response: Response) -> StreamRequest:
        prompt, done = group.prompt, len(response.token_ids)
        if not done:  # as a rollout that is sampled at once
            seed = derive_seed(self._seed, group.born, prompt.index, prompt.dataset) + place
        else:  # the noise of the first tokens must not come again
            seed = derive_seed(self._seed, self._version, prompt.index, f"{prompt.dataset}/{place}/{done}")
        name = f"{group.number}/{place}/{done}/{self._version}"
        return StreamRequest(name, prompt.token_ids + response.token_ids, seed, self._params.max_tokens - done)

    def _finish_groups(self) -> None:
        """Send complete groups to be rewarded; those that are, are ready."""
        self._names = {name: response for name, response in self._names.items() if response.finish_reason is None}
        for group in list(self.plan.under_way.values()):
            future = self._judged.get(group.number)
            if future is None:
                if group.is_complete:
                    group.samples = [self._sample(group, response) for response in group.responses]
                    self._judged[group.number] = self._judge.submit(self._reward, group.samples)
            elif future.done():
                del self._judged[group.number]
                future.result()
                self.plan.finish(group)
        self._watch.note(self.plan)
        self._changed.notify_all()

    def _sample(self, group: Group, response: Response) -> Sample:
        assert response.finish_reason is not None
        return Sample(
            prompt=group.prompt,
            response_ids=response.token_ids,
            response_logprobs=response.logprobs,
            response=str(self._tokenizer.decode(response.token_ids, skip_special_tokens=True)),
            finish_reason=response.finish_reason,
            weight_version=response.segments[0][0],
            segments=response.segments,
        )

    def _forget(self, group: Group) -> None:
        self._names = {name: kept for name, kept in self._names.items() if all(kept is not r for r in group.responses)}
        self._judged.pop(group.number, None)

    # ---- pauses ----------------------------------------------------------------------------------------------------

    def finish_under_way(self) -> None:
        """Sample what is under way to its end, and begin nothing new meanwhile."""
        with self._lock:
            while not all(group.is_complete for group in self.plan.under_way.values()):
                self._turn(WAIT_S, begins=False)

    def put_away(self) -> None:
        """Take everything out of the engine, which may sleep or do other things then; `next_batch` goes on with it."""
        with self._lock:
            self._is_held = True
            with suppress(ResponsesLostError):  # they go on from what is known of them
                self._add(self._engine.withdraw())
            self._names.clear()

    def close(self) -> None:
        """End the threads. What is under way is lost, unless `state` was asked before."""
        self._ended = True
        if self._thread is not None:
            self._thread.join(timeout=END_S)  # longer only within a call that the engine's `close` cuts off
            self._thread = None
        self._judge.shutdown(wait=False, cancel_futures=True)
        if self.plan.ready or self.plan.under_way:
            log.info("the stream of rollouts ends with %s", self.plan.describe())

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

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """Return as JSON what was admitted and not yet trained on: prompts by their rows, responses by their tokens."""
        with self._lock:
            try:
                self._add(self._engine.collect(0.0, everything=True))
            except ResponsesLostError:
                self._names.clear()
            ready = {group.number for group in self.plan.ready}
            groups = [
                {
                    "number": group.number,
                    "row": group.prompt.index,
                    "born": group.born,
                    "responses": [asdict(response) for response in group.responses],
                    "rewards": [
                        {"rewards": s.rewards, "reward": s.reward, "errors": s.reward_errors} for s in group.samples
                    ]
                    if group.number in ready
                    else None,
                }
                for group in sorted([*self.plan.ready, *self.plan.under_way.values()], key=lambda group: group.number)
            ]
            waiting = [prompt.index for prompt in self.plan.waiting]
            return json.dumps({"waiting": waiting, "groups": groups, "num_born": self.plan.num_born})

    def load_state(self, text: str, prompts: Mapping[int, Prompt]) -> None:
        """Go on from what `state` returned.

        Args:
            text: Of a checkpoint.
            prompts: The training set, by row.

        Raises:
            ValueError: A row that the training set does not have.
        """
        state: dict[str, Any] = json.loads(text)
        rows = [*state["waiting"], *(group["row"] for group in state["groups"])]
        if missing := [row for row in rows if row not in prompts]:
            raise ValueError(
                f"the checkpoint's stream of rollouts holds the training row {missing[0]}, which the training set does"
                " not have: resume with the data of the run, or start from exported weights instead of ckpt_path"
            )
        with self._lock:
            self.plan.waiting.clear()
            self.plan.under_way.clear()
            self.plan.ready.clear()
            self.plan.admit(prompts[row] for row in state["waiting"])
            self.plan.num_born = state["num_born"]
            for saved in state["groups"]:
                responses = [
                    Response(r["token_ids"], r["logprobs"], [(v, n) for v, n in r["segments"]], r["finish_reason"])
                    for r in saved["responses"]
                ]
                group = Group(saved["number"], prompts[saved["row"]], saved["born"], responses)
                self.plan.under_way[group.number] = group
                if saved["rewards"] is not None:
                    group.samples = [self._sample(group, response) for response in responses]
                    for sample, judged in zip(group.samples, saved["rewards"], strict=True):
                        sample.rewards, sample.reward = judged["rewards"], judged["reward"]
                        sample.reward_errors = judged["errors"]
                    self.plan.finish(group)
