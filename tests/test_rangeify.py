"""Rules E of the scheduler: loops, fusion, kernels."""
import random

import numpy as np
import pytest

from tinysched import Context, Device, Tensor, Variable
from tinysched.helpers import prod
from tinysched.ir.dtype import dtypes
from tinysched.ir.spec import kernel_graph_spec, kernel_spec, verify
from tinysched.ir.uop import AxisType, UOp
from tinysched.ir.vocabulary import GroupOp, Ops
from tinysched.schedule.callify import Limits, place
from tinysched.schedule.kernels import check_states, get_kernel_graph
from tinysched.schedule.pipeline import sched_stats
from tinysched.schedule.prepare import prepare
from tinysched.schedule.rangeify import (MOST_DEPTH, MOST_SIZE, Access, Reason, Root, Site, default_policy, rangeify,
                                         reasons)

F32 = dtypes.float32


def buf(*shape, device='PYTHON'): return UOp.buffer(device, shape, F32)


def planned(*values, limits=Limits(), policy=default_policy):
    return rangeify(prepare(place(values).sink), limits, policy)


def rules(*values, **kw): return [r.reason.rule for r in planned(*values, **kw).roots.values()][::-1]


def graph_of(*values, limits=Limits(), policy=default_policy):
    "Checked kernel graph for computing some values"
    return verify(get_kernel_graph(prepare(place(values).sink), limits, policy), kernel_graph_spec)


def calls(sink):
    outside = sink.toposort(lambda u: u.op is not Ops.SINK or u is sink)
    return [u for u in outside if u.op is Ops.CALL]


def kernels(*values, **kw): return [c.src[0] for c in calls(graph_of(*values, **kw))]


def ops(body, *which): return sum(u.op in which for u in body.toposort())


def array(*shape, seed=0): return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensor(*shape, seed=0, device='PYTHON'): return Tensor(array(*shape, seed=seed), device=device).realize()


def count(t): return len(t.schedule_linear().src)


# ---- E1

def test_E1_uses_that_agree_are_computed_once():
    t = buf(8)
    for _ in range(40): t = t + t.sqrt()              # 2**40 ways from the result to the buffer
    (body,) = kernels(t)
    assert ops(body, Ops.ADD, Ops.SQRT) == 80


def test_E1_ranges_are_inherited():
    (body,) = kernels((buf(4, 6) + 1).exp2() * 2)
    assert [r.arg[0] for r in body.toposort() if r.op is Ops.RANGE] == [0, 1]


def test_E1_uses_that_disagree_are_recomputed():
    e = buf(8).exp2()
    (body,) = kernels(e + e.flip(0))
    assert ops(body, Ops.EXP2) == 2


def test_E1_up_to_a_point():
    e = buf(64).exp2()
    shifted = [e.pad(((k, 0),)).shrink(((0, 64),)) for k in range(5)]
    assert rules(sum(shifted[1:4], shifted[0])) == ['A1']
    assert rules(sum(shifted[1:5], shifted[0])) == ['E1', 'A1']
    (first, _) = planned(sum(shifted[1:5], shifted[0])).roots.values()
    assert planned(sum(shifted[1:5], shifted[0])).roots[e].reason.repeats == 5


def test_E1_a_view_of_memory_is_never_stored():
    x = buf(64).pad(((9, 9),))
    assert rules(sum((x.shrink(((k, k + 64),)) for k in range(1, 19)), x.shrink(((0, 64),)))) == ['A1']


def test_E1_a_value_of_many_kernels_is_stored():
    e = buf(8).exp2()
    outs = [e * float(k) for k in range(2, 22)]
    assert rules(*outs).count('E1') == 1 and len(rules(*outs)) == 21
    assert len(rules(*outs[:10])) == 10


# ---- E2

def test_E2_stages_are_realised():
    x = tensor(4, 6)
    t = lambda: (x + 1).contiguous() * 2
    assert count(t()) == 2 and np.array_equal(t().numpy(), (array(4, 6) + 1) * 2)
    assert rules(UOp(Ops.STAGE, F32, (buf(4) + 1,)) * 2) == ['E2', 'A1']


