"""Rules C, G, I and L of the scheduler: from a program to a list of calls over real buffers."""
import re

import numpy as np
import pytest

import tinysched
from tinysched import Context, Device, GlobalCounters, Tensor, Variable, dtypes, run_linear, schedule_cache
from tinysched.helpers import profile_events
from tinysched.ir.spec import SpecError
from tinysched.ir.uop import KernelInfo, ParamArg, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime.device import buffer_of
from tinysched.schedule import pipeline
from tinysched.schedule.callify import Limits
from tinysched.schedule.pipeline import (create_linear_with_vars, lower_nested, pm_schedule, resolve_linear_call,
                                         sched_stats, schedule, settings)
from tinysched.schedule.rangeify import Reason, default_policy

F32, VOID = dtypes.float32, dtypes.void


@pytest.fixture(autouse=True)
def interpreter():
    with Context(DEV='PYTHON'): yield
    schedule_cache.clear()


def param(slot, n=4): return UOp.param(slot, F32, (n,), 'PYTHON')
def alloc(n=4): return UOp.alloc('PYTHON', (n,), F32)
def stage(u): return UOp(Ops.STAGE, u.dtype, (u,))


def floats(*values):
    u = UOp.buffer('PYTHON', (len(values),), F32)
    buffer_of(u).copyin(np.array(values, np.float32).data)
    return u


def read(u): return buffer_of(u).numpy().tolist()


def called(body, *args, precompile=True):
    "The first argument, in the state it has once the body has run"
    return args[0].after(body.call(*args, precompile=precompile))


def function(f, inputs=1):
    "Body that stores f of its other arguments in argument 0"
    return UOp.sink(param(0).after(param(0).store(f(*map(param, range(1, 1 + inputs))))))


def program(value):
    "A fresh buffer, and the program that fills it"
    out = UOp.buffer('PYTHON', value.shape, value.dtype)
    return out, UOp.sink(out.after(out.store(value)))


def answer(value):
    out, sink = program(value)
    run_linear(schedule(sink))
    return read(out)


def calls(linear): return [c.src[0].op for c in linear.src]


TWICE = function(lambda x: x * 2)
FLIPPED = function(lambda x: stage(x + 1).flip(0) * 2)


# ---- C1

def test_C1_a_nested_call_is_lowered_and_flattened():
    assert answer(called(TWICE, alloc(), floats(1, 2, 3, 4)) + 1) == [3, 5, 7, 9]
    assert answer(called(FLIPPED, alloc(), floats(1, 2, 3, 4))) == [10, 8, 6, 4]


def test_C1_the_argument_may_be_computed_first():
    a = alloc()
    v = a.after(a.store(floats(1, 2, 3, 4) * 10))
    assert answer(called(FLIPPED, alloc(), v) + v) == [82 + 10, 62 + 20, 42 + 30, 22 + 40]


def test_C1_calls_inside_calls_inner_first(monkeypatch):
    middle = function(lambda x: called(FLIPPED, alloc(), x) + 100)
    outer = function(lambda x: called(middle, alloc(), x) * 3)
    seen, real = [], pipeline.lower_flat
    def lower(body, *more):
        order = body.toposort(lambda u: u.op is not Ops.LINEAR)
        seen.append([u.src[0].op for u in order if u.op is Ops.CALL])
        return real(body, *more)
    monkeypatch.setattr(pipeline, 'lower_flat', lower)
    assert answer(called(outer, alloc(), floats(1, 2, 3, 4))) == [(v + 100) * 3 for v in (10, 8, 6, 4)]
    assert seen == [[], [Ops.LINEAR], [Ops.LINEAR], [Ops.LINEAR]]   # from the inside out, the program last


def test_C1_each_body_has_a_cache_entry_of_its_own():
    def first(): return called(FLIPPED, alloc(), floats(1, 2, 3, 4))
    def entries(): return len(schedule_cache)
    answer(first())
    assert entries() == 2   # the program and the body
    misses = schedule_cache.misses
    assert answer(first() + called(FLIPPED, alloc(), floats(0, 0, 0, 0))) == [12, 10, 8, 6]
    assert (entries(), schedule_cache.misses) == (3, misses + 1)   # another program, the same body
    assert answer(first()) == [10, 8, 6, 4] and schedule_cache.misses == misses + 1


