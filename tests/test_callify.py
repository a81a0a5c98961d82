"""Rules A and B of the scheduler: which value gets which storage, and the call that a program becomes."""

import numpy as np
import pytest

from tinysched.frontend.tensor import Tensor
from tinysched.helpers import GlobalCounters
from tinysched.ir.dtype import dtypes
from tinysched.ir.spec import call_spec, state_of, verify
from tinysched.ir.uop import KernelInfo, UOp
from tinysched.ir.vocabulary import GroupOp, Ops
from tinysched.schedule import callify
from tinysched.schedule.callify import (Limits, as_argument, canonical, in_scope, is_effect, needs_storage, one_range,
                                        place, shared_view, stored_part, transform_to_call)
from tinysched.schedule.kernels import get_kernel_graph
from tinysched.schedule.pipeline import lower_sink_to_linear
from tinysched.schedule.prepare import prepare

F32, I32, U8 = dtypes.float32, dtypes.int32, dtypes.uint8


def buffer(*shape, dtype=F32, device='CPU'): return UOp.buffer(device, shape, dtype)


def stage(u, device=None): return UOp(Ops.STAGE, u.dtype, (u,), device)


def copy(u, device): return UOp(Ops.COPY, u.dtype, (u,), device)


def assign(state, value): return state.after(state.store(value))


def made(placed, *old):
    "Buffers that a program makes"
    return {s for v in placed.became.values() if (s := state_of(v)).op is Ops.BUFFER} - set(old)


def tensor(*values, dtype=F32): return Tensor(list(values), device='PYTHON', dtype=dtype).realize()


def kinds(linear):
    "For each call of a schedule whether it is a kernel or a bulk copy"
    return [dict(SINK='kernel', STORE='copy')[c.src[0].op.name] for c in linear.src]


# ---- A: placing results

def test_A1_results_are_stored_below_movement():
    x = buffer(4)
    y = x + 1
    placed = place([y, y.reshape((2, 2)), y.pad(((1, 1),)), y.reshape((1, 4)).expand((3, 4)), y.flip((0,))])
    assert made(placed, x) == {placed.became[y]} and placed.became[y].shape == (4,)
    assert len(placed.sink.src) == 1


def test_A1_a_cut_result_is_stored_cut():
    y = buffer(1000) + 1
    cut = y.shrink(((10, 12),))
    assert stored_part(cut.reshape((2, 1))) is cut
    placed = place([cut])
    assert [b.shape for b in made(placed)] == [(2,)]


def test_A1_what_needs_no_storage():
    x = buffer(4)
    n = UOp.variable('n', 1, 9).bind(3)
    for u in (x, x.permute((0,)), x.shrink(((1, 3),)), x.bitcast(I32), assign(x, x + 1), n, UOp.variable('m', 1, 9),
              UOp.const(F32, 1.0), UOp.arange(4)):
        assert not needs_storage(u)
        assert not made(place([u]), x)
    assert needs_storage(x + 1) and needs_storage(stage(x.flip((0,))))


def test_A1_what_a_tensor_holds_outlives_the_program():
    x = tensor(1, 2, 3)
    held = (x + 1).contiguous()
    out = held.sum()
    linear = out.schedule_linear()
    assert held.uop.op is Ops.BUFFER      # it is an argument of the call, not an ALLOC
    assert held.uop in {u.storage for c in linear.src for u in c.src[1:]}


def test_A1_what_nobody_holds_is_an_alloc():
    x = buffer(4)
    for held, allocs in (((), 1), ((stage(x + 1),), 0)):
        graph = get_kernel_graph(prepare(place([stage(x + 1).sum(0)], held).sink))
        assert sum(u.op is Ops.ALLOC for u in graph.toposort()) == allocs


def test_A1_padding_happens_on_reading():
    x = tensor(1, 2, 3)
    y = (x + 1).pad(((1, 2),)).realize()
    assert y.uop.op is Ops.PAD and y.uop.base.op is Ops.BUFFER and y.uop.base.shape == (3,)
    assert y.tolist() == [0, 2, 3, 4, 0, 0]


