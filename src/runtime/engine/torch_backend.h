// The step program's executing backend: tensors, process groups, the model, the optimizer.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "engine/torch_comm.h"
#include "engine/torch_update.h"
#include "engine/trace_observer.h"

namespace zero::engine {

struct TorchBackend {
  // All references must outlive it. members, parameter_groups: by group.
  TorchBackend(std::shared_ptr<EngineMemory> memory, const step::RunFacts& run,
               const std::vector<step::GroupFacts>& groups, std::vector<TorchComm::Ranks> axes,
               std::vector<std::vector<ModelParameter>> members, optim::ShardedOptimizer& optimizer,
               std::shared_ptr<UpdateRule> rule, std::vector<std::vector<int>> parameter_groups, observe::Trace& trace)
      : buffers(memory->buffers),
        lanes(buffers.setup().device),
        tensors(buffers, lanes, groups),
        comm(std::move(axes), groups, buffers, tensors, lanes),
        binding(std::move(memory), groups, std::move(members), trace),
        update(optimizer, std::move(rule), binding, buffers, run, std::move(parameter_groups), trace),
        observer(trace, groups) {}
  step::Backend ops() { return {buffers, comm, tensors, binding, update}; }

  TorchBuffers& buffers;
  Lanes lanes;
  TorchTensorOps tensors;
  TorchComm comm;
  ModelBinding binding;
  TorchUpdate update;
  TraceObserver observer;
};

}  // namespace zero::engine
