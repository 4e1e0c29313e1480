"""Measures the house: rooms, imports, sizes, names, and the work of one traced update.

    python tests/house.py [TREE]

prints a table for any checkout, this one by default. A folder of a package is a room; a top-level
module is a room of its own. `tests/test_rooms.py` uses the functions.
"""

import ast
import collections
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("muon_jax", "pallas_kernels")

# What an update works out, by the module's last names and the function. Names of older trees stand
# beside today's. Where a function is memoized, only its executions count.
QUESTIONS: dict[str, set[tuple[str, str]]] = {
    "implementation asked for": {
        ("_dispatch", "select_implementation"),
        ("_selection", "select_implementation"),
    },
    "implementation worked out": {
        ("_dispatch", "select_implementation"),
        ("_selection", "_modelled_fastest"),
    },
    "reason against it asked for": {
        ("_dispatch", "unsupported_reason"),
        ("_selection", "unsupported_reason"),
    },
    "reason against it worked out": {
        ("_pallas_mosaic_gpu", "unsupported_reason"),
        ("_pallas_triton", "unsupported_reason"),
        ("_reference", "unsupported_reason"),
        ("_mosaic_gpu.syrkx", "unsupported_reason"),
        ("_triton.syrkx", "unsupported_reason"),
        ("_selection", "_mosaic_reason"),
        ("_selection", "_triton_reason"),
    },
    "device looked up": {("_device", "_device"), ("_device", "_current"), ("device", "_current")},
    "form chosen": {
        ("_form", "choose"),
        ("_iteration.form", "choose"),
        ("_iteration.form", "fastest_form"),
    },
    "segments of the gram form": {
        ("_gram", "segments"),
        ("_iteration.gram", "_segments"),
    },
    "coefficients resolved": {
        ("_coefficients", "resolve"),
        ("_iteration.schedules", "resolve_schedule"),
    },
    "plan made": {
        ("_plan", "make"),
        ("_distributed.planning", "make"),
        ("_distributed.planning", "make_plan"),
    },
    "shardings located": {
        ("_sharding", "resolve"),
        ("_distributed.sharding", "resolve"),
        ("_distributed.sharding", "locate"),
    },
    "fill_missing": {("_momentum", "fill_missing"), ("_trees", "fill_missing")},
}


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


def static_rows(tree: Path) -> dict[str, list[Any]]:
    """Returns what the sources of a checkout say, by package."""
    rows: dict[str, list[Any]] = collections.defaultdict(list)
    every = []
    for package in PACKAGES:
        modules = modules_of(tree, package)
        every += modules
        by_module, by_room = arrows(modules), room_arrows(modules)
        longest = max(modules, key=lambda module: module.source.count("\n"))
        rows["rooms"].append(len(by_room))
        rows["modules"].append(len(modules))
        rows["levels of rooms"].append(count_levels(by_room))
        rows["levels of modules"].append(count_levels(by_module))
        rows["arrows between rooms"].append(sum(map(len, by_room.values())))
        rows["arrows between modules"].append(sum(map(len, by_module.values())))
        rows["circles of rooms"].append(len(circles(by_room)))
        rows["circles of modules"].append(len(circles(by_module)))
        name = longest.name.removeprefix(f"{package}.")
        rows["longest module"].append(f"{longest.source.count('\n')} {name}")
        rows["without a type"].append(sum(len(unannotated(module)) for module in modules))
    repeated = {name: where for name, where in definitions(every).items() if len(where) > 1}
    rows["names with several definitions"] = [len(repeated), ", ".join(sorted(repeated))]
    return rows


# ------------------------------------------------------------------------------ one traced update

TRACED = {"one matrix": "64×96", "three, sharded": "64×64, 64×128, 128×64 on 8 devices"}


def count_calls(tree: Path, which: str) -> dict[str, int]:
    """Returns the calls of Python functions in one traced update, in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--trace", which, str(tree)]
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def trace(which: str, tree: Path) -> dict[str, int]:
    """Traces one update in this process and counts calls."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_num_cpu_devices", 8)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import muon_jax

    assert Path(str(muon_jax.__file__)).is_relative_to(tree)
    if which == "one matrix":
        params = {"w": jnp.ones((64, 96))}
    else:
        mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
        shapes = ((64, 64), (64, 128), (128, 64))
        params = {str(i): jax.device_put(jnp.ones(s), sharding) for i, s in enumerate(shapes)}
    optimizer = muon_jax.muon(0.02)
    state = optimizer.init(params)
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    names: dict[str, str | None] = {}

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):  # no comprehension, no lambda
            if code.co_filename not in names:
                names[code.co_filename] = _module_of(code.co_filename, tree)
            if module := names[code.co_filename]:
                calls[module, code.co_name] += 1

    sys.setprofile(profile)
    try:
        jax.jit(optimizer.update).lower(params, state, params)
    finally:
        sys.setprofile(None)
    rows = {"calls": calls.total(), "modules entered": len({module for module, _ in calls})}
    for question, places in QUESTIONS.items():
        rows[question] = sum(
            count
            for (module, name), count in calls.items()
            if any(name == known and f".{module}".endswith(end) for end, known in places)
        )
    return rows


def _module_of(filename: str, tree: Path) -> str | None:
    path = Path(filename)
    if not path.is_relative_to(tree):
        return None
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts) if parts[0] in PACKAGES else None


def main() -> None:
    """Prints the table of a checkout."""
    if sys.argv[1:2] == ["--trace"]:
        print(json.dumps(trace(sys.argv[2], Path(sys.argv[3]))))
        return
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    print(f"{'':<32}{'muon_jax':<24}pallas_kernels")
    for label, (first, second) in static_rows(tree).items():
        print(f"{label:<32}{first!s:<24}{second}")
    found = {which: count_calls(tree, which) for which in TRACED}
    print("\n" + " " * 32 + "".join(f"{which:<24}" for which in found))
    for label in next(iter(found.values())):
        print(f"{label:<32}" + "".join(f"{rows[label]:<24}" for rows in found.values()))


if __name__ == "__main__":
    main()
