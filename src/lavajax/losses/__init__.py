"""Losses of a single point, each with the curvature that Gauss-Newton needs."""

from lavajax.losses.base import Loss as Loss
from lavajax.losses.base import constant_curvature as constant_curvature
from lavajax.losses.classification import CrossEntropy as CrossEntropy
from lavajax.losses.regression import DirectionError as DirectionError
from lavajax.losses.regression import GaussianNll as GaussianNll
from lavajax.losses.regression import Huber as Huber
from lavajax.losses.regression import SquaredError as SquaredError
