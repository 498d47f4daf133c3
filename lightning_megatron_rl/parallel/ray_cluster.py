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


def connect() -> Any:
    """Join the cluster that RAY_ADDRESS, or Ray's own file on this host, names; return the module `ray`.

    Raises:
        RuntimeError: Ray is missing, there is no cluster, or it refuses the token.
    """
    ray = import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="warning")
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
    there = "; ".join(_amounts({name: node.get(name, 0.0) for name in asked}) for node in nodes) or "none"
    raise ValueError(
        f"the Ray cluster has {len(fitting)} node(s) with {_amounts(asked)}, and {count} are asked for. Its"
        f" {len(nodes)} node(s) have: {there}. Ask for less, or start more nodes (`ray start --address ...`)."
    )


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
    ray = import_ray()
    from ray.util.placement_group import placement_group, remove_placement_group

    check_resources(asked, count, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    group = placement_group([dict(asked)] * count, strategy="STRICT_SPREAD")
    if not group.wait(wait_s):
        remove_placement_group(group)
        free = ray.available_resources()
        raise RuntimeError(
            f"{count} node(s) with {_amounts(asked)} were not free for {wait_s:.0f} s. Free in the whole cluster:"
            f" {_amounts({name: free.get(name, 0.0) for name in asked})}; `ray status` says who has the rest."
        )
    return group


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
