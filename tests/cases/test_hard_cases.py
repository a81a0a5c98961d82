"""Hard cases for a lazy-tensor scheduler: small programs that schedulers of this kind got wrong in public.

Each is named after its number in the list the project started from, and says where it was met and what the peer,
tinygrad 0.14.0, does with it. Every expected value is computed by NumPy with ordinary eager, in-place semantics.
"""
import os, subprocess, sys, tempfile
import numpy as np
import pytest
import tinysched as lib
from tinysched import Device, Tensor

DEVS = tuple(f"{Device.DEFAULT}:{i}" for i in range(4))

# ---------------------------------------------------------------- helpers

def case(cid, area, source, peer="ok"):
  """peer: what tinygrad 0.14.0 does on CPU: 'ok' | 'wrong' (silent) | 'raises'."""
  assert peer in ("ok", "wrong", "raises")
  def deco(fn):
    fn.info = dict(id=cid, area=area, source=source, peer=peer)
    fn = getattr(pytest.mark, area)(fn)
    return pytest.mark.peer_fails(fn) if peer != "ok" else fn
  return deco

def need(name):
  if not hasattr(lib, name): pytest.skip(f"tinysched has no {name}")
  return getattr(lib, name)

def T(a, **kw): return Tensor(np.asarray(a).tolist(), **kw)          # no NumPy array as input: lists only
def buf(a, dtype="float32"):
  """a realized tensor that owns its memory"""
  return T(np.asarray(a), dtype=getattr(need("dtypes"), dtype)).contiguous().realize()
def same(got, want, **kw):
  got = got.numpy() if hasattr(got, "numpy") else np.asarray(got)
  want = np.asarray(want)
  assert got.shape == want.shape, f"shape {got.shape} != {want.shape}"
  if want.dtype.kind == "f": np.testing.assert_allclose(got, want, rtol=kw.get("rtol", 1e-5), atol=kw.get("atol", 1e-6))
  else: np.testing.assert_array_equal(got, want)
def f32(*shape, seed=0): return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

NOT_A_REFUSAL = (AttributeError, NameError, ImportError, TypeError, KeyError, IndexError, AssertionError, RecursionError, NotImplementedError)
def right_or_refused(fn, want):
  """a design may refuse a hard program with a clear error, but may never return a wrong value"""
  try:
    got = fn()
    if hasattr(got, "numpy"): got = got.numpy()
  except NOT_A_REFUSAL: raise
  except Exception as e:
    assert str(e).strip(), "an error with no message is not a refusal"
    return
  same(got, want)

# ---------------------------------------------------------------- A: writes, reads, and versions of a buffer

@case("A01", "assign", "tinygrad PR 16823")
@pytest.mark.parametrize("first", ["reader", "written"])
def test_case_A01_reader_keeps_old_value_after_full_overwrites(first):
  x = buf([1.0, 5.0]); y = x + 10
  x.assign(x * 2); x.assign(x + 3)
  Tensor.realize(*((y, x) if first == "reader" else (x, y)))
  same(y, np.float32([11, 15])); same(x, np.float32([5, 13]))

@case("A02", "assign", "tinygrad issue 17074", peer="wrong")
@pytest.mark.parametrize("first", ["reader", "written"])
def test_case_A02_reader_keeps_old_value_after_partial_overwrite(first):
  x = buf([1, 2], "int32"); y = x + 10
  x[:1].assign(buf([9], "int32"))
  Tensor.realize(*((y, x) if first == "reader" else (x, y)))
  same(x, np.int32([9, 2])); same(y, np.int32([11, 12]))

@case("A03", "assign", "tinygrad test_assign crossunder; PR 3806", peer="raises")
def test_case_A03_crossing_updates_need_a_saved_copy():
  a, b = buf([2.0] * 4), buf([3.0] * 4)
  c = a + 9
  a.assign(a + b); b.assign(b + c)
  Tensor.realize(a, b)
  same(a, np.full(4, 5, np.float32)); same(b, np.full(4, 14, np.float32))

