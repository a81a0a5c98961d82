"""Rules C2 and C3: what is kept on disk, by real processes that are killed, starved of disk, and run at once."""
import contextlib
import ctypes
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinysched import Context, Tensor, schedule_cache
from tinysched.ir.dtype import dtypes
from tinysched.ir.spec import schedule_spec, verify
from tinysched.ir.uop import KernelInfo, ParamArg, ProgramInfo, UOp
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import store
from tinysched.runtime.store import PART, Entry, Store, file_name, full, sealed, unsealed
from tinysched.schedule import cache, pipeline
from tinysched.schedule.callify import Limits
from tinysched.schedule.rangeify import default_policy

ROOT = pathlib.Path(__file__).resolve().parent.parent
needs_owners = pytest.mark.skipif(not hasattr(os, 'getuid'), reason='a system without owners of files')

# A program of several kernels. It says what it computed and where its schedules came from.
PROGRAM = '''
import contextlib, io
import numpy as np
with contextlib.redirect_stdout(io.StringIO()) as said:
    from tinysched import Tensor
    x = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    w = Tensor(np.ones((4, 4), np.float32))
    y = ((x @ w).softmax(1).contiguous() + x.sum(0)).numpy()
print(round(float(y.sum()), 3), *sorted({line.split('cache ')[1].split()[0] for line in said.getvalue().splitlines()
                                         if line.startswith('scheduled')}))
'''
ANSWER = '201.0'   # three rows that sum to 1, and 3 * 66


def like_anybody():
    "None; permissions of files hold in this process, even where root runs it: the right to override them is dropped"
    for capability in (1, 2): ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def child(code=PROGRAM, *, home, **env):
    "A process of its own, started"
    inherited = {k: v for k, v in os.environ.items() if k not in ('XDG_CACHE_HOME', 'SPEC', 'CHECK_OOB')}
    env = inherited | {'PYTHONPATH': str(ROOT), 'DEV': 'PYTHON', 'SCACHE': '2', 'DEBUG': '3', 'XDG_CACHE_HOME': str(home)} | env
    return subprocess.Popen([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=like_anybody if sys.platform == 'linux' else None)   # noqa: PLW1509


def run(code=PROGRAM, **kw):
    "Words that a process says, and its errors; it must end well"
    p = child(code, **kw)
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    return out.split(), err


def tree(folder): return sorted(str(p.relative_to(folder)) for p in folder.rglob('*'))
def schedules(home): return sorted((home / 'tinysched' / 'schedules').iterdir())


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A cache folder for this test alone"
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
    return tmp_path / 'home'


@pytest.fixture
def disk(home, monkeypatch):
    "The schedule cache, empty, over an empty disk"
    monkeypatch.setattr(schedule_cache, 'disk', Store('schedules', 64 << 20))
    schedule_cache.clear()
    with Context(SCACHE=2, DEV='PYTHON'): yield home
    schedule_cache.clear()


# ---- C2: what SCACHE means

def test_C2_zero_and_one_touch_no_disk(home):
    home.mkdir()
    for level in '0', '1':
        assert run(home=home, SCACHE=level)[0] == [ANSWER, 'off' if level == '0' else 'miss']
        assert tree(home) == []


def test_C2_two_processes_one_schedule(home):
    assert run(home=home) == ([ANSWER, 'miss'], '')
    kept = tree(home)
    assert run(home=home) == ([ANSWER, 'disk'], '') and tree(home) == kept and len(schedules(home)) >= 1
    assert run(home=home, SCACHE='1')[0] == [ANSWER, 'miss']   # not read either


def program(k=1): return (Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)).realize() * (k + 1)).sum(0)


def source_of(capsys, t):
    "Where the schedule of a tensor came from"
    capsys.readouterr()
    with Context(DEBUG=3): t.realize()
    return [line.split('cache ')[1].split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith('scheduled')]


