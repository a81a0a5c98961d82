"""Devices as independent queues: what overlaps, what never does, and what is left when a run is broken off (F2, F4, K3)."""
import gc
import itertools
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from test_robust import ran as output_of
from tinysched import Context, Device, GlobalCounters, Tensor, TinyJit
from tinysched.frontend import state
from tinysched.helpers import profile_events
from tinysched.ir.dtype import dtypes
from tinysched.ir.uop import KernelInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import realize as runtime
from tinysched.runtime.device import buffer_of, crowd
from tinysched.runtime.realize import lane_of, order_of, run_launches, run_linear, steps_of, waits_of

SOON = 20    # seconds; nothing here takes long unless it waits for ever
WORKING = [name for name in ('PYTHON', 'CPU', 'CL') if not Device.failure(name)]


@pytest.fixture(autouse=True)
def in_silence():
    "Nothing may be owed or refused because of a test before this one"
    state.unfinished.clear()
    yield
    state.unfinished.clear()


# ---- schedules by hand: buffers of eight floats, or parts of them

f32 = dtypes.float32
LINE = UOp.range(4, 0)


def param(slot, size=4): return UOp.param(slot, f32, (size,))


def kernel(n_reads, covers=True):
    "A kernel that writes 3 times the sum of what it reads, plus 1, modulo 101"
    total = UOp.const(f32, 1.0)
    for slot in range(1, n_reads + 1): total = total + param(slot).index(LINE) * 3.0
    wrapped = total - (total * (1 / 101)).cast(dtypes.int32).cast(f32) * 101.0
    return UOp.sink(param(0).index(LINE).store(wrapped).end(LINE), arg=KernelInfo(f'k{n_reads}'))


KERNELS = [kernel(n) for n in range(4)]
MOVE = param(0).store(param(1))


def storage(device, size=4):
    u = UOp.buffer(device, (size,), f32)
    buffer_of(u).copyin(np.arange(size, dtype=np.float32).data)
    return u


def run_call(out, *sources): return KERNELS[len(sources)].call(out, *sources)


def linear(*calls): return UOp(Ops.LINEAR, dtypes.void, calls)


def content(u): return buffer_of(u).numpy().tolist()


def launches_of(calls, start=lambda call: None):
    "Launches of calls that only call `start`, and their order"
    steps = steps_of(linear(*calls))
    made = [runtime.Launch(s, f'{n}', lambda n=n: start(n), 1, 1, 'source') for n, s in enumerate(steps)]
    return made, order_of(steps)


def run(calls, start):
    "Numbers of the launches that have run, with `start(number)` for each in its thread"
    launches, order = launches_of(calls, start)
    done = set()
    run_launches(launches, done, order)
    return done


# ---- K3: independent launches overlap

@pytest.mark.parametrize('kind', WORKING)
@pytest.mark.parametrize('n', [2, 4])
def test_K3_kernels_of_different_devices_run_at_the_same_time(kind, n):
    together = threading.Barrier(n, timeout=SOON)     # each waits until all are there
    calls = [run_call(storage(f'{kind}:{i}')) for i in range(n)]
    assert run(calls, lambda number: together.wait()) == set(range(n))


def test_K3_a_copy_runs_beside_the_kernels_of_both_its_devices():
    a, b, c, d = (storage(f'PYTHON:{i}') for i in (0, 1, 0, 1))
    together = threading.Barrier(3, timeout=SOON)
    calls = [run_call(a), run_call(b), MOVE.call(d, c)]
    assert run(calls, lambda number: together.wait()) == {0, 1, 2}


def test_K3_parts_of_one_arena_do_not_wait_for_each_other():
    arena, near = storage('PYTHON:1', 8), storage('PYTHON')
    low, high = (arena.shrink(((i, i + 4),)) for i in (0, 4))
    together = threading.Barrier(3, timeout=SOON)
    calls = [MOVE.call(low, near), run_call(high), run_call(storage('PYTHON'))]
    assert run(calls, lambda number: together.wait()) == {0, 1, 2}
    steps = steps_of(linear(MOVE.call(low, near), run_call(arena.shrink(((3, 7),))), run_call(high)))
    assert [set(w) for w in waits_of(steps)] == [set(), {0}, set()]


