"""Index arithmetic: whatever simplify does, every value stays what it was."""
import itertools
import os

from hypothesis import given, settings, strategies as st

from tinysched.ir.dtype import dtypes
from tinysched.ir.symbolic import evaluate, num, render_index, simplify
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
