// Sweeps every launch policy of the GPU kernels over made-up devices and prints what a GPU would
// refuse or a kernel not stand. Plain C++, built and run by test_policies.py. A line for each
// family and device:
//   <family>|<device>|<cases>|<violations>|<the first of them>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/quant_policy.h"
#include "common/row_weights_policy.h"
#include "gate/activation_policy.h"
#include "loss/cross_entropy_policy.h"
#include "norm/ada_norm_policy.h"
#include "norm/gated_rms_norm_policy.h"
#include "norm/group_norm_policy.h"
#include "norm/poly_norm_policy.h"
#include "norm/rms_norm_policy.h"
#include "norm/row_forward_policy.h"
#include "norm/row_quant_policy.h"
#include "norm/shard_norm_policy.h"
#include "rope/rotary_policy.h"
#include "route/topk_softmax_policy.h"
#include "sample/sample_policy.h"

namespace {

using namespace fuselage;

struct Device {
  std::string name;
  DeviceInfo info;
};

constexpr int kKB = 1024;

const std::vector<Device> kDevices = {
    {"T4", nvidia_device(7, 5, 40, 64 * kKB)},
    {"A100", nvidia_device(8, 0, 108, 163 * kKB)},
    {"RTX 3090", nvidia_device(8, 6, 82, 99 * kKB)},
    {"L40S", nvidia_device(8, 9, 142, 99 * kKB)},
    {"H100", nvidia_device(9, 0, 132, 227 * kKB)},
    {"slice of an H100", nvidia_device(9, 0, 4, 227 * kKB)},
    {"B200", nvidia_device(10, 0, 148, 227 * kKB)},
    {"RTX 5090", nvidia_device(12, 0, 170, 99 * kKB)},
    {"MI250X", amd_device(110, 64 * kKB, 64)},
    {"MI300X", amd_device(304, 64 * kKB, 64)},
};

const int64_t kDims[] = {
    1,     2,     3,     7,     8,     12,    17,     31,     64,           65,
    96,    100,   128,   129,   256,   257,   300,    512,    520,          768,
    1000,  1024,  1536,  2048,  2050,  2880,  4096,   4100,   4104,         5120,
    5124,  7168,  8192,  8200,  11008, 12288, 14336,  16376,  16383,        16384,
    16392, 18944, 28672, 32768, 53248, 65536, 131072, 262144, (1 << 20) + 3};
const int64_t kRows[] = {1, 2, 3, 5, 16, 64, 131, 1000, 4096, 65536, (1 << 20) + 1};
const DType kDTypes[] = {DType::float32, DType::float16, DType::bfloat16};

// ---- what is found ----

struct Report {
  int64_t cases = 0, violations = 0;
  std::string first, described;

  void begin(const std::string& description) {
    ++cases;
    described = description;
  }
  void expect(bool holds, const char* what) {
    if (holds) return;
    if (violations++ == 0) first = std::string(what) + ": " + described;
  }
};

// ---- tensors ----

// A place in memory so many bytes off a 256-byte boundary.
void* at(int offset = 0) { return reinterpret_cast<void*>(uintptr_t{1} << 20 | offset); }

struct Rows {
  const void* data;
  int64_t stride, columns;
  int element_size;
};

// NOTE: of what the hardware needs, and not by aligned_rows: this is what tests it.
bool is_whole_16_bytes(const Rows& rows) {
  if (rows.data == nullptr) return true;
  for (int64_t row = 0; row < 3; ++row) {
    const uint64_t start =
        reinterpret_cast<uintptr_t>(rows.data) + uint64_t(row * rows.stride * rows.element_size);
    if (start % 16 != 0 || (start + uint64_t(rows.columns * rows.element_size)) % 16 != 0)
      return false;
  }
  return true;
}

void expect_aligned(Report& report, bool aligned, const std::vector<Rows>& tensors) {
  bool all = true;
  for (const Rows& rows : tensors) all &= is_whole_16_bytes(rows);
  report.expect(!aligned || all, "a row that is not whole vectors is taken for one");
  report.expect(aligned || !all, "whole vectors are not taken for such");
}

// ---- launches ----

struct Launch {
  int64_t grid_x, grid_y;
  int threads_x, threads_y;
  int64_t shared_bytes;  // dynamic and static
  int cluster;
};

void expect_legal(Report& report, const DeviceInfo& device, const Launch& launch, int max_threads) {
  report.expect(launch.threads_x >= 1 && launch.threads_y >= 1 &&
                    launch.threads_x * launch.threads_y <= max_threads,
                "threads of a block");
  report.expect(launch.grid_x >= 1 && launch.grid_x < int64_t{1} << 31 && launch.grid_y >= 1 &&
                    launch.grid_y <= 65535,
                "blocks of the grid");
  report.expect(launch.shared_bytes <= device.max_shared_memory, "shared memory");
  const int cluster = launch.cluster;
  report.expect(cluster == 1 || (device.has_clusters && cluster >= 2 && cluster <= 8 &&
                                 (cluster & (cluster - 1)) == 0 && launch.grid_x % cluster == 0),
                "blocks of a cluster");
}

// A kernel in which `threads_x` threads share the sums of a row.
void expect_legal_rows(Report& report, const DeviceInfo& device, const Launch& launch,
                       int max_threads) {
  expect_legal(report, device, launch, max_threads);
  const int threads = launch.threads_x;
  report.expect(threads <= kWarpSize ? (threads & (threads - 1)) == 0 : threads % kWarpSize == 0,
                "threads of a row are a power of two within a warp, or whole warps");
  if (threads <= kWarpSize) return;
  const int warps = (threads / kWarpSize + 3) / 4 * 4;  // RowSumScratch has room for 64
  report.expect(launch.threads_y * warps <= 64 && launch.threads_y <= 15,
                "rows of a block have no room for their sums, or no barrier");
  report.expect(launch.cluster == 1 || launch.threads_y == 1, "rows of a cluster");
}

// ---- the families ----

constexpr int kScratchBytes = 4 * kKB;  // static arrays of the norms, at most

bool is_huge(int64_t rows, int64_t dim) { return rows * dim > int64_t{1} << 37; }

// f(dim, rows, stride, offset in bytes): contiguous, padded and misaligned tensors.
template <typename F>
void for_each_layout(F f) {
  for (const int64_t dim : kDims) {
    for (const int64_t rows : kRows) {
      if (is_huge(rows, dim)) continue;
      f(dim, rows, dim, 0);
      f(dim, rows, (dim + 7) / 8 * 8, 0);
      f(dim, rows, dim + 1, 0);
      f(dim, rows, dim, 4);
    }
  }
}

std::string shape_of(int64_t dim, int64_t rows, int64_t stride, int offset, DType x, DType out,
                     bool residual) {
  char line[200];
  std::snprintf(line, sizeof line, "[%lld, %lld] %s to %s, stride %lld, %d bytes off%s",
                static_cast<long long>(rows), static_cast<long long>(dim), dtype_name(x),
                dtype_name(out), static_cast<long long>(stride), offset,
                residual ? ", with a residual" : "");
  return line;
}

template <typename F>
void for_each_types(F f) {
  for (const DType x : kDTypes) {
    for (const DType out : kDTypes) {
      if (x == out || x == DType::float32 || out == DType::float32) f(x, out);
    }
  }
}

// What norm/row_forward.h stands.
void expect_forward_row(Report& report, const DeviceInfo& device, const RowPolicy& row,
                        const RowForwardShape& shape) {
  const int64_t at_once = int64_t{row.rows_per_block} * row.rows_per_thread;
  expect_legal_rows(report, device,
                    {ceil_div(shape.rows, at_once) * row.cluster, 1, row.threads_per_row,
                     row.rows_per_block, kScratchBytes, row.cluster},
                    row.rows_per_thread > 1 ? kForwardShortThreads : kForwardThreads);
  // NOTE: alignment must not change the order of a sum, which streamed rows have of their own.
  RowForwardShape other = shape;
  other.aligned = !shape.aligned;
  report.expect(row.streamed == row_forward_policy(device, other).streamed,
                "streamed because of its alignment");
  if (row.streamed) return;
  const int64_t held =
      int64_t{row.cluster} * row.threads_per_row * row.vectors * (16 / shape.element_size);
  report.expect(held >= shape.dim, "columns without a thread");
  const int vectors = row.vectors;
  const bool most = shape.most_vectors && vectors == kForwardMostVectors;
  report.expect(vectors == 1 || vectors == 2 || vectors == kForwardVectors || most,
                "vectors without a kernel");
  report.expect(shape.aligned || (vectors != 2 && !most), "vectors without an unaligned kernel");
  report.expect(!most || row.threads_per_row * row.rows_per_block <= kForwardMostVectorThreads,
                "more threads than a kernel has");
  report.expect(vectors == 1 || row.threads_per_row % kWarpSize == 0, "vectors a warp apart");
  report.expect(row.rows_per_thread == 1 ||
                    (row.threads_per_row <= kWarpSize && row.rows_per_thread * vectors == 4 &&
                     row.threads_per_row >= row.rows_per_thread),
                "several rows a thread");
  report.expect(row.cluster == 1 || vectors == kForwardVectors, "clusters without a kernel");
  report.expect(vectors != 2 || row.rows_per_thread > 1 || row.threads_per_row > kWarpSize,
                "two vectors a thread in a warp (norm/row_reduce.h)");
}

void rms_norm_forward(const DeviceInfo& device, Report& report) {
  for_each_types([&](DType x, DType out) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (const bool residual : {false, true}) {
        RmsNormForward p{};
        p.x = at(offset), p.out = at(), p.weight = at();
        if (residual) p.residual = at(offset), p.new_residual = at();
        p.rows = rows, p.dim = dim;
        p.x_stride = p.residual_stride = stride;
        p.out_stride = p.new_residual_stride = dim;
        p.x_dtype = x, p.out_dtype = out, p.weight_dtype = DType::float32;
        report.begin(shape_of(dim, rows, stride, offset, x, out, residual));
        const int size = dtype_size(x);
        const bool aligned = has_aligned_kernel(p);
        expect_aligned(report, is_aligned(p),
                       {{p.x, p.x_stride, dim, size},
                        {p.residual, p.residual_stride, dim, size},
                        {p.new_residual, dim, dim, size},
                        {p.out, dim, dim, dtype_size(out)},
                        {p.weight, 0, dim, 4}});
        expect_forward_row(report, device, rms_norm_forward_policy(device, aligned, p),
                           {rows, dim, size, aligned, false, !residual, 0});
        expect_forward_row(report, device,
                           rms_norm_add_rms_norm_policy(device, aligned, rows, dim, x),
                           {rows, dim, size, aligned, false, false, 1024});
      }
    });
  });
}

