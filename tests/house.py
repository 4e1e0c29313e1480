"""Measures the house: its size, who imports whom, and the work of one traced update.

    python tests/house.py [TREE ...]

prints a column for each tree, which is the path of a checkout or a commit of this repository;
this checkout alone by default. A folder of a package is a room, and so is a top-level module.
`tests/test_rooms.py` uses the functions.
"""

import ast
import collections
import dataclasses
import functools
import inspect
import io
import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from compare_bits import checkout

PACKAGES = ("muon_jax", "pallas_kernels")
# Folders of `muon_jax` that are no part of the core.
AREAS = ("contrib", "benchmarks", "docs")


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of one of the packages.

    Attributes:
        name: with dots; a package's own is `muon_jax` or `muon_jax._iteration`.
        path: its file.
    """

    name: str
    path: Path

    @functools.cached_property
    def source(self) -> str:
        """Returns the text of the file."""
        return self.path.read_text()

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Returns the syntax tree."""
        return ast.parse(self.source)

    @property
    def room(self) -> str:
        """Returns the folder or the top-level module; `__init__` of a package for its own."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"


def modules_of(tree: Path, package: str) -> list[Module]:
    """Returns the modules of a package in a checkout, sorted by path."""
    root, found = tree / package, []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found.append(Module(".".join((package, *parts)), path))
    return found


def imports_of(module: Module) -> Iterator[str]:
    """Yields the full name of each import: of modules, and of what is taken from them."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"relative import in {module.path}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Returns, for the name of each module, those of the modules that it imports."""
    known = {module.name: module for module in modules}

    def target(name: str) -> str | None:
        above = name.rpartition(".")[0]
        return next((candidate for candidate in (name, above) if candidate in known), None)

    return {
        name: {found for i in imports_of(module) if (found := target(i)) and found != name}
        for name, module in known.items()
    }


def room_arrows(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Returns, for each room, the other rooms that it imports from."""
    rooms = {module.name: module.room for module in modules}
    found: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, targets in arrows(modules).items():
        found[rooms[name]] |= {rooms[target] for target in targets} - {rooms[name]}
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the sets of nodes that reach each other, of two or more."""
    reached = {node: _reach(graph, node) for node in graph}
    found = {
        frozenset(other for other in reached[node] if node in reached[other]) | {node}
        for node in graph
        if node in reached[node]
    }
    return [sorted(nodes) for nodes in found]


def _reach(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph[node]
    return seen


def count_levels(graph: Mapping[str, set[str]]) -> int:
    """Returns the number of nodes on the longest path, a circle counting as one node."""
    of_node = {node: frozenset([node]) for node in graph}
    for circle in circles(graph):
        of_node |= dict.fromkeys(circle, frozenset(circle))

    @functools.cache
    def level(nodes: frozenset[str]) -> int:
        below = {of_node[target] for node in nodes for target in graph[node]} - {nodes}
        return 1 + max(map(level, below), default=0)

    return max(map(level, of_node.values()), default=0)


def unannotated(module: Module) -> list[str]:
    """Returns the parameters and results without a type, of nested functions too."""
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        named = [arg for arg in every if arg and arg.arg not in ("self", "cls")]
        place = f"{module.name}:{node.lineno} {node.name}"
        found += [f"{place}({arg.arg})" for arg in named if arg.annotation is None]
        found += [f"{place} ->"] if node.returns is None else []
    return found


def definitions(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Returns, for each function or class at the top of a module, the modules that define it."""
    found = collections.defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name].append(module.name)
    return dict(found)


def lines_by_area(tree: Path) -> dict[str, int]:
    """Returns how many lines of Python, and words of documents, a checkout has."""

    def lines(folder: str) -> int:
        return sum(len(path.read_text().splitlines()) for path in (tree / folder).rglob("*.py"))

    documents = [tree / "README.md", *tree.glob("docs/*.md"), *tree.glob("muon_jax/docs/*.md")]
    words = sum(len(path.read_text().split()) for path in documents if path.exists())
    others = sum(lines(f"muon_jax/{area}") for area in AREAS)
    return {
        "core": lines("muon_jax") - others,
        "contrib": lines("muon_jax/contrib"),
        "kernels": lines("pallas_kernels"),
        "benchmarks": lines("benchmarks") + lines("muon_jax/benchmarks"),
        "tests": lines("tests"),
        "words of documents, no records": words,
    }


