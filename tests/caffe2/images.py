"""Caffe2's operators on images as they are defined, in numpy's float64, with channels last: one loop over windows."""

from __future__ import annotations

from itertools import product

import numpy as np


class Window:
    """Where windows lie: ``pads`` are those of the top, left, bottom and right."""

    def __init__(self, kernel, stride=(1, 1), dilation=(1, 1), pads=(0, 0, 0, 0), group=1):
        self.kernel, self.stride, self.dilation, self.pads, self.group = kernel, stride, dilation, pads, group

    def padded(self, x, fill=0.0):
        top, left, bottom, right = self.pads
        return np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=fill)

    def cut(self, x):
        top, left, bottom, right = self.pads
        return x[:, top : x.shape[1] - bottom, left : x.shape[2] - right]

    def count(self, size):
        """How many windows fit along each side of a padded image."""
        span = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        return [(n - s) // step + 1 for n, s, step in zip(size, span, self.stride, strict=True)]

    def taps(self):
        """Each place of a window."""
        return product(range(self.kernel[0]), range(self.kernel[1]))

    def at(self, tap, count):
        """What all windows have at this place: slices of a padded image."""
        starts = [k * d for k, d in zip(tap, self.dilation, strict=True)]
        return tuple(
            slice(start, start + (n - 1) * step + 1, step)
            for start, n, step in zip(starts, count, self.stride, strict=True)
        )

    def groups(self, channels):
        each = channels // self.group
        return [slice(g * each, (g + 1) * each) for g in range(self.group)]


def conv(x, w, b, window):
    x = window.padded(x)
    count = window.count(x.shape[1:3])
    y = np.zeros((x.shape[0], *count, w.shape[0])) + b
    for tap in window.taps():
        rows, columns = window.at(tap, count)
        for ins, outs in zip(window.groups(x.shape[3]), window.groups(w.shape[0]), strict=True):
            y[..., outs] += x[:, rows, columns, ins] @ w[outs, tap[0], tap[1]].T
    return y


def conv_gradient(x, w, dy, window):
    x = window.padded(x)
    dx, dw, count = np.zeros_like(x), np.zeros_like(w), dy.shape[1:3]
    for tap in window.taps():
        rows, columns = window.at(tap, count)
        for ins, outs in zip(window.groups(x.shape[3]), window.groups(w.shape[0]), strict=True):
            dx[:, rows, columns, ins] += dy[..., outs] @ w[outs, tap[0], tap[1]]
            dw[outs, tap[0], tap[1]] += np.einsum("nhwm,nhwc->mc", dy[..., outs], x[:, rows, columns, ins])
    return window.cut(dx), dw, dy.sum((0, 1, 2))


def conv_transpose(x, w, b, window, adj):
    """Each pixel of *x* adds its multiple of the filter; the filter is ``[M, kernel…, C / group]``."""
    size = [(n - 1) * s + k + a for n, s, k, a in zip(x.shape[1:3], window.stride, window.kernel, adj, strict=True)]
    y = np.zeros((x.shape[0], *size, w.shape[3] * window.group))
    for tap in window.taps():
        rows, columns = window.at(tap, x.shape[1:3])
        for ins, outs in zip(window.groups(x.shape[3]), window.groups(y.shape[3]), strict=True):
            y[:, rows, columns, outs] += x[..., ins] @ w[ins, tap[0], tap[1]]
    return window.cut(y) + b


def conv_transpose_gradient(x, w, dy, window):
    bias, dy = dy.sum((0, 1, 2)), window.padded(dy)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for tap in window.taps():
        rows, columns = window.at(tap, x.shape[1:3])
        for ins, outs in zip(window.groups(x.shape[3]), window.groups(dy.shape[3]), strict=True):
            dx[..., ins] += dy[:, rows, columns, outs] @ w[ins, tap[0], tap[1]].T
            dw[ins, tap[0], tap[1]] += np.einsum("nhwm,nhwc->mc", x[..., ins], dy[:, rows, columns, outs])
    return dx, dw, bias


def max_pool(x, dy, window):
    """The maxima, and the gradient, which goes to the first of a window's maxima."""
    x = window.padded(x, -np.inf)
    count, dx = window.count(x.shape[1:3]), np.zeros_like(x)
    y = np.zeros((x.shape[0], *count, x.shape[3]))
    for n, i, j, c in np.ndindex(y.shape):
        top, left = i * window.stride[0], j * window.stride[1]
        seen = x[n, top : top + window.kernel[0], left : left + window.kernel[1], c]
        row, column = np.unravel_index(seen.argmax(), seen.shape)
        y[n, i, j, c] = seen.max()
        dx[n, top + row, left + column, c] += dy[n, i, j, c]
    return y, window.cut(dx)


def average_pool(x, dy, window, counted):
    """The means, of what is inside of the image unless the padding is *counted*, and the gradient."""
    inside = window.padded(np.ones_like(x), 1.0 if counted else 0.0)
    x = window.padded(x)
    count, dx = window.count(x.shape[1:3]), np.zeros_like(x)
    total, number = (np.zeros((x.shape[0], *count, x.shape[3])) for _ in range(2))
    for tap in window.taps():
        total += x[(slice(None), *window.at(tap, count))]
        number += inside[(slice(None), *window.at(tap, count))]
    for tap in window.taps():
        dx[(slice(None), *window.at(tap, count))] += dy / number
    return total / number, window.cut(dx)


def batch_norm(x, scale, bias, dy, epsilon):
    """Output, mean, inverse deviation, and the gradients of input, scale and bias."""
    over = tuple(range(x.ndim - 1))
    mean, inverse = x.mean(over), 1.0 / np.sqrt(x.var(over) + epsilon)
    normal = (x - mean) * inverse
    of_scale, of_bias = (dy * normal).sum(over), dy.sum(over)
    count = x.size // x.shape[-1]
    dx = scale * inverse * (dy - of_bias / count - normal * of_scale / count)
    return normal * scale + bias, mean, inverse, dx, of_scale, of_bias


def around(values, size):
    """Sums over channels."""
    padded = np.pad(values, ((0, 0),) * 3 + ((size // 2, size // 2),))
    return sum(padded[..., k : k + values.shape[3]] for k in range(size))


def response_norm(x, dy, size, alpha, beta, bias):
    """Output, scale, and the gradient of the input."""
    scale = bias + alpha / size * around(x * x, size)
    y = x * scale**-beta
    return y, scale, dy * scale**-beta - 2 * alpha * beta / size * x * around(dy * y / scale, size)
