// How a kernel is started: on the threads of the CPU, or on the current stream of a GPU.
#pragma once

#include <algorithm>

#include "outputs.h"

#if defined(FUSELAGE_GPU)
// Torch's own declaration is only seen when its CUDA headers are.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);
#endif

namespace fuselage::binding {

constexpr int64_t kElementsPerTask = 32768;  // work for which a CPU thread is worth waking

// Pieces of work of that many elements for one task.
inline int64_t tasks_of(int64_t elements_each) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, elements_each));
}

#if defined(FUSELAGE_GPU) && !defined(FUSELAGE_EMULATED_GPU)
// Makes a device current while it lives, and knows the stream to launch on.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : device_(device) {
    // A guard costs an allocation; mostly the device is current already.
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
  }
  void* stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return stream;
  }

 private:
  int32_t device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};
#endif

// Whether there is nothing to compute: no element, or no data.
inline bool is_nothing(const Tensor& x, int64_t rows, int64_t dim) {
  return rows == 0 || dim == 0 || is_meta(x);
}

// Shares pieces [0, count) of a kernel out over the threads of the CPU.
template <auto cpu_kernel, typename Params>
void on_threads(const Params& p, int64_t count, int64_t elements_each) {
  torch::stable::parallel_for(0, count, tasks_of(elements_each),
                              [&p](int64_t begin, int64_t end) { cpu_kernel(p, begin, end); });
}

// Runs `on_cpu()` or `on_gpu(device, stream)`, by where x is. The latter returns null, or why it
// could not launch. NOTE: it is a lambda, of which a build for the CPU makes no code: that has no
// `gpu::` to link to.
template <typename OnCpu, typename OnGpu>
void launch(const char* op, const Tensor& x, const OnCpu& on_cpu, const OnGpu& on_gpu) {
#if defined(FUSELAGE_EMULATED_GPU)  // of tests/emulated_gpu, whose memory is that of the CPU
  static_cast<void>(x), static_cast<void>(on_cpu);
  const char* error = on_gpu(0, nullptr);
  FUSELAGE_CHECK(op, error == nullptr, error);
#else
  if (x.is_cpu()) return on_cpu();
#if defined(FUSELAGE_GPU)
  const int32_t device = x.get_device_index();
  const OnDevice on_device(device);
  const char* error = on_gpu(device, on_device.stream());
  FUSELAGE_CHECK(op, error == nullptr, error);
#else
  static_cast<void>(op), static_cast<void>(on_gpu);
#endif
#endif
}

// One kernel on either: pieces [0, count) of it on the CPU, and all of it on a GPU.
template <auto cpu_kernel, auto gpu_kernel, typename Params>
void launch(const char* op, const Tensor& x, const Params& p, int64_t count,
            int64_t elements_each) {
  launch(
      op, x, [&] { on_threads<cpu_kernel>(p, count, elements_each); },
      [&](int32_t device, void* stream) { return gpu_kernel(p, device, stream); });
}

}  // namespace fuselage::binding
