// The tuning of a GPU (docs/tuning.md), for tools/tune.py and for tests. No operator reads it here.
#include "binding.h"

#include "common/tuning.h"

namespace fuselage::binding {
namespace {

// Reads the tuning again of the GPU that `on` is on, and returns what was chosen.
std::string read_tuning(const Tensor& on) {
#if defined(FUSELAGE_GPU)
  if (!on.is_cpu()) return gpu::read_tuning(on.get_device_index());
#endif
  FUSELAGE_CHECK("read_tuning", !on.is_cpu(), "a CPU has no launch policy");
  return "";
}

}  // namespace

void register_tuning_ops(const Ops& ops) {
  ops.op("read_tuning(Tensor on) -> str", TORCH_BOX(&read_tuning));
}

}  // namespace fuselage::binding