def test_K3_kernels_of_one_device_keep_their_order():
    seen = []
    calls = [run_call(storage(f'PYTHON:{i % 2}')) for i in range(40)]
    run(calls, seen.append)
    assert [n for n in seen if n % 2] == list(range(1, 40, 2)) and sorted(seen) == list(range(40))


def test_K3_one_device_starts_no_thread(monkeypatch):
    def never(*_): raise AssertionError('a thread for one device')
    monkeypatch.setattr(runtime, 'in_queues', never)
    me = threading.get_ident()
    who = []
    far = storage('NPY')
    run([MOVE.call(storage('PYTHON:3'), far), run_call(storage('PYTHON:3'))], lambda number: who.append(threading.get_ident()))
    assert who == [me, me]
    (Tensor([1, 2], device='CPU') + 1).tolist()


def test_K3_files_are_no_devices_of_their_own(tmp_path):
    x = storage('CPU')
    calls = [run_call(x), *(MOVE.call(UOp.buffer(f'DISK:{tmp_path}/{i}', (4,), f32), x) for i in range(5))]
    assert order_of(steps_of(linear(*calls))) is None
    both = steps_of(linear(*calls, run_call(storage('CPU:1'))))
    assert set(map(lane_of, both)) == {('CPU', True), ('CPU:1', True), ('DISK', False)}


def test_K3_threads_are_kept():
    calls = [run_call(storage(f'PYTHON:{i}')) for i in range(3)]
    run(calls, lambda number: None)
    before, who = threading.active_count(), [set(), set(), set()]
    for _ in range(20): run(calls, lambda number: who[number].add(threading.get_ident()))
    assert threading.active_count() == before and [len(w) for w in who] == [1, 1, 1]
    queues = [t for t in threading.enumerate() if t.name.startswith('queue PYTHON')]
    assert len(queues) >= 3 and all(t.daemon for t in queues)


def test_K3_devices_share_the_processors(monkeypatch):
    cpu = pytest.importorskip('tinysched.runtime.cpu') if 'CPU' in WORKING else pytest.fail('no compiler')
    monkeypatch.setattr(cpu, 'workers', lambda: 4)
    monkeypatch.setattr(Device, 'opened', {})
    runtime.programs.clear()
    counts, real = [], cpu.shares
    monkeypatch.setattr(cpu, 'shares', lambda steps, n: counts.append(n) or real(steps, n))
    big = np.ones((128, 128), np.float32)
    xs = [Tensor(big, device=f'CPU:{i}').realize() for i in range(2)]
    Tensor.realize(*(x @ x for x in xs))
    assert counts == [2, 2]
    counts.clear()
    (xs[0] @ xs[0]).realize()
    assert counts == [4]
    runtime.programs.clear()


def test_K3_a_launch_knows_how_many_devices_work():
    seen = []
    for n in (2, 3, 1, 2): run([run_call(storage(f'PYTHON:{i}')) for i in range(n)], lambda number: seen.append(crowd.devices))
    assert seen == [2, 2, 3, 3, 3, 1, 2, 2]


def test_K3_two_runs_stand_in_the_same_order_in_all_lanes(monkeypatch):
    first, second = (runtime.Sent([], set(), runtime.Order({('PYTHON', True): [0], ('PYTHON:1', True): [1]}, [])) for _ in range(2))
    come = threading.Event()     # the second run wants the lock, or has it behind it
    class Lock:
        inner = threading.Lock()
        def __enter__(self):
            if threading.current_thread() is other: come.set()
            self.inner.acquire()
        def __exit__(self, *_): self.inner.release()
    class Lane(list):
        def put(self, job):
            self.append(job.args[0].__self__)
            if self == [first] and other.ident is None:     # half of the first run is sent
                other.start()
                assert come.wait(SOON)
    def send_second():
        second.send(lanes)
        come.set()
    other, lanes = threading.Thread(target=send_second, daemon=True), [Lane(), Lane()]
    monkeypatch.setattr(runtime, 'lock', Lock())
    first.send(lanes)
    other.join(SOON)
    assert lanes == [[first, second]] * 2


