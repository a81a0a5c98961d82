"""Random programs against NumPy run eagerly: what assignment means (F, M), whenever things are computed.

Hypothesis chooses one statement after another: create, view, compute, assign, compute now or later, delete, look. Each is a
line of Python, run on our side as it is printed, and a few words of NumPy on the other. So a program that fails is shown as a
script, as short as Hypothesis can make it. Numbers stay small enough to be exact in every dtype. NumPy knows nothing of devices:
programs on several of them (J) split values, move them and mix them, and the answers are the same. FUZZ=1 runs the full number;
SEED=n begins at another seed.
"""
import os
import sys

import numpy as np
import pytest
from eager import NAMES, Model
from hypothesis import HealthCheck, Phase, seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tinysched import Device, Tensor
from tinysched.frontend.state import writes_of
from tinysched.ir.uop import Sharding

FULL, SEED = os.environ.get('FUZZ') == '1', int(os.environ.get('SEED', '0'))
CHUNKS = {'PYTHON': 20, 'CPU': 20, 'CL': 2} if FULL else {'PYTHON': 1, 'CPU': 1, 'CL': 1}   # of one seed each
SEVERAL = ({(d, n): 8 for d in ('PYTHON', 'CPU') for n in (2, 3, 4)} | {('CL', n): 1 for n in (2, 3, 4)} if FULL
           else {('PYTHON', 2): 1, ('PYTHON', 3): 1, ('CPU', 4): 1})
PROGRAMS = 250 if FULL else 15
SUMS = {'bool': 'int32', 'int8': 'int32', 'int16': 'int32', 'uint8': 'uint32'}
HEADER = """import numpy as np
from eager import glance, hiccup, same, slope
from tinysched import Tensor, Variable, dtypes, run_linear
from tinysched.ir.uop import Sharding
"""


def exact(v):
    "Whether sums and products of a few such numbers are exact in the dtype, and have no -0.0"
    if v.dtype.kind != 'f': return True
    return ordinary(v) and bool(np.all((v * 4 == np.round(v * 4)) & (abs(v) <= 256)))


def ordinary(v):
    "Whether every machine keeps the bits when it moves such values"
    if v.dtype == bool: return bool(np.all(v.view(np.uint8) <= 1))
    if v.dtype.kind != 'f': return True
    normal = (v == 0) & ~np.signbit(v) | (abs(v) >= np.finfo(v.dtype).tiny)
    return bool(np.all(np.isfinite(v) & normal))


def literal(v):
    "The array in Python"
    if 0 in v.shape: return f"np.zeros({v.shape}, '{v.dtype}')"
    return f"np.array({v.tolist()}, '{v.dtype}')"


def spelled(index):
    "An index in Python"
    cut = lambda s: ':'.join('' if n is None else str(n) for n in (s.start, s.stop, s.step))
    return ', '.join(cut(i) if isinstance(i, slice) else str(i) for i in index) or '...'


