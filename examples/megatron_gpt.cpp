// A GPT of tensor-parallel layers with sequence regions, inside ZeRO. It learns to repeat a pattern.
//
//   build/bin/zero run -n 2 build/examples/megatron_gpt       # two tensor-parallel ranks
//   build/bin/zero run -n 4 build/examples/megatron_gpt       # two pairs of them, which read different samples
#include "megatron_gpt.h"

#include <cstdio>

int main() {
  auto comm = zero::Communicator::from_env();
  const int degree = comm->size() % 2 == 0 ? 2 : 1;
  auto options = zero::Options::build()
                     .stage(3)
                     .adamw({.lr = 3e-3})
                     .train_micro_batch_size(8)
                     .tensor_parallel(degree, {});  // the layers say how they are cut
  torch::manual_seed(1);
  MegatronGpt model{MegatronGptConfig{}};
  zero::Engine engine(model, options, comm);
  model->set_group(engine.mesh().group("tp"));

  // All tensor-parallel ranks of a group draw the same samples.
  torch::manual_seed(100 + engine.mesh().rank("dp"));
  for (int step = 1; step <= 120; ++step) {
    const auto pattern = torch::randint(0, 64, {8, 4}, torch::kLong).repeat({1, 5}).narrow(1, 0, 17);
    const auto logits = model->forward(pattern.narrow(1, 0, 16));
    const auto loss = torch::nll_loss(torch::log_softmax(logits.flatten(0, 1), -1), pattern.narrow(1, 1, 16).flatten());
    engine.backward(loss);
    engine.step();
    if (comm->rank() == 0 && step % 40 == 0)
      std::printf("%s: step %d loss %.3f\n", engine.mesh().text().c_str(), step, loss.item<double>());
  }
}
