"Codegen and the CPU: kernels built by hand, their answers compared with NumPy"
import os
from itertools import product

import numpy as np
import pytest

from tinysched.codegen.lower import lower
from tinysched.codegen.optimize import Target, optimize
from tinysched.codegen.render import kernel
from tinysched.helpers import Context
from tinysched.ir.dtype import dtypes, from_storage, to_numpy, to_storage
from tinysched.ir.uop import AxisType, KernelInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import cpu, store
from tinysched.runtime.device import Device
from tinysched.runtime.store import unsealed

needs_c = pytest.mark.skipif(not cpu.available()[0], reason='no C compiler')
f32, i32, index = dtypes.float32, dtypes.int32, dtypes.index
PLAIN, WIDE, WORKERS = Target(vector=0), Target(vector=32), Target(vector=64, threads=3)


# ---- building by hand ------------------------------------------------------------------------------------
def c(value, dt=index): return UOp.const(dt, value)
def op(o, *xs): return UOp(o, dtypes.bool if o in (Ops.CMPLT, Ops.CMPNE) else xs[-1].dtype, xs)
def add(a, b): return op(Ops.ADD, a, b)
def mul(a, b): return op(Ops.MUL, a, b)
def flat(i, n, j): return add(mul(i, c(n)), j)
def param(slot, size, dt=f32): return UOp.param(slot, dt, (size,))
def loop(n, number): return UOp.range(n, number)
def red(n, number): return UOp.range(n, number, AxisType.REDUCE)
def reduce(o, x, *loops): return UOp(Ops.REDUCE, x.dtype, (x, *loops), (o, ()))
def sink(*effects): return UOp.sink(*effects, arg=KernelInfo('k'))


def elementwise(fn, n, *dts):
    "out[i] = fn(in1[i], ...)"
    i = loop(n, 0)
    value = fn(*(param(1 + k, n, dt).index(i) for k, dt in enumerate(dts)))
    return sink(param(0, n, value.dtype).index(i).store(value).end(i))


def applied(o, n, *dts): return elementwise(lambda *x: op(o, *x), n, *dts)
def casting(src, dst, n): return elementwise(lambda x: x.cast(dst), n, src)


class Memory:
    def __init__(self, a): self.a, self.address = a, a.__array_interface__['data'][0]


def on_c(asts, target):
    "A runner for each kernel, all compiled in one call"
    kernels = [kernel(ast, target, 'C') for ast in asts]
    loaded = cpu.compile_many([(k.name, k.source) for k in kernels])
    launches = [cpu.launcher(k, f, max(1, target.threads)) for k, f in zip(kernels, loaded)]
    return [lambda *arrays, values=(), go=go: go([(Memory(a), 0) for a in arrays], values) for go in launches]


def plainly(asts):
    with Context(NOOPT=1): return on_c(asts, PLAIN)


def on_cl(asts):
    machine = Device['CL']
    def run(runner, *arrays, values=()):
        memory = []
        for a in arrays:
            memory.append(machine.allocate(a.nbytes))
            machine.copyin(memory[-1], a.reshape(-1).view(np.uint8).data)
        runner.launch([(m, 0) for m in memory], list(values))
        for a, m in zip(arrays, memory): machine.copyout(a.reshape(-1).view(np.uint8).data, m)
    return [lambda *arrays, r=r, **k: run(r, *arrays, **k) for r in machine.compile(asts)]


WAYS = {'noopt': plainly, 'lanes': lambda asts: on_c(asts, WIDE), 'threads': lambda asts: on_c(asts, WORKERS), 'CL': on_cl}
WORKS = {way: cpu.available()[0] if way != 'CL' else not Device.failure('CL') for way in WAYS}
def on(*names):
    return pytest.mark.parametrize('way', [n if WORKS[n] else pytest.param(n, marks=pytest.mark.skip) for n in names])
on_all, on_three = on(*WAYS), on('noopt', 'lanes', 'CL')


def run(way, ast, *arrays, **values): WAYS[way]([ast])[0](*arrays, **values)


def results(way, cases):
    "For each (kernel, output dtype, inputs): what it writes; all are compiled in one call"
    outs = []
    for go, (_, dtype, inputs) in zip(WAYS[way]([ast for ast, *_ in cases]), cases):
        outs.append(np.zeros(len(inputs[0]), dtype))
        go(outs[-1], *inputs)
    return outs


def rnd(*shape): return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# ---- operations ------------------------------------------------------------------------------------------
INTS = {'int8': dtypes.int8, 'uint8': dtypes.uint8, 'int16': dtypes.int16, 'uint16': dtypes.uint16,
        'int32': dtypes.int32, 'uint32': dtypes.uint32, 'int64': dtypes.int64, 'uint64': dtypes.uint64}