def test_A2_reachable_writes_are_placed():
    x, y = buffer(4), buffer(4)
    x1 = assign(x, y)
    placed = place([(x1 + 1).sum(0)])
    assert placed.sink.src[0] is x1 and placed.became[x1] is x
    assert len(placed.sink.src) == 2
    inside = assign(alloc(), y + 1)             # storage that nobody outside knows
    assert place([inside * 2]).sink.src[0] is inside


def test_A2_a_list_is_copied_in_once():
    a = Tensor([1., 2.], device='PYTHON')
    b, c = a + 1, a + 2
    del a
    assert kinds(b.schedule_linear()) == ['copy', 'kernel']
    assert kinds(c.schedule_linear()) == ['kernel']


def test_A2_a_list_is_copied_in_once_for_all_uses():
    a = Tensor([1., 2.], device='PYTHON')
    b, c = (a + 1).contiguous(), (a.flip(0) * 2).contiguous()
    del a
    assert sorted(kinds(b.schedule_linear(c))) == ['copy', 'kernel', 'kernel']


def test_A2_explicit_stages_are_stored_once():
    x = tensor(1, 2, 3)
    s = (x * 2).contiguous()
    a, b = s + 1, s.flip(0) * 3
    assert len(a.schedule_linear(b).src) == 3


def test_A3_two_tensors_one_buffer():
    x = tensor(1, 2, 3)
    y = x + 1
    z, w = y.reshape(3, 1), y.detach()
    y.realize()
    assert y.uop.op is Ops.BUFFER and z.uop.base is y.uop and y.uop in w.uop.toposort()
    assert len(z.schedule_linear(w).src) == 0
    other = x + 1            # an equal value is the same node as long as both wait
    again = x + 1
    other.realize(again)
    assert other.uop is again.uop


def test_A3_the_map_is_keyed_by_what_tensors_hold():
    x = tensor(1, 2, 3)
    y = (x.detach() + 1).contiguous_backward().contiguous()   # prepare rewrites all of this
    z = y * 2
    y.realize()
    assert y.uop.op is Ops.BUFFER and y.uop in z.uop.toposort()
    assert z.tolist() == [4, 6, 8]


def test_A3_storage_is_never_a_key():
    x, y = buffer(4), buffer(4)
    x1 = assign(x, y)
    placed = place([stage(x1), x1, x1 + 1, stage(y)])
    assert not {state_of(v) for v in placed.became.values()} & set(placed.became)
    assert not any(u.op is Ops.AFTER for v in placed.became.values() for u in v.toposort())


def test_A4_a_copy_goes_straight_into_its_destination():
    x = tensor(1, 2, 3, 4)
    x.assign(Tensor([5., 6., 7., 8.], device='PYTHON'))
    linear = x.schedule_linear()
    assert kinds(linear) == ['copy']
    assert linear.src[0].src[1] is x.uop
    x = tensor(1, 2, 3, 4)
    x.assign(Tensor([5., 6., 7., 8.], device='PYTHON'))
    assert x.tolist() == [5, 6, 7, 8]


def test_A4_a_held_copy_keeps_a_buffer_of_its_own():
    x, y = tensor(1, 2, 3, 4), Tensor([5., 6., 7., 8.], device='PYTHON')
    x.assign(y)
    x.realize()
    assert y.uop.op is Ops.BUFFER and y.uop is not x.uop
    x.assign(x * 2).realize()
    assert y.tolist() == [5, 6, 7, 8]
    y[0] = 1
    assert (x.tolist(), y.tolist()) == ([10, 12, 14, 16], [1, 6, 7, 8])


def test_A4_part_of_a_buffer_is_no_whole_storage():
    x = tensor(1, 2, 3, 4)
    x[1:3].assign(Tensor([8., 9.], device='PYTHON'))
    assert x.tolist() == [1, 8, 9, 4]