// Blocks that sum columns, where there are any: threads, and shared memory as the kernel uses it.
void expect_column_blocks(Report& report, const DeviceInfo& device, int blocks, int sums,
                          const RowPolicy& row, int vector_size, int shared_bytes,
                          int64_t elements) {
  const int threads = row.threads_per_row * row.rows_per_block;
  report.expect(blocks == 0 || elements <= int64_t{1} << 21, "blocks of columns for many rows");
  report.expect(blocks == 0 || (threads >= kRowBackwardTile && blocks < device.multiprocessors &&
                                shared_bytes >= sums * threads * vector_size * 4),
                "blocks of columns");
}

void ada_norm_forward(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (const bool residual : {false, true}) {
        AdaNormForward p{};
        p.x = at(offset), p.out = at();
        if (residual) p.residual = at(offset), p.new_residual = at(), p.gate = {at(), 0, 1, dtype};
        p.scale = {at(), stride, 1, DType::float32};
        p.rows = rows, p.dim = dim, p.x_stride = p.residual_stride = stride, p.dtype = dtype;
        p.out_stride = p.new_residual_stride = dim;
        report.begin(shape_of(dim, rows, stride, offset, dtype, dtype, residual));
        const int size = dtype_size(dtype);
        const bool aligned = is_aligned(p);
        expect_aligned(report, aligned,
                       {{p.x, stride, dim, size},
                        {p.residual, stride, dim, size},
                        {p.new_residual, dim, dim, size},
                        {p.out, dim, dim, size},
                        {p.gate.data, 0, dim, size},
                        {p.scale.data, stride, dim, 4}});
        expect_forward_row(report, device, ada_norm_forward_policy(device, aligned, p),
                           {rows, dim, size, aligned, true, false, residual ? 512 : 0});
      }
    });
  }
}

// The one backward of rows, for an operator of this shape.
void expect_row_backward(Report& report, const DeviceInfo& device, const RowBackwardShape& shape,
                         const RowBackwardPolicy& policy) {
  const RowPolicy& row = policy.row;
  const int64_t blocks = shape.groups * policy.blocks_per_group * row.cluster;
  expect_legal_rows(
      report, device,
      {row.streamed ? shape.groups * shape.group_rows : blocks + policy.column_blocks, 1,
       row.threads_per_row, row.rows_per_block, policy.shared_bytes + kScratchBytes, row.cluster},
      row.streamed ? 512 : shape.threads);
  report.expect(policy.blocks_per_group >= 1 && policy.blocks_per_group <= shape.group_rows,
                "no partial sums, or more than rows");
  if (row.streamed) return;
  report.expect(!policy.bulk || (shape.aligned && shape.bulk && device.has_bulk_copy &&
                                 policy.column_blocks == 0),
                "bulk copies");
  report.expect(policy.stages >= (policy.bulk ? 2 : 1) && policy.stages <= kMaxRowStages, "stages");
  const int vector_size = 16 / shape.element_size;
  const int64_t held = int64_t{row.cluster} * row.threads_per_row * row.vectors * vector_size;
  report.expect(held >= shape.dim && row.vectors * vector_size <= shape.max_columns,
                "columns without a thread");
  report.expect(shape.short_rows || row.vectors * vector_size == shape.max_columns,
                "no kernel for so few columns a thread");
  report.expect(row.cluster == 1 || row.vectors * vector_size == shape.max_columns,
                "clusters without a kernel");
  // Shared memory, as the kernel uses it.
  const int64_t columns = held / row.cluster * row.rows_per_block;
  const int element_bytes =
      (shape.tensors - 1) * shape.element_size + shape.grad_out_size + shape.statistics * 4 / 32;
  report.expect(policy.shared_bytes >= columns * 4, "no room for the sums of columns");
  report.expect(policy.shared_bytes >= policy.stages * columns * element_bytes,
                "no room for the stages");
  const int64_t factors =
      columns / (shape.factors_by_row ? 1 : row.rows_per_block) * 4 * shape.shared_factors;
  report.expect(policy.shared_bytes >= factors + policy.stages * columns * element_bytes,
                "no room for the factors");
  expect_column_blocks(report, device, policy.column_blocks, shape.column_sums, row, vector_size,
                       policy.shared_bytes, shape.groups * shape.group_rows * shape.dim);
}

