"""Rules F of the scheduler: the order of kernels."""
import random

import numpy as np
import pytest

from effort import effort
from tinysched.frontend.tensor import Tensor
from tinysched.ir.dtype import dtypes
from tinysched.ir.uop import KernelInfo, Sharding, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.schedule.linearize import access, buffer_args, create_schedule, dependencies, save_overtaken

F32 = dtypes.float32


def buf(n=4, device='CPU'): return UOp.buffer(device, (n,), F32)


def kernel(name, outs=1, ins=1, n=4, reads_out=False):
    "Each output becomes the sum of the inputs plus one, and plus itself if `reads_out`"
    r = UOp.range(n, 0)
    p = [UOp.param(i, F32, (n,)) for i in range(outs + ins)]
    value = UOp.const(F32, 1.0)
    for q in p[outs:]: value = value + q.index(r)
    stores = [q.index(r).store(value + q.index(r) if reads_out else value).end(r) for q in p[:outs]]
    return UOp(Ops.SINK, dtypes.void, tuple(stores), KernelInfo(name))


def bodies(linear): return [c.src[0].arg.name for c in linear.src]


def test_accesses_of_a_kernel():
    assert access(kernel('k', 2, 3)) == (frozenset({2, 3, 4}), frozenset({0, 1}))
    assert access(kernel('k', 1, 1, reads_out=True)) == (frozenset({0, 1}), frozenset({0}))


def test_F1_read_after_write():
    x, a, b = buf(), buf(), buf()
    a1 = a.after(kernel('first').call(a, x))
    b1 = b.after(kernel('second', 1, 2).call(b, a1, x))
    linear = create_schedule(b1.sink())
    assert linear.op is Ops.LINEAR and bodies(linear) == ['first', 'second']
    assert [(e.kind, e.buffer) for e in dependencies(b1.sink())] == [('raw', a)]


def test_F1_write_after_write():
    x, a = buf(), buf()
    a1 = a.after(kernel('first').call(a, x))
    a2 = a1.after(kernel('second').call(a1, x))
    assert bodies(create_schedule(a2.sink())) == ['first', 'second']
    assert [e.kind for e in dependencies(a2.sink())] == ['waw']


def test_F1_write_after_write_of_an_unnamed_state():
    x, a = buf(), buf()
    a1 = a.after(kernel('zzz').call(a, x))
    a2 = a1.after(kernel('aaa', 1, 0).call(a))       # names the buffer only, the AFTER says it comes later
    assert bodies(create_schedule(a2.sink())) == ['zzz', 'aaa']


def test_F1_through_ordering_afters():
    x, a, b, c = buf(), buf(), buf(), buf()
    b1 = b.after(kernel('effect').call(b, x))
    ordered = a.after(b1).after(x.after(b1))
    c1 = c.after(kernel('late').call(c, ordered))
    d = buf()
    d1 = d.after(kernel('first', 1, 0).call(d))
    assert bodies(create_schedule(c1.sink(b1))) == ['effect', 'late']
    assert bodies(create_schedule(c1.sink(d1))) == ['effect', 'first', 'late']


@pytest.mark.parametrize('reader_first', [True, False])
def test_F2_write_after_read(reader_first):
    x, y, z = buf(), buf(), buf()
    y1 = y.after(kernel('reader').call(y, x))
    x1 = x.after(kernel('writer').call(x, z))
    sink = UOp.sink(*((y1, x1) if reader_first else (x1, y1)))
    assert bodies(create_schedule(sink)) == ['reader', 'writer']
    assert [(e.kind, e.buffer) for e in dependencies(sink)] == [('war', x)]


def test_F2_ordering_supersedes_nothing():
    x, y, z = buf(), buf(), buf()
    z1 = z.after(kernel('other', 1, 0).call(z))
    y1 = y.after(kernel('reader').call(y, x))
    x1 = x.after(z1)
    assert {e.kind for e in dependencies(UOp.sink(x1, y1))} == {'order'}
    # a reader of the ordered state and one of the bare buffer read the same bytes: both precede the write
    w = buf()
    w1 = w.after(kernel('reader2').call(w, x1))
    x2 = x1.after(kernel('writer', 1, 0).call(x1))
    assert bodies(create_schedule(UOp.sink(x2, w1, y1)))[-1] == 'writer'
    assert {(e.before.src[0].arg.name, e.after.src[0].arg.name) for e in dependencies(UOp.sink(x2, w1, y1))
            if e.kind == 'war'} == {('reader', 'writer'), ('reader2', 'writer')}


