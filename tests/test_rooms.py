"""The order of the house: who may import whom.

`tests/house.py` reads the sources; run it to see the numbers.
"""

import ast
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import house
import pytest

import muon_jax
import pallas_kernels
from muon_jax import contrib

TREE = Path(__file__).parents[1]
ALLOWED = {
    "pallas_kernels": {"jax", "jaxlib", "numpy", "pallas_kernels"},
    "muon_jax": {"jax", "muon_jax", "numpy", "optax", "pallas_kernels"},
}
# The rooms, the lowest first. A room imports from lower rooms alone.
ORDER = {
    "pallas_kernels": (
        "arguments",
        "device",
        "_tuning",
        "_stacked",
        "_reference",
        "_lowered",
        "_triton",
        "_momentum",
        "_mosaic_gpu",
        "_implementation",
        "_products",
        "__init__",
        "tune",
    ),
    "muon_jax": (
        "_foreign",
        "_checks",
        "_table",
        "_trees",
        "_matrices",
        "_by_use",
        "_iteration",
        "_distributed",
        "_transforms",
        "_newton_schulz",
        "_scale_by_muon",
        "_presets",
        "_muon",
        "_reports",
        "__init__",
        "contrib",
    ),
}
# The iteration knows stacks of matrices alone.
NOT_FOR_ITERATION = {"_trees", "_matrices"}

MODULES = {package: house.modules_of(TREE, package) for package in house.PACKAGES}
EVERY = [module for modules in MODULES.values() for module in modules]
packages = pytest.mark.parametrize("package", house.PACKAGES)


def sentence_of(module: house.Module) -> str:
    return ast.get_docstring(module.tree) or ""


@packages
def test_other_packages(package):
    assert len(MODULES[package]) > 3
    for module in MODULES[package]:
        found = {name.split(".")[0] for name in house.imports_of(module)}
        assert found - sys.stdlib_module_names <= ALLOWED[package], module.name


@packages
def test_every_room_has_its_place(package):
    assert {module.room for module in MODULES[package]} == {*ORDER[package]}


@packages
def test_rooms_import_from_lower_rooms(package):
    place = {room: i for i, room in enumerate(ORDER[package])}
    upward = [
        f"{room} imports {target}"
        for room, targets in house.room_arrows(MODULES[package]).items()
        for target in targets
        if place.get(target, -1) >= place.get(room, len(place))
    ]
    assert not upward


def test_the_iteration_knows_neither_parameters_nor_trees_nor_meshes():
    assert not house.room_arrows(MODULES["muon_jax"])["_iteration"] & NOT_FOR_ITERATION


def test_no_module_reaches_itself():
    assert house.circles(house.arrows(EVERY)) == []


def test_what_is_public_is_pickled_by_its_public_name():
    for package in (muon_jax, contrib):
        for name in {*package.__all__} - {"PRESETS", "MuonDimensionNumbers"}:
            public = getattr(package, name)
            assert public.__module__ == package.__name__
            assert pickle.loads(pickle.dumps(public)) is public
    for view in (muon_jax.Split, muon_jax.Unfold):
        assert "view" in typing.get_type_hints(view)


WITHOUT_CONTRIB = """
import sys
sys.modules["muon_jax.contrib"] = None  # an import of it raises
import jax, jax.numpy as jnp
import muon_jax
params = {"w": jnp.ones((4, 6)), "b": jnp.ones(3)}
for arguments in ({}, {"preset": "moonlight"}, {"mu_dtype": "bfloat16"}):
    optimizer = muon_jax.muon(0.1, **arguments)
    jax.jit(optimizer.update)(params, optimizer.init(params), params)
muon_jax.describe(params)
try:
    muon_jax.muon(0.1, mu_dtype="int8")
except ImportError as error:
    assert "muon_jax.contrib" in str(error)
    print("done")
"""


def test_the_core_does_without_contrib():
    command = [sys.executable, "-c", WITHOUT_CONTRIB]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.endswith("done\n"), result.stderr


def test_the_library_takes_what_is_public_of_the_kernels():
    modules = ("pallas_kernels.arguments.", "pallas_kernels.device.")
    public = {f"pallas_kernels.{name}" for name in (*pallas_kernels.__all__, "device")}
    private = [
        f"{module.name} imports {name}"
        for module in MODULES["muon_jax"]
        for name in house.imports_of(module)
        if name.startswith("pallas_kernels.")
        if name not in public and not name.startswith(modules)
    ]
    assert not private


def test_a_room_says_in_a_sentence_what_it_is():
    roots = {*house.PACKAGES}  # their docstrings are longer
    rooms = [m for m in EVERY if m.path.name == "__init__.py" and m.name not in roots]
    assert len(rooms) > 5
    for room in rooms:
        sentence = sentence_of(room)
        assert sentence.endswith(".") and "\n" not in sentence and sentence.count(". ") == 0, room


def test_every_module_says_what_it_is():
    assert not [module.name for module in EVERY if not sentence_of(module)]


def test_every_parameter_and_result_has_a_type():
    assert [place for module in EVERY for place in house.unannotated(module)] == []


def test_the_length_of_the_longest_path():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert house.circles(graph) == [["b", "c"]]
    assert house.count_levels(graph) == 3
