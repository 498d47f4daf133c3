"""Hosts that differ are named."""

import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

from lightning_megatron_rl.parallel.hosts import (
    GROUPS,
    HostFacts,
    compare_hosts,
    find_unshared,
    host_table,
    interface_of,
    measure_host,
    name_hosts,
    remove_marks,
    set_mark,
)

VERSIONS = {"torch": "2.11.0", "vllm": "0.26.0"}


def facts(rank: int, ranks_per_node: int = 2, **changes: object) -> HostFacts:
    found = HostFacts(
        host=f"node-{rank // ranks_per_node}",
        rank=rank,
        local_rank=rank % ranks_per_node,
        address=f"10.0.0.{rank // ranks_per_node + 1}",
        device="cpu",
        versions=dict(VERSIONS),
        free={"/tmp": 10**11},
    )
    return replace(found, **changes)


def compare(*hosts: HostFacts, allow_different: bool = False) -> list[str]:
    return compare_hosts(hosts, 2, allow_different=allow_different)


def test_equal_hosts_are_accepted_without_a_word():
    assert compare(*(facts(rank) for rank in range(4))) == []


def test_own_facts_are_those_of_this_machine():
    found = measure_host(0, 0, "127.0.0.1", torch.device("cpu"))
    assert found.versions["torch"] == version("torch")
    assert abs(found.clock - time.time()) < 5.0
    assert compare(replace(found, clock=0.0), replace(found, rank=1, local_rank=1, clock=0.0)) == []


def test_versions_that_differ_are_refused_or_warned_of():
    hosts = [facts(0), facts(1), facts(2, versions={"torch": "2.10.0"}), facts(3, versions={"torch": "2.10.0"})]
    words = r"torch: 2\.11\.0 on node-0, 2\.10\.0 on node-1; vllm: 0\.26\.0 on node-0, not installed on node-1"
    with pytest.raises(ValueError, match=words):
        compare(*hosts)
    (warning,) = compare(*hosts, allow_different=True)
    assert "torch: 2.11.0 on node-0, 2.10.0 on node-1" in warning


def test_directory_that_is_not_shared_is_refused():
    with pytest.raises(ValueError, match=r"host node-0 is not that of the others.*node-1: /scratch/run"):
        compare(facts(0), facts(1), facts(2, unshared=["/scratch/run"]), facts(3))


def test_ranks_dealt_out_in_turn_are_refused():
    with pytest.raises(ValueError, match=r"rank 1 on node-1 is local rank 0 there.*--distribution=block"):
        compare(facts(0), facts(1, host="node-1", local_rank=0), facts(2), facts(3))


def test_gpus_clocks_and_full_disks_are_warned_of():
    hosts = [facts(0, visible="8 x A"), facts(1, visible="8 x A"), facts(2, visible="4 x A", clock=-90.0)]
    gpus, clocks = compare(*hosts)
    assert "8 x A on node-0, 4 x A on node-1" in gpus
    assert "node-1 -90 s" in clocks
    (disk,) = compare(facts(0, free={"/tmp": 5 * 10**8}), facts(1))
    assert "node-0 has 0.50 GB free in /tmp" in disk


def test_hosts_of_one_name_are_told_apart():
    names = [found.host for found in name_hosts([facts(rank, host="pod") for rank in range(4)], 2)]
    assert names == ["pod (node 0)", "pod (node 0)", "pod (node 1)", "pod (node 1)"]
    assert [found.host for found in name_hosts([facts(0), facts(2)], 2)] == ["node-0", "node-1"]


def test_mark_of_rank_zero_is_found_where_the_directory_is_shared(tmp_path: Path):
    shared, other = tmp_path / "shared", tmp_path / "other"
    other.mkdir()
    marks = set_mark([shared], "mark")
    assert find_unshared([shared], "mark", len(marks)) == []
    assert find_unshared([other], "mark", len(marks)) == [str(other)]
    remove_marks(marks)
    assert list(shared.iterdir()) == []
    # where rank 0 can write nothing, the first save says so, and better
    (tmp_path / "file").touch()
    assert set_mark([tmp_path / "file"], "mark") == []
    assert find_unshared([other], "mark", 0) == []


def test_table_names_the_ranks_of_groups():
    groups = [
        {
            **{name: [rank] for name in GROUPS},
            "tensor": [rank // 2 * 2, rank // 2 * 2 + 1],
            "data": [rank % 2, rank % 2 + 2],
        }
        for rank in range(4)
    ]
    header, *rows = host_table([facts(rank) for rank in range(4)], groups)
    assert header == ("host", "local rank", "rank", "device", *GROUPS)
    assert rows[3] == ("node-1", "1", "3", "cpu", "2, 3", "-", "-", "-", "1, 3")


def test_table_of_many_ranks_has_a_row_for_each_host():
    groups = [{name: list(range(0, 128, 8)) for name in GROUPS}] * 128
    _, *rows = host_table([facts(rank, 8) for rank in range(128)], groups)
    assert len(rows) == 16
    assert rows[1][:2] == ("node-1", "8-15")
    assert host_table([facts(0)], groups[:1])[1][-1] == "0-120 by 8"


def test_interface_of_an_address():
    name = interface_of("127.0.0.1")
    assert name in psutil.net_if_addrs()
    assert interface_of("192.0.2.1") is None  # a documentation address, nobody's
