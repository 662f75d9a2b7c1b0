// Every name of the public interface that programs rely on, compiled against the installed headers,
// and one short training with them.
#include <zero/zero.h>

#include <cstdio>
#include <filesystem>
#include <type_traits>

struct NetImpl : torch::nn::Module {
  torch::nn::Sequential layers{nullptr};
  NetImpl() {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 4)));
  }
  at::Tensor forward(at::Tensor x) { return layers->forward(x); }
};
TORCH_MODULE(Net);

static_assert(std::is_base_of_v<zero::Error, zero::ConfigError> && std::is_base_of_v<zero::Error, zero::CommError> &&
              std::is_base_of_v<zero::Error, zero::IoError> && std::is_base_of_v<zero::Error, zero::InternalError>);

static int use(std::shared_ptr<zero::Communicator> comm, const std::string& dir) {
  const auto options = zero::Options::from_json(R"({
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}})");
  if (options.explain().empty()) return 1;
  torch::manual_seed(1);
  auto model = zero::build([] { return Net(); });
  zero::Engine engine(model, options, comm);
  double first = 0, last = 0;
  for (int k = 0; k < 40; ++k) {
    auto x = torch::ones({4, 8}) * (1 + comm->rank());
    auto loss = (zero::activation_checkpoint([&](at::Tensor t) { return model->forward(t); }, x) - 1).pow(2).mean();
    engine.backward(loss);
    const zero::StepResult result = engine.step();
    if (result.updated != (k % 2 == 1) || result.overflow) return 2;
    if (k % 2 == 1 &&
        (result.grad_norm < 0 || result.loss_scale != 1 || result.lr != 0.01 || result.global_step != (k + 1) / 2))
      return 3;
    (k == 0 ? first : last) = loss.item<double>();
  }
  if (!(last < 0.5 * first)) return 4;
  const zero::MemoryReport memory = engine.memory();
  using Tier = zero::MemoryReport::Tier;
  using Purpose = zero::MemoryReport::Purpose;
  if (memory.current(Tier::Device, Purpose::OptimizerStates) == 0 ||
      memory.peak(Tier::Device) < memory.current(Tier::Device))
    return 5;
  if (memory.table().empty()) return 6;
  engine.reset_peak_memory();
  {
    zero::GatheredParameters scope = engine.gathered_parameters(true);
    if (model->parameters()[0].abs().sum().item<float>() == 0) return 7;
  }
  const std::map<std::string, at::Tensor> whole = engine.full_state_dict();
  if (whole.size() != (comm->rank() == 0 ? 4u : 0u)) return 8;
  const std::string hash = engine.state_hash();
  engine.save_checkpoint(dir, "step-20");
  if (engine.load_checkpoint(dir) != "step-20" || engine.state_hash() != hash) return 9;
  if (engine.is_gradient_accumulation_boundary()) return 10;
  auto in = torch::full({2}, 1.0f + comm->rank()), out = torch::zeros({2 * comm->size()});
  std::shared_ptr<zero::Work> work = comm->all_gather(out, in);
  work->wait();
  comm->all_reduce(in)->wait();
  comm->broadcast(in, 0)->wait();
  auto part = torch::zeros({2});
  comm->reduce_scatter(part, out)->wait();
  auto other = torch::zeros_like(out);
  comm->all_to_all(other, out)->wait();
  comm->barrier();
  const zero::CommStats stats = comm->stats();
  if (comm->size() > 1 && (stats.bytes_sent() == 0 || stats.by_op.at("all_gather").calls == 0)) return 11;
  comm->reset_stats();
  return comm->transport().empty() || comm->local_rank() >= comm->local_size();
}

int main(int argc, char** argv) {
  const std::string dir = argc > 1 ? argv[1] : "checkpoints";
  int failed = use(zero::Communicator::from_env(), dir + "/one");
  zero::run_ranks(2, [&](std::shared_ptr<zero::Communicator> comm) {
    const int code = use(comm, dir + "/two");
    if (code != 0) failed = code;
  });
  std::printf("consumer: %d\n", failed);
  return failed;
}
