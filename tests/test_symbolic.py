"""Index arithmetic: whatever simplify does, every value stays what it was."""
import functools
import itertools
import math
import operator
import os

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tinysched.ir.dtype import dtypes
from tinysched.ir.pattern import graph_rewrite
from tinysched.ir.symbolic import evaluate, num, render_index, simplify, symbolic
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import Ops

EXAMPLES = int(os.environ.get('SYMBOLIC_EXAMPLES', 150))
INDEX, BOOL = dtypes.index, dtypes.bool

def loops(draw):
    "A variable, and loops to constants and to the variable"
    v = UOp.variable('n', draw(st.integers(0, 2)), draw(st.integers(2, 4)))
    return v, [UOp.range(draw(st.integers(1, 6)), i) for i in range(3)] + [UOp.range(v, 3)]

def points(v, ranges, u):
    "All values that variable and loops can take together, as far as `u` reads them"
    below = u.toposort()
    for n in range(v.vmin, v.vmax + 1):
        sizes = [evaluate(r.src[0], {v: n}) if r in below else 1 for r in ranges]
        for at in itertools.product(*map(range, sizes)): yield {v: n, **dict(zip(ranges, at, strict=True))}

@st.composite
def expressions(draw):
    "An expression with its variable and loops"
    v, ranges = loops(draw)
    sizes = st.sampled_from([2, 3, 4, 6, 8, 12, 1, 5, 0, -1, -2, -4, 24])
    pool = [v, *ranges]
    conds = [UOp(Ops.CMPLT, BOOL, (ranges[0], num(draw(sizes))))]
    for _ in range(draw(st.integers(1, 14))):
        pick = st.sampled_from(pool[-6:] + pool[:4])
        op = draw(st.sampled_from([Ops.ADD, Ops.ADD, Ops.MUL, Ops.IDIV, Ops.MOD, Ops.SUB, Ops.MAX, Ops.NEG, Ops.WHERE,
                                   Ops.CMPLT, Ops.CMPNE, Ops.AND, Ops.OR, Ops.XOR]))
        a, b = draw(pick), draw(pick) if draw(st.integers(0, 3)) == 0 else num(draw(sizes))
        c, d = draw(st.sampled_from(conds)), draw(st.sampled_from(conds))
        if op is Ops.NEG: pool.append(UOp(op, INDEX, (a,)))
        elif op is Ops.WHERE: pool.append(UOp(op, INDEX, (c, a, b)))
        elif op in (Ops.CMPLT, Ops.CMPNE): conds.append(UOp(op, BOOL, (a, b)))
        elif op in (Ops.AND, Ops.OR, Ops.XOR): conds.append(UOp(op, BOOL, (c, UOp(Ops.CMPNE, BOOL, (d, UOp.const(BOOL, True))))))
        else: pool.append(UOp(op, INDEX, (a, b)))
    return v, ranges, draw(st.sampled_from([pool[-1], conds[-1]]))

def check(v, ranges, u):
    s = simplify(u)
    assert simplify(s) is s
    for at in points(v, ranges, u):
        got, want = evaluate(s, at), evaluate(u, at)
        assert got == want, f'{render_index(u)} became {render_index(s)}: {got} for {want} at {at}'
        assert s.vmin <= got <= s.vmax
    fresh = rebuilt(s)
    assert fresh is s, f'{render_index(u)}: {render_index(s)} simplifies further to {render_index(fresh)}'

def rebuilt(s):
    "What simplify makes of the same graph when it has forgotten everything"
    for n in s.toposort():
        if hasattr(n, '_simplified') and n.src and n.op is not Ops.RANGE: del n._simplified
    return simplify(s)

@settings(max_examples=EXAMPLES, deadline=None)
@given(expressions())
def test_simplify_keeps_every_value(case):
    check(*case)

