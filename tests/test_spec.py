"""What each stage's graphs may look like, and the errors for those that do not."""
import pytest

from tinysched.ir.dtype import dtypes
from tinysched.ir.spec import (SpecError, call_spec, kernel_graph_spec, kernel_spec, schedule_spec, tensor_spec,
                               unverified, verify)
from tinysched.ir.uop import AxisType, KernelInfo, ParamArg, UOp
from tinysched.ir.vocabulary import Ops

F32, I32, VOID = dtypes.float32, dtypes.int32, dtypes.void
X = UOp.buffer('CPU', (4,), F32)
P = UOp.param(0, F32, (4,), 'CPU')
ONE = UOp.const(F32, 1.0)


def add(a, b, dtype=F32): return UOp(Ops.ADD, dtype, (a, b))
def alu(op, *src, dtype=F32): return UOp(op, dtype, src)
def move(op, x, arg): return UOp(op, x.dtype, (x,), arg)
def raw(op, dtype, *src, arg=None): return UOp(op, dtype, src, arg)


R, K, Q = UOp.range(4, 0), UOp.param(0, F32, (4,)), UOp.param(1, F32, (4,))
STORE = K.index(R).store(add(Q.index(R), ONE))
KERNEL = STORE.end(R).sink(arg=KernelInfo('k'))


def refused(u, spec, *words):
    with pytest.raises(SpecError) as e: verify(u, spec)
    for w in (spec.name, *words): assert w in str(e.value), str(e.value)
    assert unverified(u, spec.bit)          # nothing bad is remembered as good
    return str(e.value)


GOOD = [X, ONE, add(X, ONE), add(X, X), alu(Ops.SQRT, X), move(Ops.RESHAPE, X, (2, 2)), move(Ops.SHRINK, X, ((1, 3),)),
        move(Ops.PAD, X, ((0, 2),)), move(Ops.FLIP, X, (0,)), X.bitcast(I32), X.cast(dtypes.float16),
        move(Ops.EXPAND, move(Ops.RESHAPE, X, (4, 1)), (4, 3)), raw(Ops.REDUCE, F32, X, arg=(Ops.ADD, (0,))),
        raw(Ops.STAGE, F32, X), raw(Ops.COPY, F32, X, arg='CL'), X.after(X.store(add(X, ONE))), X.after(X.store(ONE)),
        X.after(move(Ops.SHRINK, X, ((0, 1),)).store(ONE)), alu(Ops.CMPLT, X, ONE, dtype=dtypes.bool).sink(X),
        UOp.variable('n', 1, 5), UOp.variable('n', 1, 5).bind(3), X.after(KERNEL.call(X, X))]


@pytest.mark.parametrize('u', GOOD, ids=lambda u: u.op.name)
def test_tensor_spec_allows(u): assert verify(u, tensor_spec) is u


BAD = [(add(X, UOp.const(I32, 1)), 'ADD'), (add(X, move(Ops.RESHAPE, X, (2, 2))), 'ADD'), (alu(Ops.ADD, X), 'ADD'),
       (alu(Ops.SQRT, UOp.const(I32, 4), dtype=I32), 'SQRT'), (alu(Ops.XOR, X, X), 'XOR'),
       (alu(Ops.CMPLT, X, X), 'CMPLT'), (alu(Ops.WHERE, X, X, X), 'WHERE'), (move(Ops.RESHAPE, X, (5,)), 'RESHAPE'),
       (move(Ops.PERMUTE, X, (1,)), 'PERMUTE'), (move(Ops.EXPAND, X, (8,)), 'EXPAND'),
       (move(Ops.SHRINK, X, ((2, 5),)), 'SHRINK'), (move(Ops.PAD, X, ((-1, 0),)), 'PAD'),
       (raw(Ops.REDUCE, F32, X, arg=(Ops.ADD, (1,))), 'REDUCE'), (raw(Ops.REDUCE, F32, X, arg=(Ops.SUB, (0,))), 'REDUCE'),
       (X.store(UOp.const(I32, 1)), 'STORE'), (add(X, ONE).store(X), 'STORE'), (X.after(X), 'AFTER'),
       (add(X, ONE).after(X.store(ONE)), 'AFTER'), (raw(Ops.CONST, F32, arg=1), 'CONST'),
       (raw(Ops.CONST, dtypes.uint8, arg=300), 'CONST'), (raw(Ops.BUFFER, F32, arg=3), 'BUFFER'),
       (raw(Ops.COPY, F32, X), 'COPY'), (UOp.range(4, 0), 'RANGE'), (K.index(R), 'RANGE')]


@pytest.mark.parametrize('u, word', BAD, ids=lambda v: v if isinstance(v, str) else '')
def test_tensor_spec_refuses(u, word): refused(u.sink(), tensor_spec, word)


def test_C4_a_violation_names_node_sources_and_rule():
    text = refused(add(X, UOp.const(I32, 1)), tensor_spec)
    assert 'ADD float32' in text
    assert 'source 0: BUFFER float32' in text and 'source 1: CONST int32 1' in text
    assert 'operands have one dtype' in text and 'spec.py:' in text


def test_C4_the_deepest_violation_is_named():
    bad = add(X, UOp.const(I32, 1))
    text = refused(alu(Ops.SQRT, bad).sink(), tensor_spec)
    assert text.splitlines()[0].count('ADD') == 1


def test_call_spec_has_no_buffers():
    body = P.after(P.store(add(P, ONE))).sink()
    verify(body, call_spec)
    verify(body, tensor_spec)
    assert 'B2' in refused(X.after(X.store(ONE)).sink(), call_spec, 'BUFFER')
    refused(UOp.variable('n', 1, 5).bind(3), call_spec, 'BIND')


