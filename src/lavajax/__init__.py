"""lavajax: meta-learning in JAX.

From many related tasks, learn a model that adapts to a new one from a few labelled points, in one
closed-form step: ``adapted = lavajax.adapt(params, (x, y))``.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from lavajax.api import adapt as adapt
from lavajax.api import diagnose as diagnose
from lavajax.api import predict as predict
from lavajax.api import sample as sample
from lavajax.checkpoint import load as load
from lavajax.checkpoint import save as save
from lavajax.evaluate import Evaluation as Evaluation
from lavajax.evaluate import evaluate as evaluate
from lavajax.evaluate import score as score
from lavajax.export import export as export
from lavajax.losses import CrossEntropy as CrossEntropy
from lavajax.losses import DirectionError as DirectionError
from lavajax.losses import GaussianNll as GaussianNll
from lavajax.losses import Huber as Huber
from lavajax.losses import Loss as Loss
from lavajax.losses import SquaredError as SquaredError
from lavajax.methods.base import Method as Method
from lavajax.methods.lava import Lava as Lava
from lavajax.methods.lava import lava_bayesian as lava_bayesian
from lavajax.methods.lava import lava_converged as lava_converged
from lavajax.methods.lava_general import LavaDiagnostics as LavaDiagnostics
from lavajax.models.base import Model as Model
from lavajax.models.mlp import MLP as MLP
from lavajax.online import estimate as estimate
from lavajax.online import online as online
from lavajax.online import update as update
from lavajax.outer import Expectation as Expectation
from lavajax.outer import gradient_step as gradient_step
from lavajax.subspace import Context as Context
from lavajax.subspace import Full as Full
from lavajax.subspace import Head as Head
from lavajax.subspace import Subspace as Subspace
from lavajax.sums import Sums as Sums
from lavajax.tasks.base import TaskSource as TaskSource
from lavajax.train import Progress as Progress
from lavajax.train import Trained as Trained
from lavajax.train import outer_optimizer as outer_optimizer
from lavajax.train import train as train
from lavajax.types import Adapted as Adapted
from lavajax.types import MetaParams as MetaParams
from lavajax.types import Points as Points
from lavajax.types import PointSpec as PointSpec
from lavajax.types import Prediction as Prediction
from lavajax.types import Task as Task
from lavajax.types import TrainState as TrainState
from lavajax.units import Columns as Columns
from lavajax.units import Units as Units

if _TYPE_CHECKING:
    from lavajax.methods.alpaca import Alpaca as Alpaca
    from lavajax.methods.anil import Anil as Anil
    from lavajax.methods.attentive_cnp import AttentiveCnp as AttentiveCnp
    from lavajax.methods.bmaml import Bmaml as Bmaml
    from lavajax.methods.cavia import Cavia as Cavia
    from lavajax.methods.cnp import Cnp as Cnp
    from lavajax.methods.conditioned import Conditioned as Conditioned
    from lavajax.methods.dkt import Dkt as Dkt
    from lavajax.methods.hyper_network import HyperNetwork as HyperNetwork
    from lavajax.methods.imaml import IMaml as IMaml
    from lavajax.methods.imaml import IMamlDiagnostics as IMamlDiagnostics
    from lavajax.methods.llama import Llama as Llama
    from lavajax.methods.maml import Maml as Maml
    from lavajax.methods.meta_mix import MetaMix as MetaMix
    from lavajax.methods.meta_sgd import MetaSgd as MetaSgd
    from lavajax.methods.platipus import Platipus as Platipus
    from lavajax.methods.reptile import Reptile as Reptile
    from lavajax.methods.ridge import Ridge as Ridge
    from lavajax.methods.tnp import Tnp as Tnp
    from lavajax.methods.vfml import Vfml as Vfml
    from lavajax.methods.vr_maml import VrMaml as VrMaml
    from lavajax.methods.vr_maml import vr_maml_released as vr_maml_released
    from lavajax.methods.vr_maml import vr_maml_tuned as vr_maml_tuned
    from lavajax.models.conv import Conv4 as Conv4
    from lavajax.models.correlated import Correlated as Correlated
    from lavajax.models.flax import NNX as NNX
    from lavajax.models.flax import Linen as Linen
    from lavajax.tasks.air_quality import AirQuality as AirQuality
    from lavajax.tasks.cartpole import Cartpole as Cartpole
    from lavajax.tasks.cartpole import cartpole_forces as cartpole_forces
    from lavajax.tasks.dynamics import FitzHughNagumo as FitzHughNagumo
    from lavajax.tasks.dynamics import MassSpring as MassSpring
    from lavajax.tasks.dynamics import Pendulum as Pendulum
    from lavajax.tasks.dynamics import VanDerPol as VanDerPol
    from lavajax.tasks.images import MiniImageNet as MiniImageNet
    from lavajax.tasks.images import Omniglot as Omniglot
    from lavajax.tasks.radio import Radio as Radio
    from lavajax.tasks.radio import SyntheticFm as SyntheticFm
    from lavajax.tasks.sine import Sine as Sine
    from lavajax.tasks.table import Table as Table
    from lavajax.tasks.table import TableTasks as TableTasks
    from lavajax.tasks.variants import FixedTasks as FixedTasks
    from lavajax.tasks.variants import NoisyLabels as NoisyLabels
    from lavajax.tasks.variants import VaryingShots as VaryingShots

__version__ = "0.1.0"

# Other methods than LAVA, other backbones than an MLP, with Flax, and ready-made tasks are imported
# when first used: adapting with LAVA on data of one's own needs none of them.
_LATER = {
    name: module
    for module, names in {
        "methods.alpaca": ("Alpaca",),
        "methods.anil": ("Anil",),
        "methods.attentive_cnp": ("AttentiveCnp",),
        "methods.bmaml": ("Bmaml",),
        "methods.cavia": ("Cavia",),
        "methods.cnp": ("Cnp",),
        "methods.conditioned": ("Conditioned",),
        "methods.dkt": ("Dkt",),
        "methods.hyper_network": ("HyperNetwork",),
        "methods.imaml": ("IMaml", "IMamlDiagnostics"),
        "methods.llama": ("Llama",),
        "methods.maml": ("Maml",),
        "methods.meta_mix": ("MetaMix",),
        "methods.meta_sgd": ("MetaSgd",),
        "methods.platipus": ("Platipus",),
        "methods.reptile": ("Reptile",),
        "methods.ridge": ("Ridge",),
        "methods.tnp": ("Tnp",),
        "methods.vfml": ("Vfml",),
        "methods.vr_maml": ("VrMaml", "vr_maml_released", "vr_maml_tuned"),
        "models.conv": ("Conv4",),
        "models.correlated": ("Correlated",),
        "models.flax": ("NNX", "Linen"),
        "tasks.air_quality": ("AirQuality",),
        "tasks.cartpole": ("Cartpole", "cartpole_forces"),
        "tasks.dynamics": ("FitzHughNagumo", "MassSpring", "Pendulum", "VanDerPol"),
        "tasks.images": ("MiniImageNet", "Omniglot"),
        "tasks.radio": ("Radio", "SyntheticFm"),
        "tasks.sine": ("Sine",),
        "tasks.table": ("Table", "TableTasks"),
        "tasks.variants": ("FixedTasks", "NoisyLabels", "VaryingShots"),
    }.items()
    for name in names
}

if not _TYPE_CHECKING:  # else a misspelt name would pass for one of these

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        globals()[name] = getattr(importlib.import_module(f"lavajax.{_LATER[name]}"), name)
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
