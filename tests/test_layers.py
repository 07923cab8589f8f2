"""The package's structure: imports run one way, and each dependency stays in its place.

Parses every file, so imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "strata_jit"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

# A unit imports itself and the lines above its own; units on one line do not know each other. "" is the
# package's own __init__.py.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "units"),
    ("gguf",),
    ("kernels",),
    ("topology",),
    ("placement",),
    ("pool",),
    ("models",),
    ("engine",),
    ("",),
    ("report",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}

# Where each import that is not ordinary may appear, as module prefixes.
FENCES: dict[str, tuple[str, ...]] = {
    "numba": ("kernels",),
    "llvmlite": ("kernels",),
    "numpy": ("gguf", "kernels", "topology", "pool", "models", "engine"),
    "tokenizers": ("gguf",),
    "jinja2": ("gguf",),
    "rich": ("report",),
    "click": ("cli", "commands"),
    "ctypes": ("topology",),
    "subprocess": ("pool",),
    "multiprocessing": ("pool",),
    "concurrent": (),
    "_posixsubprocess": (),
    "pty": (),
}
# Likewise for names of `os`, by prefix.
OS_FENCES: dict[str, tuple[str, ...]] = {
    "sched_": ("topology",),
    "fork": ("pool",),
    "posix_spawn": ("pool",),
    "exec": ("pool",),
    "spawn": ("pool",),
    "system": (),
    "popen": (),
    "getenv": ("commands",),
    # pool hands the environment to its children, kernels finds the user's cache directory.
    "environ": ("commands", "pool", "kernels"),
}
# Imports by a computed name escape this test, so they are few: lazy public names, and "module:attr" of ops.
IMPORT_BY_NAME = ("", "kernels", "pool")


@dataclass(frozen=True)
class Import:
    """`module` imports `target` (dotted, absolute) at `line`; not `real` if only type checkers do."""

    module: str
    target: str
    line: int
    real: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def modules() -> dict[str, Path]:
    """Dotted name below the package -> file; "" is the package itself."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text("utf-8"))


def unit_of(module: str) -> str:
    return module.split(".")[0]


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or (place and module.startswith(place + ".")) for place in places)


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    tree = tree_of(module)
    real = {id(node) for node in _run(tree)}
    return tuple(
        Import(module, target, node.lineno, id(node) in real)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in _targets(module, node)
    )


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in `if TYPE_CHECKING:` bodies."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.orelse
            continue
        yield node
        yield from _run(node)


def _targets(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = [PACKAGE, *filter(None, module.split("."))]
        is_package = modules()[module].name == "__init__.py"
        kept = len(parts) - node.level + is_package
        base = ".".join(filter(None, [*parts[:kept], base]))
    for name in node.names:
        # `from package import module` imports the module; `from module import name` the module `base`.
        full = f"{base}.{name.name}"
        yield full if full.removeprefix(f"{PACKAGE}.") in modules() else base


def internal(target: str) -> str | None:
    """The target's name below the package, or None for a module from elsewhere."""
    if target == PACKAGE:
        return ""
    return target.removeprefix(f"{PACKAGE}.") if target.startswith(f"{PACKAGE}.") else None


def all_imports() -> Iterator[Import]:
    for module in modules():
        yield from imports_of(module)


def test_modules_are_found() -> None:
    assert {"errors", "units", "cli", "commands", "report", "", "engine.results"} <= set(modules())


def test_every_module_has_a_layer() -> None:
    assert [module for module in modules() if unit_of(module) not in LEVEL] == []


def test_imports_name_existing_modules() -> None:
    missing = [str(found) for found in all_imports() if (internal(found.target) or "") not in modules()]
    assert missing == []


def test_imports_run_one_way() -> None:
    wrong = []
    for found in all_imports():
        target = internal(found.target)
        if target is None or unit_of(target) == unit_of(found.module):
            continue
        if LEVEL[unit_of(target)] >= LEVEL[unit_of(found.module)]:
            wrong.append(str(found))
    assert wrong == []


def test_third_party_imports_stay_in_their_places() -> None:
    wrong = []
    for found in all_imports():
        name = found.target.split(".")[0]
        if internal(found.target) is not None or (name in sys.stdlib_module_names and name not in FENCES):
            continue
        if not within(found.module, FENCES.get(name, ())):
            wrong.append(str(found))
    assert wrong == []


@pytest.mark.parametrize("prefix", OS_FENCES)
def test_os_functions_stay_in_their_places(prefix: str) -> None:
    wrong = [
        f"{module}:{line} uses os.{name}"
        for module in modules()
        for name, line in _os_names(tree_of(module))
        if name.startswith(prefix) and not within(module, OS_FENCES[prefix])
    ]
    assert wrong == []


def _os_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from ((name.name, node.lineno) for name in node.names)


def test_imports_by_name_are_few() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module in modules()
        if not any(module == place or within(module, (place,)) for place in IMPORT_BY_NAME)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Name | ast.Attribute)
        and (node.id if isinstance(node, ast.Name) else node.attr) in ("import_module", "__import__")
    ]
    assert wrong == []