def int_pairs(name):
    info = np.iinfo(name)
    edge = np.array([info.min, info.min + 1, 0, 1, 2, 3, 7, info.max - 1, info.max] + ([-1, -2, -3, -7] if info.min else [5]), name)
    a, b = np.meshgrid(edge, edge)
    n = -(-a.size // 64) * 64  # lanes need a multiple
    return np.resize(a.ravel(), n), np.resize(b.ravel(), n)


def guarded(fn, a, b):
    "NumPy's answer, but 0 where the divisor is 0"
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, 0, fn(a, safe)).astype(a.dtype)


def shifted(fn):
    def go(a, b):
        bits = a.dtype.itemsize * 8
        inside = (b >= 0) & (b < bits)
        return np.where(inside, fn(a, np.where(inside, b, 0).astype(b.dtype)), 0).astype(a.dtype)
    return go


INT_OPS = {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.AND: np.bitwise_and,
           Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor, Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal,
           Ops.IDIV: lambda a, b: guarded(np.floor_divide, a, b), Ops.MOD: lambda a, b: guarded(np.mod, a, b),
           Ops.SHL: shifted(np.left_shift), Ops.SHR: shifted(np.right_shift)}


@on_three
def test_integer_operations_wrap_and_round_down(way):
    cases, wanted = [], []
    for name, dt in INTS.items():
        a, b = int_pairs(name)
        for o, want in INT_OPS.items():
            with np.errstate(all='ignore'): wanted.append((name, o, a, b, want(a, b)))
            cases.append((applied(o, a.size, dt, dt), wanted[-1][-1].dtype, (a, b)))
    for out, (name, o, a, b, want) in zip(results(way, cases), wanted):
        bad = np.flatnonzero(out != want)
        assert not bad.size, (name, o, a[bad[:3]], b[bad[:3]], out[bad[:3]], want[bad[:3]])


FLOATS = np.array([0, -0.0, 1, -1, .5, 1.5, 2.5, -2.5, 3, 1e10, -1e10, 1e-40, 3e38, np.inf, -np.inf, np.nan], np.float32)
FLOAT_OPS = {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.FDIV: np.divide, Ops.MAX: np.maximum,
             Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal}
FLOAT_UNARY = {Ops.NEG: np.negative, Ops.SQRT: np.sqrt, Ops.TRUNC: np.trunc, Ops.EXP2: np.exp2, Ops.LOG2: np.log2, Ops.SIN: np.sin}


@on_three
@pytest.mark.parametrize('dt', [dtypes.float32, dtypes.float64])
def test_float_operations(way, dt):
    a, b = (x.ravel().astype(to_numpy(dt)) for x in np.meshgrid(FLOATS, FLOATS))
    whole = (np.abs(a) > 1e-30) & (np.abs(b) > 1e-30) | (a == 0) | (b == 0)   # CL may flush denormals
    cases, wanted = [], []
    for o, want in (FLOAT_OPS | FLOAT_UNARY).items():
        sources = (a,) if o in FLOAT_UNARY else (a, b)
        with np.errstate(all='ignore'): wanted.append((o, want(*sources)))
        cases.append((applied(o, a.size, *[dt] * len(sources)), wanted[-1][1].dtype, sources))
    for out, (o, want) in zip(results(way, cases), wanted):
        keep = whole & (np.abs(a) != np.float32(1e-40)) & (np.abs(b) != np.float32(1e-40)) if way == 'CL' else slice(None)
        exact = 0 if o in FLOAT_OPS or o in (Ops.NEG, Ops.TRUNC, Ops.SQRT) else 1e-6
        np.testing.assert_allclose(out[keep], want[keep], rtol=max(exact, 3e-7 * (way == 'CL')), atol=exact, err_msg=str(o))


@on_all
def test_bools(way):
    a, b = (np.resize(x, 64) for x in ([False, False, True, True], [False, True, False, True]))
    wanted = {Ops.AND: a & b, Ops.OR: a | b, Ops.XOR: a ^ b, Ops.CMPNE: a != b, Ops.CMPLT: a < b, Ops.ADD: a | b,
              Ops.MUL: a & b, Ops.MAX: a | b, Ops.NEG: ~a}
    two = lambda o: elementwise(lambda *x: op(o, *x), 64, *[dtypes.bool] * (1 + (o is not Ops.NEG)))
    negated = elementwise(lambda x: op(Ops.CMPNE, x, c(True, dtypes.bool)), 64, dtypes.bool)
    cases = [(two(o), bool, (a, b)[:1 + (o is not Ops.NEG)]) for o in wanted] + [(negated, bool, (a,))]
    for out, want in zip(results(way, cases), [*wanted.values(), ~a]): assert (out == want).all()
    number = np.zeros(64, np.float32)
    run(way, elementwise(lambda x, y: op(Ops.WHERE, x, y.cast(f32), c(-2.0, f32)), 64, dtypes.bool, dtypes.bool), number, a, b)
    assert (number == np.where(a, b, -2)).all()


