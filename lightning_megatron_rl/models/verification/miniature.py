"""A miniature of a Hugging Face config: the same settings, fewer and narrower layers.

Sizes shrink; everything else stays as it is in config.json, also keys that Transformers does not know. Relations
between sizes that may change what is computed stay, too: heads per key-value head, a square or twice as wide matrix, a
width that its heads do not divide, all experts chosen, experts per group, the pattern of layers.
"""

from math import lcm
from typing import Any

from lightning_megatron_rl.models.families.registry import FAMILIES

HIDDEN = 64  # width, where heads do not fix it
VOCABULARY = 128
WINDOW = 24  # longest sliding window, in tokens: shorter than the probe's sequences
KEY_VALUE_HEADS = 2
LAYERS = 2
MOST_PATTERN = 12  # layers after which a pattern must repeat to count as one


def shrink(raw: dict[str, Any], config: Any, most_head_dim: int | None = None) -> dict[str, Any]:
    """Return the miniature of a config.json.

    Args:
        raw: Content of config.json.
        config: The same as Transformers' config object, with defaults filled in.
        most_head_dim: Widest head where all heads together are as wide as the model. None leaves heads as they are.

    Raises:
        ValueError: A size is not a positive number, or the family is unknown.
    """
    family = FAMILIES[config.model_type]
    sizes = _Sizes(config)
    small = dict(raw)
    small["architectures"] = [family.architecture]
    for name in ("auto_map", "quantization_config", "_name_or_path"):  # the miniature has plain weights and no code
        small.pop(name, None)
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % groups == 0:
        kept = min(groups, KEY_VALUE_HEADS)
        small["num_attention_heads"], small["num_key_value_heads"] = heads // groups * kept, kept
    small["vocab_size"] = min(sizes["vocab_size"], VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        small[name] = _token(getattr(config, name, None), small["vocab_size"])
    small.update(_hidden_size(sizes, small, raw, most_head_dim))
    anchors = [(sizes["hidden_size"], small["hidden_size"])]
    for name, target in (("intermediate_size", 48), ("moe_intermediate_size", 40)):
        if sizes.get(name):
            small[name] = related(sizes[name], target, anchors)
            anchors.append((sizes[name], small[name]))
    for name, target in (("q_lora_rank", 24), ("kv_lora_rank", 32)):
        if sizes.get(name):
            small[name] = related(sizes[name], target, anchors)
            anchors.append((sizes[name], small[name]))
    if family.experts is not None:
        small.update(_experts(sizes, family.experts.count, raw))
    if sizes.get("sliding_window"):
        small["sliding_window"] = min(sizes["sliding_window"], WINDOW)
    small.update(_layers(sizes, raw, config, family.dense_layers))
    return small


class _Sizes:
    """Sizes of a config by name, checked to be positive numbers."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, name: str) -> int | None:
        value = getattr(self._config, name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"config.json has {name}={value!r}: it is a size, a whole number that is not negative")
        return value

    def __getitem__(self, name: str) -> int:
        value = self.get(name)
        if not value:
            raise ValueError(f"config.json has {name}={value!r}: it is a size, at least 1")
        return value


def check_sizes(config: Any) -> None:
    """Refuse a config without the sizes that every model has.

    Raises:
        ValueError: One is not a positive number.
    """
    sizes = _Sizes(config)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        sizes[name]


def head_dim(config: Any) -> int:
    """Return the width of a head: the config's own, or that of an equal part of the hidden size."""
    own = getattr(config, "head_dim", None)
    return int(own) if own else int(config.hidden_size) // int(config.num_attention_heads)


def _hidden_size(
    sizes: _Sizes, small: dict[str, Any], raw: dict[str, Any], most_head_dim: int | None
) -> dict[str, int]:
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    width = sizes.get("head_dim") or hidden // heads
    if "num_key_value_heads" not in small or sizes.get("qk_nope_head_dim"):  # latent attention has widths of its own
        return {"hidden_size": min(hidden, HIDDEN)}
    of_heads = small["num_attention_heads"] * width
    if hidden % heads and not raw.get("head_dim"):
        return {"hidden_size": of_heads + min(hidden % heads, small["num_attention_heads"] - 1)}
    if hidden == heads * width:
        width = min(width, most_head_dim or width)
        own = {"head_dim": width} if raw.get("head_dim") else {}
        return {"hidden_size": small["num_attention_heads"] * width} | own
    fallback = min(hidden, HIDDEN)
    return {"hidden_size": fallback + 8 if fallback == of_heads else fallback}


def related(value: int, target: int, anchors: list[tuple[int, int]]) -> int:
    """Return a small size that is to small anchors as `value` is to theirs: equal, half, twice, or none of these.

    Args:
        value: The size.
        target: The small one where it is related to none; made larger until it is not by accident either.
        anchors: Pairs of a size and its small one; the first that `value` is related to counts.

    Example:
        ``related(2048, 48, [(4096, 64)]) == 32``
    """
    for size, small in anchors:
        if value == size:
            return small
        if value == 2 * size:
            return 2 * small
        if 2 * value == size:
            return small // 2
    taken = {related for _, small in anchors for related in (small, 2 * small, small // 2)}
    target = min(value, target)
    while target in taken:
        target += 8
    return target


def _token(value: Any, vocab_size: int) -> Any:
    """A special token that the small vocabulary has."""
    if isinstance(value, list):
        return [_token(item, vocab_size) for item in value]
    return min(value, vocab_size - 1) if isinstance(value, int) else value


def _experts(sizes: _Sizes, name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Few experts, but more than are chosen unless all are; every group has its share of those chosen and one more."""
    experts, chosen = sizes[name], sizes["num_experts_per_tok"]
    groups, chosen_groups = sizes.get("n_group"), sizes.get("topk_group")
    if groups and chosen_groups and name == "n_routed_experts" and experts % groups == 0:
        few = groups * min(experts // groups, max(2, -(-chosen // chosen_groups) + 1))
    else:
        few = min(experts, max(4, chosen + 2))
    few = chosen if chosen == experts else few
    aliases = ("num_experts", "num_local_experts", "n_routed_experts")
    own = [alias for alias in aliases if raw.get(alias) == experts] or [name]
    return dict.fromkeys(own, few)


def pattern(values: list[Any]) -> list[Any]:
    """Return the shortest start of a list that repeats to the end of it; all of it if there is none short enough.

    Example:
        ``pattern(["a", "b", "a", "b", "a"]) == ["a", "b"]``
    """
    for length in range(1, MOST_PATTERN + 1):
        if all(value == values[index % length] for index, value in enumerate(values)):
            return values[:length]
    return values


def per_layer(config: Any) -> dict[str, list[Any]]:
    """Return the lists of a config that have an entry per layer."""
    layers = config.num_hidden_layers
    lists = {name: value for name, value in config.to_dict().items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) == layers and name != "architectures"}


def _layers(sizes: _Sizes, raw: dict[str, Any], config: Any, dense_layers: str | None) -> dict[str, Any]:
    """Fewer layers, of every kind that there is; all of them where their order follows no pattern."""
    layers = sizes["num_hidden_layers"]
    lists = per_layer(config)
    repeats = lcm(*(len(pattern(values)) for values in lists.values()))
    if repeats > MOST_PATTERN:
        return {}
    few = min(layers, LAYERS if repeats == 1 else repeats + 1)  # where it begins anew shows, too
    found: dict[str, Any] = {}
    dense = sizes.get(dense_layers) if dense_layers else None
    if dense_layers and dense is not None:  # some dense layers, then some with experts
        kept = min(dense, 1)
        few = min(dense, LAYERS) if dense >= layers else max(few, kept + min(layers - dense, LAYERS))
        found[dense_layers] = few if dense >= layers else kept
    found["num_hidden_layers"] = few
    return found | {name: raw[name][:few] for name in lists if isinstance(raw.get(name), list)}