def test_A4_a_copy_with_other_readers():
    x = tensor(1, 2)
    t = Tensor([5., 6.], device='PYTHON')
    z = t + 1
    x.assign(t)
    del t
    z.realize(x)
    assert (x.tolist(), z.tolist()) == ([5, 6], [6, 7])


@pytest.mark.parametrize('shape', [(0,), (0, 3), (2, 0)])
def test_A5_size_0_has_no_storage_and_no_kernel(shape):
    x = buffer(*shape)
    placed = place([x + 1, stage(x * 2), copy(x, 'CL')], {stage(x * 2)})
    assert placed.sink.src == ()
    for u, v in placed.became.items():
        assert (v.shape, v.dtype) == (u.shape, u.dtype)
        assert not any(n.op is Ops.BUFFER for n in v.toposort())
    t = Tensor(np.zeros(shape, np.int16), device='PYTHON')
    linear = (t + 1).contiguous().schedule_linear(t.cast(F32) * 2)
    assert linear.src == ()
    got = (t + 1).numpy()
    assert got.shape == shape and got.dtype == np.int16


def test_A6_without_a_device_nothing_is_allocated():
    p = UOp.param(0, F32, (4,))
    for u in (p + 1, stage(p + 1), UOp.const(F32, 2.0), UOp.arange(4) * 2, p.sum(0)):
        assert place([u], {u}).sink.src == ()


def test_A6_deviceless_values_are_computed_where_they_are_used():
    x = buffer(4)
    placed = place([x + UOp.arange(4, I32).cast(F32)])
    assert len(placed.sink.src) == 1
    assert len(get_kernel_graph(prepare(placed.sink)).src) == 1
    const = UOp.const(F32, 2.0)
    assert prepare(UOp.sink(assign(x, copy(const, 'CL') + x))) is prepare(UOp.sink(assign(x, const + x)))


def test_A7_a_stage_of_whole_storage_is_shared():
    x = tensor(1, 2, 3)
    y = x.contiguous()
    assert y.schedule_linear().src == ()
    assert y.uop is x.uop
    z = (x + 0).contiguous().realize()      # a value has storage of its own
    assert z.uop is not x.uop


def test_A7_writes_separate_what_is_shared():
    x = tensor(1, 2, 3)
    y, z = x.contiguous().realize(), x.clone().realize()
    y[0] = 5
    z[1] = 6
    x[2] = 7
    assert (x.tolist(), y.tolist(), z.tolist()) == ([1, 2, 7], [5, 2, 3], [1, 6, 3])


def test_A7_writes_to_the_owner_leave_the_reader():
    x = tensor(1, 2, 3)
    y = x.contiguous().realize()
    x.assign(x * 10).realize()
    assert (x.tolist(), y.tolist()) == ([10, 20, 30], [1, 2, 3])


def test_A7_the_state_after_an_assignment_is_shared():
    x = tensor(1, 2, 3)
    x.assign(x + 1)
    y = x.contiguous()
    assert len(y.schedule_linear().src) == 1        # the assignment
    assert y.uop is x.uop


def test_A7_what_this_program_overwrites_is_not_shared():
    x = buffer(4)
    later = assign(x, x + 1)
    placed = place([stage(x), later])
    assert placed.became[stage(x)] is not x
    placed = place([stage(later)])
    assert placed.became[stage(later)] is x


def test_A8_assigning_a_whole_value_replaces_it_for_all():
    x = tensor(1, 2, 3, 4)
    y = x + 1
    view, flipped = y[1:3], y.flip(0)
    y.assign(x * 2)
    assert not any(u.op is Ops.STORE for u in y.uop.toposort())
    assert len(y.schedule_linear().src) == 1
    y = x + 1
    view, flipped = y[1:3], y.flip(0)
    y.assign(x * 2)
    assert (view.tolist(), flipped.tolist(), y.tolist()) == ([4, 6], [8, 6, 4, 2], [2, 4, 6, 8])


