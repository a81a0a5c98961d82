"""A lazy tensor library whose scheduler is the point, written as a book that runs."""

__version__ = "0.1.0"

from . import nn
from .frontend.gradient import compute_gradient
from .frontend.tensor import Tensor
from .helpers import Context, GlobalCounters, getenv
from .ir.dtype import dtypes
from .ir.pattern import PatternMatcher, UPat, graph_rewrite
from .ir.uop import AddrSpace, AxisType, KernelInfo, ParamArg, UOp
from .ir.vocabulary import GroupOp, Ops
from .runtime.device import Device
from .runtime.realize import compile_linear, run_linear
from .schedule.cache import schedule_cache
from .schedule.pipeline import no_schedule_cache, sched_stats

Variable = UOp.variable

__all__ = ['AddrSpace', 'AxisType', 'Context', 'Device', 'GlobalCounters', 'GroupOp', 'KernelInfo', 'Ops', 'ParamArg',
           'PatternMatcher', 'Tensor', 'UOp', 'UPat', 'Variable', 'compile_linear', 'compute_gradient', 'dtypes',
           'getenv', 'graph_rewrite', 'nn', 'no_schedule_cache', 'run_linear', 'sched_stats', 'schedule_cache']
