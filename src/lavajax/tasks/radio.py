"""Frequency-modulated radio signals as tasks: the curve of one signal from a few of its steps."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import validate
from lavajax.tasks.base import Split, split_key, uniform
from lavajax.types import Array, Points, Task

STEPS = 100
"""Time steps of a signal; t runs from -1 to 1 over them."""
_SINUSOIDS = 3


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SyntheticFm:
    """Synthetic signals of frequency modulation, one a task.

    The frequency, in turns per 100 steps, is f(t) = f0 + b m(t), the message m a sum of three
    sinusoids of random phase and frequency, scaled to a peak of 1; the signal of 100 steps is
    s = exp(j (2 pi F(t) + p0)), with F the running sum of f and p0 ~ U[0, 2 pi]. Its power is 1,
    a half in each channel. To it comes white Gaussian noise, on support and query alike.

    Attributes:
        shots: N, support steps.
        queries: M, query steps; N + M steps are drawn without replacement.
        snr: range of the signal-to-noise ratio, in dB.
        carrier: range of f0.
        deviation: range of b; at least 0.
        message: range of the sinusoids' frequencies, in cycles per 100 steps; above 0.
        clean_query: query targets without noise, to score against the signal itself; the tasks are
            otherwise the same.
    """

    synthetic: ClassVar[bool] = True

    shots: int = 10
    queries: int = 50
    snr: tuple[float, float] = (20.0, 30.0)
    carrier: tuple[float, float] = (-2.0, 2.0)
    deviation: tuple[float, float] = (0.5, 2.0)
    message: tuple[float, float] = (0.25, 1.5)
    clean_query: bool = False

    def __post_init__(self) -> None:
        _check_points(self)
        for field in ("snr", "carrier", "deviation"):
            validate.interval(self, field)
        if self.deviation[0] < 0:
            raise ValueError(f"SyntheticFm.deviation must be at least 0, got {self.deviation}")
        validate.positive_interval(self, "message")
        validate.flag(self, "clean_query")

    @property
    def noise_floor(self) -> float:
        """Mean power of the noise in one channel: the error of the signal itself."""
        low, high = self.snr
        if low == high:
            return _noise_power(low) / 2
        rate = math.log(10) / 10
        return (_noise_power(low) - _noise_power(high)) / (2 * rate * (high - low))

    def clean(self, key: Array, split: Split = "train") -> Array:
        """The signal ``[100, 2]``, I and Q without noise, of the task that ``sample`` draws."""
        keys = jax.random.split(_parts(key, split)[0], 5)
        cycles = uniform(keys[0], (_SINUSOIDS, 1), self.message)
        phases = uniform(keys[1], (_SINUSOIDS, 1), (0.0, 2 * math.pi))
        steps = jnp.arange(STEPS) / STEPS
        message = jnp.sin(2 * math.pi * cycles * steps + phases).sum(axis=0)
        message = message / jnp.abs(message).max()
        frequency = uniform(keys[2], (), self.carrier) + message * uniform(
            keys[3], (), self.deviation
        )
        start = uniform(keys[4], (), (0.0, 2 * math.pi))
        angle = 2 * math.pi * jnp.cumsum(frequency) / STEPS + start
        return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A fresh signal: support x ``[N, 1]``, y ``[N, 2]``, query x ``[M, 1]``, y ``[M, 2]``."""
        _, snr_key, noise_key, order_key = _parts(key, split)
        clean = self.clean(key, split)
        std = jnp.sqrt(_noise_power(uniform(snr_key, (), self.snr)) / 2)
        noisy = clean + std * jax.random.normal(noise_key, clean.shape)
        return _points(self, order_key, noisy, clean if self.clean_query else noisy)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Radio:
    """Settings of the radio tasks; ``load`` gives their source.

    A task is one signal of frequency modulation, its first 100 steps: predict the in-phase and
    quadrature channels from the time, which runs from -1 to 1. Every signal has a mean power of 1,
    a half in each channel.

    Of the signals of RadioML 2018.01A with an SNR of at least 20 dB, a quarter is for testing and a
    tenth of the rest for validation, by a fixed permutation of those of each SNR.

    Attributes:
        data: path of ``GOLD_XYZ_OSC.0001_1024.hdf5``; where not given, signals are synthetic
            (``SyntheticFm``), and so is every number from them.
        shots: N, support steps.
        queries: M, query steps; N + M steps are drawn without replacement.
    """

    data: str | None = None
    shots: int = 10
    queries: int = 50

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", str(self.data))
        _check_points(self)

    @property
    def synthetic(self) -> bool:
        """Whether the signals are."""
        return self.data is None

    def load(self, data_dir: str | Path | None = None) -> SyntheticFm | RadioSignals:
        """The sampler of synthetic signals, or the signals of the file.

        The first time it prepares them, see ``lavajax.datasets``.

        Args:
            data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

        Raises:
            ValueError: the file is not in the published layout; the message says what was found.
            FileNotFoundError: there is none; the message says where it is published.
            ModuleNotFoundError: a package is missing; the message has the command that installs it.
        """
        if self.data is None:
            return SyntheticFm(self.shots, self.queries)
        from lavajax.datasets import load_radio

        found = load_radio(self.data, data_dir)
        return stored(found.signals, found.snr, shots=self.shots, queries=self.queries)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RadioSignals:
    """Stored signals, drawn at random on the device.

    Attributes:
        signals: ``[n, 100, 2]``, each of mean power 1.
        members: for each split, the indices of its signals.
        shots: N; static.
        queries: M; static.
        noise_floor: mean power of the noise in one channel, if the SNRs of the file are true;
            static.
    """

    signals: Array
    members: dict[str, Array]
    shots: int = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})
    noise_floor: float = dataclasses.field(metadata={"static": True})

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A signal: support x ``[N, 1]``, y ``[N, 2]``, query x ``[M, 1]``, y ``[M, 2]``."""
        which_key, order_key = jax.random.split(key)
        members = self.members[split]
        which = members[jax.random.randint(which_key, (), 0, members.shape[0])]
        signal = self.signals[which]
        return _points(self, order_key, signal, signal)


def stored(signals: np.ndarray, snr: np.ndarray, *, shots: int, queries: int) -> RadioSignals:
    """Signals ``[n, 100, 2]`` with SNRs ``[n]`` in dB, normalised and split.

    Raises:
        ValueError: there are fewer than three signals of some SNR.
    """
    power = (signals.astype(np.float64) ** 2).sum(axis=2).mean(axis=1)
    scaled = signals / np.sqrt(power)[:, None, None]
    rng = np.random.default_rng(0)
    members: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for level in np.unique(snr):
        order = rng.permutation(np.flatnonzero(snr == level))
        tests = max(1, len(order) // 4)
        ends = tests, tests + max(1, (len(order) - tests) // 10)
        if ends[1] >= len(order):
            raise ValueError(
                f"data must hold at least 3 signals of each SNR, one for each split, got "
                f"{len(order)} at {level} dB"
            )
        for split, part in zip(("test", "validation", "train"), np.split(order, ends), strict=True):
            members[split].append(part)
    ratio = 10 ** (snr / 10)
    return RadioSignals(
        signals=jnp.asarray(scaled, jnp.result_type(float)),
        members={s: jnp.asarray(np.sort(np.concatenate(m)), jnp.int32) for s, m in members.items()},
        shots=shots,
        queries=queries,
        noise_floor=float(np.mean(0.5 / (1 + ratio))),  # of a power of 1, signal and noise together
    )


def _check_points(settings: SyntheticFm | Radio) -> None:
    validate.integer(settings, "shots", minimum=1)
    validate.integer(settings, "queries", minimum=1)
    if settings.shots + settings.queries > STEPS:
        name = type(settings).__name__
        raise ValueError(
            f"{name}.shots + {name}.queries must be at most {STEPS}, the steps of a signal, got "
            f"{settings.shots} + {settings.queries}"
        )


def _parts(key: Array, split: Split) -> Array:
    """The keys of the signal, its SNR, its noise and the order of its steps."""
    return jax.random.split(split_key(key, split), 4)


def _noise_power(snr: Any) -> Any:
    """The power of noise at an SNR in dB to a signal of power 1."""
    return 10 ** (-snr / 10)


def _points(source: SyntheticFm | RadioSignals, key: Array, seen: Array, asked: Array) -> Task:
    """Steps drawn without replacement: support targets from one signal, query's from another."""
    n = source.shots
    order = jax.random.permutation(key, STEPS)[: n + source.queries]
    t = jnp.linspace(-1.0, 1.0, STEPS)[order][:, None]
    return Task(Points(t[:n], seen[order[:n]]), Points(t[n:], asked[order[n:]]))
