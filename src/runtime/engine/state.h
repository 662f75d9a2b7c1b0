// The implementation of Engine (include/zero/engine.h), one State per Engine. Checkpoints read and write it through
// StatePiece; it does not access checkpoint files.
#pragma once
#include <memory>
#include <string>

#include "engine/engine_trace.h"
#include "engine/parameter_access.h"
#include "engine/program_pass.h"
#include "engine/state_export.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::engine {

class State {
 public:
  State(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm,
        std::shared_ptr<Mesh> mesh = nullptr, std::shared_ptr<UpdateRule> rule = nullptr);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const Job job;
  ErrorRelay relay{*job.comm};
  Parts parts;
  const Checks checks{parts};
  ForwardListener listener{parts, checks};
  Backward backward{parts, checks, listener};
  ProgramPass program_pass{parts, backward};
  Stepper stepper{parts, checks, backward, listener};
  Scopes scopes{parts, checks, stepper};
  ParameterStates states{parts, checks, stepper};
  ParameterGradients gradients{parts, checks};
  StateExport exports{parts, checks, stepper};
  EngineTrace trace{parts, checks};
  std::string user_state;

  MemoryReport memory() const;
  void reset_peak_memory();

 private:
  void detach() noexcept;

  std::unique_ptr<torch_hooks::AllocationObserver> observer_;
};

}  // namespace zero::engine