# ---- F4, F2: dependent launches never overlap

HAZARDS = {
    'reads what was copied': lambda a, b: [MOVE.call(b, a), run_call(b, b)],
    'copies what was computed': lambda a, b: [run_call(a), MOVE.call(b, a)],
    'overwrites what is copied': lambda a, b: [MOVE.call(b, a), run_call(a)],
    'overwrites what was read': lambda a, b: [run_call(storage('PYTHON:1'), b), MOVE.call(b, a)],
    'writes the same again': lambda a, b: [run_call(b), MOVE.call(b, a)],
    'writes into a part': lambda a, b: [MOVE.call(b, a), run_call(b.shrink(((0, 4),)))],
}


@pytest.mark.parametrize('case', HAZARDS)
def test_F4_who_depends_on_another_queue_waits_for_it(case):
    calls = HAZARDS[case](storage('PYTHON'), storage('PYTHON:1'))
    calls.append(run_call(storage('PYTHON:2')))     # one that is free
    free, first_done, wrong = threading.Event(), threading.Event(), []
    def start(number):
        if number == 2: free.set()
        elif number == 0:
            assert free.wait(SOON)                  # while this runs, the free one does too
            time.sleep(.02)
            first_done.set()
        elif not first_done.is_set(): wrong.append(number)
    assert run(calls, start) == {0, 1, 2} and not wrong


def test_F4_each_piece_of_a_stack_is_waited_for():
    x = Tensor(np.arange(8, dtype=np.float32), device='PYTHON').realize().shard(('PYTHON', 'PYTHON:1'), 0).realize()
    y = ((x + 1).to('PYTHON') * 2).sum()
    assert y.item() == 2 * (28 + 8)


def random_calls(rng, devices, n):
    "Calls over a few buffers and parts of arenas on each device, and those buffers"
    roots = {d: [storage(d) for _ in range(3)] + [storage(d, 12)] for d in devices}
    def some(d):
        u = rng.choice(roots[d])
        if u.shape == (4,): return u
        at = rng.randrange(9)
        return u.shrink(((at, at + 4),))
    def apart(out, sources): return [s for s in sources if s.storage is not out.storage or s is out]
    calls = []
    for _ in range(n):
        d = rng.choice(devices)
        out = some(d)
        if rng.random() < .4:
            source = some(rng.choice([e for e in devices if e != d]))
            calls.append(MOVE.call(out, source))
        else: calls.append(run_call(out, *apart(out, [some(d) for _ in range(rng.randrange(4))])))
    return calls, [u for us in roots.values() for u in us]


def reset(roots):
    for k, u in enumerate(roots):
        size = u.shape[0]
        buffer_of(u).copyin((np.arange(size, dtype=np.float32) + k).data)


def sleepy(rng, launch):
    "The launch, which sometimes dawdles before or after its work"
    before, after = (rng.choice([0, 0, 0, 1e-5, 3e-4]) for _ in range(2))
    def start():
        if before: time.sleep(before)
        launch.start()
        if after: time.sleep(after)
    return launch._replace(start=start)


@pytest.mark.parametrize('seed', range(12))
def test_F4_random_schedules_give_what_they_give_one_by_one(seed):
    rng = random.Random(seed)
    devices = [f'PYTHON:{i}' for i in range(2 + seed % 3)]
    calls, roots = random_calls(rng, devices, 150)
    with Context(CHECK_OOB=0):
        steps = steps_of(linear(*calls))
        launches = [runtime.launch_of(s, p, {}) for s, p in zip(steps, runtime.compiled(steps))]
    results = []
    for order in (None, order_of(steps), order_of(steps)):
        reset(roots)
        done = set()
        run_launches([sleepy(rng, x) for x in launches], done, order)
        assert done == set(range(150))
        results.append([content(u) for u in roots])
    assert results[0] == results[1] == results[2]