@case("A05", "assign", "tinygrad test_assign write_read_write", peer="wrong")
def test_case_A05_middle_reader_realized_last():
  x = buf([0.0] * 4)
  x.assign(Tensor.full((4,), 3.0)); mid = x.sum()
  x.assign(Tensor.full((4,), 5.0)); last = x.sum()
  same(last, np.float32(20)); same(mid, np.float32(12))

@case("A07", "assign", "tinygrad test_assign swap_slices", peer="wrong")
def test_case_A07_swap_halves_through_lazy_clones():
  x = buf(np.arange(8), "int32")
  lo, hi = x[:4].clone(), x[4:].clone()
  x[:4].assign(hi); x[4:].assign(lo)
  same(x, np.int32([4, 5, 6, 7, 0, 1, 2, 3]))

@case("A10", "assign", "tinygrad test_assign overlapping_shrink; XLA 49176")
@pytest.mark.parametrize("n,step", [(7, 1), (4096, 1), (50000, 777)])
@pytest.mark.parametrize("up", [True, False])
def test_case_A10_shift_inside_one_buffer(n, step, up):
  x, ref = buf(np.arange(n)), np.arange(n, dtype=np.float32)
  if up: x[step:].assign(x[:-step]); ref[step:] = ref[:-step].copy()
  else: x[:-step].assign(x[step:]); ref[:-step] = ref[step:].copy()
  same(x, ref)

@case("A14", "assign", "tinygrad issue 4562")
def test_case_A14_equal_fills_do_not_share_memory():
  a, b = Tensor.zeros(3).contiguous(), Tensor.zeros(3).contiguous()
  a[0:1] = 2.0
  Tensor.realize(a, b)
  same(a, np.float32([2, 0, 0])); same(b, np.float32([0, 0, 0]))

@case("A15", "assign", "tinygrad test_assign ToUnrealizedView; PR 16449", peer="wrong")
@pytest.mark.parametrize("base", ["alu", "permuted", "cast", "fill"])
def test_case_A15_write_into_a_view_of_an_unrealized_result(base):
  r = np.int32([[1, 2], [3, 4]]); x = buf(r, "int32")
  if base == "alu": c, ref = x + x, r + r
  elif base == "permuted": c, ref = x.permute(1, 0).contiguous(), r.T.copy()
  elif base == "fill": c, ref = Tensor.zeros(2, 2, dtype=need("dtypes").int32).contiguous(), np.zeros((2, 2), np.int32)
  else: c, ref = x.cast(need("dtypes").float32), r.astype(np.float32)
  c[:, 1:2].assign(buf([[9], [9]], "float32" if base == "cast" else "int32"))
  ref[:, 1:2] = 9
  right_or_refused(lambda: c, ref)

@case("A17", "assign", "tinygrad test_assign overlapping_slice_assigns")
@pytest.mark.parametrize("flip", [False, True])
def test_case_A17_overlapping_writes_keep_program_order(flip):
  x, ref = buf([0.0] * 8), np.zeros(8, np.float32)
  for lo, hi, v in [(0, 4, 1.0), (2, 6, 2.0), (3, 5, 3.0)][::-1 if flip else 1]:
    x[lo:hi].assign(Tensor.full((hi - lo,), v)); ref[lo:hi] = v
  same(x, ref)

@case("A18", "assign", "tinygrad PR 15202 shared big buffer")
def test_case_A18_many_disjoint_views_updated_in_one_realize():
  big, ref = buf(np.zeros(96)), np.zeros(96, np.float32)
  views = [big[i * 12:(i + 1) * 12].reshape(3, 4) for i in range(8)]
  for i, v in enumerate(views): v.assign(v + (i + 1)); ref[i * 12:(i + 1) * 12] += i + 1
  Tensor.realize(*views)
  for i, v in enumerate(views): same(v, np.full((3, 4), i + 1, np.float32))
  same(big, ref)