void rms_norm_backward(const DeviceInfo& device, Report& report) {
  for_each_types([&](DType x, DType out) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (const bool residual : {false, true}) {
        RmsNormBackward p{};
        p.x = at(), p.grad_out = at(offset), p.weight = at(), p.grad_x = p.grad_weight = at();
        if (residual) p.grad_new_residual = at(offset);
        p.rows = rows, p.dim = dim;
        p.x_stride = dim, p.grad_out_stride = p.grad_new_residual_stride = stride;
        p.x_dtype = x, p.out_dtype = out, p.weight_dtype = DType::float32;
        report.begin(shape_of(dim, rows, stride, offset, x, out, residual));
        const int size = dtype_size(x);
        expect_aligned(report, is_aligned(p),
                       {{p.x, dim, dim, size},
                        {p.grad_out, stride, dim, dtype_size(out)},
                        {p.grad_new_residual, stride, dim, size},
                        {p.grad_x, dim, dim, size},
                        {p.weight, 0, dim, 4}});
        const RowBackwardShape shape = rms_norm_backward_shape(p);
        const RowBackwardPolicy policy = row_backward_policy(device, shape);
        expect_row_backward(report, device, shape, policy);
      }
    });
  });
}

void rms_norm_add_rms_norm_backward(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (const bool used : {false, true}) {  // new_residual
        RmsNormAddRmsNormBackward p{};
        p.x = p.new_residual = p.grad_residual = p.grad_x = at(), p.grad_out = at(offset);
        if (used) p.grad_new_residual = at(offset);
        p.post_weight = p.pre_weight = p.grad_pre_weight = at();
        if (used) p.grad_post_weight = at();
        p.rows = rows, p.dim = dim;
        p.x_stride = p.new_residual_stride = dim;
        p.grad_out_stride = p.grad_new_residual_stride = stride;
        p.dtype = dtype, p.post_weight_dtype = p.pre_weight_dtype = DType::float32;
        report.begin(shape_of(dim, rows, stride, offset, dtype, dtype, used));
        const int size = dtype_size(dtype);
        expect_aligned(report, is_aligned(p),
                       {{p.x, dim, dim, size},
                        {p.new_residual, dim, dim, size},
                        {p.grad_out, stride, dim, size},
                        {p.grad_new_residual, stride, dim, size},
                        {p.pre_weight, 0, dim, 4}});
        const RowBackwardShape shape = rms_norm_add_rms_norm_backward_shape(p);
        report.expect(shape.tensors == (used ? 4 : 3), "tensors that are read");
        expect_row_backward(report, device, shape, row_backward_policy(device, shape));
      }
    });
  }
}

void ada_norm_backward(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (int tensors = 2; tensors <= 4; ++tensors) {
        for (const int64_t groups : {int64_t{1}, int64_t{2}, rows}) {
          if (rows % groups != 0) continue;
          AdaNormBackward p{};
          p.grad_out = at(offset), p.s = at(), p.grad_x = at();
          if (tensors > 2) p.grad_new_residual = at();
          if (tensors > 3) p.x = at(), p.grad_gate = at();
          p.scale = {at(), stride, 1, DType::float32};
          p.grad_scale = at(), p.scale_rows = p.gate_rows = rows / groups;
          p.scale_by_row = groups > 2, p.gate_by_row = stride > dim;
          ada_norm_choose_sums(p);
          p.rows = rows, p.dim = dim, p.group_rows = rows / groups, p.dtype = dtype;
          p.grad_out_stride = stride;
          p.grad_new_residual_stride = p.s_stride = p.x_stride = dim;
          report.begin(shape_of(dim, rows, stride, offset, dtype, dtype, tensors > 2));
          const int size = dtype_size(dtype);
          const bool aligned = is_aligned(p);
          expect_aligned(report, aligned,
                         {{p.grad_out, stride, dim, size},
                          {p.s, dim, dim, size},
                          {p.grad_new_residual, dim, dim, size},
                          {p.x, dim, dim, size},
                          {p.scale.data, stride, dim, 4}});
          const RowBackwardShape row_shape = ada_norm_backward_shape(p);
          report.expect(row_shape.tensors == tensors, "tensors that are read");
          expect_row_backward(report, device, row_shape, row_backward_policy(device, row_shape));
        }
      }
    });
  }
}

void poly_norm(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (const int form : {0, 1, 2}) {  // plain, with mul, of experts
        PolyNormForward p{};
        PolyNormBackward b{};
        p.x = b.x = at(offset), p.out = at(), b.grad_out = b.grad_x = at();
        if (form > 0) p.mul = b.mul = at();
        if (form > 1) p.offs = b.offs = static_cast<const int32_t*>(at());
        p.rows = b.rows = rows, p.dim = b.dim = dim, p.dtype = b.dtype = dtype;
        p.experts = b.experts = 8;
        p.x_stride = b.x_stride = stride, p.mul_stride = b.mul_stride = dim;
        b.grad_out_stride = b.grad_x_stride = dim;
        report.begin(shape_of(dim, rows, stride, offset, dtype, dtype, form > 0));
        const int size = dtype_size(dtype);
        const std::vector<Rows> tensors{
            {p.x, stride, dim, size}, {p.out, dim, dim, size}, {p.mul, dim, dim, size}};
        expect_aligned(report, is_aligned(p), tensors);
        expect_aligned(report, is_aligned(b), tensors);
        const auto expect_row = [&](const RowPolicy& row, int64_t groups, bool backward) {
          const bool is_short = row.rows_per_thread > 1;
          const bool is_long = row.cluster > 1 || row.threads_per_row > kPolyNormThreads;
          const int max_threads = is_short               ? kPolyNormShortThreads
                                  : backward && !is_long ? kPolyNormThreads
                                                         : kPolyNormLongThreads;
          expect_legal_rows(report, device,
                            {groups * row.cluster, 1, row.threads_per_row, row.rows_per_block,
                             3 * kScratchBytes, row.cluster},
                            row.streamed ? kPolyNormLongThreads : max_threads);
          const int64_t held =
              int64_t{row.cluster} * row.threads_per_row * row.vectors * (16 / size);
          report.expect(row.streamed || held >= dim, "columns without a thread");
          report.expect(row.threads_per_row >= row.rows_per_thread, "a row's sums have no thread");
        };
        const PolyNormForwardPolicy forward = poly_norm_forward_policy(device, p);
        const RowPolicy& row = forward.row;
        expect_row(row, row.streamed ? rows : forward.groups, false);
        if (forward.stages > 0) {
          const int row_bytes = row.threads_per_row * row.vectors * 16;
          report.expect(forward.shared_bytes >= forward.stages * row_bytes &&
                            2 * (forward.shared_bytes + kScratchBytes) <= device.max_shared_memory,
                        "no room for the stages of two blocks");
          report.expect(is_aligned(p) && size == 2 && form == 0 && row.rows_per_block == 1 &&
                            row.threads_per_row > 32,
                        "stages without a kernel");
          PolyNormForward few = p;
          few.rows = 1;
          const RowPolicy alone = poly_norm_forward_policy(device, few).row;
          report.expect(alone.threads_per_row == row.threads_per_row &&
                            alone.cluster == row.cluster && alone.vectors == row.vectors,
                        "sums in another order than those of few rows");
        }
        const PolyNormBackwardPolicy backward = poly_norm_backward_policy(device, b);
        if (backward.stages > 0) {
          const RowBackwardShape shape = poly_norm_backward_shape(b);
          const RowBackwardPolicy staged = row_backward_policy(device, shape);
          expect_row_backward(report, device, shape, staged);
          report.expect(staged.bulk && staged.row.threads_per_row > 32, "stages without a kernel");
          PolyNormBackward few = b;
          few.rows = 1;
          const RowPolicy alone = poly_norm_backward_policy(device, few).row;
          report.expect(alone.threads_per_row == staged.row.threads_per_row &&
                            alone.cluster == staged.row.cluster &&
                            alone.vectors == staged.row.vectors,
                        "sums in another order than those of few rows");
          report.expect(staged.stages == backward.stages &&
                            staged.shared_bytes == backward.shared_bytes &&
                            staged.blocks_per_group == backward.groups,
                        "stages of another policy");
        } else {
          expect_row(backward.row, backward.groups, true);
        }
        b.partial_count = form > 1 ? rows : backward.groups;
        const int threads = poly_norm_weight_threads(b);
        report.expect(threads >= 1 && threads <= 1024 &&
                          (threads <= 32 ? (threads & (threads - 1)) == 0 : threads % 32 == 0),
                      "threads of the weight's gradient");
      }
    });
  }
}

