"""The loop that answers the trainer's messages."""

import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe

import pytest

from lightning_megatron_rl.rollout.vllm.worker import serve

DEADLINE_S = 20.0


class Tokens:
    """Stands for what a rollout returns, or is asked for."""


def test_the_samplers_process_does_without_the_trainers_libraries():
    """They take seconds of its start: Lightning and Megatron are the trainer's; vLLM comes later."""
    code = "import sys, lightning_megatron_rl.rollout.vllm.worker; print(*{name.split('.')[0] for name in sys.modules})"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert "lightning_megatron_rl" in imported.stdout.split()
    assert not {"lightning", "megatron", "transformers", "vllm", "datasets"} & set(imported.stdout.split())


def test_nothing_of_a_message_is_held_while_the_next_is_waited_for():
    """A weight sync would drop the tokens of the rollout before it, which takes longer than the sync."""
    ours, theirs = Pipe()
    dropped = {"answer": threading.Event(), "values": threading.Event()}

    def generate(asked):
        tokens = Tokens()
        weakref.finalize(asked, dropped["values"].set)
        weakref.finalize(tokens, dropped["answer"].set)
        return tokens

    thread = threading.Thread(target=serve, args=(theirs, {"generate": generate}), daemon=True)
    thread.start()
    ours.send(("generate", Tokens()))
    kind, tokens = ours.recv()
    assert kind == "ok"
    assert isinstance(tokens, Tokens)
    for name, event in dropped.items():
        assert event.wait(DEADLINE_S), name
    ours.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("name", ["fails", "nobody has"])
def test_what_goes_wrong_is_answered_and_the_next_message_is_taken(name):
    ours, theirs = Pipe()
    calls = {"fails": lambda: 1 / 0, "works": lambda: 3}
    thread = threading.Thread(target=serve, args=(theirs, calls), daemon=True)
    thread.start()
    ours.send((name,))
    kind, text = ours.recv()
    assert kind == "error"
    assert ("ZeroDivisionError" if name == "fails" else "KeyError: 'nobody has'") in text
    ours.send(("works",))
    assert ours.recv() == ("ok", 3)
    ours.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_what_was_done_comes_with_each_answer():
    ours, theirs = Pipe()
    told = iter([["sampling"], ["update"]])
    calls, news = {"works": lambda: 3, "fails": lambda: 1 / 0}, lambda: next(told)
    thread = threading.Thread(target=serve, args=(theirs, calls, lambda: False, news), daemon=True)
    thread.start()
    ours.send(("works",))
    assert ours.recv() == ("ok", 3, ["sampling"])
    ours.send(("fails",))
    kind, _, done = ours.recv()
    assert (kind, done) == ("error", ["update"])
    ours.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