@on_all
@pytest.mark.parametrize('dt', [f32, dtypes.float64, i32, dtypes.int64, dtypes.uint8, dtypes.int16])
def test_where_between_lanes_and_scalars(way, dt):
    a = np.arange(64).astype(to_numpy(dt))
    out = np.zeros_like(a)
    ast = elementwise(lambda x: op(Ops.WHERE, op(Ops.CMPLT, x, c(20, dt)), x, op(Ops.MAX, x, c(40, dt))), 64, dt)
    run(way, ast, out, a)
    assert (out == np.where(a < 20, a, np.maximum(a, 40))).all()


ALL_TYPES = {**INTS, 'bool': dtypes.bool, 'float16': dtypes.float16, 'float32': dtypes.float32, 'float64': dtypes.float64}


@on_three
def test_casts(way):
    cases, wanted = [], []
    for src, dst in product(ALL_TYPES, ALL_TYPES):
        a = (np.arange(64) % 2 if src == 'bool' else np.arange(64) * 1.75).astype(src)
        if src[0] in 'if': a[::3] *= -1
        middle = np.int64 if dst.startswith('uint') and src.startswith('float') else src
        with np.errstate(all='ignore'): wanted.append((src, dst, a.astype(middle).astype(dst)))
        cases.append((casting(ALL_TYPES[src], ALL_TYPES[dst], 64), dst, (a,)))
    for out, (src, dst, want) in zip(results(way, cases), wanted): assert (out == want).all(), (src, dst, out, want)


@on_all
def test_casts_of_what_does_not_fit_are_defined(way):
    a = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 2e19, 1e19, -1], np.float32)
    least = np.iinfo(np.int32).min
    for dt, want in ((dtypes.int32, [least] * 7 + [-1]), (dtypes.bool, [True] * 8)):
        out = np.zeros(8, to_numpy(dt))
        run(way, casting(f32, dt, 8), out, a)
        assert out.tolist() == want
    out = np.zeros(8, np.uint64)
    run(way, elementwise(lambda x: x.cast(dtypes.uint64), 8, f32), out, a)
    assert out[6] == int(a[6]) and out[7] == 2**64 - 1


@on_all
@pytest.mark.parametrize('dt', [dtypes.float16, dtypes.bfloat16])
def test_short_floats_are_rounded_to_nearest_even(way, dt):
    bits = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    bits = np.concatenate([bits, [0x7c00, 0xfc00, 0x7bff, 1, 0x8001, 0x3ff, 0x400]]).astype(np.uint16)
    raw = bits.view(np.float16) if dt is dtypes.float16 else bits
    wide = from_storage(raw, dt).astype(np.float32)
    out = np.zeros(bits.size, np.float32)
    run(way, elementwise(lambda x: x.cast(f32), bits.size, dt), out, raw)
    np.testing.assert_array_equal(out, wide)
    for o, fn in {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum}.items():
        with np.errstate(all='ignore'): want = from_storage(to_storage(fn(wide, wide[::-1]), dt), dt).astype(np.float32)
        short = np.zeros_like(raw)
        run(way, elementwise(lambda x, y, o=o: op(o, x, y), bits.size, dt, dt), short, raw, raw[::-1].copy())
        np.testing.assert_array_equal(from_storage(short, dt).astype(np.float32), want)


@on_all
def test_bitcasts(way):
    a = np.array([1.5, -0.0, np.inf, 1e-40] * 4, np.float32)
    out = np.zeros(16, np.int32)
    run(way, elementwise(lambda x: x.bitcast(i32), 16, f32), out, a)
    assert (out == a.view(np.int32)).all()
    short = np.zeros(16, np.uint16)
    half = np.linspace(-3, 3, 16).astype(np.float16)
    run(way, elementwise(lambda x: x.bitcast(dtypes.uint16), 16, dtypes.float16), short, half)
    assert (short == half.view(np.uint16)).all()