void gated_rms_norm(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      for (const int64_t groups : {1, 3, 8, 1000}) {
        if (is_huge(rows, groups * dim)) continue;
        GatedRmsNormForward p{};
        GatedRmsNormBackward b{};
        p.x = b.x = at(offset), p.gate = b.gate = at(), p.weight = b.weight = at();
        p.out = at(), b.grad_out = b.grad_x = b.grad_gate = at();
        p.rows = b.rows = rows, p.groups = b.groups = groups, p.dim = b.dim = dim;
        p.x_stride = b.x_stride = stride * groups;
        p.gate_stride = b.gate_stride = b.grad_out_stride = dim * groups;
        p.dtype = p.weight_dtype = b.dtype = b.weight_dtype = dtype;
        report.begin(shape_of(dim, rows, stride, offset, dtype, dtype, false));
        const int size = dtype_size(dtype), vector = 16 / size;
        const std::vector<Rows> tensors{{p.x, p.x_stride, dim, size},
                                        {p.gate, p.gate_stride, dim, size},
                                        {p.out, dim, dim, size}};
        expect_aligned(report, is_aligned(p), tensors);
        expect_aligned(report, is_aligned(b), tensors);
        const auto expect = [&](const GatedRmsNormPolicy& row, int max_threads, int vectors,
                                int shared_bytes) {
          expect_legal_rows(report, device,
                            {row.blocks * row.cluster, 1, row.threads_per_row, row.rows_per_block,
                             shared_bytes + kGatedNormArrayBytes, row.cluster},
                            max_threads);
          const int64_t held = int64_t{row.cluster} * row.threads_per_row * vectors * vector;
          report.expect(row.streamed || held >= dim, "columns without a thread");
          report.expect(row.anywhere || (is_aligned(p) && row.cluster == 1),
                        "the kernel of aligned groups");
        };
        const GatedRmsNormPolicy forward = gated_rms_norm_forward_policy(device, p);
        expect(forward, kGatedNormForwardThreads, kGatedNormForwardVectors, 0);
        const GatedRmsNormBackwardPolicy backward = gated_rms_norm_backward_policy(device, b);
        expect(backward.row, kGatedNormBackwardThreads, kGatedNormBackwardVectors,
               backward.shared_bytes);
        report.expect(backward.shares <= rows && backward.partials >= backward.shares,
                      "blocks without a row, or a partial sum");
        p.rows = b.rows = 1;
        report.expect(
            gated_rms_norm_forward_policy(device, p).threads_per_row == forward.threads_per_row &&
                gated_rms_norm_backward_policy(device, b).row.threads_per_row ==
                    backward.row.threads_per_row,
            "the order of a row's sum depends on the number of rows");
      }
    });
  }
}

void group_norm_cluster(const DeviceInfo& device, const GroupNormInput& p, Report& report) {
  GroupNormPolicy policy{};
  if (!group_norm_cluster_policy(p, device, policy)) return;
  const int64_t vector = 16 / dtype_size(p.dtype), chunks = policy.chunks;
  const int64_t all = p.channels_last ? p.positions : p.group_size / vector;
  const int shared = static_cast<int>(group_norm_cluster_bytes(p, policy)) + kScratchBytes;
  const int64_t clusters = p.channels_last ? p.samples : p.samples * p.groups;
  expect_legal(report, device,
               {clusters * chunks, policy.tiles, policy.threads_x, policy.threads_y, shared,
                static_cast<int>(chunks)},
               kGroupNormClusterThreads);
  report.expect(policy.threads_x * policy.threads_y >= kWarpSize, "no whole warp");
  report.expect(chunks * policy.chunk_positions >= all, "chunks that do not make a group");
  if (p.channels_last) {
    const int64_t width = policy.threads_x * vector;
    report.expect(policy.tiles * width == p.channels, "channels without a thread");
    report.expect(width % p.group_channels == 0, "a tile of a part of a group");
    report.expect(width / p.group_channels <= kGroupNormClusterParts, "too many parts");
  } else {
    report.expect(p.positions % vector == 0, "a vector of two channels");
    report.expect(policy.threads_x / kWarpSize <= kGroupNormClusterParts, "too many parts");
    report.expect(policy.chunk_positions * chunks < INT32_MAX / 16, "more than an int holds");
  }
}

void group_norm_grid(const DeviceInfo& device, const GroupNormInput& p, Report& report) {
  GroupNormGridPolicy policy{};
  if (!group_norm_grid_policy(p, device, policy)) return;
  const int64_t vector = 16 / dtype_size(p.dtype), vectors = p.group_size / vector;
  const int64_t of_chunk = policy.chunk_vectors, channel = p.positions / vector;
  expect_legal(report, device, {policy.blocks, 1, kGroupNormGridThreads, 1, policy.shared_bytes, 1},
               1024);
  report.expect(policy.blocks <= device.multiprocessors, "more blocks than there are at once");
  report.expect(p.groups * policy.chunks >= policy.blocks, "blocks that depend on the samples");
  report.expect(policy.chunks <= int64_t{policy.blocks} * policy.stages,
                "blocks that wait for each other for ever");
  report.expect(policy.stages >= kGroupNormGridWatchWarps, "a warp that finds no end");
  report.expect(
      policy.stages * ((of_chunk + 1) * 16 + kGroupNormGridStateBytes) <= policy.shared_bytes,
      "stages without memory");
  report.expect(policy.chunks * of_chunk >= vectors && (policy.chunks - 1) * of_chunk < vectors,
                "chunks that do not make a group");
  report.expect(p.positions % vector == 0, "a vector of two channels");
  report.expect((of_chunk + channel - 2) / channel + 1 <= kGroupNormGridChannels,
                "channels without room for their weights");
  GroupNormInput alone = p;
  alone.samples = 1;
  GroupNormGridPolicy of_one{};
  report.expect(group_norm_grid_policy(alone, device, of_one) && of_one.chunks == policy.chunks &&
                    of_one.chunk_vectors == of_chunk,
                "the order of a group's sums depends on the number of samples");
}