class Programs(RuleBasedStateMachine):
    "A program that grows: its lines, the tensors of ours by name, and their models"
    device, count = 'PYTHON', 1

    def __init__(self):
        super().__init__()
        self.lines, self.names = [], {}
        exec(HEADER, self.names)
        self.pool, self.pending, self.losses, self.made = {}, [], {}, 0
        self.devices = (self.device, *(f'{self.device}:{i}' for i in range(1, self.count)))
        if self.count > 1: self.do(f'D = {self.devices}')

    # -- writing lines ------------------------------------------------------------------------------------------------
    def do(self, line):
        "None; the line has run, or an error shows the program"
        self.lines.append(line)
        try: exec(line, self.names)
        except Exception as error:
            raise AssertionError('\n'.join(['this program fails:', HEADER, *self.lines])) from error

    def name(self, letter='t'):
        self.made += 1
        return f'{letter}{self.made}'

    def add(self, model, line, name=None):
        "None; the pool has one more tensor, which the line makes"
        name = model.tensor = name or self.name()
        self.do(f'{name} = {line}')
        self.pool[name] = model

    def value(self, v, line):
        "None; the pool has a computed value, if it is exact"
        v = np.asarray(v)
        if exact(v) and v.size <= 100: self.add(Model.fresh(None, v), line)

    def store(self, m, value, line, index=()):
        "None; the model and our side are written, unless a tensor over the memory would hold something odd"
        if m.wide: return self.refused(line, 'ValueError')
        before = m.memory.copy()
        m.write(value, index)
        over = [o for o in self.pool.values() if o.memory is m.memory]
        if not all(ordinary(o.value) for o in over): m.memory[:] = before
        else:
            place = self.names[m.tensor].place
            self.do(f'{line}\nassert {m.tensor}.place == {place!r}' if self.count > 1 else line)

    def refused(self, line, error):
        self.do(f'try: {line}\nexcept {error}: pass\nelse: raise AssertionError("wanted {error}")')

    # -- choosing -----------------------------------------------------------------------------------------------------
    def draw(self, strategy): return self.data.draw(strategy)

    def number(self, lo, hi): return self.draw(st.integers(lo, hi))

    def choose(self, options): return self.draw(st.sampled_from(list(options)))

    def pick(self, want=lambda m: True):
        "A model from the pool, or None"
        found = [m for m in self.pool.values() if want(m)]
        return self.choose(found) if found else None

    def home(self, m): return self.names[m.tensor].device

    def near(self, m, want=lambda o: True):
        "A model from the pool that can meet the other: its tensor is on the same devices"
        return self.pick(lambda o: self.home(o) == self.home(m) and want(o))

    def alike(self, m): return self.near(m, lambda o: o.shape == m.shape and o.dtype == m.dtype)

    def even(self, shape): return [i for i, n in enumerate(shape) if n % self.count == 0]

    def somewhere(self):
        "Devices for a new tensor: the one, or several more often than one of them"
        if self.count == 1: return self.device
        return self.devices if self.number(0, 3) else self.choose(self.devices)

    def tensor(self, v, home):
        "A new tensor in Python; on several devices it is split, or whole on each"
        if isinstance(home, str): return f'Tensor({literal(v)}, device={home!r})'
        return f'Tensor({literal(v)}, device={self.device!r}).shard(D, {self.choose([*self.even(v.shape), None])})'

    def span(self, n):
        lo = self.number(0, n)
        return lo, self.number(lo, n)

    def index(self, shape):
        "A basic index"
        index = []
        for n in shape:
            kind = self.choose(['all', 'cut', 'step', 'back', 'one', 'new']) if n else 'all'
            lo, hi = self.span(n)
            if kind == 'new': index.append(None)
            if kind in ('all', 'new'): index.append(slice(None))
            if kind == 'cut': index.append(slice(lo, hi))
            if kind == 'step': index.append(slice(lo, None, self.number(2, 3)))
            if kind == 'back': index.append(slice(None, None, -self.number(1, 2)))
            if kind == 'one': index.append(self.number(-n, n - 1))
        return tuple(index)

    def rows(self, m):
        "Places along the first axis: a tensor of the pool, or a new one; as Python and as an array"
        n = m.shape[0]
        fit = lambda o: o.dtype.kind == 'i' and len(o.shape) == 1 and o.at.size and np.all((o.value >= -n) & (o.value < n))
        o = self.near(m, fit) if self.number(0, 1) else None
        if o is not None: return o.tensor, o.value.astype(np.int64)
        at = np.array(self.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=3)), np.int32)
        return self.tensor(at, self.home(m)), at

    def constant(self, m): return int(m.number(self.number(-3, 3)))

    def few(self):
        "Names of up to three tensors"
        return ', '.join(self.draw(st.lists(st.sampled_from(list(self.pool)), min_size=1, max_size=3, unique=True)))


def statement(fn):
    "The method as a rule of the machine, which chooses by `self.draw`"
    def chosen(self, data):
        self.data = data
        if self.pool or fn.__name__ == 'create':
            with np.errstate(all='ignore'): fn(self)
    chosen.__name__ = fn.__name__
    return rule(data=st.data())(chosen)


