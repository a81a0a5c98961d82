"""Every word of the vocabulary against NumPy in float64: values and gradients, on every device that works here.

TS_DEVICES=CPU,PYTHON chooses devices. All cases of a device are computed together, so that they are compiled together.
"""
import math
import os
import warnings
from functools import cache

import numpy as np
import pytest
from numpy_oracle import evaluate

import tinysched.frontend.gradient  # noqa: F401  teaches tensors gradients
from tinysched.frontend.tensor import Tensor
from tinysched.ir.dtype import dtypes
from tinysched.ir.uop import UOp
from tinysched.runtime.device import Device

NAMES = os.environ.get('TS_DEVICES', 'CPU,CL,PYTHON').split(',')
DEVICES = [d for d in NAMES if not Device.failure(d)]
R = np.random.default_rng(7)


def floats(*shape): return np.round(R.uniform(-2, 2, shape), 3) + 0.0005   # never 0, never a tie
def positive(*shape): return np.abs(floats(*shape)) + 0.1
def unit(*shape): return R.uniform(0.1, 0.9, shape)
def ints(*shape): return R.integers(-6, 7, shape).astype(np.int32)
def bools(*shape): return R.integers(0, 2, shape).astype(bool)
def distinct(*shape): return R.permutation(int(np.prod(shape))).reshape(shape) - 3.3


CASES = {}   # id -> (function of tensors, arrays, expected, whether it has a gradient)


def case(name, f, g, *arrays, grad=True):
    """A case: `f` of tensors must equal `g` of the arrays; floats are float32 there and float64 here."""
    arrays = tuple(map(np.asarray, arrays))
    with warnings.catch_warnings(action='ignore'): want = np.asarray(g(*arrays))
    grad = grad and any(a.dtype.kind == 'f' for a in arrays) and want.dtype.kind == 'f' and np.isfinite(want).all()
    grad = grad and want.size and all(a.size for a in arrays) and sum(a.size for a in arrays) < 200
    shapes = '_'.join('x'.join(map(str, a.shape)) or 's' for a in arrays)
    assert f'{name}-{shapes}' not in CASES, name
    CASES[f'{name}-{shapes}'] = f, arrays, want, grad


SHAPES = (3, 5), (7,), (1, 1), (0, 3), ()
sigmoid = lambda x: 1 / (1 + np.exp(-x))
softplus = lambda x: np.log1p(np.exp(x))
relu = lambda x: np.maximum(x, 0)

# ---- one operand