def test_A8_readers_of_the_old_value_keep_it():
    x = tensor(1, 2)
    y = x + 1
    z = y * 10
    y.assign(x - 1)
    assert (z.tolist(), y.tolist()) == ([20, 30], [0, 1])


def test_A9_one_range_needs_no_kernel():
    x = Tensor(np.arange(24, dtype=np.float32).reshape(4, 6), device='PYTHON').realize()
    views = [x[1:3], x[2], x.reshape(24)[5:9], x[1:3].bitcast(I32), x.reshape(24).bitcast(U8)[8:16].bitcast(I32),
             x.flip(0).flip(0)[1:2], x.reshape(4, 1, 6).permute(1, 0, 2)]
    for v in views: assert v.contiguous().schedule_linear().src == ()
    for v in (x[:, 1:3], x.T, x.flip(0), x.pad(((1, 0), (0, 0))), x.reshape(1, 24).expand(2, 24)):
        assert len(v.contiguous().schedule_linear().src) == 1


def test_A9_views_have_the_right_numbers():
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = Tensor(data, device='PYTHON').realize()
    np.testing.assert_array_equal(x[1:3].contiguous().numpy(), data[1:3])
    np.testing.assert_array_equal(x[1:3].bitcast(I32).contiguous().numpy(), data[1:3].view(np.int32))
    np.testing.assert_array_equal(x.bitcast(U8).numpy(), data.view(np.uint8))
    np.testing.assert_array_equal(x.reshape(24).bitcast(U8)[6:14].bitcast(I32).numpy(),
                                  data.reshape(24).view(np.uint8)[6:14].copy().view(np.int32))   # begins within a float
    np.testing.assert_array_equal((x[1:3].contiguous() + 1).numpy(), data[1:3] + 1)


def test_A9_the_view_as_an_argument():
    x = buffer(4, 6)
    view = x.flip((0,)).flip((0,)).shrink(((1, 3), (0, 6))).reshape((3, 4))
    arg = as_argument(view)
    assert [(u.op, u.arg) for u in list(arg.toposort())[1:]] == [
        (Ops.RESHAPE, (24,)), (Ops.SHRINK, ((6, 18),)), (Ops.RESHAPE, (3, 4))]
    assert arg is as_argument(x.shrink(((1, 3), (0, 6))).reshape((12,)).reshape((3, 4)))
    assert as_argument(x) is x


@pytest.mark.parametrize('start,fine', [(0, True), (4, True), (6, False), (8, True), (3, False)])
def test_A9_elements_begin_where_they_may(start, fine):
    x = buffer(64, dtype=U8)
    view = x.shrink(((start, start + 8),)).bitcast(F32)
    assert (one_range(view) is not None) == fine
    assert (shared_view(stage(view)) is view) == fine


def test_A9_a_bitcast_as_target():
    x = tensor(1, 2, 3, 4)
    bits = x.bitcast(I32)
    bits[1:3].assign(Tensor([0, 1 << 30], device='PYTHON', dtype=I32))
    assert x.tolist() == [1, 0, 2, 4]


def test_A11_only_gradients_look_at_them():
    x = buffer(4)
    out = buffer(4)
    plain = UOp.sink(assign(out, x + 1))
    dressed = x._alu(Ops.DETACH, x) + 1
    dressed = UOp.sink(assign(out, dressed._alu(Ops.CONTIGUOUS_BACKWARD, dressed)))
    assert prepare(dressed) is prepare(plain)


def test_A11_detach_makes_no_kernel():
    x = tensor(1, 2)
    assert x.detach().schedule_linear().src == ()
    y = x + 1
    assert len((y.detach() * 2).schedule_linear(y).src) == 2


# ---- B: the canonical call