def clashes_directly(steps):
    "Pairs of steps that touch the same bytes, one of them writing; all of them, by brute force"
    def bytes_of(s, slots): return {(id(b.base), k) for slot in slots for b in [s.buffers[slot]] for k in range(b.offset, b.offset + b.nbytes)}
    reads, writes = ([bytes_of(s, getattr(s.touch, way)) for s in steps] for way in ('reads', 'writes'))
    return {(i, j) for j in range(len(steps)) for i in range(j)
            if writes[i] & (reads[j] | writes[j]) or reads[i] & writes[j]}


@pytest.mark.parametrize('seed', range(20))
def test_F4_waits_and_queues_imply_every_dependency_and_no_other(seed):
    rng = random.Random(100 + seed)
    calls, _ = random_calls(rng, [f'PYTHON:{i}' for i in range(2 + seed % 3)], 60)
    steps = steps_of(linear(*calls))
    waits, pairs = waits_of(steps), clashes_directly(steps)
    assert all((i, j) in pairs for j, w in enumerate(waits) for i in w)     # nobody waits without a reason
    before, last = [], {}
    for n, s in enumerate(steps):
        own = {last[lane_of(s)]} if lane_of(s) in last else set()
        before.append(set().union(*({i} | before[i] for i in waits[n] | own)))
        last[lane_of(s)] = n
    assert all(i in before[j] for i, j in pairs)


def test_F4_the_order_is_found_in_linear_time():
    def seconds(n):
        x, y = storage('PYTHON'), storage('PYTHON:1')
        steps = steps_of(linear(*itertools.islice(itertools.cycle([run_call(x), MOVE.call(y, x), run_call(y, y)]), n)))
        t = time.process_time()
        waits_of(steps)
        return time.process_time() - t
    seconds(30)
    assert seconds(2400) < 10 * seconds(300) + .05


# ---- failures

def accounts(devices=('PYTHON', 'PYTHON:1')):
    "Tensors on several devices with writes that wait for each other, and what they must read as"
    a, b = (Tensor([k, 2 * k], device=d, dtype=dtypes.float32).realize() for k, d in zip((1, 10), devices))
    old = a + b.to(devices[0])          # a snapshot of both, before the writes
    a += b.to(devices[0])
    b *= a.to(devices[1])
    a -= 1
    free = Tensor([7., 8.], device=devices[1]).realize()
    free += 1
    s = Tensor(np.arange(4, dtype=np.float32), device=devices[0]).shard(devices, 0).realize()
    s += 1
    return {a: [10, 21], b: [110, 440], old: [11, 22], free: [8, 9], s: [1, 2, 3, 4]}


def starts(monkeypatch, act):
    "Each launch, kernel or copy, calls `act(number, start)` instead of start()"
    count, lock = itertools.count(), threading.Lock()
    def wrap(make):
        def made(*args):
            launch = make(*args)
            def start():
                with lock: number = next(count)
                act(number, launch.start)
            return launch._replace(start=start)
        return made
    for name in ('kernel_launch', 'copy_launch'): monkeypatch.setattr(runtime, name, wrap(getattr(runtime, name)))


@pytest.mark.parametrize('error', [RuntimeError('hiccup'), MemoryError('none'), KeyboardInterrupt])
@pytest.mark.parametrize('at', range(14))
def test_M10_an_error_in_any_launch_of_several_devices_loses_no_write(monkeypatch, at, error):
    expected = accounts()
    def act(number, start):
        if number == at: raise error
        start()
    with monkeypatch.context() as patch:
        starts(patch, act)
        try: Tensor.realize(*expected)
        except BaseException as e: assert e is error or isinstance(e, KeyboardInterrupt)
    for t, value in expected.items(): assert t.tolist() == value
    assert not state.unfinished


