// Fits a small network to random data with its parameters, gradients and optimizer state sharded over the ranks:
//   zero run -n 2 minimal        or just: minimal
#include <zero/zero.h>

#include <cstdio>

int main() {
  auto comm = zero::Communicator::from_env();  // a world of one when run alone
  zero::Options options = zero::Options::build().stage(3).bf16().adamw({.lr = 0.01}).train_micro_batch_size(32);
  using namespace torch::nn;
  torch::manual_seed(1);  // for a run that can be repeated
  auto model = zero::build([] { return Sequential(Linear(64, 256), GELU(), Linear(256, 1)); });
  zero::Engine engine(model, options, comm);  // the model itself is not changed
  torch::manual_seed(2 + comm->rank());       // each rank draws its own data
  for (int step = 1; step <= 100; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(model->forward(x.to(torch::kBFloat16)).to(torch::kFloat), x.mean(1, true));
    engine.backward(loss);  // scales, accumulates, reduces over the ranks
    engine.step();          // clips, updates this rank's shard, or skips on overflow
    if (step % 20 == 0 && comm->rank() == 0) std::printf("step %d loss %.4f\n", step, loss.item<double>());
  }
  if (comm->rank() == 0) std::printf("bytes of rank 0\n%s", engine.memory().table().c_str());
}