@on_all
def test_constants_are_exact(way):
    for dt, values in {f32: [0.1, -0.0, np.inf, -np.inf, 1e-45, 3.4028234663852886e38, 16777216.0, 1 / 3],
                       dtypes.float64: [0.1, 5e-324, 1.7976931348623157e308, 1 / 3],
                       i32: [-2**31, 2**31 - 1, -1], dtypes.int64: [-2**63, 2**63 - 1],
                       dtypes.uint64: [2**64 - 1, 2**63], dtypes.uint32: [2**32 - 1], dtypes.int8: [-128]}.items():
        n = len(values)
        effects = [param(0, n, dt).index(c(k)).store(c(v, dt)) for k, v in enumerate(values)]
        out = np.zeros(n, to_numpy(dt))
        run(way, sink(*effects), out)
        assert out.tobytes() == np.array(values, to_numpy(dt)).tobytes(), (dt, out)
    out = np.zeros(1, np.float32)
    run(way, sink(param(0, 1).index(c(0)).store(c(float('nan'), f32))), out)
    assert np.isnan(out[0])


# ---- loops -----------------------------------------------------------------------------------------------
def matmul(m, n, k, transposed=False):
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    a = param(1, m * k).index(flat(i, k, r))
    b = param(2, k * n).index(flat(j, k, r) if transposed else flat(r, n, j))
    return sink(param(0, m * n).index(flat(i, n, j)).store(reduce(Ops.ADD, mul(a, b), r)).end(i, j))


def softmax(m, n, one=None):
    "Three loops over a row: largest, sum, write; with `one`, all over the same RANGE"
    i, x = loop(m, 0), param(1, m * n)
    r, s, j = (red(n, 1), red(n, 2), loop(n, 3)) if one is None else (red(n, 1),) * 2 + (loop(n, 3),)
    at = lambda j: x.index(flat(i, n, j))
    most = reduce(Ops.MAX, at(r), r)
    e = lambda j: op(Ops.EXP2, op(Ops.SUB, at(j), most))
    return sink(param(0, m * n).index(flat(i, n, j)).store(op(Ops.FDIV, e(j), reduce(Ops.ADD, e(s), s))).end(i, j))


@on_all
@pytest.mark.parametrize('m,n,k', [(5, 7, 3), (6, 70, 37), (16, 32, 16), (1, 8, 1), (64, 96, 40), (33, 10, 65), (4, 16, 9)])
@pytest.mark.parametrize('transposed', [False, True])
def test_matmul(way, m, n, k, transposed):
    a, b, out = rnd(m, k), rnd(k, n), np.zeros((m, n), np.float32)
    run(way, matmul(m, n, k, transposed), out, a, np.ascontiguousarray(b.T) if transposed else b)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)


@on_all
@pytest.mark.parametrize('m,n', [(4, 64), (5, 75), (3, 10), (1, 33), (300, 96)])
@pytest.mark.parametrize('one', [None, True])
def test_softmax(way, m, n, one):
    x, out = rnd(m, n), np.zeros((m, n), np.float32)
    run(way, softmax(m, n, one), out, x)
    e = np.exp2(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(1, keepdims=True), rtol=1e-5)


def test_reductions_over_one_range_in_sequence_get_loops_of_their_own():
    order = lower(softmax(4, 8, one=True))
    assert sum(u.op is Ops.RANGE for u in order) == 4


def test_two_reductions_over_the_same_ranges_share_one_loop():
    r = red(40, 0)
    x = param(1, 40).index(r)
    ast = sink(param(0, 2).index(c(0)).store(reduce(Ops.ADD, x, r)), param(0, 2).index(c(1)).store(reduce(Ops.MAX, x, r)))
    assert sum(u.op is Ops.RANGE for u in lower(ast)) == 1
    for way in (w for w in WAYS if WORKS[w]):
        a, out = rnd(40), np.zeros(2, np.float32)
        run(way, ast, out, a)
        np.testing.assert_allclose(out, [a.sum(), a.max()], rtol=1e-5)


def test_a_hoisted_reduction_is_outside_also_when_it_needs_the_inner_range():
    "out[i, j] = x[i, j] - max over i of x[i, j]: the loop over j must go outside"
    i, j, r = loop(6, 0), loop(8, 1), red(6, 2)
    x = param(1, 48)
    value = op(Ops.SUB, x.index(flat(i, 8, j)), reduce(Ops.MAX, x.index(flat(r, 8, j)), r))
    ast = sink(param(0, 48).index(flat(i, 8, j)).store(value).end(i, j))
    loops_ = [u.arg[0] for u in lower(optimize(ast, PLAIN._replace(threads=1))) if u.op is Ops.RANGE]
    with Context(NOOPT=1): assert [u.arg[0] for u in lower(optimize(ast, PLAIN)) if u.op is Ops.RANGE] == [1, 2, 0]
    assert loops_[0] == 1
    for way in (w for w in WAYS if WORKS[w]):
        a, out = rnd(6, 8), np.zeros((6, 8), np.float32)
        run(way, ast, out, a)
        np.testing.assert_array_equal(out, a - a.max(0))