def survive(monkeypatch, expected, failing):
    "Accounts keep their books where launches with these numbers fail"
    def act(number, start):
        if number in failing: raise RuntimeError('hiccup')
        start()
    with monkeypatch.context() as patch:
        starts(patch, act)
        try: Tensor.realize(*expected)
        except RuntimeError as e: assert 'hiccup' in str(e)
    for t, value in expected.items(): assert t.tolist() == value


def test_M10_the_device_without_memory_is_named(monkeypatch):
    def refuse(nbytes): raise MemoryError('full')
    x = Tensor(np.ones((8, 8), np.float32)).shard(tuple(f'PYTHON:{i}' for i in range(4)), 0)
    with monkeypatch.context() as patch:
        patch.setattr(Device['PYTHON:2'], 'allocate', refuse)
        with pytest.raises(MemoryError, match='no room for 64 bytes in 1 buffers on PYTHON:2'): x.realize()
    assert (x + 1).sum().item() == 128


@pytest.mark.parametrize('at', range(10))
def test_M10_two_errors_at_once(monkeypatch, at):
    survive(monkeypatch, accounts(), (at, at + 1))


def test_M10_after_a_failure_what_runs_is_waited_for_and_nothing_new_begins():
    free, began, ended = threading.Event(), [], []
    calls = [run_call(storage('PYTHON')), run_call(storage('PYTHON:1')), run_call(storage('PYTHON:1')), run_call(storage('PYTHON'))]
    def start(number):
        began.append(number)
        if number == 0:
            assert free.wait(SOON)
            raise RuntimeError('broken')
        free.set()
        time.sleep(.05)
        ended.append(number)
    launches, order = launches_of(calls, start)
    done = set()
    with pytest.raises(RuntimeError, match='broken'): run_launches(launches, done, order)
    assert sorted(began) == [0, 1] and done == {1} and ended == [1]


def test_M10_of_several_errors_the_first_in_order_is_raised():
    together = threading.Barrier(2, timeout=SOON)
    def start(number):
        together.wait()
        if number == 0: time.sleep(.02)
        raise RuntimeError(f'number {number}')
    with pytest.raises(RuntimeError, match='number 0'): run([run_call(storage(f'PYTHON:{i}')) for i in (1, 0)], start)


def test_M10_a_failed_run_holds_no_memory():
    gc.collect()
    gc.disable()
    try:
        before = GlobalCounters.mem_used
        calls = [run_call(storage(f'PYTHON:{i}')) for i in (0, 1)]
        def start(number): raise RuntimeError('broken')
        with pytest.raises(RuntimeError): run(calls, start)
        run(calls, lambda number: None)
        del calls
        assert GlobalCounters.mem_used == before
    finally: gc.enable()


def test_M10_ctrl_c_is_heard_while_the_devices_work(monkeypatch):
    expected = accounts()
    def act(number, start):
        if number == 3: os.kill(os.getpid(), signal.SIGINT)
        time.sleep(.01)
        start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            starts(patch, act)
            with pytest.raises(KeyboardInterrupt): Tensor.realize(*expected)
    finally: signal.signal(signal.SIGINT, before)
    for t, value in expected.items(): assert t.tolist() == value