def test_E2_memory_is_never_realised_again():
    x = buf(4)
    x1 = x.after(x.store(buf(4) * 2))
    y = buf(4)
    sink = UOp.sink(y.after(y.store(x1 + buf(4).reshape(2, 2).reshape(4) + UOp.const(F32, 1.0))))
    assert len(calls(get_kernel_graph(sink))) == 2     # one for x, one for y


def test_E2_an_assignment_with_a_hazard_is_staged():
    x = tensor(8)
    x.assign(x.flip(0) * 2)
    assert count(x) == 2
    y = tensor(8)
    y.assign(y.flip(0) * 2)
    assert np.array_equal(y.numpy(), array(8)[::-1] * 2)


def test_E2_the_source_of_a_copy_is_realised():
    x = tensor(4)
    y = (x + 1).to('PYTHON:1')
    stats = sched_stats(y.schedule_linear())
    assert (stats['kernels'], stats['copies']) == (1, 1)
    assert np.array_equal((x + 1).to('PYTHON:1').numpy(), array(4) + 1)


# ---- E3

def test_E3_no_movement_op_in_a_kernel():
    t = buf(4, 6).permute(1, 0).flip(0).pad(((1, 1), (0, 0))).shrink(((0, 7), (1, 3))).reshape(14, 1).expand(14, 3)
    (body,) = kernels(t * 2)
    assert not ops(body, *GroupOp.Movement)
    verify(body, kernel_spec)


def test_E3_indices_are_simplified():
    plain, moved = buf(4, 6) * 2, buf(4, 6).permute(1, 0).reshape(24).reshape(6, 4).permute(1, 0) * 2
    assert kernels(plain) == kernels(moved)


def test_E3_padding_is_a_gate_at_the_load():
    (body,) = kernels(buf(4).pad(((1, 1),)) * 2)
    (load,) = [u for u in body.toposort() if u.op is Ops.INDEX and len(u.src) == 3]
    assert load.src[2].dtype is dtypes.bool and not ops(body, Ops.WHERE)


def test_E3_padding_masks_after_the_function():
    x = tensor(3)
    t = (x.exp() + 1).pad(((2, 1),)).sum()
    assert np.allclose(t.numpy(), (np.exp(array(3)) + 1).sum())
    nested = (x.exp().pad(((1, 1),)) + 1).pad(((1, 1),)) * 2
    assert np.allclose(nested.numpy(), np.pad(np.pad(np.exp(array(3)), 1) + 1, 1) * 2)


def test_E3_padding_under_a_reduction():
    x = tensor(3, 4)
    t = (x.pad(((0, 0), (1, 1))) + 1).max(1)
    assert np.allclose(t.numpy(), (np.pad(array(3, 4), ((0, 0), (1, 1))) + 1).max(1))


# ---- E4

def test_E4_a_range_for_each_reduced_axis():
    (body,) = kernels(buf(4, 5, 6).sum((0, 2)))
    kinds = [r.arg[1] for r in body.toposort() if r.op is Ops.RANGE]
    assert sorted(k.name for k in kinds) == ['LOOP', 'REDUCE', 'REDUCE']
    (red,) = [u for u in body.toposort() if u.op is Ops.REDUCE]
    assert {r.arg[1] for r in red.src[1:]} == {AxisType.REDUCE} and sorted(r.vmax for r in red.src[1:]) == [3, 5]


def test_E4_softmax_is_one_kernel():
    x = tensor(6, 8)
    assert count(x.softmax(-1)) == 1 and count(x.log_softmax(-1)) == 1
    e = np.exp(array(6, 8) - array(6, 8).max(1, keepdims=True))
    assert np.allclose(x.softmax(-1).numpy(), e / e.sum(1, keepdims=True), atol=1e-6)


def test_E4_layer_norm_is_one_kernel():
    x, g, b = tensor(6, 8), tensor(8, seed=1), tensor(8, seed=2)
    def norm():
        c = x - x.mean(-1, keepdim=True)
        return c * ((c * c).mean(-1, keepdim=True) + 1e-5).rsqrt() * g + b
    assert count(norm()) == 1
    v = array(6, 8)
    c = v - v.mean(1, keepdims=True)
    want = c / np.sqrt((c * c).mean(1, keepdims=True) + 1e-5) * array(8, seed=1) + array(8, seed=2)
    assert np.allclose(norm().numpy(), want, atol=1e-5)


