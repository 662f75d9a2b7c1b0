// Computes the constants of one update from settings, schedule and count, and divides ranges among threads. The element
// arithmetic is in update_simd.cpp.
#include "optim/sharded_optimizer.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/name_pattern.h"
#include "config/optimizers.h"
#include "kernels/blocks8.h"

namespace zero::optim {
namespace {

using config::OptimizerType;

std::vector<double> base_rates(double lr, const std::vector<config::ParameterGroup>& groups) {
  std::vector<double> rates{lr};
  for (const auto& group : groups) rates.push_back(group.lr.value_or(lr));
  return rates;
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(const config::OptimizerSettings& optimizer, const config::ScheduleSettings& schedule,
                                   const std::vector<config::ParameterGroup>& groups,
                                   std::optional<ProgramRule> program)
    : settings_(optimizer),
      program_(std::move(program)),
      states_(program_ ? program_->states : config::all_states_of(optimizer)),
      slots_(program_ ? std::vector<std::string>() : config::states_of(optimizer)),
      groups_{{"", optimizer}},
      schedule_(schedule, base_rates(program_ ? program_->lr : optimizer.lr, groups)) {
  if (program_ && settings_.type != OptimizerType::None)
    throw ConfigError(base::join("[Engine] got an optimizer of the program, ", program_->name,
                                 ", and optimizer.type in the configuration, expected one of them. Hint: leave the "
                                 "block optimizer out."));
  if (!program_ && settings_.type == OptimizerType::None)
    throw ConfigError(base::join("[ShardedOptimizer] got no optimizer type, expected ", config::optimizer_names(),
                                 ". Hint: set optimizer.type in the configuration."));
  for (const auto& group : groups) {
    if (group.lr && !schedule_.uses_base_lr())
      throw ConfigError(
          base::join("[ShardedOptimizer] got lr ", *group.lr, " for the parameter group '", group.pattern,
                     "', expected none: the scheduler sets the rates of all groups. Hint: give the scheduler's "
                     "rate as a list with one entry per group, the unnamed group first."));
    groups_.push_back({group.pattern, optimizer, group.lr.has_value()});
    groups_.back().settings.weight_decay = group.weight_decay.value_or(optimizer.weight_decay);
  }
  if (settings_.type == OptimizerType::NAdam && schedule_.momentum(0, 0))
    throw ConfigError(
        "[ShardedOptimizer] got scheduler.params.cycle_momentum true with NAdam, whose update depends on the first "
        "betas "
        "of all updates before, expected false. Hint: cycle_momentum false.");
  set_rates_.assign(groups_.size(), -1.0);
}

kernels::Rule ShardedOptimizer::rule() const {
  using kernels::Rule;
  const auto& own = settings_;
  switch (own.type) {
    case OptimizerType::Adam:
    case OptimizerType::AdamW:
      if (own.type == OptimizerType::AdamW || own.adam_w_mode)
        return own.amsgrad ? Rule::AmsgradDecoupled : Rule::AdamDecoupled;
      return own.amsgrad ? Rule::AmsgradL2 : Rule::AdamL2;
    case OptimizerType::Sgd:
      return own.momentum != 0 ? Rule::SgdMomentum : Rule::Sgd;
    case OptimizerType::Adagrad:
      return Rule::Adagrad;
    case OptimizerType::Lion:
      return Rule::Lion;
    case OptimizerType::RmsProp:
      if (own.centered) return own.momentum != 0 ? Rule::RmsPropCenteredMomentum : Rule::RmsPropCentered;
      return own.momentum != 0 ? Rule::RmsPropMomentum : Rule::RmsProp;
    case OptimizerType::NAdam:
      return Rule::NAdam;
    case OptimizerType::RAdam:
      return Rule::RAdam;
    case OptimizerType::Adamax:
      return Rule::Adamax;
    case OptimizerType::Adadelta:
      return Rule::Adadelta;
    case OptimizerType::Muon:
      return Rule::AdamDecoupled;
    case OptimizerType::None:
      break;
  }
  ZERO_CHECK(false, "[ShardedOptimizer] got no optimizer type");
  return Rule::Sgd;
}

std::string ShardedOptimizer::name() const { return program_ ? program_->name : config::name_of(settings_.type); }

const char* ShardedOptimizer::slot_name(int slot) const {
  ZERO_CHECK(slot >= 0 && slot < num_slots(), "[ShardedOptimizer::slot_name] got ", slot, ", expected below ",
             num_slots());
  return slots_[static_cast<std::size_t>(slot)].c_str();
}

float ShardedOptimizer::slot_initial_value() const {
  return settings_.type == OptimizerType::Adagrad ? static_cast<float>(settings_.initial_accumulator_value) : 0.0f;
}

int ShardedOptimizer::parameter_group_of(std::string_view name, const std::vector<std::string>& aliases) const {
  for (std::size_t g = 1; g < groups_.size(); ++g)
    if (base::pattern_names(groups_[g].pattern, name, aliases)) return static_cast<int>(g);
  return 0;
}

double ShardedOptimizer::lr(int group) const {
  ZERO_CHECK(group >= 0 && group < num_parameter_groups(), "[ShardedOptimizer::lr] got group ", group,
             ", expected below ", num_parameter_groups());
  const double set = set_rates_[static_cast<std::size_t>(group)];
  return set >= 0 ? set : schedule_.rate(group, schedule_.index(applied_));
}

void ShardedOptimizer::set_lr(int group, double lr) {
  const auto expect = [&](bool condition, const std::string& what) {
    if (!condition) throw ConfigError("[Engine::set_lr] " + what);
  };
  expect(group >= 0 && group < num_parameter_groups(),
         base::join("got parameter group ", group, ", expected 0 to ", num_parameter_groups() - 1,
                    ". Hint: 0 holds what no pattern of libzero.parameter_groups matches, 1 the first pattern's."));
  expect(std::isfinite(lr) && lr >= 0, base::join("got the rate ", lr, ", expected a finite number of at least 0"));
  expect(schedule_.constant(),
         "got a rate, but the configuration's scheduler sets the rates. Hint: leave the block scheduler out.");
  set_rates_[static_cast<std::size_t>(group)] = lr;
}

void ShardedOptimizer::set_number(int group, const std::string& name, double value) {
  const auto expect = [&](bool condition, const auto&... what) {
    if (!condition) throw ConfigError(base::join("[Engine] ", name, ": ", what...));
  };
  expect(group >= 0 && group < num_parameter_groups(), "got parameter group ", group, ", expected 0 to ",
         num_parameter_groups() - 1);
  auto& own = groups_[static_cast<std::size_t>(group)].settings;
  double* const number = name == "beta1"          ? &own.beta1
                         : name == "beta2"        ? &own.beta2
                         : name == "eps"          ? &own.eps
                         : name == "weight_decay" ? &own.weight_decay
                         : name == "momentum"     ? &own.momentum
                         : name == "dampening"    ? &own.dampening
                         : name == "lr_decay"     ? &own.lr_decay
                         : name == "alpha"        ? &own.alpha
                         : name == "rho"          ? &own.rho
                                                  : nullptr;
  expect(
      !program_ && number != nullptr,
      "got a name that no rule has, expected beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, alpha or "
      "rho");
  expect(settings_.type != OptimizerType::NAdam || name != "beta1" || value == own.beta1, "got ", value, ", expected ",
         own.beta1, ": NAdam's update depends on the first betas of all updates before");
  const bool fraction = name == "beta1" || name == "beta2" || name == "alpha" || name == "rho";
  expect(std::isfinite(value) && value >= 0 && (!fraction || value < 1), "got ", value, ", expected ",
         fraction ? "0 or more and less than 1" : "a finite number of at least 0");
  expect(name != "momentum" || settings_.momentum != 0 || value == 0, "got ", value,
         ", expected 0: the rule has no momentum. Hint: begin with a momentum above 0.");
  *number = value;
  set_numbers_[{group, name}] = value;
}

std::string ShardedOptimizer::set_numbers() const {
  std::string text;
  for (const auto& [which, value] : set_numbers_) text += base::join(which.first, which.second, value, ";");
  return text;
}

void ShardedOptimizer::check_rates(const std::vector<double>& rates) const {
  if (!rates.empty() && rates.size() != groups_.size())
    throw ConfigError(base::join("[load_checkpoint] got rates that the program set for ", rates.size(),
                                 " parameter groups, expected ", groups_.size(),
                                 ". Hint: libzero.parameter_groups has changed since the checkpoint was saved."),
                      ExitCode::kCheckpoint);
}

void ShardedOptimizer::restore_rates(std::vector<double> rates) {
  check_rates(rates);
  if (rates.empty()) rates.assign(groups_.size(), -1.0);
  set_rates_ = std::move(rates);
}

namespace {

// NAdam's first beta of update `count`.
double mu_of(const config::OptimizerSettings& own, double count) {
  return own.beta1 * (1 - 0.5 * std::pow(0.96, count * own.momentum_decay));
}

}  // namespace

kernels::UpdateConstants ShardedOptimizer::constants_of(int group, std::int64_t missed_steps) const {
  const auto narrow = [](double value) { return static_cast<float>(value); };
  const auto& own = settings_of(group);
  // Muon: of its parameters that are no matrices.
  const bool in_proportion = own.type == OptimizerType::Muon && !groups_[static_cast<std::size_t>(group)].has_rate;
  const double rate = lr(group) * (in_proportion ? own.adam_lr / own.lr : 1), decay = own.weight_decay;
  const double beta1 = schedule_.momentum(group, schedule_.index(applied_)).value_or(own.beta1), beta2 = own.beta2;
  const auto updates = applied_ + 1 - missed_steps;  // updates of these elements, including this one
  const auto count = static_cast<double>(updates);
  kernels::UpdateConstants c{};
  c.rule = rule();
  c.has_weight_decay = decay != 0;
  c.decoupled = own.decoupled_weight_decay;
  c.weight_decay = narrow(decay);
  c.keep = narrow(1 - rate * decay);
  c.beta1 = narrow(beta1);
  c.beta2 = narrow(beta2);
  c.new1 = narrow(1 - beta1);
  c.new2 = narrow(1 - beta2);
  c.eps = narrow(own.eps);
  c.first = updates == 1;
  c.nesterov = own.nesterov;
  c.momentum = narrow(own.momentum);
  c.undamped = narrow(1 - own.dampening);
  c.negative_step = narrow(-rate);
  const double correction1 = 1 - std::pow(beta1, count), correction2 = 1 - std::pow(beta2, count);
  switch (own.type) {
    case OptimizerType::Adam:
    case OptimizerType::AdamW:
    case OptimizerType::Muon:
      c.root2 = narrow(own.bias_correction ? std::sqrt(correction2) : 1);
      c.negative_step = narrow(-(rate / (own.bias_correction ? correction1 : 1)));
      break;
    case OptimizerType::Adagrad:
      c.negative_step = narrow(-(rate / (1 + (count - 1) * own.lr_decay)));
      break;
    case OptimizerType::RmsProp:
      c.beta2 = narrow(own.alpha), c.new2 = narrow(1 - own.alpha);
      break;
    case OptimizerType::Adadelta:
      c.beta2 = narrow(own.rho), c.new2 = narrow(1 - own.rho);
      break;
    case OptimizerType::Adamax:
      c.negative_step = narrow(-(rate / correction1));
      break;
    case OptimizerType::NAdam: {
      const double product = mu_product(group, updates);
      const double mu = mu_of(own, count), next = mu_of(own, count + 1);
      c.correction2 = narrow(correction2);
      c.negative_step = narrow(-(rate * (1 - mu) / (1 - product)));
      c.moment_step = narrow(-(rate * next / (1 - product * next)));
      break;
    }
    case OptimizerType::RAdam: {
      const double longest = 2 / (1 - beta2) - 1, length = longest - 2 * count * (1 - correction2) / correction2;
      c.adaptive = length > 5;
      const double rectify =
          std::sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
      c.negative_step = narrow(-(rate / correction1 * (c.adaptive ? rectify * std::sqrt(correction2) : 1)));
      break;
    }
    case OptimizerType::Sgd:
    case OptimizerType::Lion:
    case OptimizerType::None:
      break;
  }
  return c;
}

// Dozat, ICLR 2016 workshop: the product of the first betas of all updates.
double ShardedOptimizer::mu_product(int group, std::int64_t updates) const {
  auto& known = mu_products_[group];
  if (updates < known.updates) known = {};
  for (; known.updates < updates; ++known.updates)
    known.product *= mu_of(settings_of(group), static_cast<double>(known.updates + 1));
  return known.product;
}

void ShardedOptimizer::begin_step() {
  constants_.clear();
  for (int group = 0; !program_ && group < num_parameter_groups(); ++group)
    constants_.push_back(constants_of(group, 0));
  noted_.clear();  // of a step that failed
  in_step_ = true;
}

Span Span::from(std::int64_t at) const {
  const auto moved = [&](void* data, kernels::Dtype dtype) -> void* {
    return data == nullptr ? nullptr : static_cast<char*>(data) + at * static_cast<std::int64_t>(size_of(dtype));
  };
  Span rest = *this;
  rest.master = moved(master, master_dtype);
  ZERO_CHECK(!slots_in_blocks || at % kernels::kStateBlock == 0, "[Span] got element ", at, " of states in blocks");
  for (auto& slot : rest.slots) {
    if (slots_in_blocks && slot != nullptr)
      slot = static_cast<char*>(slot) + kernels::state_block_bytes(at);
    else
      slot = moved(slot, slot_dtype);
  }
  rest.gradient = moved(const_cast<void*>(gradient), gradient_dtype);  // only read
  rest.parameter = moved(parameter, parameter_dtype);
  rest.parameter_begin += at;
  rest.numel -= at;
  return rest;
}

kernels::UpdateRange ShardedOptimizer::range_of(const Span& span) const {
  bool complete = span.master != nullptr && span.gradient != nullptr;
  for (int slot = 0; slot < num_slots(); ++slot) complete = complete && span.slots[slot] != nullptr;
  ZERO_CHECK(complete, "[ShardedOptimizer::update] got a null pointer for ", span.numel, " elements");
  const bool copies = span.parameter != span.master;
  ZERO_CHECK(copies || span.parameter_dtype == span.master_dtype,
             "[ShardedOptimizer::update] got a copy over its own master in another dtype");
  kernels::UpdateRange range{.master = span.master,
                             .slots = {},
                             .gradient = span.gradient,
                             .gradient_dtype = span.gradient_dtype,
                             .parameter = copies ? span.parameter : nullptr,
                             .parameter_dtype = span.parameter_dtype,
                             .master_dtype = span.master_dtype,
                             .slot_dtype = num_slots() > 0 ? span.slot_dtype : kernels::Dtype::F32,
                             .slots_in_blocks = num_slots() > 0 && span.slots_in_blocks};
  for (int slot = 0; slot < num_slots(); ++slot) range.slots[slot] = span.slots[slot];
  if (seed_ && !range.is_fp32()) {
    range.key = kernels::rounding_key(*seed_, applied_ + 1, span.parameter_hash);
    range.first_element = span.parameter_begin;
  }
  return range;
}

void ShardedOptimizer::update(std::span<const Span> spans, std::optional<float> factor) {
  ZERO_CHECK(in_step_, "[ShardedOptimizer::update] got a span outside begin_step and end_step");
  for (const auto& span : spans) {
    ZERO_CHECK(span.parameter_group >= 0 && span.parameter_group < num_parameter_groups(),
               "[ShardedOptimizer::update] got parameter group ", span.parameter_group, ", expected below ",
               num_parameter_groups());
    ZERO_CHECK(span.numel >= 0, "[ShardedOptimizer::update] got ", span.numel, " elements, expected 0 or more");
  }
  ZERO_CHECK(factor.has_value() || ranges_update_, "[ShardedOptimizer::update] got no factor for host memory");
  for (const auto& span : spans) {
    if (span.numel == 0) continue;
    const auto range = range_of(span);
    if (ranges_update_) {
      noted_[{span.parameter_group, span.missed_steps}].push_back({range, span.numel});
      noted_factor_ = factor;
      continue;
    }
    const auto constants = constants_in_step(span.parameter_group, span.missed_steps);
    kernels::parallel_ranges(span.numel, [&](std::int64_t begin, std::int64_t end) {
      kernels::update_range(constants, range, *factor, begin, end);
    });
  }
}

void ShardedOptimizer::complete_updates() {
  for (const auto& [which, ranges] : std::exchange(noted_, {}))
    ranges_update_(constants_in_step(which.first, which.second), noted_factor_, ranges);
}

void ShardedOptimizer::end_step() {
  ZERO_CHECK(in_step_, "[ShardedOptimizer::end_step] got no begin_step before it");
  ZERO_CHECK(noted_.empty(), "[ShardedOptimizer::end_step] got no complete_updates before it");
  ++applied_;
  in_step_ = false;
}

void ShardedOptimizer::cancel_step() { in_step_ = false; }

void ShardedOptimizer::set_applied_steps(std::int64_t applied) {
  if (applied < 0)
    throw ConfigError(base::join("[ShardedOptimizer::set_applied_steps] got ", applied,
                                 ", expected 0 or more. Hint: the checkpoint is damaged; load an older one."),
                      ExitCode::kCheckpoint);
  applied_ = applied;
  in_step_ = false;
}

}  // namespace zero::optim
