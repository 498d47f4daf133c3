"""Weights that go to servers in buckets, over links that are slow."""

import pytest

from tests.cluster.hosts import Host
from tests.cluster.push_script import DEADLINE_S, SIZES
from tests.distributed import ROOT

RATE = 16_000_000  # bytes per second


@pytest.mark.slow
def test_a_tensor_may_take_longer_than_the_deadline(make_hosts, tmp_path):
    """A whole embedding to many servers at a time does: what has a deadline is a piece of it."""
    hosts = make_hosts(2)
    sender, receiver = hosts.hosts
    hosts.slow(sender, f"{RATE * 8 // 1_000_000}mbit")
    assert SIZES["large"] / RATE > 1.5 * DEADLINE_S
    meeting = tmp_path / "meeting"

    def start(host: Host, *arguments: str):
        return host.python(tmp_path / f"{host.name}.log", str(ROOT / "tests/cluster/push_script.py"), *arguments)

    ends = start(receiver, "receive", str(meeting)), start(sender, "send", str(meeting), receiver.address)
    codes = [end.wait(120) for end in ends]
    said = "\n".join((tmp_path / f"{host.name}.log").read_text() for host in hosts.hosts)
    assert codes == [0, 0], said
    assert "received" in said
    assert float(said.split("sent in ")[1].split()[0]) > DEADLINE_S, said
