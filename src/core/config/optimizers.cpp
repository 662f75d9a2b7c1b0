// See optimizers.h.
#include "config/optimizers.h"

#include <algorithm>
#include <cctype>

#include "base/name_pattern.h"

namespace zero::config {
namespace {

struct Row {
  OptimizerType type;
  const char* name;
  double lr = 1e-3, eps = 1e-8;  // torch's defaults
};
constexpr Row kRows[] = {
    {OptimizerType::Adam, "Adam"},
    {OptimizerType::AdamW, "AdamW"},
    {OptimizerType::Sgd, "SGD"},
    {OptimizerType::Adagrad, "Adagrad", 0.01, 1e-10},
    {OptimizerType::Lion, "Lion"},
    {OptimizerType::RmsProp, "RMSprop", 0.01},
    {OptimizerType::NAdam, "NAdam", 0.002},
    {OptimizerType::RAdam, "RAdam"},
    {OptimizerType::Adamax, "Adamax", 0.002},
    {OptimizerType::Adadelta, "Adadelta", 1.0, 1e-6},
    {OptimizerType::Muon, "Muon", 0.02, 1e-10},
};

}  // namespace

const std::vector<OptimizerType>& optimizer_types() {
  static const std::vector<OptimizerType> types = [] {
    std::vector<OptimizerType> all;
    for (const auto& row : kRows) all.push_back(row.type);
    return all;
  }();
  return types;
}

const char* name_of(OptimizerType type) {
  for (const auto& row : kRows)
    if (row.type == type) return row.name;
  return "none";
}

std::optional<OptimizerType> optimizer_named(std::string_view name) {
  const auto same = [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); };
  for (const auto& row : kRows)
    if (std::equal(name.begin(), name.end(), row.name, row.name + std::string_view(row.name).size(), same))
      return row.type;
  return std::nullopt;
}

std::string optimizer_names() {
  std::string text;
  for (const auto& row : kRows)
    text += (text.empty() ? "" : &row == std::end(kRows) - 1 ? " or " : ", ") + std::string(row.name);
  return text;
}

std::vector<std::string> states_of(const OptimizerSettings& optimizer, bool matrix) {
  if (matrix) return {"momentum_buffer"};
  std::vector<std::string> states;
  switch (optimizer.type) {
    case OptimizerType::None:
    case OptimizerType::Adam:
    case OptimizerType::AdamW:
      states = {"exp_avg", "exp_avg_sq"};
      if (optimizer.amsgrad) states.emplace_back("max_exp_avg_sq");
      break;
    case OptimizerType::NAdam:
    case OptimizerType::RAdam:
    case OptimizerType::Muon:
      states = {"exp_avg", "exp_avg_sq"};
      break;
    case OptimizerType::Sgd:
      if (optimizer.momentum != 0) states = {"momentum_buffer"};
      break;
    case OptimizerType::Adagrad:
      states = {"sum"};
      break;
    case OptimizerType::Lion:
      states = {"exp_avg"};
      break;
    case OptimizerType::RmsProp:
      states = {"square_avg"};
      if (optimizer.momentum != 0) states.emplace_back("momentum_buffer");
      if (optimizer.centered) states.emplace_back("grad_avg");
      break;
    case OptimizerType::Adamax:
      states = {"exp_avg", "exp_inf"};
      break;
    case OptimizerType::Adadelta:
      states = {"square_avg", "acc_delta"};
      break;
  }
  return states;
}

std::vector<std::string> all_states_of(const OptimizerSettings& optimizer) {
  std::vector<std::string> states;
  if (optimizer.type == OptimizerType::Muon) states = states_of(optimizer, true);
  for (auto& state : states_of(optimizer)) states.push_back(std::move(state));
  return states;
}

bool is_muon_matrix(const OptimizerSettings& optimizer, std::string_view name, std::size_t dimensions, bool table) {
  if (optimizer.type != OptimizerType::Muon || dimensions < 2 || table) return false;
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* word : {"embed", "wte", "wpe", "lm_head"})
    if (lower.find(word) != std::string::npos) return false;
  if (lower == "output.weight" || lower == "head.weight") return false;
  return std::none_of(optimizer.adam_parameters.begin(), optimizer.adam_parameters.end(),
                      [&](const std::string& pattern) { return base::pattern_names(pattern, name, {}); });
}

OptimizerSettings default_optimizer(OptimizerType type) {
  OptimizerSettings made;
  made.type = OptimizerType::None;  // a key says which
  for (const auto& row : kRows)
    if (row.type == type) made.lr = row.lr, made.eps = row.eps;
  if (type == OptimizerType::Muon) made.momentum = 0.95, made.nesterov = true, made.beta2 = 0.95;
  return made;
}

}  // namespace zero::config