void group_norm_rows_grid(const DeviceInfo& device, const GroupNormInput& p,
                          const GroupNormPolicy& policy, Report& report) {
  const int vector = 16 / dtype_size(p.dtype);
  for (int64_t first = 0; first < std::min<int64_t>(p.channels, 4096); first += vector) {
    const int64_t last = std::min(first + vector, p.channels) - 1;
    report.expect(last / p.group_channels - first / p.group_channels <
                      group_norm_rows_slots(p.group_channels, vector),
                  "groups without a pair");
  }
  const int64_t samples = group_norm_rows_grid_samples(p, device, policy);
  if (samples == 0) return;
  const int shared = static_cast<int>(group_norm_rows_grid_bytes(p, policy));
  expect_legal(report, device,
               {samples * policy.chunks, 1, policy.threads_x, policy.threads_y, shared, 1},
               kGroupNormRowsForwardThreads);
  const int64_t blocks = std::min<int64_t>(kGroupNormRowsForwardBlocks,
                                           (device.max_shared_memory + 1024) / (shared + 1024));
  report.expect(samples * policy.chunks <= blocks * device.multiprocessors,
                "blocks that wait for others that are not there");
  report.expect(policy.tiles == 1 && p.channels % vector == 0,
                "a vector of less than its channels");
}

void group_norm_backward_in_one(const DeviceInfo& device, const GroupNormInput& p, Report& report) {
  GroupNormPolicy policy{};
  const int64_t vector = 16 / dtype_size(p.dtype);
  if (group_norm_backward_cluster_policy(p, device, policy)) {
    const int64_t chunks = policy.chunks;
    const int shared =
        static_cast<int>(group_norm_backward_cluster_bytes(p, policy)) + kScratchBytes / 2;
    expect_legal(report, device,
                 {(p.channels_last ? p.samples : p.samples * p.groups) * chunks, policy.tiles,
                  policy.threads_x, policy.threads_y, shared, static_cast<int>(chunks)},
                 kGroupNormClusterThreads);
    if (p.channels_last) {
      const int64_t width = policy.threads_x * vector;
      report.expect(policy.threads_x * policy.threads_y >= kWarpSize, "no whole warp");
      report.expect(chunks * policy.chunk_positions >= p.positions, "positions without a block");
      report.expect(policy.tiles * width == p.channels, "channels without a thread");
      report.expect(width % p.group_channels == 0, "a tile of a part of a group");
      report.expect(width / p.group_channels <= kGroupNormClusterParts, "too many means");
      return;
    }
    const int lanes = policy.threads_x, side = kWarpSize / lanes;
    const int64_t vectors = p.positions / vector, pieces = ceil_div(vectors, kWarpSize);
    const int64_t rows = ceil_div(p.group_channels, side) * pieces;
    const int64_t warps = chunks * lanes * policy.threads_y / kWarpSize;
    report.expect(p.positions % vector == 0, "a vector of two channels");
    report.expect(side * lanes == kWarpSize && (pieces == 1 || side == 1), "lanes of a channel");
    report.expect(vectors <= pieces * lanes, "vectors without a lane");
    report.expect(warps * policy.chunk_positions >= rows, "rows without a warp");
    return;
  }
}

void group_norm_rows_backward(const DeviceInfo& device, const GroupNormInput& p, Report& report) {
  const GroupNormPolicy policy = group_norm_backward_policy(p);
  const int64_t vector = 16 / dtype_size(p.dtype), tiles = policy.tiles;
  const int64_t blocks = ceil_div(policy.chunks, group_norm_rows_parts_of_block(p, device, policy));
  expect_legal(report, device,
               {p.samples * blocks, tiles, policy.threads_x, policy.threads_y,
                group_norm_backward_bytes(p, device, policy, true), 1},
               kGroupNormRowsThreads);
  report.expect(tiles * policy.threads_x * vector >= p.channels, "channels without a thread");
  report.expect((tiles - 1) * policy.threads_x * vector < p.channels, "a tile without channels");
  report.expect(policy.chunk_positions % policy.threads_y == 0, "rows of a part of a chunk");
  report.expect(policy.chunks * policy.chunk_positions >= p.positions &&
                    (policy.chunks - 1) * policy.chunk_positions < p.positions,
                "chunks that do not make a sample");
  const int64_t at_once = kGroupNormRowsBackwardBlocks * device.multiprocessors;
  report.expect(p.samples * blocks * tiles <= std::max(4 * at_once, p.samples * tiles),
                "blocks that wait for others");
}

void group_norm(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for (const int64_t positions : kDims) {
      for (const int64_t group_channels : {1, 3, 4, 10, 64, 5000}) {
        for (const int64_t groups : {1, 32}) {
          GroupNormInput p{};
          p.samples = 3, p.groups = groups, p.positions = positions, p.dtype = dtype;
          p.group_channels = group_channels, p.channels = groups * group_channels;
          p.group_size = group_channels * positions;
          const int64_t vector = 16 / dtype_size(dtype);
          report.begin(std::to_string(p.channels) + " channels, " + std::to_string(positions));
          for (const bool backward : {false, true}) {
            const GroupNormPolicy flat =
                backward ? group_norm_backward_policy(p) : group_norm_forward_policy(p);
            const int64_t planes = backward ? p.channels : p.group_channels;
            const int64_t parts = ceil_div(positions, flat.chunk_positions);
            const int64_t blocks = backward ? ceil_div(p.channels, flat.threads_y) * flat.chunks
                                            : groups * flat.chunks;
            expect_legal_rows(report, device,
                              {blocks, 1, flat.threads_x, flat.threads_y, kScratchBytes, 1},
                              backward ? kGroupNormRowsThreads : kGroupNormFlatThreads);
            report.expect(flat.threads_x * flat.threads_y % kWarpSize == 0, "a part of a warp");
            report.expect(backward ? parts == flat.chunks
                                   : parts * ceil_div(planes, flat.chunk_channels) == flat.chunks,
                          "chunks that do not make a group");
            report.expect(parts == 1 || flat.chunk_positions % vector == 0,
                          "a chunk that starts within a vector");
            report.expect(parts == 1 || flat.chunk_channels == 1, "planes of a part of each");
          }
          group_norm_cluster(device, p, report);
          group_norm_grid(device, p, report);
          group_norm_backward_in_one(device, p, report);
          p.channels_last = true;
          group_norm_cluster(device, p, report);
          group_norm_backward_in_one(device, p, report);
          group_norm_rows_backward(device, p, report);
          const GroupNormPolicy last = group_norm_forward_policy(p);
          group_norm_rows_grid(device, p, last, report);
          expect_legal(report, device,
                       {last.chunks, last.tiles, last.threads_x, last.threads_y,
                        group_norm_rows_moments_bytes(p, device, last), 1},
                       kGroupNormRowsForwardThreads);
          report.expect(last.threads_x * last.threads_y >= kWarpSize, "no whole warp");
          report.expect(last.tiles * last.threads_x * vector >= p.channels,
                        "channels without a thread");
          report.expect(last.chunks * last.chunk_positions >= positions &&
                            (last.chunks - 1) * last.chunk_positions < positions,
                        "chunks that do not make a sample");
        }
      }
    }
  }
}

