"""Dynamical systems: their fields against mechanics, their ranges, and what is conserved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import assert_close

SYSTEMS = {
    lj.FitzHughNagumo(shots=3, queries=4): {"a": 0.7, "b": 0.8, "c": 3.0},
    lj.MassSpring(shots=3, queries=4): {"mass": 2.0, "stiffness": 3.0},
    lj.Pendulum(shots=3, queries=4): {"mass": 2.0, "gravity": 3.0, "length": 0.5},
    lj.VanDerPol(shots=3, queries=4): {"mu": 2.0},
}
CARTPOLES = (lj.Cartpole(shots=3, queries=4), lj.Cartpole(shots=3, queries=4, actuated="both"))


def name(source):
    return type(source).__name__ + getattr(source, "actuated", "")


def draw(source, number, split="train"):
    keys = jax.random.split(jax.random.key(0), number)
    return jax.jit(
        jax.vmap(lambda key: (source.sample(key, split), source.parameters(key, split)))
    )(keys)


@pytest.mark.parametrize(
    ("source", "state", "expected"),
    [
        # c (u - u^3/3 + v) = 3 (1 - 1/3 + 2), -(u - a + b v)/c = -(1 - 0.7 + 1.6)/3
        (0, (1.0, 2.0), (8.0, -1.9 / 3)),
        (1, (0.5, -1.0), (-0.5, -1.5)),
        # p/(m l^2) = 1/(2/4), -m g l sin(pi/6) = -2 * 3 * 0.5 / 2
        (2, (np.pi / 6, 1.0), (2.0, -1.5)),
        # mu (1 - x^2) y - x = 2 (1 - 4) 3 - 2
        (3, (2.0, 3.0), (3.0, -20.0)),
    ],
)
def test_fields_have_their_known_values(source, state, expected):
    system, parameters = list(SYSTEMS.items())[source]
    assert_close(system.field(jnp.array(state), **parameters), np.array(expected), 1e-6)


@pytest.mark.parametrize("system", [lj.MassSpring(), lj.Pendulum()], ids=name)
def test_fields_are_those_of_their_energy(system, x64):
    """Hamilton's equations: (dH/dp, -dH/dq)."""
    parameters = next(v for k, v in SYSTEMS.items() if type(k) is type(system))
    for state in jax.random.uniform(jax.random.key(0), (5, 2), minval=-1.0):
        dq, dp = jax.jit(jax.grad(lambda s: system.energy(s, **parameters)))(state)
        assert_close(system.field(state, **parameters), jnp.array([dp, -dq]), 1e-12)


@pytest.mark.parametrize("system", [lj.MassSpring(), lj.Pendulum()], ids=name)
def test_energy_is_conserved_along_a_trajectory(system, x64):
    diffrax = pytest.importorskip("diffrax")
    parameters = next(v for k, v in SYSTEMS.items() if type(k) is type(system))
    start = jnp.array([1.2, 0.4])
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, _: system.field(y, **parameters)),
        diffrax.Dopri5(),
        0.0,
        10.0,
        None,
        start,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 10, 50)),
        stepsize_controller=diffrax.PIDController(rtol=1e-9, atol=1e-9),
    )
    energy = system.energy(solution.ys, **parameters)
    assert_close(energy, np.full(50, energy[0]), 1e-7)
    assert np.ptp(solution.ys[:, 0]) > 1.0  # it did move


@pytest.mark.parametrize("system", SYSTEMS, ids=name)
def test_tasks_are_values_of_the_field_of_their_parameters(system):
    """Over filled boxes and ranges, of support and query alike."""
    task, parameters = draw(system, 300)
    assert task.support.x.shape == task.support.y.shape == (300, 3, 2)
    assert task.query.x.shape == task.query.y.shape == (300, 4, 2)
    for points in (task.support, task.query):
        y = jax.vmap(lambda x, p: system.field(x, **p))(points.x, parameters)
        assert_close(points.y, y, 1e-6)
        for i, (low, high) in enumerate(system.BOX):
            _assert_filled(points.x[..., i], low, high)
    assert set(parameters) == set(system.PARAMETERS)
    for field, values in parameters.items():
        _assert_filled(values, *getattr(system, field))
        assert len(np.unique(values)) == 300


def _assert_filled(values, low, high):
    margin = 0.05 * (high - low)
    assert low <= np.min(values) < low + margin
    assert high - margin < np.max(values) <= high