def kilobytes_zipped(tree: Path) -> int:
    """Returns the size of both packages in a zip file, as a wheel is."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for package in PACKAGES for path in (tree / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(tree))
    return file.tell() // 1000


def rows_of_sources(tree: Path) -> dict[str, Any]:
    """Returns what the sources of a checkout say."""
    by_package = {package: modules_of(tree, package) for package in PACKAGES}
    modules = [module for own in by_package.values() for module in own]
    functions = [
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef)
    ]
    repeated = [name for name, where in definitions(modules).items() if len(where) > 1]
    return {
        **{f"lines, {area}": count for area, count in lines_by_area(tree).items()},
        "modules": len(modules),
        "functions": len(functions),
        "rooms": sum(len(room_arrows(own)) for own in by_package.values()),
        "arrows between rooms": sum(
            len(targets) for own in by_package.values() for targets in room_arrows(own).values()
        ),
        "circles of modules": len(circles(arrows(modules))),
        "names with several definitions": len(repeated),
        "KB, zipped": kilobytes_zipped(tree),
    }


# ------------------------------------------------------------------------------ one traced update


def rows_of_update(tree: Path) -> dict[str, Any]:
    """Returns what a fresh process says of a checkout: one traced update, and the import."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--trace", str(tree)]
    found = []
    for _ in range(3):
        result = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        found.append(json.loads(result.stdout.splitlines()[-1]))
    times = [rows.pop("seconds of the import") for rows in found]
    return {**found[0], "seconds of the import": statistics.median(times)}


def trace(tree: Path) -> dict[str, Any]:
    """Traces one update of one 64×256 matrix in this process, and counts our own calls.

    Comprehensions and lambdas do not count.
    """
    import jax
    import jax.numpy as jnp
    import optax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.block_until_ready(optax.adamw(0.1).init({"w": jnp.ones((64, 256))}))
    begin = time.perf_counter()
    import muon_jax

    seconds = time.perf_counter() - begin
    assert Path(str(muon_jax.__file__)).is_relative_to(tree)
    params, optimizer = {"w": jnp.ones((64, 256))}, muon_jax.muon(0.02)
    state = optimizer.init(params)
    calls: collections.Counter[str] = collections.Counter()

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            calls[code.co_filename] += 1

    sys.setprofile(profile)
    try:
        jax.jit(optimizer.update).lower(params, state, params)
    finally:
        sys.setprofile(None)
    roots = tuple(str(tree / package) + os.sep for package in PACKAGES)
    own = {name: count for name, count in calls.items() if name.startswith(roots)}
    return {
        "modules entered by one update": len(own),
        "calls of one update": sum(own.values()),
        "arguments of muon": len(inspect.signature(muon_jax.muon).parameters),
        "arguments of scale_by_muon": len(inspect.signature(muon_jax.scale_by_muon).parameters),
        "words of muon's docstring": len((muon_jax.muon.__doc__ or "").split()),
        "seconds of the import": round(seconds, 2),
    }


def main() -> None:
    """Prints the table."""
    if sys.argv[1:2] == ["--trace"]:
        print(json.dumps(trace(Path(sys.argv[2]))))
        return
    names = sys.argv[1:] or [str(Path(__file__).parents[1])]
    with ExitStack() as stack:
        trees = [stack.enter_context(checkout(name)) for name in names]
        columns = [rows_of_sources(tree) | rows_of_update(tree) for tree in trees]
    print(" " * 34 + "".join(f"{name.rstrip('/').rpartition('/')[2][:16]:>18}" for name in names))
    for label in columns[0]:
        print(f"{label:<34}" + "".join(f"{column[label]:>18}" for column in columns))


if __name__ == "__main__":
    main()