void shard_norm(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t dim, int64_t rows, int64_t stride, int offset) {
      ShardNorm p{};
      p.rows = rows, p.dim = dim, p.dtype = dtype;
      report.begin(shape_of(dim, rows, stride, offset, dtype, dtype, false));
      const ShardNormPolicy policy = shard_norm_policy(p);
      expect_legal_rows(report, device,
                        {ceil_div(rows, policy.rows_per_block), 1, policy.threads_per_row,
                         policy.rows_per_block, 3 * kScratchBytes, 1},
                        kShardNormThreads);
      p.rows = 1;
      report.expect(shard_norm_policy(p).threads_per_row == policy.threads_per_row,
                    "the order of a row's sum depends on the number of rows");
    });
  }
}

void activation(const DeviceInfo& device, Report& report) {
  for (const int vector : {2, 4, 8}) {
    for (const int64_t dim : kDims) {
      for (const int64_t rows : kRows) {
        if (is_huge(rows, dim)) continue;
        report.begin(shape_of(dim, rows, vector, 0, DType::float32, DType::float32, false));
        const auto expect = [&](const ActivationPolicy& policy, int max_threads) {
          expect_legal(report, device,
                       {policy.column_blocks, std::max(policy.tile.layer, policy.layers),
                        policy.threads_x, policy.threads_y, kActivationSumThreads * 8 * 4, 1},
                       max_threads);
          report.expect(policy.threads_x * policy.threads_y % kWarpSize == 0, "whole warps");
          report.expect(policy.threads_x <= kWarpSize ? kWarpSize % policy.threads_x == 0
                                                      : policy.threads_x % kWarpSize == 0,
                        "lanes of a row");
          report.expect(policy.tile.columns_per_block * policy.column_blocks >= dim, "columns");
          report.expect(policy.tile.rows_per_block * policy.row_blocks >= rows, "rows");
          const int64_t blocks = int64_t{policy.tile.layer} * policy.layers;
          report.expect(blocks >= policy.row_blocks, "rows without a block");
          report.expect(blocks - policy.row_blocks < policy.layers, "blocks without rows");
        };
        for (const int vectors : {1, 2}) {
          expect(activation_policy(device, vector, vectors, 1, rows, dim), kActivationThreads);
          expect(activation_policy(device, vector, vectors, vectors, rows, dim),
                 kActivationThreads);
        }
        if (vector > 2) {
          const ActivationPolicy sums = activation_sum_policy(device, vector, 4, rows, dim);
          expect(sums, kActivationSumThreads);
          report.expect(sums.layers == 1, "blocks whose partial sums have no place");
        }
      }
    }
  }
}

// f(shape, q_heads, k_heads) of heads as models have them, and some that they have not.
template <typename F>
void for_each_heads(Report& report, F f) {
  for (const DType dtype : kDTypes) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t dim : {2, 6, 16, 64, 80, 96, 100, 128, 256, 512, 1000, 1536, 2048}) {
        for (const int64_t rotary : {dim, dim / 4 * 2, int64_t{2}}) {
          if (rotary == 0 || rotary > dim) continue;
          for (const int64_t tokens : {1, 3, 512, 8192, 1 << 20}) {
            for (const int64_t q : {1, 2, 5, 32, 128}) {
              for (const int64_t k : {0, 1, 8}) {
                const RotaryShape shape{1, tokens, dim, rotary, interleaved, dtype};
                report.begin(shape_of(dim, tokens, rotary, 0, dtype, dtype, interleaved) +
                             ", heads " + std::to_string(q) + " and " + std::to_string(k));
                f(shape, q, k);
              }
            }
          }
        }
      }
    }
  }
}

void rotary(const DeviceInfo& device, Report& report) {
  for_each_heads(report, [&](const RotaryShape& shape, int64_t q, int64_t k) {
    for (const bool rest : {false, true}) {
      for (const bool aligned : {false, true}) {
        const RotaryPolicy policy = rotary_policy(device, shape, q + k, rest, aligned);
        expect_legal(
            report, device,
            {ceil_div(shape.batch * shape.tokens, policy.tokens_per_block), policy.blocks_per_token,
             policy.threads_per_token, policy.tokens_per_block, 0, 1},
            kRotaryThreads);
        const int threads = policy.threads_per_token * policy.tokens_per_block;
        report.expect(aligned || threads % kWarpSize == 0, "whole warps");
        const int64_t items = policy.layout.rotated_items + policy.layout.rest_items;
        report.expect(
            int64_t{policy.threads_per_token} * policy.blocks_per_token >= items * policy.groups,
            "items without a thread");
        report.expect(policy.groups * policy.heads_per_thread >= q + k, "heads");
      }
    }
  });
}

void qk_norm_rotary(const DeviceInfo& device, Report& report) {
  for_each_heads(report, [&](const RotaryShape& shape, int64_t q, int64_t k) {
    if (shape.dim > qk_norm_max_dim(shape)) return;
    const auto expect_row = [&](const QkNormPolicy& row, int64_t blocks, int64_t shared_bytes) {
      expect_legal_rows(
          report, device,
          {blocks, 1, row.threads_per_row, row.rows_per_block, shared_bytes + kScratchBytes, 1},
          kQkNormThreads);
      report.expect(row.layout.rotated_items + row.layout.rest_items <= row.threads_per_row,
                    "items without a thread");
      report.expect(row.threads_per_row * row.rows_per_block % kWarpSize == 0, "whole warps");
    };
    const int64_t tokens = shape.batch * shape.tokens;
    const QkNormForwardPolicy forward = qk_norm_forward_policy(device, shape, q, k);
    const int64_t units = ceil_div(q, forward.unit) + ceil_div(k, forward.unit);
    expect_row(forward.row, ceil_div(tokens * units, forward.row.rows_per_block), 0);
    const QkNormBackwardPolicy backward = qk_norm_backward_policy(device, shape, q, k);
    expect_row(backward.row, backward.blocks, backward.weight_bytes);
    report.expect(backward.q_unit >= 1 && backward.k_unit >= 1, "heads of a unit");
  });
}

void sampling(const DeviceInfo& device, Report& report) {
  for (const int64_t vocab :
       {1, 2, 31, 1000, 4096, 32000, 50257, 128256, 151936, 262144, 1 << 20}) {
    for (const int64_t batch : {1, 2, 3, 8, 33, 256, 4096, 65536}) {
      report.begin(shape_of(vocab, batch, 0, 0, DType::float32, DType::float32, false));
      const SamplePolicy draw = sample_policy(device, batch, vocab);
      report.expect(draw.part >= 1 && draw.part * draw.parts >= vocab, "logits without a block");
      expect_legal(report, device, {batch * draw.parts, 1, kSampleThreads, 1, 48 * kKB, 1},
                   kSampleThreads);
      const ClusterPolicy cluster = cluster_policy(device, batch, vocab);
      report.expect(device.has_clusters || cluster.blocks == 0, "a cluster where there are none");
      if (cluster.blocks == 0) continue;
      expect_legal(report, device,
                   {batch * cluster.blocks, 1, kClusterThreads, 1,
                    kClusterFixedBytes + cluster.part * 4, cluster.blocks},
                   kClusterThreads);
      report.expect(
          cluster.part * cluster.blocks >= vocab && cluster.part % 32 == 0 && cluster.clusters >= 1,
          "logits without a block");
    }
  }
}

