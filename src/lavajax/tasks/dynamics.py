"""Dynamical systems with random parameters: learn a vector field from a few of its values.

A task is one system. Its points are states, independent and uniform in a box, and their exact time
derivatives; there are no trajectories and no noise. Ranges and boxes are those of the LAVA paper
and its code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp

from lavajax import validate
from lavajax.tasks.base import Split, split_key, uniform
from lavajax.types import Array, Points, Task

Range = tuple[float, float]


class System(Protocol):
    """A dynamical system with a state of two numbers; also a source of tasks."""

    PARAMETERS: ClassVar[tuple[str, ...]]
    """The fields that are ranges of parameters."""
    STATES: ClassVar[tuple[str, str]]
    """The names of the two numbers."""
    BOX: ClassVar[tuple[Range, Range]]
    """Their ranges."""

    @property
    def field(self) -> Callable[..., Array]:
        """The time derivative ``[..., 2]`` of states ``[..., 2]``, given parameters by name."""

    @property
    def shots(self) -> int:
        """N, support points."""

    @property
    def queries(self) -> int:
        """M, query points."""

    def parameters(self, key: Array, split: Split = "train") -> dict[str, Array]:
        """The parameters, scalars, of the task that ``sample`` draws with the same arguments."""

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A fresh task: support x, y ``[N, 2]`` and query x, y ``[M, 2]``."""


def _check(system: System) -> None:
    validate.integer(system, "shots", minimum=1)
    validate.integer(system, "queries", minimum=1)
    for name in system.PARAMETERS:
        validate.interval(system, name)


def _parameters(system: System, key: Array, split: Split = "train") -> dict[str, Array]:
    """See ``System.parameters``."""
    parameter_key, _ = jax.random.split(split_key(key, split))
    keys = jax.random.split(parameter_key, len(system.PARAMETERS))
    return {
        name: uniform(k, (), getattr(system, name))
        for name, k in zip(system.PARAMETERS, keys, strict=True)
    }


