"""Settings and fixtures of the whole suite."""

import gc
import os
from pathlib import Path

import jax
import pytest

# These are read when the backend starts, which importing jax does not do.
# Virtual CPU devices deadlock on few cores with fewer threads.
os.environ.setdefault("NPROC", "16")
# The programs that tests start leave the user's cache of compiled ones alone.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
# The suite compiles hundreds of tiny functions and runs each a few times: compile fast, which makes
# it nearly three times faster. XLA aborts at a flag it does not know; later ones lack the second.
FAST_COMPILES = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # tiny programs gain nothing by being split
]
if jax.__version_info__ < (0, 11):
    FAST_COMPILES.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FAST_COMPILES))
# Tracing makes many objects that live long: looked through as often as by default, they cost a
# twentieth of the suite's time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


MAPS = Path("/proc/self/maps")
MANY_MAPS = 25_000  # Linux allows 65,530; a module adds up to 10,000


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_compiled():
    """Every compiled function holds memory maps, of which a process may have only so many.

    What modules share is compiled again after each clearing: a tenth of the suite's time.
    """
    yield
    if not MAPS.exists() or MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()


@pytest.fixture
def x64():
    """float64 for one test only: the other tests of the same worker stay in float32."""
    with jax.enable_x64(True):
        yield
