"""Whether a model may be trained: a shipped proof covers it, or the probe finds that both libraries agree on it."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist

from lightning_megatron_rl.models.families.registry import added_files
from lightning_megatron_rl.models.verification import signature
from lightning_megatron_rl.models.verification.miniature import check_sizes, shrink
from lightning_megatron_rl.models.verification.probe import FREQUENCY_TOLERANCE, TOLERANCE
from lightning_megatron_rl.models.verification.probe_process import ProbeError, run_probe
from lightning_megatron_rl.utilities.versions import installed_versions

VerifyModel = Literal["auto", "always", "never"]
"""Probe models that no proof covers; every model; none, so that those without a proof are refused."""

_MOST_NAMED = 12  # settings that a message names
_PACKAGE = Path(__file__).resolve().parents[2]
_SOURCES = ("models", "compat")  # folders whose code computes models


def check_mode(verify: str) -> None:
    """Refuse an unknown mode.

    Raises:
        ValueError: With the known ones.
    """
    if verify not in get_args(VerifyModel):
        raise ValueError(f"train.verify_model={verify!r} is none of {', '.join(map(repr, get_args(VerifyModel)))}.")


def computed_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's overrides of Megatron's `TransformerConfig` that change what a forward pass computes.

    Raises:
        ValueError: One of a size.
    """
    changed = {name: value for name, value in overrides.items() if signature.is_computed(name)}
    for name, value in changed.items():
        if name in signature.SIZE_FIELDS and name != "window_size":
            raise ValueError(
                f"train.model_config: {name}={value!r}: sizes are those of the checkpoint's weights; remove it."
            )
    return changed


def verify_model(
    name: str, raw: dict[str, Any], config: Any, provider: Any, overrides: dict[str, Any], verify: VerifyModel
) -> None:
    """Refuse a model that Megatron may compute differently from Transformers; a collective unless a proof covers it.

    The first rank runs the probe, in a process of its own.

    Args:
        name: Of the model, for messages.
        raw: Content of its config.json.
        config: The same as Transformers' config.
        provider: Megatron-Bridge's config of it.
        overrides: The user's, of the latter, from `computed_overrides`.
        verify: When to run the probe.

    Raises:
        ValueError: No proof covers the model and it may not be probed, or the probe failed or found a difference; with
            the settings that no proof covers.
    """
    check_sizes(config)
    departures = signature.departures(signature.signature(config, provider, overrides))
    if departures == [] and verify != "always":
        return
    if verify == "never":
        raise ValueError(
            f"model {name!r} with verify_model='never': {_unproved(departures)}. Set train.verify_model='auto', which"
            " compares a miniature of the model with Transformers once (some 15 s), or change these settings."
        )
    error = _on_first_rank(partial(_probe, raw, config, overrides, verify != "always"))
    if error is not None:
        raise ValueError(f"model {name!r}: {error}. {_unproved(departures)}.")


def _unproved(departures: list[str] | None) -> str:
    if departures is None:
        return "No proof is of this family with the installed versions of " + ", ".join(signature.LIBRARIES)
    named = ", ".join(departures[:_MOST_NAMED]) + (", ..." if len(departures) > _MOST_NAMED else "")
    return f"No proof covers {named}" if departures else "A proof covers its settings with other sizes"


def _on_first_rank(probe: Callable[[Callable[[], None]], str | None]) -> str | None:
    """Return on every rank what `probe` returns on the first, or the error that it raises.

    It may take longer than the process group's timeout, so it is given what to call meanwhile.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not alone and dist.get_rank() > 0:
        done, found = False, None
        while not done:
            done, found = _first_ranks(None)
        return found

    def tell_that_it_goes_on() -> None:
        if not alone:
            _first_ranks((False, None))

    try:
        result = probe(tell_that_it_goes_on)
    except Exception as error:  # the others must not wait for it
        result = f"the check failed: {type(error).__name__}: {error}"
    if not alone:
        _first_ranks((True, result))
    return result


def _first_ranks(state: tuple[bool, str | None] | None) -> tuple[bool, str | None]:
    """Whether the first rank's probe is done, and with what result; a collective."""
    box = [state]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def _probe(
    raw: dict[str, Any],
    config: Any,
    overrides: dict[str, Any],
    use_cache: bool,
    while_waiting: Callable[[], None],
) -> str | None:
    """Why a model is refused; None if a probe, now or earlier, has found no difference."""
    small = shrink(raw, config)
    file = _cache_directory() / f"{_key(small, overrides)}.json"
    if use_cache and _is_cached(file):
        return None
    from lightning.pytorch.utilities.rank_zero import rank_zero_info  # the child imports this module, too

    rank_zero_info("Comparing a miniature of the model with Transformers, which no shipped proof covers ...")
    try:
        found = run_probe(small, overrides, while_waiting)
    except ProbeError as failure:
        return f"Megatron and Transformers could not both run a miniature of its config.json: {failure}"
    if found.agrees:
        _store(file, {"difference": found.difference, "frequencies": found.frequencies})
        return None
    what = f"log-probs of a miniature of its config.json differ by up to {found.difference:.2g} (allowed {TOLERANCE:g})"
    if found.frequencies > FREQUENCY_TOLERANCE:
        what += f", rotary frequencies by up to {found.frequencies:.2g} of themselves"
    return f"Megatron computes it differently from Transformers: {what}"


# ---- what earlier probes have found ----------------------------------------------------------------------------------


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "lightning_megatron_rl" / "probes"


def _key(small: dict[str, Any], overrides: dict[str, Any]) -> str:
    """Name of all that a probe's result depends on."""
    described = {name: repr(value) for name, value in overrides.items()}
    parts = [small, described, installed_versions(("torch", *signature.LIBRARIES)), _source_hash()]
    parts += [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in added_files()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _source_hash() -> str:
    """Hash of the code that computes models."""
    found = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def _is_cached(file: Path) -> bool:
    """Whether an earlier probe found no difference; a damaged file counts as none."""
    try:
        found = json.loads(file.read_bytes())
        return 0 <= found["difference"] <= TOLERANCE and 0 <= found["frequencies"] <= FREQUENCY_TOLERANCE
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _store(file: Path, content: dict[str, float]) -> None:
    """Write at once or not at all; without a place to write the next run probes again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=".partial-")
        with os.fdopen(descriptor, "w") as stream:
            json.dump(content, stream)
        os.replace(partial, file)
    except OSError as error:
        from lightning.pytorch.utilities.rank_zero import rank_zero_warn

        rank_zero_warn(f"The result of comparing the model with Transformers is not kept: {error}")