def test_F2_a_kernel_does_not_wait_for_itself():
    x = buf()
    x1 = x.after(kernel('inc', 1, 0, reads_out=True).call(x))
    assert bodies(create_schedule(x1.sink())) == ['inc'] and dependencies(x1.sink()) == []


def test_F3_only_the_immediate_prior_state_is_superseded():
    x, y, z = buf(), buf(), buf()
    x1 = x.after(kernel('one', 1, 0).call(x))
    y1 = y.after(kernel('read1').call(y, x1))
    x2 = x1.after(kernel('two').call(x1, z))
    edges = {(e.before.src[0].arg.name, e.after.src[0].arg.name, e.kind) for e in dependencies(UOp.sink(x2, y1))}
    assert edges == {('one', 'read1', 'raw'), ('one', 'two', 'waw'), ('read1', 'two', 'war')}


def test_F3_a_kernel_of_the_prior_state_is_no_new_write():
    x, y, z = buf(), buf(), buf()
    k = kernel('k', 1, 0).call(x)
    x1 = x.after(k)
    y1 = y.after(kernel('reader').call(y, x1))
    z1 = z.after(kernel('other', 1, 0).call(z))
    x2 = x1.after(k, z1)                              # k again: ordering, it does not supersede x1
    assert bodies(create_schedule(UOp.sink(x2, y1))) == ['k', 'other', 'reader']
    assert 'war' not in {e.kind for e in dependencies(UOp.sink(x2, y1))}


def test_F3_reader_behind_the_superseder_is_an_error():
    x, y = buf(), buf()
    x1 = x.after(kernel('writer', 1, 0).call(x))
    y1 = y.after(kernel('reader', 1, 2).call(y, x, x1.after(x1)))
    with pytest.raises(RuntimeError, match='cycle'): create_schedule(UOp.sink(x1, y1))


def test_F4_end_around_a_call_is_that_call():
    x, y = buf(), buf()
    call = kernel('k').call(y, x)
    looped = call.end(UOp.range(2, 7))
    linear = create_schedule(UOp.sink(y.after(looped)))
    assert linear.src == (call,)


BOTH = Sharding(('CPU', 'CPU:1'))


def stack(*pieces): return UOp(Ops.MSTACK, F32, pieces)


def piece(state, i): return UOp(Ops.MSELECT, F32, (state,), i)


def edges_of(*states):
    "Names of two kernels, and why one runs before the other"
    return {(e.before.src[0].arg.name, e.after.src[0].arg.name, e.kind) for e in dependencies(UOp.sink(*states))}


@pytest.mark.parametrize('last', [0, 1])
@pytest.mark.parametrize('writer_first', [True, False])
def test_F4_a_stack_reads_the_states_of_all_devices(writer_first, last):
    x, z = [buf(device=d) for d in BOTH.devices], buf(device=BOTH)
    made = [x[i].after(kernel(f'make{i}', 1, 0).call(x[i])) for i in (0, 1)]
    read = z.after(kernel('reader').call(z, stack(*made)))
    over = made[last].after(kernel('writer', 1, 0).call(made[last]))
    both = (over, read) if writer_first else (read, over)
    assert edges_of(*both) == {('make0', 'reader', 'raw'), ('make1', 'reader', 'raw'),
                               (f'make{last}', 'writer', 'waw'), ('reader', 'writer', 'war')}
    linear = create_schedule(UOp.sink(*both))
    assert bodies(linear)[-2:] == ['reader', 'writer'] and linear.src[2].src[1:] == (z, stack(*x))


@pytest.mark.parametrize('writer_first', [True, False])
def test_F4_a_piece_that_is_read_is_read_before_its_state_is_superseded(writer_first):
    x, y = buf(device=BOTH), buf(device='CPU:1')
    made = x.after(kernel('make', 1, 0).call(x))
    read = y.after(kernel('reader').call(y, piece(made, 1)))
    for target in (made, piece(made, 1)):      # on all devices, or on that one
        over = made.after(kernel('writer', 1, 0).call(target))
        both = (over, read) if writer_first else (read, over)
        assert edges_of(*both) == {('make', 'reader', 'raw'), ('make', 'writer', 'waw'), ('reader', 'writer', 'war')}
        assert bodies(create_schedule(UOp.sink(*both))) == ['make', 'reader', 'writer']