def test_M10_ctrl_c_at_any_moment_of_a_run_on_two_devices(tmp_path):
    assert output_of("""
        import os, random, signal, threading, time
        import numpy as np
        from tinysched import Tensor
        rng, hit = random.Random(0), 0
        xs = [Tensor(np.zeros(4000, np.float32), device=d).realize() for d in ('CPU', 'CPU:1')]
        values = [np.zeros(4000, np.float32) for _ in xs]
        def step():
            for _ in range(6):
                for i in (0, 1): xs[i].assign(xs[i] + 1 + xs[1 - i].to(xs[i].device) * .5)
        def model():
            for _ in range(6):
                for i in (0, 1): values[i] = values[i] + np.float32(1) + values[1 - i] * np.float32(.5)
            for i in (0, 1): values[i] = values[i] % 1e30
        def go():
            step(); Tensor.realize(*xs)
        go(); model()
        t = time.perf_counter(); go(); model(); typical = time.perf_counter() - t
        for k in range(60):
            step()
            timer = threading.Timer(rng.random() * typical, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                Tensor.realize(*xs)
                timer.join()
                time.sleep(.001)
            except KeyboardInterrupt: hit += 1
            try:
                timer.join()
                time.sleep(.001)
            except KeyboardInterrupt: hit += 1
            model()
            for i in (0, 1): np.testing.assert_allclose(xs[i].numpy(), values[i], rtol=1e-4, err_msg=str(k))
            for i in (0, 1): xs[i].assign(xs[i] * 0); values[i] = values[i] * 0
            Tensor.realize(*xs)
        print('hit' if hit > 50 else hit)
    """, 'CPU', XDG_CACHE_HOME=str(tmp_path)) == 'hit\n'


IN_A_KERNEL = """
    import os, signal, threading, time
    import numpy as np
    from tinysched import Device, Tensor
    n = 300_000 if Device.DEFAULT == 'CPU' else 300
    def longer(x):
        t = x * 0 + 0.5
        for _ in range(100): t = t * t - t * 0.3
        return x + 1 + (t > 9).cast(t.dtype)
    x = Tensor(np.zeros(n, np.float32)).realize()
    for _ in range(2):
        t = time.perf_counter()
        x.assign(longer(x)).realize()
        typical = time.perf_counter() - t
    hit = 0
    for k in range(8):
        x.assign(longer(x))
        timer = threading.Timer(typical * (.3 + .05 * k), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            x.realize()
            timer.join()
            time.sleep(.01)
        except KeyboardInterrupt: hit += 1
        assert set(x.numpy().tolist()) == {3 + k}, (k, x.numpy())
    print('hit' if hit == 8 else hit)
"""


@pytest.mark.parametrize('device', ['CPU', 'PYTHON'])
def test_M10_ctrl_c_in_the_middle_of_a_kernel_does_not_run_it_twice(device, tmp_path):
    assert output_of(IN_A_KERNEL, device, XDG_CACHE_HOME=str(tmp_path)) == 'hit\n'


def test_M10_a_handler_of_ctrl_c_that_raises_nothing_breaks_nothing_off():
    x = storage('PYTHON')
    launches, _ = launches_of([run_call(x)] * 3, lambda number: number or signal.raise_signal(signal.SIGINT))
    heard, done = [], set()
    def mine(*_): heard.append(len(done))
    before = signal.signal(signal.SIGINT, mine)
    try:
        run_launches(launches, done)
        assert signal.getsignal(signal.SIGINT) is mine
    finally: signal.signal(signal.SIGINT, before)
    assert heard == [1] and done == {0, 1, 2}


@pytest.mark.parametrize('kind', WORKING)
@pytest.mark.parametrize('at', [0, 2, 5, 8])
def test_M10_an_error_on_each_kind_of_device_loses_no_write(monkeypatch, at, kind):
    survive(monkeypatch, accounts((kind, f'{kind}:1')), (at,))


# ---- what is seen of a run

def test_L2_each_line_of_debug_names_its_device_in_schedule_order(capfd):
    calls = [run_call(storage(f'PYTHON:{i % 2}')) for i in range(6)]
    with Context(DEBUG=2): run(calls, lambda number: time.sleep(.002 * (6 - number)))
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[f'PYTHON{":1" * (i % 2)}', str(i)] for i in range(6)]


def test_L3_marks_carry_the_device_and_settings_reach_the_threads():
    profile_events.clear()
    calls = [run_call(storage(f'PYTHON:{i}')) for i in (0, 1)]
    together = threading.Barrier(2, timeout=SOON)
    with Context(PROFILE=1): run(calls, lambda number: together.wait())
    runs = [e for e in profile_events if e.name.startswith('run')]
    assert {(e.name, e.device) for e in runs} == {('run 0', 'PYTHON'), ('run 1', 'PYTHON:1')}
    assert sum(e.duration for e in runs) > 0
    profile_events.clear()


