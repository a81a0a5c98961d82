"""Layers, with `optim` and `state` beside them, under the names that programs bring along; told in chapter 43."""

from ..frontend.nn import (
    BatchNorm, BatchNorm2d, BatchNorm3d, Conv2d, Embedding, LayerNorm, Linear)
from . import optim, state

__all__ = ['BatchNorm', 'BatchNorm2d', 'BatchNorm3d', 'Conv2d', 'Embedding', 'LayerNorm', 'Linear', 'optim', 'state']