@pytest.mark.parametrize('view', [lambda u: u, lambda u: u.shrink(((1, 3),)).reshape((2, 1))])
@pytest.mark.parametrize('last', [0, 1])
@pytest.mark.parametrize('writer_first', [True, False])
def test_F4_an_after_over_a_stack_supersedes_the_states_of_all_devices(writer_first, last, view):
    x, y = [buf(device=d) for d in BOTH.devices], buf(device=BOTH.devices[last])
    made = [x[i].after(kernel(f'make{i}', 1, 0).call(x[i])) for i in (0, 1)]
    read = y.after(kernel('reader').call(y, made[last]))
    target = view(stack(*made))
    over = target.after(kernel('writer', 1, 0).call(target))
    z = buf(device=BOTH)
    late = z.after(kernel('late').call(z, over))
    both = (late, read) if writer_first else (read, late)
    assert edges_of(*both) == {('make0', 'writer', 'waw'), ('make1', 'writer', 'waw'), ('writer', 'late', 'raw'),
                               (f'make{last}', 'reader', 'raw'), ('reader', 'writer', 'war')}
    linear = create_schedule(UOp.sink(*both))
    assert bodies(linear)[-2:] == ['writer', 'late'] and linear.src[-1].src[1:] == (z, view(stack(*x)))


@pytest.mark.parametrize('writer_first', [True, False])
def test_F4_an_after_over_a_piece_supersedes_its_state(writer_first):
    x, y, z = buf(device=BOTH), buf(device='CPU:1'), buf(device='CPU:1')
    read, over = y.after(kernel('reader').call(y, x)), piece(x, 1).after(kernel('writer', 1, 0).call(piece(x, 1)))
    late = z.after(kernel('late').call(z, buf(device='CPU:1').after(over)))     # it waits, and reads something else
    both = (over, read) if writer_first else (read, over)
    assert edges_of(*both) == {('reader', 'writer', 'war')}
    assert bodies(create_schedule(UOp.sink(late, *both))) == ['reader', 'writer', 'late']


def test_M3_a_reader_of_two_buffers_that_one_kernel_writes_reads_copies_of_both():
    a, b, z = buf(), buf(), buf()
    call = kernel('over', 2, 1).call(a, b, z)
    read = z.after(kernel('read', 1, 2).call(z, a, b))
    linear = create_schedule(save_overtaken(UOp.sink(a.after(call), b.after(call), read)))
    assert bodies(linear) == ['copy_4', 'copy_4', 'over', 'read']
    assert [c.src[2] for c in linear.src[:2]] == [a, b] and linear.src[3].src[2:] == tuple(c.src[1] for c in linear.src[:2])


def test_M3_what_no_order_serves_is_saved_on_all_devices():
    x, z = [buf(device=d) for d in BOTH.devices], buf(device=BOTH)
    over = stack(*x).after(kernel('over').call(stack(*x), z))
    read = z.after(kernel('read').call(z, stack(*x)))
    linear = create_schedule(save_overtaken(UOp.sink(over, read)))
    assert bodies(linear) == ['copy_4', 'copy_4', 'over', 'read']
    assert [c.src[2] for c in linear.src[:2]] == x and linear.src[3].src[2] is stack(*(c.src[1] for c in linear.src[:2]))


def test_F5_first_in_first_out():
    x = buf()
    lines = []
    for i in range(3):
        a, b = buf(), buf()
        a1 = a.after(kernel(f'a{i}').call(a, x))
        lines.append(b.after(kernel(f'b{i}').call(b, a1)))
    assert bodies(create_schedule(UOp.sink(*lines))) == ['a0', 'a1', 'a2', 'b0', 'b1', 'b2']
    assert create_schedule(UOp.sink(*lines)) is create_schedule(UOp.sink(*lines))


def random_graph(seed, buffers=6, kernels=30):
    "Kernels that each read a state or two and write one; some readers keep old states"
    rng = random.Random(seed)
    state = [buf() for _ in range(buffers)]
    effects, expected, now = [], {}, dict.fromkeys(range(buffers), 0)
    for k in range(kernels):
        out, ins = rng.randrange(buffers), rng.sample(range(buffers), rng.randint(1, 2))
        ins = [i for i in ins if i != out]
        call = kernel(f'{k}', 1, len(ins), n=4).call(state[out], *(state[i] for i in ins))
        expected[k] = {i: now[i] for i in ins}
        now[out] = k + 1
        state[out] = state[out].after(call)
        effects.append(state[out])
    return effects, expected, rng


