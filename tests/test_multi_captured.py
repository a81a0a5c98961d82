"""What is captured or carried, with values on several devices: jits, functions, symbolic sizes, custom kernels, schedules."""
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from tinysched import (Context, GlobalCounters, JitError, KernelInfo, Tensor, TinyJit, UOp, Variable, compile_linear,
                       dtypes, explain, flip, function, nn, run_linear, sched_stats, schedule_cache)
from tinysched.frontend import state
from tinysched.ir.draw import graph
from tinysched.ir.uop import Sharding
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import realize as runtime
from tinysched.runtime.device import pieces_of
from tinysched.schedule import cache
from tinysched.schedule.callify import canonical, in_scope
from tinysched.schedule.pipeline import resolve_linear_call
from tinysched.schedule.prepare import check_arguments

TWO, THREE, FOUR = (tuple(f'PYTHON:{i}' for i in range(n)) for n in (2, 3, 4))
KINDS = {'inlined': dict(), 'precompiled': dict(precompile=True)}
both = pytest.mark.parametrize('kind', KINDS)


@pytest.fixture(autouse=True)
def interpreter():
    with Context(DEV='PYTHON'): yield


def numbers(*shape, seed=0): return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
def one(array): return Tensor(array).contiguous().realize()
def split(array, axis=0, devices=TWO): return Tensor(array).shard(devices, axis).contiguous().realize()
def zeros(*shape, axis=0): return split(np.zeros(shape, np.float32), axis)
def made(kind, fxn): return function(fxn, allow_implicit=True, **KINDS[kind])
def equal(t, want): np.testing.assert_allclose(t.numpy(), np.asarray(want), rtol=1e-5, atol=1e-5)


def misses(act):
    "How many programs had to be scheduled"
    before = schedule_cache.misses
    act()
    return schedule_cache.misses - before


def compiles(act):
    "How many kernels had to be compiled"
    known = {id(t): set(t) for t in runtime.programs.values()}
    act()
    return sum(len(set(t) - known.get(id(t), set())) for t in runtime.programs.values())


# ---- I5, K7: the jit

def test_I5_results_of_earlier_replays_keep_their_values():
    f, results = TinyJit(lambda x, y: (x + y * 2).realize()), []
    for k in range(6):
        a, b = numbers(4, 3, seed=k), numbers(4, 3, seed=-k - 1 + 100)
        results.append((f(split(a), split(b)), a + b * 2))
    for r, want in results:
        equal(r, want)
        assert r.place == Sharding(('PYTHON', 'PYTHON:1'), 0)


@pytest.mark.parametrize('devices', [TWO, THREE, FOUR])
def test_I5_matmul_gather_and_all_reduce_are_replayed(devices):
    f, w = TinyJit(lambda x, w: ((x @ w).relu().realize(), (x @ w).sum(0), x.to('PYTHON') * 2)), numbers(6, 4)
    kept = []
    for k in range(5):
        a = numbers(12, 6, seed=k)
        kept.append((a, f(split(a, 0, devices), split(w, None, devices))))
    for a, (rows, total, whole) in kept:
        equal(rows, np.maximum(a @ w, 0))
        equal(total, (a @ w).sum(0))
        equal(whole, a * 2)


@pytest.mark.parametrize('axis', [0, 1, None])
def test_I5_a_jit_splits_its_argument(axis):
    f = TinyJit(lambda x: (x.shard(TWO, axis) * 2).realize())
    for k in range(5): equal(f(one(numbers(4, 6, seed=k))), numbers(4, 6, seed=k) * 2)


def trained(devices, steps=6):
    "Losses, weights and calls of a captured step that trains a small network"
    w1, w2 = (Tensor(numbers(*s)) for s in ((8, 16), (16, 3)))
    if devices: w1, w2 = w1.shard(devices), w2.shard(devices)
    for w in (w1.realize(), w2.realize()): w.requires_grad = True
    opt = nn.optim.SGD([w1, w2], lr=0.05, momentum=0.9)

    @TinyJit
    def step(x, y):
        opt.zero_grad()
        loss = ((x @ w1).relu() @ w2 - y).square().mean()
        loss.backward()
        opt.step()
        return loss.realize()
    with Tensor.train():
        data = [(numbers(12, 8, seed=k), numbers(12, 3, seed=k)) for k in range(steps)]
        place = (lambda a: split(a, 0, devices)) if devices else one
        losses = [step(place(x), place(y)) for x, y in data]
    return [t.item() for t in losses], w1.numpy(), w2.numpy(), step.captured


@pytest.mark.parametrize('devices', [TWO, THREE, FOUR])
def test_J7_a_training_step_is_captured_with_as_many_kernels_on_any_number_of_devices(devices):
    losses, w1, w2, alone = trained(None)
    for many, want in zip(trained(devices), (losses, w1, w2)): np.testing.assert_allclose(many, want, rtol=1e-4, atol=1e-5)
    counts = {len([c for c in trained(d)[3].linear.src if c.src[0].op is Ops.SINK]) for d in (TWO, devices)}
    assert len(counts) == 1


