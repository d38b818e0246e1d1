"""Training that is finite and yet none: a loss that explodes, a gradient that is 0."""

from __future__ import annotations

import warnings

import numpy as np

GROWTH = 1e3
"""A loss of so many times the first one, and as many times 1, is no noise of a meta-batch."""


class Watch:
    """Looks at the metrics of every chunk, and warns of what is wrong, once of each run or seed."""

    def __init__(self, loss: np.ndarray) -> None:
        """Begins with the loss of the first step, a scalar or ``[seeds]``.

        Where that is not finite, the first one that is takes its place.
        """
        self._first = loss
        self._above = np.zeros(loss.shape, bool)
        self._told = dict.fromkeys(("explodes", "dead", "dead layer"), self._above)

    @property
    def in_doubt(self) -> bool:
        """Whether the last chunk was the first too large one of a run."""
        return bool(np.any(self._above & ~self._told["explodes"]))

    def look(self, start: int, stop: int, metrics: dict[str, np.ndarray]) -> None:
        """Warns, in the name of who called ``train``, of what is wrong since this chunk.

        A run explodes where the mean loss of two chunks, one after the other, is above ``GROWTH``
        times (1 + the size of the first): a single chunk may have had one bad task, and leaves
        the run ``in_doubt``. It is dead where the gradient, or that of one of the backbone's
        layers, was exactly 0 in every step of the chunk, and the loss was not; or was from the
        first step on, as where there is nothing to score.

        Args:
            start: the step before the chunk.
            stop: its last step.
            metrics: their means over the chunk, scalars or ``[seeds]``; the norms of gradients may
                be missing.
        """
        loss = metrics["loss"]
        self._first = np.where(np.isfinite(self._first), self._first, loss)
        with np.errstate(invalid="ignore"):  # what is not finite is not looked at here
            above = np.isfinite(loss) & (loss > GROWTH * (1 + np.abs(self._first)))
            dead, layer = (
                (metrics.get(name, np.ones(loss.shape)) == 0) & ((loss != 0) | (self._first == 0))
                for name in ("grad_norm", "layer_grad_norm")
            )
        found = {"explodes": above & self._above, "dead": dead, "dead layer": layer & ~dead}
        self._above = above
        for kind, here in found.items():
            new = here & ~self._told[kind]
            self._told[kind] = self._told[kind] | here
            if new.any():
                warnings.warn(self._tell(kind, new, start, stop, loss), stacklevel=3)

    def _tell(self, kind: str, new: np.ndarray, start: int, stop: int, loss: np.ndarray) -> str:
        which = np.flatnonzero(new)
        value, first = np.ravel(loss)[which[0]], np.ravel(self._first)[which[0]]
        who = f" of seed {', '.join(map(str, which))} of {new.size}" if new.ndim else ""
        if kind == "explodes":
            return (
                f"training{who} explodes: the loss is {value:.3g} up to step {stop}, and was "
                f"{first:.3g} in the first; a lower outer rate, inner rate or clip may help"
            )
        if kind == "dead layer":
            return (
                f"training{who} leaves a layer of the backbone as it is: its gradient is exactly 0 "
                f"in all steps from {start} to {stop}, and the loss {value:.3g}; it is unused, or "
                "held constant, or its units are never active, which a lower outer rate, or inputs "
                "of another scale, may prevent"
            )
        return (
            f"training{who} is dead: the gradient is exactly 0 in all steps from {start} to "
            f"{stop}, and the loss {value:.3g}, so that nothing is learned; inputs of another "
            "scale, or another seed, may wake units that are never active, and the loss must "
            "depend on what is learned, and the tasks have a query"
        )
