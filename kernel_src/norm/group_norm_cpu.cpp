// group_norm on the CPU, forward and backward: the formulas are in norm/group_norm.h. Small groups
// are read from memory once: the first pass leaves them in the cache for those after it. Others are
// cut into chunks, of which there may be more than groups. Compiled once per instruction set: see
// common/cpu_isa.h.

#include "norm/group_norm_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_math.h"
#include "common/cpu_rows.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "norm/group_norm.h"
#include "norm/group_norm_cpu_channels.h"

namespace fuselage::cpu {

namespace FUSELAGE_ISA {

constexpr int64_t kGroupNormChunk = 65536;  // elements, which stay in a core's cache
constexpr int64_t kGroupNormBlock = 4096;   // elements that are read twice, from the first cache
constexpr int64_t kGroupNormRows = 16;      // positions of a sum in registers

// Forward: moments of a part, which are its mean and the sum of squared deviations

// In float32 a mean that is large against the deviations is off by what matters: the sum of
// deviations from it says by how much. Few blocks have such a mean. Of half precision the sum is
// exact, or next to it.
template <class X>
static void group_norm_flat_moments(const X* x,  // [size]
                                    int64_t size,
                                    float* moments) {  // [2]
  double all = 0, all_mean = 0, all_squares = 0;
  for (int64_t first = 0; first < size; first += kGroupNormBlock) {
    const int64_t block = size - first < kGroupNormBlock ? size - first : kGroupNormBlock;
    const double count = static_cast<double>(block);
    const auto value = [&](int64_t i, auto lanes) { return load(x + first + i, lanes); };
    const float mean = static_cast<float>(sum_vectors(block, value) / count);
    const auto centred = [&](int64_t i, auto lanes) { return cut(value(i, lanes) - mean, lanes); };
    double squares = sum_vectors(block, [&](int64_t i, auto lanes) {
      const Floats v = centred(i, lanes);
      return v * v;
    });
    double rest = 0;
    if (sizeof(X) == sizeof(float) && static_cast<double>(mean) * mean * count > 16 * squares) {
      rest = sum_vectors(block, centred) / count;
      squares -= count * rest * rest;
    }
    // Of this block and those before it, about their mean.
    const double d = mean + rest - all_mean, share = count / (all + count);
    all_squares += squares + all * share * d * d;
    all_mean += share * d;
    all += count;
  }
  moments[0] = static_cast<float>(all_mean);
  moments[1] = static_cast<float>(all_squares < 0 ? 0 : all_squares);  // a NaN stays one
}

// body(row, rows) of the positions of a chunk, some at once.
template <class Body>
FUSELAGE_INLINE void group_norm_blocks(RowRange positions, Body body) {
  for (int64_t row = positions.begin; row < positions.end; row += kGroupNormRows) {
    const int64_t rest = positions.end - row;
    body(row, rest < kGroupNormRows ? rest : kGroupNormRows);
  }
}

// Asks for what a vector has of the next block of rows, which starts at `next`. Rows of one strip
// are one piece of memory, and are asked for in its order: a processor's own prefetcher follows few
// of sixteen rows at a time. (1, 256, 128, 128) in bfloat16 takes an EPYC 0.75 ms, and 1.3 without.
template <class X>
FUSELAGE_INLINE void group_norm_prefetch(const X* next, int64_t channels, int64_t size, int64_t i) {
  const bool is_whole = size == channels;
  const X* first = next + (is_whole ? i * kGroupNormRows : i);
  for (int64_t k = 0; k < kGroupNormRows; ++k)
    __builtin_prefetch(first + k * (is_whole ? kLanes : channels));
}

// The sum of value(k) over k < rows: of a whole block in pairs, which is exact of equal ones.
template <class Value>
FUSELAGE_INLINE Floats group_norm_row_sum(int64_t rows, Value value) {
  if (rows == kGroupNormRows) {
    Floats parts[kGroupNormRows / 4];
    for (int64_t k = 0; k < kGroupNormRows / 4; ++k)
      parts[k] = (value(4 * k) + value(4 * k + 1)) + (value(4 * k + 2) + value(4 * k + 3));
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
  Floats sum = {};
  for (int64_t k = 0; k < rows; ++k) sum += value(k);
  return sum;
}
static_assert(kGroupNormRows == 16, "four sums of four");

// Of every channel.
template <class X>
static void group_norm_column_moments(const X* x,  // [positions, channels]
                                      int64_t channels, RowRange positions,
                                      float* moments) {  // [channels, 2]
  group_norm_strips(channels, [&](GroupNormStrip& strip) {
    float *mean = strip.mean, *squares = strip.rstd;
    set_zero(mean, strip.size);
    set_zero(squares, strip.size);
    group_norm_blocks(positions, [&](int64_t row, int64_t rows) {
      const float before = static_cast<float>(row - positions.begin);
      const float count = static_cast<float>(rows), share = count / (before + count);
      const X* block = x + row * channels + strip.first;
      for_each_vector(0, strip.size, [&](int64_t i, auto lanes) {
        group_norm_prefetch(block + kGroupNormRows * channels, channels, strip.size, i);
        const auto value = [&](int64_t k) { return load(block + k * channels + i, lanes); };
        const Floats own = group_norm_row_sum(rows, value) / count;
        const Floats of_block = group_norm_row_sum(rows, [&](int64_t k) {
          const Floats v = value(k) - own;
          return v * v;
        });
        const Floats old = load(mean + i, lanes), d = own - old;
        store(mean + i, old + share * d, lanes);
        store(squares + i, load(squares + i, lanes) + of_block + before * share * d * d, lanes);
      });
    });
    for (int64_t i = 0; i < strip.size; ++i) {
      moments[2 * (strip.first + i)] = mean[i];
      moments[2 * (strip.first + i) + 1] = squares[i];
    }
  });
}

// visit(moments, count) of the parts of a group, in order.
template <class Visit>
FUSELAGE_INLINE void group_norm_parts(const GroupNormForward& p, int64_t sample, int64_t group,
                                      Visit visit) {
  const bool channels_last = group_norm_channels_last(p);
  for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
    const RowRange range =
        rows_of_chunk(channels_last ? p.positions : p.group_size, chunk, p.chunks);
    const double count = static_cast<double>(range.end - range.begin);
    if (!channels_last) {
      visit(p.partials + 2 * ((sample * p.groups + group) * p.chunks + chunk), count);
      continue;
    }
    const float* moments = p.partials + 2 * ((sample * p.chunks + chunk) * p.channels);
    for (int64_t i = 0; i < p.group_channels; ++i)
      visit(moments + 2 * (group * p.group_channels + i), count);
  }
}

static void group_norm_combine_group(const GroupNormForward& p, int64_t sample, int64_t group) {
  const double size = static_cast<double>(p.group_size);
  double sum = 0, squares = 0;
  group_norm_parts(p, sample, group,
                   [&](const float* part, double count) { sum += part[0] * count; });
  const double mean = sum / size;
  group_norm_parts(p, sample, group, [&](const float* part, double count) {
    const double d = part[0] - mean;
    squares += part[1] + count * d * d;
  });
  float* pair = p.statistics + 2 * (sample * p.groups + group);
  pair[0] = static_cast<float>(mean);
  pair[1] = rstd_of(squares / size, p.eps);
}

// Forward: the results

template <class X>
static void group_norm_flat_apply(const GroupNormForward& p,
                                  const float* pair,  // mean and rstd
                                  int64_t sample, int64_t group, RowRange elements) {
  const int64_t start = group * p.group_size;
  const X* x = group_norm_sample<X>(p, sample) + start;
  X* out = static_cast<X*>(p.out) + sample * p.channels * p.positions + start;
  group_norm_planes(p, group, elements, [&](int64_t channel, int64_t begin, int64_t end) {
    const GroupNormChannel c = group_norm_channel<X>(p, pair, channel);
    const float factor = c.rstd * c.weight;
    for_each_vector(begin, end, [&](int64_t i, auto lanes) {
      const Floats y = (load(x + i, lanes) - c.mean) * factor + c.bias;
      store(out + i, group_norm_act<X>(p.silu, y), lanes);
    });
  });
}

template <class X>
static void group_norm_column_apply(const GroupNormForward& p, int64_t sample, RowRange positions) {
  const X* x = group_norm_sample<X>(p, sample);
  X* out = static_cast<X*>(p.out) + sample * p.channels * p.positions;
  group_norm_strips(p.channels, [&](GroupNormStrip& strip) {
    group_norm_fill<X>(p, p.statistics, sample, strip);
    for (int64_t i = 0; i < strip.size; ++i) strip.weight[i] *= strip.rstd[i];
    for (int64_t row = positions.begin; row < positions.end; ++row) {
      const int64_t start = row * p.channels + strip.first;
      for_each_vector(0, strip.size, [&](int64_t i, auto lanes) {
        const Floats centred = load(x + start + i, lanes) - load(strip.mean + i, lanes);
        const Floats y = centred * load(strip.weight + i, lanes) + load(strip.bias + i, lanes);
        store(out + start + i, group_norm_act<X>(p.silu, y), lanes);
      });
    }
  });
}

// Backward

// A and B of a chunk of a channel.
template <class X>
static void group_norm_flat_sums(const GroupNormBackward& p, int64_t sample, int64_t channel,
                                 int64_t chunk) {
  const RowRange range = rows_of_chunk(p.positions, chunk, p.chunks);
  const int64_t start = channel * p.positions + range.begin;
  const X* x = group_norm_sample<X>(p, sample) + start;
  const X* grad_out = static_cast<const X*>(p.grad_out) + sample * p.grad_out_stride + start;
  const GroupNormChannel c =
      group_norm_channel<X>(p, group_norm_pair(p, p.statistics, sample, channel), channel);
  double sums[2];
  sum_vectors_of<2>(range.end - range.begin, sums, [&](int64_t i, auto lanes, Floats(&add)[2]) {
    const Floats xhat = (load(x + i, lanes) - c.mean) * c.rstd;
    const Floats a = group_norm_act_gradient<X>(p.silu, load(grad_out + i, lanes), xhat,
                                                broadcast(c.weight), broadcast(c.bias));
    add[0] += a;
    add[1] += a * xhat;
  });
  float* partial = p.partials + (sample * p.chunks + chunk) * 2 * p.channels + channel;
  partial[0] = static_cast<float>(sums[0]);
  partial[p.channels] = static_cast<float>(sums[1]);
}

// Of all channels of a chunk of positions.
template <class X>
static void group_norm_column_gradient_sums(const GroupNormBackward& p, int64_t sample,
                                            int64_t chunk) {
  const RowRange positions = rows_of_chunk(p.positions, chunk, p.chunks);
  const X* x = group_norm_sample<X>(p, sample);
  const X* grad_out = static_cast<const X*>(p.grad_out) + sample * p.grad_out_stride;
  float* partial = p.partials + (sample * p.chunks + chunk) * 2 * p.channels;
  group_norm_strips(p.channels, [&](GroupNormStrip& strip) {
    group_norm_fill<X>(p, p.statistics, sample, strip);
    double sums[2][kGroupNormStrip] = {};
    float block[2][kGroupNormStrip];
    group_norm_blocks(positions, [&](int64_t first, int64_t rows) {
      const int64_t next = (first + kGroupNormRows) * p.channels + strip.first;
      for_each_vector(0, strip.size, [&](int64_t i, auto lanes) {
        group_norm_prefetch(x + next, p.channels, strip.size, i);
        group_norm_prefetch(grad_out + next, p.channels, strip.size, i);
        const Floats mean = load(strip.mean + i, lanes), rstd = load(strip.rstd + i, lanes);
        const Floats weight = load(strip.weight + i, lanes), bias = load(strip.bias + i, lanes);
        Floats of_a = {}, of_product = {};
        for (int64_t row = first; row < first + rows; ++row) {
          const int64_t at = row * p.channels + strip.first + i;
          const Floats xhat = (load(x + at, lanes) - mean) * rstd;
          const Floats a =
              group_norm_act_gradient<X>(p.silu, load(grad_out + at, lanes), xhat, weight, bias);
          of_a += a;
          of_product += a * xhat;
        }
        store(block[0] + i, of_a, lanes);
        store(block[1] + i, of_product, lanes);
      });
      for (int kind = 0; kind < 2; ++kind) {
        for (int64_t i = 0; i < strip.size; ++i) sums[kind][i] += block[kind][i];
      }
    });
    for (int kind = 0; kind < 2; ++kind) {
      float* to = partial + kind * p.channels + strip.first;
      for (int64_t i = 0; i < strip.size; ++i) to[i] = static_cast<float>(sums[kind][i]);
    }
  });
}

template <class X>
static void group_norm_group_sums(const GroupNormBackward& p, int64_t sample, int64_t group) {
  const int64_t stride = 2 * p.channels;
  double means[2] = {};
  for (int64_t i = 0; i < p.group_channels; ++i) {
    const int64_t channel = group * p.group_channels + i;
    const double weight = group_norm_value<X>(p.weight, p.weight_dtype, channel, 1);
    for (int kind = 0; kind < 2; ++kind) {
      const int64_t column = kind * p.channels + channel;
      double sum = 0;
      for (int64_t chunk = 0; chunk < p.chunks; ++chunk)
        sum += p.partials[(sample * p.chunks + chunk) * stride + column];
      p.sums[sample * stride + column] = static_cast<float>(sum);
      means[kind] += weight * sum;
    }
  }
  float* pair = p.means + 2 * (sample * p.groups + group);
  for (int kind = 0; kind < 2; ++kind)
    pair[kind] = static_cast<float>(means[kind] / static_cast<double>(p.group_size));
}

template <class X>
static void group_norm_flat_gradient(const GroupNormBackward& p, int64_t sample, int64_t channel,
                                     int64_t chunk) {
  const RowRange range = rows_of_chunk(p.positions, chunk, p.chunks);
  const int64_t start = channel * p.positions;
  const X* x = group_norm_sample<X>(p, sample) + start;
  const X* grad_out = static_cast<const X*>(p.grad_out) + sample * p.grad_out_stride + start;
  X* grad_x = static_cast<X*>(p.grad_x) + sample * p.channels * p.positions + start;
  const GroupNormChannel c =
      group_norm_channel<X>(p, group_norm_pair(p, p.statistics, sample, channel), channel);
  const float* means = group_norm_pair(p, p.means, sample, channel);
  for_each_vector(range.begin, range.end, [&](int64_t i, auto lanes) {
    const Floats xhat = (load(x + i, lanes) - c.mean) * c.rstd;
    const Floats a = group_norm_act_gradient<X>(p.silu, load(grad_out + i, lanes), xhat,
                                                broadcast(c.weight), broadcast(c.bias));
    store(grad_x + i, c.rstd * (a * c.weight - means[0] - xhat * means[1]), lanes);
  });
}

template <class X>
static void group_norm_column_gradient(const GroupNormBackward& p, int64_t sample, int64_t chunk) {
  const RowRange positions = rows_of_chunk(p.positions, chunk, p.chunks);
  const X* x = group_norm_sample<X>(p, sample);
  const X* grad_out = static_cast<const X*>(p.grad_out) + sample * p.grad_out_stride;
  X* grad_x = static_cast<X*>(p.grad_x) + sample * p.channels * p.positions;
  group_norm_strips(p.channels, [&](GroupNormStrip& strip) {
    group_norm_fill<X>(p, p.statistics, sample, strip);
    float of_a[kGroupNormStrip], of_product[kGroupNormStrip];
    group_norm_spread(p, p.means, sample, strip, of_a, of_product);
    for (int64_t row = positions.begin; row < positions.end; ++row) {
      const int64_t start = row * p.channels + strip.first;
      for_each_vector(0, strip.size, [&](int64_t i, auto lanes) {
        const Floats rstd = load(strip.rstd + i, lanes), weight = load(strip.weight + i, lanes);
        const Floats xhat = (load(x + start + i, lanes) - load(strip.mean + i, lanes)) * rstd;
        const Floats a = group_norm_act_gradient<X>(p.silu, load(grad_out + start + i, lanes), xhat,
                                                    weight, load(strip.bias + i, lanes));
        const Floats product = xhat * load(of_product + i, lanes);
        store(grad_x + start + i, rstd * (a * weight - load(of_a + i, lanes) - product), lanes);
      });
    }
  });
}

// From what is in the params to template arguments

// body(X{}, sample, group) for groups [begin, end) of all samples.
template <class Params, class Body>
FUSELAGE_INLINE void group_norm_groups(const Params& p, int64_t begin, int64_t end, Body body) {
  visit_dtype(p.dtype, [&](auto x) {
    for (int64_t i = begin; i < end; ++i) body(x, i / p.groups, i % p.groups);
  });
}

FUSELAGE_HIDDEN void group_norm_whole(const GroupNormForward& p, int64_t begin, int64_t end) {
  group_norm_groups(p, begin, end, [&](auto x, int64_t sample, int64_t group) {
    using X = decltype(x);
    float pair[2];
    group_norm_flat_moments(group_norm_sample<X>(p, sample) + group * p.group_size, p.group_size,
                            pair);
    pair[1] = rstd_of(pair[1] / static_cast<double>(p.group_size), p.eps);
    if (p.statistics != nullptr) {
      float* kept = p.statistics + 2 * (sample * p.groups + group);
      kept[0] = pair[0], kept[1] = pair[1];
    }
    group_norm_flat_apply<X>(p, pair, sample, group, {0, p.group_size});
  });
}

// Of pieces [begin, end), chunks of a sample that is channels last, or else of a group or a plane:
// columns(x, sample, chunk) or flat(x, its number among those of all samples, chunk).
template <class Params, class Columns, class Flat>
FUSELAGE_INLINE void group_norm_for_pieces(const Params& p, int64_t begin, int64_t end,
                                           Columns columns, Flat flat) {
  visit_dtype(p.dtype, [&](auto x) {
    const bool channels_last = group_norm_channels_last(p);
    for (int64_t i = begin; i < end; ++i) {
      if (channels_last) {
        columns(x, i / p.chunks, i % p.chunks);
      } else {
        flat(x, i / p.chunks, i % p.chunks);
      }
    }
  });
}

FUSELAGE_HIDDEN void group_norm_moments(const GroupNormForward& p, int64_t begin, int64_t end) {
  group_norm_for_pieces(
      p, begin, end,
      [&](auto x, int64_t sample, int64_t chunk) {
        group_norm_column_moments(group_norm_sample<decltype(x)>(p, sample), p.channels,
                                  rows_of_chunk(p.positions, chunk, p.chunks),
                                  p.partials + 2 * (sample * p.chunks + chunk) * p.channels);
      },
      [&](auto x, int64_t group, int64_t chunk) {
        const RowRange range = rows_of_chunk(p.group_size, chunk, p.chunks);
        const auto* first =
            group_norm_sample<decltype(x)>(p, group / p.groups) + group % p.groups * p.group_size;
        group_norm_flat_moments(first + range.begin, range.end - range.begin,
                                p.partials + 2 * (group * p.chunks + chunk));
      });
}

FUSELAGE_HIDDEN void group_norm_combine(const GroupNormForward& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) group_norm_combine_group(p, i / p.groups, i % p.groups);
}

FUSELAGE_HIDDEN void group_norm_apply(const GroupNormForward& p, int64_t begin, int64_t end) {
  group_norm_for_pieces(
      p, begin, end,
      [&](auto x, int64_t sample, int64_t chunk) {
        group_norm_column_apply<decltype(x)>(p, sample,
                                             rows_of_chunk(p.positions, chunk, p.chunks));
      },
      [&](auto x, int64_t group, int64_t chunk) {
        group_norm_flat_apply<decltype(x)>(p, p.statistics + 2 * group, group / p.groups,
                                           group % p.groups,
                                           rows_of_chunk(p.group_size, chunk, p.chunks));
      });
}

FUSELAGE_HIDDEN void group_norm_backward_partials(const GroupNormBackward& p, int64_t begin,
                                                  int64_t end) {
  group_norm_for_pieces(
      p, begin, end,
      [&](auto x, int64_t sample, int64_t chunk) {
        group_norm_column_gradient_sums<decltype(x)>(p, sample, chunk);
      },
      [&](auto x, int64_t plane, int64_t chunk) {
        group_norm_flat_sums<decltype(x)>(p, plane / p.channels, plane % p.channels, chunk);
      });
}

FUSELAGE_HIDDEN void group_norm_backward_sums(const GroupNormBackward& p, int64_t begin,
                                              int64_t end) {
  group_norm_groups(p, begin, end, [&](auto x, int64_t sample, int64_t group) {
    group_norm_group_sums<decltype(x)>(p, sample, group);
  });
}

FUSELAGE_HIDDEN void group_norm_backward_x(const GroupNormBackward& p, int64_t begin, int64_t end) {
  group_norm_for_pieces(
      p, begin, end,
      [&](auto x, int64_t sample, int64_t chunk) {
        group_norm_column_gradient<decltype(x)>(p, sample, chunk);
      },
      [&](auto x, int64_t plane, int64_t chunk) {
        group_norm_flat_gradient<decltype(x)>(p, plane / p.channels, plane % p.channels, chunk);
      });
}

FUSELAGE_HIDDEN void group_norm_backward_channels(const GroupNormBackward& p, int64_t begin,
                                                  int64_t end) {
  const int64_t stride = 2 * p.channels;
  if (p.grad_bias != nullptr)
    sum_columns(p.sums, p.samples, stride, p.grad_bias, p.bias_dtype, begin, end);
  if (p.grad_weight != nullptr) {
    sum_columns(p.sums + p.channels, p.samples, stride, p.grad_weight, p.weight_dtype, begin, end);
  }
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(group_norm_whole, (const GroupNormForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_moments, (const GroupNormForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_combine, (const GroupNormForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_apply, (const GroupNormForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_backward_partials,
                  (const GroupNormBackward& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_backward_sums,
                  (const GroupNormBackward& p, int64_t begin, int64_t end), (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_backward_x, (const GroupNormBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(group_norm_backward_channels,
                  (const GroupNormBackward& p, int64_t begin, int64_t end), (p, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

namespace {

// Chunks of about as many elements each, of `size` parts of `each` elements.
int64_t group_norm_chunks_of(int64_t size, int64_t each) {
  const int64_t chunk = each < baseline::kGroupNormChunk ? baseline::kGroupNormChunk / each : 1;
  return (size + chunk - 1) / chunk;
}

}  // namespace

int64_t group_norm_forward_workspace(GroupNormForward& p) {
  if (baseline::group_norm_channels_last(p)) {
    p.chunks = group_norm_chunks_of(p.positions, p.channels);
    return 2 * p.samples * p.chunks * p.channels;
  }
  // A few chunks stay in the cache between the two passes better than the tensor does.
  p.chunks = group_norm_chunks_of(p.group_size, 1);
  if (p.chunks <= 4) p.chunks = 1;
  return p.chunks == 1 ? 0 : 2 * p.samples * p.groups * p.chunks;
}

int64_t group_norm_pieces(const GroupNormForward& p) {
  return p.samples * p.chunks * (baseline::group_norm_channels_last(p) ? 1 : p.groups);
}

void group_norm_backward_chunks(GroupNormBackward& p) {
  const bool channels_last = baseline::group_norm_channels_last(p);
  p.chunks = group_norm_chunks_of(p.positions, channels_last ? p.channels : 1);
}

int64_t group_norm_backward_pieces(const GroupNormBackward& p) {
  return p.samples * p.chunks * (baseline::group_norm_channels_last(p) ? 1 : p.channels);
}

#endif

}  // namespace fuselage::cpu