def test_C2_a_disk_hit_fills_the_memory(disk, capsys):
    x = Tensor(np.ones((3, 4), np.float32)).realize()
    assert source_of(capsys, x.exp().sum(0)) == ['miss']
    schedule_cache.clear()
    assert source_of(capsys, x.exp().sum(0)) == ['disk']
    shutil.rmtree(disk)
    assert source_of(capsys, x.exp().sum(0)) == ['hit']


def test_C2_the_disk_is_asked_only_on_a_miss(disk, monkeypatch):
    x = Tensor(np.ones((3, 4), np.float32)).realize()
    (x + 1).realize()
    monkeypatch.setattr(schedule_cache, 'disk', None)
    (x + 1).realize()


def test_C2_policies_with_numbers_of_this_process_stay_in_memory(disk):
    x, out = UOp.buffer('PYTHON', (4,), dtypes.float32), UOp.buffer('PYTHON', (4,), dtypes.float32)
    sink = out.after(out.store(x + 1)).sink()
    pipeline.schedule(sink, policy=lambda site: None)
    assert not disk.exists()
    pipeline.schedule(sink, policy=default_policy)
    assert len(schedules(disk)) == 1


def called(body, *args):
    "The result of a program that stores it in argument 0"
    room = UOp.alloc('PYTHON', (4,), dtypes.float32)
    return room.after(body.call(room, *args, precompile=True))


def nested():
    "A program that calls a program twice"
    p, q, out = UOp.param(0, dtypes.float32, (4,), 'PYTHON'), UOp.param(1, dtypes.float32, (4,), 'PYTHON'), UOp.buffer('PYTHON', (4,), dtypes.float32)
    x = UOp.buffer('PYTHON', (4,), dtypes.float32)
    bump = UOp.sink(p.after(p.store(q + 1)))
    return out.after(out.store(called(bump, called(bump, x)) * 2)).sink()


def test_C2_each_body_has_an_entry_of_its_own(disk):
    linear = pipeline.schedule(nested())
    assert len(schedules(disk)) == 2
    before = {e.key: e for e in []} or dict(schedule_cache.entries)
    schedule_cache.clear()
    assert len(pipeline.schedule(nested()).src) == len(linear.src)
    assert set(schedule_cache.entries.values()) <= set(before.values())   # the very same nodes


# ---- C3: the written form

def kept_graphs():
    "Schedules of many kinds: what the memory cache holds after a varied program"
    x = Tensor(np.arange(24, dtype=np.float32).reshape(4, 6)).realize()
    from tinysched import Variable
    n = Variable('n', 1, 4).bind(3)
    results = [x.softmax(1) @ x.T, x.flip(0).pad(((1, 2), (0, 0))).sum(1), x.cast(dtypes.int8) // 3, x.shrink(((0, n), (0, 6))).sum(),
               x.max(1).contiguous() * float('inf'), x.log() - float('nan'), (x > 3).where(x, -0.0), x.T.contiguous().reshape(3, 8),
               x.std(), x.argmax(1), x[Tensor([1, 0])], x.cumsum(0), x.half().float(), x * n]
    for r in results: r.realize()
    x[1:3] = x[0:2] + 1
    x.realize()
    return list(schedule_cache.entries.values())


def test_C3_every_schedule_reads_back_as_the_same_node():
    schedule_cache.clear()
    with Context(DEV='PYTHON', SCACHE=1): graphs = kept_graphs()
    assert len(graphs) > 15
    for g in graphs: assert cache.read(cache.write(g)) is g


def test_C3_bodies_of_users_read_back_too():
    p, q = (UOp.param(i, dtypes.float32, (4,), 'CPU') for i in (0, 1))
    r = UOp.range(4, 0)
    kernel = p.index(r).store(q.index(r) * 2).end(r).sink(arg=KernelInfo('mine'))
    linear = UOp(Ops.LINEAR, dtypes.void, (kernel.call(p, q), kernel.replace(arg=KernelInfo('another')).call(q, p)))
    assert cache.read(cache.write(linear)) is linear