def _sample(system: System, key: Array, split: Split = "train") -> Task:
    """See ``System.sample``."""
    _, state_key = jax.random.split(split_key(key, split))
    n, keys = system.shots, jax.random.split(state_key, len(system.BOX))
    x = jnp.stack(
        [uniform(k, (n + system.queries,), r) for k, r in zip(keys, system.BOX, strict=True)],
        axis=1,
    )
    y = system.field(x, **system.parameters(key, split))
    return Task(Points(x[:n], y[:n]), Points(x[n:], y[n:]))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FitzHughNagumo:
    """An excitable cell: du/dt = c (u - u^3/3 + v), dv/dt = -(u - a + b v)/c (FitzHugh 1961).

    u is the voltage and v the recovery; everything is without units. The state box is
    [-2.5, 2.5]^2. As c may be small, dv/dt is heavy-tailed over tasks: read medians too.

    Attributes:
        shots: N, support points.
        queries: M, query points.
        a: range of the stimulus.
        b: range of the recovery's own decay.
        c: range of the ratio of time scales; above 0.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("a", "b", "c")
    STATES: ClassVar[tuple[str, str]] = ("u", "v")
    BOX: ClassVar[tuple[Range, Range]] = ((-2.5, 2.5), (-2.5, 2.5))

    shots: int = 10
    queries: int = 50
    a: tuple[float, float] = (0.1, 2.0)
    b: tuple[float, float] = (0.1, 2.0)
    c: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        _check(self)
        validate.positive_interval(self, "c")

    @staticmethod
    def field(state: Array, *, a: Array | float, b: Array | float, c: Array | float) -> Array:
        """(du/dt, dv/dt), ``[..., 2]``, at states (u, v) ``[..., 2]``."""
        u, v = state[..., 0], state[..., 1]
        return jnp.stack([c * (u - u**3 / 3 + v), -(u - a + b * v) / c], axis=-1)

    parameters = _parameters
    sample = _sample


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MassSpring:
    """A mass on a spring: dx/dt = p/m, dp/dt = -k x.

    x is the displacement in m, p the momentum in kg m/s; the state box is [-1, 1]^2.

    Attributes:
        shots: N, support points.
        queries: M, query points.
        mass: range of m, in kg; above 0.
        stiffness: range of k, in N/m.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("mass", "stiffness")
    STATES: ClassVar[tuple[str, str]] = ("x", "p")
    BOX: ClassVar[tuple[Range, Range]] = ((-1.0, 1.0), (-1.0, 1.0))

    shots: int = 10
    queries: int = 50
    mass: tuple[float, float] = (0.5, 1.5)
    stiffness: tuple[float, float] = (0.5, 1.5)

    def __post_init__(self) -> None:
        _check(self)
        validate.positive_interval(self, "mass")

    @classmethod
    def shifted(cls, *, shots: int = 10, queries: int = 50) -> MassSpring:
        """Heavier and stiffer than any system of the usual ranges, to test extrapolation."""
        return cls(shots, queries, mass=(1.5, 2.5), stiffness=(1.5, 2.5))

    @staticmethod
    def field(state: Array, *, mass: Array | float, stiffness: Array | float) -> Array:
        """(dx/dt, dp/dt), ``[..., 2]``, at states (x, p) ``[..., 2]``."""
        x, p = state[..., 0], state[..., 1]
        return jnp.stack([p / mass, -stiffness * x], axis=-1)

    @staticmethod
    def energy(state: Array, *, mass: Array | float, stiffness: Array | float) -> Array:
        """p^2/(2 m) + k x^2/2 in J, ``[...]``, at states ``[..., 2]``: conserved."""
        x, p = state[..., 0], state[..., 1]
        return p**2 / (2 * mass) + stiffness * x**2 / 2

    parameters = _parameters
    sample = _sample


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Pendulum:
    """A point mass on a rod: dtheta/dt = p/(m l^2), dp/dt = -m g l sin theta.

    theta is the angle from hanging down in radians, p the angular momentum in kg m^2/s; the state
    box is [-pi/2, pi/2] x [-1, 1]. As in the paper, gravity too differs from task to task.

    Attributes:
        shots: N, support points.
        queries: M, query points.
        mass: range of m, in kg; above 0.
        gravity: range of g, in m/s^2.
        length: range of l, in m; above 0.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("mass", "gravity", "length")
    STATES: ClassVar[tuple[str, str]] = ("theta", "p")
    BOX: ClassVar[tuple[Range, Range]] = ((-math.pi / 2, math.pi / 2), (-1.0, 1.0))

    shots: int = 10
    queries: int = 50
    mass: tuple[float, float] = (0.5, 1.5)
    gravity: tuple[float, float] = (0.5, 1.5)
    length: tuple[float, float] = (0.5, 1.5)

    def __post_init__(self) -> None:
        _check(self)
        validate.positive_interval(self, "mass")
        validate.positive_interval(self, "length")

    @classmethod
    def shifted(cls, *, shots: int = 10, queries: int = 50) -> Pendulum:
        """Heavier and longer than any pendulum of the usual ranges, to test extrapolation."""
        return cls(shots, queries, mass=(1.5, 2.5), gravity=(0.5, 1.5), length=(1.5, 2.0))

    @staticmethod
    def field(
        state: Array, *, mass: Array | float, gravity: Array | float, length: Array | float
    ) -> Array:
        """(dtheta/dt, dp/dt), ``[..., 2]``, at states (theta, p) ``[..., 2]``."""
        theta, p = state[..., 0], state[..., 1]
        return jnp.stack(
            [p / (mass * length**2), -mass * gravity * length * jnp.sin(theta)], axis=-1
        )

    @staticmethod
    def energy(
        state: Array, *, mass: Array | float, gravity: Array | float, length: Array | float
    ) -> Array:
        """p^2/(2 m l^2) + m g l (1 - cos theta) in J, ``[...]``, at states ``[..., 2]``."""
        theta, p = state[..., 0], state[..., 1]
        return p**2 / (2 * mass * length**2) + mass * gravity * length * (1 - jnp.cos(theta))

    parameters = _parameters
    sample = _sample


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VanDerPol:
    """The Van der Pol oscillator: dx/dt = y, dy/dt = mu (1 - x^2) y - x; without units.

    The state box is [-3, 3]^2. The first output is the same in all tasks.

    Attributes:
        shots: N, support points.
        queries: M, query points.
        mu: range of the damping.
    """

    PARAMETERS: ClassVar[tuple[str, ...]] = ("mu",)
    STATES: ClassVar[tuple[str, str]] = ("x", "y")
    BOX: ClassVar[tuple[Range, Range]] = ((-3.0, 3.0), (-3.0, 3.0))

    shots: int = 10
    queries: int = 50
    mu: tuple[float, float] = (0.1, 5.0)

    def __post_init__(self) -> None:
        _check(self)

    @staticmethod
    def field(state: Array, *, mu: Array | float) -> Array:
        """(dx/dt, dy/dt), ``[..., 2]``, at states (x, y) ``[..., 2]``."""
        x, y = state[..., 0], state[..., 1]
        return jnp.stack([y, mu * (1 - x**2) * y - x], axis=-1)

    parameters = _parameters
    sample = _sample