def test_C1_the_body_is_lowered_once_for_all_its_calls(monkeypatch):
    count, real = [], pipeline.prepare
    monkeypatch.setattr(pipeline, 'prepare', lambda body, *more: count.append(body) or real(body, *more))
    x = floats(1, 2, 3, 4)
    for _ in range(5):
        a = alloc()
        x = called(TWICE, a, x)
    assert answer(x) == [32, 64, 96, 128] and len(count) == 2


def test_C1_outer_passes_do_not_enter_a_linear(monkeypatch):
    _, sink = program(called(FLIPPED, alloc(), floats(1, 2, 3, 4)) + 1)
    inner = lower_nested(sink)
    linear, = (u.src[0] for u in inner.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.LINEAR)
    call, = (u for u in inner.toposort(lambda u: u.op is not Ops.LINEAR) if u.op is Ops.CALL)
    for stage_ in (pipeline.prepare, lambda u: pipeline.get_kernel_graph(u, Limits(), default_policy)):
        inner = stage_(inner)
        assert linear in inner.toposort() and call.src[0] is linear


@pytest.mark.parametrize('body', [TWICE.replace(arg=KernelInfo('k')), TWICE])
def test_C1_only_programs_that_are_marked(body):
    call = body.call(param(0), param(1), precompile=body.arg is not None)
    assert pm_schedule(call) is call
    marked = TWICE.call(param(0), param(1), precompile=True)
    assert pm_schedule(marked).src[0].op is Ops.LINEAR


def test_C1_a_body_may_write_its_argument_in_place():
    add = UOp.sink(param(0).after(param(0).store(param(0) + param(1))))
    x, y = floats(1, 2, 3, 4), floats(10, 10, 10, 10)
    old, sink = program(x * 1)
    run_linear(schedule(UOp.sink(*sink.src, called(add, x, y))))
    assert (read(x), read(old)) == ([11, 12, 13, 14], [1, 2, 3, 4])   # F2 holds for nested calls too


def test_C1_scalars_are_handed_on():
    n = Variable('n', 1, 9)
    v = UOp(Ops.PARAM, n.dtype, (), n.arg._replace(slot=2, name='v2'))
    body = UOp.sink(param(0).after(param(0).store(param(1) * v.cast(F32))))
    def times(k):
        a = alloc()
        return a.after(body.call(a, floats(1, 2, 3, 4), n.bind(k), precompile=True))
    assert answer(times(3)) == [3, 6, 9, 12]
    assert answer(times(2) + times(5)) == [7, 14, 21, 28]


def test_C1_many_levels():
    body = TWICE
    for _ in range(60): body = function(lambda x, inner=body: called(inner, alloc(), x))
    with Context(SPEC=0): assert answer(called(body, alloc(), floats(1, 2, 3, 4))) == [2, 4, 6, 8]


# ---- C4

def test_C4_a_wrong_program_is_named_with_its_sources_and_the_rule():
    x = floats(1, 2, 3, 4)
    bad = UOp(Ops.ADD, F32, (x, UOp.const(dtypes.int32, 1)))
    with pytest.raises(SpecError) as e: schedule(program(bad)[1])
    text = str(e.value)
    assert 'ADD' in text and 'source 0' in text and 'source 1' in text and 'wanted' in text and '.py:' in text


@pytest.mark.parametrize('stage_, wrong', [('prepare', lambda *a: UOp.sink(UOp(Ops.RANGE, dtypes.index, (), 3))),
                                           ('save_overtaken', lambda g: UOp.sink(UOp.const(F32, 1.0))),
                                           ('create_schedule', lambda g: UOp(Ops.LINEAR, VOID, (UOp.const(F32, 1.0),)))])
def test_C4_each_stage_is_checked(monkeypatch, stage_, wrong):
    monkeypatch.setattr(pipeline, stage_, wrong)
    sink = program(floats(1, 2) + 1)[1]
    with pytest.raises(SpecError): schedule(sink)
    monkeypatch.undo()
    assert len(schedule(sink).src) == 1   # nothing wrong was remembered


def test_C4_only_on_a_miss_and_only_when_asked(monkeypatch):
    looked = []
    monkeypatch.setattr(pipeline, 'verify', lambda u, spec: looked.append(spec) or u)
    make = lambda: schedule(program(floats(1, 2) + 1)[1])
    make()
    first = len(looked)
    make()
    assert first == len(looked) == 6
    schedule_cache.clear()
    with Context(SPEC=0): make()
    assert len(looked) == first