def test_C3_source_text_is_neither_written_nor_read():
    p = UOp.param(0, dtypes.float32, (4,), 'CPU')
    program = UOp(Ops.PROGRAM, dtypes.void, (), ProgramInfo('f', 'void f(float* x) {}', 'CPU', (0,), ()))
    assert cache.write(UOp(Ops.LINEAR, dtypes.void, (program.call(p),))) is None
    kernel = UOp(Ops.LINEAR, dtypes.void, (UOp.sink(arg=KernelInfo()).call(p),))
    text = json.loads(cache.write(kernel))
    info = ['ProgramInfo', 'f', 'void f(float* x) {}', 'CPU', ['tuple', 0], ['tuple'], ['tuple', 1]]
    sink = next(line for line in text if line[0] == 'SINK')
    assert cache.read(json.dumps(text).encode()) is kernel
    sink[:] = ['PROGRAM', 'void', [], info, None]
    assert cache.read(json.dumps(text).encode()) is None


def test_C3_what_has_no_form_is_not_kept(disk):
    class Odd(str): pass
    linear = UOp(Ops.LINEAR, dtypes.void, (), Odd('x'))
    assert cache.write(linear) is None
    assert cache.cached(b'k', lambda: linear, b'text') == (linear, 'miss') and not disk.exists()


def test_C3_memory_is_never_written_nor_read():
    x = UOp.buffer('CPU', (4,), dtypes.float32)
    linear = UOp(Ops.LINEAR, dtypes.void, (UOp.sink(arg=KernelInfo()).call(x),))
    assert cache.write(linear) is None
    y = UOp.param(0, dtypes.float32, (4,), 'CPU')
    text = cache.write(linear.replace(src=(linear.src[0].src[0].call(y),)))
    assert cache.read(text) is not None and cache.read(text.replace(b'"PARAM"', b'"BUFFER"')) is None


ARGS = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.floats(), st.sampled_from([*dtypes.all, *Ops])),
                    lambda x: st.one_of(st.lists(x, max_size=4).map(tuple), st.tuples(st.integers(), x, x).map(lambda fields: ParamArg(*fields))), max_leaves=8)


@settings(max_examples=300)
@given(ARGS)
def test_C3_every_argument_reads_back(arg):
    from tinysched.ir.uop import encode
    back = cache.together(json.loads(json.dumps(cache.apart(arg))))
    assert encode(back) == encode(arg) and type(back) is type(arg)


def a_schedule():
    x, out = UOp.buffer('PYTHON', (4, 6), dtypes.float32), UOp.buffer('PYTHON', (4, 1), dtypes.float32)
    with Context(SCACHE=0): linear = pipeline.schedule(out.after(out.store((x * 2)._reduce(Ops.ADD, (1,)))).sink())
    swap = {b: UOp.param(i, b.dtype, b.shape, b.device) for i, b in enumerate((out, x))}
    return linear.substitute(swap)


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_C3_nonsense_is_a_miss_never_an_error(rng):
    lines = json.loads(cache.write(a_schedule()))
    for _ in range(rng.randint(1, 3)):
        line = rng.choice(lines)
        i = rng.randrange(5)
        line[i] = rng.choice([None, 0, -1, 10**30, 1.5, 'x', 'CONST', 'BUFFER', 'float32', [], [0], [[0]], ['tuple', 1], ['ParamArg'], {},
                              ['ParamArg', 'a', 'b', 'c'], ['KernelInfo', 1], ['Ops', 'ADD'], ['eval', '1'], True, rng.choice(lines)[i]])
    found = cache.read(json.dumps(lines).encode())
    assert found is None or verify(found, schedule_spec).op is Ops.LINEAR


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 10**6))
def test_C3_any_bytes_are_a_miss(noise, at):
    text = cache.write(a_schedule())
    at %= len(text)
    for data in (noise, text[:at], text[:at] + noise + text[at:], b'[' * at):
        found = cache.read(data)
        assert found is None or verify(found, schedule_spec).op is Ops.LINEAR