UNARY = {
    'neg': (lambda x: -x, lambda x: -x, floats), 'abs': (abs, np.abs, floats), 'sign': (lambda x: x.sign(), np.sign, floats),
    'square': (lambda x: x.square(), np.square, floats), 'sqrt': (lambda x: x.sqrt(), np.sqrt, positive),
    'rsqrt': (lambda x: x.rsqrt(), lambda x: 1 / np.sqrt(x), positive), 'reciprocal': (lambda x: x.reciprocal(), lambda x: 1 / x, positive),
    'exp': (lambda x: x.exp(), np.exp, floats), 'exp2': (lambda x: x.exp2(), np.exp2, floats), 'log': (lambda x: x.log(), np.log, positive),
    'log2': (lambda x: x.log2(), np.log2, positive), 'log10': (lambda x: x.log10(), np.log10, positive), 'log1p': (lambda x: x.log1p(), np.log1p, positive),
    'sin': (lambda x: x.sin(), np.sin, floats), 'cos': (lambda x: x.cos(), np.cos, floats), 'tan': (lambda x: x.tan(), np.tan, unit),
    'tanh': (lambda x: x.tanh(), np.tanh, floats), 'sigmoid': (lambda x: x.sigmoid(), sigmoid, floats), 'relu': (lambda x: x.relu(), relu, floats),
    'silu': (lambda x: x.silu(), lambda x: x * sigmoid(x), floats), 'swish': (lambda x: x.swish(), lambda x: x * sigmoid(x), floats),
    'gelu': (lambda x: x.gelu(), lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))), floats),
    'softplus': (lambda x: x.softplus(), softplus, floats), 'logsigmoid': (lambda x: x.logsigmoid(), lambda x: -softplus(-x), floats),
    'leaky_relu': (lambda x: x.leaky_relu(), lambda x: np.where(x < 0, 0.01 * x, x), floats),
    'trunc': (lambda x: x.trunc(), np.trunc, floats), 'floor': (lambda x: x.floor(), np.floor, floats), 'ceil': (lambda x: x.ceil(), np.ceil, floats),
    'round': (lambda x: x.round(), np.round, floats), 'isnan': (lambda x: x.isnan(), np.isnan, floats), 'isinf': (lambda x: x.isinf(), np.isinf, floats),
    'logical_not': (lambda x: x.logical_not(), np.logical_not, bools), 'invert': (lambda x: ~x, np.invert, ints), 'invert_bool': (lambda x: ~x, np.invert, bools),
    'neg_int': (lambda x: -x, np.negative, ints), 'abs_int': (abs, np.abs, ints), 'sign_int': (lambda x: x.sign(), np.sign, ints),
    'floor_int': (lambda x: x.floor(), lambda x: x, ints), 'relu_int': (lambda x: x.relu(), relu, ints), 'exp_int': (lambda x: x.exp(), np.exp, ints),
    'cube': (lambda x: x ** 3, lambda x: x ** 3, floats), 'power_neg': (lambda x: x ** -2, lambda x: x ** -2.0, positive),
    'power_half': (lambda x: x ** 0.5, np.sqrt, positive), 'power_float': (lambda x: x ** 1.7, lambda x: x ** 1.7, positive), 'power_zero': (lambda x: x ** 0 + 0 * x, lambda x: x ** 0, floats),
    'two_to': (lambda x: 2 ** x, lambda x: 2 ** x, floats), 'cube_int': (lambda x: x ** 3, lambda x: x ** 3, ints),
    'clip': (lambda x: x.clip(-1, 0.5), lambda x: np.clip(x, -1, 0.5), floats), 'clamp_low': (lambda x: x.clamp(min_=0.2), lambda x: np.maximum(x, 0.2), floats),
    'mul_number': (lambda x: x * 3, lambda x: x * 3, floats), 'rsub_number': (lambda x: 2 - x, lambda x: 2 - x, floats), 'rdiv_number': (lambda x: 2 / x, lambda x: 2 / x, positive),
    'int_plus_float': (lambda x: x + 0.5, lambda x: x + 0.5, ints), 'bool_plus_int': (lambda x: x + 1, lambda x: x + 1, bools), 'div_int': (lambda x: x / 4, lambda x: x / 4, ints),
    'idiv_number': (lambda x: x // 3, lambda x: x // 3, ints), 'mod_number': (lambda x: x % 3, lambda x: x % 3, ints), 'idiv_negative': (lambda x: x // -4, lambda x: x // -4, ints), 'mod_negative': (lambda x: x % -4, lambda x: x % -4, ints),
    'idiv_float': (lambda x: x // 0.7, lambda x: x // 0.7, floats), 'mod_float': (lambda x: x % 0.7, lambda x: x % 0.7, floats),
    'shift_left': (lambda x: x << 2, lambda x: x << 2, ints), 'shift_right': (lambda x: x >> 1, lambda x: x >> 1, ints), 'and_number': (lambda x: x & 5, lambda x: x & 5, ints),
}
erf = np.vectorize(math.erf, otypes=[float])
above1 = lambda *shape: positive(*shape) + 1.1
elu = lambda x, a=1.0, b=1.0: np.where(x < 0, a * (np.exp(x / b) - 1), x)
UNARY |= {
    **{n: (lambda x, n=n: getattr(x, n)(), getattr(np, n), m) for n, m in [('sinh', floats), ('cosh', floats), ('isfinite', floats)]},
    **{n: (lambda x, n=n: getattr(x, n)(), getattr(np, 'arc' + n[1:]), m) for n, m in [('asin', unit), ('acos', unit), ('atan', floats), ('asinh', floats), ('acosh', above1), ('atanh', unit)]},
    'asin_neg': (lambda x: (-x).asin(), lambda x: np.arcsin(-x), unit), 'atanh_neg': (lambda x: (-x).atanh(), lambda x: np.arctanh(-x), unit), 'erf': (lambda x: x.erf(), erf, floats),
    'elu': (lambda x: x.elu(0.7), lambda x: elu(x, 0.7), floats), 'celu': (lambda x: x.celu(0.7), lambda x: elu(x, 0.7, 0.7), floats), 'selu': (lambda x: x.selu(), lambda x: 1.0507 * elu(x, 1.67326), floats),
    'relu6': (lambda x: (x * 5).relu6(), lambda x: np.clip(x * 5, 0, 6), floats), 'hardswish': (lambda x: (x * 3).hardswish(), lambda x: x * 3 * np.clip(x * 3 + 3, 0, 6) / 6, floats),
    'hardsigmoid': (lambda x: (x * 3).hardsigmoid(), lambda x: np.clip(x * 3 / 6 + 0.5, 0, 1), floats), 'hardtanh': (lambda x: x.hardtanh(), lambda x: np.clip(x, -1, 1), floats),
    'softsign': (lambda x: x.softsign(), lambda x: x / (1 + abs(x)), floats), 'mish': (lambda x: x.mish(), lambda x: x * np.tanh(softplus(x)), floats), 'quick_gelu': (lambda x: x.quick_gelu(), lambda x: x * sigmoid(1.702 * x), floats),
    'softplus_beta': (lambda x: x.softplus(beta=2.0), lambda x: softplus(2 * x) / 2, floats), 'gelu_tanh': (lambda x: x.gelu(approximate='tanh'), lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))), floats),
    'div_trunc': (lambda x: x.div(4, rounding_mode='trunc'), lambda x: np.trunc(x / 4).astype(np.int32), ints), 'div_floor': (lambda x: x.div(-4, rounding_mode='floor'), lambda x: x // -4, ints), 'div_trunc_float': (lambda x: x.div(0.7, rounding_mode='trunc'), lambda x: np.trunc(x / 0.7), floats),
    'masked_fill': (lambda x: x.masked_fill(x > 0.5, 3), lambda x: np.where(x > 0.5, 3, x), floats), 'sequential': (lambda x: x.sequential([abs, lambda v: v + 1]), lambda x: abs(x) + 1, floats),
}
for name, (f, g, make) in UNARY.items():
    for s in SHAPES: case(name, f, g, make(*s))

# ---- two operands