def test_I5_split_state_is_written_in_place():
    total, want = zeros(4, 3), np.zeros((4, 3), np.float32)
    storage = total.uop
    f = TinyJit(lambda x: total.assign(total + x).sum().realize())
    for k in range(5):
        want = want + numbers(4, 3, seed=k)
        equal(f(split(numbers(4, 3, seed=k))), want.sum())
        equal(total, want)
    assert total.uop is storage


def test_I5_a_replay_writes_parts_of_an_argument_across_the_border():
    @TinyJit
    def f(x):
        x[1:3] = 7
        return (x * 1).realize()
    for k in range(5):
        want = numbers(4, 3, seed=k)
        x = split(want)
        before = x + 0
        result = f(x)
        equal(before, numbers(4, 3, seed=k))
        want[1:3] = 7
        equal(x, want), equal(result, want)


OTHERS = dict(axis=lambda a: split(a, 1), whole=lambda a: split(a, None), single=one,
              order=lambda a: split(a, 0, TWO[::-1]), devices=lambda a: split(a, 0, ('PYTHON', 'PYTHON:2')))

@pytest.mark.parametrize('other', OTHERS)
def test_I5_an_argument_in_another_place_than_captured_is_refused(other):
    f = TinyJit(lambda x: (x + 1).realize())
    for _ in range(3): f(split(numbers(4, 4)))
    x = OTHERS[other](numbers(4, 4))
    with pytest.raises(JitError, match=r'argument 0 has device .* in the first call it was PYTHON and PYTHON:1 \(axis 0 split'): f(x)
    equal(x, numbers(4, 4)), equal(f(split(numbers(4, 4))), numbers(4, 4) + 1)


def test_I5_one_split_storage_twice_is_refused():
    f, x = TinyJit(lambda x, y: (x + y).realize()), split(numbers(4, 4))
    with pytest.raises(JitError, match='the same storage'): f(x, x)
    with pytest.raises(JitError, match='the same storage'): f(x, x.reshape(2, 2, 4))


def test_I5_views_of_a_split_argument_are_returned_as_views_of_the_new_one():
    f = TinyJit(lambda x: ((x * 2).realize(), x, x[1:2], x.permute(1, 0)))
    for k in range(5):
        a = numbers(4, 3, seed=k)
        twice, same, row, turned = f(split(a))
        for t, want in ((twice, a * 2), (same, a), (row, a[1:2]), (turned, a.T)): equal(t, want)


def test_K7_temporaries_of_a_replay_have_an_arena_on_each_device():
    @TinyJit
    def f(x):
        a = (x * 2).realize()
        b = (a + 1).realize()
        return (b.sum(0) + a.sum(0)).realize()
    kept = [(k, f(split(numbers(4, 8, seed=k)))) for k in range(5)]
    for k, r in kept: equal(r, (numbers(4, 8, seed=k) * 4 + 1).sum(0))
    lanes = {(str(lane.device), lane.lane): lane for lane in f.captured.linear.arg.lanes}
    assert all(lane.after <= 2 * 128 + 2 * 128 for lane in lanes.values())
    bases = {b.base for s in f.captured.prepared.steps for b in s.buffers}
    assert {b.device for b in bases} == {'PYTHON', 'PYTHON:1'}


def test_K7_a_captured_temporary_takes_the_room_of_a_part():
    f = TinyJit(lambda x: ((x + 1).realize() * 2).realize())
    for k in range(4): equal(f(split(numbers(64, 8, seed=k))), (numbers(64, 8, seed=k) + 1) * 2)
    arenas = {b.base for s in f.captured.prepared.steps for b in s.buffers} - {
        b for p in f.captured.places for b in pieces_of(p)}
    assert {b.nbytes for b in arenas} == {32 * 8 * 4} and len(arenas) == 2


def test_M11_random_numbers_move_on_and_are_those_of_one_device():
    f = TinyJit(lambda x: (x + Tensor.rand(4, 3).shard(TWO, 0)).realize())
    Tensor.manual_seed(3)
    got = [f(zeros(4, 3)) for _ in range(5)]
    Tensor.manual_seed(3)
    for g in got: equal(g, Tensor.rand(4, 3).numpy())


def test_I5_a_pruned_replay_leaves_out_what_stays_the_same_on_all_devices():
    w = split(numbers(4, 3))
    f = TinyJit(lambda x: (x + (w * 2).realize()).realize(), prune=True)
    for k in range(5): equal(f(split(numbers(4, 3, seed=k))), numbers(4, 3, seed=k) + numbers(4, 3) * 2)
    assert len(f.captured.linear.src) == 1


def test_I5_a_replay_that_fails_midway_is_finished_later(monkeypatch):
    total = zeros(4, 3)
    f = TinyJit(lambda x: (total.assign(total + x).realize(), (total * 2).realize())[1])
    for _ in range(3): f(split(np.ones((4, 3), np.float32)))
    launches, real, x = [], runtime.keep_promises, split(np.ones((4, 3), np.float32))
    def failing(s):
        real(s)
        launches.append(s)
        if len(launches) == 1: raise KeyboardInterrupt
    monkeypatch.setattr(runtime, 'keep_promises', failing)
    with pytest.raises(KeyboardInterrupt): f(x)
    monkeypatch.undo()
    equal(total, np.full((4, 3), 4))