def test_C3_reading_runs_nothing(tmp_path):
    import pickle
    class Bomb:
        def __reduce__(self): return os.mkdir, (str(tmp_path / 'boom'),)
    for data in (pickle.dumps(Bomb()), json.dumps([['os.mkdir', str(tmp_path / 'boom'), [], None, None]]).encode(),
                 json.dumps([['SINK', 'void', [], ['__import__', 'os'], None]]).encode()):
        assert cache.read(data) is None
    assert not (tmp_path / 'boom').exists()
    code = 'import sys, tinysched; print("pickle" in (m := set(sys.modules)) and "marshal" in m)'
    assert not [p for p in (ROOT / 'tinysched').rglob('*.py') if 'pickle.load' in p.read_text()], code


# ---- C3: files

@given(st.binary(max_size=50), st.lists(st.binary(max_size=20), max_size=4), st.randoms(use_true_random=False))
def test_C3_a_seal_is_good_for_these_bytes_only(payload, keys, rng):
    data = sealed(payload, keys)
    assert unsealed(data) == Entry(payload, tuple(keys))
    i = rng.randrange(len(data))
    flipped = data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1:]
    assert [unsealed(x) for x in (flipped, data[:i], data + b'\0', data[1:])] == [None] * 4


@given(st.binary(max_size=80))
def test_C3_a_sealed_body_may_still_be_nonsense(body):
    found = unsealed(body + hashlib.sha256(body).digest() + store.MARK)
    assert found is None or isinstance(found, Entry)


def test_C3_lengths_that_lead_nowhere():
    for numbers in ((2**63, 2**64 - 1), (0, 2**64 - 1), (2**64 - 1, 0), (5, 0, 0), (0,)):
        body = struct.pack(f'<{len(numbers)}Q', *numbers)
        assert isinstance(unsealed(body + hashlib.sha256(body).digest() + store.MARK), Entry)


def one_bit(p):
    "None; the first bit of a file is another one; names of one file are damaged once"
    b = p.read_bytes()
    if unsealed(b): p.write_bytes(bytes([b[0] ^ 1]) + b[1:])


def damage_all(home, how):
    for p in (home / 'tinysched').rglob('*'):
        if p.is_file(): how(p)


