"""How many CPUs this process may use, how busy others keep them, and the threads that follow from both."""

import math
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_SHARE = "LIGHTNING_MEGATRON_RL_CPUS"  # a rank's share of the machine's CPUs, for what it starts
_THREADS = "OMP_NUM_THREADS"
_BUSY = 0.4  # share of the CPUs above which others count: one endless loop on two of them is a little under a half

# What threads of a parallel region do at its end. torch and vLLM's CPU build both load torch's libgomp, whose threads
# wait in a loop for several milliseconds, on a core that another process may want. libgomp reads the first when it is
# loaded; the second is for the runtime of LLVM and Intel, which some builds of torch load, and in milliseconds.
OPENMP_DEFAULTS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
# Parameters of a model for each thread that works on it: with fewer, waiting for each other takes longer than the work.
# A token of 32 sequences (benchmarks/busy_machine.py), and a micro-batch of some thousand tokens, which is more work.
SAMPLER_PARAMETERS, TRAINER_PARAMETERS = 10_000_000, 2_000_000


@dataclass(frozen=True)
class UsableCPUs:
    """The CPUs that this process may use.

    Args:
        count: At least 1; a quota is rounded up.
        source: Where the number comes from, in words.
        problem: What could not be read, and what follows from it; "" if all was well.
    """

    count: int
    source: str
    problem: str = ""


def usable_cpus(proc: Path = Path("/proc/self")) -> UsableCPUs:
    """Return the CPUs of this process: those of its affinity, or fewer if a cgroup has a quota of CPU time.

    The quota is the smallest of the process's cgroup and all above it that are visible: `cpu.max` of cgroup v2,
    `cpu.cfs_quota_us` over `cpu.cfs_period_us` of v1. Affinity covers cpusets.

    Args:
        proc: Where the kernel says which cgroups the process is in and where they are mounted.
    """
    affinity = len(os.sched_getaffinity(0))
    problems: list[str] = []
    quota, where = math.inf, ""
    for directory in _cgroups(proc, problems):
        try:
            found = _quota(directory)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        if found < quota:
            quota, where = found, str(directory)
    problem = "" if not problems else f"a quota of CPU time may be overlooked: {'; '.join(problems)}"
    if quota < affinity:
        count = max(1, math.ceil(quota))
        return UsableCPUs(count, f"quota of {quota:g} CPUs of the cgroup {where}, {affinity} by affinity", problem)
    return UsableCPUs(affinity, "affinity" + ("" if quota == math.inf else f", within a quota of {quota:g}"), problem)


def _cgroups(proc: Path, problems: list[str]) -> Iterator[Path]:
    """Yield the directories of the process's cgroups that limit CPU time, and of those above them."""
    try:
        paths = dict(_own_cgroups((proc / "cgroup").read_text()))
        mounts = (proc / "mountinfo").read_text().splitlines()
    except FileNotFoundError:  # no cgroups in this kernel
        return
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        controllers = {"cgroup2": "", "cgroup": "cpu"}.get(kind[0])
        if controllers is None or controllers not in paths or (controllers and "cpu" not in kind[2].split(",")):
            continue
        root, mount = Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        own = Path(paths[controllers])
        # in a container the mount may begin below what the process is told, or at its own cgroup
        below = own.relative_to(root) if own.is_relative_to(root) and ".." not in own.parts else Path()
        directory = mount / below
        yield directory
        yield from (parent for parent in directory.parents if parent.is_relative_to(mount))