# ---- A12, A13, A15, G3: functions

PLACES = [(0, None), (None, 1), (1, 0), (0, 1), (None, None), (0, 0), (1, 1)]

@both
@pytest.mark.parametrize('axes', PLACES)
def test_A12_a_function_of_split_arguments_gives_values_places_and_gradients(kind, axes):
    plain, found = lambda x, y: (x @ y).relu(), []
    a, b = numbers(4, 6), numbers(6, 4)
    for f in (plain, made(kind, plain)):
        x, y = (split(m, axis) for m, axis in zip((a, b), axes))
        x.requires_grad = y.requires_grad = True
        out = f(x, y)
        out.square().sum().backward()
        found.append([(t.place, t.numpy()) for t in (out, x.grad, y.grad)])
    for (place, want), (got_place, got) in zip(*found):
        assert place == got_place
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[0][0][1], np.maximum(a @ b, 0), rtol=1e-5, atol=1e-5)


@both
def test_A12_several_values_in_different_places(kind):
    f, a = made(kind, lambda x: (x + 1, x.sum(), x.permute(1, 0), x[1:2])), numbers(4, 3)
    more, total, turned, row = f(split(a))
    equal(more, a + 1), equal(total, a.sum()), equal(turned, a.T), equal(row, a[1:2])
    assert [t.place.axis for t in (more, total, turned, row)] == [0, None, 1, None]


VIEWS = [lambda t: t[2:4], lambda t: t[:, 1:3], lambda t: t[0], lambda t: t.reshape(2, 4, 4), lambda t: t.permute(1, 0),
         lambda t: t[1:7]]

@both
@pytest.mark.parametrize('view', VIEWS)
def test_A12_views_of_split_values_are_arguments(kind, view):
    f, a = made(kind, lambda x: x * 3), numbers(8, 4)
    want = a.T if view is VIEWS[4] else view(a)
    equal(f(view(split(a))), want * 3), equal(f(view(split(a, None))), want * 3)


@both
def test_A15_what_a_function_writes_stays_split(kind):
    total, rows, want = zeros(4, 3), zeros(4, 3), np.zeros((4, 3), np.float32)
    add = made(kind, lambda x: total.assign(total + x).sum(0))
    def put(x, i):
        rows[i:i + 1] = x
        return rows * 2
    store = made(kind, put)
    for i in range(4):
        equal(add(split(numbers(4, 3, seed=i))), sum(numbers(4, 3, seed=k) for k in range(i + 1)).sum(0))
        want[i] = numbers(1, 3, seed=i)
        equal(store(split(numbers(1, 3, seed=i), None), i), want * 2)
        equal(rows, want)
    equal(total, sum(numbers(4, 3, seed=k) for k in range(4)))
    assert total.place == rows.place == Sharding(('PYTHON', 'PYTHON:1'), 0)


@pytest.mark.parametrize('outer', KINDS)
@pytest.mark.parametrize('inner', KINDS)
@pytest.mark.parametrize('axes', [(0, 0), (0, None), (0, 1), (None, None)])
def test_G3_nested_functions_keep_their_own_arguments(outer, inner, axes):
    less = made(inner, lambda x, y: x - y)
    f = made(outer, lambda x, y: less(y, x) * 2 + less(x, x + 1).sum(0))
    a, b = numbers(4, 4), numbers(4, 4, seed=1)
    equal(f(*(split(m, axis) for m, axis in zip((a, b), axes))), (b - a) * 2 - 4)


@both
def test_B7_a_function_called_with_other_splits_has_a_schedule_for_each(kind):
    f, a = made(kind, lambda x: (x * 2 + 1).relu()), numbers(4, 4)
    schedule_cache.clear()
    def calls():
        for axis in (0, 1, None): equal(f(split(a, axis)).realize(), np.maximum(a * 2 + 1, 0))
    calls()
    assert misses(calls) == 0


def test_A13_an_argument_in_another_place_is_named():
    p = UOp.param(0, dtypes.float32, (4,), Sharding(('PYTHON', 'PYTHON:1'), 0))
    body = UOp.maketuple(p + 1)
    check_arguments(body.call(split(numbers(4)).uop))
    check_arguments(body.call(Tensor.ones(4).uop))   # can be computed anywhere
    for other in (split(numbers(4), None), one(numbers(4))):
        with pytest.raises(TypeError, match=r'argument 0 is float32 .* expected float32 of shape \(4,\) on PYTHON and '
                                            r'PYTHON:1 \(axis 0 split'): check_arguments(body.call(other.uop))


def test_I5_a_precompiled_function_in_a_jit():
    w = split(numbers(3, 3), None)
    f = function(lambda x, w: (x @ w).relu(), precompile=True)
    g = TinyJit(lambda x: (f(x, w) + f(x * 2, w)).realize())
    for k in range(5): equal(g(split(numbers(4, 3, seed=k))), 3 * np.maximum(numbers(4, 3, seed=k) @ numbers(3, 3), 0))


