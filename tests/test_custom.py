"""Rules N1 and G4: kernels that users write, as graphs or as text, among all other kernels."""
import itertools
import pathlib
import random

import numpy as np
import pytest

from tinysched import (AxisType, Context, Device, GlobalCounters, KernelInfo, Ops, Tensor, TinyJit, UOp, Variable, dtypes,
                       run_linear, sched_stats, schedule_cache)
from tinysched.frontend import state
from tinysched.ir.spec import SpecError
from tinysched.runtime import realize as runtime
from tinysched.schedule.callify import access, canonical, is_write, outcomes

DEVICES = 'PYTHON', 'CPU', 'CL'


@pytest.fixture(autouse=True)
def interpreter():
    with Context(DEV='PYTHON'): yield


@pytest.fixture(params=DEVICES)
def device(request):
    with Context(DEV=request.param): yield request.param


def memory(*values, **kw): return Tensor(list(values), **kw).contiguous().realize()


def equal(t, expected): np.testing.assert_allclose(t.numpy(), np.asarray(expected), rtol=1e-6)


def info(name): return KernelInfo(name=name)


# ---- kernels as users write them

def add_one(out):
    o, i = out.flatten(), UOp.range(out.numel(), 0)
    return o[i].store(o[i] + 1).end(i).sink(arg=info('add_one'))


def add(c, a, b):
    c, a, b = c.flatten(), a.flatten(), b.flatten()
    i = UOp.range(c.numel(), 0)
    return c[i].store(a[i] + b[i]).end(i).sink(arg=info('add'))


def double(out, x):
    i = UOp.range(out.numel(), 0)
    return out.flatten()[i].store(x.flatten()[i] * 2).end(i).sink(arg=info('double'))


def accumulate(out, x):
    i = UOp.range(out.numel(), 0)
    return out[i].store(out[i] * 2 + x[i]).end(i).sink(arg=info('accumulate'))


def swap(a, b):
    i = UOp.range(a.numel(), 0)
    return UOp.sink(a[i].store(b[i]).end(i), b[i].store(a[i]).end(i), arg=info('swap'))


def matmul(c, a, b):
    i, j = UOp.range(c.shape[0], 0), UOp.range(c.shape[1], 1)
    k = UOp.range(a.shape[1], 2, axis_type=AxisType.REDUCE)
    total = (a[i, k] * b[k, j]).reduce(k, arg=Ops.ADD)
    return c[i, j].store(total).end(i, j).sink(arg=info('matmul'))


TRIPLE = {
    'PYTHON': 'def triple(out, x):\n    out[:] = x * 3',
    'CPU': 'void triple(float* out, const float* x) { for (int i = 0; i < 4; i++) out[i] = x[i] * 3; }',
    'CL': '__kernel void triple(__global float* out, __global const float* x) '
          '{ int i = get_global_id(0); out[i] = x[i] * 3; }'}


def triple(device, k=3, outs=(0,), ins=(1,)):
    text, size = TRIPLE[device].replace('3', str(k)), (4,) if device == 'CL' else (1,)
    return lambda *args: UOp.program('triple', text, device, outs=outs, ins=ins, global_size=size)


# ---- a call that the frontend makes is a write everywhere

def test_M3_the_write_of_a_call_is_seen_by_every_stage():
    a, b, c = (memory(1, 2, 3, 4) for _ in range(3))
    before = [t.uop for t in (a, b, c)]
    Tensor.custom_kernel(a, b, c, fxn=add)
    assert [is_write(t.uop) for t in (a, b, c)] == [True, False, False]
    assert [t.uop for t in (b, c)] == before[1:]
    assert a.uop.op is Ops.AFTER and a.uop.src[0] is before[0]
    assert list(state.writes_of([a.uop])) == outcomes(a.uop.src[1]) == [a.uop]


def test_N1_loops_may_be_closed_one_by_one(device):
    def add_rows(out, x):
        i, j = UOp.range(3, 0), UOp.range(4, 1)
        return out[i, j].store(x[i, j] + i).end(j).end(i).sink(arg=info('add_rows'))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    out = Tensor.empty(3, 4)
    out.custom_kernel(Tensor(x), fxn=add_rows)
    np.testing.assert_array_equal(out.numpy(), x + np.arange(3)[:, None])


def test_N1_the_arguments_become_after_the_call(device):
    a, b = memory(1., 2), memory(3., 4)
    out = Tensor.empty(2)
    assert [out.custom_kernel(a, b, fxn=add)] == [[out, a, b]]
    call = out.uop.src[1]
    assert call.op is Ops.CALL and call.src[1:] == (out.cell.owned, a.uop, b.uop)
    equal(out, [4, 6])


def test_N1_inputs_are_staged_unless_they_are_whole_states():
    a = memory(1., 2, 3, 4)
    given = [a, a.reshape(2, 2), a + 1, a[::2], a[:2], a.detach(), Tensor([1., 2]), Tensor.ones(2)]
    ops = []
    for x in given:
        out = Tensor.empty(*x.shape)
        out.custom_kernel(x, fxn=double)
        ops.append(out.uop.src[1].src[2].base.op)
        equal(out, x.numpy() * 2)
    staged = Ops.STAGE
    assert ops == [Ops.BUFFER, Ops.BUFFER, staged, staged, staged, staged, Ops.AFTER, staged]


def test_E2_what_a_call_reads_is_stored_whole():
    x = memory(1., 2, 3)
    wide = x.reshape(1, 3).expand(50, 3)   # dead axes are written out for a call
    out = Tensor.empty(50, 3)
    out.custom_kernel(wide, fxn=double)
    equal(out, np.tile([2, 4, 6], (50, 1)))