def test_B1_effects_come_after_their_sources():
    x, y, z = buffer(4), buffer(4), buffer(4)
    x1 = assign(x, y)
    z1 = assign(z, x1 + 1)
    x2 = assign(x1, x1 * 2)
    placed = place([x2 + 1, z1])
    src = placed.sink.src
    assert {x1, z1, x2} <= set(src)
    for i, u in enumerate(src): assert not set(src[i + 1:]) & set(u.toposort())


def test_B1_which_afters_are_effects():
    x, inside = buffer(4), UOp.alloc('CPU', (4,), F32)
    body = UOp.sink(arg=KernelInfo())
    known, hidden = x.after(body.call(x)), inside.after(body.call(inside))
    assert is_effect(known) and not is_effect(hidden)
    placed = place([known, hidden])
    assert placed.sink.src == (known,)
    ordered = x.after(known)                    # pure ordering, over storage from outside
    assert place([ordered]).sink.src == (known, ordered)


def test_B1_bodies_of_calls_are_not_entered():
    x, p = buffer(4), UOp.param(0, F32, (4,), 'CPU')
    inner = assign(p, p + 1)
    y = assign(buffer(4), x)                    # an argument of the call is part of the program
    called = x.after(UOp.sink(inner).call(x, y, precompile=True))
    placed = place([called])
    assert placed.sink.src == (y, called)
    assert inner not in in_scope(placed.sink)


def test_B2_slots_in_order_of_meeting():
    a, b, c = buffer(4), buffer(4), buffer(4)
    call = transform_to_call(UOp.sink(assign(c, b + a * b)))
    assert call.src[1:] == (c, b, a)
    params = [u for u in in_scope(call.src[0]) if u.op is Ops.PARAM]
    assert [p.arg.slot for p in params] == [0, 1, 2]      # b was met twice and is one PARAM
    assert not any(u.op is Ops.BUFFER for u in in_scope(call.src[0]))
    verify(call.src[0], call_spec)


def test_B2_the_same_buffer_twice_is_one_argument():
    a, c = buffer(4), buffer(4)
    assert transform_to_call(UOp.sink(assign(c, a + a))).src[1:] == (c, a)
    assert transform_to_call(UOp.sink(assign(c, c + a))).src[1:] == (c, a)


def test_B3_a_view_of_an_unwritten_buffer_is_an_argument():
    x, out = buffer(100), buffer(10)
    programs = [UOp.sink(assign(out, x.shrink(((i, i + 10),)) * 2)) for i in (0, 20, 90)]
    calls = [transform_to_call(p) for p in programs]
    assert len({c.src[0] for c in calls}) == 1 and len({canonical(p).key for p in programs}) == 1
    assert [c.src[2].src[0].arg if c.src[2].op is Ops.RESHAPE else c.src[2].arg for c in calls] == [
        ((0, 10),), ((20, 30),), ((90, 100),)]


def test_B3_a_view_of_a_written_buffer_stays_in_the_body():
    x, out = buffer(100), buffer(10)
    view = x.shrink(((20, 30),))
    sink = UOp.sink(assign(x, x + 1), assign(out, view * 2))
    call = transform_to_call(sink)
    assert set(call.src[1:]) == {x, out}
    assert any(u.op is Ops.SHRINK for u in in_scope(call.src[0]))
    cast = UOp.sink(assign(x, x + 1), assign(buffer(100, dtype=I32), x.bitcast(I32)))
    assert all(a.op is Ops.BUFFER for a in transform_to_call(cast).src[1:])


def test_B3_written_through_a_view_is_written():
    x, out = buffer(100), buffer(10)
    low, high = x.shrink(((0, 10),)), x.shrink(((5, 15),))
    sink = UOp.sink(x.after(low.store(UOp.const(F32, 1.0))), assign(out, high * 2))
    assert set(transform_to_call(sink).src[1:]) == {x, out}


