"""Packages of a few bytes, made by hand, in a folder that pip and uv take for an index: nothing is downloaded."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

# A build backend without dependencies. It notes each build of a wheel, and waits for a file if the environment says so.
BACKEND = """
import os, time, zipfile

def _wheel(directory, files):
    name = "{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        info = "{module}-{version}.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: {module}\\nVersion: {version}\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(info + "RECORD", "")
    return name

def build_wheel(directory, config_settings=None, metadata_directory=None):
    with open(os.environ["TINY_BUILD_LOG"], "a") as log:
        log.write("{module}\\n")
    stop = time.monotonic() + 30
    while not os.path.exists(os.environ["TINY_BUILD_GO"]) and time.monotonic() < stop:
        time.sleep(0.02)
    return _wheel(directory, {{"{module}.py": "version = '{version}'\\n"}})

def build_editable(directory, config_settings=None, metadata_directory=None):
    return _wheel(directory, {{"{module}.pth": os.getcwd() + "\\n"}})
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "{module}"
version = "{version}"
"""


def make_wheel(index: Path, name: str, version: str, files: dict[str, str] | None = None) -> str:
    """Add a wheel with the module `name` (or with `files`) to `index`; returns its pinned, hashed requirement."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        info = f"{name}-{version}.dist-info/"
        wheel.writestr(f"{info}METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        for path, text in (files or {f"{name}.py": f"version = '{version}'\n"}).items():
            member = zipfile.ZipInfo(path)
            member.external_attr = 0o100755 << 16  # a script stays executable
            wheel.writestr(member, text)
        wheel.writestr(f"{info}RECORD", "")
    return _publish(index, name, version, f"{name}-{version}-py3-none-any.whl", buffer.getvalue())


def make_sdist(index: Path, name: str, version: str) -> str:
    """Add a source distribution of the module `name` to `index`; returns its pinned, hashed requirement."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        files = {
            "PKG-INFO": f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n",
            "pyproject.toml": PYPROJECT.format(module=name, version=version),
            "backend.py": BACKEND.format(module=name, version=version),
        }
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return _publish(index, name, version, f"{name}-{version}.tar.gz", buffer.getvalue())


def make_project(directory: Path, name: str) -> None:
    """Write a project that an editable installation can install."""
    (directory / "pyproject.toml").write_text(PYPROJECT.format(module=name, version="0.1"))
    (directory / "backend.py").write_text(BACKEND.format(module=name, version="0.1"))


def _publish(index: Path, name: str, version: str, file: str, content: bytes) -> str:
    """Put a file into the index and its page."""
    folder = index / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(content)
    links = "".join(f'<a href="{other.name}">{other.name}</a>' for other in folder.iterdir() if other.suffix != ".html")
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