BINARY = {
    'add': (lambda a, b: a + b, np.add, floats), 'sub': (lambda a, b: a - b, np.subtract, floats), 'mul': (lambda a, b: a * b, np.multiply, floats),
    'div': (lambda a, b: a / b, np.divide, positive), 'maximum': (lambda a, b: a.maximum(b), np.maximum, floats), 'minimum': (lambda a, b: a.minimum(b), np.minimum, floats),
    'pow': (lambda a, b: a ** b, np.power, positive), 'lt': (lambda a, b: a < b, np.less, ints), 'le': (lambda a, b: a <= b, np.less_equal, ints),
    'gt': (lambda a, b: a > b, np.greater, floats), 'ge': (lambda a, b: a >= b, np.greater_equal, floats), 'eq': (lambda a, b: a == b, np.equal, ints), 'ne': (lambda a, b: a != b, np.not_equal, ints),
    'add_int': (lambda a, b: a + b, np.add, ints), 'max_int': (lambda a, b: a.maximum(b), np.maximum, ints), 'min_int': (lambda a, b: a.minimum(b), np.minimum, ints),
    'and': (lambda a, b: a & b, np.bitwise_and, ints), 'or': (lambda a, b: a | b, np.bitwise_or, ints), 'xor': (lambda a, b: a ^ b, np.bitwise_xor, ints),
    'add_bool': (lambda a, b: a + b, np.add, bools), 'mul_bool': (lambda a, b: a * b, np.multiply, bools), 'max_bool': (lambda a, b: a.maximum(b), np.maximum, bools), 'lt_bool': (lambda a, b: a < b, np.less, bools),
    'idiv': (lambda a, b: a // (b + 7), lambda a, b: a // (b + 7), ints), 'mod': (lambda a, b: a % (b + 7), lambda a, b: a % (b + 7), ints), 'idiv_neg': (lambda a, b: a // (b - 7), lambda a, b: a // (b - 7), ints), 'mod_neg': (lambda a, b: a % (b - 7), lambda a, b: a % (b - 7), ints),
    'pow_int': (lambda a, b: a ** abs(b), lambda a, b: a ** abs(b), ints), 'where': (lambda a, b: (a < b).where(a, b), lambda a, b: np.where(a < b, a, b), floats),
    'mse_loss': (lambda a, b: a.mse_loss(b), lambda a, b: ((a - b) ** 2).mean(), floats), 'l1_loss': (lambda a, b: a.l1_loss(b, reduction='sum'), lambda a, b: np.abs(a - b).sum(), floats),
}
BINARY |= {
    'logaddexp': (lambda a, b: a.logaddexp(b), np.logaddexp, floats),
    'isclose': (lambda a, b: a.isclose(b, atol=1), lambda a, b: np.isclose(a, b, atol=1), floats), 'allclose': (lambda a, b: a.allclose(b, atol=9), lambda a, b: np.bool_(np.allclose(a, b, atol=9)), floats),
}
PAIRS = ((3, 5), (3, 5)), ((3, 1), (5,)), ((2, 1, 3), (1, 4, 1)), ((0, 3), (3,)), ((), (2, 2)), ((1,), ())
for name, (f, g, make) in BINARY.items():
    for s, t in PAIRS: case(name, f, g, make(*s), make(*t))
for s, t in PAIRS: case('copysign', lambda a, b: a.copysign(b), np.copysign, floats(*s), floats(*t), grad=False)
case('int_and_float', lambda a, b: a + b, np.add, ints(3, 4), floats(4))
case('bool_and_float', lambda a, b: a * b, np.multiply, bools(3, 4), floats(4))
case('where_numbers', lambda a: (a > 0).where(1.5, 2), lambda a: np.where(a > 0, 1.5, 2), floats(3, 4), grad=False)
case('lerp', lambda a, b, c: a.lerp(b, c), lambda a, b, c: a + (b - a) * c, floats(3, 1), floats(4), unit(3, 4))

# ---- many to one

REDUCTIONS = {
    'sum': (lambda x, a, k: x.sum(a, k), lambda x, a, k: x.sum(axis=a, keepdims=k), floats), 'mean': (lambda x, a, k: x.mean(a, k), lambda x, a, k: x.mean(axis=a, keepdims=k), floats),
    'max': (lambda x, a, k: x.max(a, k), lambda x, a, k: x.max(axis=a, keepdims=k), distinct), 'min': (lambda x, a, k: x.min(a, k), lambda x, a, k: x.min(axis=a, keepdims=k), distinct),
    'prod': (lambda x, a, k: x.prod(a, k), lambda x, a, k: x.prod(axis=a, keepdims=k), positive), 'var': (lambda x, a, k: x.var(a, k), lambda x, a, k: x.var(axis=a, keepdims=k, ddof=1), floats),
    'std': (lambda x, a, k: x.std(a, k, correction=0), lambda x, a, k: x.std(axis=a, keepdims=k), floats),
    'logsumexp': (lambda x, a, k: x.logsumexp(a, k), lambda x, a, k: np.log(np.exp(x).sum(axis=a, keepdims=k)), floats),
    'sum_int': (lambda x, a, k: x.sum(a, k), lambda x, a, k: x.sum(axis=a, keepdims=k), ints), 'max_int': (lambda x, a, k: x.max(a, k), lambda x, a, k: x.max(axis=a, keepdims=k), ints),
    'min_int': (lambda x, a, k: x.min(a, k), lambda x, a, k: x.min(axis=a, keepdims=k), ints), 'sum_bool': (lambda x, a, k: x.sum(a, k), lambda x, a, k: x.sum(axis=a, keepdims=k), bools),
    'any': (lambda x, a, k: x.any(a, k), lambda x, a, k: x.any(axis=a, keepdims=k), bools), 'all': (lambda x, a, k: x.all(a, k), lambda x, a, k: x.all(axis=a, keepdims=k), bools),
    'max_bool': (lambda x, a, k: x.max(a, k), lambda x, a, k: x.max(axis=a, keepdims=k), bools),
}
for name, (f, g, make) in REDUCTIONS.items():
    for n, (axis, k) in enumerate([(None, False), (0, False), (1, True), (-1, False), ((0, 2), False), ((1, 2), True)]):
        case(f'{name}_{n}', lambda x, f=f, a=axis, k=k: f(x, a, k), lambda x, g=g, a=axis, k=k: g(x, a, k), make(3, 5, 2))
    if name not in ('max', 'min', 'var', 'max_int', 'min_int', 'max_bool'):
        case(name, lambda x, f=f: f(x, 0, False), lambda x, g=g: g(x, 0, False), make(0, 3))
    if name != 'var': case(f'{name}_one', lambda x, f=f: f(x, None, False), lambda x, g=g: g(x, None, False), make(1, 1), grad=name != 'std')
case('max_of_nothing', lambda x: x.max(0), lambda x: np.full(3, -np.inf), floats(0, 3))
case('max_of_no_ints', lambda x: x.max(0), lambda x: np.full(3, -2**31), ints(0, 3))
case('sum_scalar', lambda x: x.sum(), lambda x: x, floats())
case('sum_large', lambda x: x.sum(), lambda x: x.sum(), R.uniform(0, 1, (100, 99)))
for axis in (None, 0, 1, -1):
    case(f'argmax_{axis}', lambda x, a=axis: x.argmax(a), lambda x, a=axis: x.argmax(a), ints(4, 5))
    case(f'argmin_{axis}', lambda x, a=axis: x.argmin(a), lambda x, a=axis: x.argmin(a), floats(4, 5))
case('argmax_keepdim', lambda x: x.argmax(1, keepdim=True), lambda x: x.argmax(1, keepdims=True), floats(4, 5))
case('argmax_bool', lambda x: x.argmax(1), lambda x: x.argmax(1), bools(4, 5))
for axis in (0, 1, -1):
    e = lambda x, a=axis: np.exp(x) / np.exp(x).sum(a, keepdims=True)
    case(f'softmax_{axis}', lambda x, a=axis: x.softmax(a), e, floats(4, 5))
    case(f'log_softmax_{axis}', lambda x, a=axis: x.log_softmax(a), lambda x, e=e: np.log(e(x)), floats(4, 5))
    case(f'cumsum_{axis}', lambda x, a=axis: x.cumsum(a), lambda x, a=axis: x.cumsum(a), floats(4, 5))
case('softmax_none', lambda x: x.softmax(0), lambda x: x, floats(0, 3))
case('softmax_one', lambda x: x.softmax(), np.ones_like, floats(3, 1))
case('softmax_twice', lambda x: x.softmax(1).softmax(0), lambda x: (lambda s: np.exp(s) / np.exp(s).sum(0))(np.exp(x) / np.exp(x).sum(1, keepdims=True)), floats(4, 5))

# ---- movement

MOVES = {
    'named': (lambda x: x.reshape(shape=(3, 2, 4)).permute(order=(1, 0, 2)).flip(axis=1).view(shape=(1, 6, 4)).expand(shape=(2, 6, 4)).repeat(repeats=(1, 2, 1)), lambda x: np.tile(np.broadcast_to(x.reshape(3, 2, 4).transpose(1, 0, 2)[:, ::-1].reshape(1, 6, 4), (2, 6, 4)), (1, 2, 1))),
    'reshape': (lambda x: x.reshape(4, -1), lambda x: x.reshape(4, 6)), 'view': (lambda x: x.view(-1), lambda x: x.reshape(-1)),
    'permute': (lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1)), 'transpose': (lambda x: x.transpose(0, -1), lambda x: x.swapaxes(0, 2)), 'T': (lambda x: x.T, lambda x: x.swapaxes(0, 1)),
    'flip': (lambda x: x.flip(0, 2), lambda x: np.flip(x, (0, 2))), 'flip_all': (lambda x: x.flip(), np.flip), 'unsqueeze': (lambda x: x.unsqueeze(1), lambda x: x[:, None]), 'squeeze': (lambda x: x[:1].squeeze(0), lambda x: x[0]),
    'expand': (lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1), lambda x: np.broadcast_to(x[:, None], (2, 2, 3, 4))), 'shrink': (lambda x: x.shrink(((0, 1), None, (1, 3))), lambda x: x[:1, :, 1:3]),
    'pad': (lambda x: x.pad(((1, 0), None, (2, 1))), lambda x: np.pad(x, ((1, 0), (0, 0), (2, 1)))), 'pad_flat': (lambda x: x.pad((1, 2, 0, 1)), lambda x: np.pad(x, ((0, 0), (0, 1), (1, 2)))),
    'pad_value': (lambda x: x.pad((1, 1), value=-2.5), lambda x: np.pad(x, ((0, 0), (0, 0), (1, 1)), constant_values=-2.5)), 'pad_negative': (lambda x: x.pad((-1, 2)), lambda x: np.pad(x[..., 1:], ((0, 0), (0, 0), (0, 2)))),
    'flatten': (lambda x: x.flatten(1), lambda x: x.reshape(2, 12)), 'unflatten': (lambda x: x.unflatten(2, (2, -1)), lambda x: x.reshape(2, 3, 2, 2)),
    'cat': (lambda x: x.cat(x * 2, x[:, :0], dim=1), lambda x: np.concatenate([x, x * 2], 1)), 'cat_one': (lambda x: x.cat(), lambda x: x), 'stack': (lambda x: x.stack(x + 1, dim=-1), lambda x: np.stack([x, x + 1], -1)),
    'repeat': (lambda x: x.repeat(2, 1, 3), lambda x: np.tile(x, (2, 1, 3))), 'repeat_more': (lambda x: x.repeat(2, 1, 1, 2), lambda x: np.tile(x, (2, 1, 1, 2))), 'repeat_none': (lambda x: x.repeat(1, 0, 1), lambda x: x[:, :0]),
    'repeat_interleave': (lambda x: x.repeat_interleave(2, 1), lambda x: x.repeat(2, 1)), 'split': (lambda x: x.split([1, 2], 1)[1], lambda x: x[:, 1:]), 'chunk': (lambda x: x.chunk(3, 2)[0], lambda x: x[..., :2]),
    'triu': (lambda x: x.triu(1), lambda x: np.triu(x, 1)), 'tril': (lambda x: x.tril(-1), lambda x: np.tril(x, -1)),
    'pad_then_sum': (lambda x: x.exp().pad((1, 1)).sum(-1), lambda x: np.exp(x).sum(-1)), 'moved_twice': (lambda x: (x.permute(1, 0, 2).reshape(6, 4) + 1).T.reshape(2, 12), lambda x: (x.transpose(1, 0, 2).reshape(6, 4) + 1).T.reshape(2, 12)),
}
for name, (f, g) in MOVES.items(): case(name, f, g, floats(2, 3, 4))
for name in ('permute', 'flip', 'pad', 'cat', 'stack', 'repeat'): case(f'{name}_empty', MOVES[name][0], MOVES[name][1], floats(2, 0, 4))
S = slice
INDICES = [0, -1, (0, 1), (S(None), 1), (Ellipsis, 2), (None, 0), (0, None, S(1, 3)), (S(None, None, -1),), (S(None), S(None, None, 2)), (Ellipsis, S(1, None, 2)), (Ellipsis, S(None, None, 3)),
           (Ellipsis, S(None, None, -2)), (Ellipsis, S(None, None, -3)), (S(None), S(2, 0, -1)), (S(5, 9),), (0, 0, 0), (), (Ellipsis, S(-3, -1)), (1, S(None, None, -2), S(None, None, 3)), (S(None), None, S(1, 1))]
