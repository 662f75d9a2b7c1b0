// Four experts learn more than the MLP that costs as much: a small GPT on the bytes of source code.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "models/gpt.h"
#include "support/file_text.h"
#include "support/process.h"
#include "tools/support/gpt_experts.h"

namespace zero::test::gpt_experts_learn_test {
namespace {

constexpr std::int64_t kSequence = 48, kBatch = 12;
constexpr int kSteps = 2000;

// The headers of torch::nn, 220 kB: a real text that is the same wherever this version of libtorch is.
at::Tensor text() {
  Dl_info torch{};
  if (dladdr(reinterpret_cast<void*>(&at::get_num_threads), &torch) == 0) throw std::runtime_error("no libtorch");
  const auto folder = std::filesystem::path(torch.dli_fname).parent_path().parent_path() /
                      "include/torch/csrc/api/include/torch/nn/modules";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::string all;
  for (const auto& file : files)
    if (file.extension() == ".h") all += file_text(file);
  return torch::from_blob(all.data(), {static_cast<std::int64_t>(all.size())}, torch::kUInt8).to(torch::kLong);
}

struct Learned {
  double loss = 0;  // of held-out text
  report::ExpertLoad load;
};

Learned learn(int experts, double aux, std::uint64_t seed) {
  static const auto bytes = text();
  const auto trained = bytes.size(0) * 9 / 10;
  torch::manual_seed(seed);
  models::GptConfig config{.layers = 2, .hidden = 16, .heads = 2, .sequence = kSequence, .vocabulary = 256};
  config::ExpertSettings settings;
  settings.num_experts = experts;
  settings.expert_interval = 1;
  settings.capacity_factor = 2;
  settings.eval_capacity_factor = experts;  // no byte is dropped
  cli::add_experts(config, settings);
  models::Gpt model(config);
  cli::ExpertCounter counter(model);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(5e-3).weight_decay(0.01));
  const auto batch = [&](const at::Tensor& starts) {
    std::vector<at::Tensor> rows;
    for (std::int64_t i = 0; i < starts.size(0); ++i)
      rows.push_back(bytes.narrow(0, starts[i].item<std::int64_t>(), kSequence + 1));
    return torch::stack(rows);
  };
  const auto loss_of = [&](const at::Tensor& data) {
    return model->forward(data.narrow(1, 0, kSequence), data.narrow(1, 1, kSequence));
  };
  // The same samples for every model.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (int step = 0; step < kSteps; ++step) {
    const auto starts = torch::randint(trained - kSequence - 1, {kBatch}, generator, torch::kLong);
    optimizer.zero_grad();
    auto loss = loss_of(batch(starts));
    if (const auto aux_loss = model->take_aux_loss(); aux_loss.defined()) loss = loss + aux * aux_loss;
    if (step == kSteps / 2) (void)counter.take();
    counter.note();
    loss.backward();
    optimizer.step();
  }
  const torch::NoGradGuard no_grad;
  model->eval();
  Learned learned;
  const int batches = 40;
  for (int i = 0; i < batches; ++i) {
    const auto starts = trained + torch::arange(kBatch) * ((bytes.size(0) - trained - kSequence - 1) / kBatch) + i * 3;
    learned.loss += loss_of(batch(starts)).item<double>() / batches;
  }
  if (experts > 0) learned.load = counter.load_of(counter.take(), kSteps);
  return learned;
}

TEST(GptExpertsLearn, MoreThanAnMlpAndEvenly) {
  torch::set_num_threads(1);
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const auto dense = learn(0, 0, seed), experts = learn(4, 0.01, seed);
    RecordProperty("seed " + std::to_string(seed), std::to_string(dense.loss) + " " + std::to_string(experts.loss) +
                                                       " " + std::to_string(experts.load.max_over_mean()));
    std::cout << "seed " << seed << ": MLP " << dense.loss << ", experts " << experts.loss << ", busiest "
              << experts.load.max_over_mean() << ", dropped " << experts.load.dropped() << "\n";
    EXPECT_LT(experts.loss, dense.loss) << "seed " << seed;
    EXPECT_LT(experts.load.max_over_mean(), 1.5) << "seed " << seed;
  }
}

}  // namespace
}  // namespace zero::test::gpt_experts_learn_test
