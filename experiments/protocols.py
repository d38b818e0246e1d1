"""How methods are compared: the protocols, and the methods with what is chosen for them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple

import lavajax

USUAL_CLIP = 10.0
CONTEXT, FULL = lavajax.Context(size=4), lavajax.Full()  # its start is learned


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One setting of training and scoring for all methods of a table.

    The optimiser is Adam with a warm-up of 1,000 steps, a cosine to 0 and clipping,
    ``lavajax.outer_optimizer``. Inner steps and the outer rate are chosen for each method and
    column on validation tasks, by a shorter run of one seed; the final parameters of every seed are
    scored, with no selection on test tasks.

    Attributes:
        name: of the protocol.
        steps: outer steps.
        search_steps: outer steps of the runs that inner steps and outer rate are chosen by.
        rates: outer rates to choose from.
        inner_steps: to choose from, where a head or a context adapts.
        inner_steps_full: to choose from where all weights adapt, which costs several times more.
        seeds: trained for each cell.
        meta_batch: tasks in an outer step.
        validation_tasks: to choose on.
        test_tasks: unseen tasks to score on.
        clips: bounds on the norm of the meta-gradient to choose from.
    """

    name: str = "headline"
    steps: int = 20_000
    search_steps: int = 5_000
    rates: tuple[float, ...] = (1e-3, 5e-3)
    inner_steps: tuple[int, ...] = (1, 2, 3, 5, 8)
    inner_steps_full: tuple[int, ...] = (1, 2, 3, 5)
    seeds: int = 5
    meta_batch: int = 10
    validation_tasks: int = 2_000
    test_tasks: int = 10_000
    clips: tuple[float, ...] = (USUAL_CLIP,)

    @property
    def key(self) -> dict[str, Any]:
        """What a result depends on, ready for JSON; as before there was a choice of bounds."""
        settings = dataclasses.asdict(self)
        if self.clips == (USUAL_CLIP,):
            del settings["clips"]
        return settings