class Creating(Programs):
    @initialize(data=st.data())
    def begin(self, data):
        self.data = data
        for _ in range(self.number(1, 2)): self.leaf()

    def leaf(self, dtype=None, shape=None, home=None):
        "A tensor with values, perhaps in memory already"
        dtype = np.dtype(dtype or self.choose(['int32', 'int32', 'float32', *NAMES]))
        sizes = [2, 3, 4, 1, 0] if self.count == 1 else [self.count, 2 * self.count, 2, 3, 1, 0]
        if shape is None: shape = tuple(self.draw(st.lists(st.sampled_from(sizes), max_size=2)))
        values = [self.number(0 if dtype.kind in 'ub' else -4, 4) for _ in range(int(np.prod(shape)))]
        v = np.array(values).reshape(shape).astype(dtype)
        line = self.tensor(v, home or self.somewhere())
        self.add(Model.fresh(None, v), line + self.choose(['', '.realize()', '.contiguous()', ' + 0' * (v.dtype != bool)]))

    @statement
    def create(self): self.leaf()

    @statement
    def fill(self):
        "A value without storage: equal ones are one node"
        dtype, shape = np.dtype(self.choose(NAMES)), (self.number(1, 4),)
        k = self.number(0, 2)
        line, home = self.choose([f'Tensor.full({shape}, {k}', f'Tensor.zeros({shape}', f'Tensor.ones({shape}', f'Tensor.arange({shape[0]}']), self.somewhere()
        v = np.arange(shape[0]) if 'arange' in line else np.full(shape, 0 if 'zeros' in line else 1 if 'ones' in line else k)
        split = '' if isinstance(home, str) else f'.shard(D, {self.choose([*self.even(shape), None])})'
        self.add(Model.fresh(None, v.astype(dtype)), f'{line}, dtype=dtypes.{dtype}, device={(self.device if split else home)!r}){split}')

    @statement
    def chance(self):
        "Random numbers: the counter counts when the tensor is made, whenever it is computed"
        k, n = self.number(0, 3), self.number(1, 4)
        Tensor.manual_seed(k)
        v = Tensor.rand(n, device=self.device).numpy()
        self.do(f'Tensor.manual_seed({k})')
        if ordinary(v): self.add(Model.fresh(None, v), f'Tensor.rand({n}, device={self.somewhere()!r})')


class Viewing(Creating):
    @statement
    def part(self):
        m = self.pick()
        index = self.index(m.shape)
        self.add(m.view(None, np.asarray(m.at[index])), f'{m.tensor}[{spelled(index)}]')

    @statement
    def reshape(self):
        m = self.pick()
        n, new = m.at.size, []
        while n > 1 and len(new) < 2:
            new.append(self.choose(d for d in range(1, n + 1) if n % d == 0))
            n //= new[-1]
        new = (*new, n)
        line = f'{m.tensor}.reshape({new})'
        if self.stays(m, new): self.add(m.view(None, m.at.reshape(new)), line)
        elif m.at.size: self.refused(line, 'ValueError')

    def axis(self, m):
        "The split axis, or None"
        place = self.names[m.tensor].place
        return place.axis if isinstance(place, Sharding) else None

    def stays(self, m, new):
        "Whether each item is on its device after a reshape, where one axis is split evenly (J2)"
        if (axis := self.axis(m)) is None: return True
        def owners(shape, i): return np.indices(shape)[i] * self.count // shape[i]
        if not m.at.size: return False
        before = owners(m.shape, axis).reshape(new)
        return any(np.array_equal(before, owners(new, i)) for i in self.even(new))

    @statement
    def permute(self):
        m = self.pick(lambda m: m.shape)
        if m is None: return
        order = tuple(self.draw(st.permutations(range(len(m.shape)))))
        self.add(m.view(None, m.at.transpose(order)), f'{m.tensor}.permute({order})')

    @statement
    def flip(self):
        m = self.pick(lambda m: m.shape)
        if m is None: return
        axis = self.number(0, len(m.shape) - 1)
        self.add(m.view(None, np.flip(m.at, axis)), f'{m.tensor}.flip({axis})')

    @statement
    def expand(self):
        m = self.pick(lambda m: m.at.size <= 20 and len(m.shape) < 3)
        if m is None: return
        axis, n = self.number(0, len(m.shape)), self.number(2, 3)
        new = (*m.shape[:axis], n, *m.shape[axis:])
        at = np.broadcast_to(np.expand_dims(m.at, axis), new)
        self.add(m.view(None, at, wide=True), f'{m.tensor}.unsqueeze({axis}).expand({new})')

    @statement
    def bitcast(self):
        m, dtype = self.pick(), np.dtype(self.choose(NAMES))
        size = m.dtype.itemsize * (m.shape[-1] if m.shape else 1)
        if not m.shape and dtype.itemsize != m.dtype.itemsize or size % dtype.itemsize: return
        if m.shape and self.axis(m) == len(m.shape) - 1 and size // self.count % dtype.itemsize:
            return self.refused(f'{m.tensor}.bitcast(dtypes.{dtype})', 'ValueError')
        new = m.bitcast(None, dtype)
        if ordinary(new.value): self.add(new, f'{m.tensor}.bitcast(dtypes.{dtype})')

    @statement
    def same_storage(self):
        m = self.pick()
        home = self.home(m)
        still = f'.to({home!r})' if isinstance(home, str) else f'.shard(D, {self.axis(m)})'
        self.add(m.view(None, m.at), m.tensor + self.choose(['.detach()', still, '']))