def test_B3_only_where_the_device_can_address_it():
    x, out = buffer(100), buffer(10)
    sink = UOp.sink(assign(out, x.shrink(((16, 26),)) * 2))      # begins at byte 64
    arguments = lambda n: transform_to_call(sink, Limits(view_alignment=n)).src[1:]
    assert [state_of(a) for a in arguments(64)] == [out, x] and arguments(64)[1] is not x
    assert arguments(128) == (out, x)
    assert canonical(sink, Limits(view_alignment=64)).key != canonical(sink, Limits(view_alignment=128)).key


def test_B3_offsets_split_no_cache():
    x = Tensor(np.arange(8, dtype=np.float32), device='PYTHON').realize()
    keys = [canonical(place([(x[i:i + 2] * 3).uop]).sink).key for i in (0, 2, 6)]
    assert len(set(keys)) == 1
    assert [(x[i:i + 2] * 3).tolist() for i in (0, 2, 6)] == [[0, 3], [6, 9], [18, 21]]


def test_B3_long_chains_of_views_cost_linear_time(monkeypatch):
    def looks(n):
        u, count = buffer(8, 1).expand((8, 8)), []
        for i in range(n): u = u.permute((1, 0)) if i % 2 else u.flip((0,))
        monkeypatch.setattr(callify, 'one_range', lambda v: count.append(v) or one_range(v))
        canonical(UOp.sink(assign(buffer(8, 8), u)))
        return len(count)
    assert looks(403) == looks(103) <= callify.MOST_VIEWS


def test_B4_a_bound_variable_loses_name_and_value():
    x, out = buffer(4), buffer(4)
    def program(name, value):
        n = UOp.variable(name, 1, 9).bind(value)
        return UOp.sink(assign(out, x + n.cast(F32)))
    calls = [transform_to_call(program(*a)) for a in (('n', 3), ('m', 7))]
    assert calls[0].src[0] is calls[1].src[0]
    assert canonical(program('n', 3)).key == canonical(program('m', 7)).key
    scalar, = (u for u in calls[0].src[0].toposort() if u.op is Ops.PARAM and u.arg.name)
    assert (scalar.arg.vmin, scalar.arg.vmax) == (1, 9)


def nested(temp):
    "A body with memory of its own"
    p = UOp.param(0, F32, (4,), 'CPU')
    return UOp.sink(assign(p, assign(temp, p + 1) * 2))


def alloc(): return UOp.alloc('CPU', (4,), F32)


def allocs(body): return [u.arg.slot for u in in_scope(body) if u.op is Ops.ALLOC]


def test_B5_allocs_are_numbered_by_meeting():
    x = buffer(4)
    def program(first, second): return UOp.sink(assign(x, assign(first, x + 1) * assign(second, x + 2)))
    one, two = alloc(), alloc()
    calls = [transform_to_call(program(*p)) for p in ((one, two), (two, one), (alloc(), alloc()))]
    assert len({c.src[0] for c in calls}) == 1
    assert allocs(calls[0].src[0]) == [-1, -2]
    assert len({canonical(program(*p)).key for p in ((one, two), (two, one), (alloc(), alloc()))}) == 1
    assert canonical(program(one, one)).key != canonical(program(one, two)).key


def test_B5_each_nested_body_is_a_scope():
    x = buffer(4)
    def program():
        temp = assign(alloc(), x + 1)
        return UOp.sink(x.after(nested(alloc()).call(x, temp, precompile=True)))
    calls = [transform_to_call(program()) for _ in range(2)]
    body = calls[0].src[0]
    assert body is calls[1].src[0] and canonical(program()).key == canonical(program()).key
    inner = next(u for u in body.toposort() if u.op is Ops.CALL).src[0]
    assert (allocs(body), allocs(inner)) == ([-1], [-1])


