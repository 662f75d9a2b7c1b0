// Linear layers whose result can be changed from outside, for low-rank adaptation (lora.h).
#pragma once
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <functional>
#include <utility>

namespace models {

class Adaptable {
 public:
  virtual ~Adaptable() = default;
  // What is added to the layer's result. x: the layer's input, [.., in]; the result: [.., out]. Null: nothing.
  using Adapter = std::function<at::Tensor(const at::Tensor& x)>;
  void adapt(Adapter adapter) { adapter_ = std::move(adapter); }

 protected:
  // y: the layer's own result.
  at::Tensor adapted(const at::Tensor& x, const at::Tensor& y) const { return adapter_ ? y + adapter_(x) : y; }

 private:
  Adapter adapter_;
};

// torch::nn::Linear with that.
struct AdaptableLinearImpl : torch::nn::LinearImpl, Adaptable {
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& x) { return adapted(x, torch::nn::LinearImpl::forward(x)); }
};
TORCH_MODULE(AdaptableLinear);

}  // namespace models