def test_E4_a_reduction_that_would_repeat_is_stored():
    x = buf(16, 32)
    plan = planned(x - x.sum(0, keepdim=True))
    (total,) = [r.reason for u, r in plan.roots.items() if u.base.op is Ops.REDUCE]
    assert total.rule == 'E4' and total.stored_bytes == 32 * 4 and total.repeats == 16
    assert total.extra == (16 * 32 - 32) * 16              # elements too many, sixteen additions each
    assert rules(x - x.sum(1, keepdim=True)) == ['A1']


def test_E4_a_product_of_three_matrices():
    p, q, r = buf(8, 8), buf(8, 8), buf(8, 8)
    assert rules(p @ q @ r) == ['E4', 'A1']
    reason = list(planned(p @ q @ r).roots.values())[-1].reason
    assert (reason.stored_bytes, reason.extra) == (256, 8 * 512 - 512)
    assert len(kernels(p.exp2() @ q)) == 1                # cheap producers are recomputed


def test_E4_a_reduction_of_two_kernels_is_stored():
    s = (buf(8, 8) * buf(8, 8)).sum(1)
    assert rules(s + 1, s * 2) == ['E4', 'A1', 'A1']


def test_E4_what_follows_a_reduction_belongs_to_it():
    x = buf(8, 8)
    norm = ((x * x).sum(0, keepdim=True) + 1).sqrt()       # cut after the root, not before
    plan = planned(x * norm)
    assert [u.op for u, r in plan.roots.items() if r.reason.rule == 'E4'] == [Ops.SQRT]


@pytest.mark.parametrize('axis', [0, 1, (0, 1)])
def test_E4_values_do_not_depend_on_the_policy(axis):
    x, v = tensor(5, 7), array(5, 7)
    want = v / np.exp(v).sum(axis, keepdims=True) + v.max(axis, keepdims=True)
    got = x / x.exp().sum(axis, keepdim=True) + x.max(axis, keepdim=True)
    assert np.allclose(got.numpy(), want, atol=1e-5)


def test_E4_the_policy_is_an_argument():
    nothing = lambda site: None
    all_of = lambda site: Reason('T', 'all') if site.node.op in GroupOp.ALU else None
    x = buf(8, 8)
    t = (x - x.sum(0, keepdim=True)) * 2 + 1
    assert [len(kernels(t, policy=p)) for p in (default_policy, nothing, all_of)] == [2, 1, 3]


# ---- E5

def test_E5_cheap_values_are_not_stored_unless_asked_for():
    x = tensor(64)
    assert count((x + 1) * 2) == 1
    assert count((x + 1).contiguous() * 2) == 2
    assert count(x.contiguous() * 2) == 1                 # there already (A7)


# ---- E6

def buffers(linear):
    return max(len({a.storage for a in c.src[1:]}) for c in linear.src)