DAMAGE = {
    'garbage': lambda p: p.write_bytes(random.Random(1).randbytes(5000)), 'empty': lambda p: p.write_bytes(b''),
    'half': lambda p: os.truncate(p, p.stat().st_size // 2), 'longer': lambda p: p.write_bytes(p.read_bytes() + b'x'),
    'one bit': one_bit,
    'a folder': lambda p: (p.unlink(), p.mkdir()), 'a pipe': lambda p: (p.unlink(), os.mkfifo(p)),
    'a link': lambda p: (p.rename(p.with_name(f'was {p.name}')), p.symlink_to(f'was {p.name}')),
    'a link to nothing': lambda p: (p.unlink(), p.symlink_to('nothing')),
    'another key': lambda p: p.write_bytes(sealed(b'[]', [b'another key'])),
    'no schedule': lambda p: p.write_bytes(sealed(b'[]', unsealed(p.read_bytes()).keys)),
}


@pytest.mark.parametrize('how', ['garbage', 'half', 'no schedule'])
def test_C3_damaged_files_are_a_miss_and_a_warning(home, how):
    run(home=home)
    damage_all(home, DAMAGE[how])
    words, err = run(home=home)
    assert words == [ANSWER, 'miss']
    assert err.count('tinysched: cache of') == (how != 'no schedule'), err   # one line, however many files
    assert run(home=home) == ([ANSWER, 'disk'], '')   # mended


@pytest.mark.parametrize('how', DAMAGE)
def test_C3_every_kind_of_damage(disk, capsys, how):
    x = Tensor(np.ones((3, 4), np.float32)).realize()
    source_of(capsys, x.exp().sum(0))
    damage_all(disk, DAMAGE[how])
    schedule_cache.clear()
    with Context(DEBUG=3): y = x.exp().sum(0).realize()
    said = capsys.readouterr()
    assert 'cache miss' in said.out and said.err.count('tinysched: cache of') == (how != 'no schedule')
    assert np.allclose(y.numpy(), 3 * np.e, 1e-6)
    schedule_cache.clear()
    if how != 'a folder': assert source_of(capsys, x.exp().sum(0)) == ['disk']


def test_C3_a_file_under_another_name_is_refused(disk, capsys):
    s = schedule_cache.disk
    s.put(b'one', b'1'), s.put(b'two', b'2')
    one, two = (s.folder() / file_name(full(k)) for k in (b'1', b'2'))
    shutil.copy(one, two)
    assert (s.get(b'1'), s.get(b'2')) == (b'one', None) and 'another key' in capsys.readouterr().err


def test_C3_another_version_is_a_miss(disk, monkeypatch):
    schedule_cache.disk.put(b'one', b'1')
    monkeypatch.setattr(store, 'package_version', lambda: b'another version')
    assert schedule_cache.disk.get(b'1') is None


def test_C3_the_version_is_that_of_the_sources(tmp_path):
    def version(*lines):
        code = '\n'.join(('from tinysched.runtime.store import package_version', 'print(package_version().hex())'))
        return subprocess.run([sys.executable, '-c', code], env=os.environ | {'PYTHONPATH': str(tmp_path)}, cwd=tmp_path, capture_output=True,
                              text=True, check=True).stdout
    shutil.copytree(ROOT / 'tinysched', tmp_path / 'tinysched', ignore=shutil.ignore_patterns('__pycache__'))
    first = version()
    assert version() == first
    edited = tmp_path / 'tinysched' / 'schedule' / 'rangeify.py'
    edited.write_text(edited.read_text() + '\n')
    second = version()
    init = tmp_path / 'tinysched' / '__init__.py'
    status = init.stat()
    init.write_text(init.read_text().replace('0.1.0', '0.1.1'))
    os.utime(init, ns=(status.st_atime_ns, status.st_mtime_ns))   # equal in size and time
    assert len({first, second, version()}) == 3


def test_C3_a_stored_mark_names_the_format(disk, monkeypatch):
    schedule_cache.disk.put(b'one', b'1')
    monkeypatch.setattr(store, 'MARK', b'tinysched store 9\n')
    assert schedule_cache.disk.get(b'1') is None


# ---- C3: many at once, and killed

def test_C3_six_processes_fill_one_empty_cache(home):
    started = [child(home=home) for _ in range(6)]
    for p in started:
        out, err = p.communicate(timeout=120)
        assert p.returncode == 0 and out.split()[0] == ANSWER and not err, err
    assert run(home=home) == ([ANSWER, 'disk'], '')
    assert not [n for n in tree(home) if PART in n]


# A process that waits for ever in the middle of a write: half of the bytes are in the file. Its own code does that, not ours.
STUCK = '''
import builtins, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)   # some who start processes turn it off
real = builtins.open
class Slow:
    def __init__(self, f): self.f = f
    def __enter__(self): return self
    def __exit__(self, *e): self.f.close()
    def write(self, data):
        self.f.write(data[:len(data) // 2]); self.f.flush()
        print('in the middle', flush=True)
        time.sleep(100)
def slow(name, mode='r', *a, **kw):
    f = real(name, mode, *a, **kw)
    return Slow(f) if mode == 'xb' else f
builtins.open = slow
'''


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_C3_a_process_killed_in_the_middle_of_a_write(home, how):
    p = child(STUCK + PROGRAM.replace('with contextlib.redirect_stdout(io.StringIO()) as said:', 'if True:'), home=home)
    for line in p.stdout:
        if line == 'in the middle\n': break
    left = schedules(home)
    assert len(left) == 1 and left[0].name.startswith(PART) and left[0].stat().st_size > 0
    p.send_signal(how)
    p.communicate(timeout=60)
    assert p.returncode != 0
    assert len(schedules(home)) == (how != signal.SIGINT)   # Ctrl-C removes it, nobody else can
    assert run(home=home) == ([ANSWER, 'miss'], '')
    assert run(home=home) == ([ANSWER, 'disk'], '')
    for path in left:
        if path.exists(): os.utime(path, (0, 0))   # long ago
    (home / 'tinysched' / 'schedules' / min(p.name for p in schedules(home) if PART not in p.name)).unlink()
    assert run(home=home)[0][0] == ANSWER and not [p for p in schedules(home) if PART in p.name]   # swept by the next writer


def test_C3_readers_and_writers_and_sweepers_at_once(home):
    code = '''
import random, sys
from tinysched.runtime.store import Store, trim
s, rng = Store('busy', 40_000), random.Random(int(sys.argv[0] == '-c') + SEED)
for _ in range(400):
    k = b'%d' % rng.randrange(40)
    found = s.get(k)
    assert found is None or found == k * 300
    if found is None: s.put(k * 300, k, k + b' too')
    if rng.random() < 0.02: trim(s.folder(), 0)
'''
    started = [child(code.replace('SEED', str(n)), home=home) for n in range(4)]
    for p in started:
        out, err = p.communicate(timeout=120)
        assert p.returncode == 0 and not err, err
    assert not [p for p in (home / 'tinysched' / 'busy').iterdir() if p.name.startswith(PART)]   # all that was begun is whole


def test_C3_threads_at_once(disk):
    s, errors = schedule_cache.disk, []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(200):
                k = b'%d' % rng.randrange(10)
                assert s.get(k) in (None, k * 50)
                s.put(k * 50, k)
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and not s.warned and len(schedules(disk)) == 10


# ---- C3: disks that refuse

def test_C3_a_full_disk_is_a_warning(home):
    limit = 'import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\n'
    words, err = run(limit + PROGRAM, home=home)
    assert words == [ANSWER, 'miss'] and err.count('tinysched: cache of') == 1 and 'nothing is kept' in err
    assert schedules(home) == []   # no half file is left
    assert run(home=home) == ([ANSWER, 'miss'], '')


@contextlib.contextmanager
def unwritable(folder):
    "A folder that its owner cannot write to"
    folder.chmod(0o500)
    yield
    folder.chmod(0o700)


@needs_owners
def test_C3_a_read_only_folder_is_read_and_not_written(home):
    run(home=home)
    with unwritable(home / 'tinysched' / 'schedules'):
        kept = tree(home)
        assert run(home=home) == ([ANSWER, 'disk'], '')   # reading works, and says nothing
        words, err = run(PROGRAM.replace('x.sum(0)', 'x.sum(0) * 1.5'), home=home)
        assert 'miss' in words and err.count('tinysched: cache of') == 1 and 'nothing is kept' in err and tree(home) == kept


@needs_owners
def test_C3_a_folder_that_cannot_be_read(home):
    run(home=home)
    (home / 'tinysched').chmod(0)
    words, err = run(home=home)
    (home / 'tinysched').chmod(0o700)
    assert words == [ANSWER, 'miss'] and err.count('tinysched: cache of') == 1


def test_C3_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / 'file').write_text('not a folder')
    words, err = run(home=tmp_path / 'file' / 'below')
    assert words == [ANSWER, 'miss'] and err.count('tinysched: cache of') == 1