@case("A20", "assign", "tinygrad test_assign chained_assign_slice_then_read")
def test_case_A20_layered_caches_written_then_read_lazily():
  D, L = 4, 6
  init = [f32(8, D, seed=i) for i in range(L)]
  caches, x, rx = [buf(c) for c in init], Tensor.full((1, D), 10.0), np.full((1, D), 10, np.float32)
  for i in range(L):
    caches[i][3:4].assign(x); init[i][3:4] = rx
    x = caches[i][:4].sum(0, keepdim=True); rx = init[i][:4].sum(0, keepdims=True)
  same(x, rx, rtol=1e-4)
  for c, r in zip(caches, init): same(c, r, rtol=1e-4)

@case("A23", "assign", "tinygrad test_assign interleaved_assign_read")
def test_case_A23_write_copy_write_again():
  a, b = buf([0] * 4, "int32"), buf([0] * 4, "int32")
  a.assign(T([1, 2, 3, 4])); b.assign(a.contiguous()); a.assign(T([5, 6, 7, 8]))
  s = b.sum()
  same(s, np.int32(10)); same(a, np.int32([5, 6, 7, 8])); same(b, np.int32([1, 2, 3, 4]))

@case("A26", "assign", "found here: reads through PAD escape tinygrad's hazard check", peer="wrong")
@pytest.mark.parametrize("n", [16, 33, 1000])
def test_case_A26_add_the_shifted_self_in_place(n):
  r = f32(n); x = buf(r)
  x.assign(x + x[:-1].pad(((1, 0),)))
  same(x, r + np.concatenate([np.zeros(1, np.float32), r[:-1]]))

def _write_through(how):
  r = np.arange(4, dtype=np.float32).reshape(2, 2); x, ref = buf(r), r.copy()
  v, n = {"reshape": (x.reshape(4), ref.reshape(4)), "slice": (x[1:2], ref[1:2]), "permute": (x.permute(1, 0), ref.T)}[how]
  v.assign(v * 2 + 1); n[...] = n * 2 + 1
  same(x, ref)

@case("A28", "assign", "tinygrad test_edgecases assign to a view")
@pytest.mark.parametrize("how", ["slice", "permute"])
def test_case_A28_base_sees_a_write_through_a_view_nobody_realized(how): _write_through(how)

# ---------------------------------------------------------------- B: symbolic variables

@case("B01", "symbolic", "tinygrad PR 13662")
def test_case_B01_bound_value_is_an_argument_not_part_of_the_cached_schedule():
  v, x = need("Variable")("v", 1, 100), buf(np.ones(10))
  for k in (5, 10, 7, 5): same((x + Tensor(v.bind(k))).sum(), np.float32(10 + 10 * k))

@case("B03", "symbolic", "tinygrad test_assign variable_slice_ordering")
def test_case_B03_one_variable_two_values_in_one_schedule():
  v, x, ref = need("Variable")("i", 0, 3), buf(np.zeros((4, 4))), np.zeros((4, 4), np.float32)
  def go():
    x[v.bind(0):v.bind(0) + 1, :].assign(Tensor.full((1, 4), 1.0))
    x[v.bind(2):v.bind(2) + 1, :].assign(Tensor.full((1, 4), 2.0))
    return x.sum()
  right_or_refused(go, np.float32(12))

@case("B04", "symbolic", "tinygrad test_symbolic_ops mean/var")
def test_case_B04_mean_divides_by_the_bound_length():
  V, r = need("Variable"), f32(12, 3); x = buf(r)
  for k in (1, 4, 12): same(x[:V("n", 1, 12).bind(k)].mean(0), r[:k].mean(0), rtol=1e-4)

@case("B06", "symbolic", "tinygrad KV cache; PR 14687")
def test_case_B06_cache_filled_at_a_moving_position():
  V, ref = need("Variable"), np.zeros((8, 4), np.float32); x, pos = buf(ref), need("Variable")("pos", 0, 7)
  for k in (0, 3, 7, 3, 5):
    row = f32(1, 4, seed=k + 10)
    p = pos.bind(k)
    x[p:p + 1, :].assign(buf(row)); ref[k:k + 1] = row
    same(x.sum(0), ref.sum(0), rtol=1e-4, atol=1e-5)
  same(x, ref)

