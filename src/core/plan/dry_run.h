// Simulates one rank's training without tensors: the step program on the dry backend, driven by passes over a model.
// Allocations and releases occur in the order of an Engine, so peaks are peaks in time, not sums. The observer sees
// all transfers. Activations are counted here, by the rules of the engine's allocation observer.
#pragma once
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/pass_sink.h"
#include "step/byte_counter.h"
#include "step/dry_backend.h"
#include "step/program.h"

namespace zero::planning {

class DryRun final : public PassSink {
 public:
  // All arguments must outlive this object.
  DryRun(const step::RunFacts& run, const std::vector<step::Unit>& units, const std::vector<step::GroupFacts>& groups,
         step::Observer& observer, const step::Completion& completion = {});
  ~DryRun() override;

  Tensor make(std::int64_t bytes) override;
  void put_away(step::Tier tier, std::int64_t bytes) override;
  void bring_back(step::Tier tier, std::int64_t bytes) override;
  using PassSink::use;
  void use(std::span<const std::size_t> parameters) override;
  void begin_backward() override { program_.begin_backward(); }
  void gradient(std::size_t parameter, Tensor gradient) override;
  void end_backward() override { program_.end_backward(); }
  bool on_gpu() const override { return run_.topology.gpu; }

  // Sets the initial values of all groups.
  void initialise();
  // overflows: gradients are not finite.
  step::StepOutcome step(bool overflows = false);

  // Frees idle buffers, as Engine::reset_peak_memory() does.
  void trim() { memory_.trim(); }
  MemoryReport report() const { return ledger_.report(); }
  const step::Memory& memory() const { return memory_; }
  step::StepProgram& program() { return program_; }
  step::DryBackend& backend() { return backend_; }
  // Bytes of activations offloaded and fetched since the last call.
  step::Traffic take_activation_traffic() { return std::exchange(traffic_, {}); }

 private:
  class Allocated;
  void free(const Allocated& tensor);

  const step::RunFacts& run_;
  const std::vector<step::GroupFacts>& groups_;
  std::vector<std::pair<int, int>> member_of_;  // by parameter: its group and its index in the group
  step::MemoryLedger ledger_;
  step::DryBackend backend_;
  step::Memory memory_;
  optim::LossScaler scaler_;
  std::unordered_map<int, Tensor> gradients_;  // owned by the program, by buffer
  step::StepProgram program_;
  step::Traffic traffic_;
  int away_ = 0;                                  // number of tensors in the file
  std::int64_t away_bytes_ = 0, file_bytes_ = 0;  // bytes of these tensors; size of the file
};

}  // namespace zero::planning