@on_all
def test_loops_shared_in_part_and_not_at_all(way):
    i, j, k = loop(3, 0), loop(8, 1), loop(16, 2)
    x = param(1, 24).index(flat(i, 8, j))
    first = param(0, 24).index(flat(i, 8, j)).store(add(x, c(1.0, f32))).end(i, j)
    second = param(2, 48).index(flat(i, 16, k)).store(c(2.0, f32)).end(i, k)
    third = param(3, 8).index(j).store(c(3.0, f32)).end(j)      # j alone: another loop
    a, o0, o2, o3 = rnd(3, 8), np.zeros((3, 8), np.float32), np.zeros((3, 16), np.float32), np.zeros(8, np.float32)
    run(way, sink(first, second, third), o0, a, o2, o3)
    np.testing.assert_array_equal(o0, a + 1)
    assert (o2 == 2).all() and (o3 == 3).all()


@on_all
def test_swap_in_one_kernel(way):
    "Both old values are read before either is written"
    i = loop(32, 0)
    a, b = param(0, 32).index(i), param(1, 32).index(i)
    x, y = rnd(32), rnd(32)[::-1].copy() + 1
    p, q = x.copy(), y.copy()
    run(way, sink(a.store(b).end(i), b.store(a).end(i)), p, q)
    assert (p == y).all() and (q == x).all()


@on_all
def test_in_place(way):
    i = loop(40, 0)
    x = param(0, 40).index(i)
    a = rnd(40)
    p = a.copy()
    run(way, sink(x.store(add(x, c(1.0, f32))).end(i)), p)
    np.testing.assert_array_equal(p, a + 1)


@on_all
def test_gates(way):
    "Out of bounds behind a closed gate: nothing is read, nothing is written"
    i, n = loop(64, 0), 64
    inside = op(Ops.AND, op(Ops.CMPLT, c(9), i), op(Ops.CMPLT, i, c(50)))
    far = op(Ops.WHERE, inside, op(Ops.SUB, i, c(10)), c(1 << 28))
    a, out = rnd(40), np.ones(n, np.float32)
    run(way, sink(param(0, n).index(i).store(param(1, 40).index(far, inside)).end(i)), out, a)
    np.testing.assert_array_equal(out, np.pad(a, (10, 14)))
    out = np.ones(n, np.float32)
    run(way, sink(param(0, n).index(far, inside).store(c(5.0, f32)).end(i)), out)
    assert (out[:40] == 5).all() and (out[40:] == 1).all()


@on_all
@pytest.mark.parametrize('n,lo', [(64, 10), (64, 0), (67, 3), (16, 30)])
def test_gates_of_lanes(way, n, lo):
    "Padding: some lanes of a register are inside, and the register may lie outside the buffer"
    i = loop(n + lo + 5, 0)
    inside = op(Ops.AND, op(Ops.CMPLT, c(lo - 1), i), op(Ops.CMPLT, i, c(n + lo)))
    for dt in (f32, dtypes.int64, dtypes.uint8):
        a = (rnd(n) * 50).astype(to_numpy(dt))
        out = np.ones(n + lo + 5, a.dtype)
        x = param(1, n, dt).index(op(Ops.SUB, i, c(lo)), inside)
        run(way, sink(param(0, out.size, dt).index(i).store(add(x, c(1, dt))).end(i)), out, a)
        np.testing.assert_array_equal(out, np.pad(a, (lo, 5)) + a.dtype.type(1))


@on_all
def test_copies_whose_gates_are_closed_need_fewer_loops(way):
    "out[i, j] = max over r of x padded: in some copies nothing depends on i any more"
    i, j, r = loop(64, 0), UOp.range(3, 1, AxisType.UNROLL), red(10, 2)
    gate = op(Ops.CMPLT, c(0), j)
    at = op(Ops.SUB, add(flat(i, 20, mul(r, c(2))), j), c(1))
    most = reduce(Ops.MAX, op(Ops.SUB, param(1, 1300).index(at, gate), c(1.0, f32)), r)
    a, out = rnd(1300), np.zeros((64, 3), np.float32)
    run(way, sink(param(0, 192).index(flat(i, 3, j)).store(most).end(i, j)), out, a)
    ii, rr = np.arange(64)[:, None], np.arange(10)[None]
    want = np.stack([np.full(64, -1), *((a[ii * 20 + rr * 2 + k]).max(1) - 1 for k in (0, 1))], 1)
    np.testing.assert_allclose(out, want, rtol=1e-6)


