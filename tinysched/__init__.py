"""A lazy tensor library whose scheduler is the point, written as a book that runs."""

__version__ = "0.1.0"

from . import nn
from .frontend.custom import custom_kernel as custom_kernel
from .frontend.explain import explain, flip, write_page
from .frontend.function import function
from .frontend.gradient import compute_gradient
from .frontend.jit import TinyJit
from .frontend.tensor import Tensor
from .helpers import Context, GlobalCounters, getenv
from .ir.dtype import dtypes
from .ir.pattern import PatternMatcher, UPat, graph_rewrite
from .ir.uop import AddrSpace, AxisType, KernelInfo, ParamArg, ProgramInfo, UOp
from .ir.vocabulary import GroupOp, Ops
from .runtime.device import Device
from .runtime.realize import JitError, compile_linear, run_linear
from .runtime.store import Store
from .schedule.cache import schedule_cache
from .schedule.pipeline import no_schedule_cache, sched_stats, viewers

Variable = UOp.variable
schedule_cache.disk = Store('schedules', 64 << 20)   # read and written only with SCACHE=2
viewers.append(write_page)   # called only with VIZ=1

__all__ = ['AddrSpace', 'AxisType', 'Context', 'Device', 'GlobalCounters', 'GroupOp', 'JitError', 'KernelInfo', 'Ops',
           'ParamArg', 'PatternMatcher', 'ProgramInfo', 'Tensor', 'TinyJit', 'UOp', 'UPat', 'Variable', 'compile_linear',
           'compute_gradient', 'dtypes', 'explain', 'flip', 'function', 'getenv', 'graph_rewrite', 'nn', 'no_schedule_cache',
           'run_linear', 'sched_stats', 'schedule_cache']