# ---- E11: symbolic sizes beside and along the split axis

A, W = numbers(12, 6), numbers(6, 3)
USES = dict(
    read=(lambda x, w: x, lambda a: a), arithmetic=(lambda x, w: x * 2 + 1, lambda a: a * 2 + 1),
    matmul=(lambda x, w: (x @ w).relu(), lambda a: np.maximum(a @ W, 0)),
    rows=(lambda x, w: x.sum(1), lambda a: a.sum(1)), columns=(lambda x, w: x.sum(0), lambda a: a.sum(0)),
    mean=(lambda x, w: x.mean(), lambda a: a.mean()), most=(lambda x, w: x.max(0), lambda a: a.max(0)),
    stored=(lambda x, w: (x * 2).contiguous().realize().sum(0), lambda a: a.sum(0) * 2),
    gathered=(lambda x, w: x.to('PYTHON') + 1, lambda a: a + 1),
    softmax=(lambda x, w: x.softmax(1).sum(1), lambda a: np.ones(len(a))),
    resharded=(lambda x, w: x.shard(x.device, 1) * 2, lambda a: a * 2), gram=(lambda x, w: x @ x.T, lambda a: a @ a.T),
    ranks=(lambda x, w: (x.unsqueeze(1) > x.unsqueeze(0)).sum(0), lambda a: (a[:, None] > a[None]).sum(0)),
    row=(lambda x, w: x[1] * 2, lambda a: a[1] * 2), few=(lambda x, w: x[1:2] + 1, lambda a: a[1:2] + 1),
    turned=(lambda x, w: x.permute(1, 0) + 0, lambda a: a.T), slice=(lambda x, w: x[:, 1:3] * 2, lambda a: a[:, 1:3] * 2))

@pytest.mark.parametrize('stored', [False, True])
@pytest.mark.parametrize('use', USES)
@pytest.mark.parametrize('devices', [TWO, THREE])
def test_E11_a_split_batch_of_any_size_has_one_schedule_and_one_set_of_kernels(use, stored, devices):
    act, want = USES[use]
    x, w, n = one(A), split(W, None, devices), Variable('n', 3, 12, divisor=len(devices))
    def result(k):
        t = x[:n.bind(k)].shard(devices, 0)
        return act(t.realize() if stored else t, w).numpy()
    sizes = range(len(devices) * 2, 13, len(devices))
    np.testing.assert_allclose(result(sizes[0]), want(A[:sizes[0]]), rtol=1e-5, atol=1e-5)
    def rest():
        for k in sizes[1:]: np.testing.assert_allclose(result(k), want(A[:k]), rtol=1e-5, atol=1e-5)
    assert (misses(rest), compiles(rest)) == (0, 0)


@pytest.mark.parametrize('use', USES)
def test_J7_a_split_batch_takes_as_many_kernels_on_any_number_of_devices(use):
    def kernels(count):
        devices = tuple(f'PYTHON:{i}' for i in range(count))
        n = Variable('n', count, 12, divisor=count)
        t = one(A)[:n.bind(12)].shard(devices, 0).realize()
        return sched_stats(USES[use][0](t, split(W, None, devices)).schedule_linear())['kernels']
    assert len({kernels(count) for count in (2, 3, 6)}) == 1


def test_E11_storage_of_a_split_batch_is_assigned_to():
    x, n = one(A), Variable('n', 2, 12, divisor=2)
    for k in (2, 12, 4):
        t, want = x[:n.bind(k)].shard(TWO, 0).realize(), A[:k] + 1
        t.assign(t + 1).realize()
        equal(t, want)
        t[:, 2:3] = 0.
        want[:, 2] = 0
        equal(t, want), equal(t.sum(0), want.sum(0))
    equal(x, A)


@pytest.mark.parametrize('devices', [TWO, FOUR])
def test_E11_a_column_of_a_split_batch_goes_straight_into_its_storage(devices):
    t = one(A)[:Variable('n', 4, 12, divisor=4).bind(8)].shard(devices, 0).realize()
    stats = sched_stats((column := t[:, 1].contiguous()).schedule_linear())
    assert (stats['kernels'], stats['copies'], stats['tmp_before']) == (1, 0, 0)    # seen as a window, not staged before
    assert column.place.axis == 0


@both
def test_E11_functions_jits_and_gradients_of_a_split_batch(kind):
    x, w, n = one(A), split(W, None), Variable('n', 2, 12, divisor=2)
    w.requires_grad = True
    f, kept = made(kind, lambda t: (t @ w).relu()), []
    g = TinyJit(lambda t: (t @ w).relu().realize())
    for k in (2, 6, 4, 12, 2):
        t, want = x[:n.bind(k)].shard(TWO, 0), np.maximum(A[:k] @ W, 0)
        equal(f(t), want), equal(f(t.realize()).sum(0), want.sum(0))
        w.grad = None
        (t @ w).square().sum().backward()
        equal(w.grad, A[:k].T @ (2 * A[:k] @ W))
        kept.append((g(x[:n.bind(k)].shard(TWO, 0).contiguous().realize()), want))
    for r, want in kept: equal(r, want)


