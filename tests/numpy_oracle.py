"""An independent reading of a tensor graph: every op in NumPy, one after another, nothing fused or clever."""
import numpy as np

from tinysched.ir.dtype import as_const, dtypes, from_storage, storage_numpy, to_numpy, to_storage
from tinysched.ir.vocabulary import GroupOp, Ops
from tinysched.runtime.device import buffer_of


def rounded(values, dtype):
    """The values as the dtype holds them; bfloat16 is kept in float32."""
    if dtype is dtypes.index: return np.asarray(values, np.int64)
    if dtype is dtypes.bfloat16: return from_storage(to_storage(np.asarray(values, np.float32), dtype), dtype)
    return np.asarray(values).astype(to_numpy(dtype))


def shift(a, b, right):
    bits = 8 * a.dtype.itemsize
    inside = b < bits
    return np.where(inside, (np.right_shift if right else np.left_shift)(a, np.where(inside, b, 0)), 0)


def divide(a, b, rule):
    return np.where(b == 0, 0, rule(a, np.where(b == 0, 1, b)))


ALU = {
    Ops.NEG: lambda a: ~a if a.dtype == bool else -a, Ops.EXP2: np.exp2, Ops.LOG2: np.log2, Ops.SIN: np.sin,
    Ops.SQRT: np.sqrt, Ops.TRUNC: np.trunc, Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply,
    Ops.FDIV: np.divide, Ops.IDIV: lambda a, b: divide(a, b, np.floor_divide),
    Ops.MOD: lambda a, b: divide(a, b, np.mod), Ops.MAX: np.maximum, Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal,
    Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor,
    Ops.SHL: lambda a, b: shift(a, b, False), Ops.SHR: lambda a, b: shift(a, b, True), Ops.WHERE: np.where,
    Ops.DETACH: lambda a: a, Ops.CONTIGUOUS_BACKWARD: lambda a: a, Ops.STAGE: lambda a: a, Ops.COPY: lambda a: a,
}
FOLD = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum}


def moved(op, x, arg):
    if op is Ops.RESHAPE: return x.reshape(arg)
    if op is Ops.PERMUTE: return x.transpose(arg)
    if op is Ops.EXPAND: return np.broadcast_to(x, arg)
    if op is Ops.PAD: return np.pad(x, arg) if arg else x
    if op is Ops.SHRINK: return x[tuple(slice(a, b) for a, b in arg)]
    return np.flip(x, arg)


def cast(x, src, dst):
    if dst is dtypes.bool: return x != 0
    if src.kind == 'float' and dst.kind in ('int', 'uint'):
        return np.trunc(np.nan_to_num(x, posinf=0, neginf=0)).astype(np.int64).astype(to_numpy(dst))
    return rounded(x, dst)


def bitcast(x, u):
    raw = np.ascontiguousarray(to_storage(x, u.src[0].dtype))
    return from_storage(raw.view(storage_numpy(u.dtype)), u.dtype).reshape(u.shape)


def fold(u, x):
    op, axes = u.arg
    start = {Ops.ADD: 0, Ops.MUL: 1, Ops.MAX: dtypes.min(u.dtype)}[op]
    wide = np.float32 if u.dtype in (dtypes.float16, dtypes.bfloat16) else x.dtype
    return FOLD[op].reduce(x.astype(wide), axis=axes, keepdims=True, initial=wide.type(start) if hasattr(wide, 'type') else wide(start))


def written(after, done):
    """The array of a state once its STOREs happened: each in turn, at the places its target shows."""
    state, out = after.src[0], np.array(done[after.src[0]])
    for store in after.src[1:]:
        if store.op is not Ops.STORE: continue
        target, value = store.src
        chain = []
        while target is not state and target.op in GroupOp.Movement: chain, target = [target, *chain], target.src[0]
        spots = np.arange(out.size).reshape(out.shape)
        for u in chain: spots = moved(u.op, spots, u.arg)
        out.reshape(-1)[spots] = done[value]
    return out


def evaluate(root, memory=None):
    """The array that the graph stands for; `memory` gives those of PARAMs and variables, and of BUFFERs made up."""
    memory, done = memory or {}, {}
    with np.errstate(all='ignore'):
        for u in root.toposort():
            src = [done.get(s) for s in u.src]
            if u.op is Ops.CALL: raise NotImplementedError('the oracle reads what users write, not kernels')
            if u in memory: out = np.asarray(memory[u])
            elif u.op is Ops.CONST: out = as_const(u.arg, u.dtype)
            elif u.op is Ops.ARANGE: out = np.arange(u.arg)
            elif u.op is Ops.BIND: out = u.src[1].arg
            elif u.op in GroupOp.Movement:
                rest = iter(int(s) for s in src[1:])
                out = moved(u.op, src[0], fill(u.arg, rest))
            elif u.op is Ops.REDUCE: out = fold(u, src[0])
            elif u.op is Ops.CAST: out = cast(src[0], u.src[0].dtype, u.dtype)
            elif u.op is Ops.BITCAST: out = bitcast(src[0], u)
            elif u.op is Ops.AFTER: out = written(u, done)
            elif u.op in (Ops.STORE, Ops.SINK): continue
            elif u.op is Ops.BUFFER: out = buffer_of(u).numpy().reshape(u.shape)
            elif u.op is Ops.PARAM and not u.arg.shape: out = 0
            elif u.op in ALU: out = ALU[u.op](*src)
            else: raise NotImplementedError(f'{u.op} has no value')
            done[u] = rounded(out, u.dtype)
            assert done[u].shape == tuple(u.shape), f'{u} gave {done[u].shape}'
    return done[root]


def fill(arg, rest):
    return tuple(fill(a, rest) if isinstance(a, tuple) else next(rest) if a is None else a for a in arg)
