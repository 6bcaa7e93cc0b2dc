// How a family registers its ops: schema and kernel stand together, beside the kernel.
#pragma once

#include <string>

#include "torch_stable.h"

namespace fuselage::binding {

class Ops {
 public:
  using Library = torch::stable::detail::StableLibrary;
  using Kernel = void(StableIValue*, uint64_t, uint64_t);  // of TORCH_BOX

  static Ops definitions(Library& library) { return Ops(library, true); }
  static Ops kernels(Library& library) { return Ops(library, false); }

  // `schema`: "name(arguments) -> results".
  void op(const std::string& schema, Kernel* kernel) const {
    if (defines_)
      library_.def(schema.c_str());
    else
      library_.impl(schema.substr(0, schema.find('(')).c_str(), kernel);
  }
  // `name`, which returns `results`, and `name_fwd`, which returns `kept` for the backward as well.
  void forward(const std::string& name, const std::string& arguments, const std::string& results,
               const std::string& kept, Kernel* plain, Kernel* for_gradient) const {
    op(name + "(" + arguments + ") -> (" + results + ")", plain);
    op(name + "_fwd(" + arguments + ") -> (" + results + ", " + kept + ")", for_gradient);
  }
  // `name` and `name_fwd` are one, where the backward needs no more than inputs and results.
  // torch.compile sees the latter: a registered autograd would cost every call of the plain op.
  void with_fwd(const std::string& schema, Kernel* kernel) const {
    op(schema, kernel);
    op(std::string(schema).insert(schema.find('('), "_fwd"), kernel);
  }

 private:
  Ops(Library& library, bool defines) : library_(library), defines_(defines) {}

  Library& library_;
  bool defines_;  // or implements
};

void register_norm_ops(const Ops& ops);
void register_gated_rms_norm_ops(const Ops& ops);
void register_group_norm_ops(const Ops& ops);
void register_ada_norm_ops(const Ops& ops);
void register_poly_norm_ops(const Ops& ops);
void register_shard_norm_ops(const Ops& ops);
void register_gate_ops(const Ops& ops);
void register_loss_ops(const Ops& ops);
void register_quant_ops(const Ops& ops);
void register_fp8_linear_ops(const Ops& ops);
void register_rope_ops(const Ops& ops);
void register_route_ops(const Ops& ops);
void register_sample_ops(const Ops& ops);
void register_tuning_ops(const Ops& ops);

}  // namespace fuselage::binding
