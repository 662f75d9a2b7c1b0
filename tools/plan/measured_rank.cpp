// One rank of `zero plan --paper table2 --measure`: trains a GPT for three steps and reports what its engine booked.
#include <ATen/Parallel.h>
#include <torch/types.h>
#include <zero/library.h>

#include <algorithm>
#include <cmath>

#include "base/gathered_values.h"
#include "config/settings.h"
#include "models/gpt.h"
#include "tools/plan/measured_models.h"
#include "tools/support/rank_processes.h"

namespace zero::cli {
namespace {

using Purpose = MemoryReport::Purpose;

constexpr int kMeasuredSteps = 3;  // the order of use is known, and buffers have their sizes

// What Table 2 counts.
std::uint64_t states_of(const MemoryReport& memory) {
  std::uint64_t sum = 0;
  for (const auto purpose :
       {Purpose::Parameters, Purpose::Gradients, Purpose::MasterParameters, Purpose::OptimizerStates})
    sum += memory.peak(Tier::Device, purpose);
  return sum;
}

Json train_measured(const MeasuredTask& task, const std::shared_ptr<Communicator>& comm) {
  const auto options = task.options();
  torch::manual_seed(options.settings().seed);
  auto model = zero::build([&] { return models::Gpt(task.gpt); });
  Engine engine(model, options, comm);
  const auto& gpt = task.gpt;
  const auto tokens = at::arange(gpt.sequence).add(engine.mesh().rank("dp")).remainder(gpt.vocabulary).view({1, -1});
  for (int step = 0; step < kMeasuredSteps; ++step) {
    comm->reset_stats();
    auto loss = model->forward(tokens, tokens);
    engine.backward(loss);
    const auto value = loss.item<double>();
    loss = at::Tensor();
    engine.step();
    if (!std::isfinite(value))
      throw InternalError("[zero plan] got loss " + std::to_string(value) + " in step " + std::to_string(step) +
                              ", expected a finite one",
                          ExitCode::kNumerical);
  }
  // An axis that is the whole run has the run's own communicator, whose operations have no prefix.
  std::uint64_t tensor_parallel = 0;
  const auto sent = comm->stats();
  for (const auto& [operation, row] : sent.by_op)
    if (task.tensor == comm->size() || operation.starts_with("tp.")) tensor_parallel += row.bytes_sent;
  const auto memory = engine.memory();
  const auto most = [&](std::uint64_t mine) {
    const auto all = base::all_gather_values(*comm, mine);
    return *std::max_element(all.begin(), all.end());
  };
  return {{"states_bytes", most(states_of(memory))},
          {"peak_bytes", most(memory.peak(Tier::Device))},
          {"tensor_parallel_bytes", tensor_parallel},
          {"zero_bytes", sent.bytes_sent() - tensor_parallel}};
}

}  // namespace

int plan_rank(int argc, char** argv) {
  const auto task = RankTask::from("plan-rank", argc, argv);
  at::set_num_threads(1);
  const auto comm = Communicator::from_env();
  const auto result = train_measured(MeasuredTask::from(task.task), comm);
  if (comm->rank() == 0) task.hand_over(result);
  return 0;
}

}  // namespace zero::cli