def test_B5_memory_of_the_schedule_is_not_memory_of_the_body():
    x, out = buffer(4), buffer(4)
    temp = alloc()
    hidden = stage(x * 3).flip((0,))        # wants an ALLOC of the same size and dtype
    sink = UOp.sink(assign(out, assign(temp, x + 1).flip((0,)) + hidden + hidden.sum(0)))
    graph = get_kernel_graph(prepare(transform_to_call(sink).src[0]))
    writes = [u.storage for u in graph.toposort() if u.op is Ops.AFTER]
    assert len(writes) == len(set(writes)) >= 3     # no two kernels write to one ALLOC
    assert sum(u.op is Ops.ALLOC for u in writes) == len(writes) - 1
    lower_sink_to_linear(transform_to_call(sink).src[0])


def test_B6_names_and_tags_are_not_part_of_the_key():
    x, out = buffer(4), buffer(4)
    plain = UOp.sink(assign(out, x + 1))
    tagged = UOp.sink(assign(out, (x + 1).replace(tag='mine')))
    assert canonical(plain).key == canonical(tagged).key
    def calling(call, kernel):
        body = UOp(Ops.SINK, dtypes.void, (UOp.param(0, F32, (4,)).index(UOp.const(dtypes.index, 0)).store(
            UOp.const(F32, 1.0)),), KernelInfo(kernel))
        return UOp.sink(out.after(body.call(out, name=call)))
    assert canonical(calling('a', 'k')).key == canonical(calling('b', 'l')).key
    assert canonical(calling('a', 'k')).key != canonical(plain).key


def test_B6_the_result_is_a_call_marked_for_scheduling():
    x, out = buffer(4), buffer(4)
    sink = UOp.sink(assign(out, x + 1))
    call = transform_to_call(sink)
    assert call.op is Ops.CALL and call.arg.precompile and call.src[0].op is Ops.SINK
    assert call.src[1:] == tuple(map(as_argument, canonical(sink).args))
    params = {u: call.src[1 + u.arg.slot] for u in in_scope(call.src[0]) if u.op is Ops.PARAM}
    assert call.src[0].substitute(params) is sink


def test_B7_what_differs_has_another_key():
    x, y, out = buffer(4), buffer(4), buffer(4)
    def key(value, to=out, **limits): return canonical(UOp.sink(assign(to, value)), Limits(**limits)).key
    const = lambda v, d=F32: key(UOp.const(d, v), buffer(4, dtype=d))
    keys = [key(x + x), key(x + y), key(x * y), key(x + out), key(x + 1), key(x + 2), key(x + y, max_args=8),
            key(x.flip((0,))), key(x.cast(I32).cast(F32)), key(stage(x) + 1), const(0.0), const(-0.0), const(float('nan')),
            const(1, I32), const(1.0), const(True, dtypes.bool),
            key(buffer(4, device='CL'), buffer(4, device='CL')), key(buffer(8), buffer(8))]
    assert len(set(keys)) == len(keys)
    assert canonical(UOp.sink(assign(out, x)), settings=(1,)).key != canonical(UOp.sink(assign(out, x)), settings=(2,)).key


def test_every_body_has_nothing_global():
    x = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4), device='PYTHON').realize()
    values = [x + 1, x[1:] @ x.T, (x.softmax() * 2).contiguous().flip(0), x.pad(((1, 1), (0, 0))) + 1]
    body = transform_to_call(place([v.uop for v in values]).sink).src[0]
    assert not any(u.op in (Ops.BUFFER, Ops.BIND) for u in body.toposort())
    verify(body, call_spec)
    assert all(u.op in GroupOp.State for u in body.src)


def test_A9_reading_a_view_of_another_dtype_runs_nothing():
    x = tensor(1, 2, 3, 4)
    before = GlobalCounters.kernel_count
    assert x[1:3].bitcast(I32).tolist() == np.array([2, 3], np.float32).view(np.int32).tolist()
    assert x.bitcast(U8).numpy().tobytes() == np.array([1, 2, 3, 4], np.float32).tobytes()
    assert GlobalCounters.kernel_count == before
