// A rank of `zero run` that trains on one epoch of a text and dies where it is told to, for tests of restarts on fewer
// ranks: TEXT FOLDER STEPS [ATTEMPT:RANK:STEP...]. It writes FOLDER/ids-<attempt>-<rank>, a line "STEP ID..." for each
// step with the samples that this rank read, and saves every second step.
#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <zero/library.h>

#include "apps/data/corpus.h"

namespace {

constexpr std::int64_t kSequence = 16;

// float [1, 17], bytes scaled to 0..1.
at::Tensor input_of(const std::uint8_t* sample) {
  at::Tensor x = torch::empty({1, kSequence + 1});
  for (std::int64_t i = 0; i <= kSequence; ++i) x[0][i] = static_cast<float>(sample[i]) / 256.0f;
  return x;
}

bool has_checkpoint(const std::string& root) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root, error))
    if (entry.path().filename().string().starts_with("step")) return true;
  return false;
}

int run(int argc, char** argv) {
  const std::string folder = argv[2];
  const std::int64_t steps = std::atoll(argv[3]);
  const char* const count = std::getenv("ZERO_RESTART_COUNT");
  const std::string attempt = count ? count : "0";
  const auto comm = zero::Communicator::from_env();
  at::set_num_threads(1);
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(kSequence, 24), torch::nn::Tanh(), torch::nn::Linear(24, 1));
  zero::Engine engine(model, zero::Options::from_json(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1,
                          "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})"),
                      comm);
  const data::Corpus corpus(argv[1], kSequence, 0, 5);
  data::Reader reader(corpus, comm->rank(), comm->size());
  if (has_checkpoint(folder + "/checkpoints")) {
    const std::string tag = engine.load_checkpoint(folder + "/checkpoints");
    reader.restore(engine.user_state());
    if (comm->rank() == 0) std::printf("continues from %s on %d ranks\n", tag.c_str(), comm->size());
    std::fflush(stdout);
  }
  std::ofstream ids(folder + "/ids-" + attempt + "-" + std::to_string(comm->rank()), std::ios::app);
  while (engine.global_step() < steps) {
    const std::int64_t step = engine.global_step();
    ids << step;
    for (std::int64_t i = 0; i < engine.accumulation_steps(); ++i) {
      const std::uint8_t* sample = reader.next(1)[0];
      ids << ' ' << corpus.offset(sample) / kSequence;
      const at::Tensor x = input_of(sample);
      const at::Tensor loss = torch::mse_loss(model->forward(x.narrow(1, 0, kSequence)), x.narrow(1, kSequence, 1));
      engine.backward(loss);
      for (int a = 4; a < argc; ++a)
        if (argv[a] == attempt + ":" + std::to_string(comm->rank()) + ":" + std::to_string(step))
          kill(getpid(), SIGKILL);
      engine.step();
    }
    ids << std::endl;
    if (step % 2 == 0) continue;
    engine.set_user_state(reader.state());
    engine.save_checkpoint(folder + "/checkpoints", "step" + std::to_string(step + 1));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const zero::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
}