@pytest.mark.parametrize('seed', range(20))
def test_F5_every_reader_sees_its_state(seed):
    effects, expected, rng = random_graph(seed)
    order = list(dict.fromkeys(effects))
    rng.shuffle(order)
    storages = {}
    for e in effects: storages.setdefault(e.storage, len(storages))
    linear = create_schedule(UOp.sink(*order))
    assert len(linear.src) == 30
    version = {}
    writer_of = {k: c.src[1] for k, c in ((int(c.src[0].arg.name), c) for c in linear.src)}
    for c in linear.src:
        k = int(c.src[0].arg.name)
        got = sorted(version.get(a, 0) for a in c.src[2:])
        assert got == sorted(expected[k].values())
        version[writer_of[k]] = k + 1


@pytest.mark.parametrize('shape', ['chain', 'star', 'states', 'ordering'])
def test_F5_linear_growth(shape):
    def graph(n):
        x, outs = buf(), []
        state, k0, k1 = buf(), kernel('k0', 1, 0), kernel('k1')
        for _ in range(n):
            b = buf()
            if shape == 'chain': outs = [x := b.after(k1.call(b, x))]
            elif shape == 'star': outs.append(b.after(k1.call(b, x)))
            elif shape == 'states': outs = [state := state.after(k0.call(state))]
            else:
                state = state.after(b.after(k0.call(b)))
                c = buf()
                outs.append(c.after(k1.call(c, state)))
        return UOp.sink(*outs)
    def cost(n): return effort(create_schedule, graph(n))
    assert cost(4000) < 9 * cost(500)     # 8 if linear, 64 if quadratic


def test_F5_no_recursion():
    x, k = buf(), kernel('k', 1, 0)
    for _ in range(20_000): x = x.after(k.call(x))
    assert len(create_schedule(x.sink()).src) == 20_000


def test_F6_cycle_names_the_buffers():
    x, y = buf(), buf()
    x1 = x.after(kernel('kx').call(x, y))
    y1 = y.after(kernel('ky').call(y, x))
    with pytest.raises(RuntimeError, match='cycle') as e: create_schedule(UOp.sink(x1, y1))
    assert f'BUFFER {x.arg.slot}' in str(e.value) and f'BUFFER {y.arg.slot}' in str(e.value)


def test_F6_cycle_leaves_out_buffers_beside_it():
    x, y, z = buf(), buf(), buf()
    x1 = x.after(kernel('kx').call(x, y))
    y1 = y.after(kernel('ky').call(y, x))
    z1 = z.after(kernel('kz').call(z, y1))
    with pytest.raises(RuntimeError) as e: create_schedule(UOp.sink(z1, x1))
    assert f'BUFFER {z.arg.slot}' not in str(e.value)


def test_F6_invalid_after_source():
    x = buf()
    bad = x.after(x.store(UOp.const(F32, 1.0)))
    with pytest.raises(RuntimeError, match='STORE'): create_schedule(bad.sink())


def test_F6_input_without_a_state():
    x, y = buf(), buf()
    for bad in (UOp.const(F32, 1.0), x + y):
        y1 = y.after(kernel('k').call(y, bad))
        with pytest.raises(RuntimeError, match=bad.op.name): create_schedule(y1.sink())


def test_F7_bare_buffers():
    x, a, b = buf(), UOp.alloc('CPU', (8,), F32), buf(4)
    a1 = a.after(kernel('first', n=8).call(a, x))
    view = a1.shrink(((4, 8),))
    b1 = b.after(kernel('second').call(b, view))
    first, second = create_schedule(b1.sink()).src
    assert first.src[1:] == (a, x)
    assert second.src[1:] == (b, a.shrink(((4, 8),)))


def test_F7_bound_variables_leave_the_list_of_buffers():
    x, a = buf(), buf()
    v = UOp.variable('n', 1, 10)
    a1 = a.after(kernel('k').call(a, x, v.bind(3)))
    a2 = a1.after(kernel('k2').call(a1, x, v))
    calls = create_schedule(a2.sink()).src
    assert [buffer_args(c) for c in calls] == [(a, x), (a, x)]
    assert [c.src[3] for c in calls] == [v.bind(3), v]     # behind the buffers, for whoever runs it (G1)


def test_F7_a_linear_body_keeps_its_arguments():
    x, a, b = buf(), buf(), buf()
    p, q = UOp.param(0, F32, (4,), 'CPU'), UOp.param(2, F32, (4,), 'CPU')
    inner = UOp(Ops.LINEAR, dtypes.void, (kernel('k').call(p, q),))
    v = UOp.variable('n', 1, 10).bind(3)
    a1 = a.after(inner.call(a, v, x))
    b1 = b.after(kernel('reader').call(b, a1))
    call, reader = create_schedule(b1.sink()).src
    assert call.src[1:] == (a, v, x) and reader.src[0].arg.name == 'reader'
    x1 = x.after(kernel('writer', 1, 0).call(x))
    assert bodies_or_linear(create_schedule(UOp.sink(x1, b1))).index('linear') == 0