@st.composite
def reshapes(draw):
    "A flat index over loops, divided and cut as reshapes do"
    v, ranges = loops(draw)
    u = num(draw(st.integers(-3, 3)))
    for r in ranges:
        k = num(draw(st.sampled_from([1, 2, 3, 4, 6, 12, 24, -1, -4])))
        u = UOp(Ops.ADD, INDEX, (u, UOp(Ops.MUL, INDEX, (r, k))))
    for _ in range(draw(st.integers(1, 4))):
        n = num(draw(st.sampled_from([2, 3, 4, 6, 8, 12])))
        q, r = UOp(Ops.IDIV, INDEX, (u, n)), UOp(Ops.MOD, INDEX, (u, n))
        u = draw(st.sampled_from([q, r, UOp(Ops.ADD, INDEX, (UOp(Ops.MUL, INDEX, (q, n)), r)),
                                  UOp(Ops.ADD, INDEX, (UOp(Ops.MUL, INDEX, (r, num(3))), q))]))
    if draw(st.booleans()): u = UOp(Ops.CMPLT, BOOL, (u, num(draw(st.integers(-5, 20)))))
    return v, ranges, u

@settings(max_examples=EXAMPLES, deadline=None)
@given(reshapes())
def test_reshapes_keep_every_value(case):
    check(*case)

@st.composite
def quotients(draw):
    "A sum of products of variables and loops, divided by such a product, compared, multiplied or shifted"
    v, ranges = loops(draw)
    atoms, ks = st.lists(st.sampled_from([v, *ranges]), min_size=1, max_size=2), st.sampled_from([1, 2, 3, 6, -1, -2])
    def product(): return functools.reduce(operator.mul, draw(atoms), num(draw(ks)))
    a, b, by = sum((product() for _ in range(draw(st.integers(1, 3)))), num(draw(st.integers(-3, 3)))), product(), num(draw(st.integers(0, 3)))
    q, r = UOp(Ops.IDIV, INDEX, (a, b)), UOp(Ops.MOD, INDEX, (a, b))
    return v, ranges, draw(st.sampled_from([q, r, UOp(Ops.MUL, INDEX, (q, b)) + r, UOp(Ops.CMPLT, BOOL, (a, b)), UOp(Ops.MUL, INDEX, (a, b)),
                                            UOp(Ops.SHL, INDEX, (a, by)), UOp(Ops.SHR, INDEX, (a, by))]))

@settings(max_examples=EXAMPLES, deadline=None)
@given(quotients())
def test_quotients_by_products_keep_every_value(case):
    check(*case)

def test_a_divisor_that_may_be_0_stays():
    n, z, r = UOp.variable('n', 2, 4), UOp.variable('z', 0, 3), UOp.range(2, 0)
    def texts(d): return [render_index(simplify(UOp(op, INDEX, (UOp(Ops.MUL, INDEX, (r, d)), d)))) for op in (Ops.IDIV, Ops.MOD)]
    assert texts(n) == ['r0', '0'] and texts(z) == ['r0*z//z', 'r0*z%z']

def test_a_rest_with_one_quotient_is_a_number_in_the_sum():
    n, r = UOp.variable('n', 2, 4), UOp.range(3, 0)
    u = UOp(Ops.IDIV, INDEX, (UOp(Ops.MUL, INDEX, (r, n)) - 1, n))
    assert simplify(u) is simplify(r - 1)
    check(n, [r], u)

def test_a_product_with_a_loop_is_least_or_most_at_the_end_of_the_loop():
    n = UOp.variable('n', 1, 5)
    r = UOp.range(n, 0)
    def answer(below, limit): return simplify(UOp(Ops.CMPLT, BOOL, (below, limit))).arg
    assert answer(r * n, n * n) is True and answer(n * n, r * n) is False
    assert answer(r * n, n * n - n) is None   # equal at the end
    m = UOp.variable('m', 1, 5)
    flat = r * m + UOp.range(m, 1)
    assert answer(flat, n * m) is True and simplify(UOp(Ops.MOD, INDEX, (flat, n * m))) is simplify(flat)

def test_a_value_that_nobody_gave_is_named():
    n, m = UOp.variable('n', 0, 9), UOp.variable('m', 0, 9)
    with pytest.raises(ValueError, match='no value for m. Add it to the values'): evaluate(n + m, {n: 1})
    assert evaluate(n + m, {n: 1, m: 2}) == 3

def test_leaves_have_their_name_or_number_in_a_text():
    n = UOp.variable('n', 0, 9)
    leaves = num(3), UOp.range(4, 1), n, n.bind(3), UOp.param(2, INDEX, ()), UOp.alloc('CPU', (), INDEX)
    assert [render_index(u) for u in leaves] == ['3', 'r1', 'n', 'n=3', 'p2', 'alloc']

