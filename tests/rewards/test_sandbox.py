"""Programs that try to get out of the sandbox, to use it up, or to outlive it."""

import os
import platform
import socket
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from lightning_megatron_rl.rewards import sandbox as sandbox_module
from lightning_megatron_rl.rewards.sandbox import LEVELS, MEANING, Level, Sandbox, SandboxError, SandboxLimits
from lightning_megatron_rl.rewards.sandbox_launcher import FILTERS

LIMITS = SandboxLimits(wall_seconds=20.0, cpu_seconds=1, memory_bytes=2**27, file_bytes=2**20, disk_bytes=2**21)

SYSTEM_PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else None


def make_sandbox(level: Level) -> Sandbox:
    # another user cannot run this Python where it lies below a home directory
    sandbox = Sandbox(LIMITS, levels=(level,), python=SYSTEM_PYTHON if level == "user" else None)
    try:
        assert sandbox.level == level
    except SandboxError as error:
        pytest.skip(f"this machine does not grant it: {error}")
    return sandbox


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request) -> Sandbox:
    """A sandbox of each level that this machine has."""
    return make_sandbox(request.param)


@pytest.fixture(scope="module")
def namespaces() -> Sandbox:
    """The best level."""
    return make_sandbox("namespaces")


def run(sandbox: Sandbox, code: str, **kwargs) -> str:
    """Run a program, which must end by itself, and return what it printed."""
    result = sandbox.run(textwrap.dedent(code), **kwargs)
    assert result.code == 0, (result.code, result.stderr[-2000:])
    return result.stdout.strip()