# ---- C5

def test_C5_one_line_for_each_schedule(capsys):
    x = Tensor([1.0, 2]).realize()
    with Context(DEBUG=1):
        (x + 1).realize()
        assert capsys.readouterr().out == ''                       # one kernel: not worth a line
        (x + 1).contiguous().sum().realize()
        assert capsys.readouterr().out.startswith('scheduled    2 kernels')
        for _ in range(2): ((x + 1).contiguous().sum() + x).realize()
    line, again = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r'scheduled +3 kernels in +[\d.]+ ms, cache miss [0-9a-f]{8}, \d+ nodes, .*test_pipeline.py:\d+', line)
    assert 'cache hit ' in again
    with Context(DEBUG=3): (x + 1).realize()
    assert 'scheduled    1 kernels' in capsys.readouterr().out


# ---- G1, G2, G3, G5

BODY = UOp(Ops.SINK, VOID, (), KernelInfo('k'))


def template(*args): return UOp(Ops.LINEAR, VOID, tuple(BODY.call(*a) for a in args))


def test_G1_params_become_arguments():
    a, b = floats(1), floats(2)
    linear = resolve_linear_call(template((param(1, 1), param(0, 1)), (param(0, 1), param(0, 1))), [a, b])
    assert [c.src[1:] for c in linear.src] == [(b, a), (a, a)]


def test_G1_views_of_params_become_views_of_arguments():
    x = floats(*range(8))
    view = x._movement(Ops.SHRINK, ((2, 6),))
    inside = param(0, 4)._movement(Ops.SHRINK, ((1, 3),)).bitcast(dtypes.int32)
    linear = resolve_linear_call(template((param(0, 4),), (inside,)), [view])
    assert linear.src[0].src[1] is view
    got = linear.src[1].src[1]
    assert got.storage is x and got.dtype is dtypes.int32 and got.shape == (2,)
    assert buffer_of(got).offset == 12


def test_G1_scalars_by_slot_and_free_variables_untouched():
    n, free = Variable('n', 1, 9), Variable('free', 0, 3)
    v = UOp(Ops.PARAM, n.dtype, (), n.arg._replace(slot=1, name='v1'))
    linear = resolve_linear_call(template((param(0, 1), v, free)), [floats(1), n.bind(4)])
    assert linear.src[0].src[2:] == (n.bind(4), free)


def test_G1_a_kernels_own_slots_stay():
    _, sink = program(floats(1, 2) + 1)
    linear = schedule(sink)
    assert sorted(u.arg.slot for u in linear.src[0].src[0].toposort() if u.op is Ops.PARAM) == [0, 1]


def test_G1_the_same_schedule_over_other_buffers():
    x, y = floats(1, 2), floats(3, 4)
    a, b = schedule(program(x * 5)[1]), schedule(program(y * 5)[1])
    assert a.src[0].src[0] is b.src[0].src[0] and (a.src[0].src[2], b.src[0].src[2]) == (x, y)


def test_G2_an_alloc_is_one_fresh_buffer_per_invocation():
    t = alloc()
    lin = template((t, param(0)), (param(1), t))
    args = [floats(1, 2, 3, 4), floats(0, 0, 0, 0)]
    one, two = (resolve_linear_call(lin, args) for _ in range(2))
    assert one.src[0].src[1] is one.src[1].src[2] is not two.src[0].src[1]
    assert one.src[0].src[1].op is Ops.BUFFER and one.src[0].src[1].device == 'PYTHON'


def test_G2_devices():
    here = UOp(Ops.ALLOC, F32, (), ParamArg(-1, (4,), None))
    there = UOp(Ops.ALLOC, F32, (), ParamArg(-2, (4,), 'NULL'))
    n = Variable('n', 0, 3).bind(1)
    linear = resolve_linear_call(template((here, there)), [n, floats(1)])
    assert [u.device for u in linear.src[0].src[1:]] == ['PYTHON', 'NULL']   # n has none