for n, index in enumerate(INDICES): case(f'index_{n}', lambda x, i=index: x[i], lambda x, i=index: x[i], floats(2, 3, 4))
POS = np.array([[0, 2], [1, -1]], np.int32)
case('take', lambda x, i: x[:, i], lambda x, i: x[:, i], floats(2, 3, 4), POS)
case('take_first', lambda x, i: x[i], lambda x, i: x[i], floats(3, 4), POS)
case('take_two', lambda x, i: x[:, i, i], lambda x, i: x[:, i, i], floats(2, 3, 4), POS)
case('take_apart', lambda x, i: x[i, :, i], lambda x, i: x[i, :, i], floats(3, 2, 4), POS)
case('take_with_int', lambda x, i: x[0, :, i], lambda x, i: x[0, :, i], floats(2, 3, 4), POS)
case('take_list', lambda x: x[[2, 0, 0]], lambda x: x[[2, 0, 0]], floats(3, 4), grad=False)
case('take_int', lambda x, i: x[i], lambda x, i: x[i], ints(3, 4), POS)
case('gather', lambda x, i: x.gather(1, i), lambda x, i: np.take_along_axis(x, i, 1), floats(2, 3), np.array([[0, 2], [1, 1]], np.int32))
case('one_hot', lambda i: i.one_hot(4), lambda i: np.eye(4, dtype=np.int32)[i], np.array([0, 3, 1], np.int32))