HEADLINE = Protocol()
QUICK = Protocol("quick", 20, 10, (5e-3,), (1,), (1,), 1, 2, 20, 20)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything is computed.

    Attributes:
        protocol: of the tables.
        extended: whether tables have the methods beyond the paper's.
        quick: whether everything is tiny, to see that it works.
        times: whether times are measured, which want an idle machine.
    """

    protocol: Protocol = HEADLINE
    extended: bool = False
    quick: bool = False
    times: bool = False


class Candidate(NamedTuple):
    """One choice of what a protocol leaves open.

    Attributes:
        method: with its inner steps.
        rate: the outer rate.
        clip: bound on the norm of the meta-gradient.
    """

    method: Any
    rate: float
    clip: float = USUAL_CLIP


@dataclasses.dataclass(frozen=True)
class Row:
    """One method of a table.

    Attributes:
        name: as the table shows it.
        method: the method; its inner steps are chosen where ``searched``.
        searched: whether the number of inner steps is chosen.
        optimizer: ``"adam"``, or at a constant rate and without clipping ``"sgd"`` or
            ``"constant adam"``.
        rates: outer rates to choose from, where they are not the protocol's.
        also: the name of a further setting, and what it is chosen from.
        paper: whether the paper's tables have this row.
        seeds: trained, where they are fewer than the protocol's.
        by_hand: whether a setting was chosen for this row by hand: it is then left out of
            comparisons with rows whose settings are their defaults.
    """

    name: str
    method: Any
    searched: bool = False
    optimizer: Literal["adam", "sgd", "constant adam"] = "adam"
    rates: tuple[float, ...] | None = None
    paper: bool = False
    also: tuple[str, tuple[float, ...]] | None = None
    seeds: int | None = None
    by_hand: bool = False

    def candidates(self, protocol: Protocol) -> list[Candidate]:
        """All that there is to choose from."""
        full = isinstance(getattr(self.method, "subspace", None), lavajax.Full)
        grid = protocol.inner_steps_full if full else protocol.inner_steps
        methods = [self.method]
        if self.searched:
            methods = [dataclasses.replace(self.method, inner_steps=s) for s in grid]
        if self.also:
            name, values = self.also
            methods = [
                dataclasses.replace(method, **{name: value})
                for method in methods
                for value in values
            ]
        rates = self.rates or protocol.rates
        clips = protocol.clips if self.optimizer == "adam" else (USUAL_CLIP,)  # which alone clips
        return [Candidate(*each) for each in itertools.product(methods, rates, clips)]


# The methods of the paper's tables, LAVA's settings beyond it, and the nearest neighbour of its
# head form. The published comparison adapts all weights in VR-MAML and MetaMix; the paper does not
# say what it adapts in VFML, and its LLAMA can only have been a context.
PAPER_ROWS = (
    Row("ANIL", lavajax.Anil(), True, paper=True),
    Row("CAVIA", lavajax.Cavia(subspace=CONTEXT), True, paper=True),
    Row("VFML", lavajax.Vfml(), True, paper=True),
    Row("LLAMA", lavajax.Llama(subspace=CONTEXT), True, paper=True),
    Row("MetaMix", lavajax.MetaMix(), True, paper=True),
    Row("VR-MAML, as released", lavajax.vr_maml_released(), False, "sgd", (0.01,), True),
    Row("VR-MAML, tuned", lavajax.vr_maml_tuned(), True),
    Row("LAVA, the paper's setting", lavajax.Lava(), paper=True),
    Row("LAVA, learned epsilon", lavajax.Lava(learn_epsilon=True)),
    Row("LAVA, converged", lavajax.lava_converged()),
    Row("LAVA, Bayesian", lavajax.lava_bayesian()),
    Row("LAVA, Bayesian, firm", lavajax.lava_bayesian(epsilon=10.0), by_hand=True),
    Row("LAVA, context", lavajax.Lava(subspace=CONTEXT)),
    Row("LAVA, context, at prior", lavajax.Lava(subspace=CONTEXT, curvature_at="prior")),
    Row("LAVA, all weights", lavajax.Lava(subspace=FULL)),
    Row("ridge head", lavajax.Ridge()),
)
_SINE_ALONE = (
    *("LAVA, learned epsilon", "LAVA, Bayesian, firm"),
    *("LAVA, context", "LAVA, context, at prior", "LAVA, all weights"),
)
COMPARED_ROWS = tuple(row for row in PAPER_ROWS if row.name not in _SINE_ALONE)
"""What the tables beyond sine waves compare."""
_SLOW = (3e-4, 1e-3)  # what the papers of attentive networks train with, and less than ours
EXTENDED_ROWS = (
    Row("MAML", lavajax.Maml(), True),
    Row("MAML, first order", lavajax.Maml(first_order=True), True),
    Row("Meta-SGD", lavajax.MetaSgd(), True),
    # What trains on 60 points at 0.02 may leave a task of one or two by steps that grow.
    Row("Reptile", lavajax.Reptile(inner_steps=8), also=("inner_rate", (0.02, 0.005, 0.002))),
    Row("VFML, storm", lavajax.Vfml(variant="storm"), True),
    Row("PLATIPUS", lavajax.Platipus(), True),
    Row("BMAML, head", lavajax.Bmaml(), True),
    Row("iMAML", lavajax.IMaml()),
    Row("hypernetwork", lavajax.HyperNetwork()),
    Row("ALPaCA", lavajax.Alpaca()),
    Row("ALPaCA, firm", lavajax.Alpaca(prior_precision=10.0), by_hand=True),
    Row("ALPaCA, MSE", lavajax.Alpaca(outer="mse")),
    Row("DKT, linear", lavajax.Dkt(kernel="linear")),
    Row("DKT, RBF", lavajax.Dkt(kernel="rbf")),
    Row("CNP", lavajax.Cnp(), rates=(*_SLOW, 5e-3)),
    Row("attentive CNP", lavajax.AttentiveCnp(), rates=_SLOW),
    Row("TNP-D", lavajax.Tnp(), rates=_SLOW),
)
GAUSSIAN_ROWS = (
    Row("PLATIPUS, Gaussian", lavajax.Platipus(point_loss=lavajax.GaussianNll()), True),
    Row("BMAML, Gaussian", lavajax.Bmaml(point_loss=lavajax.GaussianNll()), True),
)
"""Sampled networks that predict the noise of observations too, without which they have no density.
"""
_WITH_DENSITY = ("ALPaCA", "DKT, linear", "DKT, RBF", "CNP", "attentive CNP", "TNP-D")
ERROR_BAR_ROWS = tuple(
    dataclasses.replace(row, seeds=3)
    for row in (*EXTENDED_ROWS, *GAUSSIAN_ROWS)
    if row.name in _WITH_DENSITY or row in GAUSSIAN_ROWS
)
"""Of the methods beyond the paper's, those that say how sure they are."""
