"""What verl's processes load for a comparison: an agent loop of given lengths, a reward, and notes of the work done.

verl imports this module in each of its processes (``VERL_USE_EXTERNAL_MODULES=verl_worker``); verl_peer.py sets the
variables that it reads. Notes are JSON lines in ``VERL_PEER_NOTES``, one file for each process.
"""

import json
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from common import token_reward
from response_lengths import LongTail
from work_done import optimizer_work

NOTES = "VERL_PEER_NOTES"
LONG_TAIL = "VERL_PEER_LONG_TAIL"  # "1": lengths have a long tail
POLL = "VERL_PEER_POLL_S"  # seconds between two looks at the buffer; verl's own: 2
SPECIAL = 3  # tokens before the first word of the benchmarks' tokenizer
_PROJECTIONS = ("TERowParallelLinear", "RowParallelLinear")  # attention's and the MLP's last product


def note(kind: str, **values: Any) -> None:
    """Append a line to this process's notes."""
    path = Path(os.environ[NOTES]) / f"{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\n")


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text of the benchmarks' tokenizer.

    Example:
        ``token_ids("t17 t4") == [20, 7]``
    """
    return [int(word[1:]) + SPECIAL for word in text.split() if word[1:].isdigit()]


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Reward a response as all sides do."""
    return token_reward(token_ids(solution_str))


def make_agent_loop() -> type:
    """Return the class of the agent loop: one turn of so many tokens, whatever is sampled."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

    class TokensAgentLoop(AgentLoopBase):  # type: ignore[misc, valid-type]
        """One turn whose prompt is given as words; EOS is ignored."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["hf_model_type"] = None  # Qwen's builder wants a tokenizer with a line feed
            super().__init__(*args, **kwargs)

        async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
            prompt = token_ids(kwargs["raw_prompt"][0]["content"])
            place = int(kwargs["session_id"])
            limit = int(self.rollout_config.response_length)
            length = LongTail(limit)(prompt, place) if os.environ[LONG_TAIL] == "1" else limit
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt,
                sampling_params={**sampling_params, "max_tokens": length, "ignore_eos": True},
            )
            ids = output.token_ids
            index = int(kwargs["extra_info"]["index"])
            note("sample", index=index, place=place, prompt=prompt, response_tokens=len(ids))
            found = AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=ids,
                response_mask=[1] * len(ids),
                response_logprobs=output.log_probs,
                num_turns=2,
                metrics={},
                extra_fields=output.extra_fields,
            )
            found.extra_fields.update({"turn_scores": [], "tool_rewards": []})
            return found

    return TokensAgentLoop


def __getattr__(name: str) -> Any:
    """Make the agent loop's class when verl asks for it: most of its processes need none."""
    if name != "TokensAgentLoop":
        raise AttributeError(name)
    globals()[name] = make_agent_loop()
    return globals()[name]


class _Anything:
    """Stands for each class of a package that is imported and not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  (of a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class StandIn(MetaPathFinder, Loader):
    """Finds megatron.energon, which Megatron-Bridge's settings of training import: data of pretraining, unused here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for that package and what is in it."""
        wanted = name == "megatron.energon" or name.startswith("megatron.energon.")
        return ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return an empty module that has every class."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: it is empty."""


def note_numbers() -> None:
    """Note in which numbers Megatron trains, at its first optimizer step: read from the run, not from its settings."""
    from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

    dtypes: set[str] = set()

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if type(module).__name__ in _PROJECTIONS:
            product = output[0] if isinstance(output, tuple) else output
            if product.requires_grad:
                dtypes.add(str(product.dtype).removeprefix("torch."))

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    plain = MixedPrecisionOptimizer.step_with_ready_grads  # chained optimizers call it, too

    def step(self: MegatronOptimizer) -> Any:
        result = plain(self)
        if dtypes:
            handle.remove()
            note("numbers", compute_dtype=" and ".join(sorted(dtypes)), **optimizer_work([self.optimizer]))
            dtypes.clear()
        note("step")
        return result

    MixedPrecisionOptimizer.step_with_ready_grads = step  # type: ignore[method-assign]


def poll_more_often(seconds: float) -> None:
    """Have verl's buffer looked at more often than every two seconds, which no setting of its own does."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    plain = ReplayBuffer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{"poll_interval": seconds, **kwargs})

    ReplayBuffer.__init__ = init  # type: ignore[method-assign]


if NOTES in os.environ:  # in verl's processes, not where tests import this
    sys.meta_path.append(StandIn())
    if os.environ.get(POLL):
        poll_more_often(float(os.environ[POLL]))
    if os.environ.get("RANK") is not None:  # workers of the trainer
        note_numbers()