def test_L3_what_has_run_is_counted_also_if_something_failed():
    GlobalCounters.reset()
    calls = [run_call(storage('PYTHON')), run_call(storage('PYTHON:1')), run_call(storage('PYTHON'))]
    free = threading.Event()
    def start(number):
        if number == 1:
            assert free.wait(SOON)
            raise RuntimeError('broken')
        free.set() if number == 2 else None
    with pytest.raises(RuntimeError): run(calls, start)
    assert (GlobalCounters.kernel_count, GlobalCounters.global_ops) == (2, 2)


def test_M10_promises_are_kept_in_the_queues():
    x, y = storage('PYTHON'), storage('PYTHON:1')
    made = runtime.mark_pending(linear(run_call(x), MOVE.call(y, x)))
    with pytest.raises(RuntimeError, match='never run'): content(y)
    run_linear(made)
    assert content(y) == content(x) == [1, 1, 1, 1] and not buffer_of(x).pending
    assert buffer_of(x).version == buffer_of(y).version == 1


# ---- jit, threads, fork, the end

@pytest.mark.parametrize('kind', WORKING)
def test_I5_a_replay_on_two_devices_runs_in_queues(kind, monkeypatch):
    a, b = f'{kind}:0', f'{kind}:1'
    w, v = (Tensor([1., 2.], device=d).realize() for d in (a, b))
    @TinyJit
    def f(x):
        w.assign(w + x)
        v.assign(v + w.to(b))
        return (v.to(a) * 2).realize(), w.realize(), v.realize()
    used, real = [], runtime.in_queues
    monkeypatch.setattr(runtime, 'in_queues', lambda *args: used.append(len(args[0])) or real(*args))
    mw, mv = np.float32([1, 2]), np.float32([1, 2])
    for k in range(6):
        out, *_ = f(Tensor([float(k), 1.], device=a).realize())
        mw = mw + np.float32([k, 1])
        mv = mv + mw
        assert out.tolist() == (mv * 2).tolist() and w.tolist() == mw.tolist() and v.tolist() == mv.tolist()
    assert len(used) >= 4


@pytest.mark.parametrize('at', range(6))
def test_I5_an_interrupted_replay_on_two_devices_is_finished_by_the_next_call(monkeypatch, at):
    v, w = (Tensor([0.], device=d).realize() for d in ('PYTHON', 'PYTHON:1'))
    @TinyJit
    def f(x):
        v.assign(v + x)
        w.assign(w + v.to('PYTHON:1'))
        return (v * 10).realize(), w.realize()
    for _ in range(3): f(Tensor([1.], device='PYTHON').realize())
    x, count, lock = Tensor([1.], device='PYTHON').realize(), itertools.count(), threading.Lock()
    real = runtime.run_launches
    def fails(launch):
        def start():
            with lock: number = next(count)
            if number == at: raise KeyboardInterrupt
            launch.start()
        return launch._replace(start=start)
    from tinysched.frontend import jit
    monkeypatch.setattr(jit, 'run_launches', lambda launches, *rest: real([fails(x) for x in launches], *rest))
    try: f(x)
    except KeyboardInterrupt: pass
    monkeypatch.undo()
    if v.tolist() == [3]: f(x)     # the first launch failed, so nothing has happened
    assert v.tolist() == [4] and w.tolist() == [1 + 2 + 3 + 4]
    assert f(x)[0].tolist() == [50] and w.tolist() == [15]


