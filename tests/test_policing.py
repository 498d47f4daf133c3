"""The rules of `tests/policing.py`, each broken by a real test in a pytest of its own."""

import os
import re
import subprocess
import sys
import textwrap
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests import policing
from tests.policing import MARKER, clean_up, shared_memory, take_snapshot

ROOT = Path(__file__).resolve().parents[1]


def run_pytest(directory: Path, source: str) -> str:
    """What pytest prints about a file with `source` under the policing plugin."""
    file = directory / "test_sample.py"
    file.write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "pytest", "-p", "tests.policing", "-p", "no:cacheprovider", "-q", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False).stdout


LEAKS = {  # code of a test -> what is said about it
    "os.environ['RANK'] = '3'": r"environment variable RANK: None became '3'",
    "os.environ.pop('HOME')": r"environment variable HOME: '.*' became None",
    "subprocess.Popen(['sleep', '60'])": r"process \d+: sleep 60",
    "subprocess.run('sleep 61 & disown', shell=True, executable='/bin/bash')": r"process \d+: sleep 61",
    "threading.Thread(target=time.sleep, args=(4.5,), name='lingers').start()": r"thread lingers",
    "os.chdir('/')": r"working directory /",
    "init_process_group('gloo', init_method=f'file://{tmp_path}/rendezvous', rank=0, world_size=1)": (
        r"torch.distributed's default process group"
    ),
}


@pytest.mark.slow
def test_what_a_test_leaves_behind_is_named_and_undone(tmp_path: Path):
    tests = [f"def test_leak_{i}(tmp_path):\n    {code}\n" for i, code in enumerate(LEAKS)]
    imports = "import os, subprocess, threading, time\nfrom torch.distributed import init_process_group\n"
    output = run_pytest(tmp_path, imports + "\n".join(tests))
    for i, message in enumerate(LEAKS.values()):
        report = output.split(f"ERROR at teardown of test_leak_{i} ")[1].split("ERROR at teardown of")[0]
        assert re.search(message, report), report
        assert len(re.findall(r"^E +\S", report, re.MULTILINE)) == 2, (
            report
        )  # the heading and this leak, no earlier one
    assert f"{len(LEAKS)} passed, {len(LEAKS)} errors" in output


def test_shared_memory_left_behind_is_seen(monkeypatch):
    monkeypatch.setattr(policing, "MEMORY_GRACE", 1.0)
    before = take_snapshot()
    memory = SharedMemory(create=True, size=16)
    try:
        assert clean_up(before, set()) == [f"shared memory /dev/shm/{memory.name}"]
    finally:
        memory.close()
        memory.unlink()
    assert clean_up(before, set()) == []


def test_shared_memory_of_another_run_is_not_held_against_a_test():
    """A semaphore, whose maker has it mapped under a name that is gone."""
    before = take_snapshot()
    code = "import multiprocessing as m; x = m.get_context('spawn').Lock(); print(x._semlock.name, flush=True); input()"
    orphan = ["setsid", "--fork", sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != MARKER}
    with subprocess.Popen(orphan, stdin=-1, stdout=-1, text=True, env=environment) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        name = f"sem.{other.stdout.readline().strip().lstrip('/')}"
        assert Path("/dev/shm", name).exists()
        assert name not in shared_memory()
        other.communicate("end\n", timeout=60)  # until the orphan has closed its output
    assert clean_up(before, set()) == []


def test_session_processes_may_outlive_a_test_but_not_the_run(tmp_path: Path):
    output = run_pytest(
        tmp_path,
        """
        import subprocess
        from tests.policing import keep_process

        def test_starts_a_worker_for_all():
            keep_process(subprocess.Popen(["sleep", "62"]).pid)

        def test_next():
            pass
        """,
    )
    assert "the run left behind" in output
    assert "the test left behind" not in output
    assert "2 passed, 1 error" in output


def test_fixtures_of_wider_scope_and_monkeypatch_are_no_leaks(tmp_path: Path):
    output = run_pytest(
        tmp_path,
        """
        import subprocess
        import pytest

        @pytest.fixture(scope="module")
        def server():
            process = subprocess.Popen(["sleep", "63"])
            yield process
            process.kill()
            process.wait()

        def test_with_server(server, monkeypatch):
            monkeypatch.setenv("RANK", "1")
            assert server.poll() is None
        """,
    )
    assert "1 passed" in output
    assert "error" not in output


def test_worker_of_a_module_may_be_restarted_by_a_test_once(tmp_path: Path):
    output = run_pytest(
        tmp_path,
        """
        import subprocess
        import pytest

        @pytest.fixture(scope="module")
        def workers():
            workers = [subprocess.Popen(["sleep", "64"])]
            yield workers
            for worker in workers:
                worker.kill()
                worker.wait()

        def restart(workers):
            workers[-1].kill()
            workers[-1].wait()
            workers.append(subprocess.Popen(["sleep", "65"]))

        def test_restarts(workers):
            restart(workers)

        def test_has_one_too_many(workers):
            restart(workers)
            workers.append(subprocess.Popen(["sleep", "66"]))
        """,
    )
    assert "ERROR at teardown of test_has_one_too_many" in output
    assert set(re.findall(r"process \d+: (sleep 6[56])", output)) == {"sleep 66"}
    assert "2 passed, 1 error" in output


def test_deadline_fails_a_test_that_waits_even_if_it_uses_the_alarm_itself(tmp_path: Path):
    output = run_pytest(
        tmp_path,
        """
        import signal, time
        import pytest

        @pytest.mark.deadline(0.5)
        def test_waits():
            signal.alarm(0)
            time.sleep(30)

        def test_next():
            pass
        """,
    )
    assert "test_waits did not end within 0.5 s" in output
    assert "1 failed, 1 passed" in output


def test_a_test_that_does_not_react_ends_the_run_with_its_stack(tmp_path: Path):
    (tmp_path / "test_stuck.py").write_text(
        "import signal, time\nimport pytest\nfrom tests import policing\npolicing.LAST_RESORT = 0.5\n"
        "@pytest.mark.deadline(0.2)\ndef test_stuck():\n"
        "    signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n    time.sleep(30)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.policing", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1
    assert "in test_stuck" in done.stderr
    assert os.path.basename(tmp_path) in done.stderr


@pytest.mark.slow
def test_what_shares_fixtures_is_in_one_process():
    """Fails without the scheduler in conftest.py: tests would go to whichever process is free."""
    files = ["tests/parallel/test_layout.py", "tests/algorithms/test_advantages.py", "tests/weights/test_placement.py"]
    command = [sys.executable, "-m", "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)
    processes: dict[str, set[str]] = {file: set() for file in files}
    for process, file in re.findall(r"^\[(gw\d)\].* PASSED (\S+?)::", done.stdout, re.MULTILINE):
        processes[file].add(process)
    assert all(len(found) == 1 for found in processes.values()), processes
    assert len(set.union(*processes.values())) == 2, "both work"