def test_E11_sizes_that_cannot_be_split_are_refused():
    x = one(A)
    for n, devices in ((Variable('n', 1, 12), TWO), (Variable('n', 2, 12, divisor=2), THREE)):
        with pytest.raises(ValueError, match='is no multiple of'): x[:n.bind(4)].shard(devices, 0)
    equal(x, A)


def test_E11_a_symbolic_size_beside_the_split_axis():
    n, at = Variable('n', 1, 6), Variable('at', 0, 5)
    for k in (1, 3, 6):
        x, want = split(A), A.copy()
        part = x[:, :n.bind(k)]
        assert part.place.axis == 0
        equal((part + 1).sum(1), (A[:, :k] + 1).sum(1)), equal(part.sum(0), A[:, :k].sum(0))
        equal(part @ split(W, None)[:n.bind(k)], A[:, :k] @ W[:k])
        part.assign(part * 0 + k)
        want[:, :k] = k
        equal(x, want), equal(x[:, at.bind(k - 1)], want[:, k - 1])


def test_J2_a_symbolic_slice_along_the_split_axis_gathers_and_a_write_to_it_is_masked():
    n = Variable('n', 1, 12)
    for k in (1, 2, 5, 12):
        x, want = split(A, 0, FOUR), A.copy()
        equal(x[:n.bind(k)] * 2, A[:k] * 2), equal(x[:n.bind(k)].sum(0), A[:k].sum(0))
        x[:n.bind(k)] = float(k)
        want[:k] = k
        equal(x, want)
        assert x.place.axis == 0


STEPS = dict(scale=lambda x, a: (x * 2, a * 2), bias=lambda x, a: (x + 1, a + 1), turn=lambda x, a: (x[:, ::-1], a[:, ::-1]),
             mean=lambda x, a: (x - x.mean(1, keepdim=True), a - a.mean(1, keepdims=True)),
             total=lambda x, a: (x + x.sum(0), a + a.sum(0)), stored=lambda x, a: (x.contiguous(), a),
             done=lambda x, a: (x.realize(), a), whole=lambda x, a: (x.to('PYTHON').shard(THREE, 0), a))

@pytest.mark.parametrize('seed', range(12))
def test_E11_random_programs_on_split_batches(seed):
    rng, x = random.Random(seed), one(A)
    n = Variable('n', 3, 12, divisor=3)
    steps = [rng.choice(list(STEPS)) for _ in range(5)]
    for k in (3, 12, 6):
        t, a = x[:n.bind(k)].shard(THREE, 0), A[:k]
        for s in steps: t, a = STEPS[s](t, a)
        np.testing.assert_allclose(t.numpy(), a, rtol=1e-3, atol=1e-3, err_msg=f'{steps} {k}')


# ---- N1: custom kernels

def doubled(c, a):
    loops = [UOp.range(n, i) for i, n in enumerate(a.shape)]
    return c[tuple(loops)].store(a[tuple(loops)] * 2).end(*loops).sink(arg=KernelInfo('doubled'))


def product(c, a, b):
    i, j, k = (UOp.range(n, i) for i, n in enumerate((*c.shape, a.shape[1])))
    return c[i, j].store((a[i, k] * b[k, j]).reduce(k, arg=Ops.ADD)).end(i, j).sink(arg=KernelInfo('product'))