def test_two_user_threads_at_once():
    "Runs of two threads meet in the same queues, in opposite order, and none waits for ever"
    wrong = []
    def work(first, second):
        mine = [storage(first), storage(second)]
        calls = [run_call(mine[0]), MOVE.call(mine[1], mine[0]), run_call(mine[1], mine[1]), MOVE.call(mine[0], mine[1])]
        program = linear(*calls)
        for _ in range(50):
            run_linear(program)
            if content(mine[0]) != [4, 4, 4, 4]: wrong.append(content(mine[0]))
    pairs = [('PYTHON:1', 'PYTHON:2'), ('PYTHON:2', 'PYTHON:1')] * 2
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
    for t in threads: t.start()
    for t in threads: t.join(SOON)
    assert not any(t.is_alive() for t in threads) and not wrong


def test_two_user_threads_with_tensors():
    wrong = []
    def work(k):
        x = Tensor([float(k)], device='CPU').realize()
        for i in range(15):
            y = (x + i).to('CPU:1') * 2
            z = y.to('CPU:2') + 1
            if z.item() != 2 * (k + i) + 1 or y.item() != 2 * (k + i): wrong.append((k, i))
    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(3)]
    for t in threads: t.start()
    for t in threads: t.join(2 * SOON)
    assert not any(t.is_alive() for t in threads) and not wrong


FORKING = """
    import os
    from tinysched import Tensor
    def sums(k):
        xs = [Tensor([float(k), 2.], device=d).realize() for d in ('CPU', 'CPU:1')]
        ys = [x * 2 + 1 for x in xs]
        Tensor.realize(*ys)
        return [y.tolist() for y in ys]
    assert sums(1) == [[3, 5]] * 2
    if not (child := os.fork()):
        assert sums(2) == [[5, 5]] * 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sums(3) == [[7, 5]] * 2
    print('forked')
"""


def test_a_forked_process_has_queues_of_its_own(): assert output_of(FORKING, 'CPU') == 'forked\n'


def test_the_end_of_the_process_waits_for_nothing_and_says_nothing():
    assert output_of("""
        import atexit
        from tinysched import Tensor
        def go(): return Tensor.realize(*(Tensor([1., 2.], device=f'PYTHON:{i}') + 1 for i in range(4)))
        go()
        atexit.register(lambda: (go(), print('at the end')))
        print('done')
    """, 'PYTHON') == 'done\nat the end\n'


def test_where_no_thread_can_be_started_launches_run_one_by_one(monkeypatch):
    def refuse(self): raise RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, 'start', refuse)
    monkeypatch.setattr(runtime, 'inboxes', {})
    seen = []
    assert run([run_call(storage(f'PYTHON:{i % 2}')) for i in range(4)], seen.append) == {0, 1, 2, 3} and seen == [0, 1, 2, 3]


# ---- independent queues and memories

@pytest.mark.parametrize('kind', WORKING)
def test_each_device_has_its_queue_and_its_memory(kind):
    names = [f'{kind}:{i}' for i in range(8 if kind == 'CPU' else 4)]
    machines = [Device[n] for n in names]
    assert len(set(machines)) == len(names)
    assert len({id(m.pool) for m in machines}) == len(names)
    if kind == 'CL': assert len({m.queue for m in machines}) == len(names)
    xs = [Tensor([float(i), 1.], device=n).realize() for i, n in enumerate(names)]
    ys = [(x * 2).contiguous() for x in xs]
    Tensor.realize(*ys)
    assert [y.tolist() for y in ys] == [[2 * i, 2] for i in range(len(names))]
    assert [y.device for y in ys] == [Device.canonicalize(n) for n in names]
    moved = xs[0].to(names[-1])
    xs[0].assign(xs[0] + 5)
    Tensor.realize(xs[0], moved)
    assert (moved.tolist(), xs[0].tolist()) == ([0, 1], [5, 6])


@pytest.mark.parametrize('kind', WORKING)
def test_a_long_chain_across_devices(kind):
    x = value = np.float32([1, 2, 3])
    x = Tensor(x, device=kind)
    for k in range(12):
        x = (x + k).to(f'{kind}:{(k + 1) % 4}')
        value = value + k
    assert x.tolist() == value.tolist()
