// Trains in two halves: saves a checkpoint after the first and resumes in a new engine. A second run resumes as well:
//   zero run -n 2 resume DIR
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <cstdio>
#include <filesystem>

int main(int argc, char** argv) {
  const std::filesystem::path dir = argc > 1 ? argv[1] : "checkpoints";
  auto comm = zero::Communicator::from_env();
  const auto options =
      zero::Options::from_json(R"({"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3},
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})");
  for (int half = 0; half < 2; ++half) {
    torch::manual_seed(7);
    auto model = zero::build(
        [] { return torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1)); });
    zero::Engine engine(model, options, comm);
    try {
      const auto tag = engine.load_checkpoint(dir);  // the newest complete one
      if (comm->rank() == 0)
        std::printf("resuming from %s at step %ld\n", tag.c_str(), static_cast<long>(engine.global_step()));
    } catch (const zero::Error& error) {
      if (error.code() != zero::ExitCode::kCheckpoint) throw;
      if (comm->rank() == 0) std::printf("no checkpoint in %s: starting from the beginning\n", dir.c_str());
    }
    torch::manual_seed(static_cast<std::uint64_t>(1000 * engine.global_step() + comm->rank()));
    double last = 0;
    for (int k = 0; k < 50; ++k) {
      const auto x = torch::randn({16, 32});
      const auto loss = torch::mse_loss(model->forward(x), x.mean(1, true));
      engine.backward(loss);
      engine.step();
      last = loss.item<double>();
    }
    engine.save_checkpoint(dir, "step-" + std::to_string(engine.global_step()));
    {
      const auto whole = engine.gathered_parameters();  // as in an evaluation: parameters are whole in this scope
      if (comm->rank() == 0)
        std::printf("step %ld loss %.4f, first weight %.6f\n", static_cast<long>(engine.global_step()), last,
                    model->parameters()[0].flatten()[0].item<double>());
    }
  }
}