def _own_cgroups(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("", path) for cgroup v2 and ("cpu", path) for the hierarchy of v1 that has the controller "cpu"."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "", path
        elif "cpu" in controllers.split(","):
            yield "cpu", path


def _unescaped(text: str) -> str:
    """Undo the kernel's octal escapes of blanks in a path of mountinfo."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _quota(directory: Path) -> float:
    """Return a cgroup's quota in CPUs, infinite if it has none.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file holds something else than the kernel writes.
    """
    v2, v1, period = (directory / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    if v2.exists():
        file, words = v2, v2.read_text().split()
    elif v1.exists():
        file, words = v1, [v1.read_text().strip(), period.read_text().strip()]
    else:
        return math.inf  # the root has none
    try:
        amount, length = words
        if amount in ("max", "-1"):
            return math.inf
        microseconds, per = int(amount), int(length)
    except ValueError:
        microseconds = per = 0
    if microseconds <= 0 or per <= 0:
        raise ValueError(f"{file} holds {' '.join(words)!r}, which is no quota and period in microseconds")
    return microseconds / per


def users_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the user's OMP_NUM_THREADS; None where it is unset or set by a launcher.

    Raises:
        ValueError: It is not a positive number, which libgomp would ignore.
    """
    text = environment.get(_THREADS)
    if text is None or text == environment.get(_SHARE) or _is_of_torchrun(environment):
        return None
    first = text.split(",")[0].strip()  # the others are of nested regions
    if not (first.isascii() and first.isdecimal() and int(first) > 0):
        raise ValueError(
            f"{_THREADS}={text!r} is no number of threads: unset it, so that each process takes what it can use, or"
            " set it to 1 or more"
        )
    return int(first)


def _is_of_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether OMP_NUM_THREADS is what torchrun sets for several processes where the user has not."""
    return environment.get(_THREADS) == "1" and "TORCHELASTIC_RUN_ID" in environment


def openmp_defaults(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which threads that wait give their core away soon; none that the user has set.

    They count for processes that are started with them: OpenMP reads them once.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", *OPENMP_DEFAULTS)):
        return {}
    return dict(OPENMP_DEFAULTS)


def share_cpus(num_processes: int, environment: MutableMapping[str, str] = os.environ) -> int | None:
    """Give each process of a run its share of the CPUs, and child processes the defaults of OpenMP.

    Sets environment variables for the processes that are started from here on; what the user has set stays.

    Args:
        num_processes: Of this run, on this machine.
        environment: Of this process.

    Returns:
        Threads for torch in this process; None: as the user or torchrun has set them.

    Raises:
        ValueError: OMP_NUM_THREADS is not a positive number.
    """
    environment.update(openmp_defaults(environment))
    if users_threads(environment) is not None or _is_of_torchrun(environment):
        environment.pop(_SHARE, None)
        return None
    share = max(1, usable_cpus().count // num_processes)
    environment[_SHARE] = environment[_THREADS] = str(share)
    return share


def sampler_threads(num_parameters: int, num_processes: int = 1, environment: Mapping[str, str] = os.environ) -> int:
    """Return the threads of each process of a sampler on the CPU.

    Args:
        num_parameters: Of the model.
        num_processes: That share it.
        environment: Of the trainer's process.

    Raises:
        ValueError: OMP_NUM_THREADS is not a positive number.
    """
    asked = users_threads(environment)
    if asked is not None:
        return asked
    return max(1, min(num_parameters // SAMPLER_PARAMETERS, cpu_share(environment)) // num_processes)


def cpu_share(environment: Mapping[str, str] = os.environ) -> int:
    """Return a rank's share of the machine's CPUs, at least 1: other ranks of the run use theirs at the same time.

    Args:
        environment: Of the trainer's process.
    """
    share = environment.get(_SHARE)
    return int(share) if share else max(1, usable_cpus().count // int(environment.get("LOCAL_WORLD_SIZE", "1")))


def trainer_threads(num_parameters: int, share: int) -> int:
    """Return torch's threads in a rank on the CPU.

    Args:
        num_parameters: Of the rank's part of the model.
        share: CPUs of the rank.
    """
    return max(1, min(num_parameters // TRAINER_PARAMETERS, share))


class OthersLoad:
    """Measures, from its creation on, how many CPUs other processes keep busy.

    Niced processes do not count, unless this one is niced, too: they give way. What this process's family uses
    (children, and their children; under torchrun and SLURM what its parent has started) is its own.
    """

    def __init__(self) -> None:
        self._began = _cpu_seconds()

    def cpus(self) -> float | None:
        """Return the mean number of busy CPUs among those of this process's affinity; None where /proc does not say."""
        ended = _cpu_seconds()
        if self._began is None or ended is None or ended[0] <= self._began[0]:
            return None
        elapsed, busy, own = (late - early for late, early in zip(ended, self._began, strict=True))
        return min(max(0.0, busy - own) / elapsed, float(len(os.sched_getaffinity(0))))


def busy_words(others: float | None, cpus: int) -> str | None:
    """Return a sentence about the load of other processes and its cost; None if there is little.

    Args:
        others: CPUs that they use.
        cpus: That this process may use.
    """
    if others is None or others <= _BUSY * cpus:
        return None
    return (
        f"other processes keep {others:.1f} of {cpus} CPUs busy: a step may take {1 + others / cpus:.1f} times as long"
    )


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Return the time, what all processes have used of this one's CPUs, and what its own family has used. # seconds"""
    tick, niced = os.sysconf("SC_CLK_TCK"), os.getpriority(os.PRIO_PROCESS, 0) > 0
    cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # user, nice, system, idle, iowait, irq, softirq, steal
        counted = (1, 2, 3, 6, 7, 8) if niced else (1, 3, 6, 7, 8)
        busy = sum(int(line[i]) for line in lines if line[0] in cpus for i in counted)
    except (OSError, ValueError, IndexError):
        return None
    launched = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & os.environ.keys()
    family = {os.getppid() if launched else os.getpid()}
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(process.name)] = int(fields[1])
        if niced or int(fields[16]) <= 0:  # its own time and of children that it has collected
            ticks[int(process.name)] = sum(map(int, fields[11:15]))
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    used = sum(ticks.get(pid, 0) for pid in family)
    return time.monotonic(), busy / tick, used / tick