# ---- order

def test_F2_readers_run_before_the_kernel_that_overwrites():
    x = memory(1., 2, 3, 4)
    y, s = x + 10, x.sum()
    x.custom_kernel(fxn=add_one)
    z = x * 2
    for t, want in ((x, [2, 3, 4, 5]), (y, [11, 12, 13, 14]), (s, 10), (z, [4, 6, 8, 10])): equal(t, want)


@pytest.mark.parametrize('order', itertools.permutations('xysz'))
def test_M7_in_whatever_order_somebody_looks(order):
    x = memory(1., 2, 3, 4)
    y, s = x + 10, x.sum()
    x.custom_kernel(fxn=add_one)
    z = x * 2
    got = {'x': x, 'y': y, 's': s, 'z': z}
    want = {'x': [2, 3, 4, 5], 'y': [11, 12, 13, 14], 's': 10, 'z': [4, 6, 8, 10]}
    for name in order: equal(got[name], want[name])


def test_N1_two_kernels_in_a_row_and_assignments_between(device):
    x, n = memory(1., 2), np.float32([1, 2])
    for k in range(3):
        x.custom_kernel(fxn=add_one); n += 1
        x.assign(x * 2); n *= 2
        x[0] = k; n[0] = k
    equal(x, n)


def test_N1_many_kernels_in_one_program_run_once_each():
    x, kept = memory(0., 0), []
    for _ in range(20):
        x.custom_kernel(fxn=add_one)
        kept.append(x + 0)
    Tensor.realize(*kept)
    for k, t in enumerate(kept): equal(t, [k + 1] * 2)


def test_M3_a_kernel_that_writes_two_buffers_runs_once():
    a, b = memory(1., 2), memory(3., 4)
    old = a.sum() + b.sum(), a * b
    a.custom_kernel(b, fxn=swap)
    GlobalCounters.reset()
    equal(a, [3, 4])          # brings about both
    assert b.uop.op is Ops.BUFFER
    equal(b, [1, 2]); equal(old[0], 10); equal(old[1], [3, 8])


def test_M3_when_the_other_buffer_of_a_kernel_has_moved_on():
    a, b = memory(1., 2), memory(3., 4)
    a.custom_kernel(b, fxn=swap)
    b.assign(b + 100)
    equal(a, [3, 4]); equal(b, [101, 102])


def test_M3_when_one_of_two_written_tensors_is_gone():
    a, b = memory(1., 2), memory(3., 4)
    a.custom_kernel(b, fxn=swap)
    del b
    equal(a, [3, 4])


def test_M3_a_pending_kernel_that_reads_what_is_overwritten_joins():
    a, b = memory(1., 2), memory(10., 20)
    b.custom_kernel(a, fxn=accumulate)
    a.assign(a * 0)
    a.realize()
    equal(b, [21, 42]); equal(a, [0, 0])


def test_M3_crossing_kernels_need_a_saved_copy():
    a, b = memory(1., 2), memory(10., 20)
    old = a + 0
    a.custom_kernel(b, fxn=accumulate)
    b.custom_kernel(old, fxn=accumulate)
    Tensor.realize(b, a)
    equal(a, [12, 24]); equal(b, [21, 42])


def test_F3_a_state_between_two_kernels_can_be_read():
    x = memory(1., 2)
    x.custom_kernel(fxn=add_one)
    mid = x.sum()
    x.custom_kernel(fxn=add_one)
    last = x.sum()
    assert (last.item(), mid.item()) == (7, 5)


# ---- aliases

def test_N1_one_tensor_given_twice_reads_as_it_was(device):
    def reverse(out, x):
        i = UOp.range(out.numel(), 0)
        return out[i].store(x[out.numel() - 1 - i]).end(i).sink(arg=info('reverse'))
    x, n = memory(*map(float, range(301))), np.arange(301)     # long: what is loaded at once is not all of it
    x.custom_kernel(x, fxn=reverse)
    equal(x, n[::-1])
    x.custom_kernel(x.reshape(7, 43).reshape(301), fxn=reverse)
    equal(x, n)


@pytest.mark.parametrize('part', [np.s_[1:3], np.s_[::2], np.s_[::-1], np.s_[2:]])
def test_M2_a_kernel_that_writes_a_view_writes_its_base(part, device):
    x, n = memory(1., 2, 3, 4), np.float32([1, 2, 3, 4])
    seen, old = x.reshape(2, 2), x * 1
    x[part].custom_kernel(fxn=add_one)
    n[part] += 1
    equal(x, n); equal(seen, n.reshape(2, 2)); equal(old, [1, 2, 3, 4])


def test_N1_a_view_is_read_while_another_is_written():
    x = memory(1., 2, 3, 4)
    x[:2].custom_kernel(x[1:3], fxn=accumulate)
    equal(x, [1 * 2 + 2, 2 * 2 + 3, 3, 4])


def test_N1_views_of_all_of_a_tensor_are_written_where_they_are():
    x = memory(1., 2, 3, 4)
    x.reshape(2, 2).custom_kernel(fxn=add_one)
    assert x.uop.src[1].op is Ops.CALL
    equal(x, [2, 3, 4, 5])