def reached_from(modules_first: list[str], but: frozenset[str] = frozenset()) -> set[str]:
    """Every module, of the package or not, that these can import, at once or in some function.

    What the modules of `but` import does not count.
    """
    seen: set[str] = set()
    todo = list(modules_first)
    while todo:
        current = todo.pop()
        parts = current.split(".") if current else []
        # Importing a.b.c runs a/__init__ and a.b/__init__ first.
        for ancestor in ("", *(".".join(parts[: i + 1]) for i in range(len(parts)))):
            if ancestor in seen or ancestor not in modules():
                continue
            seen.add(ancestor)
            for found in () if ancestor in but else imports_of(ancestor):
                target = internal(found.target)
                if found.real and target is None:
                    seen.add(found.target)
                elif found.real and target is not None:
                    todo.append(target)
    return seen


# Quantising starts no node process: the user's process is the one that computes, once it is asked to.
COMPUTES_ITSELF = frozenset({"engine.quantize"})


def test_host_process_never_loads_numba() -> None:
    # pool's modules for node processes are no part of this: the host starts them as programs.
    units = {"cli", "commands", "report", "", "engine", "models", "gguf"}
    host = [module for module in modules() if unit_of(module) in units]
    reached = reached_from([*host, "pool.host"], but=COMPUTES_ITSELF)
    assert {"engine.model", "pool.host"} <= reached
    assert not {name.split(".")[0] for name in reached} & {"numba", "llvmlite"}


@pytest.mark.parametrize("module", sorted(COMPUTES_ITSELF))
def test_who_computes_itself_loads_numba_late(module: str) -> None:
    code = f"import sys, {PACKAGE}.{module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numba", "llvmlite"} & set(loaded.stdout.split())


def test_twins_are_free_of_numba() -> None:
    reached = reached_from([module for module in modules() if within(module, ("kernels.ref",))])
    assert not {name.split(".")[0] for name in reached} & {"numba", "llvmlite"}


def test_command_starts_light() -> None:
    code = f"import sys, {PACKAGE}.cli; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numba", "llvmlite", "numpy", "rich", "tokenizers", "jinja2", "subprocess"}
    assert not heavy & set(loaded.stdout.split())


def test_public_names_have_homes() -> None:
    assignments = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree_of("").body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    homes = assignments["_HOMES"]
    assert sorted(assignments["__all__"]) == sorted([*homes, "__version__"])
    for name, home in homes.items():
        assert name in _defined(internal(home) or ""), f"{home} has no {name}"


def _defined(module: str) -> set[str]:
    names = set()
    for node in tree_of(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(name.asname or name.name for name in node.names)
    return names