@needs_owners
def test_C3_no_home_is_no_cache_and_no_folder_called_tilde(tmp_path):
    code = f'import os; os.chdir({str(tmp_path)!r})\nimport pwd\ndef unknown(*a): raise KeyError\npwd.getpwuid = unknown\n' \
           'for name in ("HOME", "XDG_CACHE_HOME"): os.environ.pop(name, None)\n'
    words, err = run(code + PROGRAM, home='')
    assert words == [ANSWER, 'miss'] and 'set XDG_CACHE_HOME' in err and tree(tmp_path) == []


@needs_owners
@pytest.mark.parametrize('which, mode', [('tinysched', 0o777), ('tinysched/schedules', 0o770), ('tinysched/schedules', 0o702)])
def test_C3_a_folder_that_others_can_write_to_is_refused(home, which, mode):
    run(home=home)
    kept = tree(home)
    (home / which).chmod(mode)
    words, err = run(home=home)
    assert words == [ANSWER, 'miss'] and 'chmod 700' in err and err.count('tinysched: cache of') == 1 and tree(home) == kept


@needs_owners
def test_C3_a_folder_of_somebody_else_is_refused(home):
    run(home=home)
    code = 'import os\nme = os.getuid()\nos.getuid = lambda: me + 1\n'
    words, err = run(code + PROGRAM, home=home)
    assert words == [ANSWER, 'miss'] and 'others can write' in err


