// What all groups of parameters of an Engine share: how they are stored, reduced and gathered, and with whom.
#pragma once
#include <c10/core/Device.h>

#include "comm/group.h"
#include "engine/block_pool.h"
#include "engine/file_regions.h"
#include "engine/group_states.h"
#include "engine/recipe.h"
#include "engine/tensor_arithmetic.h"
#include "engine/tensor_pool.h"
#include "gpu/streams.h"
#include "observe/trace.h"

namespace zero::engine {

struct GroupContext {
  int stage = 0;
  Recipe recipe{};
  at::Device device = at::kCPU;  // of the parameters in use, and of what is not offloaded
  comm::Group* comm = nullptr;
  step::MemoryLedger* ledger = nullptr;
  engine::TensorPool *gather_pool = nullptr, *reduce_pool = nullptr;
  comm::Group* neighbours = nullptr;                         // who keep second shards (hpZ); null: nobody
  bool quantize_trainable = false, quantize_frozen = false;  // parameters are gathered as integers
  int gradient_bits = 0;                                     // of reductions over networks; 0: exact
  engine::BlockPool* blocks = nullptr;  // of gradients that ranks read where backward left them; null: they are copied
  StatePlaces places{};                 // of masters and moments
  step::Tier parameter_tier = step::Tier::Device;  // of resting shards (stage 3)
  engine::ShardFile* parameter_file = nullptr;
  bool checks_files = false;  // by checksums in host memory
  bool delayed = false;       // updates may run beside training
  int num_slots = 0;
  float slot_initial_value = 0;
  // One gradient dtype, whole gradients, and nobody who needs a copy of them: autograd's own .grad is the kept
  // gradient.
  bool direct_gradients = false;
  DeviceSums* sums = nullptr;  // of the groups' gradients, where kernels leave them on a device; null: taken at once
  const gpu::SideStream *gather_stream = nullptr, *reduce_stream = nullptr;
  float predivide = 1;  // gradients are multiplied by this before the reduction
  observe::Trace* trace = nullptr;
};

}  // namespace zero::engine
