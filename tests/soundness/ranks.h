// Runs one body with every transport, and the reference loop without libzero.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>
#include <zero/library.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/require.h"

namespace zero::test {

using Body = std::function<void(std::shared_ptr<Communicator>)>;

struct Place {
  // "local", "thread", "delayed" (threads that are late at some collectives), "shm", "gloo", "c10d" (a process group)
  const char* transport;
  int world;
};
// The transports of a test: one rank, threads, processes over shared memory and over TCP.
const std::vector<Place>& places();
std::string name_of(const Place& place);

// Runs `body` on the ranks of `place`, in child processes. Returns the text of any rank's exception, or "".
std::string run_at(const Place& place, const Body& body);

// Linear, LayerNorm, GELU twice and a Linear: parameters large enough to be mapped in shared memory, and small ones.
struct Net : torch::nn::Module {
  Net();
  at::Tensor forward(at::Tensor x);
  torch::nn::ModuleList layers;
  torch::nn::Linear head{nullptr};
};
std::shared_ptr<Net> make_net(std::uint64_t seed = 3);
// The data of one rank and micro-batch, the same in every process.
at::Tensor input_of(int rank, int micro_batch);
at::Tensor loss_of(Net& net, int rank, int micro_batch);

// Data-parallel training by libtorch alone, in one process: a loss is the mean over ranks of loss(net, rank).
class Plain {
 public:
  using Loss = std::function<at::Tensor(Net&, int rank)>;
  // optimizer: "SGD", or "AdamW" with weight decay 0.1 and an eps so large that the update depends on the size of
  // gradients.
  Plain(int world, const std::string& optimizer, double lr = 0.05);
  void backward(const Loss& loss, double weight = 1);
  void step(double clip = 0);
  void set_lr(double lr);
  Net& net() { return *net_; }

 private:
  int world_;
  std::shared_ptr<Net> net_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

std::string json_for(int stage, const std::string& optimizer, int accumulation = 1, const std::string& extra = "",
                     const std::string& zero = "");

// Throws, naming the parameter, unless the Engine's masters are those of `net` within rounding. Collective.
void require_equal(Engine& engine, Net& net, const std::string& what);
// The text of the exception that fn throws; throws itself if there is none, or one that is not a zero::Error.
std::string error_of(const std::function<void()>& fn, const std::string& what);

}  // namespace zero::test
