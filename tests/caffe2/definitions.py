"""Caffe2's optimizers as its kernels define them, in numpy's float32: one element's arithmetic, in the same order.

Each rule changes a parameter and its state, which are arrays of one shape (or a row's state is one number), in place.
:func:`slot_by_slot` applies a rule to the rows that indices name, as Caffe2's loops do. Sources: ``caffe2/sgd``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

F = np.float32


def adagrad(w, h, g, lr, *, epsilon=1e-5, weight_decay=0.0):
    g = F(weight_decay) * w + g if weight_decay else g
    h[...] = h + g * g
    w[...] = w + F(lr) * g / (np.sqrt(h) + F(epsilon))


def adagrad_by_rows(w, h, g, lr, *, epsilon=1e-5, weight_decay=0.0):
    g = F(weight_decay) * w + g if weight_decay else g
    h[...] = h + np.sum(g * g) / F(g.size)
    w[...] = w + F(lr) * g / (np.sqrt(h) + F(epsilon))


def bias_correction(iteration, beta1=0.9, beta2=0.999):
    t = iteration + 1
    return F(math.sqrt(1 - float(F(beta2)) ** t) / (1 - float(F(beta1)) ** t))


def adam(w, m, v, g, lr, iteration, *, beta1=0.9, beta2=0.999, epsilon=1e-5, adapted=False, by_rows=False):
    square = np.sum(g * g) / F(g.size) if by_rows else g * g
    m[...] = m * F(beta1) + g * (F(1) - F(beta1))
    v[...] = v * F(beta2) + square * (F(1) - F(beta2))
    correction, root = bias_correction(iteration, beta1, beta2), np.sqrt(v) + F(epsilon)
    if adapted:
        given = correction * m / root
        w[...] = w + F(lr) * given
        return given
    w[...] = w + F(lr) * correction * m / root
    return None


def momentum_sgd(w, m, g, lr, *, momentum=0.0, nesterov=0):
    before = m.copy()
    m[...] = F(lr) * g + F(momentum) * before
    step = (F(1) + F(momentum)) * m - F(momentum) * before if nesterov else m.copy()
    w[...] = w - step
    return step


def ftrl(w, n_z, g, *, alpha=0.005, beta=1.0, lambda1=0.001, lambda2=0.001):
    inverse, (n, z) = F(1.0 / float(F(alpha))), (n_z[..., 0].copy(), n_z[..., 1].copy())
    total = n + g * g
    z = z + g - (np.sqrt(total) - np.sqrt(n)) * inverse * w
    weight = (F(lambda1) * np.sign(z) - z) / ((F(beta) + np.sqrt(total)) * inverse + F(lambda2))
    w[...] = np.where(np.abs(z) > F(lambda1), weight, F(0))
    n_z[..., 0], n_z[..., 1] = total, z


def adadelta(w, h, d, g, lr, *, epsilon=1e-5, decay=0.95):
    rest = F(1) - F(decay)
    h[...] = F(decay) * h + rest * g * g
    step = np.sqrt(d + F(epsilon)) / np.sqrt(h + F(epsilon)) * g
    w[...] = w + F(lr) * step
    d[...] = F(decay) * d + rest * step * step


def storm_rates(total, g, lr, *, momentum=10.0, beta=0.1):
    """The rate, and the share of the old moment; *total* has all squares added."""
    total[...] = total + np.sum(g * g)
    rate = F(float(F(lr)) * float(F(beta) + total.item()) ** (-1.0 / 3.0))
    return rate, 1.0 - float(F(momentum) * rate * rate)


def storm(w, m, g, rate, share):
    m[...] = g + share * (m - g)
    w[...] = w + rate * m


def wngrad(w, b, g, lr, *, epsilon=1e-5):
    """What the rate becomes, and what *w* is raised by."""
    shifted = b.item() + F(epsilon)
    rate = F(lr) / shifted
    w[...] = w + F(lr) * g / shifted
    b[...] = b + np.sum(g * g) / shifted
    return rate, rate * g


def slot_by_slot(rule: Callable[..., Any], arrays: list[Any], indices: Any, grads: Any, *rest: Any, **args: Any) -> Any:
    """Apply *rule* to the row of each slot and to its state; what it returns, slot by slot."""
    found = []
    for row, grad in zip(indices.tolist(), grads, strict=True):
        found.append(rule(*[array[row : row + 1] for array in arrays], grad[None], *rest, **args))
    return None if not found or found[0] is None else np.concatenate(found)