class Computing(Viewing):
    @statement
    def map(self):
        m = self.pick(lambda m: m.dtype != bool)
        if m is None: return
        v, k, t = m.value, self.constant(m), m.tensor
        number = m.dtype.type(k)
        which = self.choose(['add', 'mul', 'max', 'square', 'neg', 'less', 'pad'])
        if which == 'add': self.value(v + number, f'{t} + {k}')
        if which == 'mul': self.value(v * number, f'{t} * {k}')
        if which == 'max': self.value(np.maximum(v, number), f'{t}.maximum({k})')
        if which == 'square': self.value(v * v, f'{t} * {t}')
        if which == 'neg': self.value(-v, f'-{t}')
        if which == 'less': self.value(v < number, f'{t} < {k}')
        if which == 'pad' and m.shape:
            pads = tuple((self.number(0, 1), self.number(0, 2)) for _ in m.shape)
            self.value(np.pad(v, pads), f'{t}.pad({pads})')

    @statement
    def bound(self):
        m, k = self.pick(lambda m: m.dtype == np.int32), self.number(-3, 3)
        if m is not None: self.value(m.value * np.int32(k), f"{m.tensor} * Variable('{self.name('n')}', -3, 3).bind({k})")

    @statement
    def cast(self):
        m, dtype = self.pick(), np.dtype(self.choose(NAMES))
        v, info = m.value, np.iinfo(dtype) if dtype.kind in 'iu' else None
        if m.dtype.kind == 'f' and info and not np.all((v >= info.min) & (v <= info.max)): return
        if dtype.kind == 'f' and not np.all(abs(v.astype(np.float64)) <= 256): return
        self.value(v.astype(dtype), f'{m.tensor}.cast(dtypes.{dtype})')

    @statement
    def join(self):
        m = self.pick()
        o = self.alike(m)
        which, a, b = self.choose(['add', 'sub', 'mul', 'where', 'cat']), m.tensor, o.tensor
        if which == 'cat' and m.shape: self.value(np.concatenate([m.value, o.value]), f'{a}.cat({b}, dim=0)')
        c = self.near(m, lambda c: c.shape == m.shape)
        if which == 'where': self.value(np.where(c.value > 0, m.value, o.value), f'({c.tensor} > 0).where({a}, {b})')
        if m.dtype == bool: return
        if which == 'add': self.value(m.value + o.value, f'{a} + {b}')
        if which == 'sub': self.value(m.value - o.value, f'{a} - {b}')
        if which == 'mul': self.value(m.value * o.value, f'{a} * {b}')

    @statement
    def reduce(self):
        m = self.pick(lambda m: m.shape)
        if m is None or not exact(m.value): return
        axis, keep, t = self.number(0, len(m.shape) - 1), self.choose([False, True]), m.tensor
        which = self.choose(['sum', 'max', 'min', 'cumsum', 'far'])
        total = SUMS.get(m.dtype.name, m.dtype.name)
        if which == 'sum': self.value(m.value.sum(axis, keepdims=keep, dtype=total), f'{t}.sum({axis}, keepdim={keep})')
        if which == 'far' and total == m.dtype.name:
            self.value(m.value - m.value.sum(axis, keepdims=True, dtype=total), f'{t} - {t}.sum({axis}, keepdim=True)')
        if which == 'cumsum': self.value(m.value.cumsum(axis, dtype=total), f'{t}.cumsum({axis})')
        if not m.shape[axis] or m.dtype == bool: return
        if which == 'max': self.value(m.value.max(axis, keepdims=keep), f'{t}.max({axis}, keepdim={keep})')
        if which == 'min': self.value(m.value.min(axis, keepdims=keep), f'{t}.min({axis}, keepdim={keep})')

    @statement
    def wide_reader(self):
        "A value larger than what it reads"
        m, n = self.pick(lambda m: m.dtype != bool and m.at.size <= 10), self.number(2, 5)
        if m is None: return
        self.value(np.stack([m.value] * n) + m.dtype.type(1), f'{m.tensor}.unsqueeze(0).expand({(n, *m.shape)}) + 1')

    @statement
    def take(self):
        m = self.pick(lambda m: m.shape and m.shape[0])
        if m is None: return
        ours, at = self.rows(m)
        if m.at.size <= 30: self.add(Model.fresh(None, m.value[at]), f'{m.tensor}[{ours}]')

    @statement
    def keep(self):
        m, other = self.pick(), 'PYTHON:7' if self.count > 1 else 'PYTHON:1'
        how = self.choose(['.contiguous()', '.clone()', f'.to({other!r}).to({self.home(m)!r})'])
        self.add(Model.fresh(None, m.value), m.tensor + how)


