"""Eight CPU devices where there is no GPU; the markers; a cache of compiled programs."""

import os
import tempfile

# XLA compiles each program in one piece: 32 pieces in parallel take more time in all.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_cpu_parallel_codegen_split_count=1", os.environ.get("XLA_FLAGS", "")]
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)

CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Makes all processes of a run share the programs that they compile, in a folder of the run."""
    if jax.default_backend() != "cpu":
        return
    if hasattr(config, "workerinput"):
        folder = config.workerinput["compilation_cache"]
    else:
        temporary = tempfile.TemporaryDirectory()
        config.add_cleanup(temporary.cleanup)
        folder = config.stash[CACHE] = temporary.name
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tells a worker of pytest-xdist the folder of the run."""
    node.workerinput["compilation_cache"] = node.config.stash.get(CACHE, "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Most programs are compiled a third sooner, at the cost of their speed."""
    is_sooner = not item.get_closest_marker("optimized") and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", is_sooner)
    is_cached = not item.get_closest_marker("uncached")
    if is_cached != jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", is_cached)
        compilation_cache.reset_cache()