def test_M8_a_kernel_never_writes_storage_of_another():
    x = memory(1., 2)
    y = x.contiguous()          # shares the storage until somebody writes
    y.realize()
    y.custom_kernel(fxn=add_one)
    equal(x, [1, 2]); equal(y, [2, 3])
    a, b = Tensor.zeros(2), Tensor.zeros(2)
    a.custom_kernel(fxn=add_one)
    equal(a, [1, 1]); equal(b, [0, 0])


def test_M4_writing_a_value_that_was_never_computed(device):
    x = memory(1., 2, 3, 4)
    y = x * 2
    y[1:3].custom_kernel(fxn=add_one)
    y.custom_kernel(fxn=add_one)
    equal(y, [3, 6, 8, 9]); equal(x, [1, 2, 3, 4])


def test_A2_an_input_from_the_host_is_copied_once():
    x, out = Tensor([1., 2]), Tensor.empty(2)
    out.custom_kernel(x, fxn=double)
    linear = Tensor.schedule_linear(out, x)
    assert sched_stats(linear)['copies'] == 1 and sched_stats(linear)['kernels'] == 1
    run_linear(linear)
    equal(out, [2, 4]); equal(x, [1, 2])


# ---- devices, shapes, types

@pytest.mark.parametrize('n', [1, 3, 64, 1000, 70_001])
def test_N1_sizes_with_remainders_on_every_device(n, device):
    x = np.arange(n, dtype=np.float32)
    out = Tensor.empty(n).custom_kernel(Tensor(x), Tensor(x + 1), fxn=add)[0]
    np.testing.assert_array_equal(out.numpy(), x + x + 1)


def test_N1_a_reduction_in_a_kernel(device):
    r = np.random.default_rng(0)
    a, b = (r.standard_normal(s).astype(np.float32) for s in ((17, 33), (33, 9)))
    c = Tensor.empty(17, 9).custom_kernel(Tensor(a), Tensor(b), fxn=matmul)[0]
    np.testing.assert_allclose(c.numpy(), a @ b, rtol=1e-4, atol=1e-5)