# ---------------------------------------------------------------- C: cache keys, hash-consing, constants

@case("C01", "cache", "hash-consing: 1 == 1.0 == True in Python")
def test_case_C01_equal_hashing_constants_of_different_type():
  dt = need("dtypes")
  same(Tensor.full((2,), True, dtype=dt.bool), np.array([True, True]))
  same(Tensor.full((2,), 1, dtype=dt.int32) + 1, np.int32([2, 2]))
  same(Tensor.full((2,), 1.0, dtype=dt.float32) / 2, np.float32([.5, .5]))
  x = buf([3, 4], "int32")
  same((x * 1).cast(dt.float32) / 2 + x * True, np.float32([4.5, 6]))

@case("C03", "cache", "callify: parameter numbering")
def test_case_C03_same_shape_different_roles_of_the_buffers():
  a, b, c = buf([1.0, 2.0]), buf([10.0, 20.0]), buf([100.0, 200.0]); A, B, C = (np.float32(v) for v in ([1, 2], [10, 20], [100, 200]))
  for _ in range(2):
    same(a - b * c, A - B * C); same(b - a * c, B - A * C); same(a - a * c, A - A * C); same(a - b * b, A - B * B); same(a - a * a, A - A * A)

@case("C04", "cache", "view offset must be in the key or be an argument")
def test_case_C04_same_graph_over_different_slices_and_dtypes():
  r = np.arange(12, dtype=np.float32); x, xi = buf(r), buf(r.astype(np.int32), "int32")
  for lo in (0, 4, 8, 0, 3):
    same(x[lo:lo + 4] * 2 + 1, r[lo:lo + 4] * 2 + 1)
    same(xi[lo:lo + 4] * 2 + 1, r[lo:lo + 4].astype(np.int32) * 2 + 1)

@case("C08", "cache", "tinygrad issues 1461, 6732, 1121")
def test_case_C08_more_inputs_than_one_kernel_may_take():
  n = 150; parts = [buf([float(i), 1.0]) for i in range(n)]
  acc = parts[0]
  for p in parts[1:]: acc = acc + p
  same(acc, np.float32([n * (n - 1) / 2, n]))
  same(parts[0].cat(*parts[1:40]), np.float32([[i, 1] for i in range(40)]).reshape(-1))

@case("C09", "cache", "tinygrad test_edgecases ZeroFolding", peer="wrong")
def test_case_C09_folding_keeps_nan():
  x = buf([0.0, 1.0, np.inf])
  with np.errstate(all="ignore"): r = np.float32([0, 1, np.inf]); want = r / r
  np.testing.assert_array_equal((x / x).numpy(), want)

@case("C10", "cache", "occa 712: OpenCL refuses 0-byte buffers")
def test_case_C10_zero_size_tensors():
  e = Tensor.zeros(0, 3).contiguous().realize()
  assert e.numpy().shape == (0, 3)
  same(e.sum(0), np.zeros(3, np.float32)); same((e + 1).sum(), np.float32(0))
  same(buf([[1.0, 2, 3]]).cat(e, dim=0), np.float32([[1, 2, 3]]))

# ---------------------------------------------------------------- D: index arithmetic and fusion

@case("D01", "fusion", "tinygrad PR 16599")
def test_case_D01_two_paddings_of_one_source_reduced_in_one_kernel():
  r = f32(4, 3); x = buf(r)
  a = x.pad(((1, 1), (0, 0))).sum(axis=1); b = x.pad(((1, 2), (0, 0)))[:6].sum(axis=1)
  c = x.pad(((2, 0), (0, 0))).sum(axis=1)
  same(a + b * 2 + c, np.pad(r, ((1, 1), (0, 0))).sum(1) * 3 + np.pad(r, ((2, 0), (0, 0))).sum(1), rtol=1e-4, atol=1e-5)