def test_G2_views_of_allocs():
    arena = UOp(Ops.ALLOC, dtypes.uint8, (), ParamArg(-1, (512,), 'PYTHON'))
    views = [arena._movement(Ops.SHRINK, ((lo, lo + 16),)).bitcast(F32) for lo in (0, 256)]
    linear = resolve_linear_call(template(tuple(views)), [])
    a, b = linear.src[0].src[1:]
    assert a.storage is b.storage and [buffer_of(u).offset for u in (a, b)] == [0, 256]


def test_G3_nested_params_shadow_the_outer_ones():
    inner = template((param(0, 1), alloc(1)))
    outer = UOp(Ops.LINEAR, VOID, (inner.call(param(1, 1)), BODY.call(param(0, 1)), inner.call(param(0, 1))))
    a, b = floats(1), floats(2)
    linear = resolve_linear_call(outer, [a, b])
    assert [c.src[1] for c in linear.src] == [b, a, a]
    assert linear.src[0].src[2] is not linear.src[2].src[2]   # G2: fresh in each


def test_G3_a_nested_call_may_get_a_buffer_twice():
    inner = template((param(0, 1), param(2, 1)), (param(1, 1), param(0, 1)))
    outer = UOp(Ops.LINEAR, VOID, (inner.call(param(1, 1), param(1, 1), param(0, 1)),))
    a, b = floats(1), floats(2)
    assert [c.src[1:] for c in resolve_linear_call(outer, [a, b]).src] == [(b, a), (b, b)]


def test_G5_nested_results_are_flattened():
    linear = template((param(0, 1),))
    for _ in range(3): linear = UOp(Ops.LINEAR, VOID, (linear.call(param(0, 1)), linear.call(param(0, 1))))
    assert calls(resolve_linear_call(linear, [floats(1)])) == [Ops.SINK] * 8
    deep = template((param(0, 1),))
    for _ in range(3000): deep = UOp(Ops.LINEAR, VOID, (deep.call(param(0, 1)),))
    assert calls(resolve_linear_call(deep, [floats(1)])) == [Ops.SINK]


# ---- I1, I2

def test_I1_variables_and_their_values():
    n, m = Variable('n', 1, 9), Variable('m', 1, 9)
    x = Tensor([1, 2]).realize()
    linear, values = (x * n.bind(3) + m.bind(5)).linear_with_vars()
    assert values == {'n': 3, 'm': 5}
    assert not [a for c in linear.src for a in c.src[1:] if a.op is Ops.BIND]
    assert create_linear_with_vars(linear) == (linear, {})   # nothing bound is left


def test_I1_only_variables_that_are_used():
    n = Variable('n', 1, 9)
    x = Tensor([1, 2]).realize()
    unused = x * n.bind(3)
    assert (x + 1).linear_with_vars()[1] == {} and unused.tolist() == [3, 6]


def test_I1_the_values_may_be_others_when_it_runs():
    n, x = Variable('n', 1, 9), Tensor([1, 2]).realize()
    y = x * n.bind(3)
    linear, values = y.linear_with_vars()
    run_linear(linear, {**values, 'n': 7})
    assert y.tolist() == [7, 14]
    with pytest.raises(RuntimeError, match='n has no value'): run_linear(linear)
    with pytest.raises(ValueError, match='bind of n to 10: wanted 1..9'): run_linear(linear, {'n': 10})
    with pytest.raises(TypeError, match="bind of n to 'ten': wanted a whole number"): run_linear(linear, {'n': 'ten'})


def test_I1_a_write_into_a_part_is_waited_for():
    n, x = Variable('n', 1, 9), Tensor([1, 2, 3, 4]).contiguous().realize()
    x[1:3] = x[1:3] * n.bind(5)
    linear, values = x.linear_with_vars()
    with pytest.raises(RuntimeError, match='never run'): x.numpy()
    run_linear(linear, values)
    assert x.tolist() == [1, 10, 15, 4]


def test_I2_two_bindings_of_one_variable_both_come_out_right():
    n, x = Variable('n', 1, 9), Tensor([1, 2]).realize()
    y = x * n.bind(3) + n.bind(5)
    assert y.tolist() == [8, 11]
    z = (x * n.bind(3)).contiguous().sum() + n.bind(5)
    assert z.item() == 14


