"""Optimizers."""

from ...frontend.nn import SGD, Adam, AdamW, Optimizer

__all__ = ['SGD', 'Adam', 'AdamW', 'Optimizer']
