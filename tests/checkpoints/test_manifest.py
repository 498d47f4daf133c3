"""The manifest: what was written is told from what was damaged, by file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron_rl.checkpoints.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    DamagedCheckpointError,
    FileRecord,
    HashedFile,
    check_files,
    previous_checkpoints,
    read_manifest,
    record_file,
    write_manifest,
)


def write(path: Path, step: int = 1) -> Path:
    """A directory with a manifest and two files."""
    (path / "sharded").mkdir(parents=True)
    files = {}
    for name, content in {"trainer.pt": b"some state", "sharded/0": bytes(range(256)) * 100}.items():
        with HashedFile(path / name) as file:
            file.write(content)
        files[name] = file.record
    write_manifest(path, {"global_step": step}, files)
    return path


def check(path: Path, verify: bool = True, world_size: int = 1) -> None:
    for rank in range(world_size):
        check_files(path, read_manifest(path), verify=verify, rank=rank, world_size=world_size)


def test_checksum_is_that_of_the_file(tmp_path):
    """Of what was written in pieces, and by hand: the SHA-256 of "abc" (FIPS 180-4)."""
    with HashedFile(tmp_path / "abc") as file:
        file.write(b"a")
        file.write(memoryview(b"bc"))
        assert file.tell() == 3
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file.record == record_file(tmp_path / "abc") == FileRecord(3, known)


def test_an_undamaged_checkpoint_passes(tmp_path):
    path = write(tmp_path / "a.ckpt", step=7)
    check(path)
    check(path, world_size=2)
    manifest = read_manifest(path)
    assert (manifest["global_step"], manifest["format_version"]) == (7, FORMAT_VERSION)
    assert set(manifest["files"]) == {"trainer.pt", "sharded/0"}
    assert "torch" in manifest["versions"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["trainer.pt", "sharded/0"])
def test_damage_is_named_by_file(tmp_path, name, world_size):
    """A flipped bit, a cut file, a missing one; whichever rank reads it."""
    file = write(tmp_path / "a.ckpt") / name
    content = file.read_bytes()
    file.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    check(tmp_path / "a.ckpt", verify=False, world_size=world_size)
    with pytest.raises(DamagedCheckpointError, match=rf"a\.ckpt/{name} has the SHA-256 .* was written\. Restore"):
        check(tmp_path / "a.ckpt", world_size=world_size)
    file.write_bytes(content[:-3])
    sizes = rf"{name} has {len(content) - 3} bytes where {len(content)} were written"
    with pytest.raises(DamagedCheckpointError, match=sizes):
        check(tmp_path / "a.ckpt", verify=False, world_size=world_size)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{name} is missing.*fall_back_to_previous=True"):
        check(tmp_path / "a.ckpt", verify=False, world_size=world_size)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sharded/../../outside", "link", "folder/outside"])
def test_files_outside_are_neither_read_nor_hashed(tmp_path, name):
    """By their names in the manifest, or by links that the checkpoint holds."""
    path = write(tmp_path / "a.ckpt")
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "b.ckpt").symlink_to(path)  # by a link to the checkpoint itself all is well
    check(tmp_path / "b.ckpt")
    if name == "link":
        (path / name).symlink_to(tmp_path / "outside")
    if name.startswith("folder"):
        (path / "folder").symlink_to(tmp_path)
    files = {"trainer.pt": record_file(path / "trainer.pt"), name: record_file(path / name)}
    write_manifest(path, {"global_step": 1}, files)
    for verify in (True, False):
        with pytest.raises(DamagedCheckpointError, match=r"outside the checkpoint|leads out of the checkpoint"):
            check(path, verify, world_size=2)


def test_a_link_that_no_manifest_names_is_found(tmp_path):
    path = write(tmp_path / "a.ckpt")
    (path / "inner").symlink_to("trainer.pt")
    check(path)
    (path / "hf").symlink_to("/etc")
    with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt/hf leads out of the checkpoint"):
        check(path)


def test_a_manifest_vouches_for_itself(tmp_path):
    """Any changed character that means something is found."""
    path = write(tmp_path / "a.ckpt")
    text = (path / MANIFEST_FILE).read_text()
    for old, new in [('"global_step": 1', '"global_step": 2'), ("sharded/0", "sharded/1"), ("{", "[")]:
        (path / MANIFEST_FILE).write_text(text.replace(old, new, 1))
        with pytest.raises(DamagedCheckpointError, match=MANIFEST_FILE):
            read_manifest(path)
    (path / MANIFEST_FILE).write_text(text)
    read_manifest(path)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist. There is no checkpoint in "):
        read_manifest(tmp_path / "nothing")
    for step in range(7):
        os.utime(write(tmp_path / "beside" / f"{step}.ckpt") / MANIFEST_FILE, (step, step))
    (tmp_path / "beside" / "half.ckpt").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is 6.ckpt, 5.ckpt, 4.ckpt, 3.ckpt, 2.ckpt and 2 more\.$"):
        read_manifest(tmp_path / "beside" / "nothing")
    with pytest.raises(ValueError, match=r"is not a checkpoint of this strategy, or one that was never finished") as no:
        read_manifest(tmp_path)
    assert not isinstance(no.value, DamagedCheckpointError)
    with pytest.raises(ValueError, match=r"In .*beside there is 6.ckpt, 5.ckpt"):
        read_manifest(tmp_path / "beside")
    with pytest.raises(ValueError, match=r"It is a file of the checkpoint .*6.ckpt\.$"):
        read_manifest(tmp_path / "beside" / "6.ckpt" / MANIFEST_FILE)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(ValueError, match=f"format {FORMAT_VERSION + 1}, .* upgrade lightning-megatron-rl"):
        read_manifest(tmp_path)


def test_previous_checkpoints_from_the_latest(tmp_path):
    """Not a later one, not through links, nothing that has no manifest or a broken one."""
    for step in (1, 2, 3, 4):
        write(tmp_path / f"step={step}.ckpt", step)
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    names = [path.name for path in previous_checkpoints(tmp_path / "step=3.ckpt")]
    assert names == ["step=2.ckpt", "step=1.ckpt"]
    assert [path.name for path in previous_checkpoints(tmp_path / "last.ckpt")] == ["step=1.ckpt"]
    (tmp_path / "step=3.ckpt" / MANIFEST_FILE).write_text("{")  # of which step it is cannot be known
    names = [path.name for path in previous_checkpoints(tmp_path / "step=3.ckpt")]
    assert names == ["step=4.ckpt", "step=2.ckpt", "step=1.ckpt"]


def test_another_checkpoint_of_the_same_step_is_taken_first(tmp_path):
    """With `save_last` there are two full directories of one step; if one is damaged, the other loses no step.

    Fails with `step < last_step`: the run would fall back further than it must.
    """
    for name, step in (("step=1", 1), ("step=2", 2), ("step=3", 3), ("last", 2)):
        write(tmp_path / f"{name}.ckpt", step)
    for damaged, twin in (("last", "step=2"), ("step=2", "last")):
        (tmp_path / f"{damaged}.ckpt" / "sharded" / "0").write_bytes(b"")
        names = [path.name for path in previous_checkpoints(tmp_path / f"{damaged}.ckpt")]
        assert names == [f"{twin}.ckpt", "step=1.ckpt"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from lightning_megatron_rl.checkpoints.manifest import HashedFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with HashedFile(Path(sys.argv[1])) as file:
        file.write(bytes(5000))
except OSError as error:
    print(type(error).__name__)
"""


def test_a_full_disk_is_an_error_and_not_a_short_file(tmp_path):
    """The operating system writes what fits and says how much that was. Fails if that is not looked at."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "OSError", done.stderr
    assert done.stderr == ""