@on_all
@pytest.mark.parametrize('dt', [f32, i32, dtypes.int64, dtypes.uint8, dtypes.float64])
def test_ranges_as_numbers(way, dt):
    "out[i, j] = (j > i) * j + i, and the sum of all j"
    i, j, r = loop(5, 0), loop(48, 1), red(48, 2)
    value = op(Ops.WHERE, op(Ops.CMPLT, i, j), j.cast(dt), c(0, dt))
    out, total = np.zeros((5, 48), to_numpy(dt)), np.zeros(1, np.int32)
    run(way, sink(param(0, 240, dt).index(flat(i, 48, j)).store(add(value, i.cast(dt))).end(i, j),
                  param(1, 1, i32).index(c(0)).store(reduce(Ops.ADD, r.cast(i32), r))), out, total)
    ii, jj = np.arange(5)[:, None], np.arange(48)[None]
    np.testing.assert_array_equal(out, np.where(ii < jj, jj, 0) + ii)
    assert total[0] == 48 * 47 // 2


@on_all
def test_gather_and_arange(way):
    i = loop(16, 0)
    at = param(2, 16, i32).index(i).cast(index)
    table, where_, out = rnd(100), np.arange(16, dtype=np.int32)[::-1].copy() * 6, np.zeros(16, np.float32)
    inside = UOp(Ops.AND, dtypes.bool, (UOp.const(index, -1) < at, at < 100))
    value = add(UOp(Ops.INDEX, f32, (param(1, 100), at, inside)), i.cast(f32))
    run(way, sink(param(0, 16).index(i).store(value).end(i)), out, table, where_)
    np.testing.assert_array_equal(out, table[where_] + np.arange(16, dtype=np.float32))


@on_all
@pytest.mark.parametrize('rows,cols', [(8, 64), (7, 33), (64, 8), (1, 100), (128, 300)])
def test_sums_along_each_axis(way, rows, cols):
    a = rnd(rows, cols)
    i, r = loop(rows, 0), red(cols, 1)
    out = np.zeros(rows, np.float32)
    run(way, sink(param(0, rows).index(i).store(reduce(Ops.ADD, param(1, rows * cols).index(flat(i, cols, r)), r)).end(i)), out, a)
    np.testing.assert_allclose(out, a.sum(1), rtol=1e-4, atol=1e-5)
    j, s = loop(cols, 0), red(rows, 1)
    out = np.zeros(cols, np.float32)
    run(way, sink(param(0, cols).index(j).store(reduce(Ops.ADD, param(1, rows * cols).index(flat(s, cols, j)), s)).end(j)), out, a)
    np.testing.assert_allclose(out, a.sum(0), rtol=1e-4, atol=1e-5)


@on_all
@pytest.mark.parametrize('name', ['int8', 'int32', 'uint64', 'bool', 'float64'])
@pytest.mark.parametrize('o', [Ops.ADD, Ops.MUL, Ops.MAX])
def test_reductions_of_each_type(way, name, o):
    dt = ALL_TYPES[name]
    a = (np.arange(64) % 3 if name != 'bool' else np.arange(64) == 63).astype(name)
    want = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum}[o].reduce(a, dtype=a.dtype)
    r = red(64, 0)
    out = np.zeros(1, name)
    run(way, sink(param(0, 1, dt).index(c(0)).store(reduce(o, param(1, 64, dt).index(r), r))), out, a)
    assert out[0] == want


@on_all
def test_convolution(way):
    "3 x 3, padding 1: gates, short loops written out, lanes where nothing is gated"
    ci, co, h, w = 4, 8, 6, 16
    o, y, x, k, u, v = loop(co, 0), loop(h, 1), loop(w, 2), red(ci, 3), red(3, 4), red(3, 5)
    yy, xx = op(Ops.SUB, add(y, u), c(1)), op(Ops.SUB, add(x, v), c(1))
    inside = None
    for t, n in ((yy, h), (xx, w)):
        g = op(Ops.AND, op(Ops.CMPLT, c(-1), t), op(Ops.CMPLT, t, c(n)))
        inside = g if inside is None else op(Ops.AND, inside, g)
    image = param(1, ci * h * w).index(flat(flat(k, h, yy), w, xx), inside)
    weight = param(2, co * ci * 9).index(flat(flat(flat(o, ci, k), 3, u), 3, v))
    ast = sink(param(0, co * h * w).index(flat(flat(o, h, y), w, x)).store(reduce(Ops.ADD, mul(image, weight), k, u, v)).end(o, y, x))
    a, b, out = rnd(ci, h, w), rnd(co, ci, 3, 3), np.zeros((co, h, w), np.float32)
    run(way, ast, out, a, b)
    p, want = np.pad(a, ((0, 0), (1, 1), (1, 1))), np.zeros((co, h, w), np.float32)
    for du in range(3):
        for dv in range(3): want += np.einsum('oc,chw->ohw', b[:, :, du, dv], p[:, du:du + h, dv:dv + w])
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


