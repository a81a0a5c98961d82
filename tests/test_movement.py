"""Movement ops against NumPy: every element of random chains, and which views are one range."""
import itertools
import os

import numpy as np
from hypothesis import given, settings, strategies as st

from tinysched.ir.dtype import dtypes
from tinysched.ir.movement import contiguous_view, flat_index, view_index
from tinysched.ir.symbolic import evaluate, render_index
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import Ops

EXAMPLES = int(os.environ.get('SYMBOLIC_EXAMPLES', 150))
KINDS = [Ops.RESHAPE, Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND, Ops.PAD, Ops.SHRINK, Ops.FLIP]

def factorisation(draw, n):
    "A shape of n elements"
    out = []
    while n > 1:
        out.append(draw(st.sampled_from([k for k in range(2, n + 1) if n % k == 0])))
        n //= out[-1]
    for _ in range(draw(st.integers(0, 2))): out.insert(draw(st.integers(0, len(out))), 1)
    return tuple(out)

def one_op(draw, a):
    "A movement op, its argument and NumPy's result"
    op = draw(st.sampled_from(KINDS))
    if op is Ops.RESHAPE: return op, (arg := factorisation(draw, a.size)), a.reshape(arg)
    if op is Ops.PERMUTE: return op, (arg := tuple(draw(st.permutations(range(a.ndim))))), a.transpose(arg)
    if op is Ops.EXPAND:
        arg = tuple(draw(st.integers(1, 3)) if n == 1 else n for n in a.shape)
        return op, arg, np.broadcast_to(a, arg)
    if op is Ops.PAD:
        arg = tuple((draw(st.integers(0, 1)), draw(st.integers(0, 2))) for _ in a.shape)
        return op, arg, np.pad(a, arg) if a.ndim else a
    if op is Ops.SHRINK:
        arg = tuple((s := draw(st.integers(0, n - 1)), draw(st.integers(s + 1, n))) for n in a.shape)
        return op, arg, a[tuple(slice(*p) for p in arg)]
    return op, (arg := tuple(i for i in range(a.ndim) if draw(st.booleans()))), np.flip(a, arg)

@st.composite
def chains(draw):
    "A graph of movement ops over a buffer, and the array it stands for"
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    u, a = UOp.buffer('CPU', shape, dtypes.float32), np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    for _ in range(draw(st.integers(1, 5))):
        op, arg, a = one_op(draw, a)
        u = UOp(op, u.dtype, (u,), arg)
        if a.size > 500: break
    return u, a

@settings(max_examples=EXAMPLES, deadline=None)
@given(chains())
def test_E3_movement_ops_are_index_arithmetic(case):
    u, a = case
    assert u.shape == a.shape
    loops = tuple(UOp.range(n, i) for i, n in enumerate(a.shape))
    base, at, valid = view_index(u, loops)
    assert base is u.base
    flat = flat_index(base.shape, at)
    for idx in itertools.islice(itertools.product(*map(range, a.shape)), 200):
        values = dict(zip(loops, idx, strict=True))
        inside = valid is None or evaluate(valid, values)
        got = evaluate(flat, values) + 1 if inside else 0
        assert got == a[idx], f'{render_index(flat)} at {idx}'

@settings(max_examples=EXAMPLES, deadline=None)
@given(chains())
def test_A9_one_range_is_a_view_and_nothing_else_is(case):
    u, a = case
    view, flat = contiguous_view(u), a.reshape(-1)
    one_range = flat[0] > 0 and (flat == np.arange(flat[0], flat[0] + flat.size)).all()
    padded = any(n.op is Ops.PAD for n in u.toposort())  # padding that is cut off again may go unnoticed
    assert one_range if view is not None else padded or not one_range
    if view is None: return
    assert (view.offset, view.size, view.shape) == (flat[0] - 1, flat.size, a.shape)
    assert view.uop().shape == a.shape and contiguous_view(view.uop()) == view