def test_C3_everything_is_private_to_the_user(home):
    os.umask(old := os.umask(0o077))
    p = child('import os; os.umask(0)\n' + PROGRAM, home=home, DEV='CPU')
    assert p.wait(120) == 0 and os.umask(old) == old
    modes = {str(f.relative_to(home)): f.stat().st_mode & 0o777 for f in (home / 'tinysched').rglob('*')}
    assert len(modes) >= 4 and all(m == (0o700 if n in ('tinysched/schedules', 'tinysched/objects') else 0o600) for n, m in modes.items()), modes
    assert (home / 'tinysched').stat().st_mode & 0o777 == 0o700


# ---- C3: bounded in size

def held(s): return sum(f.size for f in store.files(s.folder()))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_C3_a_store_stays_below_its_limit(sizes):
    import tempfile
    with tempfile.TemporaryDirectory() as d, pytest.MonkeyPatch.context() as m:
        m.setenv('XDG_CACHE_HOME', d)
        s = Store('small', 8000)
        for i, n in enumerate(sizes):
            s.put(bytes(n), b'%d' % i)
            assert not (s.folder().exists() and held(s) > 8000)
        assert not s.warned


def test_C3_the_least_recently_used_goes_first(home):
    s = Store('small', 20_000)
    for i in range(10): s.put(bytes(1000), b'%d' % i)
    for age, path in enumerate(s.folder() / file_name(full(b'%d' % i)) for i in range(10)): os.utime(path, (age, age))
    assert s.get(b'0') is not None      # used just now
    store.trim(s.folder(), 3 * 1200)
    assert [i for i in range(10) if s.get(b'%d' % i) is not None] == [0, 8, 9]


def test_C3_a_file_with_many_names_counts_once_and_goes_whole(home):
    s = Store('small', 100_000)
    s.put(bytes(1000), *(b'%d' % i for i in range(20)))
    assert len(list(s.folder().iterdir())) == 20 and held(s) < 3000
    assert store.trim(s.folder(), 100) == 0 and not list(s.folder().iterdir())


def test_C3_a_part_that_is_being_written_is_left_alone(home):
    s = Store('small', 8000)
    young, old = (s.folder(create=True) / (PART + n) for n in ('young', 'old'))
    for p in (young, old): p.write_bytes(bytes(9000))
    os.utime(old, (t := time.time() - 2 * store.HOUR, t))
    store.trim(s.folder(), 0)
    assert list(s.folder().iterdir()) == [young]


def test_C3_sizes_are_asked_before_reading(home, monkeypatch):
    s = Store('small', 8000)
    s.put(b'value', b'key')
    monkeypatch.setattr(store, 'LARGEST', 10)
    assert s.get(b'key') is None and s.warned


# ---- C3: compiled objects

OBJECT = PROGRAM.replace('print(', 'import tinysched.runtime.cpu as cpu\nprint(len(cpu.ran), ').replace(
    'import numpy as np\n', '''import numpy as np
import tinysched.runtime.cpu as cpu
cpu.ran, real = [], cpu.attempt
cpu.attempt = lambda source: cpu.ran.append(source) or real(source)
''', 1)


