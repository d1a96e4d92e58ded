"""Training steps of models in evaluation mode are told."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphir
from graphir.errors import TrainingWarning

X, Y = torch.randn(4, 3), torch.randn(4, 2)


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return F.dropout(x, self.drop_prob, self.training)


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.rnn = nn.GRU(3, 2, num_layers=2, dropout=dropout)

    def forward(self, x):
        return self.rnn(x)[0]


def captured(module, **options):
    model = module if isinstance(module, Recurrent) else nn.Sequential(nn.Linear(3, 2), module)
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphir.capture(model, (X,), targets=(Y,), loss=F.mse_loss, **{"optimizer": optimizer, **options})


@pytest.mark.parametrize(
    "module",
    [nn.Dropout(0.1), nn.AlphaDropout(0.1), nn.BatchNorm1d(2), DropPath(0.2), Recurrent(0.1), nn.RReLU()],
    ids=lambda module: type(module).__name__,
)
def test_a_training_step_in_evaluation_mode_is_told(module):
    with pytest.warns(
        TrainingWarning, match=r"is in evaluation mode, but a training step is captured: (.|\n)*call model.train\(\)"
    ) as told:
        captured(module)
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (nn.Dropout(0.0), {}),
        (nn.BatchNorm1d(2, track_running_stats=False), {}),
        (nn.ReLU(), {}),
        (nn.Dropout(0.1), {"optimizer": None}),
    ],
)
def test_what_is_the_same_in_training_mode_is_not_told(module, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        captured(module, **options)


def test_parts_in_evaluation_mode_are_meant():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphir.capture(model, (X,), targets=(Y,), loss=F.mse_loss, optimizer=optimizer)