def test_a_conversion_there_and_back_is_none_where_every_value_fits():
    n = UOp.variable('n', 0, 127)
    assert simplify(n.cast(dtypes.int8).cast(INDEX)) is n
    for u in (n + 1, n - 129): assert simplify(u.cast(dtypes.int8).cast(INDEX)).op is Ops.CAST

def test_a_shift_by_a_constant_is_a_product_or_a_quotient():
    n = UOp.variable('n', 0, 9)
    shifts = [UOp(op, INDEX, (n, by)) for op in (Ops.SHL, Ops.SHR) for by in (num(3), num(64), n)]
    assert [render_index(simplify(u)) for u in shifts] == ['n*8', 'n << 64', 'n << n', 'n//8', 'n >> 64', 'n >> n']

@pytest.mark.parametrize('op, numpy', [(Ops.EXP2, np.exp2), (Ops.SQRT, np.sqrt), (Ops.LOG2, np.log2), (Ops.SIN, np.sin)])
def test_constants_become_what_numpy_says(op, numpy):
    for v in (0.0, -0.0, 1.5, -2.0, 2000.0, -2000.0, math.inf, -math.inf, math.nan):
        with np.errstate(all='ignore'): want = numpy(np.float64(v))
        got = graph_rewrite(UOp(op, dtypes.float64, (UOp.const(dtypes.float64, v),)), symbolic)
        assert got.op is Ops.CONST
        np.testing.assert_allclose(got.arg, want, rtol=1e-15)

def test_a_number_is_converted_where_all_machines_agree():
    def cast(v, dt): return graph_rewrite(UOp.const(dtypes.float64, v).cast(dt), symbolic)
    assert [(cast(v, dt).op, cast(v, dt).arg) for v, dt in ((-2.7, dtypes.int8), (127.9, dtypes.int8), (255.0, dtypes.uint8))] == [
        (Ops.CONST, -2), (Ops.CONST, 127), (Ops.CONST, 255)]
    for v, dt in ((128.0, dtypes.int8), (-1.0, dtypes.uint8), (math.nan, dtypes.int32), (math.inf, dtypes.int64)): assert cast(v, dt).op is Ops.CAST

I32 = dtypes.int32

def test_an_integer_times_a_choice_is_a_choice():
    x, c = UOp.param(0, I32, ()), UOp.param(1, BOOL, ())
    def k(n): return UOp.const(I32, n)
    def product(*src): return graph_rewrite(UOp(Ops.MUL, I32, src), symbolic)
    def either(a, b): return UOp(Ops.WHERE, I32, (c, a, b))
    assert product(c.cast(I32), x) is product(x, c.cast(I32)) is either(x, k(0))
    assert product(either(k(3), k(0)), x) is either(UOp(Ops.MUL, I32, (x, k(3))), k(0))
    assert product(either(k(0), k(1)), x) is either(k(0), x)
    assert product(either(k(3), k(2)), x).op is Ops.MUL   # two products, or one

def reduction(op, dtype, *ranges):
    return UOp(Ops.REDUCE, dtype, (UOp.param(0, dtype, (4,)).index(ranges[0]), *ranges), (op, ()))

def test_a_loop_that_a_sum_does_not_read_is_a_factor():
    r, idle, n = UOp.range(4, 0), UOp.range(3, 1), UOp.variable('n', 1, 5)
    def less(op, dtype, *ranges): return graph_rewrite(reduction(op, dtype, *ranges), symbolic)
    assert less(Ops.ADD, I32, r, idle) is UOp(Ops.MUL, I32, (reduction(Ops.ADD, I32, r), UOp.const(I32, 3)))
    assert less(Ops.ADD, I32, r, idle, UOp.range(n, 2)).src[0] is reduction(Ops.ADD, I32, r)   # 3*n times
    assert less(Ops.MAX, I32, r, idle) is reduction(Ops.MAX, I32, r)
    assert less(Ops.ADD, dtypes.float32, r, idle) is reduction(Ops.ADD, dtypes.float32, r, idle)   # rounds each time
    assert less(Ops.MUL, I32, r, idle) is reduction(Ops.MUL, I32, r, idle)