@case("D03", "fusion", "unsafe-pad ops: f(0) != 0")
def test_case_D03_padding_is_after_the_function_not_before():
  r = np.abs(f32(5)) + 1; x = buf(r)
  same((1 / x).pad(((1, 1),)).sum(), np.float32((1 / r).sum())); same(x.log().pad(((2, 0),)), np.pad(np.log(r), (2, 0)))
  same(x.pad(((1, 1),)).exp().sum(), np.float32(np.exp(r).sum() + 2)); same((-x).pad(((1, 0),)).max(), np.float32(0))

@case("D05", "fusion", "one reduction, two shapes of use")
def test_case_D05_outer_product_of_one_reduction_with_itself():
  r = f32(6, 5); s = buf(r).sum(0); n = r.sum(0)
  same(s.reshape(5, 1) * s.reshape(1, 5) + s, n[:, None] * n[None] + n, rtol=1e-4, atol=1e-5)

@case("D07", "fusion", "constant folding of padded and expanded fills")
def test_case_D07_sums_of_fills():
  o = Tensor.ones(3, 4)
  same(o.pad(((1, 1), (0, 2))).sum(), np.float32(12)); same(o.reshape(3, 1, 4).expand(3, 5, 4).sum(1), np.full((3, 4), 5, np.float32))
  same(o.pad(((0, 0), (1, 0)), value=2.0).sum(1), np.full(3, 6, np.float32)); same(o.pad(((2, 0), (0, 0))).max(1), np.float32([0, 0, 1, 1, 1]))

# ---------------------------------------------------------------- E: memory planner

@case("E01", "memory", "TVM issue 20190, PR 20134")
def test_case_E01_a_view_keeps_its_storage_alive():
  r = f32(5, 8); x = buf(r)
  src = (x + 0.25).contiguous(); left = src.reshape(8, 5).permute(1, 0); right = (x + 0.125).contiguous(); more = (right * 3).contiguous()
  same(left + right + more, (r + .25).reshape(8, 5).T + (r + .125) * 4, rtol=1e-4)

