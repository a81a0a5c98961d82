"""Fusion quality: kernel count and bytes for 43 small graphs where a good scheduler and a toy part ways.

  python fusion_table.py --lib tinygrad [--run] [--json out.json]

'kernels' and 'io KB' come from the schedule alone (io = sum over kernels of the size of each distinct buffer
argument). 'ideal KB' = bytes of graph inputs + outputs (a lower bound if everything were one kernel).
--run also executes each graph, checks it against numpy and adds the library's own byte and flop counters
(needs GlobalCounters); flops over 'need' shows recompute caused by fusing too much.
"""
import argparse
import numpy as np
import benchlib as B, graphs as G

ap = argparse.ArgumentParser()
ap.add_argument("--lib", default="tinygrad")
ap.add_argument("--run", action="store_true")
ap.add_argument("--only", default="")
ap.add_argument("--json", default="")
a = ap.parse_args()
lib = B.load(a.lib)
print(f"# {lib.info()} | {B.machine()}")

S = 256
np_in = {}
def inp(name, *shape):
    arr = G.rnd(*shape); np_in[name] = arr
    return lib.input(arr), arr

A_, a_ = inp("A", S, S); B_, b_ = inp("B", S, S); C_, c_ = inp("C", S, S)
V_, v_ = inp("V", S); W_, w_ = inp("W", S)
I_, i_ = inp("I", 2, 8, 16, 16); K_, k_ = inp("K", 8, 8, 3, 3)
Q_, q_ = inp("Q", 4, 64, 32); KK_, kk_ = inp("KK", 4, 64, 32); VV_, vv_ = inp("VV", 4, 64, 32)
BIG_, big_ = inp("BIG", 1 << 20)
relu = lambda x: np.maximum(x, 0)
def npsm(x):
    e = np.exp(x - x.max(-1, keepdims=True)); return e / e.sum(-1, keepdims=True)
def npln(x, g, b):
    c = x - x.mean(-1, keepdims=True); return c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5) * g + b
def npconv(x, w):
    p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))); n, c, h, ww = x.shape
    win = np.lib.stride_tricks.sliding_window_view(p, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", win, w)

def diamond(x):
    e = (x * 2.0).exp(); return e + 1.0, e * 3.0
def rms_norm(x): return x * ((x * x).sum(axis=-1, keepdim=True) * (1.0 / S) + 1e-5).rsqrt()
def np_rms(x): return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
ID_, id_ = lib.input(np.arange(0, 64 * 3, 3, dtype=np.float32)), np.arange(0, 64 * 3, 3)
def one_hot(): return (ID_.reshape(64, 1) == lib.Tensor.arange(S).reshape(1, S)).where(1.0, 0.0)
def npbn(x, g, b):
    c = x - x.mean((0, 2, 3), keepdims=True)
    return c / np.sqrt((c * c).mean((0, 2, 3), keepdims=True) + 1e-5) * g.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)
def np_pool(x): return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max((4, 5))
def attention(q, k, v): return ((q @ k.permute(0, 2, 1)) * 0.1).softmax(-1) @ v

