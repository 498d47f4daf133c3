"""Weights over NCCL between a rank and a worker that share one GPU as two hosts: gloo's bytes, and workers that go."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_megatron_rl.verify import pool
from lightning_megatron_rl.weights.transports import direct, lines, nccl
from tests.distributed import WorkerError, WorkerPool, free_port
from tests.policing import keep_process
from tests.weights.test_direct import MOVES, Model, push_and_move
from tests.weights.test_lines import (
    AT_ONCE,
    HOST,
    Seen,
    Setting,
    check_in_place,
    check_same,
    push_both_ways,
    push_in_place,
    push_with_a_failure,
)

FOR_NCCL = AT_ONCE + lines.ABORT_S + lines.NAME_S  # seconds, until a failure is raised


@pytest.fixture
def two_hosts() -> Iterator[WorkerPool]:
    """Two processes, each of which is a host to NCCL, so that it lets them share a GPU; they may be killed."""
    workers = WorkerPool(2, on_start=keep_process, nodes=2)
    yield workers
    workers.close()


def push_and_measure(setting: Setting) -> tuple[Seen, dict[str, float]]:
    """Push both ways, and see what each carries, in bytes per second."""
    rates: dict[str, float] = {}
    send = direct.RankEnd.send

    def spy(self: direct.RankEnd, held: object) -> tuple[list[int], int, float]:
        came = send(self, held)  # type: ignore[arg-type]
        name = type(self._lines).__name__
        rates[name] = max(rates.get(name, 0.0), sum(came[0]) / came[2])
        return came

    with mock.patch.object(direct.RankEnd, "send", spy):
        return push_both_ways(setting, None), rates


@pytest.mark.parametrize("rows", [48, 2**17], ids=["small", "large"])
def test_values_are_those_of_gloo_bit_by_bit(two_hosts, rows):
    """Messages of some KiB, then of 16 MiB."""
    setting = Setting(1, 1, free_port(), device="cuda:0", rows=rows, limit=4096 if rows < 100 else 2**24)
    found = two_hosts.run(push_and_measure, setting, world_size=2, init_process_group=False)
    check_same([seen for seen, _ in found], setting)
    assert all(not seen.warnings and not seen.threads for seen, _ in found)  # or gloo was taken
    rates = found[0][1]
    assert rates.keys() == {"GlooLines", "NCCLLines"}
    print(", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()))


@pytest.mark.parametrize("rows", [48, 2**17], ids=["small", "large"])
def test_messages_are_copied_into_the_model_as_they_come(two_hosts, rows):
    """Those of the next message come meanwhile, into the other half of the memory."""
    setting = Setting(1, 1, free_port(), device="cuda:0", rows=rows, limit=4096 if rows < 100 else 2**23)
    check_in_place(two_hosts.run(push_in_place, setting, None, world_size=2, init_process_group=False), setting)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_weights_are_sent_from_where_they_are_now(move):
    """A kernel packs them, whose table has addresses: over gloo, since it is the rank's part alone."""
    with closing(Model(torch.device("cuda:0"))) as model:
        push_and_move(model, move)


def test_a_killed_worker_is_named_at_once(two_hosts):
    """NCCL waits for it, the rank does not."""
    setting = Setting(1, 1, free_port(), device="cuda:0", limit=256)
    patient = mock.patch.object(pool, "GRACE", 2 * FOR_NCCL)  # NCCL may take long to abort: the rank tells of it then
    with patient, pytest.raises(WorkerError) as caught:
        two_hosts.run(push_with_a_failure, setting, "killed", None, world_size=2, init_process_group=False)
    story = caught.value.raised[0][1]
    print(story)
    assert float(story.partition(" s")[0]) < FOR_NCCL
    assert f"worker 0 of the server on {HOST} is gone" in story


def watchdogs() -> int:
    """Threads of torch's that watch groups of NCCL in this process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_nccl_watchdg")


def watchdogs_of_groups() -> tuple[int, int, int]:
    """How many there are before there is a group, with a group of the weights, and with one of torch's own."""
    store, device = dist.HashStore(), torch.device("cuda:0")
    before = watchdogs()
    ours = nccl.NCCLGroup(dist.PrefixStore("ours", store), 0, 1, device)
    with_ours = watchdogs()
    torch_s = dist.ProcessGroupNCCL(dist.PrefixStore("torch's", store), 0, 1)
    with_torch_s = watchdogs()
    ours.abort()
    torch_s.abort()
    return before, with_ours, with_torch_s


def test_no_watchdog_ends_the_process_when_nccl_has_failed(two_hosts):
    """It would tell the default group, which ends a trainer eight minutes after a server has gone."""
    (found,) = two_hosts.run(watchdogs_of_groups, world_size=1, init_process_group=False)
    before, with_ours, with_torch_s = found
    assert (with_ours - before, with_torch_s - before) == (0, 1)


@pytest.mark.parametrize("how", ["raises", "silent"])
def test_all_meet_anew_after_a_failure(two_hosts, how):
    setting = Setting(1, 1, free_port(), device="cuda:0", limit=256, deadline=30.0 if how == "raises" else 8.0)
    found = two_hosts.run(push_with_a_failure, setting, how, None, world_size=2, init_process_group=False)
    assert f"worker 0 of the server on {HOST}" in found[0].error
    assert found[0].seconds < FOR_NCCL + (setting.deadline if how == "silent" else 0)
    assert found[1].pushes["again"]