@pytest.mark.parametrize("system", [*SYSTEMS, *CARTPOLES], ids=name)
def test_splits_never_coincide_and_seeds_are_fixed(system):
    drawn = {split: draw(system, 20, split)[0] for split in ("train", "validation", "test")}
    x = np.concatenate([task.support.x[..., 0].ravel() for task in drawn.values()])
    assert len(np.unique(x)) == x.size
    np.testing.assert_array_equal(draw(system, 20, "test")[0].query.y, drawn["test"].query.y)


def test_shifted_systems_lie_outside_of_the_usual_ranges():
    for system in (lj.MassSpring(), lj.Pendulum()):
        shifted = type(system).shifted(shots=4, queries=6)
        assert (shifted.shots, shifted.queries) == (4, 6)
        assert shifted.mass[0] >= system.mass[1]
    assert lj.MassSpring.shifted().stiffness == (1.5, 2.5)
    assert lj.Pendulum.shifted().length == (1.5, 2.0)


def test_cartpole_forces_are_those_of_its_lagrangian(x64):
    """d/dt dL/dq' - dL/dq, with kinetic and potential energy of two point masses."""
    parameters = {"cart_mass": 1.3, "pole_mass": 0.4, "length": 0.6}
    m_c, m_p, length = parameters.values()

    def lagrangian(q, v):
        position = lambda q: jnp.array([q[0] + length * jnp.sin(q[1]), length * jnp.cos(q[1])])  # noqa: E731
        pole = jax.jvp(position, (q,), (v,))[1]
        kinetic = m_c / 2 * v[0] ** 2 + m_p / 2 * pole @ pole
        return kinetic - m_p * 9.81 * position(q)[1]

    for numbers in jax.random.normal(jax.random.key(0), (5, 6)):
        q, v, acc = numbers.reshape(3, 2)
        momentum = jax.grad(lagrangian, argnums=1)
        rate = jax.jvp(momentum, (q, v), (v, acc))[1]
        expected = rate - jax.jit(jax.grad(lagrangian))(q, v)
        motion = jnp.array([q[1], v[1], acc[0], acc[1]])
        assert_close(lj.cartpole_forces(motion, **parameters), expected, 1e-12)


def test_cartpole_motions_obey_the_pole_and_have_unit_scale():
    """Where the cart alone is actuated the pole feels no torque of its own."""
    scales = jnp.array([0.21, 0.66, 3.37, 2.55])
    task, parameters = draw(dataclasses.replace(CARTPOLES[0], shots=20), 2000)
    forces = jax.vmap(lambda x, p: lj.cartpole_forces(x * scales, **p))(task.support.x, parameters)
    assert_close(task.support.y, forces[..., :1], 1e-5)
    assert np.abs(forces[..., 1]).max() < 1e-4 * np.abs(forces[..., 0]).max()
    assert np.abs(task.support.x[..., 0] * 0.21).max() <= 0.9
    for source in CARTPOLES:
        task, _ = draw(source, 2000)
        spread = np.std(np.asarray(task.query.x, float), axis=(0, 1))
        np.testing.assert_allclose(spread, 1.0, atol=0.05)
        assert task.query.y.shape == (2000, 4, 1 if source.actuated == "cart" else 2)


def test_cartpole_velocities_are_the_derivatives_of_its_angle(x64):
    """Neighbouring instants of a trajectory: (theta' dt, theta'' dt)."""
    from lavajax.tasks.cartpole import _sinusoids

    t = jnp.linspace(0.0, 10.0, 20_001)
    value, rate, acceleration = _sinusoids(jax.random.key(0), t, (0.0, 0.3))
    assert_close(np.gradient(value, t)[1:-1], rate[1:-1], 1e-5)
    assert_close(np.gradient(rate, t)[1:-1], acceleration[1:-1], 1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: lj.MassSpring(mass=(0.0, 1.0)),
            r"MassSpring.mass must be above 0, got \(0.0, 1.0",
        ),
        (lambda: lj.VanDerPol(mu=(2.0, 1.0)), r"VanDerPol.mu must be a pair \(low, high\)"),
        (lambda: lj.Cartpole(actuated="pole"), "Cartpole.actuated must be one of 'cart', 'both'"),
        (lambda: lj.Pendulum(shots=0), "Pendulum.shots must be an integer of at least 1"),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_lava_learns_a_system():
    """Far below the error of ignoring the task, in few steps."""
    tasks = lj.MassSpring(shots=10, queries=10)
    tx = lj.outer_optimizer(300, rate=5e-3)
    trained = lj.train(lj.Lava(lj.MLP(hidden=(32, 32))), tasks, steps=300, optimizer=tx)
    assert lj.evaluate(trained.params, tasks, num_tasks=200).mean < 0.0347 / 5