void lm_head(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for (const bool narrow : {false, true}) {
      for (const int64_t dim : kDims) {
        for (const int64_t batch : {1, 8, 17, 64, 100, 300}) {
          for (const int offset : {0, 8}) {
            for (const int64_t stride : {dim, (dim + 15) / 16 * 16}) {
              LmHead p{};
              p.batch = batch, p.vocab = 151936, p.dim = dim, p.dtype = dtype;
              p.hidden = at(), p.weight = at(offset);
              p.hidden_stride = p.weight_stride = stride;
              p.weight_type = narrow ? WeightType::float8_e4m3 : WeightType::as_hidden;
              report.begin(shape_of(dim, batch, stride, offset, dtype, dtype, narrow));
              const int size = dtype_size(dtype), weight_size = narrow ? 1 : size;
              const bool starts =
                  offset == 0 && stride * weight_size % 16 == 0;  // rows of the weight
              const bool hidden_starts = stride * size % 16 == 0;
              if (has_wgmma_form(device, p)) {
                report.expect(device.tensor_cores == TensorCores::wgmma && device.has_clusters &&
                                  device.has_bulk_copy && dtype != DType::float32,
                              "wgmma where there is none");
                report.expect(kWgmmaSharedBytes <= device.max_shared_memory, "shared memory");
                report.expect(starts && (narrow || hidden_starts || batch == 1),
                              "rows that the copy engine cannot take");
              }
              report.expect(!has_aligned_chunks(p) || (starts && hidden_starts),
                            "chunks off a boundary");
              const HeadForm form = head_form(device, p);
              report.expect(form != HeadForm::plain || has_plain_form(device, p),
                            "a form that has no code for the GPU");
              if (form == HeadForm::plain) continue;
              report.expect(device.has_async_copy, "asynchronous copies where there are none");
              report.expect(form != HeadForm::mma || device.tensor_cores != TensorCores::none,
                            "tensor cores where there are none");
              report.expect(kHeadSharedBytes <= device.max_shared_memory, "shared memory");
            }
          }
        }
      }
    }
  }
}

void loss(const DeviceInfo& device, Report& report) {
  for (const DType dtype : kDTypes) {
    for_each_layout([&](int64_t vocab, int64_t rows, int64_t stride, int offset) {
      report.begin(shape_of(vocab, rows, stride, offset, dtype, dtype, false));
      const int size = dtype_size(dtype), vector = 16 / size;
      LossBackward p{};
      p.in.logits = at(offset), p.grad_logits = at();
      p.in.rows = rows, p.in.vocab = p.grad_stride = vocab, p.in.stride = stride;
      p.in.dtype = dtype;
      const bool one = rows == 1;
      for (const DType grad_dtype : {dtype, DType::bfloat16}) {
        p.grad_dtype = grad_dtype;
        expect_aligned(report, is_aligned(p),
                       {{p.in.logits, one ? 0 : stride, vocab, size},
                        {p.grad_logits, one ? 0 : vocab, vocab, dtype_size(grad_dtype)}});
      }

      const LossPolicy row = loss_policy(vocab, vector);
      const int cluster = loss_cluster(device, rows, row), warps = row.threads / kWarpSize;
      const bool is_narrow = row.threads * row.rows_per_block == kNarrowThreads;
      expect_legal_rows(report, device,
                        {ceil_div(rows, row.rows_per_block) * cluster, 1, row.threads,
                         row.threads <= kWarpSize ? 1 : row.rows_per_block, 28 * kKB, cluster},
                        kLossThreads);
      report.expect(int64_t{row.part} * row.parts >= vocab && row.part % vector == 0,
                    "logits without a block");
      report.expect(row.parts == 1 || (row.parts <= kLossMostParts && warps >= row.parts &&
                                       (cluster == 1 || cluster == row.parts)),
                    "a part without a warp that joins its sums");
      report.expect(row.vectors > 1 ? row.rows_per_block == 1 && row.threads % kWarpSize == 0
                                    : is_narrow && row.threads * vector >= vocab,
                    "rows of a warp");

      const LossGradientPolicy gradient = loss_gradient_policy(device, rows, vocab, vector);
      const int64_t blocks = gradient.row_blocks * gradient.column_blocks;
      report.expect(blocks <= kMaxLossBlocks || rows * vocab > (int64_t{1} << 40), "blocks");
      if (blocks <= kMaxLossBlocks) {
        expect_legal(report, device, {blocks, 1, gradient.threads, gradient.rows_per_block, 0, 1},
                     kGradientThreads);
      }
      report.expect(gradient.columns_per_block * gradient.column_blocks >= vocab &&
                        gradient.rows_per_block * gradient.row_blocks >= rows &&
                        gradient.columns_per_block ==
                            gradient.turns * gradient.threads * gradient.vectors * vector,
                    "logits without a block");

      const OnePassPolicy once = one_pass_policy(device, rows, vocab, false);
      expect_aligned(report, starts_aligned(p),
                     {{p.in.logits, one ? 0 : stride, 16, size},
                      {p.grad_logits, one ? 0 : vocab, 16, dtype_size(p.grad_dtype)}});
      report.expect(!once.fits || device.has_bulk_copy, "bulk copies");
      if (once.fits) {
        const int warps = once.threads / kWarpSize;
        expect_legal(report, device,
                     {int64_t{once.clusters} * once.cluster, 1, once.threads, 1,
                      once.shared_bytes + kOnePassFixedBytes, once.cluster},
                     kOnePassWarps * kWarpSize);
        report.expect(once.cluster > 1, "st.async in a launch without clusters");
        report.expect(once.clusters <= rows && warps * once.cluster >= once.warps,
                      "a warp of the row without one of the cluster");
        int64_t logits = 0;
        for (int warp = 0; warp < once.warps; ++warp)
          logits += int64_t{pieces_of(once.row, static_cast<int>(vocab), warp)} * kPieceLogits;
        report.expect(logits >= vocab && logits < vocab + kPieceLogits, "logits without a warp");
      }

      for (const int each : {1, kStripsInFlight}) {
        const RowWeightsPolicy strips = row_weights_policy(device, rows, vocab, each, offset != 0);
        expect_legal(
            report, device,
            {ceil_div(rows, strips.rows_per_block) * strips.cluster, 1, strips.threads,
             strips.rows_per_block, strips.shared_bytes + kWeightFixedBytes, strips.cluster},
            kWeightThreads);
        report.expect(strips.threads % kWarpSize == 0 &&
                          (strips.rows_per_block == 1 || strips.threads == kWarpSize) &&
                          (strips.rows_per_block == 1 || strips.cluster == 1),
                      "rows of a block");
        report.expect(
            int64_t{strips.part} * strips.cluster >= vocab && strips.part % (each * kStrip) == 0,
            "logits without a block");
      }
    });
  }
}

