"""LAVA's head on sine waves in PyTorch: what ``rivals.py`` measures the library against.

Every peer is a function ``loss(network, x, y, shots)`` of a meta-batch x, y ``[B, N + M, 1]``, the
first N points of which are the support: the mean query loss after adaptation, in the paper's
setting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import lavajax
from lavajax.extras import require

torch: Any = require("torch", "peers", "Comparing with PyTorch")
nn: Any = torch.nn

EPSILON = lavajax.Lava().epsilon
CURVATURE = 2.0  # of the squared error of one output
Loss = Callable[[Any, Any, Any, int], Any]


class Network(nn.Module):
    """A network with the library's weights: backbone, head, and the learned inner rate."""

    def __init__(self, learned: Any) -> None:
        """Copies the weights of ``params.learned`` of an MLP with linear features."""
        super().__init__()
        layers: list[Any] = []
        for layer in learned["weights"]:
            layers += [_linear(**layer), nn.ReLU()]
        self.backbone = nn.Sequential(*layers[:-1])
        self.head = _linear(learned["head"][:-1].T, learned["head"][-1])
        self.rate = nn.Parameter(_tensor(learned["inner_rate"]))

    def gradient(self) -> dict[str, Any]:
        """Of the last backward pass, in the library's layout."""
        layers = [layer for layer in self.backbone if isinstance(layer, nn.Linear)]
        head = (self.head.weight.grad.T, self.head.bias.grad[None])
        return {
            "weights": [
                {"weight": layer.weight.grad.numpy(), "bias": layer.bias.grad.numpy()}
                for layer in layers
            ],
            "head": torch.cat(head).numpy(),
            "inner_rate": self.rate.grad.numpy(),
        }


def _tensor(array: Any) -> Any:
    return torch.tensor(np.asarray(array))


def _linear(weight: Any, bias: Any) -> Any:
    out, width = weight.shape
    layer = nn.Linear(width, out)
    layer.weight, layer.bias = nn.Parameter(_tensor(weight)), nn.Parameter(_tensor(bias))
    return layer


def closed_form(network: Any, x: Any, y: Any, shots: int) -> Any:
    """The library's own closed form, all tasks at once: no Hessian, one batched solve."""
    phi = network.backbone(x)
    support, query = phi[:, :shots], phi[:, shots:]
    residual = network.head(support) - y[:, :shots]
    squares = support.square().sum(-1, keepdim=True) + 1  # 1 for the bias, here and below
    omega = network.rate * (CURVATURE * squares + EPSILON)
    ridge = shots * EPSILON / CURVATURE
    gram = support @ support.mT + (1 + ridge * torch.eye(shots))
    u, _ = torch.linalg.solve_ex(gram, omega * residual)  # 5% of a step faster than by Cholesky
    f = network.head(query) - query @ (support.mT @ u) - u.sum(1, keepdim=True)
    return (f - y[:, shots:]).square().mean()


def full_hessians(network: Any, x: Any, y: Any, shots: int) -> Any:
    """The paper's steps by ``torch.func``: a Hessian of the head per point, all vmapped."""
    phi = network.backbone(x)
    z = torch.cat([phi, torch.ones_like(phi[..., :1])], -1)
    prior = torch.cat([network.head.weight[0], network.head.bias])
    identity = torch.eye(len(prior))

    def point_loss(theta: Any, z: Any, y: Any) -> Any:
        return (z @ theta - y).square()

    def point(z: Any, y: Any) -> Any:
        theta = prior - network.rate * torch.func.grad(point_loss)(prior, z, y)
        hessian = torch.func.hessian(point_loss)(theta, z, y)
        return theta, (hessian + EPSILON * identity) / (1 + EPSILON)

    def task(z: Any, y: Any) -> Any:
        theta, precision = torch.vmap(point)(z[:shots], y[:shots])
        weighted = (precision @ theta[..., None]).sum(0)
        return z[shots:] @ torch.linalg.solve(precision.sum(0), weighted)[:, 0]

    f = torch.vmap(task)(z, y[..., 0])
    return (f - y[:, shots:, 0]).square().mean()


def higher_loop(network: Any, x: Any, y: Any, shots: int) -> Any:
    """The paper's steps by ``higher``: a loop over tasks and points, a Hessian for each."""
    higher = require("higher", "peers", "Comparing with higher")
    squared = nn.functional.mse_loss

    def adapted(z: Any, y: Any) -> Any:
        precisions, weighted = 0.0, 0.0
        for point, target in zip(z, y, strict=True):
            inner = torch.optim.SGD(network.head.parameters(), lr=0.1)
            with higher.innerloop_ctx(
                network.head, inner, copy_initial_weights=False, override={"lr": [network.rate]}
            ) as (head, descent):
                descent.step(squared(head(point), target))
                theta = torch.cat([p.flatten() for p in head.parameters()])

                def of_theta(theta: Any, head: Any = head, z: Any = point, y: Any = target) -> Any:
                    return squared(head(z, params=[theta[None, :-1], theta[-1:]]), y)

                hessian = torch.autograd.functional.hessian(
                    of_theta, theta, create_graph=True, vectorize=True
                )
            precision = (hessian + EPSILON * torch.eye(len(theta))) / (1 + EPSILON)
            precisions, weighted = precisions + precision, weighted + precision @ theta
        return torch.linalg.solve(precisions, weighted)

    total = 0.0
    for inputs, targets in zip(x, y, strict=True):
        phi = network.backbone(inputs)
        theta = adapted(phi[:shots], targets[:shots])
        f = nn.functional.linear(phi[shots:], theta[None, :-1], theta[-1:])
        total = total + squared(f, targets[shots:])
    return total / len(x)


def sample(meta_batch: int, tasks: lavajax.Sine) -> tuple[Any, Any]:
    """A meta-batch of sine waves, x and y ``[B, N + M, 1]``."""

    def uniform(shape: tuple[int, ...], low: float, high: float) -> Any:
        return low + (high - low) * torch.rand(shape)

    amplitude = uniform((meta_batch, 1, 1), *tasks.amplitude)
    phase = uniform((meta_batch, 1, 1), *tasks.phase)
    x = uniform((meta_batch, tasks.shots + tasks.queries, 1), *tasks.x_range)
    return x, amplitude * torch.sin(x + phase)


def value_and_grad(loss: Loss, learned: Any, batch: lavajax.Task) -> tuple[float, Any]:
    """Of the library's tasks ``[B]`` at its parameters, to be compared with its own."""
    points = jax.tree.map(
        lambda s, q: _tensor(np.concatenate([s, q], 1)), batch.support, batch.query
    )
    network = Network(learned)
    value = loss(network, points.x, points.y, batch.support.x.shape[1])
    value.backward()
    return value.item(), network.gradient()


def trainer(
    loss: Loss, learned: Any, tasks: lavajax.Sine, meta_batch: int, rate: float
) -> Callable[[int, int], float]:
    """A function of numbers of steps and of threads, which takes steps with Adam."""
    network = Network(learned)
    adam = torch.optim.Adam(network.parameters(), lr=rate, fused=True)
    average = partial(loss, network)

    def run(steps: int, threads: int) -> float:
        torch.set_num_threads(threads)
        total: Any = None
        for _ in range(steps):
            adam.zero_grad(set_to_none=True)
            total = average(*sample(meta_batch, tasks), tasks.shots)
            total.backward()
            adam.step()
        return total.item()

    return run


def compiled(loss: Loss) -> Loss:
    """The same by ``torch.compile``."""
    return torch.compile(loss)
