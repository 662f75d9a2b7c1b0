// Two Engines, each with its own optimizer: a generator that is trained through a discriminator.
//
// Gradients of the generator's loss flow through the discriminator to the generator. The gradients of the
// discriminator's parameters are dropped on the way, because an Engine takes gradients only from its own backward().
// So nothing has to be cleared between the two steps; requires_grad_(false) on the discriminator only saves work.
//
//   build/bin/zero run -n 2 build/examples/gan
#include <zero/zero.h>

#include <cstdio>

int main() {
  auto comm = zero::Communicator::from_env();
  auto options = zero::Options::from_json(R"({"train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 3},
      "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.5, 0.999]}}})");
  using namespace torch::nn;
  torch::manual_seed(1);
  auto generator = Sequential(Linear(4, 32), ReLU(), Linear(32, 32), ReLU(), Linear(32, 1));
  auto discriminator = Sequential(Linear(1, 32), LeakyReLU(), Linear(32, 32), LeakyReLU(), Linear(32, 1));
  zero::Engine generator_engine(generator, options, comm);
  zero::Engine discriminator_engine(discriminator, options, comm);

  torch::manual_seed(2 + comm->rank());  // each rank draws its own data
  const auto real = [] { return torch::randn({64, 1}) * 0.5 + 3; };
  const auto judged = [&](const at::Tensor& x, float label) {
    return torch::binary_cross_entropy_with_logits(discriminator->forward(x), torch::full({64, 1}, label));
  };
  for (int step = 1; step <= 600; ++step) {
    const auto fake = generator->forward(torch::randn({64, 4}));
    discriminator_engine.backward(judged(real(), 1) + judged(fake.detach(), 0));
    discriminator_engine.step();

    generator_engine.backward(judged(fake, 1));  // through the discriminator
    generator_engine.step();
  }
  torch::NoGradGuard no_grad;
  const auto made = generator->forward(torch::randn({2000, 4}));
  if (comm->rank() == 0)
    std::printf("mean %.2f of 3, deviation %.2f of 0.5\n", made.mean().item<double>(), made.std().item<double>());
}
