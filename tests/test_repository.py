"""What holds for the repository as a whole: no addresses, short files, quick imports, true documents."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_megatron_rl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
MAX_LINES = 600
LONG_FILES: set[str] = set()  # files over MAX_LINES that are better left whole, each with its reason

QUICK_FOLDERS = {
    "rewards",
    "environments",
    "data",
    "modules",
    "callbacks",
    "rollout",
    "cli",
    "verify",
    "doctor",
    "devices",
    "report",
    "utilities",
    "planner",
    "parallel",
    "weights",
    "schema",
}  # imported for the command line's --help
VLLM_ALONE = ("transports.receiver", "vllm.local_worker")  # vLLM's workers import them by their names, nobody else does
SLOW_PACKAGES = {
    "megatron", "vllm", "transformers", "datasets", "math_verify", "transformer_engine", "matplotlib", "plotly",
}  # fmt: skip
COME_WITH = {  # declared by a package that is declared here
    "numpy": "transformers",
    "safetensors": "transformers",
    "huggingface_hub": "transformers",
    "pyarrow": "datasets",
    "lightning_utilities": "lightning",
    "shtab": "jsonargparse",
    "jinja2": "torch",
    "markupsafe": "torch",
    "tokenizers": "transformers",
    "triton": "torch",
    "packaging": "lightning",
}


def tracked_files() -> list[Path]:
    """The files that git knows, or would add."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts() -> Iterator[tuple[str, str]]:
    """Name and content of each tracked text file."""
    for file in tracked_files():
        content = file.read_bytes()
        if b"\0" not in content:
            yield file.relative_to(ROOT).as_posix(), content.decode()


def folder_of(file: Path) -> str:
    """The folder (or module directly in the package) that `file` belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, everywhere: bool = True) -> Iterator[tuple[str, int]]:
    """Module names imported in `tree` with their lines; without `everywhere` only what importing the file imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            yield node.module, node.lineno
            if node.module == PACKAGE.name:
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif everywhere or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            yield from imports(node, everywhere)


def package_files() -> list[Path]:
    """The package's Python files."""
    return sorted(PACKAGE.rglob("*.py"))


def test_no_address_of_a_registry_and_no_path_of_a_machine():
    registries = r"[p]ypi\.|[p]ythonhosted|download\.[p]ytorch|index-url[=\s]+http"  # brackets: not to match itself
    homes = r"(?<![\w.~}])/(home|Users|root)/\w"
    for name, text in texts():
        for number, line in enumerate(text.splitlines(), 1):
            assert not re.search(registries, line), f"{name}:{number}: {line[:120]}"
            assert not re.search(homes, line), f"{name}:{number}: {line[:120]}"


def test_license_is_the_one_that_is_stated():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert re.match(r"\s+Apache License\s+Version 2.0, January 2004\n", text)
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license-files"] == ["LICENSE"]


def test_files_are_short():
    lines = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in package_files()}
    long = {name for name, count in lines.items() if count > MAX_LINES}
    assert long == LONG_FILES, {name: lines[name] for name in long}


def test_importing_what_the_command_line_needs_imports_nothing_slow():
    for file in package_files():
        for module, line in imports(ast.parse(file.read_text())):
            assert not module.endswith(VLLM_ALONE), f"{file.relative_to(ROOT)}:{line}: {module}"
        if folder_of(file) in QUICK_FOLDERS and not ".".join(file.with_suffix("").parts).endswith(VLLM_ALONE):
            for module, line in imports(ast.parse(file.read_text()), everywhere=False):
                assert module.split(".")[0] not in SLOW_PACKAGES, f"{file.relative_to(ROOT)}:{line}: {module}"


def test_imported_packages_are_declared():
    extras = PROJECT["optional-dependencies"]
    apart = [line for name, group in GROUPS.items() if name != "docs" for line in group]
    lines = [
        *PROJECT["dependencies"],
        *apart,
        *(line for name, extra in extras.items() if name != "dev" for line in extra),
    ]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    providers = importlib.metadata.packages_distributions()
    for file in package_files():
        for module, line in imports(ast.parse(file.read_text())):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top == PACKAGE.name:
                continue
            names = {canonicalize_name(name) for name in [*providers.get(top, []), COME_WITH.get(top, top)]}
            assert names & declared, f"{file.relative_to(ROOT)}:{line}: {top} is not in pyproject.toml"


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "setup", "lint", "typecheck", "format", "requirements", "clean"} <= targets
    for name, text in texts():
        if name.endswith(".md"):
            code = re.findall(r"```.*?\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
            for block in ("".join(parts) for parts in code):
                for target in re.findall(r"(?:^|[=\d&;] ?)\bmake ([a-z]+)", block, re.MULTILINE):
                    assert target in targets, f"{name}: make {target}"


def test_links_between_documents_lead_somewhere():
    for name, text in texts():
        if name.endswith(".md"):
            for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
                if "://" not in link:
                    assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"


def test_tests_that_documents_name_exist():
    for name, text in texts():
        if name.endswith(".md"):
            for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
                assert (ROOT / file).exists(), f"{name}: {file}"
                assert f"def {test}(" in (ROOT / file).read_text() or not test, f"{name}: {file}::{test}"


@pytest.mark.parametrize("pattern", ["*.yaml", "*.yml"])
def test_configs_are_yaml(pattern: str):
    for file in (ROOT / "configs").rglob(pattern):
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


def test_every_make_target_is_described():
    text = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^([a-z]+):", text, re.MULTILINE):
        assert re.search(rf"^{target}:.*## \S", text, re.MULTILINE), target
