// Bindings of the rope family. The formulas are in rope/rotary.h.
#include "binding.h"

#include "rope/rotary.h"
#include "rope/rotary_cpu.h"

namespace fuselage::binding {
namespace {

// ---- heads ----

struct Options {
  const OptionalTensor& position_ids;
  const OptionalTensor& offsets;
  std::optional<int64_t> offset;
  bool interleaved;
  int64_t heads_dim;
  std::optional<int64_t> rotary_dim;
};

// The dimensions of a tensor that count sequences, tokens and heads; -1 where it has none of them.
struct Dims {
  int64_t batch, tokens, heads;
};

Dims check_q(const char* op, const char* name, const Tensor& q, const Options& options) {
  FUSELAGE_CHECK(op, q.dim() == 3 || q.dim() == 4, "`", name,
                 "` must have shape [batch, tokens, dim], or four dimensions with one of heads, or "
                 "be packed, [tokens, heads, dim], with position_ids of [tokens], got ",
                 shape_of(q));
  FUSELAGE_CHECK(op, options.heads_dim == 1 || options.heads_dim == 2,
                 "`heads_dim` must be 1 or 2, got ", options.heads_dim);
  if (q.dim() == 4) return {0, 3 - options.heads_dim, options.heads_dim};
  const bool packed = options.position_ids.has_value() && options.position_ids->dim() == 1;
  return packed ? Dims{-1, 0, 1} : Dims{0, 1, -1};
}

// `k` is as `q` but for the number of heads.
void check_k(const char* op, const char* name, const Tensor& k, const char* q_name, const Tensor& q,
             const Dims& dims) {
  check_same_device(op, name, k, q, q_name);
  bool same = k.dim() == q.dim();
  for (int64_t i = 0; same && i < q.dim(); ++i) same = i == dims.heads || k.size(i) == q.size(i);
  FUSELAGE_CHECK(op, same, "`", name, "` must have the shape of `", q_name, "` ", shape_of(q),
                 dims.heads < 0 ? "" : ", but for the number of heads", ", got ", shape_of(k));
  check_same_dtype(op, name, k, q, q_name);
}

int64_t heads_of(const Tensor& tensor, const Dims& dims) {
  return dims.heads < 0 ? 1 : tensor.size(dims.heads);
}

Heads view_of(const Tensor& tensor, const Dims& dims, void* data) {
  return {data, dims.batch < 0 ? 0 : tensor.stride(dims.batch), tensor.stride(dims.tokens),
          dims.heads < 0 ? 0 : tensor.stride(dims.heads)};
}

Heads view_to_read(const Tensor& tensor, const Dims& dims) {
  return view_of(tensor, dims, const_cast<void*>(tensor.const_data_ptr()));
}

// NOTE: what is written must be asked for as such: a lazy copy gets its own memory then.
Heads view_to_write(const Tensor& tensor, const Dims& dims) {
  return view_of(tensor, dims, tensor.mutable_data_ptr());
}

// Reads the tensor in place where the elements of a head are adjacent, and copies it otherwise.
Tensor with_heads(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.stride(last) == 1 || tensor.size(last) == 1) return tensor;
  return contiguous_copy(tensor);
}

// Without gaps, and in the order in memory of `like`: tokens around heads or heads around tokens.
Tensor empty_heads(const Tensor& like) {
  if (like.dim() == 3 || like.stride(1) >= like.stride(2))
    return empty_like(like, like.scalar_type());
  const auto at_least_one = [](int64_t size) { return std::max<int64_t>(size, 1); };
  const int64_t inner = at_least_one(like.size(3)), middle = at_least_one(like.size(1)) * inner;
  const int64_t strides[4] = {at_least_one(like.size(2)) * middle, inner, middle, 1};
  return empty_strided(like.sizes().data(), strides, 4, like.scalar_type(), like);
}

// ---- cos and sin ----

// A table without its dimension of heads, if it has one, as [batch or 1, rows, width].
struct Table {
  Tensor tensor;  // keeps a contiguous copy alive
  int64_t batch_stride, row_stride;
};

Table table_of(const Tensor& table, int64_t heads_dim) {
  const int64_t last = table.dim() - 1;
  const Tensor t =
      table.stride(last) == 1 || table.size(last) <= 1 ? table : contiguous_copy(table);
  const int64_t rows_dim = t.dim() == 4 ? 3 - heads_dim : last - 1;
  const bool shared = t.dim() == 2 || t.size(0) == 1;
  return {t, shared ? 0 : t.stride(0), t.stride(rows_dim)};
}

bool is_integer(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Long || tensor.scalar_type() == ScalarType::Int;
}

// cos, sin and positions, checked, and what keeps them alive.
struct Positions {
  RotaryTable table;
  std::optional<Table> cos, sin;
};

void check_shape(const char* op, const char* q_name, const Tensor& q, const Tensor& cos,
                 const Options& options, RotaryShape& shape, RotaryTable& table) {
  const int64_t width = cos.size(cos.dim() - 1);
  FUSELAGE_CHECK(op, width > 0 || shape.dim == 0, "`cos` must have columns, got ", shape_of(cos));
  if (options.rotary_dim.has_value()) {
    shape.rotary_dim = *options.rotary_dim;
    FUSELAGE_CHECK(
        op, shape.rotary_dim % 2 == 0 && shape.rotary_dim >= 0 && shape.rotary_dim <= shape.dim,
        "`rotary_dim` must be even and at most ", shape.dim, ", the last dimension of `", q_name,
        "` ", shape_of(q), ", got ", shape.rotary_dim);
    FUSELAGE_CHECK(op, width == shape.rotary_dim || 2 * width == shape.rotary_dim,
                   "`cos` must have `rotary_dim` columns, ", shape.rotary_dim,
                   ", or half as many, got ", shape_of(cos));
    table.half_width = width != shape.rotary_dim;
    return;
  }
  FUSELAGE_CHECK(op, width % 2 == 0 && width <= shape.dim,
                 "`cos` must have an even number of columns, at most ", shape.dim,
                 ", the last dimension of `", q_name, "` ", shape_of(q), ", got ", shape_of(cos));
  FUSELAGE_CHECK(op, 2 * width != shape.dim || width == 0, "`cos` ", shape_of(cos),
                 " has half the columns of a head: pass rotary_dim=", shape.dim,
                 " if it has one for each pair, or rotary_dim=", width,
                 " if half of each head is to be rotated");
  shape.rotary_dim = width;
}

Positions check_positions(const char* op, const char* q_name, const Tensor& q, const Tensor& cos,
                          const Tensor& sin, const Options& options, RotaryShape& shape) {
  Positions found{};
  RotaryTable& table = found.table;
  check_same_device(op, "cos", cos, q, q_name);
  check_same_device(op, "sin", sin, q, q_name);
  table.dtype = check_dtype(op, "cos", cos);
  check_like_or_float32(op, "cos", table.dtype, shape.dtype, q_name);
  check_same_shape(op, "sin", sin, cos, "cos");
  FUSELAGE_CHECK(op, check_dtype(op, "sin", sin) == table.dtype, "`sin` must be ",
                 dtype_name(table.dtype), " as `cos`, got ",
                 torch::headeronly::toString(sin.scalar_type()));
  const bool indexed =
      options.position_ids.has_value() || options.offsets.has_value() || options.offset.has_value();
  if (indexed) {
    FUSELAGE_CHECK(op, cos.dim() == 2,
                   "`cos` must have shape [positions, columns] where `position_ids` or `offset` "
                   "is given, got ",
                   shape_of(cos));
    table.rows = cos.size(0);
  } else {
    bool fits = cos.dim() >= 2 && cos.dim() <= 4;
    if (fits) {
      const int64_t rows_dim = cos.dim() == 4 ? 3 - options.heads_dim : cos.dim() - 2;
      fits = cos.size(rows_dim) == shape.tokens &&
             (cos.dim() == 2 || cos.size(0) == 1 || cos.size(0) == shape.batch) &&
             (cos.dim() != 4 || cos.size(options.heads_dim) == 1);
    }
    FUSELAGE_CHECK(
        op, fits, "`cos` must have shape [", shape.tokens, ", columns] or [", shape.batch,
        " or 1, ", shape.tokens, ", columns] for `", q_name, "` ", shape_of(q),
        " (a longer table takes position_ids or an offset, which may be 0; a packed `", q_name,
        "`, [tokens, heads, dim], takes position_ids of [tokens]), got ", shape_of(cos));
    const bool ambiguous = q.dim() == 3 && cos.dim() == 2 && shape.batch == shape.tokens;
    FUSELAGE_CHECK(op, !ambiguous || shape.tokens < 2, "`", q_name, "` ", shape_of(q),
                   " may be [batch, tokens, dim], which takes `cos` of [1, tokens, columns] here, "
                   "or packed, [tokens, heads, dim], which takes position_ids of [tokens]");
    table.rows = shape.tokens;
  }
  FUSELAGE_CHECK(op, table.rows > 0 || shape.batch * shape.tokens == 0,
                 "`cos` must have rows, got ", shape_of(cos));
  check_shape(op, q_name, q, cos, options, shape, table);

  table.step = options.position_ids.has_value() ? 0 : 1;
  table.offset = options.offset.value_or(0);
  FUSELAGE_CHECK(op,
                 !options.position_ids.has_value() ||
                     (!options.offsets.has_value() && !options.offset.has_value()),
                 "`position_ids` and `offset` must not both be given");
  if (options.position_ids.has_value()) {
    const Tensor& ids = *options.position_ids;
    check_same_device(op, "position_ids", ids, q, q_name);
    FUSELAGE_CHECK(op, is_integer(ids), "`position_ids` must be int64 or int32, got ",
                   torch::headeronly::toString(ids.scalar_type()));
    const bool fits = (ids.dim() == 1 && ids.size(0) == shape.tokens) ||
                      (ids.dim() == 2 && ids.size(1) == shape.tokens &&
                       (ids.size(0) == 1 || ids.size(0) == shape.batch));
    if (q.dim() == 3 && ids.dim() == 1)
      FUSELAGE_CHECK(op, fits, "`position_ids` must have shape [", shape.tokens, "] for a packed `",
                     q_name, "` ", shape_of(q),
                     ", [tokens, heads, dim] (of [batch, tokens, dim] they have two dimensions), "
                     "got ",
                     shape_of(ids));
    FUSELAGE_CHECK(op, fits, "`position_ids` must have shape [", shape.tokens, "] or [",
                   shape.batch, " or 1, ", shape.tokens, "], got ", shape_of(ids));
    table.positions = ids.const_data_ptr();
    table.narrow_positions = ids.scalar_type() == ScalarType::Int;
    table.position_batch_stride = ids.dim() == 1 || ids.size(0) == 1 ? 0 : ids.stride(0);
    table.position_token_stride = ids.stride(ids.dim() - 1);
  } else if (options.offsets.has_value()) {
    const Tensor& offsets = *options.offsets;
    check_same_device(op, "offset", offsets, q, q_name);
    FUSELAGE_CHECK(op, is_integer(offsets), "`offset` must be int64 or int32, got ",
                   torch::headeronly::toString(offsets.scalar_type()));
    FUSELAGE_CHECK(op,
                   offsets.dim() == 1 && (offsets.size(0) == 1 || offsets.size(0) == shape.batch),
                   "`offset` must be an int, or have shape [1] or [", shape.batch, "], got ",
                   shape_of(offsets));
    table.positions = offsets.const_data_ptr();
    table.narrow_positions = offsets.scalar_type() == ScalarType::Int;
    table.position_batch_stride = offsets.size(0) == 1 ? 0 : offsets.stride(0);
  } else {
    FUSELAGE_CHECK(op, table.offset >= 0 && table.offset <= table.rows - shape.tokens,
                   "`cos` must have a row for each token, for an offset of ", table.offset, " and ",
                   shape.tokens, " tokens, got ", shape_of(cos));
  }
  found.cos = table_of(cos, options.heads_dim);
  found.sin = table_of(sin, options.heads_dim);
  table.cos = found.cos->tensor.const_data_ptr();
  table.sin = found.sin->tensor.const_data_ptr();
  table.cos_batch_stride = found.cos->batch_stride;
  table.sin_batch_stride = found.sin->batch_stride;
  table.cos_stride = found.cos->row_stride;
  table.sin_stride = found.sin->row_stride;
  return found;
}

RotaryShape shape_from(const char* op, const char* name, const Tensor& q, const Dims& dims,
                       bool interleaved) {
  RotaryShape shape{};
  shape.dtype = check_dtype(op, name, q);
  shape.batch = dims.batch < 0 ? 1 : q.size(dims.batch);
  shape.tokens = q.size(dims.tokens);
  shape.dim = q.size(q.dim() - 1);
  shape.interleaved = interleaved;
  check_columns(op, name, q);
  return shape;
}

// On the CPU, where it costs nothing; a GPU writes NaN for a position that its table does not have.
void check_positions_inside(const char* op, const RotaryTable& table, const RotaryShape& shape) {
  if (table.positions == nullptr) return;
  const int64_t index = cpu::rotary_position_outside(table, shape);
  FUSELAGE_CHECK(op, index < 0, table.step == 0 ? "`position_ids`" : "`offset`", " must be in [0, ",
                 table.rows, "), the rows of `cos`, but is not for token ",
                 index % std::max<int64_t>(shape.tokens, 1), " of sequence ",
                 index / std::max<int64_t>(shape.tokens, 1));
}

template <typename Params>
int64_t tokens_of(const Params& p) {
  return p.shape.batch * p.shape.tokens;
}

template <typename Params>
int64_t elements_of_token(const Params& p) {
  return (p.q.heads + p.k.heads) * p.shape.dim;
}

// Whether there is something to compute. It is there that the CPU reads positions, so they are
// checked.
template <typename Params>
bool is_something(const char* op, const Params& p, const Tensor& q) {
  if (is_nothing(q, tokens_of(p), elements_of_token(p))) return false;
  if (q.is_cpu()) check_positions_inside(op, p.table, p.shape);
  return true;
}

// ---- apply_rotary ----

void run(const char* op, const Rotary& p, const Tensor& q) {
  if (!is_something(op, p, q) || (p.in_place && p.shape.rotary_dim == 0)) return;
  launch<cpu::rotary, gpu::rotary>(op, q, p, tokens_of(p), elements_of_token(p));
}

std::tuple<Tensor, Tensor> rotated(const char* op, const char* q_name, const Tensor& q,
                                   const char* k_name, const OptionalTensor& k, const Tensor& cos,
                                   const Tensor& sin, const Options& options, bool inverse) {
  const Dims dims = check_q(op, q_name, q, options);
  Rotary p{};
  p.shape = shape_from(op, q_name, q, dims, options.interleaved);
  if (k.has_value()) check_k(op, k_name, *k, q_name, q, dims);
  const Positions positions = check_positions(op, q_name, q, cos, sin, options, p.shape);
  p.table = positions.table;
  p.inverse = inverse;
  const Tensor q_heads = with_heads(q);
  Tensor q_out = empty_heads(q_heads);
  p.q = {view_to_read(q_heads, dims), view_to_write(q_out, dims), heads_of(q, dims)};
  OptionalTensor k_heads;
  const Tensor k_out = k.has_value() ? empty_heads(*(k_heads = with_heads(*k))) : no_tensor(q);
  if (k.has_value())
    p.k = {view_to_read(*k_heads, dims), view_to_write(k_out, dims), heads_of(*k, dims)};
  run(op, p, q);
  return {q_out, k_out};
}

// ---- in place ----

struct Extent {
  int64_t size, stride;
};

// Whether elements of a head are adjacent and no two places of the tensor are one: every stride
// reaches over all that lies within it.
bool writable(const Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) return false;
  Extent extents[3];
  int count = 0;
  for (int64_t i = 0; i < last; ++i) {
    if (tensor.size(i) > 1) extents[count++] = {tensor.size(i), tensor.stride(i)};
  }
  std::sort(extents, extents + count,
            [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t span = tensor.size(last);
  for (int i = 0; i < count; ++i) {
    if (extents[i].stride < span) return false;
    span += (extents[i].size - 1) * extents[i].stride;
  }
  return true;
}

// Whether two writable tensors of one type, not empty and alike but for their heads, may share an
// element.
bool may_overlap(const Tensor& a, const Tensor& b, const Dims& dims) {
  const int64_t size = dtype_size(*dtype_from(a.scalar_type()));
  const int64_t bytes =
      static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  if (bytes >= span_of(a) * size || -bytes >= span_of(b) * size) return false;
  if (bytes % size != 0) return true;
  // One may lie in the gaps of the other, as the parts of a packed projection do: sequence by
  // sequence, token by token, or head by head.
  const auto apart = [&](int64_t rows, int64_t a_stride, int64_t b_stride, int64_t a_span,
                         int64_t b_span) {
    if (rows <= 1 || a_stride != b_stride) return false;
    const int64_t offset = (bytes / size % a_stride + a_stride) % a_stride;
    return offset >= a_span && offset + b_span <= a_stride;
  };
  if (apart(a.size(0), a.stride(0), b.stride(0), span_of(a, 1), span_of(b, 1))) return false;
  const auto one_stride = [&](const Tensor& t) {
    return t.size(0) == 1 || t.stride(0) == t.size(dims.tokens) * t.stride(dims.tokens);
  };
  const auto token_span = [&](const Tensor& t) {
    const int64_t heads = dims.heads < 0 ? 0 : (t.size(dims.heads) - 1) * t.stride(dims.heads);
    return heads + t.size(t.dim() - 1);
  };
  if (one_stride(a) && one_stride(b) &&
      apart(a.size(0) * a.size(dims.tokens), a.stride(dims.tokens), b.stride(dims.tokens),
            token_span(a), token_span(b))) {
    return false;
  }
  // Where all other strides are multiples of that of heads, each head has its place between two
  // multiples of it.
  const int64_t stride = dims.heads < 0 ? 0 : a.stride(dims.heads);
  const auto on_grid = [&](const Tensor& t) {
    for (int64_t i = 0; i < t.dim() - 1; ++i) {
      if (t.size(i) > 1 && t.stride(i) % stride != 0) return false;
    }
    return true;
  };
  const int64_t dim = a.size(a.dim() - 1);
  return !(stride > 0 && on_grid(a) && on_grid(b) && apart(2, stride, stride, dim, dim));
}

// ---- qk_norm_rotary ----

void check_norm_dim(const char* op, const Tensor& q, const RotaryShape& shape) {
#if defined(FUSELAGE_GPU)
  const int64_t most = gpu::qk_norm_rotary_max_dim(shape);
  FUSELAGE_CHECK(op, !q.is_cuda() || shape.dim <= most,
                 "the last dimension of `q` must be at most ", most, " on a GPU, got ", shape_of(q),
                 "; longer heads take rms_norm and then apply_rotary");
#endif
}

// q and k: [batch, tokens, dim], or four dimensions of which `heads_dim` (1 or 2) counts heads.
// Without k the second result is empty. Positions are those of position_ids, or count from offsets
// + offset, or where neither is given are the rows of cos and sin themselves.
std::tuple<Tensor, Tensor> apply_rotary(const Tensor& q, const OptionalTensor& k, const Tensor& cos,
                                        const Tensor& sin, const OptionalTensor& position_ids,
                                        const OptionalTensor& offsets,
                                        std::optional<int64_t> offset, bool interleaved,
                                        int64_t heads_dim, std::optional<int64_t> rotary_dim) {
  return rotated("apply_rotary", "q", q, "k", k, cos, sin,
                 {position_ids, offsets, offset, interleaved, heads_dim, rotary_dim}, false);
}

std::tuple<Tensor, Tensor> apply_rotary_bwd(const Tensor& grad_q, const OptionalTensor& grad_k,
                                            const Tensor& cos, const Tensor& sin,
                                            const OptionalTensor& position_ids,
                                            const OptionalTensor& offsets,
                                            std::optional<int64_t> offset, bool interleaved,
                                            int64_t heads_dim, std::optional<int64_t> rotary_dim) {
  return rotated("apply_rotary_bwd", "grad_q", grad_q, "grad_k", grad_k, cos, sin,
                 {position_ids, offsets, offset, interleaved, heads_dim, rotary_dim}, true);
}

void apply_rotary_(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                   const OptionalTensor& position_ids, const OptionalTensor& offsets,
                   std::optional<int64_t> offset, bool interleaved, int64_t heads_dim,
                   std::optional<int64_t> rotary_dim) {
  const char* op = "apply_rotary_";
  const Options options{position_ids, offsets, offset, interleaved, heads_dim, rotary_dim};
  const Dims dims = check_q(op, "q", q, options);
  Rotary p{};
  p.shape = shape_from(op, "q", q, dims, interleaved);
  if (k.has_value()) check_k(op, "k", *k, "q", q, dims);
  const Positions positions = check_positions(op, "q", q, cos, sin, options, p.shape);
  p.table = positions.table;
  p.in_place = true;
  const auto check_writable = [&](const char* name, const Tensor& tensor) {
    FUSELAGE_CHECK(op, writable(tensor), "`", name,
                   "` is written in place and must have adjacent elements in a head and heads that "
                   "do not overlap; pass a contiguous tensor or use apply_rotary");
    check_apart(op, name, tensor, "cos", positions.cos->tensor);
    check_apart(op, name, tensor, "sin", positions.sin->tensor);
    check_apart(op, name, tensor, "position_ids", position_ids);
    check_apart(op, name, tensor, "offset", offsets);
  };
  const auto is_empty = [](const Tensor& tensor) { return tensor.numel() == 0; };
  check_writable("q", q);
  const Heads q_heads = view_to_write(q, dims);
  p.q = {q_heads, q_heads, heads_of(q, dims)};
  if (k.has_value()) {
    check_writable("k", *k);
    FUSELAGE_CHECK(op, is_empty(q) || is_empty(*k) || is_meta(q) || !may_overlap(q, *k, dims),
                   "`q` and `k` are both written and must not share memory; pass a copy of one");
    const Heads k_heads = view_to_write(*k, dims);
    p.k = {k_heads, k_heads, heads_of(*k, dims)};
  }
  run(op, p, q);
}

std::tuple<Tensor, Tensor> qk_norm_rotary(
    const Tensor& q, const OptionalTensor& k, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
    const OptionalTensor& position_ids, const OptionalTensor& offsets,
    std::optional<int64_t> offset, double eps, double weight_offset, bool cast_before_weight,
    bool interleaved, int64_t heads_dim, std::optional<int64_t> rotary_dim) {
  const char* op = "qk_norm_rotary";
  const Options options{position_ids, offsets, offset, interleaved, heads_dim, rotary_dim};
  const Dims dims = check_q(op, "q", q, options);
  QkNormRotary p{};
  p.shape = shape_from(op, "q", q, dims, interleaved);
  if (k.has_value()) check_k(op, "k", *k, "q", q, dims);
  const OptionalTensor checked_q_weight = check_vector(op, "q_weight", q_weight, q, "q");
  const OptionalTensor checked_k_weight = check_vector(op, "k_weight", k_weight, q, "q");
  const Positions positions = check_positions(op, "q", q, cos, sin, options, p.shape);
  check_norm_dim(op, q, p.shape);
  check_eps(op, eps);
  check_not_nan(op, "weight_offset", weight_offset);
  p.table = positions.table;
  p.eps = static_cast<float>(eps);
  p.weight_offset = static_cast<float>(weight_offset);
  p.cast_before_weight = cast_before_weight;
  OptionalTensor copies[2];  // of q and k
  const auto make = [&](QkNormRotarySide& side, const Tensor& x, const OptionalTensor& weight,
                        OptionalTensor& copy) {
    copy = with_heads(x);
    Tensor out = empty_heads(*copy);
    side.x = view_to_read(*copy, dims);
    side.out = view_to_write(out, dims);
    side.heads = heads_of(x, dims);
    read_vector(side.weight, side.weight_dtype, weight, p.shape.dtype);
    return out;
  };
  const Tensor q_out = make(p.q, q, checked_q_weight, copies[0]);
  const Tensor k_out = k.has_value() ? make(p.k, *k, checked_k_weight, copies[1]) : no_tensor(q);
  if (is_something(op, p, q))
    launch<cpu::qk_norm_rotary, gpu::qk_norm_rotary>(op, q, p, tokens_of(p), elements_of_token(p));
  return {q_out, k_out};
}

// (grad_q, grad_k, grad_q_weight, grad_k_weight), any of them empty where not needed.
std::tuple<Tensor, Tensor, Tensor, Tensor> qk_norm_rotary_bwd(
    const Tensor& grad_q_out, const OptionalTensor& grad_k_out, const Tensor& q,
    const OptionalTensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
    const Tensor& cos, const Tensor& sin, const OptionalTensor& position_ids,
    const OptionalTensor& offsets, std::optional<int64_t> offset, double eps, double weight_offset,
    bool interleaved, int64_t heads_dim, std::optional<int64_t> rotary_dim, bool needs_grad_q,
    bool needs_grad_k, bool needs_grad_q_weight, bool needs_grad_k_weight) {
  const char* op = "qk_norm_rotary_bwd";
  const Options options{position_ids, offsets, offset, interleaved, heads_dim, rotary_dim};
  const Dims dims = check_q(op, "q", q, options);
  QkNormRotaryBackward p{};
  p.shape = shape_from(op, "q", q, dims, interleaved);
  if (k.has_value()) check_k(op, "k", *k, "q", q, dims);
  FUSELAGE_CHECK(op, grad_k_out.has_value() == k.has_value(),
                 "`grad_k_out` must be given where `k` is, and nowhere else");
  const auto check_grad = [&](const char* name, const Tensor& grad, const char* x_name,
                              const Tensor& x) {
    check_same_device(op, name, grad, x, x_name);
    check_same_shape(op, name, grad, x, x_name);
    FUSELAGE_CHECK(op, check_dtype(op, name, grad) == p.shape.dtype, "`", name, "` must be ",
                   dtype_name(p.shape.dtype), " as `", x_name, "`, got ",
                   torch::headeronly::toString(grad.scalar_type()));
  };
  check_grad("grad_q_out", grad_q_out, "q", q);
  if (k.has_value()) check_grad("grad_k_out", *grad_k_out, "k", *k);
  const OptionalTensor checked_q_weight = check_vector(op, "q_weight", q_weight, q, "q");
  const OptionalTensor checked_k_weight = check_vector(op, "k_weight", k_weight, q, "q");
  const Positions positions = check_positions(op, "q", q, cos, sin, options, p.shape);
  check_norm_dim(op, q, p.shape);
  p.table = positions.table;
  p.eps = static_cast<float>(eps);
  p.weight_offset = static_cast<float>(weight_offset);

  // One for q and k each: the results, and what keeps a contiguous copy alive.
  struct Side {
    Tensor x, grad_out;
    Gradient grad_x, grad_weight;
  };
  const auto make = [&](QkNormRotaryBackwardSide& side, const Tensor& x, const Tensor& grad_out,
                        const OptionalTensor& weight, bool needs_x, bool needs_weight) {
    Side made{with_heads(x), with_heads(grad_out), no_gradient(q),
              gradient_of(weight, needs_weight, q)};
    if (needs_x) made.grad_x = {empty_heads(made.x), true};
    side.x = view_to_read(made.x, dims);
    side.grad_out = view_to_read(made.grad_out, dims);
    if (needs_x) side.grad_x = view_to_write(made.grad_x.tensor, dims);
    side.grad_weight = made.grad_weight.data();
    side.heads = heads_of(x, dims);
    read_vector(side.weight, side.weight_dtype, weight, p.shape.dtype);
    return made;
  };
  Side q_side = make(p.q, q, grad_q_out, checked_q_weight, needs_grad_q, needs_grad_q_weight);
  Side k_side = k.has_value() ? make(p.k, *k, *grad_k_out, checked_k_weight, needs_grad_k,
                                     needs_grad_k_weight)
                              : Side{q, q, no_gradient(q), no_gradient(q)};
  const std::tuple<Tensor, Tensor, Tensor, Tensor> results{
      q_side.grad_x.tensor, k_side.grad_x.tensor, q_side.grad_weight.tensor,
      k_side.grad_weight.tensor};
  if (!is_something(op, p, q)) {
    q_side.grad_weight.zero();
    k_side.grad_weight.zero();
    return results;
  }

  OptionalTensor partials;
  const auto make_partials = [&](int64_t count) {
    p.partial_count = count;
    const int64_t sides = q_side.grad_weight.needed + k_side.grad_weight.needed;
    float* data = scratch(partials, sides * count * p.shape.dim, q);
    if (q_side.grad_weight.needed) p.q.partials = data;
    if (k_side.grad_weight.needed) p.k.partials = data + (sides - 1) * count * p.shape.dim;
  };
  launch(
      op, q,
      [&] {
        make_partials(cpu::qk_norm_rotary_backward_chunks(p.shape, p.q.heads + p.k.heads));
        on_threads<cpu::qk_norm_rotary_backward>(
            p, p.partial_count, tokens_of(p) / p.partial_count * elements_of_token(p));
        if (partials.has_value())
          on_threads<cpu::qk_norm_rotary_backward_weight>(p, p.shape.dim, p.partial_count);
      },
      [&](int32_t device, void* stream) {
        make_partials(gpu::qk_norm_rotary_backward_partials(p, device));
        return gpu::qk_norm_rotary_backward(p, device, stream);
      });
  return results;
}

}  // namespace

void register_rope_ops(const Ops& ops) {
  ops.with_fwd(
      "apply_rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, Tensor? "
      "offsets, int? offset, bool interleaved, int heads_dim, int? rotary_dim) -> (Tensor q_out, "
      "Tensor k_out)",
      TORCH_BOX(&apply_rotary));
  ops.op(
      "apply_rotary_bwd(Tensor grad_q, Tensor? grad_k, Tensor cos, Tensor sin, Tensor? "
      "position_ids, Tensor? offsets, int? offset, bool interleaved, int heads_dim, int? "
      "rotary_dim) -> (Tensor grad_q_in, Tensor grad_k_in)",
      TORCH_BOX(&apply_rotary_bwd));
  ops.op(
      "apply_rotary_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? position_ids, "
      "Tensor? offsets, int? offset, bool interleaved, int heads_dim, int? rotary_dim) -> ()",
      TORCH_BOX(&apply_rotary_));
  ops.with_fwd(
      "qk_norm_rotary(Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor "
      "sin, Tensor? position_ids, Tensor? offsets, int? offset, float eps, float weight_offset, "
      "bool cast_before_weight, bool interleaved, int heads_dim, int? rotary_dim) -> (Tensor "
      "q_out, Tensor k_out)",
      TORCH_BOX(&qk_norm_rotary));
  ops.op(
      "qk_norm_rotary_bwd(Tensor grad_q_out, Tensor? grad_k_out, Tensor q, Tensor? k, Tensor? "
      "q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? position_ids, Tensor? offsets, "
      "int? offset, float eps, float weight_offset, bool interleaved, int heads_dim, int? "
      "rotary_dim, bool needs_grad_q, bool needs_grad_k, bool needs_grad_q_weight, bool "
      "needs_grad_k_weight) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight, Tensor "
      "grad_k_weight)",
      TORCH_BOX(&qk_norm_rotary_bwd));
}

}  // namespace fuselage::binding