def test_N1_two_results_with_different_loops(device):
    def sums(rows, columns, x):
        i, j, k, m_ = (UOp.range(s, r) for r, s in enumerate((*x.shape, x.shape[1], x.shape[0])))
        return UOp.sink(rows[i].store(x[i, k].reduce(k, arg=Ops.ADD)).end(i),
                        columns[j].store(x[m_, j].reduce(m_, arg=Ops.ADD)).end(j), arg=info('sums'))
    x = np.random.default_rng(1).standard_normal((300, 200)).astype(np.float32)
    rows, columns, _ = Tensor.custom_kernel(Tensor.empty(300), Tensor.empty(200), Tensor(x), fxn=sums)
    np.testing.assert_allclose(rows.numpy(), x.sum(1), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(columns.numpy(), x.sum(0), rtol=1e-3, atol=1e-3)


def test_N1_two_loops_that_update_in_place_run_once(device):
    def both(a, b):
        i, j = UOp.range(a.numel(), 0), UOp.range(b.numel(), 1)
        return UOp.sink(a[i].store(a[i] + 1).end(i), b[j].store(b[j] * 3).end(j), arg=info('both'))
    a, b = np.ones(1 << 17, np.float32), np.full(300_000, 2, np.float32)
    x, y = Tensor.custom_kernel(Tensor(a), Tensor(b), fxn=both)
    np.testing.assert_array_equal(x.numpy(), a + 1)
    np.testing.assert_array_equal(y.numpy(), b * 3)


def test_N1_a_gate_and_a_pad_keep_memory_untouched(device):
    def before(out, x):
        i = UOp.range(4, 0)
        gated = (i < 1).where(out.const_like(-1), x.index(i - 1, 0 < i))
        padded = x.pad(((1, 0),))[i] + x[i:i + 1].reshape(()) * 0
        return out[i].store(gated + padded).end(i).sink(arg=info('before'))
    out = Tensor.empty(4).custom_kernel(memory(1., 2, 3, 4), fxn=before)[0]
    equal(out, [-1, 2, 4, 6])


def test_N1_an_index_from_memory(device):
    def pick(out, x, at):
        i = UOp.range(3, 0)
        j = at[i].cast(dtypes.index)
        return out[i].store(x.index(j, (j < 4) & (-1 < j))).end(i).sink(arg=info('pick'))
    out = Tensor.empty(3).custom_kernel(memory(10., 20, 30, 40), memory(3, 0, 99), fxn=pick)[0]
    equal(out, [40, 10, 0])   # outside, the gate is shut


@pytest.mark.parametrize('name', ['int8', 'uint8', 'int64', 'bool', 'float16', 'float64', 'bfloat16'])
def test_N1_every_dtype_is_passed(name, device):
    dt = getattr(dtypes, name)
    if device == 'CL' and dt is dtypes.float64 and not Device['CL'].limits.float64: return
    def copy(out, x):
        i = UOp.range(3, 0)
        return out[i].store(x[i]).end(i).sink(arg=info('copy'))
    x = Tensor([0, 1, 1], dtype=dt)
    assert Tensor.empty(3, dtype=dt).custom_kernel(x, fxn=copy)[0].tolist() == x.tolist()


def test_N1_a_tensor_without_axes(device):
    def count(total, x):
        k = UOp.range(x.numel(), 0)
        return total.store(x[k].reduce(k, arg=Ops.ADD)).sink(arg=info('count'))
    assert Tensor.empty(()).custom_kernel(memory(1., 2, 3), fxn=count)[0].item() == 6


def test_E11_a_loop_that_ends_at_a_variable(device):
    n, x = Variable('n', 1, 4), memory(1., 2, 3, 4)
    def head(bound):
        def fxn(total, x):
            k = UOp.range(bound, 0)
            return total[0].store(x[k].reduce(k, arg=Ops.ADD)).sink(arg=info('head'))
        return fxn
    Tensor.empty(1).custom_kernel(x, fxn=head(n.bind(2)))[0].realize()
    misses = schedule_cache.misses
    for k in (1, 3, 4): assert Tensor.empty(1).custom_kernel(x, fxn=head(n.bind(k)))[0].item() == [1, 3, 6, 10][k - 1]
    assert schedule_cache.misses == misses


def test_I2_two_values_of_a_variable_in_one_program():
    n, x = Variable('n', 1, 4), memory(1., 2, 3, 4)
    def head(total, x, bound):
        k = UOp.range(bound, 0)
        return total[0].store(x[k].reduce(k, arg=Ops.ADD)).sink(arg=info('head'))
    two = [Tensor.empty(1).custom_kernel(x, fxn=lambda t, x, k=k: head(t, x, n.bind(k)))[0] for k in (2, 3)]
    equal(two[0] * 10 + two[1], [36])


def test_A5_nothing_happens_to_arguments_of_size_zero():
    def never(*args): raise AssertionError('asked to write a kernel for nothing')
    a, b = Tensor.empty(0, 3), Tensor.empty(0, 3)
    assert a.custom_kernel(b, fxn=never) == [a, b] and a.numpy().shape == (0, 3)
    with pytest.raises(ValueError, match='argument 1 has size 0'): Tensor.empty(3).custom_kernel(a, fxn=double)


# ---- cache

def test_B7_the_body_is_in_the_key():
    "Trap L01: two kernels of the same shapes"
    def by(k):
        def fxn(out, x):
            i = UOp.range(out.numel(), 0)
            return out[i].store(x[i] * k).end(i).sink(arg=info('by'))
        return fxn
    x = memory(1., 2)
    for k in (2, 3, 2.5): equal(Tensor.empty(2).custom_kernel(x, fxn=by(k))[0], np.float32([1, 2]) * k)


def test_B7_the_text_of_a_program_is_in_the_key(device):
    x = memory(1., 2, 3, 4)
    for k in (3, 5, 7):
        fxn = triple(device, k)
        equal(Tensor.empty(4).custom_kernel(x, fxn=fxn)[0], np.float32([1, 2, 3, 4]) * k)


def test_B7_aliasing_declared_slots_and_names_are_in_the_key():
    places = [UOp.param(i, dtypes.float32, (4,)) for i in range(2)]
    def key(name='f', outs=(0,), ins=(1,), args=(0, 1), source='def f(o, x): pass'):
        body = UOp.program(name, source, 'PYTHON', outs=outs, ins=ins).replace(src=tuple(places))
        buffers = [UOp.buffer('PYTHON', (4,), dtypes.float32) for _ in range(2)]
        call = body.call(*(buffers[i] for i in args))
        return canonical(UOp.sink(buffers[0].after(call))).key
    assert key() == key()
    assert len({key(), key(name='g'), key(ins=(0, 1)), key(args=(0, 0)), key(source='def f(o, x): o[:] = x')}) == 5


def test_B7_one_schedule_and_one_compile_for_other_buffers(device):
    def once():
        a = memory(1., 2, 3)
        return (Tensor.empty(3).custom_kernel(a + 1, a, fxn=add)[0] * 2).sum().item()
    assert once() == 30
    misses, known = schedule_cache.misses, {f: set(t) for f, t in runtime.programs.items()}
    for _ in range(3): once()
    assert schedule_cache.misses == misses
    assert {f: set(t) for f, t in runtime.programs.items()} == known


def test_E9_equal_kernels_are_compiled_once():
    "Other range numbers, an unused argument, a name: the same kernel"
    def first(out, x):
        i = UOp.range(5, 0)
        return out[i].store(x[i] + 3).end(i).sink(arg=info('first'))
    def second(unused, out, x):
        i = UOp.range(5, 17)
        return out[i].store(x[i] + 3).end(i).sink(arg=info('second'))
    x = memory(1., 2, 3, 4, 5)
    a, b = Tensor.empty(5), Tensor.empty(5)
    a.custom_kernel(x, fxn=first)
    x.custom_kernel(b, x, fxn=second)
    linear = Tensor.schedule_linear(a, b)
    assert len({c.src[0].key for c in linear.src}) == 1 and [len(c.src) for c in linear.src] == [3, 3]
    run_linear(linear)
    equal(a, [4, 5, 6, 7, 8]); equal(b, [4, 5, 6, 7, 8])


@pytest.mark.parametrize('scache', [0, 1])
def test_C2_with_and_without_the_schedule_cache(scache):
    with Context(SCACHE=scache):
        for k in range(3):
            x = memory(1., k)
            equal(Tensor.empty(2).custom_kernel(x * 2, fxn=double)[0], [4, 4 * k])


def test_I5_a_captured_custom_kernel_is_replayed_on_other_buffers(device):
    calls = []
    def step(w, x):
        def fxn(out, x): return calls.append(1) or accumulate(out, x)
        w.custom_kernel(x + 1, fxn=fxn)
        return (w * 2).realize()
    f, w, n = TinyJit(step), memory(1., 2), np.float32([1, 2])
    for k in range(5):
        got = f(w, memory(float(k), 1.))
        n = n * 2 + np.float32([k, 1]) + 1
        equal(got, n * 2); equal(w, n)
    assert len(calls) == 2   # seen once, captured once


def test_C3_a_schedule_with_somebodys_text_is_never_written_to_disk(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    schedule_cache.clear()
    with Context(SCACHE=2):
        Tensor.empty(4).custom_kernel(memory(1., 2, 3, 4), fxn=triple('PYTHON'))[0].realize()
        assert not any(b'def triple' in f.read_bytes() for f in tmp_path.rglob('*') if f.is_file())
        for _ in range(2):
            schedule_cache.clear()
            equal(Tensor.empty(2).custom_kernel(memory(1., 2), fxn=double)[0], [2, 4])


def test_C6_entries_hold_neither_gradients_nor_memory():
    schedule_cache.clear()
    out = Tensor.empty(2).custom_kernel(memory(1., 2), fxn=double, grad_fxn=lambda g, call: (None, g * 2))[0]
    out.realize()
    nodes = [u for linear in schedule_cache.entries.values() for u in linear.toposort()]
    assert all(u.arg.grad_fxn is None for u in nodes if u.op is Ops.CALL)
    assert not any(u.op is Ops.BUFFER for u in nodes)


def test_K2_temporaries_of_custom_kernels_are_planned():
    x = memory(*map(float, range(256)))
    y = x
    for _ in range(4): y = Tensor.empty(256).custom_kernel(y * 2 + 1, y + 1, fxn=add)[0].contiguous()
    with Context(NO_MEMORY_PLANNER=1): want = (y + 0).numpy()
    y = x
    for _ in range(4): y = Tensor.empty(256).custom_kernel(y * 2 + 1, y + 1, fxn=add)[0].contiguous()
    linear = y.schedule_linear()
    stats = sched_stats(linear)
    assert 0 < stats['tmp_after'] < stats['tmp_before']
    run_linear(linear)
    np.testing.assert_array_equal(y.numpy(), want)


# ---- gradients

def backward_matmul(gradient, call):
    _, a, b = call.src[1:]
    return None, Tensor(gradient) @ Tensor(b).T, (Tensor(a).T @ Tensor(gradient)).uop


def test_N1_the_gradient_comes_from_grad_fxn(device):
    r = np.random.default_rng(0)
    a, b = (Tensor(r.standard_normal(s).astype(np.float32), requires_grad=True) for s in ((3, 5), (5, 4)))
    c = Tensor.empty(3, 4).custom_kernel(a * 2, b, fxn=matmul, grad_fxn=backward_matmul)[0]
    loss = (c * c).sum()
    loss.backward()
    A, B = a.numpy(), b.numpy()
    G = 2 * (2 * A @ B)
    np.testing.assert_allclose(a.grad.numpy(), 2 * G @ B.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(b.grad.numpy(), (2 * A).T @ G, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(c.numpy(), 2 * A @ B, rtol=1e-4, atol=1e-5)


def test_N1_a_kernel_used_twice_and_in_a_chain_adds_its_gradients():
    x = memory(1., 2, 3).requires_grad_()
    grad = lambda g, call: (None, g * 2)
    y = Tensor.empty(3).custom_kernel(x, fxn=double, grad_fxn=grad)[0]
    z = Tensor.empty(3).custom_kernel(y, fxn=double, grad_fxn=grad)[0]
    (y.sum() + z.sum() * 10 + x.sum()).backward()
    equal(x.grad, [1 + 2 + 40] * 3)


def test_N1_an_update_in_place_hands_gradients_to_the_old_state():
    w, x = memory(1., 2).requires_grad_(), memory(3., 4).requires_grad_()
    y = w * 1
    y.custom_kernel(x, fxn=accumulate, grad_fxn=lambda g, call: (g * 2, g))
    (y * y).sum().backward()
    g = 2 * (np.float32([1, 2]) * 2 + np.float32([3, 4]))
    equal(w.grad, g * 2); equal(x.grad, g)


@pytest.mark.parametrize('used', ['first', 'second', 'both'])
def test_N1_two_results_have_a_gradient_each(used):
    def split(s, p, x):
        i = UOp.range(2, 0)
        return UOp.sink(s[i].store(x[i] + 1).end(i), p[i].store(x[i] * 3).end(i), arg=info('split'))
    def grad(*gradients, call):
        return None, None, gradients[0] + gradients[1] * 3
    def one(g, call): return None, None, g if used == 'first' else g * 3
    x = memory(1., 2).requires_grad_()
    s, p, _ = Tensor.custom_kernel(Tensor.empty(2), Tensor.empty(2), x, fxn=split,
                                   grad_fxn=grad if used == 'both' else one)
    {'first': s.sum(), 'second': p.sum(), 'both': s.sum() + p.sum() * 10}[used].backward()
    equal(x.grad, [{'first': 1, 'second': 3, 'both': 31}[used]] * 2)


def test_N1_a_view_that_is_copied_back_keeps_its_gradient():
    x = memory(1., 2, 3, 4).requires_grad_()
    y = x * 5
    y[1:3].custom_kernel(fxn=add_one, grad_fxn=lambda g, call: (g * 7,))
    y.sum().backward()
    equal(x.grad, [5, 35, 35, 5])


def test_N1_without_grad_fxn_a_gradient_is_an_error():
    x = memory(1., 2).requires_grad_()
    y = Tensor.empty(2).custom_kernel(x, fxn=double)[0]
    with pytest.raises(RuntimeError, match='custom kernel double, which has no grad_fxn'): (y.sum() + x.sum()).backward()
    z = Tensor.empty(2).custom_kernel(x.detach(), fxn=double)[0]
    (z.sum() + x.sum()).backward()
    equal(x.grad, [1, 1])


@pytest.mark.parametrize('answer, message', [((None,), 'gave 1 gradients; wanted one for each of 2'),
                                             ((None, Tensor.ones(3)), 'gradient 1 has shape'),
                                             ((None, Tensor.ones(2)), '')])
def test_N1_what_grad_fxn_gives_is_checked(answer, message):
    x = memory(1., 2).requires_grad_()
    y = Tensor.empty(2).custom_kernel(x, fxn=double, grad_fxn=lambda g, call: answer)[0]
    if not message: return y.sum().backward()
    with pytest.raises(ValueError, match=message): y.sum().backward()
    equal(y, [2, 4])


# ---- programs: text for a device

def test_G4_a_program_keeps_its_arguments_as_they_are(device):
    x, out = memory(1., 2, 3, 4), Tensor.empty(4)
    out.custom_kernel(x + 1, fxn=triple(device))
    linear = out.schedule_linear()
    call = linear.src[-1]
    assert call.src[0].op is Ops.PROGRAM and call.src[1].storage is out.uop.storage and len(call.src) == 3
    run_linear(linear)
    equal(out, [6, 9, 12, 15])


def test_G4_arguments_that_are_equal_or_never_used_stay(device):
    text = {'PYTHON': 'def f(out, a, unused, b): out[:] = a + b',
            'CPU': 'void f(float* out, float* a, float* u, float* b) { for (int i = 0; i < 2; i++) out[i] = a[i] + b[i]; }',
            'CL': '__kernel void f(__global float* out, __global float* a, __global float* u, __global float* b) '
                  '{ int i = get_global_id(0); out[i] = a[i] + b[i]; }'}[device]
    size = (2,) if device == 'CL' else (1,)
    a, out = memory(1., 2), Tensor.empty(2)
    fxn = lambda *_: UOp.program('f', text, device, outs=(0,), global_size=size)
    out.custom_kernel(a, memory(9., 9), a, fxn=fxn)
    linear = out.schedule_linear()
    assert [len(c.src) for c in linear.src] == [5]
    run_linear(linear)
    equal(out, [2, 4])


def test_N1_a_program_among_kernels_and_assignments(device):
    x, n = memory(1., 2, 3, 4), np.float32([1, 2, 3, 4])
    for _ in range(2):
        old = x + 1
        x.custom_kernel(x * 2, fxn=triple(device)); n = n * 6
        x += 1; n += 1
        equal(old, (n - 1) / 6 + 1)
        x[1:3] = 0; n[1:3] = 0
    equal(x, n)


def test_N1_a_program_that_declares_nothing_reads_and_writes_all():
    def both(a, b): return UOp.program('f', 'def f(a, b):\n    a[:], b[:] = b.copy(), a.copy()', 'PYTHON')
    a, b = memory(1., 2), memory(3., 4)
    old = a + b
    a.custom_kernel(b, fxn=both)
    assert access(a.uop.src[1].src[0]) == ({0, 1}, {0, 1})
    equal(b, [1, 2]); equal(a, [3, 4]); equal(old, [4, 6])
    with pytest.raises(ValueError, match='are one tensor, and the kernel writes both'): a.custom_kernel(a, fxn=both)


def test_N1_a_program_reads_a_planned_temporary(device):
    "Arguments that begin inside an arena"
    x = memory(1., 2, 3, 4)
    outs = [Tensor.empty(4).custom_kernel((x + k).contiguous() * 2, fxn=triple(device))[0] for k in range(3)]
    total = outs[0] + outs[1] + outs[2]
    equal(total, 3 * 2 * (3 * np.float32([1, 2, 3, 4]) + 3))


def test_L3_programs_are_counted_and_have_their_name():
    out = Tensor.empty(4).custom_kernel(memory(1., 2, 3, 4), fxn=triple('PYTHON'))[0]
    linear = out.schedule_linear()
    assert sched_stats(linear)['kernels'] == 1 and sched_stats(linear)['copies'] == 0
    GlobalCounters.reset()
    run_linear(linear)
    assert (GlobalCounters.kernel_count, GlobalCounters.global_mem) == (1, 32)
    assert runtime.programs[runtime.family(Device['PYTHON'])][linear.src[0].src[0].key].name == 'triple'


def test_N1_two_programs_may_use_one_name(device):
    if device == 'PYTHON': text = 'def f(x): x += {}'
    elif device == 'CPU': text = 'static int k = {}; void f(float* x) {{ x[0] += k; }}'
    else: text = '__kernel void f(__global float* x) {{ x[0] += {}; }}'
    x = memory(0.)
    for k in (1, 10): x.custom_kernel(fxn=lambda _, k=k: UOp.program('f', text.format(k), device))
    equal(x, [11])


# ---- errors

def broken(kind):
    "A function that writes a wrong body"
    def fxn(out, x):
        i, j = UOp.range(4, 0), UOp.range(4, 1)
        name = info('wrong')
        return {
            'open': lambda: out[i].store(x[j]).end(i).sink(arg=name),
            'nowhere': lambda: (x[i] + 1).store(x[i]).end(i).sink(arg=name),
            'slot': lambda: UOp.param(5, dtypes.float32, (4,))[i].store(x[i]).end(i).sink(arg=name),
            'shape': lambda: UOp.param(0, dtypes.float32, (8,))[i].store(x[i]).end(i).sink(arg=name),
            'dtype': lambda: out[i].store(x[i].cast(dtypes.int32)).end(i).sink(arg=name),
            'array': lambda: out.store(x + 1).sink(arg=name),
            'tensor': lambda: out[i].store(memory(1., 2, 3, 4).uop[i]).end(i).sink(arg=name),
            'hazard': lambda: out[i].store(out[3 - i] + x[i]).end(i).sink(arg=name),
            'two loops': lambda: UOp.sink(out[i].store(x[i]).end(i), x[j].store(out[j]).end(j), arg=name),
            'both ways': lambda: out[i].store(x[i].reduce(i, arg=Ops.ADD)).end(i).sink(arg=name),
            'triangle': lambda: out[i].store(x[k := UOp.range(i + 1, 2)].reduce(k, arg=Ops.ADD)).end(i).sink(arg=name),
            'numbers': lambda: out.reshape(2, 2).index(i).store(x[i]).end(i).sink(arg=name),
            'nothing': lambda: UOp.sink(arg=name),
            'no sink': lambda: out[i].store(x[i]).end(i),
            'no body': lambda: None,
            'operation': lambda: out[i].store(x[j].reduce(j, arg=Ops.SUB)).end(i).sink(arg=name)}[kind]()
    return fxn


@pytest.mark.parametrize('kind, error, message', [
    ('open', SpecError, r'open loop: RANGE index \(1'), ('nowhere', SpecError, 'does not allow STORE'),
    ('slot', ValueError, 'mentions argument 5'), ('shape', ValueError, r'argument 0, float32 of shape \(8,\)'),
    ('dtype', SpecError, 'one value of the same dtype'), ('array', SpecError, 'does not allow'),
    ('tensor', SpecError, 'does not allow BUFFER'), ('hazard', ValueError, 'reads it at another index'),
    ('two loops', ValueError, 'reads it at another index'), ('both ways', ValueError, 'make two ranges'),
    ('triangle', ValueError, 'depends on another range'), ('numbers', IndexError, 'wanted one per axis'),
    ('nothing', ValueError, 'writes no argument'), ('no sink', TypeError, r'fxn returned END.*\.sink\('),
    ('no body', TypeError, 'fxn returned NoneType'), ('operation', SpecError, 'names ADD, MUL or MAX')])
def test_C4_a_wrong_body_is_named_and_nothing_is_lost(kind, error, message):
    out, x = memory(1., 2, 3, 4), memory(5., 6, 7, 8)
    states = [t.uop for t in (out, x)]
    with pytest.raises(error, match=message): out.custom_kernel(x, fxn=broken(kind))
    assert [t.uop for t in (out, x)] == states
    equal(out, [1, 2, 3, 4])


def program_error(**kw):
    given = dict(name='f', source='def f(a, b): pass', kind='PYTHON') | kw
    return lambda a, b: UOp.program(**given)


@pytest.mark.parametrize('kw, message', [
    (dict(name='f(); evil'), 'cannot be the name'), (dict(name='for'), 'cannot be the name'), (dict(name='naïve'), 'cannot'),
    (dict(kind='CL'), 'is for CL, but its arguments are on PYTHON'), (dict(outs=(2,)), r'declares arguments \(2,\); it has 2'),
    (dict(outs=(0,), ins=()), 'neither reads nor writes argument 1'), (dict(outs=()), 'writes no argument')])
def test_N1_a_wrong_program_is_refused_at_once(kw, message):
    with pytest.raises(ValueError, match=message): memory(1., 2).custom_kernel(memory(3., 4), fxn=program_error(**kw))


def test_N1_a_text_that_does_not_compile_is_shown_and_nothing_is_lost(device):
    text = {'PYTHON': 'def f(x): ][', 'CPU': 'void f(float* x) { oops }', 'CL': '__kernel void f(__global float* x) { oops }'}
    x = memory(1., 2)
    y = x + 1
    x.custom_kernel(fxn=lambda _: UOp.program('f', text[device], device))
    with pytest.raises((RuntimeError, SyntaxError)) as e: x.numpy()
    equal(y, [2, 3])
    if device == 'PYTHON': return    # Python says it all: file, line and text
    place = pathlib.Path(str(e.value).split()[-1])
    assert 'oops' in str(e.value) and text[device] in place.read_text() and 'error' in place.read_text()
    place.unlink()


def test_N1_a_text_without_its_function_is_refused(device):
    text = {'PYTHON': 'def g(x): pass', 'CPU': 'void g(float* x) {}', 'CL': '__kernel void g(__global float* x) {}'}
    x = memory(1., 2).custom_kernel(fxn=lambda _: UOp.program('f', text[device], device))[0]
    with pytest.raises(RuntimeError, match='program f: its text defines no'): x.numpy()


def test_N1_arguments_are_checked():
    x = memory(1., 2)
    with pytest.raises(TypeError, match='argument 1 is a list; wanted a Tensor'): x.custom_kernel([1, 2], fxn=double)
    with pytest.raises(RuntimeError, match='wanted one place'): x.custom_kernel(memory(1., 2, device='CPU'), fxn=double)
    with pytest.raises(ValueError, match='argument 1 has shape'):
        x.custom_kernel(memory(1., 2, 3)[:Variable('n', 1, 3).bind(2)], fxn=double)
    with pytest.raises(TypeError): x.custom_kernel(x, fxn=add)
    with pytest.raises(ValueError, match='several elements share one place'):
        x.reshape(1, 2).expand(3, 2).custom_kernel(fxn=add_one)
    def two(a, b): return UOp.sink(*add_one(a).src, *add_one(b).src, arg=info('two'))
    with pytest.raises(ValueError, match='arguments 0 and 1 are one tensor'): x.custom_kernel(x[:1], fxn=two)
    equal(x, [1, 2])


def test_N1_more_arguments_than_the_device_takes():
    most = Device['PYTHON'].limits.max_args
    def many(*args): raise AssertionError('not asked')
    x = memory(1.)
    with pytest.raises(ValueError, match=f'{most + 1} arguments; PYTHON takes {most}'):
        x.custom_kernel(*[x] * most, fxn=many)


def test_M10_a_program_that_always_fails_does_not_stop_everything_else():
    def crash(x): return UOp.program('crash', 'def crash(x): raise OSError("no such file")', 'PYTHON')
    a, b = memory(1., 2), memory(3., 4)
    old = a + 10
    a.custom_kernel(fxn=crash)
    with pytest.raises(OSError, match='no such file'): a.numpy()
    with pytest.raises(OSError, match='no such file'): b.sum().item()   # what is owed is tried once more
    equal(b, [3, 4]); equal(b * 2, [6, 8]); equal(old, [11, 12])
    with pytest.raises(RuntimeError, match='is lost'): a.numpy()


@pytest.mark.parametrize('part', [np.s_[:], np.s_[:2]])
def test_M10_schedules_run_in_another_order_than_they_were_made(part):
    x = memory(0., 0, 0)
    x[part].assign(Tensor.full(x[part].shape, 1.0)); first = x.schedule_linear()
    x[part].assign(Tensor.full(x[part].shape, 2.0)); second = x.schedule_linear()
    with pytest.raises(RuntimeError, match='in the order in which they were made|never run'):
        run_linear(second); run_linear(first)


# ---- random programs

def random_kernel(rng, n):
    "A kernel that updates its first argument from others, and the same in NumPy"
    k, flip, m = rng.randint(1, 5), rng.random() < .5, rng.randint(0, 2)
    def fxn(out, *ins):
        i = UOp.range(n, rng.randint(0, 3))
        value = out[i] * k
        for x in ins: value = value + (x[n - 1 - i] if flip else x[i])
        return out[i].store(value).end(i).sink(arg=info('random'))
    def numpy(out, *ins): return out * k + sum((x[::-1] if flip else x for x in ins), np.zeros_like(out))
    return m, fxn, numpy


def random_source(rng, device, n):
    "The same as text for a device"
    k = rng.randint(1, 5)
    text = {'PYTHON': f'def f(o, x): o[:] = o * {k} + x',
            'CPU': f'void f(int* o, int* x) {{ for (int i = 0; i < {n}; i++) o[i] = o[i] * {k} + x[i]; }}',
            'CL': f'__kernel void f(__global int* o, __global int* x) '
                  f'{{ int i = get_global_id(0); o[i] = o[i] * {k} + x[i]; }}'}[device]
    fxn = lambda o, x: UOp.program('f', text, device, outs=(0,), ins=(0, 1),
                                   global_size=(n,) if device == 'CL' else (1,))
    return 1, fxn, lambda o, x: o * k + x


class Program:
    "Tensors beside the arrays that NumPy has: views are views on both sides"
    def __init__(self, rng, device):
        self.rng, self.device, self.pairs = rng, device, []
        for _ in range(2): self.fresh(np.arange(8, dtype=np.int32) * rng.randint(1, 9))

    def fresh(self, array): self.pairs.append((Tensor(array.copy()), array.copy()))
    def pick(self, n=None):
        return self.rng.choice([p for p in self.pairs if n is None or len(p[1]) == n] or [self.pairs[0]])

    def view(self):
        t, a = self.pick()
        if len(a) < 4: return
        lo = self.rng.randint(0, 2)
        part = self.rng.choice([np.s_[lo:lo + len(a) - 2], np.s_[::-1], np.s_[:]])
        self.pairs.append((t[part], a[part]))

    def compute(self):
        (t, a), k = self.pick(), self.rng.randint(1, 9)
        s, b = self.pick(len(a))
        self.pairs.append((t * k + s, a * k + b))

    def assign(self):
        t, a = self.pick()
        s, b = self.pick(len(a))
        if len(a) != len(b): return
        t.assign(s + 1)
        a[...] = b + 1

    def custom(self):
        t, a = self.pick()
        source = self.rng.random() < .3
        m, fxn, numpy = random_source(self.rng, self.device, len(a)) if source else random_kernel(self.rng, len(a))
        others = [self.pick(len(a)) for _ in range(m)]
        if any(len(b) != len(a) for _, b in others): return
        t.custom_kernel(*(s for s, _ in others), fxn=fxn)
        a[...] = numpy(a.copy(), *(b.copy() for _, b in others))

    def look(self):
        t, a = self.pick()
        np.testing.assert_array_equal(t.numpy(), a)

    def forget(self):
        if len(self.pairs) > 4: self.pairs.pop(self.rng.randrange(len(self.pairs)))

    def run(self, steps=12):
        actions = [self.view, self.compute, self.assign, self.custom, self.custom, self.custom, self.look, self.forget]
        for _ in range(steps): self.rng.choice(actions)()
        self.rng.shuffle(self.pairs)
        for t, a in self.pairs: np.testing.assert_array_equal(t.numpy(), a)


@pytest.mark.parametrize('device, programs', [('PYTHON', 250), ('CPU', 40), ('CL', 25)])
def test_M7_random_programs_with_custom_kernels(device, programs):
    with Context(DEV=device):
        for seed in range(programs): Program(random.Random(seed), device).run()