class Writing(Computing):
    @statement
    def assign(self):
        m = self.pick()
        o = self.alike(m)
        self.store(m, o.value, f'{m.tensor}.assign({o.tensor})')

    @statement
    def update(self):
        "In place: what is read may be an older state, or another tensor"
        m = self.pick(lambda m: m.dtype != bool)
        if m is None: return
        o, k = self.alike(m), self.constant(m)
        sign, rule = self.choose([('+', np.add), ('-', np.subtract), ('*', np.multiply)])
        v, text = self.choose([(o.value, o.tensor), (m.dtype.type(k), k)])
        new = np.asarray(rule(m.value, v))
        if not exact(new): return
        line = self.choose([f'{m.tensor} {sign}= {text}', f'{m.tensor}[...] {sign}= {text}',
                            f'{m.tensor}.assign({m.tensor} {sign} {text})'])
        self.store(m, new, line)

    @statement
    def set(self):
        "Write a number, an array or a tensor, which may be stretched, into a part"
        m = self.pick()
        index = self.index(m.shape)
        at, part = np.asarray(m.at[index]), f'{m.tensor}[{spelled(index)}]'
        def fits(o):
            try: return np.broadcast_shapes(o.shape, at.shape) == at.shape and exact(o.value.astype(m.dtype))
            except ValueError: return False
        whole = lambda o, n: o.dtype == n.dtype or o.dtype.kind in 'iu' and n.dtype.kind in 'iu'
        o = self.near(m, lambda o: whole(o, m) and fits(o)) if self.number(0, 3) else None
        if o is not None: return self.store(m, o.value.astype(m.dtype), f'{part} = {o.tensor}', index)
        v = m.dtype.type(self.constant(m))
        if self.number(0, 1): return self.store(m, v, f'{part} = {v.item()}', index)
        self.store(m, v, f'{part} = {literal(np.full(at.shape, v))}', index)

    @statement
    def scatter(self):
        "Write a number or a tensor into places that are computed"
        m = self.pick(lambda m: m.shape and m.shape[0] and m.at.size <= 30)
        if m is None: return
        ours, at = self.rows(m)
        fit = lambda o: o.dtype == m.dtype and o.shape == (*at.shape, *m.shape[1:])
        o = self.near(m, fit) if self.number(0, 1) else None
        if o is not None: return self.store(m, o.value, f'{m.tensor}[{ours}] = {o.tensor}', at)
        v = m.dtype.type(self.constant(m))
        self.store(m, v, f'{m.tensor}[{ours}] = {v.item()}', at)

    @statement
    def mask(self):
        m = self.pick()
        o, c = self.alike(m), self.near(m, lambda c: c.shape == m.shape)
        self.store(m, np.where(c.value > 0, o.value, m.value), f'{m.tensor}.assign(({c.tensor} > 0).where({o.tensor}, {m.tensor}))')

    @statement
    def rotate(self):
        m = self.pick(lambda m: m.shape and m.shape[0] > 1)
        if m is None: return
        k, t = self.number(1, m.shape[0] - 1), m.tensor
        self.store(m, np.roll(m.value, -k, 0), f'{t}.assign({t}[{k}:].cat({t}[:{k}], dim=0))')

    @statement
    def shift(self):
        m = self.pick(lambda m: m.shape and m.shape[0] > 1)
        if m is None: return
        k, t = self.number(1, m.shape[0] - 1), m.tensor
        up = (f'{t}[{k}:] = {t}[:-{k}]', m.value[:-k], np.s_[k:])
        line, v, index = self.choose([up, (f'{t}[:-{k}] = {t}[{k}:]', m.value[k:], np.s_[:-k]),
                                      (f'{t}.assign({t}.flip(0))', m.value[::-1], ())])
        self.store(m, v, line, index)

    @statement
    def swap(self):
        m = self.pick(lambda m: not m.wide)
        if m is None: return
        o = self.near(m, lambda o: o.shape == m.shape and o.dtype == m.dtype and not o.wide)
        a, b, c = m.value, o.value, self.name('old')
        self.add(Model.fresh(None, a), f'{m.tensor}.clone()' if self.number(0, 1) or m.dtype == bool else f'{m.tensor} + 0', c)
        self.store(m, b, f'{m.tensor}.assign({o.tensor})')
        self.store(o, a, f'{o.tensor}.assign({c})')

    @statement
    def wrong(self):
        "What is refused changes nothing"
        m = self.pick()
        shape, dtype = (*m.shape, 7), 'int64' if m.dtype != np.int64 else 'int32'
        home = self.home(m)
        wrong = [(f'{m.tensor}.assign(Tensor.zeros({shape}, dtype=dtypes.{m.dtype}, device={home!r}))', 'ValueError'),
                 (f'{m.tensor}.assign(Tensor.zeros({m.shape}, dtype=dtypes.{dtype}, device={home!r}))', 'TypeError'),
                 (f'{m.tensor}[{", ".join("0" * (len(m.shape) + 1))}] = 1', 'IndexError')]
        if self.count > 1: wrong += self.apart(m)
        line, error = self.choose(wrong)
        if not (0 in m.shape and error == 'IndexError'): self.refused(line, error)

    def apart(self, m):
        "Mistakes with devices: what is split unevenly, and what is somewhere else"
        o = self.pick(lambda o: self.home(o) != self.home(m) and o.shape == m.shape and o.dtype == m.dtype)
        uneven = [i for i, n in enumerate(m.shape) if n % self.count]
        wrong = [(f'{m.tensor}.shard(D, {i})', 'ValueError') for i in uneven]
        if o is None: return wrong
        lines = f'{m.tensor} < {o.tensor}', f'{m.tensor}.assign({o.tensor})', f'{m.tensor}[...] = {o.tensor}'
        return [*wrong, *((line, 'RuntimeError') for line in lines)]


