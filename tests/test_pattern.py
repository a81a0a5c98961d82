"""Patterns and rewriting: the compiled condition against a plain reading of the pattern, and every way not to end."""
import itertools

import pytest
from hypothesis import given, strategies as st

from tinysched.ir.dtype import dtypes
from tinysched.ir.pattern import PatternMatcher, Step, UPat, fits, graph_rewrite, recording
from tinysched.ir.uop import UOp
from tinysched.ir.vocabulary import GroupOp, Ops

I32 = dtypes.int32
OPS = [Ops.ADD, Ops.MUL, Ops.SUB, Ops.NEG]

def num(n): return UOp.const(I32, n)
def var(name): return UOp.variable(name, 0, 9, I32)
def alu(op, *src): return UOp(op, I32, src)

leaves = st.one_of(st.integers(0, 2).map(num), st.sampled_from('xyz').map(var))
graphs = st.recursive(leaves, lambda inner: st.tuples(st.sampled_from(OPS), inner, inner).map(
    lambda t: alu(t[0], *t[1:1 + (t[0] is not Ops.NEG) + 1])), max_leaves=12)

def compound(inner):
    sources = st.one_of(st.lists(inner, min_size=1, max_size=3), st.lists(inner, min_size=1, max_size=3).map(tuple))
    ops = st.one_of(st.none(), st.sampled_from(OPS), st.just(GroupOp.Binary), st.just((Ops.ADD, Ops.NEG)))
    return st.one_of(
        st.builds(lambda op, src, name, any_len: UPat(op, None, src, name=name, allow_any_len=any_len),
                  ops, sources, st.sampled_from([None, 'a', 'b']), st.booleans()),
        st.lists(inner, min_size=1, max_size=2).map(lambda c: UPat.any(*c)))

names = st.sampled_from([None, 'a', 'b'])
simple = st.one_of(names.map(UPat.var), names.map(UPat.cvar), st.integers(0, 2).map(lambda n: UPat.const(None, n)),
                   st.builds(lambda op, name: UPat(op, name=name), st.sampled_from(OPS), names))
patterns = st.recursive(simple, compound, max_leaves=5)

def plainly(p, u, bound):
    "Every way in which a pattern fits, by reading it"
    if p.choices:
        for c in p.choices: yield from plainly(c, u, bound)
        return
    if p.op and u.op not in p.op or p.arg is not None and u.arg != p.arg: return
    if p.name and bound.get(p.name, u) is not u: return
    bound = bound | ({p.name: u} if p.name else {})
    if p.src is None:
        yield bound
        return
    if len(u.src) != len(p.src) and not (p.allow_any_len and len(u.src) > len(p.src)): return
    for order in itertools.permutations(p.src) if isinstance(p.src, list) else [p.src]:
        ways = [bound]
        for q, s in zip(order, u.src): ways = [w for b in ways for w in plainly(q, s, b)]  # noqa: B905
        yield from ways

@given(patterns, graphs)
def test_compiled_fits_what_the_pattern_says(p, u):
    ways = list(plainly(p, u, {}))
    found = fits(p, u)
    assert (found is not None) == bool(ways)
    if found is not None: assert any(w.items() >= found.items() for w in ways)

@given(patterns, graphs)
def test_matcher_finds_what_fits_finds(p, u):
    matcher = PatternMatcher([(p, lambda ctx: ctx)])
    answer = matcher.rewrite(u, num(77))
    assert (answer is not None) == (fits(p, u) is not None)
    assert matcher.explain(u, num(77))[0] is answer

def value(u, at):
    "What an expression is worth"
    if u.op is Ops.CONST: return u.arg
    if u.op is Ops.PARAM: return at[u.arg.name]
    a, b = (*(value(s, at) for s in u.src), 0)[:2]
    return {Ops.ADD: a + b, Ops.MUL: a * b, Ops.SUB: a - b, Ops.NEG: -a}[u.op]

x, c = UPat.var('x'), UPat.cvar('c')
ALGEBRA = PatternMatcher([
    (x + 0, lambda x: x), (x * 1, lambda x: x), (UPat.var() * UPat.const(None, 0, 'zero'), lambda zero: zero),
    (x - x, lambda x: num(0)), (UPat.var('x').alu(Ops.NEG).alu(Ops.NEG), lambda x: x),
    (x - UPat.var('y'), lambda x, y: alu(Ops.ADD, x, alu(Ops.NEG, y))),
    (-c, lambda c: num(-c.arg)), (c + UPat.cvar('d'), lambda c, d: num(c.arg + d.arg)),
    (c * UPat.cvar('d'), lambda c, d: num(c.arg * d.arg)),
    ((x + c) + UPat.cvar('d'), lambda x, c, d: alu(Ops.ADD, x, alu(Ops.ADD, c, d)))])

@given(graphs, st.booleans(), st.booleans())
def test_rewriting_keeps_values(u, bottom_up, walk):
    log: list[Step] = []
    at = dict(x=3, y=5, z=7)
    out = graph_rewrite(u, ALGEBRA, bottom_up=bottom_up, walk=walk, recorder=log)
    assert value(out, at) == value(u, at)
    assert out is graph_rewrite(u, ALGEBRA, bottom_up=bottom_up, walk=walk)
    for s in log: assert value(s.before, at) == value(s.after, at)
    if not walk: assert not any(ALGEBRA.rewrite(n) for n in out.toposort())

def add_chain(n, leaf):
    u = var('x')
    for i in range(n): u = alu(Ops.ADD, u, leaf(i))
    return u

