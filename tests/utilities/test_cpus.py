"""How many CPUs there are to use, in made-up trees of cgroups, and the threads and waiting that follow."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_megatron_rl.utilities import cpus
from lightning_megatron_rl.utilities.cpus import (
    OthersLoad,
    UsableCPUs,
    busy_words,
    openmp_defaults,
    sampler_threads,
    share_cpus,
    trainer_threads,
    usable_cpus,
    users_threads,
)

SMALL, LARGE = 900_000, 8_000_000_000  # parameters


@pytest.fixture
def many_cpus(monkeypatch):
    """A process that may run on 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


class Tree:
    """The files by which a kernel speaks of cgroups, below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.proc.mkdir()
        self.write("proc/cgroup", "")
        self.write("proc/mountinfo", "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, own: str, mounted: str = "/", **quotas: str) -> "Tree":
        """Mount cgroup v2; `quotas` are contents of cpu.max by directory, with "_" for "/"."""
        self.write("proc/cgroup", f"0::{own}\n")
        self._mount("cgroup2", mounted, "rw")
        for directory, text in quotas.items():
            self.write(f"cgroup2/{directory.replace('_', '/')}/cpu.max", text)
        return self

    def v1(self, own: str, mounted: str = "/", **quotas: tuple[str, str]) -> "Tree":
        """Mount the controllers cpu and cpuacct of cgroup v1; `quotas` are quota and period by directory."""
        self.write("proc/cgroup", f"5:memory:/elsewhere\n4:cpu,cpuacct:{own}\n0::/\n")
        self._mount("cgroup", mounted, "rw,cpu,cpuacct")
        for directory, (quota, period) in quotas.items():
            self.write(f"cgroup/{directory.replace('_', '/')}/cpu.cfs_quota_us", quota)
            self.write(f"cgroup/{directory.replace('_', '/')}/cpu.cfs_period_us", period)
        return self

    def _mount(self, kind: str, mounted: str, options: str) -> None:
        mount = self.root / kind
        mount.mkdir()
        with (self.proc / "mountinfo").open("a") as file:
            file.write(f"30 25 0:26 {mounted} {mount} rw,nosuid - {kind} {kind} {options}\n")

    def cpus(self) -> UsableCPUs:
        return usable_cpus(self.proc)


@pytest.fixture
def tree(tmp_path, many_cpus):
    return Tree(tmp_path)


def test_without_a_quota_affinity_counts(tree):
    assert tree.cpus() == UsableCPUs(64, "affinity")
    assert tree.v2("/a", a="max 100000\n").cpus() == UsableCPUs(64, "affinity")


def test_machine_without_cgroups(tmp_path, many_cpus):
    assert usable_cpus(tmp_path) == UsableCPUs(64, "affinity")


@pytest.mark.parametrize(
    ("text", "count"),
    [("200000 100000", 2), ("150000 100000", 2), ("250000 100000", 3), ("50000 100000", 1), ("1000 1000000", 1)],
)
def test_quota_of_v2_is_rounded_up_and_at_least_one(tree, text, count):
    found = tree.v2("/pod", pod=text).cpus()
    assert found.count == count
    assert "quota of" in found.source
    assert "64 by affinity" in found.source
    assert found.problem == ""


@pytest.mark.parametrize(("quota", "count"), [("-1", 64), ("200000", 2), ("230000", 3), ("20000", 1)])
def test_quota_of_v1(tree, quota, count):
    assert tree.v1("/docker/1", docker_1=(quota, "100000\n")).cpus().count == count


def test_smallest_quota_of_all_levels_counts(tree):
    """A container without a quota of its own is held to that of its pod."""
    tree.v2("/pods/one/box", pods="max 100000", pods_one="300000 100000", pods_one_box="900000 100000")
    assert tree.cpus().count == 3


def test_own_cgroup_of_v1_may_have_a_smaller_quota_than_those_above(tree):
    quotas = {"pods": ("800000", "100000"), "pods_one": ("-1", "100000"), "pods_one_box": ("400000", "200000")}
    assert tree.v1("/pods/one/box", **quotas).cpus().count == 2


@pytest.mark.parametrize(
    ("own", "mounted"),
    [
        ("/", "/"),  # a container with a namespace of its own
        ("/docker/1", "/docker/1"),  # one without: it is told the host's path, and sees its own part of the tree
        ("/../other", "/"),  # moved to a cgroup that it cannot see
    ],
)
def test_container_sees_its_quota_at_the_mount(tree, own, mounted):
    tree.v2(own, mounted)
    tree.write("cgroup2/cpu.max", "200000 100000")
    assert tree.cpus().count == 2


def test_quota_above_the_affinity_changes_nothing(tree):
    assert tree.v2("/a", a="9600000 100000").cpus() == UsableCPUs(64, "affinity, within a quota of 96")


@pytest.mark.parametrize("text", ["", "many 100000", "200000", "0 100000", "-5 100000", "200000 0", "1 2 3", "nan 1"])
def test_nonsense_is_named_and_the_rest_counts(tree, text):
    found = tree.v2("/a/b", a="400000 100000", a_b=text).cpus()
    assert found.count == 4
    assert "a/b/cpu.max holds" in found.problem
    assert "may be overlooked" in found.problem


def test_nonsense_of_v1_is_named(tree):
    found = tree.v1("/a", a=("200000", "soon")).cpus()
    assert found.count == 64
    assert "cpu.cfs_quota_us holds '200000 soon'" in found.problem


def test_file_that_cannot_be_read_is_named(tree):
    tree.v2("/a")
    (tree.root / "cgroup2" / "a" / "cpu.max").mkdir(parents=True)
    found = tree.cpus()
    assert found.count == 64
    assert "cpu.max" in found.problem


def test_list_of_cgroups_that_is_nonsense_is_named(tree):
    tree.v2("/a", a="200000 100000").write("proc/cgroup", "what\n")
    found = tree.cpus()
    assert found.count == 64
    assert "may be overlooked" in found.problem


def test_this_machine_has_at_least_one():
    found = usable_cpus()
    assert 1 <= found.count <= len(os.sched_getaffinity(0))
    assert found.problem == ""


# ---- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "-1", "two", "", " ", "1.5", "²"])
def test_number_of_threads_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"OMP_NUM_THREADS=.* is no number of threads: unset it"):
        users_threads({"OMP_NUM_THREADS": text})


def test_users_number_of_threads_is_respected(many_cpus):
    environment = {"OMP_NUM_THREADS": "100"}
    assert users_threads(environment) == sampler_threads(SMALL, 1, environment) == 100
    assert share_cpus(2, environment) is None
    assert environment["OMP_NUM_THREADS"] == "100"
    assert sampler_threads(SMALL, 1, environment) == 100  # of a rank that was started with it
    assert users_threads({"OMP_NUM_THREADS": "8,2"}) == 8


def test_each_rank_gets_its_share(tree, monkeypatch):
    monkeypatch.setattr(cpus, "usable_cpus", tree.v2("/a", a="800000 100000").cpus)
    environment = {}
    assert share_cpus(2, environment) == 4
    assert environment["OMP_NUM_THREADS"] == "4"
    rank = dict(environment)  # which Lightning starts
    assert share_cpus(2, rank) == 4
    assert users_threads(rank) is None
    assert sampler_threads(LARGE, 1, rank) == 4
    assert sampler_threads(LARGE, 2, rank) == 2
    assert share_cpus(1, environment) == 8  # of the next Trainer in the process
    assert share_cpus(100, environment) == 1


def test_what_torchrun_sets_is_not_the_users(many_cpus):
    environment = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "7", "LOCAL_WORLD_SIZE": "4"}
    assert share_cpus(4, environment) is None  # torch has its one thread, as with any other script
    assert environment["OMP_NUM_THREADS"] == "1"
    assert sampler_threads(LARGE, 1, environment) == 16
    assert sampler_threads(LARGE, 1, {**environment, "OMP_NUM_THREADS": "3"}) == 3


def test_small_model_samples_with_one_thread(many_cpus):
    assert sampler_threads(SMALL, 1, {}) == 1
    assert sampler_threads(SMALL, 2, {}) == 1
    assert sampler_threads(2 * cpus.SAMPLER_PARAMETERS, 1, {}) == 2
    assert sampler_threads(LARGE, 1, {}) == 64
    assert sampler_threads(LARGE, 4, {}) == 16


def test_small_model_trains_with_one_thread():
    assert trainer_threads(SMALL, 64) == 1
    assert trainer_threads(8 * cpus.TRAINER_PARAMETERS, 64) == 8
    assert trainer_threads(LARGE, 64) == 64
    assert trainer_threads(LARGE, 2) == 2


def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise():
    assert openmp_defaults({}) == {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert openmp_defaults({name: "x"}) == {}
    environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    share_cpus(1, environment)
    assert environment.keys() == {"OMP_WAIT_POLICY", "OMP_NUM_THREADS", "LIGHTNING_MEGATRON_RL_CPUS"}


LOADS_OPENMP = """
from lightning_megatron_rl.__main__ import main
try:
    main()