@pytest.mark.parametrize('most', [4, 8, 32])
@pytest.mark.parametrize('lean', ['left', 'right', 'tree'])
def test_E6_arguments_are_limited(most, lean):
    xs = [buf(8) for _ in range(150)]
    if lean == 'tree':
        while len(xs) > 1: xs = [a + b for a, b in zip(xs[::2], xs[1::2])] + xs[len(xs) - len(xs) % 2:]
        total = xs[0]
    else:
        total = xs[0]
        for x in xs[1:]: total = total + x if lean == 'left' else x + total
    found = calls(graph_of(total, limits=Limits(max_args=most)))
    assert max(len(c.src) - 1 for c in found) <= most
    assert len(found) <= -(-149 // (most - 2)) * (3 if lean == 'tree' else 1)
    assert all('buffers' in r.reason.why for r in list(planned(total, limits=Limits(max_args=most)).roots.values())[1:])


def test_E6_150_inputs_give_the_right_sum():
    xs = [tensor(4, seed=k) for k in range(150)]
    total = xs[0]
    for x in xs[1:]: total = total + x
    want = np.sum([array(4, seed=k) for k in range(150)], axis=0)
    assert np.allclose(total.numpy(), want, atol=1e-4)


def chain(n):
    t = buf(8)
    for k in range(n): t = (t + float(k + 2)).sqrt()
    return t


def alternating(n=200):
    t, y = buf(64), buf(64)
    for k in range(n): t = t.maximum(t.flip(0)) if k % 2 else t * 0.5 + y
    return t


def stencils(n=12, by=lambda k: 1):
    t = buf(8192)
    for k in range(n): t = t + t.pad(((by(k), 0),)).shrink(((0, 8192),))
    return t


def wide(n=2000):
    x = buf(4096)
    xs = [x.shrink(((k, k + 64),)).sqrt() for k in range(n)]
    while len(xs) > 1: xs = [a + b for a, b in zip(xs[::2], xs[1::2])] + xs[len(xs) - len(xs) % 2:]
    return xs[0]


def branches(n=10, length=100):
    "Not deep, one buffer, and a thousand operations"
    x, total = buf(64), buf(64)
    for k in range(n):
        t = x * float(k + 2)
        for _ in range(length - 1): t = t.sqrt()
        total = total + t
    return total


BIG = {'branches': branches, 'chain': lambda: chain(3000), 'alternating': alternating, 'stencils': stencils,
       'doubling': lambda: stencils(12, lambda k: 2**k), 'wide': wide}


@pytest.mark.parametrize('name', BIG)
def test_E6_operations_are_limited(name):
    t = BIG[name]()
    with Context(SPEC=0): graph = get_kernel_graph(prepare(place([t]).sink))
    for c in calls(graph):
        computing = GroupOp.Elementwise - {Ops.CMPLT, Ops.CMPNE, Ops.AND, Ops.OR}
        assert sum(u.op in computing and u.dtype is F32 for u in c.src[0].toposort()) <= MOST_SIZE + MOST_DEPTH
        assert len(c.src) - 1 <= Limits().max_args


def test_E6_a_deep_kernel_is_cut():
    plan = planned(chain(200))
    assert [r.reason.rule for r in plan.roots.values()] == ['A1', 'E6']
    assert all(r.size <= MOST_DEPTH + 1 for r in plan.roots.values())


def test_E6_many_operations_are_cut():
    plan = planned(branches())
    assert MOST_SIZE < 10 * 100 and MOST_DEPTH > 10 + 100
    assert {r.reason.rule for r in plan.roots.values()} == {'A1', 'E6'} and len(plan.roots) <= 4
    assert max(r.size for r in plan.roots.values()) <= MOST_SIZE + Limits().max_args


@pytest.mark.skipif('CPU' not in Device.available(), reason='no C compiler')
@pytest.mark.parametrize('name', ['alternating', 'stencils'])
def test_E6_what_is_cut_compiles_and_is_right(name):
    v, w = array(64), array(64, seed=1)
    x, y = Tensor(v, device='CPU').realize(), Tensor(w, device='CPU').realize()
    t = x
    for k in range(200 if name == 'alternating' else 12):
        if name == 'stencils':
            t, v = t + t.pad(((1, 0),)).shrink(((0, 64),)), v + np.pad(v, (1, 0))[:64]
        elif k % 2: t, v = t * 0.5 + y, v * np.float32(0.5) + w
        else: t, v = t.maximum(0.1 * k - 5), np.maximum(v, np.float32(0.1 * k - 5))
    assert np.allclose(t.numpy(), v, rtol=1e-5)


# ---- E7

def test_E7_two_states_of_one_buffer_are_an_error():
    x = buf(4)
    x1 = x.after(calls(graph_of(buf(4) + 1))[0])
    check_states((x, buf(4)))
    with pytest.raises(RuntimeError, match='two states of one buffer, BUFFER'): check_states((x, x1))
    with pytest.raises(RuntimeError, match='E7'): check_states((x1, x.reshape(2, 2)))


def test_E7_every_kernel_is_checked(monkeypatch):
    x, y = buf(4), buf(4)
    x1 = x.after(x.store(buf(4) * 2))
    monkeypatch.setattr('tinysched.schedule.kernels.one_state_each', lambda states, args: tuple(args))
    with pytest.raises(RuntimeError, match='E7'): get_kernel_graph(UOp.sink(y.after(y.store(x + x1)), x1))


def test_E7_the_older_state_is_read_from_a_copy():
    x, y = buf(4), buf(4)
    x1 = x.after(x.store(buf(4) * 2))
    graph = get_kernel_graph(UOp.sink(y.after(y.store(x + x1)), x1))
    verify(graph, kernel_graph_spec)
    for c in calls(graph):
        assert len({a.storage for a in c.src[1:]}) == len(set(c.src[1:]))
    assert len(calls(graph)) == 3                          # x anew, the copy, the sum


# ---- E8

def storage(sink): return {c.src[1].storage.shape for c in calls(sink) if c.src[1].storage.op is Ops.ALLOC}


def staged(u, device=None): return UOp(Ops.STAGE, u.dtype, (u,), device)


@pytest.mark.parametrize('view,shape', [
    (lambda r: r.reshape(4, 1).expand(4, 1000), (4, 1)),
    (lambda r: r.reshape(4, 1).expand(4, 1000).permute(1, 0), (1, 4)),
    (lambda r: r.reshape(1, 4).expand(1000, 4) * 2, (1, 4)),
    (lambda r: r.reshape(1, 4).expand(1000, 4) + r.flip(0).reshape(1, 4).expand(1000, 4), (1, 4)),
    (lambda r: r.reshape(1, 4).expand(1000, 4).pad(((0, 0), (1, 1))), (1, 6)),
    (lambda r: r.reshape(1, 4).expand(1000, 4).pad(((1, 1), (0, 0))), (1002, 4)),
    (lambda r: r.reshape(1, 4).expand(1000, 4).shrink(((2, 9), (0, 3))), (1, 3)),
    (lambda r: r.reshape(1, 1, 4).expand(7, 5, 4).sum(1, keepdim=True), (1, 1, 4)),
    (lambda r: r.reshape(1, 4).expand(1000, 4).reshape(4000), (4000,))])
def test_E8_dead_axes_are_dropped(view, shape):
    value = view(buf(4) + 1)
    other = buf(*value.shape)
    assert storage(graph_of(staged(value) * other)) == {shape}


def test_E8_dropping_changes_no_value():
    x, v = tensor(4), array(4)
    for make, want in [
            (lambda: (x + 1).reshape(4, 1).expand(4, 9).contiguous() * 2, np.tile((v + 1)[:, None] * 2, (1, 9))),
            (lambda: (x + 1).reshape(1, 4).expand(9, 4).contiguous().permute(1, 0).sum(1), (v + 1) * 9),
            (lambda: (x + 1).reshape(1, 4).expand(3, 4).pad(((1, 1), (0, 0))).contiguous() * 2,
             np.pad(np.tile(v + 1, (3, 1)), ((1, 1), (0, 0))) * 2),
            (lambda: (x + 1).reshape(1, 4).expand(3, 4).contiguous().flip(0).shrink(((1, 3), (0, 4))) - 1,
             np.tile(v, (2, 1)))]:
        assert count(make()) == 2
        assert np.allclose(make().numpy(), want, atol=1e-6)


def test_E8_what_somebody_holds_keeps_its_shape():
    x = tensor(4)
    held = (x + 1).reshape(4, 1).expand(4, 9).contiguous()
    t = held * 2
    assert np.allclose(t.numpy()[:, 3], (array(4) + 1) * 2)
    assert held.shape == (4, 9) and np.allclose(held.numpy(), np.tile((array(4) + 1)[:, None], (1, 9)))
    value = (buf(4) + 1).reshape(4, 1).expand(4, 9)
    assert calls(graph_of(value))[0].src[1].storage.shape in ((4,), (4, 9))


def test_E8_a_copy_takes_whole_storage():
    x = tensor(4)
    moved = (x + 1).reshape(4, 1).expand(4, 3).contiguous().to('PYTHON:1') * 2
    assert np.allclose(moved.numpy(), np.tile((array(4) + 1)[:, None] * 2, (1, 3)))


def test_E8_constants_fold():
    ones = UOp.const(F32, 1.0).reshape(1, 1).expand(5, 5)
    (body,) = kernels(staged(ones, 'PYTHON') * 2 + buf(5, 5))
    assert not any(u.op is Ops.MUL and u.dtype is F32 for u in body.toposort())
    assert ops(body, Ops.PARAM) == 2
    (body,) = kernels(buf(4) + UOp.const(F32, 2.0) * UOp.const(F32, 3.0))
    assert ops(body, Ops.MUL) == 0
    twos = Tensor.ones(5, 5, device='PYTHON').contiguous() * 2
    assert count(twos) == 1


def test_E8_a_deviceless_value_takes_the_device_of_its_user():
    counting = UOp.arange(6, dtypes.int32).reshape(2, 3).sum(0) * 2
    y = UOp.buffer('PYTHON:1', (3,), dtypes.int32)
    x = buf(4)
    effects = x.after(x.store(buf(4) * 2)), y.after(y.store(staged(counting) + y))
    found = {c.src[1].storage.arg.device for c in calls(get_kernel_graph(UOp.sink(*effects)))
             if c.src[1].storage.op is Ops.ALLOC}
    assert found == {'PYTHON:1'}


@pytest.mark.parametrize('first', [0, 1])
def test_E8_a_deviceless_value_is_at_home_on_one_device_only(first):
    counting = UOp.arange(4, dtypes.int32) * 3
    x, y, z = UOp.buffer('PYTHON', (4,), dtypes.int32), *(UOp.buffer('PYTHON:1', (4,), dtypes.int32) for _ in 'yz')
    effects = [x.after(x.store(counting)), y.after(y.store(counting + z))]
    for call in calls(get_kernel_graph(UOp.sink(*effects[::1 - 2 * first]))):
        assert len({a.device for a in call.src[1:]}) == 1
    t = Tensor.arange(4) * 3
    stored, elsewhere = t.contiguous(), t + tensor(4).to('PYTHON:1')
    Tensor.realize(stored, elsewhere)
    assert np.allclose(elsewhere.numpy(), np.arange(4) * 3 + array(4)) and stored.tolist() == [0, 3, 6, 9]


def test_E8_a_deviceless_value_of_two_devices():
    def deep():
        t = Tensor.arange(4)
        for k in range(300): t = (t + k % 3) * (k % 2 + 1) % 97
        return t
    v = np.arange(4)
    for k in range(300): v = (v + k % 3) * (k % 2 + 1) % 97
    one, two = tensor(4), tensor(4, device='PYTHON:1')
    t = deep()
    a, b = one + t.cast(F32), two + t.to('PYTHON:1').cast(F32)
    Tensor.realize(a, b)
    assert np.allclose(a.numpy(), array(4) + v) and np.allclose(b.numpy(), array(4) + v)


# ---- E9

def test_E9_equal_kernels_are_one_object():
    bodies = kernels(*(buf(8) * 2 + 1 for _ in range(10)))
    assert len(bodies) == 10 and len(set(bodies)) == 1


def test_E9_whatever_came_before_in_the_program():
    t = buf(8, 8)
    for _ in range(4): t = staged(t - t.sum(0, keepdim=True))
    bodies = kernels(t)
    assert len(bodies) == 8 and len(set(bodies)) == 2


def test_E9_whichever_variable():
    x = tensor(8)
    n, k = Variable('n', 1, 9).bind(3), Variable('k', 1, 9).bind(4)
    linear = Tensor.schedule_linear(x * Tensor(n), x * Tensor(k))
    assert len({c.src[0] for c in linear.src}) == 1 and len(linear.src) == 2


def test_E9_aliasing_is_not_equal():
    a, b = buf(8), buf(8)
    assert kernels(a * a) != kernels(a * b)


# ---- E10

def random_step(rng, a):
    if len(a.shape) == 1:
        return rng.choice([lambda: a.reshape(1, -1), lambda: a * 2, lambda: a.pad(((1, 2),))])()
    return rng.choice([lambda: a + a.flip(1), lambda: a.sum(0), lambda: a.exp2() * 2, lambda: a.permute(1, 0),
                       lambda: a.flip(0), lambda: staged(a), lambda: a - a.max(1, keepdim=True)])()


def random_values(rng):
    pool = [buf(4, 6), buf(4, 6), buf(6)]
    for _ in range(rng.randint(3, 20)): pool.append(random_step(rng, rng.choice(pool)))
    return [u for u in pool[3:] if u.base.op not in GroupOp.State][-3:]


@pytest.mark.parametrize('seed', range(20))
def test_E10_kernel_graph(seed):
    values = random_values(random.Random(seed))
    if not values: return
    graph = graph_of(*values)                              # verified
    assert graph.op is Ops.SINK and all(s.op is Ops.AFTER and s.src[0].op is Ops.BUFFER for s in graph.src)
    for c in calls(graph):
        assert c.src[0].op is Ops.SINK and c.src[0].arg is not None
        assert all(a.op in GroupOp.State for a in c.src[1:])
        assert sorted(u.arg.slot for u in c.src[0].toposort() if u.op is Ops.PARAM) == list(range(len(c.src) - 1))
        assert all(u.shape == (prod(a.shape),) for u in c.src[0].toposort() if u.op is Ops.PARAM
                   for a in c.src[1 + u.arg.slot:2 + u.arg.slot])


# ---- decisions are values

def test_L2_boundaries_have_reasons(capsys):
    x = tensor(8, 8)
    lines = reasons(planned(buf(8, 8).softmax(0)))
    assert len(lines) == 3 and all('E4' in line and 'more operations' in line for line in lines[:2])
    with Context(DEBUG=3, SCACHE=0): (x - x.sum(0, keepdim=True)).schedule_linear()
    said = capsys.readouterr().out
    assert 'E4: a reduction inside loops that it does not depend on (32 bytes, or else 448 more operations)' in said


# ---- what is stored anyway is not stored twice

def kernels_of(*ts): return len(Tensor.schedule_linear(*ts).src)


@pytest.mark.parametrize('device', ['PYTHON', 'CPU'])
def test_E4_what_follows_a_reduction_that_is_stored_anyway_is_computed_again(device):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float32)
    x, y = Tensor(a, device=device).realize(), Tensor(b, device=device).realize()
    def results(exp, m): return (m * 2, (s := exp(m)) + 1, s * 3, s * m)
    make = lambda: results(Tensor.exp, x @ y)
    assert kernels_of(*make()) == 5            # the product, and each result from it
    got = make()
    Tensor.realize(*got)
    for g, w in zip(got, results(np.exp, a @ b)): np.testing.assert_allclose(g.numpy(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('device', ['PYTHON', 'CPU'])
def test_E4_only_foreign_loops_read_what_follows_a_kept_reduction(device):
    "Powers of a product are stored for the next product; a sum at their own loops computes them again"
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float32)
    x, y = Tensor(a, device=device).realize(), Tensor(b, device=device).realize()
    def results(exp, m, y): return exp(m) @ y, exp(m) + 1, m * 2
    linear = Tensor.schedule_linear(*results(Tensor.exp, x @ y, y))
    assert len(linear.src) == 5                              # the product, its powers, and the three results
    reads = [sum(c.src[1] in other.src[2:] for other in linear.src) for c in linear.src]
    assert sorted(reads) == [0, 0, 0, 1, 3]                  # one kernel reads the powers, three the product
    got = results(Tensor.exp, x @ y, y)
    Tensor.realize(*got)
    for g, w in zip(got, results(np.exp, a @ b, b)): np.testing.assert_allclose(g.numpy(), w, rtol=1e-3, atol=1e-4)


def test_E6_a_kept_reduction_does_not_excuse_too_large_kernels():
    "Where another rule wants the value stored, all uses read it"
    p = UOp.buffer('CPU', (8, 8), F32)
    m = p @ p
    value, root = m.exp2(), Root(m, (8, 8), m, 'CPU', Reason('A1', 'as a test'))
    i, j = root.ranges
    around = frozenset({(i, j)})
    def asked(depth): return default_policy(Site(value, {Access(root, (i, j)): (depth, around),
                                                         Access(root, (j, j)): (1, around)}, 8, Limits(), kept=True))
    assert (asked(1).rule, len(asked(1).inline)) == ('E4', 1)
    assert (asked(1000).rule, len(asked(1000).inline)) == ('E6', 0)


def test_E4_a_reshaped_reduction_is_stored_once():
    x = Tensor(np.ones((16, 16), np.float32), device='PYTHON').realize()
    g = (x @ x).exp()
    assert kernels_of(g.reshape(4, 4, 16) @ x, g + 1) == 3