def test_I2_a_free_name_with_two_values_is_refused_and_nothing_happens():
    n, x = Variable('n', 1, 9), Tensor([1, 2]).realize()
    y = x * n.bind(3) + n.bind(5)
    before = y.cell.state
    with pytest.raises(RuntimeError, match=r'bind mismatch: n .*3.*5'): y.linear_with_vars()
    assert y.cell.state is before and y.tolist() == [8, 11]


def test_I2_equal_bindings_are_one_value():
    n, x = Variable('n', 1, 9), Tensor([1, 2]).realize()
    linear, values = (x * n.bind(3) + n.bind(3)).linear_with_vars()
    assert values == {'n': 3}


# ---- L2, L3

def test_L2_each_level_tells_more(capsys):
    x = Tensor([1.0, 2, 3, 4]).realize()
    texts = []
    for level in range(7):
        with Context(DEBUG=level): ((x + level).contiguous().sum() * x).realize()
        texts.append(capsys.readouterr().out)
    assert texts[0] == ''
    assert 'scheduled' in texts[1] and 'GFLOPS' not in texts[1]
    assert 'GFLOPS' in texts[2] and 'GB/s' in texts[2] and 'asked for by .contiguous()' not in texts[2]
    assert 'asked for by .contiguous()' in texts[3]                 # why a kernel begins
    assert 'for ' in texts[4] or 'PARAM' in texts[4] or len(texts[4]) > len(texts[3])
    assert len(texts[6]) > len(texts[4]) and 'RANGE' in texts[6]


STAGES = ['key', 'verify program', 'verify call', 'prepare', 'verify prepare', 'rangeify', 'order', 'verify kernels',
          'linearize', 'verify linearize', 'memory', 'verify memory', 'schedule', 'resolve']


def test_L3_marks_around_every_stage():
    x = Tensor([1.0, 2]).realize()
    y, z = x + 123.25, x * 3
    profile_events.clear()
    with Context(PROFILE=1): y.realize()
    names = [e.name for e in profile_events]
    assert [n for n in STAGES if n not in names] == []
    assert any(n.startswith('compile') for n in names) and any(n.startswith('run ') for n in names)
    profile_events.clear()
    with Context(PROFILE=1, SCACHE=1): (x + 123.25).realize()
    assert [e.name for e in profile_events if e.name in STAGES] == ['key', 'schedule', 'resolve']   # a hit
    profile_events.clear()
    z.realize()
    assert not profile_events


def test_L3_marks_nest_and_have_durations():
    profile_events.clear()
    x = Tensor([1.0, 2]).realize()
    with Context(PROFILE=1): (x - 1).realize()
    at = {e.name: e for e in profile_events}
    outer, inner = at['schedule'], at['prepare']
    assert outer.start <= inner.start and inner.start + inner.duration <= outer.start + outer.duration
    assert all(e.duration >= 0 for e in profile_events)


def test_L3_global_counters():
    x = Tensor([1.0, 2, 3, 4]).realize()
    GlobalCounters.reset()
    (x + 1).realize()
    assert (GlobalCounters.kernel_count, GlobalCounters.global_ops, GlobalCounters.global_mem) == (1, 4, 32)
    assert GlobalCounters.time_sum_s > 0


# ---- figures

def test_figures_of_a_schedule():
    x = Tensor([1.0, 2, 3, 4]).realize()
    stats = sched_stats(((x + 1).contiguous().sum() + x).schedule_linear())
    assert stats == dict(kernels=3, copies=0, io_bytes=32 + 20 + 36, tmp_before=20, tmp_after=2 * Device['PYTHON'].limits.align)


def test_without_the_cache_every_program_is_scheduled_anew(monkeypatch):
    x, count, real = Tensor([1.0, 2]).realize(), [], pipeline.prepare
    monkeypatch.setattr(pipeline, 'prepare', lambda body, *more: count.append(body) or real(body, *more))
    with tinysched.no_schedule_cache():
        for _ in range(3): (x + 7).realize()
    assert (len(count), len(schedule_cache)) == (3, 1)   # only the list itself was remembered, before


def test_B7_policies_of_one_name_are_two():
    "Two functions with one name share no schedule: neither in a loop nor where a cell ran again"
    def make(reason): return lambda site: reason
    store_all, default_like = make(Reason('E1', 'a test')), make(None)
    assert settings(store_all) != settings(default_like)
    assert settings(store_all) == settings(store_all) and settings(default_policy)[0] == 'default'