@on_all
@pytest.mark.parametrize('h,d,n', [(3, 16, 32), (2, 5, 7)])
def test_what_is_known_per_head_is_computed_per_head(way, h, d, n):
    "out[t, i] = sum over s of softmax(x[i // d, t])[s] * v[i, s]: heads side by side in one axis"
    t, i, r, s = loop(4, 0), loop(h * d, 1), red(n, 2), red(n, 3)
    x = lambda at: param(1, h * 4 * n).index(flat(flat(op(Ops.IDIV, i, c(d)), 4, t), n, at))
    most = reduce(Ops.MAX, x(r), r)
    value = reduce(Ops.ADD, mul(op(Ops.EXP2, op(Ops.SUB, x(s), most)), param(2, h * d * n).index(flat(i, n, s))), s)
    ast = sink(param(0, 4 * h * d).index(flat(t, h * d, i)).store(value).end(t, i))
    with Context(NOOPT=1): top = next(u for u in optimize(ast, PLAIN).toposort() if u.op is Ops.REDUCE and u.arg[0] is Ops.MAX)
    assert {r.vmax + 1 for r in top.ranges} == {4, h}
    a, v, out = rnd(h, 4, n), rnd(h * d, n), np.zeros((4, h * d), np.float32)
    run(way, ast, out, a, v)
    e = np.exp2(a - a.max(-1, keepdims=True))
    np.testing.assert_allclose(out, np.einsum('hts,hds->thd', e, v.reshape(h, d, n)).reshape(4, -1), rtol=1e-4, atol=1e-4)


@on_all
@pytest.mark.parametrize('m,n,k', [(16, 24, 32), (9, 20, 17)])
def test_a_product_written_transposed(way, m, n, k):
    "Lanes along n, whose results are written m apart"
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    value = reduce(Ops.ADD, mul(param(1, m * k).index(flat(i, k, r)), param(2, k * n).index(flat(r, n, j))), r)
    a, b, out = rnd(m, k), rnd(k, n), np.zeros((n, m), np.float32)
    run(way, sink(param(0, m * n).index(flat(j, m, i)).store(value).end(j, i)), out, a, b)
    np.testing.assert_allclose(out, (a @ b).T, rtol=1e-4, atol=1e-4)


