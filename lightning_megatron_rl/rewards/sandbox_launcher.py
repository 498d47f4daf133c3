"""The process that a `Sandbox` starts: it drops privileges, then becomes the program.

It is run by its path, imports nothing of this package, and says on a pipe what the kernel has refused. Its levels:

- "namespaces": a user of its own without privileges, and namespaces for mounts (a root directory with Python and an
  empty directory, nothing else), processes, network, IPC and host name
- "user": as root where namespaces are refused: another user without privileges, no further processes
- "limits": not as root: resource limits, no further processes

At each level a filter refuses the system calls that hold memory which no limit counts, where the kernel has filters.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RDONLY = 2, 4, 32, 4096, 16384, 1 << 18, 1
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, MNT_DETACH = 4, 38, 2
SYS_MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 442, 0x8000, -100, 1, 2
SANDBOX_USERS = (61184, 4336)  # first id and number of those that systemd keeps for such services

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
SECCOMP_ALLOW, SECCOMP_ERRNO, EPERM, ENOSYS = 0x7FFF0000, 0x00050000, 1, 38
BPF_LOAD, BPF_EQUAL, BPF_AT_LEAST, BPF_RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
X32_CALLS = 0x40000000  # numbers of another ABI of the same processor begin there
# Refused calls: memory outside RLIMIT_AS and the tmpfs (memfd, System V and POSIX IPC, keys, rings and maps of the
# kernel), and the parts of the kernel that programs have no use for. (audit architecture, call numbers) per machine
FILTERS = {
    "x86_64": (
        0xC000003E,
        {
            "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31, "msgget": 68,
            "semget": 64, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425,
            "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "shmat": 196, "shmctl": 195, "msgget": 186,
            "semget": 190, "mq_open": 180, "add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425,
            "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        },
    ),
}  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raise what the C library reports."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())
    checked(libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[4]), f"mount {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only; a remount could not, where the host has set other flags."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    number, directory = ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_int(AT_FDCWD)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc.syscall(number, directory, target.encode(), AT_RECURSIVE, ctypes.byref(attributes), size)
    checked(result, f"mount_setattr {target}")


def become_another_user() -> None:
    """Give up root for an unprivileged user id that nothing else uses."""
    user = SANDBOX_USERS[0] + os.getpid() % SANDBOX_USERS[1]
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root, where the user is mapped


def stage(sources: dict[str, str], directory: str) -> dict[str, str]:
    """Mount what lies below directories of root alone, such as its home, where another user can reach it."""
    os.unshare(os.CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", directory, "tmpfs", MS_NOSUID, "size=64k,mode=755")
    staged = {path: f"{directory}/{number}" for number, path in enumerate(sources)}
    for path, target in staged.items():
        os.mkdir(target)
        mount(path, target, None, MS_BIND | MS_REC)
    return staged


def enter_namespaces(spec: dict[str, Any]) -> None:
    """Enter new namespaces with Python, a few devices and an empty directory of limited size."""
    directory = spec["directory"]
    links = {path: os.readlink(path) for path in spec["read_only"] if os.path.islink(path)}
    sources = {path: path for path in spec["read_only"] if path not in links}
    if os.getuid() == 0:
        sources = stage(sources, f"{directory}/root")
        become_another_user()
    files = {name: open_bytes(f"{directory}/box/{name}") for name in os.listdir(f"{directory}/box")}
    user, group = os.getuid(), os.getgid()
    kinds = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    os.unshare(os.CLONE_NEWUSER | kinds)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{user} {user} 1")
    write("/proc/self/gid_map", f"{group} {group} 1")
    write("/proc/sys/user/max_user_namespaces", "0")  # of this namespace: there would be mounts to be made in another
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = f"{directory}/new"
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    for path, source in sources.items():
        os.makedirs(root + path)
        mount(source, root + path, None, MS_BIND | MS_REC)
        make_read_only(root + path)
    os.mkdir(f"{root}/dev")
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        write(root + device, "")
        mount(device, root + device, None, MS_BIND)
    for path, target in links.items():
        os.symlink(target, root + path)
    os.mkdir(f"{root}/box")
    mount("tmpfs", f"{root}/box", "tmpfs", MS_NOSUID | MS_NODEV, f"size={spec['disk_bytes']},nr_inodes=4096,mode=700")
    os.symlink("box", f"{root}/tmp")
    for name, content in files.items():
        with open(f"{root}/box/{name}", "wb") as file:
            file.write(content)
    mount("none", root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    os.chdir(root)
    checked(libc.pivot_root(b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/box")


def limit(spec: dict[str, Any], processes: int) -> None:
    """Set the limits of each process, and of their number."""
    cpu = spec["cpu_seconds"]
    for name, soft, hard in (
        ("AS", spec["memory_bytes"], spec["memory_bytes"]),
        ("CPU", cpu, cpu + 1),
        ("FSIZE", spec["file_bytes"], spec["file_bytes"]),
        ("NOFILE", 64, 64),
        ("CORE", 0, 0),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
        ("NPROC", processes, processes),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(number)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(number, (soft, hard))


def filter_calls() -> None:
    """Refuse system calls for this process and what it becomes or starts; needs `PR_SET_NO_NEW_PRIVS`."""
    machine = platform.machine()
    if machine not in FILTERS:
        raise OSError(ENOSYS, f"seccomp: no list of system calls for {machine}")
    architecture, calls = FILTERS[machine]
    numbers = sorted(calls.values())
    refuse_all, refuse_one = SECCOMP_ERRNO | ENOSYS, SECCOMP_ERRNO | EPERM
    # struct seccomp_data: the number at byte 0, the architecture at byte 4; jumps count the instructions between
    program = [(BPF_LOAD, 0, 0, 4), (BPF_EQUAL, 1, 0, architecture), (BPF_RETURN, 0, 0, refuse_all)]
    program += [(BPF_LOAD, 0, 0, 0), (BPF_AT_LEAST, 0, 1, X32_CALLS), (BPF_RETURN, 0, 0, refuse_all)]
    program += [(BPF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    program += [(BPF_RETURN, 0, 0, SECCOMP_ALLOW), (BPF_RETURN, 0, 0, refuse_one)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))  # struct sock_fprog
    checked(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header), "seccomp")


def become(spec: dict[str, Any]) -> None:
    """Replace this process by the program, without environment or privileges."""
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if spec["filter"]:
        filter_calls()
    os.execve(spec["command"][0], spec["command"], {})


def first_process(spec: dict[str, Any], status: int) -> None:
    """Be the first process of the namespace: collect orphans, and end everything there with the program."""
    program = os.fork()
    if program == 0:
        try:
            limit(spec, spec["processes"] + 3)  # the launcher and the first process are counted as well, and a spare
            become(spec)
        except OSError as error:
            refuse(status, error)
    os.close(status)
    while True:
        process, code = os.wait()
        if process == program:
            os._exit(ended(code))


def ended(code: int) -> int:
    """Return an exit code for a wait status, as a shell does."""
    return os.waitstatus_to_exitcode(code) if os.WIFEXITED(code) else 128 + os.WTERMSIG(code)


def refuse(status: int, error: OSError) -> None:
    """Say what could not be done, and end."""
    os.write(status, str(error).encode())
    os._exit(113)


def open_bytes(path: str) -> bytes:
    """Return a file's content."""
    with open(path, "rb") as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Write a file."""
    with open(path, "w") as file:
        file.write(text)


def main(spec: dict[str, Any], status: int) -> None:
    """Run the program of `spec` at its level; what stops that is written to the pipe `status`."""
    os.set_inheritable(status, False)
    try:
        if spec["level"] == "namespaces":
            enter_namespaces(spec)
            first = os.fork()
            if first == 0:
                first_process(spec, status)
            os.close(status)
            os._exit(ended(os.waitpid(first, 0)[1]))
        os.chdir(f"{spec['directory']}/box")
        if (spec["level"] == "user") != (os.getuid() == 0):
            raise PermissionError(1, "as root nothing else binds a program" if os.getuid() == 0 else "only for root")
        if spec["level"] == "user":
            become_another_user()
        limit(spec, 1)
        become(spec)
    except OSError as error:
        refuse(status, error)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