finally:
    import torch
"""


def test_command_sets_it_before_openmp_is_loaded():
    """OpenMP reads its variables once: what is set after torch is imported does nothing."""
    environment = {name: value for name, value in os.environ.items() if name not in cpus.OPENMP_DEFAULTS}
    done = subprocess.run(
        [sys.executable, "-c", LOADS_OPENMP, "doctor", "--help"],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},  # prints what OpenMP has read, when it is loaded
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


# ---- others --------------------------------------------------------------------------------------------------------


def test_busy_process_of_another_is_seen_and_own_children_are_not():
    """A loop that is nobody's child here, started through a shell that ends, is another's."""
    loop = f"exec {sys.executable} -c 'while True: pass'"
    pid = int(subprocess.check_output(["setsid", "sh", "-c", f"({loop}) >/dev/null 2>&1 & echo $!"], text=True))
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
            time.sleep(0.01)
        others = OthersLoad()
        time.sleep(1.0)
        foreign = others.cpus()
        mine = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        own = OthersLoad()
        used, began = psutil.Process(mine.pid).cpu_times().user, time.monotonic()
        time.sleep(1.0)
        both = own.cpus()
        share = (psutil.Process(mine.pid).cpu_times().user - used) / (time.monotonic() - began)
        mine.kill()
        mine.wait()
    finally:
        os.kill(pid, 9)
    assert foreign is not None
    assert both is not None
    cpus_here = len(os.sched_getaffinity(0))
    assert foreign > 0.2  # of one CPU, beside whatever else runs
    assert share > 0.02  # a tick of the clock is 0.01 s
    assert both < cpus_here - share / 2  # with the own loop it would be all of two


def test_busy_machine_is_told_what_it_costs():
    assert busy_words(None, 2) is None
    assert busy_words(0.5, 2) is None
    assert busy_words(1.0, 2) == "other processes keep 1.0 of 2 CPUs busy: a step may take 1.5 times as long"
    assert busy_words(30.0, 64) == "other processes keep 30.0 of 64 CPUs busy: a step may take 1.5 times as long"
    assert busy_words(20.0, 64) is None