class Slopes(Writing):
    def careful(self):
        "Whether nothing handed out waits to be run; if something does, it may be run now"
        if self.pending and self.number(0, 1):
            for l in self.pending: self.do(f'run_linear({l})')
            self.pending = []
        return not self.pending

    @statement
    def loss(self):
        "A loss that depends on a new tensor through a write into a copy of another"
        c = self.pick(lambda c: c.dtype == np.float32 and c.shape and exact(c.value))
        if c is None: return
        index = self.index(c.shape)
        part, k, v, y, l = spelled(index), self.number(1, 3), c.value, self.name(), self.name('loss')
        self.leaf(np.float32, v[index].shape, self.home(c))
        w = list(self.pool)[-1]
        self.do(f'{w}.requires_grad_()')
        v[index] = self.pool[w].value * np.float32(k)
        self.do(f'{y} = {c.tensor} * 1\n{y}[{part}] = {w} * {k}\n{l} = ({y} * {c.tensor}).sum()')
        self.pool[y] = Model.fresh(y, v)
        self.losses[l] = w, c.value[index] * np.float32(k)

    @statement
    def slope(self):
        found = {l: v for l, v in self.losses.items() if v[0] in self.pool and v[1].size}
        if not found or not self.careful(): return
        l = self.choose(found)
        w, v = found[l]
        self.do(f'slope({l}, {w}, {literal(v)})')