@pytest.mark.parametrize('bottom_up', [False, True])
@pytest.mark.parametrize('walk', [False, True])
def test_deep_chain_without_recursion(bottom_up, walk):
    u = add_chain(100_000, lambda i: num(0))
    out = graph_rewrite(u, ALGEBRA, bottom_up=bottom_up, walk=walk)
    if not walk: assert out is var('x')

def test_pushing_through_a_deep_chain_is_no_endless_rewrite():
    u = alu(Ops.NEG, add_chain(20_000, num))
    push = PatternMatcher([(-(UPat.var('a') + UPat.var('b')), lambda a, b: alu(Ops.ADD, alu(Ops.NEG, a), alu(Ops.NEG, b)))])
    for bottom_up in (False, True):
        out = graph_rewrite(u, push, bottom_up=bottom_up)
        assert sum(n.op is Ops.NEG for n in out.toposort()) == 20_001

def swap(a, b): return alu(Ops.ADD, b, a)
def wrap(a): return alu(Ops.NEG, a)
def grow(a): return num(a.arg + 1)

@pytest.mark.parametrize('bottom_up', [False, True])
@pytest.mark.parametrize('pattern, fn', [(UPat(Ops.ADD, src=(UPat.var('a'), UPat.var('b'))), swap),
                                         (UPat(Ops.PARAM, name='a'), wrap), (UPat.cvar('a'), grow)])
def test_rules_that_never_end_are_named(pattern, fn, bottom_up):
    u = alu(Ops.MUL, alu(Ops.ADD, var('x'), num(1)), var('y'))
    with pytest.raises(RuntimeError, match=rf'never ends.*test_pattern.py:{fn.__code__.co_firstlineno}'):
        graph_rewrite(u, PatternMatcher([(pattern, fn)]), bottom_up=bottom_up)

def test_walk_does_not_enter_what_it_made():
    u = alu(Ops.ADD, var('x'), num(1))
    assert graph_rewrite(u, PatternMatcher([(UPat.cvar('a'), grow)]), walk=True) is alu(Ops.ADD, var('x'), num(2))
    assert graph_rewrite(var('x'), PatternMatcher([(UPat(Ops.PARAM, name='a'), wrap)]), walk=True) is wrap(var('x'))

@pytest.mark.parametrize('walk', [False, True])
def test_bodies_are_scopes(walk):
    p = UOp.param(0, I32)
    inner = alu(Ops.ADD, p, num(0)).sink().call(alu(Ops.ADD, p, num(0)))
    assert graph_rewrite(inner, ALGEBRA, walk=walk).src == (inner.src[0], p)
    assert graph_rewrite(inner, ALGEBRA, walk=walk, enter_calls=True).src == (p.sink(), p)

def test_a_body_that_is_also_reached_from_outside():
    body = alu(Ops.ADD, var('x'), num(0)).sink()
    both = body.call(var('y')).sink(body)
    out = graph_rewrite(both, ALGEBRA)
    assert out.src[0].src[0] is body and out.src[1] is var('x').sink()

def test_zero_minus_zero_and_nan_are_three_constants():
    f = [UOp.const(dtypes.float32, v) for v in (0.0, -0.0, float('nan'))]
    for i, v in enumerate((0, -0.0, float('nan'))):
        assert [fits(UPat.const(None, v), u) is not None for u in f] == [i == j for j in range(3)]

def test_names_never_reach_the_code():
    bad = 'x); raise SystemExit(1) #'
    assert fits(UPat.var(bad) + 0, alu(Ops.ADD, var('y'), num(0))) == {bad: var('y')}

def test_missing_names_and_defaults():
    with pytest.raises(TypeError, match='wants y'): PatternMatcher([(x + 0, lambda y: y)])
    extra = PatternMatcher([(x + 0, lambda x, ctx=None, other=1: x if other == 1 else None)])
    assert extra.rewrite(alu(Ops.ADD, var('y'), num(0))) is var('y')

def test_sums_are_kept_and_ordered():
    a, b = PatternMatcher([(c, lambda c: num(1))]), PatternMatcher([(c, lambda c: num(2))])
    assert a + b is a + b
    assert ((a + b).rewrite(num(9)), (b + a).rewrite(num(9))) == (num(1), num(2))

def test_recording_hears_inner_calls():
    with recording() as outer:
        graph_rewrite(alu(Ops.ADD, var('x'), num(0)), ALGEBRA)
        with recording() as inner: graph_rewrite(alu(Ops.MUL, var('x'), num(1)), ALGEBRA)
    assert (len(outer), len(inner)) == (1, 1)
    assert outer[0].rule.startswith('test_pattern.py:')


def test_patterns_are_written_as_graphs_are():
    x, memory = var('x'), UOp.param(0, I32, (4,))
    a, at = UPat.var('a'), memory.index(num(1))
    assert fits(a.eq(UPat.cvar('c')), x.eq(num(3))) == {'a': x, 'c': num(3)}
    assert fits(a.maximum(UPat.var('b')), x.maximum(num(3))) == {'a': x, 'b': num(3)}
    assert fits(a.store(UPat.cvar().named('c')), at.store(num(3))) == {'a': at, 'c': num(3)}
    assert fits(a.store(UPat.cvar('c')), at.store(x)) is None
    assert fits(a.index(UPat.cvar('c')), at) == {'a': memory, 'c': num(1)} and fits(a.index(UPat.cvar('c')), memory.index(x)) is None
    later = memory.after(at.store(num(3)))
    assert fits(a.after(UPat.var('w')), later) == {'a': memory, 'w': later.src[1]} and fits(a.after(UPat.var('w')), at) is None
