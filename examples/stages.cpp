// Prints what the four stages store and send, on four ranks that are threads of this process, without a launcher.
// The state's hash is the same at every stage.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <cstdio>
#include <mutex>

int main() {
  std::printf("stage  at rest  peak     sent/step  state\n");
  for (int stage = 0; stage <= 3; ++stage) {
    const auto options = zero::Options::from_json(R"({"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}})")
                             .with("zero_optimization.stage", std::to_string(stage));
    zero::run_ranks(4, [&](std::shared_ptr<zero::Communicator> comm) {
      static std::mutex one_at_a_time;  // ranks that are threads share libtorch's random generator
      torch::nn::Sequential model;
      {
        std::lock_guard<std::mutex> lock(one_at_a_time);
        torch::manual_seed(1);
        for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(512, 512));
      }
      zero::Engine engine(model, options, comm);
      comm->reset_stats();
      const auto x = torch::linspace(-1 - comm->rank(), 1, 8 * 512).view({8, 512}).to(torch::kBFloat16);
      for (int step = 0; step < 3; ++step) {
        engine.backward(model->forward(x).to(torch::kFloat).square().mean());
        engine.step();
      }
      const auto sent = comm->stats().bytes_sent() / 3;
      const auto hash = engine.state_hash();
      using Memory = zero::MemoryReport;
      const auto memory = engine.memory();
      double at_rest = 0;  // without idle buffers
      for (const auto purpose : {Memory::Purpose::Parameters, Memory::Purpose::Gradients,
                                 Memory::Purpose::OptimizerStates, Memory::Purpose::MasterParameters})
        at_rest += static_cast<double>(memory.current(Memory::Tier::Device, purpose));
      const auto peak = static_cast<double>(memory.peak(Memory::Tier::Device));
      if (comm->rank() == 0)
        std::printf("%d      %5.2f MB %5.2f MB %5.2f MB   %.12s\n", stage, at_rest / 1e6, peak / 1e6,
                    static_cast<double>(sent) / 1e6, hash.c_str());
    });
  }
}
