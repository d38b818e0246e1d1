"""Sine waves of random amplitude and phase."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from lavajax import validate
from lavajax.tasks.base import Split, split_key, uniform
from lavajax.types import Array, Points, Task


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sine:
    """y = A sin(x + phase), without noise (Finn et al. 2017).

    One point leaves a one-dimensional family of sines; two determine the task.

    Attributes:
        shots: N, support points.
        queries: M, query points.
        amplitude: range of A.
        phase: range of the phase, in radians. (0, pi) is Finn et al.'s; the code that came with
            the LAVA paper used (-pi, pi).
        x_range: range of the inputs.
    """

    shots: int = 10
    queries: int = 50
    amplitude: tuple[float, float] = (0.1, 5.0)
    phase: tuple[float, float] = (0.0, math.pi)
    x_range: tuple[float, float] = (-5.0, 5.0)

    def __post_init__(self) -> None:
        validate.integer(self, "shots", minimum=1)
        validate.integer(self, "queries", minimum=1)
        for field in ("amplitude", "phase", "x_range"):
            validate.interval(self, field)

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A fresh task: support x, y ``[N, 1]`` and query x, y ``[M, 1]``."""
        a_key, p_key, x_key = jax.random.split(split_key(key, split), 3)
        amplitude = uniform(a_key, (), self.amplitude)
        phase = uniform(p_key, (), self.phase)
        x = uniform(x_key, (self.shots + self.queries, 1), self.x_range)
        y = amplitude * jnp.sin(x + phase)
        n = self.shots
        return Task(Points(x[:n], y[:n]), Points(x[n:], y[n:]))