void topk_softmax(const DeviceInfo& device, Report& report) {
  for (int experts = 1; experts <= kMaxExperts; ++experts) {
    const int least = 1, most = std::min(experts, kMaxChosen);
    for (const int k : {least, most}) {
      for (const int groups : {least, experts}) {
        for (const bool in_vectors : {false, true}) {
          report.begin(std::to_string(experts) + " experts, k " + std::to_string(k));
          const TopkPolicy policy = topk_policy(experts, k, groups, in_vectors);
          expect_legal(report, device,
                       {1, 1, policy.lanes, policy.rows_per_block,
                        policy.rows_per_block * policy.shared_words * 4, 1},
                       kTopkThreads);
          report.expect(policy.lanes * policy.keys >= experts && policy.lanes <= kWarpSize,
                        "experts without a lane");
          report.expect(policy.has_shared_keys || (in_vectors && policy.keys == kFewKeys),
                        "vectors that a lane has no registers for");
          report.expect(!policy.has_shared_keys || policy.shared_words >= 2 * k + experts + groups,
                        "keys without memory");
        }
      }
    }
    for (const bool needs_logits : {false, true}) {
      const TopkPolicy policy = topk_gradient_policy(experts, needs_logits);
      expect_legal(report, device,
                   {1, 1, policy.lanes, policy.rows_per_block,
                    policy.rows_per_block * policy.shared_words * 4, 1},
                   kTopkThreads);
    }
  }
}

void quant_fp8(const DeviceInfo& device, Report& report) {
  const auto sweep = [&](const QuantShape& shape) {
    const int columns = 16 / shape.element_size;
    report.begin(std::to_string(shape.rows) + " rows of " + std::to_string(shape.dim) +
                 " columns of " + std::to_string(shape.element_size));
    const QuantPolicy policy = quant_policy(device, shape);
    expect_legal(report, device,
                 {policy.vectors, 1, policy.threads_per_row, policy.rows_per_block, 0, 1},
                 kQuantThreads);
    const int64_t block_columns = int64_t{policy.threads_per_row} * policy.vectors * columns;
    report.expect(
        (shape.whole_rows && !policy.for_many) || policy.slices * block_columns >= shape.dim,
        "columns without a thread");
    report.expect(!shape.whole_rows || policy.slices == 1, "a row of one scale in several blocks");
    report.expect(policy.slices == 1 || block_columns % 128 == 0, "groups across blocks");
    report.expect(policy.rows_per_block == 1 || policy.threads_per_row <= kWarpSize,
                  "several rows that wait for each other");
    report.expect(
        (policy.for_many && policy.vectors == 1) || policy.threads_per_row % kWarpSize == 0,
        "a part of a warp");
    report.expect(shape.aligned || !policy.for_many || shape.dim <= kWarpSize * columns ||
                      policy.vectors == kQuantVectors,
                  "another kernel than that of unaligned rows");
  };
  for (const int64_t dim :
       {1,    7,    8,    31,   64,   100,   128,   256,   257,   264,   512,    1000,
        2880, 4096, 4097, 5000, 8192, 16384, 16392, 32768, 32776, 40000, 131072, 1 << 30}) {
    for (const int64_t rows : {1, 7, 1000, 1 << 20}) {
      for (const int element_size : {2, 4}) {
        for (const bool whole_rows : {false, true}) {
          for (const bool aligned : {false, true}) {
            if (aligned && dim % (16 / element_size) != 0) continue;
            for (const bool for_many : {false, true})
              sweep({rows, dim, element_size, whole_rows, aligned, for_many});
          }
        }
      }
    }
  }
}

// Norms that quantise: the rows of one kernel, norm/row_quant_policy.h.
void row_quant(const DeviceInfo& device, Report& report) {
  for (const int64_t dim : {8, 64, 128, 256, 264, 1024, 2048, 2880, 4096, 4104, 8192, 16384}) {
    for (const int64_t rows : {1, 7, 100, 1000, 20000, 1 << 20}) {
      for (const bool most_vectors : {false, true}) {
        report.begin(std::to_string(rows) + " rows of " + std::to_string(dim) + " columns");
        const RowPolicy unaligned = row_quant_policy(device, rows, dim, false, most_vectors);
        report.expect(unaligned.vectors == kForwardVectors || dim <= 8 * kWarpSize,
                      "another kernel than that of unaligned rows");
        const RowPolicy policy = row_quant_policy(device, rows, dim, true, most_vectors);
        const bool most = policy.vectors == kForwardMostVectors;
        expect_legal(report, device,
                     {policy.vectors, 1, policy.threads_per_row, policy.rows_per_block, 0, 1},
                     most ? kForwardMostVectorThreads : kForwardThreads);
        report.expect(int64_t{policy.threads_per_row} * policy.vectors * 8 >= dim,
                      "columns without a thread");
        report.expect(policy.vectors == 1 || policy.threads_per_row % kWarpSize == 0,
                      "vectors that do not lie a warp apart");
        report.expect(
            policy.vectors <= 2 || policy.vectors == kForwardVectors || (most && most_vectors),
            "no such kernel");
        report.expect(policy.vectors != 2 || policy.threads_per_row > kWarpSize,
                      "two vectors a thread in a warp (norm/row_reduce.h)");
        report.expect(policy.rows_per_block == 1 || policy.threads_per_row <= kWarpSize,
                      "several rows that wait for each other");
      }
    }
  }
}

struct Family {
  const char* name;
  void (*sweep)(const DeviceInfo&, Report&);
};

const Family kFamilies[] = {
    {"rms_norm forward", rms_norm_forward},
    {"rms_norm backward", rms_norm_backward},
    {"rms_norm_add_rms_norm backward", rms_norm_add_rms_norm_backward},
    {"ada_norm forward", ada_norm_forward},
    {"ada_norm backward", ada_norm_backward},
    {"poly_norm", poly_norm},
    {"gated_rms_norm", gated_rms_norm},
    {"group_norm", group_norm},
    {"shard_norm", shard_norm},
    {"activation", activation},
    {"rotary", rotary},
    {"qk_norm_rotary", qk_norm_rotary},
    {"sampling", sampling},
    {"lm_head", lm_head},
    {"loss", loss},
    {"topk_softmax", topk_softmax},
    {"quant_fp8", quant_fp8},
    {"row_quant", row_quant},
};

std::vector<Device> devices_tuned() {
  std::vector<Device> devices;
  const auto add = [&](const Device& device, const std::string& what, const Tuning& tuning) {
    devices.push_back({device.name + ", " + what, device.info});
    devices.back().info.tuning = tuning;
  };
  for (const Device& device : kDevices) {
    if (device.name != "H100" && device.name != "RTX 5090" && device.name != "MI300X") continue;
    Tuning least, most;
    for (const Tunable& tunable : kTunables) {
      for (const int value : tunable.values) {
        if (value == 0) continue;
        Tuning tuning;
        tuning.*tunable.value = most.*tunable.value = value;
        add(device, std::string(tunable.name) + "=" + std::to_string(value), tuning);
      }
      least.*tunable.value = tunable.values[0];
    }
    add(device, "least", least);
    add(device, "most", most);
  }
  return devices;
}

}  // namespace

// `policy_probe tuned`: with every value of every parameter of a tuning (common/tuning.h).
int main(int count, char**) {
  const std::vector<Device> devices = count > 1 ? devices_tuned() : kDevices;
  for (const Family& family : kFamilies) {
    for (const Device& device : devices) {
      Report report;
      family.sweep(device.info, report);
      std::printf("%s|%s|%lld|%lld|%s\n", family.name, device.name.c_str(),
                  static_cast<long long>(report.cases), static_cast<long long>(report.violations),
                  report.first.c_str());
    }
  }
}
