"""A tensor of ours beside what NumPy, run eagerly, says it is.

Memory is bytes. A tensor is an array of places in it: for each element, the positions of its bytes. Views are NumPy's own
views of that array, so a view is an alias in the model exactly when it is one for us; also a bitcast to another width, and
a reshape of what NumPy would have to copy.
"""
import contextlib
import itertools

import numpy as np

from tinysched import dtypes
from tinysched.ir.uop import Sharding
from tinysched.ir.vocabulary import Ops
from tinysched.runtime import realize as runtime
from tinysched.runtime.device import pieces_of

NAMES = ('bool', 'uint8', 'int8', 'int16', 'uint32', 'int32', 'int64', 'float16', 'float32')
OURS = {np.dtype(name): getattr(dtypes, name) for name in NAMES}


def spots(itemsize: int) -> np.dtype:
    "The dtype of an element's places: one position for each byte"
    return np.dtype([('byte', np.int32, (itemsize,))])


class Model:
    "A tensor of ours, and the bytes in NumPy's memory that it looks at"

    def __init__(self, tensor, memory, at, dtype, wide=False):
        self.tensor, self.memory, self.at, self.dtype = tensor, memory, at, np.dtype(dtype)
        self.wide = wide   # whether it is a view through EXPAND, which nobody may write to

    @property
    def shape(self): return self.at.shape

    @property
    def value(self):
        "A copy of what the tensor should hold"
        return np.ascontiguousarray(self.memory[self.at['byte']]).view(self.dtype).reshape(self.shape)

    @staticmethod
    def fresh(tensor, value):
        "The model of a new value"
        value = np.asarray(value)
        places = np.arange(value.nbytes, dtype=np.int32).view(spots(value.dtype.itemsize))
        memory = np.frombuffer(bytearray(value.tobytes()), np.uint8)
        return Model(tensor, memory, places.reshape(value.shape), value.dtype)

    def view(self, tensor, at, wide=False):
        "The model of a view"
        return Model(tensor, self.memory, at, self.dtype, self.wide or wide)

    def bitcast(self, tensor, dtype):
        "The model of the same bytes under another name"
        at = np.ascontiguousarray(self.at).reshape(self.shape).view(spots(np.dtype(dtype).itemsize))
        return Model(tensor, self.memory, at, dtype, self.wide)

    def write(self, value, index=()):
        "None; the tensor, or the part at `index`, has a new value"
        at = np.asarray(self.at[index])
        value = np.broadcast_to(np.asarray(value).astype(self.dtype), at.shape)
        self.memory[at['byte']] = np.ascontiguousarray(value).view(np.uint8).reshape(at['byte'].shape)

    def number(self, k):
        "A Python number as NumPy's own, not negative where the dtype has no sign"
        return self.dtype.type(abs(k) if self.dtype.kind == 'u' else k)

    def check(self): same(self.tensor, self.value)


@contextlib.contextmanager
def hiccup(at):
    "The launch with number `at` fails, as if the device had hiccuped, and somebody catches the error"
    real, count = runtime.kernel_launch, itertools.count()

    def fail(): raise RuntimeError('hiccup')

    def make(*args):
        launch = real(*args)
        return launch._replace(start=fail) if next(count) == at else launch
    runtime.kernel_launch = make
    try: yield
    except RuntimeError as error: assert 'hiccup' in str(error)
    finally: runtime.kernel_launch = real


def same(tensor, array):
    "None; the tensor holds the values of the array, in its dtype; where it is whole on each device, on all of them"
    got = tensor.numpy()
    assert got.dtype == array.dtype, f'{got.dtype}, wanted {array.dtype}'
    np.testing.assert_array_equal(got, array)
    u = tensor.cell.state.base
    if u.op is Ops.BUFFER and isinstance(u.device, Sharding) and u.device.axis is None:
        assert len({b.numpy().tobytes() for b in pieces_of(u)}) < 2, 'devices do not agree'


def glance(tensor, array):
    "None; the tensor holds the values, or says that its schedule has not run yet"
    try: got = tensor.numpy()
    except RuntimeError as error: assert 'never run' in str(error)
    else: np.testing.assert_array_equal(got, array)


def slope(loss, target, array):
    "None; the gradient is right, or says that what it needs has been overwritten"
    try: found = loss.gradient(target)[0]
    except RuntimeError as error: assert 'assigned since' in str(error)
    else: same(found, array)