def with_cpu(test):
    from tinysched.runtime import cpu
    return pytest.mark.skipif(not cpu.available()[0], reason='no C compiler')(test)


def objects(home): return sorted((home / 'tinysched' / 'objects').iterdir())


@with_cpu
def test_C3_objects_are_found_by_the_next_process(home):
    first, again = (run(OBJECT, home=home, DEV='CPU', SCACHE='1') for _ in range(2))
    assert int(first[0][0]) >= 2 and again[0][:2] == ['0', ANSWER] and not again[1]
    assert [p.name for p in (home / 'tinysched').iterdir()] == ['objects']


@with_cpu
def test_C3_object_cache_off_touches_nothing(home):
    home.mkdir()
    words, _ = run(OBJECT, home=home, DEV='CPU', SCACHE='1', CCACHE='0')
    assert words[1] == ANSWER and tree(home) == []


@with_cpu
@pytest.mark.parametrize('how', ['garbage', 'half', 'a link'])
def test_C3_damaged_objects_are_never_loaded(home, how):
    run(OBJECT, home=home, DEV='CPU', SCACHE='1')
    for p in objects(home): DAMAGE[how](p)
    words, err = run(OBJECT, home=home, DEV='CPU', SCACHE='1')
    assert int(words[0]) >= 1 and words[1] == ANSWER and err.count('tinysched: cache of') == 1
    if how != 'a folder': assert run(OBJECT, home=home, DEV='CPU', SCACHE='1') == (['0', *words[1:]], '')


@with_cpu
def test_C3_an_object_paired_with_another_source_is_refused(home):
    run(OBJECT, home=home, DEV='CPU', SCACHE='1')
    entries = {p: unsealed(p.read_bytes()) for p in objects(home)}
    wrong = next(e for e in entries.values())
    for p, e in entries.items():
        if e != wrong: p.unlink(), p.write_bytes(sealed(wrong.payload, wrong.keys))
    words, err = run(OBJECT, home=home, DEV='CPU', SCACHE='1')
    assert words[1] == ANSWER and int(words[0]) >= 1 and 'another key' in err


@with_cpu
def test_C3_six_processes_compile_into_one_cache(home):
    started = [child(OBJECT, home=home, DEV='CPU') for _ in range(6)]
    for p in started:
        out, err = p.communicate(timeout=120)
        assert p.returncode == 0 and out.split()[1] == ANSWER and not err, err
    assert run(OBJECT, home=home, DEV='CPU') == (['0', ANSWER, 'disk'], '')


@with_cpu
def test_C3_a_full_disk_keeps_no_objects(home):
    limit = '\nimport resource; soft = resource.getrlimit(resource.RLIMIT_FSIZE)\nfrom tinysched.runtime import store\n'
    small = limit + '''real_write = store.write
def write(path, data):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, soft[1]))
    try: real_write(path, data)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, soft)
store.write = write
'''
    words, err = run(small + OBJECT, home=home, DEV='CPU', SCACHE='1')
    assert words[1] == ANSWER and err.count('tinysched: cache of') == 1 and objects(home) == []


def test_C3_limits_are_part_of_what_is_compared(disk):
    x, out = UOp.buffer('PYTHON', (4,), dtypes.float32), UOp.buffer('PYTHON', (4,), dtypes.float32)
    sink = out.after(out.store(x + 1)).sink()
    for limits in (Limits(), Limits(max_args=8)): pipeline.schedule(sink, limits)
    entries = [unsealed(p.read_bytes()) for p in schedules(disk)]
    assert len(entries) == 2
    from tinysched.schedule.callify import canonical
    text = canonical(sink, Limits(), pipeline.settings(default_policy)).text
    assert any(e.keys == (full(text),) for e in entries)   # the full key, not a digest of it