cases = [  # name, build -> list of tensors, numpy reference, arrays read
    ("elementwise 5 ops",       lambda: [((A_ + B_) * C_).relu().exp() + 1.0], lambda: [np.exp(relu((a_ + b_) * c_)) + 1], (a_, b_, c_)),
    ("broadcast row+col",       lambda: [A_ * V_.reshape(S, 1) + W_.reshape(1, S)], lambda: [a_ * v_[:, None] + w_], (a_, v_, w_)),
    ("permute then add",        lambda: [A_.permute(1, 0) + B_], lambda: [a_.T + b_], (a_, b_)),
    ("double permute (noop)",   lambda: [(A_.permute(1, 0) + 1.0).permute(1, 0) * 2.0], lambda: [(a_ + 1) * 2], (a_,)),
    ("pad then mul",            lambda: [A_.pad(((1, 1), (2, 2))) * 2.0 + 1.0], lambda: [np.pad(a_, ((1, 1), (2, 2))) * 2 + 1], (a_,)),
    ("exp, pad (mask needed)",  lambda: [A_.exp().pad(((1, 1), (2, 2)))], lambda: [np.pad(np.exp(a_), ((1, 1), (2, 2)))], (a_,)),
    ("shrink of elementwise",   lambda: [((A_ + B_).exp()).shrink(((0, 16), (0, S)))], lambda: [np.exp(a_ + b_)[:16]], (a_[:16], b_[:16])),
    ("shrink of reduce",        lambda: [(A_ * B_).sum(axis=1).shrink(((0, 16),))], lambda: [(a_ * b_).sum(1)[:16]], (a_[:16], b_[:16])),
    ("flip+shift stencil",      lambda: [A_.flip(1) + A_.pad(((0, 0), (1, 0))).shrink(((0, S), (0, S)))], lambda: [a_[:, ::-1] + np.pad(a_, ((0, 0), (1, 0)))[:, :S]], (a_,)),
    ("concat by pad+add",       lambda: [(A_ * 2.0).pad(((0, S), (0, 0))) + (B_ + 1.0).pad(((S, 0), (0, 0)))], lambda: [np.concatenate([a_ * 2, b_ + 1])], (a_, b_)),
    ("map-reduce-map",          lambda: [((A_ * B_).sum(axis=1) + V_).relu()], lambda: [relu((a_ * b_).sum(1) + v_)], (a_, b_, v_)),
    ("sum of sums",             lambda: [A_.sum() + B_.sum()], lambda: [a_.sum() + b_.sum()], (a_, b_)),
    ("sum(axis1).sum(axis0)",   lambda: [A_.sum(axis=1).sum()], lambda: [a_.sum()], (a_,)),
    ("max & sum same input",    lambda: [A_.max(axis=1), A_.sum(axis=1)], lambda: [a_.max(1), a_.sum(1)], (a_,)),
    ("full reduce 1M",          lambda: [BIG_.sum()], lambda: [big_.sum(dtype=np.float64)], (big_,)),
    ("reduce, broadcast",       lambda: [A_ - A_.max(axis=1, keepdim=True)], lambda: [a_ - a_.max(1, keepdims=True)], (a_,)),
    ("reduce ax0, broadcast",   lambda: [A_ - A_.sum(axis=0, keepdim=True)], lambda: [a_ - a_.sum(0)], (a_,)),
    ("softmax",                 lambda: [A_.softmax(-1)], lambda: [npsm(a_)], (a_,)),
    ("log_softmax + nll",       lambda: [G.ce(A_, B_)], lambda: [-(np.log(npsm(a_)) * b_).sum() / S], (a_, b_)),
    ("layernorm",               lambda: [G.layernorm(A_, V_, W_)], lambda: [npln(a_, v_, w_)], (a_, v_, w_)),
    ("rmsnorm",                 lambda: [rms_norm(A_)], lambda: [np_rms(a_)], (a_,)),
    ("variance (1 output)",     lambda: [((A_ - A_.sum(axis=1, keepdim=True) * (1 / S)) * (A_ - A_.sum(axis=1, keepdim=True) * (1 / S))).sum(axis=1)], lambda: [a_.var(1) * S], (a_,)),
    ("diamond, 2 outputs",      lambda: list(diamond(A_)), lambda: [np.exp(a_ * 2) + 1, np.exp(a_ * 2) * 3], (a_,)),
    ("diamond rejoined",        lambda: [(lambda p, q: p * q)(*diamond(A_))], lambda: [(np.exp(a_ * 2) + 1) * np.exp(a_ * 2) * 3], (a_,)),
    ("multi-output siblings",   lambda: [A_ + B_, A_ - B_, A_ * B_], lambda: [a_ + b_, a_ - b_, a_ * b_], (a_, b_)),
    ("shared sum, 2 users",     lambda: (lambda s: [s + V_, s * W_])((A_ * B_).sum(axis=1)), lambda: [(a_ * b_).sum(1) + v_, (a_ * b_).sum(1) * w_], (a_, b_, v_, w_)),
    ("matmul+bias+relu",        lambda: [(A_ @ B_ + V_).relu()], lambda: [relu(a_ @ b_ + v_)], (a_, b_, v_)),
    ("relu before matmul",      lambda: [(A_ + 1.0).relu() @ B_], lambda: [relu(a_ + 1) @ b_], (a_, b_)),
    ("exp before matmul",       lambda: [A_.exp() @ B_], lambda: [np.exp(a_) @ b_], (a_, b_)),
    ("matmul chain A@B@C",      lambda: [A_ @ B_ @ C_], lambda: [a_ @ b_ @ c_], (a_, b_, c_)),
    ("two matmuls, added",      lambda: [A_ @ B_ + A_ @ C_], lambda: [a_ @ b_ + a_ @ c_], (a_, b_, c_)),
    ("conv3x3+bias+relu",       lambda: [(I_.conv2d(K_, padding=1) + V_.shrink(((0, 8),)).reshape(1, 8, 1, 1)).relu()], lambda: [relu(npconv(i_, k_) + v_[:8].reshape(1, 8, 1, 1))], (i_, k_, v_[:8])),
    ("conv3x3 x2 (relu mid)",   lambda: [I_.conv2d(K_, padding=1).relu().conv2d(K_, padding=1)], lambda: [npconv(relu(npconv(i_, k_)), k_)], (i_, k_)),
    ("conv + maxpool2",         lambda: [G.maxpool2(I_.conv2d(K_, padding=1).relu())], lambda: [relu(npconv(i_, k_)).reshape(2, 8, 8, 2, 8, 2).max((3, 5))], (i_, k_)),
    ("avgpool of elementwise",  lambda: [(I_ * 2.0).exp().reshape(2, 8, 8, 2, 8, 2).sum(axis=(3, 5))], lambda: [np.exp(i_ * 2).reshape(2, 8, 8, 2, 8, 2).sum((3, 5))], (i_,)),
    ("attention 4x64x32",       lambda: [attention(Q_, KK_, VV_)], lambda: [npsm((q_ @ kk_.transpose(0, 2, 1)) * .1) @ vv_], (q_, kk_, vv_)),
    ("expand of expensive op",  lambda: [(V_.exp().reshape(S, 1).expand(S, S)) * A_], lambda: [np.exp(v_)[:, None] * a_], (v_, a_)),
    ("outer product reduce",    lambda: [(V_.reshape(S, 1) * W_.reshape(1, S)).sum(axis=1)], lambda: [v_ * w_.sum()], (v_, w_)),
    ("contiguous break",        lambda: [((A_ + 1.0).contiguous() * 2.0)], lambda: [(a_ + 1) * 2], (a_,)),
    ("dup subgraph (CSE)",      lambda: [(A_ * B_).sum(axis=1), (A_ * B_).sum(axis=1) + 1.0], lambda: [(a_ * b_).sum(1), (a_ * b_).sum(1) + 1], (a_, b_)),
    ("pool 3x3 stride 2",       lambda: [(I_ * 2.0).relu().max_pool2d((3, 3), stride=2)], lambda: [np_pool(relu(i_ * 2))], (i_,)),
    ("one-hot matmul",          lambda: [one_hot() @ B_], lambda: [b_[id_]], (id_.astype(np.float32), b_[id_])),
    ("batchnorm",               lambda: [G.batchnorm_train(I_, V_.shrink(((0, 8),)), W_.shrink(((0, 8),))).relu()], lambda: [relu(npbn(i_, v_[:8], w_[:8]))], (i_, v_[:8], w_[:8])),
]
out = {}
cols = ["graph", "kernels", "io KB", "ideal KB", "io/ideal"] + (["run: kernels", "counter KB", "Mflop", "max rel err"] if a.run else [])
T = B.Table(*cols)
only = [x for x in a.only.split(",") if x]
for name, build, ref, reads in cases:
    if only and not any(name.startswith(o) for o in only): continue
    try:
        s = lib.describe(build)
        refs = ref()
        ideal = sum(x.nbytes for x in reads) + sum(np.size(r) * 4 for r in refs)
        row = [name, B.num(s.kernels), "-" if s.io_bytes is None else f"{s.io_bytes/1024:.1f}", f"{ideal/1024:.1f}",
               "-" if s.io_bytes is None else f"{s.io_bytes/ideal:.2f}"]
        if a.run:
            outs = build()
            k, mem, fl = lib.counters(lambda: lib.realize(outs))
            err = max(float(np.max(np.abs(o.numpy() - r)) / (np.max(np.abs(r)) + 1e-9)) for o, r in zip(outs, refs))
            row += [B.num(k), "-" if mem is None else f"{mem/1024:.1f}", "-" if fl is None else f"{fl/1e6:.2f}", f"{err:.1e}"]
        out[name] = dict(zip(cols[1:], row[1:]))
    except Exception as e:
        row = [name, f"{type(e).__name__}: {str(e)[:50]}"] + ["-"] * (len(cols) - 2)
    T.add(*row)
T.show("fusion quality")
B.dump(a.json, out)