def alive(mark: str) -> list[psutil.Process]:
    """Processes with `mark` in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_program_with_input_and_files(sandbox):
    code = "import json, math\nprint(input(), open('data.txt').read(), math.factorial(5), 'ä')"
    assert run(sandbox, code, stdin="in ö\n", files={"data.txt": "data"}) == "in ö data 120 ä"
    failed = sandbox.run("import sys\nprint('so far')\nsys.exit(3)")
    assert (failed.code, failed.stdout) == (3, "so far\n")
    assert "ZeroDivisionError" in sandbox.run("1 / 0").stderr


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)"])
def test_a_program_may_end_as_in_a_script(sandbox, end):
    """The two names are those of `site`, which is not imported."""
    result = sandbox.run(f"print(__name__, __file__[-7:])\n{end}\nprint('after')")
    assert (result.code, result.stdout) == (0, "__main__ main.py\n"), result.stderr
    assert sandbox.run("exit(3)").code == 3


def test_nothing_is_imported_for_a_program(sandbox):
    assert "NameError" in sandbox.run("sys.exit()").stderr
    assert 'main.py", line 2' in sandbox.run("x = 1\n1 / 0").stderr


def test_environment_is_empty(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = run(sandbox, "import os; print(sorted(os.environ))")
    assert names == "['LC_CTYPE']"  # which Python sets by itself, since nothing says what language it is in


def test_parents_environment_cannot_be_read(sandbox, monkeypatch):
    """Of every process that the program can see, by whatever number."""
    if "environment" not in sandbox.active:
        pytest.skip("not protected at this level")
    code = f"""
        import os
        for number in {[os.getpid(), os.getppid(), "self"]}:
            try:
                print(open(f"/proc/{{number}}/environ", "rb").read().decode() if number != "self" else "")
            except OSError as error:
                print(type(error).__name__)
        try:
            os.kill({os.getpid()}, 0)
            print("signalled")
        except OSError as error:
            print(type(error).__name__)
    """
    assert set(run(sandbox, code).split()) <= {"PermissionError", "FileNotFoundError", "ProcessLookupError"}


def test_endless_loop_is_ended_by_its_cpu_time(sandbox):
    result = sandbox.run("while True: pass")
    assert result.code in (128 + 24, 128 + 9), result  # SIGXCPU, or SIGKILL a second later


def test_sleep_is_ended_by_the_wall_clock():
    sandbox = Sandbox(SandboxLimits(wall_seconds=0.5))
    result = sandbox.run("import time; print('asleep', flush=True); time.sleep(3600)")
    assert (result.code, result.stdout) == (None, "asleep\n")


def test_memory_is_limited(sandbox):
    code = """
        try:
            block = bytearray(2**28)
            print("got it")
        except MemoryError:
            print("refused")
    """
    assert run(sandbox, code) == "refused"


@pytest.mark.parametrize(
    "call",
    [
        "os.memfd_create('held')",
        "call('shmget', 0, 2**20, 0o1600)",
        "call('shmget', 4711, 2**31, 0o1600)",
        "call('msgget', 0, 0o1600)",
        "call('semget', 0, 100, 0o1600)",
        "call('syscall', *number('memfd_create'), b'held', 0)",
        "call('syscall', *number('memfd_secret'), 0)",
        "call('syscall', *number('mq_open'), b'held', 0o102, 0o600, None)",
        "call('syscall', *number('io_uring_setup'), 8, ctypes.create_string_buffer(120))",
        "call('syscall', *number('add_key'), b'user', b'held', b'x' * 100, 100, -3)",
    ],
)
def test_memory_that_no_limit_counts_is_refused(sandbox, call):
    """Each of these holds memory outside the address space and the files; none is left when the program ends."""
    numbers = FILTERS[platform.machine()][1]
    code = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def number(name):
            return [ctypes.c_long({numbers}[name])]
        def call(name, *arguments):
            if getattr(libc, name)(*arguments) < 0:
                raise OSError(ctypes.get_errno(), "")
        try:
            {call}
            print("held")
        except OSError as error:
            print(error.errno)
    """
    assert run(sandbox, code) == "1"  # EPERM, before anything else is looked at


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the second set of call numbers is this processor's")
def test_calls_by_other_numbers_are_refused(sandbox):
    """x32's numbers of the same calls."""
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.syscall(ctypes.c_long(0x40000000 | 319), b"held", 0), ctypes.get_errno())
    """
    assert run(sandbox, code) == "-1 38"


def test_without_a_filter_of_calls_the_rest_stays_and_it_is_said(namespaces, tmp_path, monkeypatch):
    """As on a processor whose call numbers nobody has listed."""
    launcher = tmp_path / "launcher.py"
    source = sandbox_module.LAUNCHER.read_text()
    assert "if machine not in FILTERS:" in source
    launcher.write_text(source.replace("if machine not in FILTERS:", "if machine:"))
    monkeypatch.setattr(sandbox_module, "LAUNCHER", launcher)
    sandbox = Sandbox(LIMITS, levels=("namespaces",))
    assert sandbox.level == "namespaces"
    assert sandbox.inactive == ["uncounted_memory"]
    assert "seccomp" in sandbox.refusals["uncounted_memory"]
    assert "not active: uncounted_memory" in sandbox.describe()
    assert run(sandbox, "import os; print(os.memfd_create('held') > 0)") == "True"


def test_file_size_is_limited(sandbox):
    code = """
        try:
            with open("big", "wb") as file:
                file.write(bytes(2**21))
            print("written")
        except OSError as error:
            print(error.errno)
    """
    assert run(sandbox, code) == "27"  # EFBIG
    flood = sandbox.run("while True: print('x' * 1000)")
    assert flood.code != 0
    assert len(flood.stdout) <= LIMITS.file_bytes


def test_all_files_together_are_limited(namespaces):
    code = """
        try:
            for number in range(10):
                with open(f"part{number}", "wb") as file:
                    file.write(bytes(2**20))
            print("written")
        except OSError as error:
            print(error.errno)
    """
    assert run(namespaces, code) == "28"  # ENOSPC


def test_fork_bomb_stays_within_the_limit(sandbox):
    code = """
        import os, time
        children = 0
        try:
            while children < 1000:
                if os.fork() == 0:
                    time.sleep(3600)
                children += 1
        except OSError as error:
            print(error.errno, children, flush=True)
    """
    number, children = map(int, run(sandbox, code).split())
    assert number == 11  # EAGAIN
    assert children <= LIMITS.processes + 3


def test_doubling_processes_end_with_the_deadline(namespaces):
    """Each child goes on to fork, in a session of its own, and ignores what can be ignored."""
    mark = f"mark{os.getpid()}"
    sandbox = Sandbox(SandboxLimits(wall_seconds=1.0, processes=12))
    code = f"""
        # {mark}
        import os, signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                pass
    """
    before = {process.pid for process in alive("main.py")}
    assert sandbox.run(textwrap.dedent(code)).code in (None, 128 + 24, 128 + 9)
    patience = time.monotonic() + 10.0
    while left := [process for process in alive("main.py") if process.pid not in before]:
        assert time.monotonic() < patience, left
        time.sleep(0.05)


def test_threads_count_as_processes(sandbox):
    code = """
        import threading, time
        started = 0
        try:
            for _ in range(100):
                threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()
                started += 1
        except RuntimeError:
            print(started)
    """
    assert int(run(sandbox, code)) <= LIMITS.processes + 3


def test_process_left_behind_ends_with_the_program(namespaces):
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        time.sleep(0.2)
    """
    before = {process.pid for process in alive("main.py")}
    run(namespaces, code)
    patience = time.monotonic() + 10.0
    while left := [process for process in alive("main.py") if process.pid not in before]:
        assert time.monotonic() < patience, left
        time.sleep(0.05)