# ---- products

for s, t in [((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 5)), ((3, 0), (0, 2)), ((0, 3), (3, 2)), ((1, 1), (1, 1)), ((17, 33), (33, 9))]:
    case('matmul', lambda a, b: a @ b, np.matmul, floats(*s), floats(*t))
case('matmul_int', lambda a, b: a @ b, np.matmul, ints(3, 4), ints(4, 2))
case('linear', lambda x, w, b: x.linear(w, b), lambda x, w, b: x @ w + b, floats(3, 4), floats(4, 5), floats(5))
case('linear_relu_linear', lambda x, w, v: ((x @ w).relu() @ v).sum(), lambda x, w, v: (relu(x @ w) @ v).sum(), floats(3, 4), floats(4, 5), floats(5, 2))


def conv(x, w, b, s=1, d=1, p=0, g=1):
    x = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
    kh, kw = ((k - 1) * d + 1 for k in w.shape[2:])
    v = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), axis=(2, 3))[:, :, ::s, ::s, ::d, ::d]
    n, o = w.shape[1], w.shape[0] // g
    return np.concatenate([np.einsum('bchwij,ocij->bohw', v[:, i * n:(i + 1) * n], w[i * o:(i + 1) * o]) for i in range(g)], 1) + b[:, None, None]


for kh, kw, s, d, p, g in [(3, 3, 1, 1, 0, 1), (3, 3, 1, 1, 1, 1), (3, 2, 2, 1, 1, 1), (2, 2, 2, 1, 0, 1), (3, 3, 1, 2, 2, 1), (1, 1, 1, 1, 0, 2), (3, 3, 2, 2, 1, 2), (1, 1, 3, 1, 0, 1), (2, 3, 4, 1, 0, 4)]:
    case(f'conv2d_{kh}{kw}_s{s}_d{d}_p{p}_g{g}', lambda x, w, b, s=s, d=d, p=p, g=g: x.conv2d(w, b, groups=g, stride=s, dilation=d, padding=p),
         lambda x, w, b, s=s, d=d, p=p, g=g: conv(x, w, b, s, d, p, g), floats(1, 4, 5, 6), floats(4, 4 // g, kh, kw), floats(4))


def pool(x, k, s, f, p=0, fill=0.0):
    x = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)), constant_values=fill)
    return f(np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(2, 3))[:, :, ::s, ::s], axis=(-1, -2))


for k, s, p in [(2, 2, 0), (3, 1, 1), (3, 2, 1), (2, 3, 0)]:
    case(f'max_pool2d_{k}{s}{p}', lambda x, k=k, s=s, p=p: x.max_pool2d(k, s, padding=p), lambda x, k=k, s=s, p=p: pool(x, k, s, np.max, p, -np.inf), distinct(1, 2, 6, 5))
    case(f'avg_pool2d_{k}{s}{p}', lambda x, k=k, s=s, p=p: x.avg_pool2d(k, s, padding=p), lambda x, k=k, s=s, p=p: pool(x, k, s, np.mean, p), floats(1, 2, 6, 5))
case('avg_pool2d_without_pad', lambda x: x.avg_pool2d(3, 2, padding=1, count_include_pad=False), lambda x: pool(x, 3, 2, np.sum, 1) / pool(np.ones_like(x), 3, 2, np.sum, 1), floats(1, 2, 5, 5))

# ---- losses

CLASSES = np.array([0, 3, 5, 1], np.int32)
HOT = np.eye(6)[CLASSES]
logs = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
right = lambda x, y: logs(x)[np.arange(4), y]
case('cross_entropy', lambda x, y: x.cross_entropy(y), lambda x, y: -right(x, y).mean(), floats(4, 6), CLASSES)
case('cross_entropy_smooth', lambda x, y: x.cross_entropy(y, label_smoothing=0.1), lambda x, y: -(0.9 * right(x, y) + 0.1 * logs(x).mean(1)).mean(), floats(4, 6), CLASSES)
case('cross_entropy_hot', lambda x, y: x.cross_entropy(y, reduction='none'), lambda x, y: -(logs(x) * y).sum(1), floats(4, 6), HOT)
case('sparse_cross_entropy', lambda x, y: x.sparse_categorical_crossentropy(y), lambda x, y: -right(x, y).mean(), floats(4, 6), CLASSES)
case('sparse_cross_entropy_ignore', lambda x, y: x.sparse_categorical_crossentropy(y, ignore_index=3), lambda x, y: -right(x, y)[y != 3].mean(), floats(4, 6), CLASSES)
case('nll_loss', lambda x, y: x.log_softmax().nll_loss(y, ignore_index=5), lambda x, y: -right(x, y)[y != 5].mean(), floats(4, 6), CLASSES)
case('nll_loss_weight', lambda x, w, y: x.nll_loss(y, weight=w), lambda x, w, y: -(x[np.arange(4), y] * w[y]).sum() / w[y].sum(), floats(4, 6), positive(6), CLASSES)
bce = lambda p, y: -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
case('bce', lambda x, y: x.binary_crossentropy(y), bce, unit(4, 6), HOT)
case('bce_logits', lambda x, y: x.binary_crossentropy_logits(y), lambda x, y: bce(sigmoid(x), y), floats(4, 6), HOT)

