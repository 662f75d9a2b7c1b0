#include "soundness/ranks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <stdexcept>

#include "comm/group.h"
#include "comm/transport.h"
#include "net/process_info.h"
#include "support/folder.h"
#include "support/fork_ranks.h"
#include "support/process_groups.h"
#include "support/random_delays.h"

namespace zero::test {
namespace {

constexpr std::int64_t kWidth = 64;

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error("no free port");
  ::close(fd);
  return ntohs(address.sin_port);
}

}  // namespace

const std::vector<Place>& places() {
  static const std::vector<Place> all{{"local", 1}, {"thread", 2}, {"shm", 2}, {"shm", 3}, {"gloo", 2}};
  return all;
}

std::string name_of(const Place& place) { return std::string(place.transport) + " x " + std::to_string(place.world); }

std::string run_at(const Place& place, const Body& body) {
  const std::string transport = place.transport;
  const auto limit = std::chrono::seconds(60);
  const auto alone = [&](const std::function<void()>& fn) {
    return errors_of(fork_ranks(1, [&](int) {
      at::set_num_threads(1);
      fn();
    }));
  };
  if (transport == "local") return alone([&] { body(Communicator::local()); });
  if (transport == "thread") return alone([&] { run_ranks(place.world, body); });
  if (transport == "delayed") return alone([&] { run_ranks(place.world, random_delays(1), body); });
  const auto run_id = fresh_run_id();
  const int port = transport == "gloo" ? free_port() : 0;
  const TempFolder folder;
  return errors_of(fork_ranks(place.world, [&](int rank) {
    at::set_num_threads(1);
    if (transport == "c10d") return body(over_process_group(folder.file("store"), rank, place.world, limit));
    net::ProcessInfo identity;
    identity.rank = rank;
    identity.size = place.world;
    identity.run_id = run_id;
    if (port != 0) {
      identity.local_rank = 0, identity.local_size = 1;
      identity.master_addr = "127.0.0.1", identity.master_port = port;
    } else {
      identity.local_rank = rank, identity.local_size = place.world;
    }
    body(comm::make_communicator(port != 0 ? comm::make_gloo(identity, limit) : comm::make_shm(identity, limit)));
  }));
}

Net::Net() {
  for (int i = 0; i < 2; ++i) {
    layers->push_back(torch::nn::Linear(kWidth, kWidth));
    layers->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  }
  register_module("layers", layers);
  head = register_module("head", torch::nn::Linear(kWidth, 8));
}

at::Tensor Net::forward(at::Tensor x) {
  for (std::size_t i = 0; i < layers->size(); i += 2) {
    x = layers[i]->as<torch::nn::Linear>()->forward(x);
    x = at::gelu(layers[i + 1]->as<torch::nn::LayerNorm>()->forward(x));
  }
  return head(x);
}

std::shared_ptr<Net> make_net(std::uint64_t seed) {
  auto net = std::make_shared<Net>();
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& p : net->parameters()) p.copy_(at::randn(p.sizes(), generator, at::TensorOptions()) * 0.2);
  return net;
}

at::Tensor input_of(int rank, int micro_batch) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * micro_batch + rank + 1));
  return at::randn({4, kWidth}, generator, at::TensorOptions());
}

at::Tensor loss_of(Net& net, int rank, int micro_batch) {
  return (net.forward(input_of(rank, micro_batch)) - 0.5).pow(2).mean();
}

Plain::Plain(int world, const std::string& optimizer, double lr) : world_(world), net_(make_net()) {
  if (optimizer == "SGD")
    optimizer_ = std::make_unique<torch::optim::SGD>(net_->parameters(), torch::optim::SGDOptions(lr));
  else
    optimizer_ = std::make_unique<torch::optim::AdamW>(net_->parameters(),
                                                       torch::optim::AdamWOptions(lr).weight_decay(0.1).eps(1e-3));
}

void Plain::backward(const Loss& loss, double weight) {
  for (int rank = 0; rank < world_; ++rank) (loss(*net_, rank) * (weight / world_)).backward();
}

void Plain::step(double clip) {
  if (clip > 0) torch::nn::utils::clip_grad_norm_(net_->parameters(), clip);
  optimizer_->step();
  optimizer_->zero_grad();
}

void Plain::set_lr(double lr) {
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
}

std::string json_for(int stage, const std::string& optimizer, int accumulation, const std::string& extra,
                     const std::string& zero) {
  return R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "gradient_accumulation_steps": )" +
         std::to_string(accumulation) + R"(, "optimizer": {"type": ")" + optimizer + R"(", "params": {"lr": 0.05)" +
         (optimizer == "AdamW" ? R"(, "weight_decay": 0.1, "eps": 1e-3)" : "") +
         R"(}}, "zero_optimization": {"stage": )" + std::to_string(stage) + zero + "}" + extra + "}";
}

void require_equal(Engine& engine, Net& net, const std::string& what) {
  const auto masters = engine.full_state_dict();
  if (engine.communicator().rank() != 0) return;
  for (const auto& item : net.named_parameters()) {
    const auto& ours = masters.at(item.key());
    const auto gap = (ours - item.value().detach()).abs().max().item<double>();
    const auto size = item.value().detach().abs().max().item<double>();
    require(gap <= 2e-6 * (size + 1e-2),
            what + ": " + item.key() + " is " + std::to_string(gap) + " off, of " + std::to_string(size));
  }
}

std::string error_of(const std::function<void()>& fn, const std::string& what) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  throw std::runtime_error(what + ": no error");
}

}  // namespace zero::test