def test_kernel_spec():
    verify(KERNEL, kernel_spec)
    gated = raw(Ops.INDEX, F32, Q, R, alu(Ops.CMPLT, R, UOp.const(dtypes.index, 2), dtype=dtypes.bool))
    verify(K.index(R).store(gated).end(R).sink(arg=KernelInfo('k')), kernel_spec)
    red = raw(Ops.REDUCE, F32, Q.index(R), R, arg=(Ops.ADD, ()))
    verify(K.index(UOp.const(dtypes.index, 0)).store(red).sink(arg=KernelInfo('k')), kernel_spec)


@pytest.mark.parametrize('u, word', [
    (STORE.sink(arg=KernelInfo('k')), 'SINK'),                                  # an open loop
    (STORE.end(R).sink(), 'SINK'),                                              # no KernelInfo
    (K.store(ONE).sink(arg=KernelInfo('k')), 'STORE'),                          # no index
    (K.index(R).store(Q).end(R).sink(arg=KernelInfo('k')), 'STORE'),            # a whole buffer as a value
    (K.index(ONE).store(ONE).sink(arg=KernelInfo('k')), 'INDEX'),               # a float as an index
    (K.index(R).store(UOp.const(I32, 1)).end(R).sink(arg=KernelInfo('k')), 'STORE'),
    (move(Ops.RESHAPE, K, (2, 2)).index(R).store(ONE).end(R).sink(arg=KernelInfo('k')), 'RESHAPE'),
    (UOp.param(0, F32, (2, 2)).index(R).store(ONE).end(R).sink(arg=KernelInfo('k')), 'PARAM'),
    (STORE.end(ONE).sink(arg=KernelInfo('k')), 'END')])
def test_kernel_spec_refuses(u, word): refused(u, kernel_spec, word)


def test_E10_kernel_graph():
    x1 = X.after(KERNEL.call(X, P))
    x2 = x1.after(KERNEL.call(x1, move(Ops.RESHAPE, x1, (2, 2)), UOp.variable('n', 1, 3)), x1)
    verify(x2.sink(), kernel_graph_spec)
    refused(X.after(X.store(ONE)).sink(), kernel_graph_spec, 'STORE')
    refused(add(X, ONE).sink(), kernel_graph_spec, 'ADD')
    refused(X.after(KERNEL.call(X, ONE)).sink(), kernel_graph_spec, 'CALL')


def test_E10_the_body_of_each_call_is_checked():
    bad = STORE.sink(arg=KernelInfo('k'))
    with pytest.raises(SpecError, match='kernel_spec'): verify(X.after(bad.call(X, P)).sink(), kernel_graph_spec)


def test_F7_a_schedule_has_bare_buffers():
    x1 = X.after(KERNEL.call(X, P))
    verify(raw(Ops.LINEAR, VOID, KERNEL.call(X, P), KERNEL.call(P, move(Ops.RESHAPE, X, (2, 2)))), schedule_spec)
    refused(raw(Ops.LINEAR, VOID, KERNEL.call(x1, P)), schedule_spec, 'AFTER')
    refused(raw(Ops.LINEAR, VOID, X), schedule_spec, 'LINEAR')


def test_verified_once():
    u = add(X, UOp.const(F32, 8191.25))
    assert len(unverified(u, tensor_spec.bit)) >= 2
    verify(u, tensor_spec)
    assert unverified(u, tensor_spec.bit) == []
    assert unverified(u, call_spec.bit)
    assert unverified(alu(Ops.SQRT, u), tensor_spec.bit) == [alu(Ops.SQRT, u)]


def test_deep_graphs_need_no_recursion():
    u = X
    for _ in range(20_000): u = add(u, ONE)
    verify(u.sink(), tensor_spec)


def test_params_of_a_kernel_are_scalars_or_flat():
    n = UOp(Ops.PARAM, dtypes.index, (), ParamArg(2, (), None, 'v2', 1, 4))
    r = UOp(Ops.RANGE, dtypes.index, (n,), UOp.range(2, 0).arg)
    verify(K.index(r).store(ONE).end(r).sink(arg=KernelInfo('k')), kernel_spec)


# ---- the program: instructions in order

def program_of(change=lambda code: code):
    from tinysched.codegen.lower import lower, program_spec
    i, r = UOp.range(4, 0), UOp.range(8, 1, AxisType.REDUCE)
    x = UOp.param(1, dtypes.float32, (32,)).index(i * 8 + r)
    total = UOp(Ops.REDUCE, dtypes.float32, (x, r), (Ops.ADD, ()))
    ast = UOp.sink(UOp.param(0, dtypes.float32, (4,)).index(i).store(total).end(i), arg=KernelInfo())
    return UOp.sink(*change(lower(ast))), program_spec


def test_C4_a_program_is_verified():
    verify(*program_of())


@pytest.mark.parametrize('change', [
    lambda code: code[::-1], lambda code: code[:-1], lambda code: code[1:],
    lambda code: [u for u in code if u.op is not Ops.ACC],
    lambda code: [u.replace(arg=Ops.IDIV) if u.op is Ops.ASSIGN else u for u in code],
    lambda code: [u.replace(arg=None) if u.op is Ops.ACC else u for u in code],
    lambda code: [*code, UOp.const(dtypes.int32, 1)]], ids=['reversed', 'open', 'closed twice', 'no accumulator',
                                                         'no reduction', 'no number', 'no instruction'])
def test_C4_a_wrong_program_is_refused(change):
    with pytest.raises(SpecError, match='program_spec does not allow'): verify(*program_of(change))