# ---- running them


def same(got, want, rtol, atol):
    assert got.shape == want.shape, f'shape {got.shape}, wanted {want.shape}'
    if want.dtype.kind == 'f': np.testing.assert_allclose(got.astype(np.float64), want, rtol=rtol, atol=atol)
    else: np.testing.assert_array_equal(got, want)
    assert (got.dtype.kind in 'iu') == (want.dtype.kind in 'iu') and (got.dtype.kind == 'b') == (want.dtype.kind == 'b')


def tensor(a, device, dtype=np.float32):
    return Tensor(a.astype(dtype) if a.dtype.kind == 'f' else a, device=device)


def together(jobs):
    """Values of many tensors, or what went wrong with each; computed together where that works."""
    out, group = {}, []
    def run(some):
        try:
            Tensor.realize(*(t for _, ts in some for t in ts))
            for key, ts in some: out[key] = [t.numpy() for t in ts]
        except Exception as e:
            if len(some) == 1: out[some[0][0]] = e
            else: run(some[:len(some) // 2]); run(some[len(some) // 2:])
    for key, make in jobs:
        try: group.append((key, make()))
        except Exception as e: out[key] = e
        if len(group) == 64:
            run(group)
            group = []
    if group: run(group)
    return out


@pytest.fixture(scope='module')
def values():
    cache = {}
    def get(device, what, jobs):
        if (device, what) not in cache: cache[device, what] = together(jobs)
        return cache[device, what]
    return get


def answer(found):
    if isinstance(found, Exception): raise found
    return found


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('device', DEVICES)
def test_forward(name, device, values):
    jobs = [(n, lambda f=f, arrays=arrays: [f(*(tensor(a, device) for a in arrays))]) for n, (f, arrays, _, _) in CASES.items()]
    got, = answer(values(device, 'forward', jobs)[name])
    same(got, CASES[name][2], 2e-5, 2e-5)


WITH_GRADIENT = [n for n, c in CASES.items() if c[3]]


def weights(shape): return np.cos(1.7 * np.arange(int(np.prod(shape)))).reshape(shape) + 0.3


def analytic(name, device):
    f, arrays, want, _ = CASES[name]
    ts = [tensor(a, device, np.float64) for a in arrays]
    loss = (f(*ts) * tensor(weights(want.shape), device, np.float64)).sum()
    return loss.gradient(*(t for t in ts if t.dtype is dtypes.float64))


@cache
def numeric(name):
    """Central differences in float64, computed by the oracle, which knows nothing of gradients."""
    f, arrays, want, _ = CASES[name]
    nodes = [UOp.buffer('CPU', a.shape, dtypes.from_py(a)) for a in arrays]
    w, root = weights(want.shape), f(*nodes)
    found = []
    value = lambda arrays: (evaluate(root, dict(zip(nodes, arrays))) * w).sum()
    for i, a in enumerate(arrays):
        if a.dtype.kind != 'f': continue
        out = np.zeros(a.shape)
        for at in np.ndindex(a.shape):
            h = 1e-6
            up, down = np.array(a), np.array(a)
            up[at] += h
            down[at] -= h
            out[at] = (value([*arrays[:i], up, *arrays[i + 1:]]) - value([*arrays[:i], down, *arrays[i + 1:]])) / (2 * h)
        found.append(out)
    return found


@pytest.mark.parametrize('name', WITH_GRADIENT)
@pytest.mark.parametrize('device', DEVICES)
def test_gradient(name, device, values):
    jobs = [(n, lambda n=n: analytic(n, device)) for n in WITH_GRADIENT]
    got = answer(values(device, 'gradient', jobs)[name])
    for g, want in zip(got, numeric(name), strict=True): same(g, want, 2e-4, 2e-5)


# ---- odd values

SPECIAL = np.array([0.0, -0.0, 1.5, -2.5, 3.5, 1e30, np.inf, -np.inf, np.nan], np.float32)
ODD = {
    'sign': (lambda x: x.sign(), np.sign), 'abs': (abs, np.abs), 'round': (lambda x: x.round(), np.round), 'floor': (lambda x: x.floor(), np.floor),
    'relu': (lambda x: x.relu(), relu), 'isnan': (lambda x: x.isnan(), np.isnan), 'isinf': (lambda x: x.isinf(), np.isinf), 'le': (lambda x: x <= 0, lambda x: x <= 0),
    'ge': (lambda x: x >= x, lambda x: x >= x), 'ne': (lambda x: x != x, lambda x: x != x), 'maximum': (lambda x: x.maximum(1), lambda x: np.maximum(x, np.float32(1))),
    'minimum': (lambda x: x.minimum(1), lambda x: np.minimum(x, np.float32(1))), 'max': (lambda x: x.max(), np.max), 'argmax': (lambda x: x.argmax(), np.argmax),
    'sigmoid': (lambda x: x.sigmoid(), lambda x: 1 / (1 + np.exp(-x.astype(np.float64)))), 'exp': (lambda x: x.exp(), lambda x: np.exp(x.astype(np.float64)).astype(np.float32)),
    'log': (lambda x: x.log(), np.log), 'log1p': (lambda x: x.log1p(), np.log1p), 'sqrt': (lambda x: x.sqrt(), np.sqrt),
    'cat': (lambda x: 1 / x.cat(x), lambda x: 1 / np.concatenate([x, x])), 'flip': (lambda x: 1 / x.flip(), lambda x: 1 / x[::-1]),
}


@pytest.mark.parametrize('name', ODD)
@pytest.mark.parametrize('device', DEVICES)
def test_odd_values(name, device, values):
    jobs = [(n, lambda f=f: [f(Tensor(SPECIAL, device=device))]) for n, (f, _) in ODD.items()]
    got, = answer(values(device, 'odd', jobs)[name])
    with np.errstate(all='ignore'): want = np.asarray(ODD[name][1](SPECIAL))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
@pytest.mark.parametrize('device', DEVICES)
def test_relu_is_exact(device, dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    a = np.array([-1, -tiny, -0.0, 0, tiny, 1e-40, 1, np.inf, np.nan]).astype(dtype)
    x = Tensor(a, device=device)
    np.testing.assert_array_equal(x.relu().numpy(), np.maximum(a, 0))
    g, = x.relu().sum().gradient(x)
    np.testing.assert_array_equal(g.numpy()[:-1], (a > 0)[:-1])


def test_infinite_on_one_side():
    x = Tensor([1.0, np.inf, -np.inf, np.nan])
    assert x.isinf(detect_negative=False).tolist() == [False, True, False, False]
    assert x.isinf(detect_positive=False).tolist() == [False, False, True, False]
    assert x.isfinite().tolist() == [True, False, False, False] and x.isclose(x).tolist() == [True, True, True, False]
    y = x.clone(device='NULL')
    assert y.device == 'NULL' and x.clone().device == x.device


def test_promotion():
    one = {dt: Tensor([1], dtype=dt) for dt in dtypes.all}
    table = {('int8', 'uint8'): 'int16', ('int32', 'float16'): 'float16', ('bool', 'int8'): 'int8', ('uint32', 'int32'): 'int64', ('float16', 'bfloat16'): 'float32'}
    for (a, b), want in table.items():
        assert (one[getattr(dtypes, a)] + one[getattr(dtypes, b)]).dtype is getattr(dtypes, want)
    for dt, t in one.items():
        assert (t * 1).dtype is (dtypes.int32 if dt is dtypes.bool else dt)
        assert (t * 1.0).dtype is (dt if dtypes.is_float(dt) else dtypes.float32)
        assert t.sum().dtype is (dt if dtypes.is_float(dt) else dtypes.uint64 if dt is dtypes.uint64 else dtypes.int64 if dt is dtypes.int64 else dtypes.uint32 if dtypes.is_unsigned(dt) else dtypes.int32)
        assert (t < 2).dtype is dtypes.bool and t.mean().dtype is (dt if dtypes.is_float(dt) else dtypes.float32)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('device', DEVICES)
def test_half_sums_in_float32(device, dtype):
    t = Tensor(np.full(5000, 0.5), dtype=dtype, device=device)
    assert t.mean().item() == 0.5 and t.sum(dtype='float32').item() == 2500
    a = Tensor(np.ones((1, 3000)), dtype=dtype, device=device)
    got = (a @ a.T).item()
    assert got == {'float16': 3000, 'bfloat16': 3008}[dtype]   # rounded once, at the end


# ---- random numbers (M11)

def test_M11_bits_are_equal_on_every_device():
    rows = {}
    for device in DEVICES:
        Tensor.manual_seed(42)
        rows[device] = [Tensor.rand(3, 5, device=device).numpy(), Tensor.randint(9, low=-5, high=100, device=device).numpy(), Tensor.randn(50, device=device).numpy()]
    first = rows[DEVICES[0]]
    for r in rows.values():
        assert all((a == b).all() for a, b in zip(r[:2], first[:2]))
        np.testing.assert_allclose(r[2], first[2], rtol=1e-4, atol=1e-6)


def test_M11_counter_is_fixed_when_the_tensor_is_made():
    Tensor.manual_seed(1)
    a, b = Tensor.rand(4), Tensor.rand(4)
    late_b, late_a = b.tolist(), a.tolist()
    Tensor.manual_seed(1)
    assert Tensor.rand(4).tolist() == late_a and Tensor.rand(4).tolist() == late_b and late_a != late_b


# ---- errors: of the expected kind, naming the operation, and leaving every tensor as it was

MISTAKES = [
    ('add', ValueError, lambda x: x + Tensor([1.0, 2.0, 3.0, 4.0])), ('matmul', ValueError, lambda x: x @ x), ('reshape', ValueError, lambda x: x.reshape(4, 2)),
    ('reshape', ValueError, lambda x: x.reshape(-1, -1)), ('reshape', ValueError, lambda x: x.reshape(-1, 4)), ('expand', ValueError, lambda x: x.expand(4, 3)),
    ('permute', ValueError, lambda x: x.permute(0, 0)), ('sum', IndexError, lambda x: x.sum(2)), ('sum', ValueError, lambda x: x.sum((0, 0))), ('index', IndexError, lambda x: x[2]),
    ('index', IndexError, lambda x: x[0, 0, 0]), ('index', IndexError, lambda x: x[0.5]), ('index', IndexError, lambda x: x[x > 0]), ('cat', ValueError, lambda x: x.cat(x[:, :2])),
    ('shrink', ValueError, lambda x: x.shrink(((0, 3), None))), ('pad', ValueError, lambda x: x.pad((1, 2, 3))), ('shape', ValueError, lambda x: Tensor.zeros(2, -1)),
    ('conv2d', ValueError, lambda x: x.conv2d(x)), ('and', TypeError, lambda x: x & x), ('where', TypeError, lambda x: x.where('a', 1)), ('item', ValueError, lambda x: x.item()),
    ('bool', ValueError, bool), ('assign', ValueError, lambda x: x.assign(Tensor([1.0, 2.0]))), ('assign', TypeError, lambda x: x.assign(Tensor([1, 2, 3]))),
    ('assign', ValueError, lambda x: x.unsqueeze(0).expand(2, 2, 3).assign(1.0)), ('setitem', ValueError, lambda x: x.__setitem__(0, [1.0, 2.0])), ('add', TypeError, lambda x: x.add('x')),
    ('squeeze', IndexError, lambda x: x.squeeze(5)), ('split', ValueError, lambda x: x.split([1, 2])), ('one_hot', TypeError, lambda x: x.one_hot(3)), ('bitcast', ValueError, lambda x: x.bitcast('float64')),
    ('bias (4,)', ValueError, lambda x: x.linear(x.T, Tensor.ones(4))), ('bias (1,)', ValueError, lambda x: x.linear(x.T, Tensor.ones(1))), ('wanted (2,)', ValueError, lambda x: x.linear(x.T, Tensor.ones(2, 2))),
    ('bias (1,)', ValueError, lambda x: x.reshape(1, 1, 2, 3).conv2d(Tensor.ones(2, 1, 1, 1), Tensor.ones(1))), ('wanted (2,)', ValueError, lambda x: x.reshape(1, 1, 2, 3).conv2d(Tensor.ones(2, 1, 1, 1), Tensor.ones(4))),
    ('split', ValueError, lambda x: x.split(0)), ('stack', ValueError, lambda x: x.stack(x[:1])), ('stack', IndexError, lambda x: x.stack(x, dim=7)), ('invert', TypeError, lambda x: ~x), ('std', IndexError, lambda x: x.std(5)),
    ('Tensor(array)', TypeError, lambda x: np.ones(3) + x), ('Tensor(array)', TypeError, lambda x: x + [1, 2, 3]), ('linspace', TypeError, lambda x: Tensor.linspace(0, 1, 2.5)), ('eye', TypeError, lambda x: Tensor.eye(2.5)),
    ('manual_seed', TypeError, lambda x: Tensor.manual_seed('a')), ('gelu', ValueError, lambda x: x.gelu('fast')), ('div', ValueError, lambda x: x.div(2, rounding_mode='up')),
    ('cross_entropy', ValueError, lambda x: x.cross_entropy(Tensor([1, 2, 3]))), ('max_pool2d', ValueError, lambda x: x.max_pool2d()), ('', TypeError, lambda x: x + 'x'), ('', TypeError, lambda x: x + None),
    ('', TypeError, lambda x: x.cast('number')), ('', ValueError, lambda x: x.to('MOON')), ('arange', ValueError, lambda x: Tensor.arange(0, 3, 0)), ('randint', ValueError, lambda x: Tensor.randint(2, low=1, high=1)),
    ('argmax', ValueError, lambda x: x[:, :0].argmax()), ('pow', ValueError, lambda x: x.int() ** -1), ('shl', ValueError, lambda x: x.int() << -1), ('sub', TypeError, lambda x: (x > 0) - (x > 1)),
    ('uint8', OverflowError, lambda x: x.cast('uint8') + 300), ('clip', ValueError, lambda x: x.clip()), ('transpose', IndexError, lambda x: x.transpose(0, 2)), ('Tensor', TypeError, lambda x: Tensor(['a'])),
]


def image(): return Tensor.ones(1, 2, 4, 4)
MISTAKES += [
    ('sum', TypeError, lambda x: x.sum('a')), ('reshape', ValueError, lambda x: x.reshape(-2, 3)), ('expand', ValueError, lambda x: x.expand(3)),
    ('shrink', ValueError, lambda x: x.shrink(((1,), (0, 0)))), ('cat', TypeError, lambda x: x.cat(3)), ('repeat', ValueError, lambda x: x.repeat(2)),
    ('conv2d', ValueError, lambda x: image().conv2d(Tensor.ones(2, 2, 1, 1), stride=(1, 2, 3))), ('conv2d', ValueError, lambda x: image().conv2d(Tensor.ones(2, 2, 1, 1), stride=0)),
    ('conv2d', ValueError, lambda x: image().conv2d(Tensor.ones(2, 2, 5, 5))), ('conv2d', ValueError, lambda x: image().conv2d(Tensor.ones(3, 1, 1, 1), groups=2)),
    ('nll_loss', ValueError, lambda x: x.nll_loss(Tensor([0, 1]), reduction='average')), ('@', TypeError, lambda x: 3 @ x),
    ('isclose: got a str', TypeError, lambda x: x.isclose('one')), ('copysign: got a str', TypeError, lambda x: x.copysign('one'))]


@pytest.mark.parametrize('n', range(len(MISTAKES)))
def test_errors(n):
    word, kind, mistake = MISTAKES[n]
    x = Tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    y = x + 1
    with pytest.raises(kind) as e: mistake(x)
    assert word in str(e.value) and str(e.value).strip(), str(e.value)
    assert x.tolist() == [[1, 2, 3], [4, 5, 6]] and y.tolist() == [[2, 3, 4], [5, 6, 7]]


def test_two_devices_are_named():
    a, b = Tensor([1.0, 2.0], device='PYTHON').realize(), Tensor([1.0, 2.0], device='NULL').realize()
    with pytest.raises(RuntimeError, match='PYTHON and on NULL'): a + b
    with pytest.raises(RuntimeError, match=r'\.to\('): a.assign(b)
    assert a.tolist() == [1, 2]


def test_products_from_the_right_and_losses_without_a_mean():
    x, w = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 0], [2, 1]])
    assert Tensor(x).matmul(Tensor(w), reverse=True).tolist() == (w @ x).tolist()
    assert [Tensor(x).nll_loss(Tensor([2, 0]), reduction=r).tolist() for r in ('none', 'sum')] == [[-3, -4], -7]
    weight = Tensor([2.0, 1.0, 0.5])
    assert [Tensor(x).nll_loss(Tensor([2, 0]), weight, reduction=r).tolist() for r in ('none', 'sum')] == [[-1.5, -8], -9.5]
    assert [Tensor(x).nll_loss(Tensor([2, 0]), weight, 0, r).tolist() for r in ('none', 'sum')] == [[-1.5, 0], -1.5]
