"""Verifiers by name: the function behind one, and a digest of what decides its values.

A verifier is a shipped name or `package.module:function`, called with (response text, prompt row) and returning a
number, by a process of its own (tasks.rewards.calls).
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, cast

from schemas import keys
from schemas.errors import ConfigError
from tasks.rewards import gym_scores

GYM_VERIFIER = "reasoning_gym"
Verifier = Callable[[str, dict[str, Any]], float]
SHIPPED: dict[str, Verifier] = {GYM_VERIFIER: gym_scores.score_response}


def load(name: str) -> Verifier:
    """The function behind a verifier's name. Raises LookupError that says what is missing; user code may raise too."""
    if name in SHIPPED:
        gym_scores.gym()
        return SHIPPED[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise LookupError(f"{name!r}")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{type(error).__name__}: {error}") from error
    if callable(found):
        return cast(Verifier, found)
    raise LookupError(f"{name!r} is a {type(found).__name__}")


def source_digest(name: str) -> str:
    """SHA-256, in hexadecimal, of what decides a verifier's values.

    Of a module of the user's: the bytes of its file and of all files outside installed packages that it imports, by
    the import statements in them, and name and version of the packages that these import. Of a module of an
    installed package: the package's name and version. Modules are looked for where the verifier's process does, in
    the working directory and then on sys.path, and are read, never run. Raises ConfigError for a module that is not
    there and a name without a module.
    """
    if name == GYM_VERIFIER:
        found = {"gym_scores": keys.digest_bytes(Path(gym_scores.__file__).read_bytes())}
        return keys.digest(found | {"reasoning_gym": _version(name, "reasoning_gym")})
    module, _, function = name.partition(":")
    found = {}
    pending = [module]
    while pending:
        current = pending.pop()
        for part in _with_parents(current):
            if part in found:
                continue
            spec = _spec(part)
            if spec is None:
                if part == module or (module + ".").startswith(part + "."):
                    raise ConfigError(
                        f"verifier {name!r}", expected="package.module:function with a module that can be found",
                        found=f"no module {part!r}",
                        next_command="the module's folder belongs on PYTHONPATH or is the working directory",
                    )  # fmt: skip
                break  # an import statement may name a function of its module, or a package that is not there
            kind, value = _content(name, part, spec)
            found[part] = value
            if kind == "file" and spec.origin and spec.origin.endswith(".py"):
                pending += _imports(Path(spec.origin).read_bytes(), part, spec.submodule_search_locations is not None)
            if kind != "file":
                break
    return keys.digest({"function": function, "modules": {part: value for part, value in found.items() if value}})


def _with_parents(module: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c: importing the last one runs them all."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _spec(module: str) -> ModuleSpec | None:
    """As the import system would find it, without running the packages around it."""
    if module in sys.builtin_module_names:
        return ModuleSpec(module, None, origin="built-in")
    spec, path = None, [os.getcwd(), *sys.path]
    for name in module.split("."):
        if not name.isidentifier():
            return None
        # By its own name under the folders of its parent: a folder without __init__.py inside another such folder would
        # be looked up through the parent module, which is not imported here.
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _content(name: str, module: str, spec: ModuleSpec) -> tuple[str, str]:
    """(kind, what stands for the module in the digest); of the standard library and folders without a file nothing."""
    if spec.origin is None:
        return "file", ""
    folders = sysconfig.get_paths()
    path = Path(spec.origin).resolve()
    top = module.partition(".")[0]
    if any(path.is_relative_to(Path(folders[f]).resolve()) for f in ("purelib", "platlib")):
        return "package", _version(name, top)
    if top in sys.stdlib_module_names:
        return "standard library", ""
    return "file", keys.digest_bytes(path.read_bytes())


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {package: sorted(set(names)) for package, names in importlib.metadata.packages_distributions().items()}


def _version(name: str, package: str) -> str:
    distributions = _distributions().get(package)
    if not distributions:
        raise ConfigError(f"verifier {name!r}", expected=f"an installed package {package}", found="none with a version")
    return ", ".join(f"{d} {importlib.metadata.version(d)}" for d in distributions)


def _imports(source: bytes, module: str, is_package: bool) -> Iterator[str]:
    """Modules that import statements anywhere in a source may name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # calling the verifier will say so
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