def bodies_or_linear(linear):
    return ['linear' if c.src[0].op is Ops.LINEAR else c.src[0].arg.name for c in linear.src]


def test_F8_disjoint_effects_are_unordered():
    x, z = buf(8), buf()
    lo, hi = x.shrink(((0, 4),)), x.shrink(((4, 8),))
    x1 = x.after(kernel('hi').call(hi, z), kernel('lo').call(lo, z))
    assert dependencies(x1.sink()) == []


def test_F8_overlapping_effects_are_chained():
    x, z = buf(8), buf()
    lo, hi = x.shrink(((0, 5),)), x.shrink(((4, 8),))
    x1 = x.after(kernel('hi').call(hi, z), kernel('lo').call(lo, z))
    assert [e.kind for e in dependencies(x1.sink())] == ['waw']


def test_F8_writers_of_pieces_of_different_devices_are_unordered():
    x, z = buf(8, BOTH), [buf(device=d) for d in BOTH.devices]
    lo, hi = ((0, 5),), ((4, 8),)
    def writers(*places): return x.after(*(kernel(f'{i}{span}').call(piece(x, i).shrink(span), z[i]) for i, span in places))
    assert dependencies(writers((0, lo), (1, lo)).sink()) == dependencies(writers((0, hi), (1, lo)).sink()) == []
    assert [e.kind for e in dependencies(writers((1, lo), (1, hi)).sink())] == ['waw']      # the same piece, where they overlap
    own = kernel('own').call(x.shrink(lo), buf(5, BOTH))                                   # on all devices
    assert [e.kind for e in dependencies(x.after(own, kernel('one').call(piece(x, 1).shrink(hi), z[1])).sink())] == ['waw']


# ---- through the whole pipeline

def ints(*values): return Tensor(np.array(values, dtype=np.int32), device='PYTHON').realize()


def test_F1_a_later_write_follows_an_earlier_one():
    x = ints(1, 2, 3)
    x.assign(x + 1)
    x[0:1] = 9
    x.assign(x * 2)
    assert x.tolist() == [18, 6, 8]


@pytest.mark.parametrize('first', ['y', 'x'])
def test_F2_a_reader_precedes_the_write_whoever_is_realized_first(first):
    x = ints(1, 2, 3)
    y = x + 10
    x.assign(x * 0)
    (y if first == 'y' else x).realize()
    assert (x.tolist(), y.tolist()) == ([0, 0, 0], [11, 12, 13])


def test_F3_readers_of_three_states():
    x = ints(1, 1)
    seen = []
    for _ in range(3):
        seen.append(x * 10)
        x.assign(x + 1)
    Tensor.realize(x, *seen[::-1])
    assert [s.tolist() for s in seen] == [[10, 10], [20, 20], [30, 30]] and x.tolist() == [4, 4]


def test_F5_the_same_program_gives_the_same_order():
    def names():
        x = ints(1, 2, 3, 4)
        parts = [(x.reshape(2, 2).sum(axis=i) + i).contiguous() for i in (0, 1)]
        return [c.src[0].key for c in (parts[0] * parts[1]).schedule_linear().src]
    assert names() == names()


def test_F6_two_arrays_can_swap():
    x, y = ints(1, 2), ints(3, 4)
    old = x + 0
    x.assign(y)
    y.assign(old)
    Tensor.realize(x, y)
    assert (x.tolist(), y.tolist()) == ([3, 4], [1, 2])


@pytest.mark.parametrize('flip', [False, True])
def test_K5_of_kernels_set_free_at_once_those_that_fill_no_temporary_go_first(flip):
    "What only writes a result may free what it reads, and takes nothing"
    x, made, out, last = buf(), UOp.alloc('CPU', (4,), F32), buf(), buf()
    first = made.after(kernel('first').call(made, x))
    temporary = UOp.alloc('CPU', (4,), F32)
    grows, stays = temporary.after(kernel('grows').call(temporary, first)), out.after(kernel('stays').call(out, first))
    then = last.after(kernel('then').call(last, grows))
    assert bodies(create_schedule(UOp.sink(*((stays, then) if flip else (then, stays))))) == ['first', 'stays', 'grows', 'then']
