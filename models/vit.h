// A vision transformer for classification (Dosovitskiy et al., 2010.11929): patches of an image and a class token
// through layers with norms before each part. Parameters have the names and shapes of transformers'
// ViTForImageClassification in memory; its files have older names, which the name map "vit" knows. Plain torch::nn.
// Parameters may have any floating dtype, which activations share; the loss is computed in fp32.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <utility>

#include "models/layers.h"
#include "models/model_configs.h"

namespace models {

struct VitLayerImpl : torch::nn::Module {
  explicit VitLayerImpl(const VitConfig& config);
  at::Tensor forward(const at::Tensor& x);  // [batch, places, hidden]

 private:
  std::int64_t heads_;
  double dropout_, attention_dropout_;
  Activation activation_;
  Linear q_{nullptr}, k_{nullptr}, v_{nullptr}, o_{nullptr}, up_{nullptr}, down_{nullptr};
  LayerNorm before_{nullptr}, after_{nullptr};
};
TORCH_MODULE(VitLayer);

struct VitForImageClassificationImpl : torch::nn::Module {
  // Initialised as transformers does. Throws std::invalid_argument.
  explicit VitForImageClassificationImpl(VitConfig config);
  // pixels: [batch, channels, image, image], of any floating dtype. Returns logits [batch, labels]. Throws c10::Error
  // for other shapes.
  at::Tensor forward(const at::Tensor& pixels);
  // targets: int64 [batch]. The mean negative log likelihood, a scalar in fp32.
  at::Tensor loss(const at::Tensor& pixels, const at::Tensor& targets);
  // Layers in segments: see Segments.
  void run_layers_by(std::int64_t count, Runner runner) { segments_.run_by(count, std::move(runner)); }
  const VitConfig& config() const { return config_; }

 private:
  VitConfig config_;
  Segments segments_;
  at::Tensor first_, positions_, patches_, patches_bias_;
  torch::nn::ModuleList layers_{nullptr};
  LayerNorm norm_{nullptr};
  Linear classifier_{nullptr};
};
TORCH_MODULE(VitForImageClassification);

}  // namespace models