@on_all
def test_exp2_over_its_whole_range(way):
    x = np.concatenate([np.linspace(-152, 130, 4096), [np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 127, 128, -126, -149, -150, 1e10,
                                                       -1e10, 0.5, -0.5]]).astype(np.float32)
    out = np.zeros_like(x)
    run(way, elementwise(lambda v: op(Ops.EXP2, v), x.size, f32), out, x)
    with np.errstate(all='ignore'): want = np.exp2(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(out, want, rtol=3e-7, atol=1.2e-38 if way == 'CL' else 2e-45)


@on_all
def test_variables(way):
    "One kernel for all sizes up to 100, the size also part of the arithmetic; 0 is a size too"
    n = UOp.variable('count; drop', 0, 100)
    i, r = loop(n, 0), red(n, 1)
    value = mul(reduce(Ops.ADD, param(1, 100).index(r), r), n.cast(f32))
    ast = sink(param(0, 100).index(i).store(value).end(i))
    a = rnd(100)
    for size in (0, 1, 37, 100):
        out = np.zeros(100, np.float32)
        run(way, ast, out, a, values=[size])
        want = np.where(np.arange(100) < size, a[:size].sum(dtype=np.float64) * size, 0)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
    assert 'drop' not in kernel(ast, WIDE, 'C').source


def test_wide_indexes_are_64_bits():
    i = loop(1 << 20, 0)
    ast = sink(param(0, 1 << 33).index(mul(i, c(1 << 12))).store(c(1.0, f32)).end(i))
    assert 'long i0' in kernel(ast, PLAIN, 'C').source
    assert 'int i0' in kernel(elementwise(lambda x: x, 64, f32), PLAIN, 'C').source


@on_all
def test_long_kernels(way):
    value = elementwise(lambda x: x, 16, f32)
    i = loop(16, 0)
    x = value = param(1, 16).index(i)
    for _ in range(300): value = add(mul(value, c(0.5, f32)), x)
    a, out = rnd(16), np.zeros(16, np.float32)
    run(way, sink(param(0, 16).index(i).store(value).end(i)), out, a)
    np.testing.assert_allclose(out, a * 2, rtol=1e-5)


# ---- text ------------------------------------------------------------------------------------------------
def test_source_is_deterministic_and_named_by_its_digest():
    a, b = (kernel(matmul(16, 32, 8), WIDE, 'C') for _ in range(2))
    assert a == b
    assert kernel(matmul(16, 32, 9), WIDE, 'C').name != a.name
    assert a.name in a.source and a.name.isidentifier()


@pytest.mark.parametrize('dialect', ['C', 'OPENCL'])
def test_lines_are_short(dialect):
    for ast in (matmul(64, 64, 64), softmax(64, 64), softmax(3, 10)):
        assert max(map(len, kernel(ast, WORKERS, dialect).source.splitlines())) <= 120


def test_every_decision_has_a_reason():
    reasons = kernel(matmul(512, 512, 512), WORKERS, 'C').reasons
    assert len(reasons) >= 3 and all(r.what and r.why for r in reasons)


# ---- the compiler and its files --------------------------------------------------------------------------
@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(cpu, 'loaded', {})
    monkeypatch.setattr(cpu, 'objects', store.Store('objects', 1 << 28))
    calls = []
    real = cpu.compile_source
    monkeypatch.setattr(cpu, 'compile_source', lambda s: calls.append(s) or real(s))
    return tmp_path, calls


def pair(v):
    k = kernel(elementwise(lambda x: add(x, c(v, f32)), 8, f32), WIDE, 'C')
    return k.name, k.source


@needs_c
def test_many_kernels_are_one_call_and_are_found_again(fresh, monkeypatch):
    folder, calls = fresh
    cpu.compile_many([pair(1.0), pair(2.0), pair(1.0)])
    assert len(calls) == 1
    monkeypatch.setattr(cpu, 'loaded', {})     # as a new process would
    cpu.compile_many([pair(2.0)])
    assert len(calls) == 1
    cpu.compile_many([pair(2.0), pair(3.0)])
    assert len(calls) == 2
    objects = folder / 'tinysched' / 'objects'
    assert objects.stat().st_mode & 0o777 == 0o700 and len(list(objects.iterdir())) == 3


@needs_c
@pytest.mark.parametrize('damage', [lambda b: b[:100], lambda b: b'', lambda b: b[:500] + b'x' + b[501:], lambda b: b + b'x'])
def test_C3_damaged_objects_are_compiled_again(fresh, monkeypatch, damage):
    folder, calls = fresh
    cpu.compile_many([pair(1.0)])
    path, = (folder / 'tinysched' / 'objects').iterdir()
    damaged = damage(path.read_bytes())
    path.unlink()   # it is loaded, and must not change
    path.write_bytes(damaged)
    monkeypatch.setattr(cpu, 'loaded', {})
    cpu.compile_many([pair(1.0)])
    assert len(calls) == 2 and unsealed(path.read_bytes())


@needs_c
def test_C3_off_touches_nothing(fresh):
    with Context(CCACHE=0): cpu.compile_many([pair(1.0)])
    assert not list(fresh[0].iterdir())


@needs_c
def test_C3_a_folder_others_can_write_to_is_not_used(fresh, capsys):
    folder, calls = fresh
    (folder / 'tinysched' / 'objects').mkdir(parents=True)
    os.chmod(folder / 'tinysched' / 'objects', 0o777)
    cpu.compile_many([pair(1.0)])
    assert not list((folder / 'tinysched' / 'objects').iterdir()) and 'chmod' in capsys.readouterr().err


@needs_c
def test_C3_a_full_disk_is_a_warning(fresh, monkeypatch, capsys):
    def full(*a): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(store, 'write', full)
    cpu.compile_many([pair(1.0)])
    assert 'No space left' in capsys.readouterr().err


@needs_c
def test_a_refused_source_is_kept_for_the_reader(fresh):
    with pytest.raises(RuntimeError, match='refused') as e: cpu.compile_many([('k', 'void k( {')])
    path = str(e.value).split()[-1]
    with open(path) as f: assert 'void k( {' in f.read()
    os.unlink(path)


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(cpu.shutil, 'which', lambda name: None)
    works, why = cpu.available()
    assert not works and 'install' in why and why.count('\n') == 0


@needs_c
def test_two_threads_share_a_loop():
    a, out = rnd(1100, 1003), np.zeros((1100, 1003), np.float32)
    i, j = loop(1100, 0), loop(1003, 1)
    ast = sink(param(0, a.size).index(flat(i, 1003, j)).store(mul(param(1, a.size).index(flat(i, 1003, j)), c(2.0, f32))).end(i, j))
    assert kernel(ast, WORKERS, 'C').threads == 1100
    run('threads', ast, out, a)
    np.testing.assert_array_equal(out, a * 2)
    assert cpu.shares(10, 3) == [(0, 3), (3, 6), (6, 10)] and cpu.shares(1, 4) == [(0, 1)]