class Running(Slopes):
    @statement
    def realize(self):
        if self.careful(): self.do(f'Tensor.realize({self.few()})')

    @statement
    def schedule(self):
        l = self.name('linear')
        self.do(f'{l} = Tensor.schedule_linear({self.few()})')
        self.pending.append(l)

    @statement
    def with_vars(self):
        if self.careful(): self.do(f'run_linear(*Tensor.linear_with_vars({self.few()}))')

    @statement
    def fail(self):
        if self.careful(): self.do(f'with hiccup({self.number(0, 2 * self.count)}): Tensor.realize({self.few()})')

    @statement
    def delete(self):
        if len(self.pool) < 2: return
        name = self.choose(self.pool)
        del self.pool[name]
        self.do(f'del {name}')

    @statement
    def look(self):
        m = self.pick()
        if self.careful(): self.do(f'same({m.tensor}, {literal(m.value)})')
        elif not writes_of([self.names[m.tensor].uop]): self.do(f'glance({m.tensor}, {literal(m.value)})')

    @statement
    def item(self):
        m = self.pick(lambda m: m.at.size == 1)
        if m is not None and self.careful(): self.do(f'assert {m.tensor}.item() == {m.value.item()}')

    def teardown(self):
        "Everything that is still there is right"
        if sys.exc_info()[0] is not None: return
        for l in self.pending: self.do(f'run_linear({l})')
        for m in self.pool.values(): self.do(f'same({m.tensor}, {literal(m.value)})')


class Several(Running):
    "What only programs on several devices say"
    @statement
    def move(self):
        "To other devices, or split in another way: a value, but a view where nothing moves"
        m = self.pick()
        word, where, stays = self.target(m)
        self.add(m.view(None, m.at) if stays else Model.fresh(None, m.value), f'{m.tensor}.{word}({where})')

    def target(self, m):
        "How to move a tensor: a word, its arguments, and whether it is there already"
        moves = [('to', repr(d), d) for d in self.devices] + [('to', 'D', None)]
        moves += [('shard', f'D, {i}', Sharding(self.devices, i)) for i in (*self.even(m.shape), None)]
        word, where, place = self.choose(moves)
        there = self.home(m) == self.devices if place is None else self.names[m.tensor].place == place
        return word, where, there

    @statement
    def relocate(self):
        "In place: what shows all of its memory takes its views along, another view leaves"
        m = self.pick()
        word, where, stays = self.target(m)
        ours = self.names[m.tensor]
        if ours.chain and not stays:
            left = Model.fresh(m.tensor, m.value)
            for name in list(self.pool):
                if self.names[name] is ours: self.pool[name] = Model(name, left.memory, left.at, left.dtype)
        self.do(f'{m.tensor}.{word}_({where})')

    @statement
    def dot(self):
        "A product of matrices, split in any two ways"
        m = self.pick(lambda m: len(m.shape) == 2 and m.dtype in ('int32', 'float32') and exact(m.value))
        if m is None: return
        o = self.near(m, lambda o: o.dtype == m.dtype and len(o.shape) == 2 and o.shape[0] == m.shape[1] and exact(o.value))
        if o is not None: self.value(m.value @ o.value, f'{m.tensor} @ {o.tensor}')


def check_programs(device, count, chunk):
    "None; programs with this seed are right on so many devices"
    if device not in Device.available(): pytest.skip(f'{device} does not work here')
    kind = type(f'On{count}{device}', (Several if count > 1 else Running,), dict(device=device, count=count))
    rules = settings(max_examples=PROGRAMS, stateful_step_count=25, deadline=None, database=None,
                     phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
                     suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(seed(SEED + chunk)(kind), settings=rules)


@pytest.mark.parametrize('device, chunk', [(d, c) for d, n in CHUNKS.items() for c in range(n)])
def test_M7_fuzz_programs_agree_with_numpy(device, chunk): check_programs(device, 1, chunk)


@pytest.mark.parametrize('device, count, chunk', [(*k, c) for k, n in SEVERAL.items() for c in range(n)])
def test_J6_fuzz_programs_on_several_devices_agree_with_numpy(device, count, chunk):
    check_programs(device, count, chunk)
