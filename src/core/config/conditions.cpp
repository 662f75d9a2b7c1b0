// When keys have an effect.
#include "config/document.h"

namespace zero::config {

Condition condition_of(const Document& document, When when) {
  const auto value = [&](std::string_view path) { return document.effective(path); };
  const auto is_on = [&](std::string_view path) { return value(path) == "true"; };
  const auto unless = [](bool met, const std::string& reason) { return met ? std::string() : reason; };
  const std::string stage = value("zero_optimization.stage");
  const std::string optimizer = value("zero_optimization.offload_optimizer.device");
  const std::string params = value("zero_optimization.offload_param.device");
  const std::string activations = value("libzero.activation_offload.device");
  const std::string none = "\"none\"", file = "\"nvme\"";
  const bool scales_loss = is_on("fp16.enabled") || is_on("libzero.loss_scaling");
  switch (when) {
    case When::Always:
      return {};
    case When::Api:
      return {"api", {}};
    case When::StagesFrom1:
      return {"S1+", unless(stage != "0", "it applies to stages 1 to 3; stage is 0")};
    case When::Stages1And2:
      return {"S12", unless(stage == "1" || stage == "2", "it applies to stages 1 and 2; stage is " + stage)};
    case When::Stage3:
      return {"S3", unless(stage == "3", "it applies to stage 3; stage is " + stage)};
    case When::TensorParallel:
      return {"tensor_parallel", unless(finite_number(value("tensor_parallel.autotp_size")).value_or(0) > 1,
                                        "tensor_parallel.autotp_size is not above 1")};
    case When::Experts:
      return {"experts", unless(value("libzero.model.experts.num_experts") != "0", "num_experts is 0")};
    case When::OptimizerOffloaded:
      return {"opt", unless(optimizer != none, "offload_optimizer.device is none")};
    case When::OptimizerInFile:
      return {"optimizer nvme", unless(optimizer == file, "offload_optimizer.device is not nvme")};
    case When::ParamsOffloaded:
      return {"par", unless(params != none, "offload_param.device is none")};
    case When::ParamsInFile:
      return {"param nvme", unless(params == file, "offload_param.device is not nvme")};
    case When::ActivationsOffloaded:
      return {"activations", unless(activations != none, "activation_offload.device is none")};
    case When::ActivationsInFile:
      return {"activation nvme", unless(activations == file, "activation_offload.device is not nvme")};
    case When::AnyFile:
      return {"nvme", unless(params == file || optimizer == file || activations == file ||
                                 value("libzero.activation_file_path") != "null" || value("memory.file") != "null",
                             "no device is nvme")};
    case When::Fp16:
      return {"fp16", unless(is_on("fp16.enabled"), "fp16 is not enabled")};
    case When::NotFp16:
      return {"not fp16", unless(!is_on("fp16.enabled"), "fp16 always scales the loss")};
    case When::ScalesLoss:
      return {"fp16", unless(scales_loss, "fp16 is not enabled")};
    case When::DynamicScale:
      if (!scales_loss) return {"dynamic", "fp16 is not enabled"};
      return {"dynamic", unless(value("fp16.loss_scale") == "0", "the loss scale is fixed")};
    case When::Bf16:
      return {"bf16", unless(is_on("bf16.enabled"), "bf16 is not enabled")};
    case When::SixteenBit:
      return {"16 bits", unless(is_on("fp16.enabled") || is_on("bf16.enabled"), "neither bf16 nor fp16 is enabled")};
    case When::NarrowStates:
      return {"16-bit states",
              unless(is_on("bf16.bf16_master_weights_and_grads") || is_on("fp16.fp16_master_weights_and_grads") ||
                         value("optimizer.params.state_bits") == "16",
                     "masters and optimizer states are fp32")};
    case When::TensorBoard:
      return {"tensorboard", unless(is_on("tensorboard.enabled"), "tensorboard is off")};
    case When::CsvMonitor:
      return {"csv_monitor", unless(is_on("csv_monitor.enabled"), "csv_monitor is off")};
    case When::Postscale:
      if (is_on("prescale_gradients")) return {"postscale", "prescale_gradients is true"};
      return {"postscale", unless(value("gradient_allreduce_op") != "\"sum\"", "gradient_allreduce_op is sum")};
  }
  return {};
}

}  // namespace zero::config