@case("E05", "memory", "tinygrad issues 14689, 15698")
@pytest.mark.parametrize("n", [8, 1 << 16])
def test_case_E05_ring_of_frames_through_the_jit(n):
  f = need("TinyJit")(lambda b, new: b[n // 2:].cat(new))
  b, ref = buf(np.zeros(n), "int32"), np.zeros(n, np.int32)
  for i in range(7):
    b = f(b, buf(np.full(n // 2, i + 1), "int32")); ref = np.concatenate([ref[n // 2:], np.full(n // 2, i + 1, np.int32)])
    same(b, ref)

# ---------------------------------------------------------------- F: several devices

@case("F01", "multi", "tinygrad test_multitensor; issue 14471")
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_case_F01_reductions_over_and_beside_the_split_axis(n, axis):
  r = f32(12, 24); x = buf(r).shard(DEVS[:n], axis)
  for ax in (0, 1, None): same((x + 1).sum(ax), (r + 1).sum(ax), rtol=1e-4, atol=1e-4)
  same(x.max(0), r.max(0)); same((x * 2).sum(0).to(DEVS[0]), (r * 2).sum(0), rtol=1e-4, atol=1e-4)

@case("F03", "multi", "tinygrad TestMultiSetitem")
@pytest.mark.parametrize("sl", [slice(1, 2), slice(2, 6), slice(None), slice(13, 16)])
def test_case_F03_write_across_shard_borders(sl):
  r = np.arange(16, dtype=np.float32); ref = r.copy(); ref[sl] = 99
  x = buf(r).shard(DEVS[:4], 0); x[sl] = 99.0
  same(x, ref)
  def realized():
    y = buf(r).shard(DEVS[:4], 0).realize(); y[sl] = 99.0
    return y
  right_or_refused(realized, ref)

@case("F05", "multi", "tinygrad test_multitensor matmul")
@pytest.mark.parametrize("ax,aw", [(0, None), (1, 0), (None, 1), (0, 0), (1, 1)])
def test_case_F05_matmul_with_every_split(ax, aw):
  a, b = f32(8, 8), f32(8, 8, seed=1)
  same((buf(a).shard(DEVS[:2], ax) @ buf(b).shard(DEVS[:2], aw)), a @ b, rtol=1e-4, atol=1e-5)

@case("F08", "multi", "tinygrad test_shard_not_multiple")
def test_case_F08_uneven_split_is_right_or_refused():
  r = f32(7, 3)
  right_or_refused(lambda: buf(r).shard(DEVS[:2], 0).sum(0), r.sum(0))

# ---------------------------------------------------------------- G: JIT capture and replay

@case("G01", "jit", "tinygrad test_assign jit")
def test_case_G01_counter_argument_and_a_second_counter():
  def inc(x): x.assign(x + 1).realize()
  f = need("TinyJit")(inc); a, b = buf([0], "int32"), buf([100], "int32")
  for _ in range(5): f(a)
  for _ in range(4): f(b)
  same(a, np.int32([5])); same(b, np.int32([104]))

@case("G02", "jit", "tinygrad issues 7020, 6803; jit_footguns output_buffer_reuse", peer="wrong")
def test_case_G02_earlier_results_survive_later_calls():
  f = need("TinyJit")(lambda x: (x + 1).realize())
  outs = [f(buf([float(i)])) for i in range(5)]
  same(np.concatenate([o.numpy() for o in outs]), np.float32([1, 2, 3, 4, 5]))

@case("G03", "jit", "tinygrad jit_footguns duplicate_inputs")
def test_case_G03_one_tensor_given_twice():
  f = need("TinyJit")(lambda a, b: (a * 10 + b).realize())
  for i in range(4): right_or_refused(lambda: f(buf([i + 1.0]), buf([i + 2.0])), np.float32([(i + 1) * 10 + i + 2]))
  x = buf([3.0]); right_or_refused(lambda: f(x, x), np.float32([33]))

@case("G08", "jit", "tinygrad jit_footguns shape/offset")
def test_case_G08_replay_with_another_shape_or_offset():
  f = need("TinyJit")(lambda x: (x + 1).realize()); r = f32(6, 8); x = buf(r)
  for _ in range(3): same(f(x[:, :2].contiguous().realize()), r[:, :2] + 1)
  right_or_refused(lambda: f(x[:, :4].contiguous().realize()), r[:, :4] + 1)
  g = need("TinyJit")(lambda x: (x * 2).sum().realize())
  for i in (0, 1, 2, 3, 4): right_or_refused(lambda: g(x[i:i + 2]), np.float32((r[i:i + 2] * 2).sum()))

@case("G09", "jit", "tinygrad jit_footguns slice assign")
def test_case_G09_write_then_read_of_a_closed_over_cache():
  V, c = need("Variable"), buf(np.zeros((4, 4))); pos = V("pos", 0, 3)
  def step(p, x): c[p:p + 1, :].assign(x); return c.sum(1).realize()
  f, ref = need("TinyJit")(step), np.zeros((4, 4), np.float32)
  for k in (0, 1, 2, 3, 1, 0):
    row = f32(1, 4, seed=k); ref[k:k + 1] = row; same(f(pos.bind(k), buf(row)), ref.sum(1), rtol=1e-4, atol=1e-5)

# ---------------------------------------------------------------- H: disk tensors

def _tmpfile(data=b""):
  fd, fn = tempfile.mkstemp(prefix="ts_case_"); os.write(fd, data); os.close(fd); return fn

@case("H01", "disk", "tinygrad test_copy_from_disk_offset")
@pytest.mark.parametrize("off", [0, 3, 314, 991])
def test_case_H01_read_from_an_odd_offset(off):
  raw = bytes(range(256)) * 16; fn = _tmpfile(raw)
  d = Tensor.empty(4096, device=f"disk:{fn}", dtype=need("dtypes").uint8)[off:]
  same(d.to("CPU") + 0, np.frombuffer(raw, np.uint8)[off:]); os.unlink(fn)

@case("H03", "disk", "tinygrad PR 14426: strided disk views")
def test_case_H03_strided_view_of_a_file_is_right_or_refused():
  r = np.arange(6, dtype=np.int32); fn = _tmpfile(r.tobytes())
  d = Tensor.empty(6, device=f"disk:{fn}", dtype=need("dtypes").int32)
  right_or_refused(lambda: d[::2], r[::2]); right_or_refused(lambda: d.reshape(2, 3).permute(1, 0), r.reshape(2, 3).T)
  os.unlink(fn)

@case("H05", "disk", "tinygrad test_assign_slice_from_const")
def test_case_H05_constant_written_into_a_slice_of_a_file():
  fn = _tmpfile(np.arange(4, dtype=np.int32).tobytes()); d = Tensor.empty(4, device=f"disk:{fn}", dtype=need("dtypes").int32)
  d[1:3].assign(Tensor.full((2,), 99, dtype=need("dtypes").int32)).realize()
  with open(fn, "rb") as f: np.testing.assert_array_equal(np.frombuffer(f.read(), np.int32), [0, 99, 99, 3])
  os.unlink(fn)

# ---------------------------------------------------------------- I: functions compiled once

@case("I01", "function", "tinygrad test_function nested/same")
@pytest.mark.parametrize("pre", [False, True])
def test_case_I01_call_sites_share_code_but_not_arguments(pre):
  fn = need("function")(precompile=True) if pre else need("function")
  f = fn(lambda a, b: a * 10 + b); a, b = buf([1.0, 2]), buf([3.0, 4])
  A, B = np.float32([1, 2]), np.float32([3, 4])
  same(f(a, b) + f(b, a) * 100, A * 10 + B + (B * 10 + A) * 100); same(f(a, a), A * 11); same(f(f(a, b), f(b, a)), (A * 10 + B) * 10 + B * 10 + A)

# ---------------------------------------------------------------- J: random numbers as hidden state

@case("J01", "random", "tinygrad issue 16520", peer="wrong")
def test_case_J01_lazy_random_tensors_realized_in_reverse_differ():
  a, b, c = Tensor.rand(64), Tensor.rand(64), Tensor.rand(64)
  C, B, A = c.numpy(), b.numpy(), a.numpy()
  assert not np.array_equal(A, B) and not np.array_equal(B, C) and not np.array_equal(A, C)

# ---------------------------------------------------------------- K: caches on disk

_PROG = """
from tinysched import Tensor as T
x = T([1.0, 2.0, 3.0]).contiguous().realize()
for k in range(1, 5): x = (x * k + k).contiguous().realize()
print("RESULT", (x.sum() * 2).numpy().tolist())
"""
def _env(cache): return dict(os.environ, XDG_CACHE_HOME=cache, HOME=cache, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
def _result(out): return [float(l.split()[1]) for l in out.splitlines() if l.startswith("RESULT")]
def _want():
  x = np.float32([1, 2, 3])
  for k in range(1, 5): x = x * k + k
  return [float(x.sum() * 2)]
def _start(cache): return subprocess.Popen([sys.executable, "-c", _PROG], env=_env(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

@case("K01", "diskcache", "pocl 430, 1480; jax 22718; velox 18727")
def test_case_K01_many_processes_fill_one_empty_cache():
  with tempfile.TemporaryDirectory() as d:
    ps = [_start(d) for _ in range(6)]
    for p in ps:
      out, err = p.communicate(timeout=300)
      assert p.returncode == 0 and _result(out) == _want(), err[-2000:]

def _damage_then_run(damage):
  with tempfile.TemporaryDirectory() as d:
    p = _start(d); out, err = p.communicate(timeout=300); assert _result(out) == _want(), err[-2000:]
    for fn in [os.path.join(r, f) for r, _, fs in os.walk(d) for f in fs]: damage(fn, os.path.getsize(fn))
    p = _start(d); out, err = p.communicate(timeout=300)
    assert p.returncode == 0 and _result(out) == _want(), err[-2000:]

@case("K02", "diskcache", "pocl 343, 534: killed while writing")
def test_case_K02_half_written_cache_files_are_ignored():
  _damage_then_run(lambda fn, n: os.truncate(fn, n // 2))
