"""The inverse dynamics of a cart with a pole: from a motion to the forces that it takes."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from lavajax import validate
from lavajax.tasks.base import Split, split_key, uniform
from lavajax.types import Array, Points, Task

GRAVITY = 9.81
"""In m/s^2."""
DURATION = 10.0
"""Of a trajectory, in s."""
FREQUENCIES = (0.1, 0.8)
"""Of the three sinusoids of a trajectory, in Hz."""
# Standard deviations over tasks, which the inputs are divided by: of the angle, its velocity, the
# cart's acceleration and the angle's.
SCALES = {"cart": (0.21, 0.66, 3.37, 2.55), "both": (0.21, 0.66, 4.25, 2.55)}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Cartpole:
    """Forces from a motion, of cartpoles of different masses.

    M(q) q'' + C(q, q') q' + g(q) = B u, with q = (x, theta): the cart's position in m and the
    pole's angle from upright in radians. The pole is a point mass at distance l, there is no
    friction, gravity is 9.81 m/s^2. A task is one cartpole and one trajectory of 10 s, each angle
    and position a sum of three sinusoids; its points are random instants. Inputs are
    (theta, theta', x'', theta''), each divided by its standard deviation over tasks of the default
    ranges; x and x' do not matter. Outputs are forces in N, and torques in N m.

    With the cart alone actuated the angle's trajectory is free, and the equation of the pole gives
    the cart's acceleration, x'' = g tan theta - l theta'' / cos theta. |theta| stays below 0.9.

    The LAVA paper describes such an experiment without its details: these are ours, and numbers
    are not comparable with its.

    Attributes:
        shots: N, support points.
        queries: M, query points.
        actuated: ``"cart"``: one output, the force on the cart. ``"both"``: trajectories of cart
            and pole are independent, two outputs, the force and the pole's torque.
        cart_mass: range of the cart's mass, in kg; above 0.
        pole_mass: range of the pole's mass, in kg; above 0.
        length: range of l, in m, above 0; None: 0.5 m, or 0.3 to 0.8 m where both are actuated.
    """

    shots: int = 10
    queries: int = 50
    actuated: Literal["cart", "both"] = "cart"
    cart_mass: tuple[float, float] = (0.5, 1.5)
    pole_mass: tuple[float, float] = (0.1, 0.5)
    length: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        validate.integer(self, "shots", minimum=1)
        validate.integer(self, "queries", minimum=1)
        validate.choice(self, "actuated", ("cart", "both"))
        for name in ("cart_mass", "pole_mass", "length"):
            if name != "length" or self.length is not None:
                validate.positive_interval(self, name)

    @property
    def _length(self) -> tuple[float, float]:
        return self.length or ((0.5, 0.5) if self.actuated == "cart" else (0.3, 0.8))

    def field(
        self,
        x: Array,
        *,
        cart_mass: Array | float,
        pole_mass: Array | float,
        length: Array | float,
    ) -> Array:
        """Targets ``[..., k]`` at inputs x ``[..., 4]``, scaled as in a task."""
        motion = x * jnp.asarray(SCALES[self.actuated])
        parameters = {"cart_mass": cart_mass, "pole_mass": pole_mass, "length": length}
        return cartpole_forces(motion, **parameters)[..., : 1 if self.actuated == "cart" else 2]

    def parameters(self, key: Array, split: Split = "train") -> dict[str, Array]:
        """The masses and the length, scalars, of the task that ``sample`` draws with this key."""
        keys = jax.random.split(jax.random.fold_in(split_key(key, split), 0), 3)
        ranges = {"cart_mass": self.cart_mass, "pole_mass": self.pole_mass, "length": self._length}
        return {n: uniform(k, (), r) for k, (n, r) in zip(keys, ranges.items(), strict=True)}

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A fresh task: support x ``[N, 4]``, y ``[N, k]`` and query x ``[M, 4]``, y ``[M, k]``.

        k is 1, or 2 where both are actuated.
        """
        parameters = self.parameters(key, split)
        angle_key, cart_key, time_key = jax.random.split(
            jax.random.fold_in(split_key(key, split), 1), 3
        )
        t = uniform(time_key, (self.shots + self.queries,), (0.0, DURATION))
        theta, theta_dot, theta_acc = _sinusoids(angle_key, t, (0.0, 0.3))
        if self.actuated == "cart":
            cart_acc = GRAVITY * jnp.tan(theta) - parameters["length"] * theta_acc / jnp.cos(theta)
        else:
            _, _, cart_acc = _sinusoids(cart_key, t, (0.0, 0.5))
        motion = jnp.stack([theta, theta_dot, cart_acc, theta_acc], axis=-1)
        x = motion / jnp.asarray(SCALES[self.actuated])
        y = self.field(x, **parameters)
        n = self.shots
        return Task(Points(x[:n], y[:n]), Points(x[n:], y[n:]))


def cartpole_forces(
    motion: Array,
    *,
    cart_mass: Array | float,
    pole_mass: Array | float,
    length: Array | float,
) -> Array:
    """The force on the cart in N and the torque on the pole in N m, ``[..., 2]``, for a motion.

    Args:
        motion: (theta, theta', x'', theta''), ``[..., 4]``, in rad, rad/s, m/s^2 and rad/s^2.
        cart_mass: in kg.
        pole_mass: in kg, a point at the end of the pole.
        length: of the pole, in m.
    """
    theta, theta_dot, cart_acc, theta_acc = (motion[..., i] for i in range(4))
    sin, cos, moment = jnp.sin(theta), jnp.cos(theta), pole_mass * length
    force = (cart_mass + pole_mass) * cart_acc + moment * (theta_acc * cos - theta_dot**2 * sin)
    torque = moment * (cart_acc * cos + length * theta_acc - GRAVITY * sin)
    return jnp.stack([force, torque], axis=-1)


def _sinusoids(key: Array, t: Array, amplitudes: tuple[float, float]) -> tuple[Array, Array, Array]:
    """A sum of three random sinusoids at times t ``[T]``, and its first two derivatives."""
    a_key, f_key, p_key = jax.random.split(key, 3)
    a = uniform(a_key, (3,), amplitudes)
    rate = 2 * jnp.pi * uniform(f_key, (3,), FREQUENCIES)
    angle = rate * t[:, None] + uniform(p_key, (3,), (0.0, 2 * jnp.pi))
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return sin @ a, cos @ (a * rate), -sin @ (a * rate**2)
