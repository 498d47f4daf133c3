"""Places for processes on a Ray cluster. Ray is an optional package: nothing else of the project imports it."""

from collections.abc import Mapping, Sequence
from typing import Any

INSTALL = "pip install 'lightning-megatron-rl[ray]'"


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(f"Ray is not installed here ({error}): {INSTALL}") from error
    return ray


def connect(*, show_output: bool = True) -> Any:
    """Join the cluster that RAY_ADDRESS, or Ray's own file on this host, names; return the module `ray`.

    Args:
        show_output: Print here what actors print.

    Raises:
        RuntimeError: Ray is missing, there is no cluster, or it refuses the token.
    """
    ray = import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="warning", log_to_driver=show_output)
        except ConnectionError as error:
            raise RuntimeError(
                f"no Ray cluster can be joined from here: {error}. Start one (`ray start --head`), set RAY_ADDRESS, and"
                " use the cluster's token (RAY_AUTH_TOKEN_PATH)."
            ) from error
    return ray


def check_resources(asked: Mapping[str, float], count: int, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse what a cluster cannot give, however long one waits.

    Args:
        asked: Of one node, such as {"CPU": 4, "GPU": 8}.
        count: How many nodes.
        nodes: What each node of the cluster has in all.

    Raises:
        ValueError: Says what is asked, and what is there.
    """
    fitting = [node for node in nodes if all(node.get(name, 0.0) >= amount for name, amount in asked.items())]
    if len(fitting) >= count:
        return
    raise ValueError(
        f"the Ray cluster has {len(fitting)} node(s) with {_amounts(asked)}, and {count} are asked for."
        f" {_what_there_is(asked, nodes)}"
    )


def check_parts(asked: Mapping[str, float], count: int, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse more parts of nodes than a cluster can give, however long one waits; a node may give several.

    Args:
        asked: Of a part, such as {"CPU": 2, "GPU": 2}.
        count: How many parts.
        nodes: What each node of the cluster has in all.

    Raises:
        ValueError: Says what is asked, and what is there.
    """
    # Ray counts in ten-thousandths; 1.0 // 0.1 is 9
    fitting = [min(int(round(node.get(name, 0.0) / amount, 4)) for name, amount in asked.items()) for node in nodes]
    if sum(fitting) >= count:
        return
    least = "no node has that much" if not any(fitting) else f"there is room for {sum(fitting)}"
    raise ValueError(
        f"{count} x ({_amounts(asked)}), each on one node, are asked of the Ray cluster, and {least}."
        f" {_what_there_is(asked, nodes)}"
    )


def _what_there_is(asked: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    there = "; ".join(_amounts({name: node.get(name, 0.0) for name in asked}) for node in nodes) or "none"
    return f"Its {len(nodes)} node(s) have: {there}. Ask for less, or start more nodes (`ray start --address ...`)."


def place_on_nodes(asked: Mapping[str, float], count: int, wait_s: float) -> Any:
    """Reserve a part of each of `count` different nodes; return the placement group, ready.

    Args:
        asked: Of one node.
        count: How many nodes.
        wait_s: For others to give back what they have. # seconds

    Raises:
        ValueError: The cluster's nodes have less in all.
        RuntimeError: Others have it for longer than that.
    """
    check_resources(asked, count, living_nodes())
    return reserve(asked, count, "STRICT_SPREAD", wait_s)


def living_nodes() -> list[dict[str, float]]:
    """Return what each node of the cluster has in all."""
    return [node["Resources"] for node in import_ray().nodes() if node["Alive"]]


def reserve(asked: Mapping[str, float], count: int, strategy: str, wait_s: float) -> Any:
    """Reserve parts of nodes; return the placement group, ready.

    Args:
        asked: Of a part.
        count: How many parts.
        strategy: Ray's: "STRICT_SPREAD" puts each on a node of its own, "SPREAD" does as far as it can.
        wait_s: For others to give back what they have. # seconds

    Raises:
        RuntimeError: Others have it for longer than that.
    """
    ray = import_ray()
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(asked)] * count, strategy=strategy)
    if not group.wait(wait_s):
        remove_placement_group(group)
        free = ray.available_resources()
        nodes = "node(s) with" if strategy == "STRICT_SPREAD" else "times"
        raise RuntimeError(
            f"{count} {nodes} {_amounts(asked)} were not free for {wait_s:.0f} s. Free in the whole cluster:"
            f" {_amounts({name: free.get(name, 0.0) for name in asked})}; `ray status` says who has the rest."
        )
    return group


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
