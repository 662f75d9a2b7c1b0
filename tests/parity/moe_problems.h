// A model with experts, and its training in one process by a dense formula: every expert computes every token, and a
// mask selects.
#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <zero/library.h>
#include <zero/moe.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "soundness/ranks.h"

namespace zero::test::moe {

inline constexpr std::int64_t kIn = 6, kHidden = 12, kOut = 4, kExperts = 4;

struct ExpertImpl : torch::nn::Cloneable<ExpertImpl> {
  ExpertImpl() { reset(); }
  void reset() override;
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Expert);

// Two layers of experts with residual connections, between two Linears. Draws nothing: no token is selected by chance.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(MoeOptions options);
  at::Tensor forward(const at::Tensor& x, double aux = 0.01);  // returns the output; adds aux * losses to `loss`
  at::Tensor forward_by_mask(const at::Tensor& x, double aux = 0.01);
  torch::nn::Linear in{nullptr}, head{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  at::Tensor loss;  // of the last forward: aux * the sum of the auxiliary losses
  std::vector<at::Tensor> outputs, counts;

 private:
  at::Tensor layer_by_mask(MoEImpl& layer, const at::Tensor& x, at::Tensor& l_aux) const;
};
TORCH_MODULE(Net);

// ep_size 1, k 1; options that draw are off.
MoeOptions options_of(int ep_size, std::int64_t k);
std::shared_ptr<NetImpl> make_net(const MoeOptions& options);
// The input of a rank of the data-parallel ones.
at::Tensor input_of(int step, int rank, std::int64_t tokens = 15);
// Of the model's forward, or of the mask's.
at::Tensor loss_of(NetImpl& net, int step, int rank, bool by_mask = false, std::int64_t tokens = 15);

Options engine_options(int stage, const std::string& recipe = "fp32", const std::string& extra = "",
                       const std::string& zero = "", int accumulation = 1);

// Training by the formula: the mean over `ranks`, AdamW of torch, gradients clipped to 0.05.
class Reference {
 public:
  Reference(const MoeOptions& options, int ranks);
  // Gradients before clipping.
  std::map<std::string, at::Tensor> backward(int step, int micro_batches = 1);
  double step();  // returns the norm
  NetImpl& net() { return *net_; }

 private:
  const int ranks_;
  std::shared_ptr<NetImpl> net_;
  torch::optim::AdamW optimizer_;
};

// The seed of a micro-batch.
inline int step_seed(int step, int micro) { return 10 * step + micro; }

}  // namespace zero::test::moe
