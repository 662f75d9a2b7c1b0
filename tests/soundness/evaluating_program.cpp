// A rank of `zero run`: a model of one unit, which rank 0 evaluates alone for so many seconds while the others wait.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <zero/library.h>

int main(int, char** argv) {
  at::set_num_threads(1);
  const double seconds = std::atof(argv[1]);
  const std::string stage = argv[2];
  const auto comm = zero::Communicator::from_env();
  torch::nn::Linear model(64, 64);
  zero::Engine engine(model.ptr(),
                      zero::Options::from_json(R"({"train_micro_batch_size_per_gpu": 2,
                          "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": )" +
                                               stage + "}}"),
                      comm);
  const auto x = torch::ones({2, 64});
  engine.backward(model->forward(x).pow(2).mean());
  engine.step();
  if (comm->rank() == 0) {
    torch::NoGradGuard no_grad;
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::duration<double>(seconds)) {
      model->forward(x);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  comm->barrier();
  if (comm->rank() == 0) std::puts("evaluated");
  return 0;
}
