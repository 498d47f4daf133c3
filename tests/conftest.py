"""Fixtures shared by the whole suite, and the rules every test is held to."""

import gc
import logging
import os
import signal
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does; and so no test changes the environment
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# not Transformers or torch: the process that only hands out tests, where several run, reads this file too
from tests.distributed import STARTUP, WorkerPool

if STARTUP not in (_paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, *_paths]))

pytest_plugins = ["tests.policing"]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job: tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(50_000)  # Python's 700 cost a quarter of the time of every large import


def pytest_collection_finish() -> None:
    """Leave modules and tests out of later collections of garbage."""
    gc.collect()
    gc.freeze()


SHARE_A_PROCESS = ("rollout",)  # folders whose files share engines


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, without which tests run one after the other
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep what shares fixtures in one process where several run (`-n 2`): a file, or a whole folder."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # what wants a GPU to itself comes last

    class Folders(LoadScopeScheduling):
        # not pytest-xdist's groups: with pytest 9.2 they are ignored without a word (pytest-xdist issue 1386)
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            if file.parent.name == "gpu" and file.name != "test_memory.py":  # whose tests take turns with all others
                return nodeid if file.name == "test_layouts.py" else nodeid.partition("[")[0]  # each takes 40 s there
            return file.parent.name if file.parent.name in SHARE_A_PROCESS else str(file)

    return Folders(config, log)


@pytest.fixture(autouse=True)
def _console_is_given_back() -> Iterator[None]:
    """Undo what the command line does to a process that it thinks its own: records and warnings go to its console."""
    shown = warnings.showwarning
    yield
    console = sys.modules.get("lightning_megatron_rl.utilities.console")
    if console is not None and console._current is not None:
        logging.root.removeHandler(console._current)
        console._current = None
        warnings.showwarning = shown


@pytest.fixture(scope="session")
def tokenizer():
    """A character tokenizer with a chat template."""
    from tests.tiny_models import make_tokenizer

    return make_tokenizer()


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Qwen3 (fp32) and its tokenizer, as `save_pretrained` writes it."""
    from tests.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def broken_model(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights are NaN: reading them raises another error than the one expected."""
    from tests.tiny_models import save_without_numbers

    return str(save_without_numbers(qwen3_dir, tmp_path_factory.mktemp("broken") / "model"))


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """Up to eight warm gloo processes for the whole run: `worker_pool.run(function, *args, world_size=2)`."""
    from tests.policing import keep_process  # a plugin: pytest must be the first to import it

    pool = WorkerPool(8, on_start=keep_process)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 whose input and output embeddings are one weight."""
    from tests.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tied"), "qwen2_tied")


@pytest.fixture(scope="session")
def qwen3_moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Qwen3-MoE (fp32, four experts, two per token) and its tokenizer."""
    from tests.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture(scope="session")
def deepseek_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random DeepSeek-V3 (fp32): two dense layers, then two with experts, whose routers have an expert bias."""
    from tests.tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3_plain")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random checkpoints by family, written once."""
    from tests.tiny_models import save_tiny_model

    return cache(lambda family: save_tiny_model(tmp_path_factory.mktemp("models") / family, family))


@pytest.fixture(scope="session")
def odd_vocabulary(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with 127 tokens, which no tensor-parallel size but one divides."""
    directory = tmp_path_factory.mktemp("odd") / "qwen2"
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2_tied"), dtype=torch.float32)
    model.resize_token_embeddings(127)
    model.save_pretrained(directory)
    return directory
