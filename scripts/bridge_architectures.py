"""Lists the architectures that the installed Megatron-Bridge registers, and whether Transformers and vLLM have them.

Registries are read from the packages' source, so nothing is imported and no GPU is needed.
"""

import ast
import importlib.util
import re
from pathlib import Path


def package(name: str) -> Path:
    """The directory of an installed package. Raises ModuleNotFoundError where it is missing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed: nothing to read its registry from")
    return Path(spec.submodule_search_locations[0])


def bridge_architectures() -> set[str]:
    """The `source` of every `register_bridge` in Megatron-Bridge, as names."""
    found = set()
    for file in (package("megatron.bridge") / "models").rglob("*.py"):
        text = file.read_text()
        constants = dict(re.findall(r'^(\w+) = "(\w+)"$', text, re.MULTILINE))
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "register_bridge":
                continue
            for keyword in node.keywords:
                if keyword.arg == "source":
                    value = keyword.value
                    name = str(value.value) if isinstance(value, ast.Constant) else ast.unparse(value).split(".")[-1]
                    found.add(constants.get(name, name))
    return found


def names(folder: Path, pattern: str) -> set[str]:
    """Everything that `pattern` finds in the Python files below `folder` (or in that one file)."""
    files = [folder] if folder.is_file() else folder.rglob("*.py")
    return {name for file in files for name in re.findall(pattern, file.read_text())}


def vllm_architectures() -> set[str]:
    """The names in `architectures` that the installed vLLM knows."""
    return names(package("vllm") / "model_executor/models/registry.py", r'"(\w+)":')


def main() -> None:
    """Prints one line for each architecture."""
    transformers = names(package("transformers") / "models", r"\nclass (\w+)\(")
    vllm = vllm_architectures()
    print("| architecture | Transformers | vLLM |\n|---|---|---|")
    for name in sorted(bridge_architectures()):
        print(f"| `{name}` | {'✓' if name in transformers else '–'} | {'✓' if name in vllm else '–'} |")


if __name__ == "__main__":
    main()