@pytest.mark.parametrize('axis', [0, 1, None])
def test_N1_a_kernel_is_written_for_the_part_of_each_device(axis):
    seen = []
    def noted(c, a):
        seen.append((c.shape, a.shape))
        return doubled(c, a)
    out, = zeros(4, 6, axis=axis).custom_kernel(split(numbers(4, 6), axis), fxn=noted)[:1]
    part = tuple(n // 2 if i == axis else n for i, n in enumerate((4, 6)))
    assert seen == [(part, part)] and out.place.axis == axis
    linear = out.schedule_linear()
    assert sched_stats(linear)['kernels'] == 1
    run_linear(linear)
    equal(out, numbers(4, 6) * 2)


def test_N1_arguments_split_differently_and_whole_ones():
    a, b = numbers(4, 6), numbers(6, 4)
    equal(zeros(4, 4).custom_kernel(split(a), split(b, None), fxn=product)[0], a @ b)
    equal(zeros(4, 4, axis=1).custom_kernel(split(a, None), split(b, 1), fxn=product)[0], a @ b)
    equal(zeros(4, 6).custom_kernel(split(a) + 1, fxn=doubled)[0], (a + 1) * 2)
    equal(zeros(4, 6, axis=None).custom_kernel(Tensor.ones(4, 6), fxn=doubled)[0], np.full((4, 6), 2))


def test_N1_views_of_split_arguments():
    a = numbers(4, 6)
    x = split(a)
    equal(zeros(4, 2, 3).custom_kernel(x.reshape(4, 2, 3), fxn=doubled)[0], a.reshape(4, 2, 3) * 2)
    equal(zeros(4, 6).reshape(4, 3, 2).custom_kernel(x.reshape(4, 3, 2), fxn=doubled)[0], a.reshape(4, 3, 2) * 2)
    equal(zeros(6, 4, axis=1).custom_kernel(x.permute(1, 0), fxn=doubled)[0], a.T * 2)
    for cut, source in (((slice(None), slice(1, 4)), (slice(None), slice(2, 5))), ((slice(1, 3),), (slice(2),))):
        out, want = zeros(4, 6), np.zeros((4, 6), np.float32)
        out[cut].custom_kernel(x[source], fxn=doubled)
        want[cut] = a[source] * 2
        equal(out, want)


def test_N1_a_whole_result_of_parts_is_refused():
    out = zeros(2, 6, axis=None)
    with pytest.raises(ValueError, match='argument 0, which is whole on each device, from argument 1, of which each has a part'):
        out.custom_kernel(split(numbers(4, 6)), fxn=doubled)
    with pytest.raises(RuntimeError, match='on PYTHON and PYTHON:1 .* on PYTHON:2; wanted one place'):
        zeros(4, 6).custom_kernel(Tensor(numbers(2, 6)).to('PYTHON:2'), fxn=doubled)
    equal(out, np.zeros((2, 6)))


def test_N1_snapshots_gradients_and_jits_of_a_kernel_on_parts():
    a = numbers(4, 6)
    x = split(a)
    total, more = x.sum(0), x + 1
    x.custom_kernel(x, fxn=doubled), x.custom_kernel(x, fxn=doubled)
    equal(x, a * 4), equal(total, a.sum(0)), equal(more, a + 1)
    x = split(a)
    x.requires_grad = True
    out = zeros(4, 6).custom_kernel(x, fxn=doubled, grad_fxn=lambda g, call: (None, g * 2))[0]
    out.square().sum().backward()
    equal(x.grad, a * 8)
    f = TinyJit(lambda x: (Tensor.zeros(4, 6).shard(TWO, 0).contiguous().custom_kernel(x, fxn=doubled)[0] + 1).realize())
    kept = [(f(split(numbers(4, 6, seed=k))), numbers(4, 6, seed=k) * 2 + 1) for k in range(5)]
    for r, want in kept: equal(r, want)


# ---- M10: schedules that the caller runs

def test_M10_a_schedule_of_split_results_is_run_by_its_caller():
    a = numbers(4, 3)
    x = split(a)
    y = (x @ x.permute(1, 0)).relu()
    z = y.sum()
    linear = compile_linear(y.schedule_linear(z))
    with pytest.raises(RuntimeError, match='was scheduled, but'): y.numpy()
    run_linear(linear)
    equal(y, np.maximum(a @ a.T, 0)), equal(z, np.maximum(a @ a.T, 0).sum())


def test_I1_the_number_of_a_device_is_no_variable_of_the_caller():
    x, w, n = split(A), split(W, None), Variable('n', 1, 6)
    for y, want in ((x @ split(W, 0), A @ W), (x.sum(0) + w.sum(), A.sum(0) + W.sum()), (x * split(A, None), A * A)):
        linear, values = y.linear_with_vars()
        assert values == {}
        run_linear(linear, values)
        equal(y, want)
    y = (x[:, :n.bind(2)] * split(A, None)[:, :n.bind(2)]).sum(1)
    linear, values = y.linear_with_vars()
    assert values == {'n': 2}
    run_linear(linear, {'n': 5})
    equal(y, (A * A)[:, :5].sum(1))


def test_M10_schedules_run_in_another_order_are_refused():
    x = split(np.ones((4, 3), np.float32))
    x.assign(x + 1)
    first = x.schedule_linear()
    x.assign(x * 3)
    second = x.schedule_linear()
    with pytest.raises(RuntimeError, match='was never run'): run_linear(second)
    run_linear(first), run_linear(second)
    equal(x, np.full((4, 3), 6))
    y = x + 1
    late = y.schedule_linear()
    x.assign(x * 3).realize()
    with pytest.raises(RuntimeError, match='overwritten since'): run_linear(late)


def test_J7_the_counts_of_a_schedule_do_not_depend_on_the_number_of_devices():
    def counts(devices):
        x, w = split(numbers(12, 6), 0, devices), split(numbers(6, 4), None, devices)
        return sched_stats((x @ w).relu().schedule_linear())
    alone = sched_stats((one(numbers(12, 6)) @ one(numbers(6, 4))).relu().schedule_linear())
    for devices in (TWO, THREE, FOUR):
        assert {k: counts(devices)[k] for k in ('kernels', 'copies')} == {k: alone[k] for k in ('kernels', 'copies')}
    x, before = split(numbers(12, 6), 0, FOUR), GlobalCounters.kernel_count
    (x * 2).realize()
    assert GlobalCounters.kernel_count - before == 4   # launches


# ---- A10, H1: files

@pytest.fixture
def copies(monkeypatch):
    "(destination, source, offset there, bytes) of the bulk copies"
    seen, real = [], runtime.copy
    def noted(dst, src):
        seen.append((dst.device[:8], src.device[:4], src.offset, dst.nbytes))
        real(dst, src)
    monkeypatch.setattr(runtime, 'copy', noted)
    return seen


def in_file(tmp_path, array, name='x'):
    path = tmp_path / name
    path.write_bytes(array.tobytes())
    return Tensor.empty(*array.shape, device=f'DISK:{path}')


def on_disk(tmp_path, name='x'): return np.frombuffer((tmp_path / name).read_bytes(), np.float32).reshape(A.shape)


REGIONS = dict(   # view of a file of 12 rows of 6 -> axis, (offset, bytes) that each of two devices reads
    rows=(lambda f: f, 0, [(0, 144), (144, 144)]), part=(lambda f: f[2:10], 0, [(48, 96), (144, 96)]),
    reshaped=(lambda f: f.reshape(2, 6, 6), 0, [(0, 144), (144, 144)]), flipped=(lambda f: f.flip(0), 0, [(144, 144), (0, 144)]),
    columns=(lambda f: f, 1, [(0, 276), (12, 276)]), turned=(lambda f: f.permute(1, 0), 0, [(0, 276), (12, 276)]),
    inner=(lambda f: f[:, 1:3], 0, [(4, 128), (148, 128)]), whole=(lambda f: f, None, [(0, 288), (0, 288)]))

@pytest.mark.parametrize('region', REGIONS)
def test_A10_each_shard_reads_its_own_region_of_a_file(region, tmp_path, copies):
    view, axis, read = REGIONS[region]
    t = view(in_file(tmp_path, A)).shard(TWO, axis)
    want = A[::-1] if region == 'flipped' else A.T if region == 'turned' else view(A)
    equal(t, want)
    assert sorted(copies) == [(d, 'DISK', *r) for d, r in zip(('PYTHON', 'PYTHON:1'), read)]   # in any order
    equal((t * 2).sum(0), want.sum(0) * 2)


@pytest.mark.parametrize('axis', [0, 1, None])
def test_A10_shards_are_written_to_a_file_in_order(axis, tmp_path, copies):
    x, device = split(A, axis), f'DISK:{tmp_path / "x"}'
    x.to(device).realize()
    np.testing.assert_array_equal(on_disk(tmp_path), A)
    written = [c[3] for c in copies if c[0][:4] == 'DISK']
    assert written == ([144, 144] if axis == 0 else [288])
    (x * 2).to(device).realize()
    np.testing.assert_array_equal(on_disk(tmp_path), A * 2)
    f = in_file(tmp_path, A)
    f.assign(x + 1).realize()
    f[2:4].assign(x[2:4] * 3).realize()
    want = A + 1
    want[2:4] = A[2:4] * 3
    np.testing.assert_array_equal(on_disk(tmp_path), want)


def test_A10_shards_of_a_file_are_snapshots_of_it(tmp_path):
    f = in_file(tmp_path, A)
    t, more = f.shard(TWO, 0), f.shard(TWO, 1) + 1
    f.assign(f.shard(TWO, 0) * 0).realize()
    equal(t, A), equal(more, A + 1), equal(f.to('PYTHON'), A * 0)


def test_A10_weights_are_saved_from_shards_and_loaded_into_shards(tmp_path, copies):
    safetensors = pytest.importorskip('safetensors.numpy')
    path = str(tmp_path / 'm.safetensors')
    for axis in (0, 1, None):
        x = split(A, axis)
        nn.state.safe_save({'x': x, 'y': x + 1}, path)
        found = safetensors.load_file(path)
        np.testing.assert_array_equal(found['x'], A), np.testing.assert_array_equal(found['y'], A + 1)
    class Model:
        def __init__(self): self.x, self.y = zeros(12, 6), zeros(12, 6, axis=None)
    m = Model()
    del copies[:]
    nn.state.load_state_dict(m, nn.state.safe_load(path), verbose=False)
    equal(m.x, A), equal(m.y, A + 1)
    assert (m.x.place.axis, m.y.place.axis) == (0, None)
    assert sorted(n for *_, n in copies) == [144, 144, 288, 288]


# ---- B7, C2, G1, G2: keys

def key(t): return canonical(state.place_program(state.settle([t.cell.state])).sink).key


def test_B7_equal_programs_over_other_shards_have_one_key():
    for axis in (0, 1, None):
        a, b = ((split(numbers(4, 6, seed=k), axis) * 2).sum(0) for k in range(2))
        assert key(a) == key(b)


def test_B7_axis_devices_their_number_and_order_give_other_keys():
    places = [('PYTHON', None), *((d, axis) for axis in (0, 1, None) for d in (
        TWO, TWO[::-1], ('PYTHON', 'PYTHON:2'), ('PYTHON:1', 'PYTHON:2'), THREE))]
    programs = [lambda x: x * 2, lambda x: x.sum(0), lambda x: x.to('PYTHON:3'), lambda x: x.max(1)]
    found = {key(f(one(numbers(6, 6)) if devices == 'PYTHON' else split(numbers(6, 6), axis, devices)))
             for devices, axis in places for f in programs}
    assert len(found) == len(places) * len(programs)
    copies = {key(one(numbers(6, 6)).shard(devices, axis) + 1) for devices, axis in places[1:]}
    assert len(copies) == len(places) - 1


def test_B7_aliasing_of_shards_is_in_the_key():
    x, y = split(numbers(4, 6)), split(numbers(4, 6, seed=1))
    assert key(x * x.sum(0)) != key(x * y.sum(0)) == key(y * x.sum(0))


PROGRAM = '''
import numpy as np
from tinysched import Tensor, schedule_cache
from tinysched.schedule import pipeline
made, real = [], pipeline.lower_flat
pipeline.lower_flat = lambda *args: (made.append(args), real(*args))[1]
a = np.arange(24, dtype=np.float32).reshape(4, 6)
devices = ("PYTHON", "PYTHON:1")
x, w = Tensor(a).shard(devices, 0).realize(), Tensor(a.T).shard(devices, 1).realize()
y = (x @ w).sum(0) + x.to("PYTHON:1").sum()._to(w.place._replace(axis=None))
assert np.allclose(y.numpy(), (a @ a.T).sum(0) + a.sum())
x[1:3] = 5
a[1:3] = 5
assert np.allclose(x.numpy(), a)
print(len(made), *sorted(linear.key.hex() for linear in schedule_cache.entries.values()))
'''

def test_C2_schedules_over_shards_come_back_from_disk_in_another_process(tmp_path):
    def run(seed):
        env = {**os.environ, 'SCACHE': '2', 'XDG_CACHE_HOME': str(tmp_path), 'DEV': 'PYTHON', 'PYTHONHASHSEED': seed, 'SPEC': '1'}
        return subprocess.run([sys.executable, '-c', PROGRAM], env=env, check=True, capture_output=True, text=True).stdout.split()
    first, second = run('1'), run('2')
    assert int(first[0]) > 0 == int(second[0])
    assert first[1:] == second[1:]


def test_C3_a_schedule_over_shards_is_read_as_it_was_written():
    x = split(numbers(4, 6))
    y = (x @ split(numbers(6, 4), 1)).sum(0)
    with Context(SCACHE=0): y.realize()
    for linear in schedule_cache.entries.values():
        data = cache.write(linear)
        if data is not None: assert cache.read(data) is linear


def test_G2_temporaries_on_several_devices_are_fresh_in_each_invocation():
    place = Sharding(('PYTHON', 'PYTHON:1'), None)
    part, whole = UOp.alloc(place, (4,), dtypes.float32), UOp.param(0, dtypes.float32, (4,), place)
    body = UOp.sink(arg=KernelInfo('k'))
    linear = UOp(Ops.LINEAR, dtypes.void, (body.call(part, whole),
                                           body.call(UOp(Ops.MSELECT, dtypes.float32, (part,), 1))))
    given = UOp.buffer(Sharding(('PYTHON', 'PYTHON:1'), 0), (8,), dtypes.float32)
    first, second = (resolve_linear_call(linear, [given]) for _ in range(2))
    temporaries = [u for r in (first, second) for c in r.src for u in in_scope(UOp.sink(*c.src[1:])) if u.op is Ops.BUFFER and u is not given]
    assert len(set(temporaries)) == 2 and all(u.device == place for u in temporaries)
    assert all(r.src[0].src[2] is given and r.src[1].src[1].src[0] is r.src[0].src[1] for r in (first, second))


# ---- L1, L2: seeing it

def test_L2_nodes_on_several_devices_say_so_in_one_line():
    x = split(numbers(4, 6))
    assert repr(x.uop).endswith('PYTHON and PYTHON:1 (axis 0 split) (4, 6)')
    assert 'COPY float32 PYTHON and PYTHON:1 (whole on each) (4, 6)' in x.shard(TWO).uop.tree()


def test_L1_pictures_show_where_values_are():
    drawn = graph((split(numbers(4, 6)) + 1).uop, 'on two devices')._repr_mimebundle_()
    svg = ' '.join(re.sub('<[^>]*>', ' ', drawn['image/svg+xml']).split())   # words, however they are broken into lines
    assert 'axis 0' in svg and 'PYTHON:1' in svg


def test_L2_decisions_name_the_devices_and_can_be_flipped():
    y = (split(numbers(4, 6)) @ split(numbers(6, 4), None)).softmax(1).sum(0)
    e = explain(y)
    assert all('on each of PYTHON, PYTHON:1' in str(d) or ' to PYTHON' in str(d) for d in e.decisions)
    free = [i for i, d in enumerate(e.decisions) if d.free]
    for i in free: flip(i, y)
    assert free
    with pytest.raises(ValueError, match='is no choice'): flip(next(i for i, d in enumerate(e.decisions) if not d.free), y)
    equal(y, y.to('PYTHON').numpy())