def test_nothing_outside_can_be_written_or_read(namespaces, tmp_path):
    tmp_path.chmod(0o777)
    outside = tmp_path / "outside.txt"
    outside.write_text("the answers")
    outside.chmod(0o666)
    code = f"""
        import os
        for path in ({str(outside)!r}, "/etc/passwd", "/proc/1/environ", "/root", {str(Path.home())!r}, "/sys"):
            print(os.path.exists(path))
        for path in ({str(outside)!r}, "/usr/escaped", "/escaped", "/dev/escaped", {sys.base_prefix + "/escaped"!r}):
            try:
                open(path, "w").write("escaped")
                print("written", path)
            except OSError as error:
                print(type(error).__name__)
        for path in ("/", "/usr", {sys.base_prefix!r}):
            if not os.statvfs(path).f_flag & os.ST_RDONLY:  # whoever owns the files outside
                print("written", path)
        print(os.getcwd(), sorted(os.listdir("/box")))
    """
    lines = run(namespaces, code).splitlines()
    # the directories above Python are there, with nothing else in them
    hidden = [line for line, path in zip(lines, ["o", "e", "p", "/root", "home", "s"], strict=False)
              if not sys.base_prefix.startswith("/root") or path not in ("/root", "home")]  # fmt: skip
    assert set(hidden) == {"False"}
    assert not [line for line in lines if line.startswith("written")]
    assert lines[-1] == "/box ['main.py']"
    assert outside.read_text() == "the answers"


def test_files_are_gone_afterwards(sandbox, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as directory:  # pytest's own are closed to other users
        os.chmod(directory, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        before = os.stat(directory).st_mtime_ns
        run(sandbox, "open('kept', 'w').write('x'); print('done')")
        assert os.stat(directory).st_mtime_ns > before, "it was somewhere else"
        assert os.listdir(directory) == []


def test_no_network(namespaces):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        port = server.getsockname()[1]
        code = f"""
            import socket
            try:
                socket.create_connection(("127.0.0.1", {port}), timeout=3)
                print("connected")
            except OSError as error:
                print("refused")
            print([name for _, name in socket.if_nameindex()])
        """
        lines = run(namespaces, code).splitlines()
        socket.create_connection(("127.0.0.1", port), timeout=3).close()  # from here it is reachable
    assert lines[0] == "refused"
    assert set(eval(lines[1])) <= {"lo", "sit0", "tunl0", "ip6tnl0"}  # what the kernel puts into each namespace, down


def test_no_privileges_and_no_way_to_new_ones(namespaces):
    code = """
        import ctypes, os
        print(os.getuid() != 0, os.getpid() != 1)
        for what in (lambda: os.unshare(os.CLONE_NEWUSER), lambda: os.unshare(os.CLONE_NEWNS),
                     lambda: os.setuid(0), lambda: os.chroot("/box")):
            try:
                what()
                print("done")
            except OSError as error:
                print(type(error).__name__, error.errno)
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.mount(b"tmpfs", b"/box", b"tmpfs", 0, None), libc.umount2(b"/usr", 0))
    """
    lines = run(namespaces, code).splitlines()
    assert lines[0] == "True True"
    assert all("done" not in line for line in lines)
    assert lines[-1] == "-1 -1"


def test_nothing_of_ours_is_open(sandbox):
    with tempfile.TemporaryFile() as secret:
        os.set_inheritable(secret.fileno(), True)
        code = """
            import os
            found = []
            for number in range(3, 64):
                try:
                    os.fstat(number)
                    found.append(number)
                except OSError:
                    pass
            print(found)
        """
        assert run(sandbox, code) == "[]"


def test_many_at_once(namespaces):
    results = [""] * 6

    def work(number: int) -> None:
        results[number] = run(namespaces, f"print({number})")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [str(number) for number in range(6)]


def test_protections_are_named(sandbox):
    assert set(sandbox.active) | set(sandbox.inactive) == set(MEANING)
    assert f"sandbox level {sandbox.level}; active: cpu, memory" in sandbox.describe()


def test_refused_level_is_named_and_the_next_one_taken(monkeypatch):
    """`limits` is for users, `user` for root: one of them is refused everywhere."""
    first, second = ("limits", "user") if os.getuid() == 0 else ("user", "limits")
    sandbox = Sandbox(levels=(first,))
    with pytest.raises(SandboxError, match=rf"no sandbox can be made here: .*{first}.*root"):
        _ = sandbox.level
    both = Sandbox(levels=(first, "namespaces", second))
    assert both.level != first
    assert f"{first} refused:" in both.describe()


@pytest.mark.parametrize("python", ["/usr/bin/no-such-python", "/tmp/python"])
def test_other_interpreters_are_below_usr(python):
    with pytest.raises(ValueError, match="give an interpreter below /usr"):
        Sandbox(python=python)


@pytest.mark.parametrize("name", ["wall_seconds", "memory_bytes", "processes"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=rf"limits\.{name}=0 must be (above 0|at least 1)"):
        SandboxLimits(**{name: 0})
