// The typed values of a configuration's optimizer. Plain data, as settings.h, which includes it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zero::config {

enum class OptimizerType {
  None,
  Adam,
  AdamW,
  Sgd,
  Adagrad,
  Lion,
  RmsProp,
  NAdam,
  RAdam,
  Adamax,
  Adadelta,
  Muon
};  // optimizers.h

// Overrides for parameters whose name matches `pattern` (wildcards * and ?). The first matching entry applies.
// Parameters without a match are in group 0.
struct ParameterGroup {
  std::string pattern;
  std::optional<double> lr;
  std::optional<double> weight_decay;
  bool operator==(const ParameterGroup&) const = default;
};

struct OptimizerSettings {
  OptimizerType type = OptimizerType::None;
  double lr = 1e-3, weight_decay = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  bool bias_correction = true, adam_w_mode = true;  // adam_w_mode true: decoupled decay
  double momentum = 0, dampening = 0;
  bool nesterov = false;                               // SGD, Muon
  double lr_decay = 0, initial_accumulator_value = 0;  // Adagrad
  bool amsgrad = false;                                // Adam, AdamW
  double alpha = 0.99;                                 // RMSprop
  bool centered = false;                               // RMSprop
  double momentum_decay = 4e-3;                        // NAdam
  bool decoupled_weight_decay = false;                 // NAdam, RAdam
  double rho = 0.9;                                    // Adadelta
  // Muon: lr, momentum and nesterov are of matrices; adam_lr, betas and eps of the other parameters.
  double adam_lr = 3e-4;
  std::optional<double> muon_lr{};  // in place of lr
  std::int64_t ns_steps = 5;
  bool ns_fp32 = false;                        // products of fp32; false: of bf16
  bool ns_match_rms = false;                   // scale of an update: as large as AdamW's; false: Muon's own
  std::vector<std::string> adam_parameters{};  // patterns of matrices that are no matrices of Muon
  std::int64_t state_bits = 32;                // of a state; 16: bf16
  bool fp32_states = true;                     // DeepSpeed's
};

}  // namespace zero::config
