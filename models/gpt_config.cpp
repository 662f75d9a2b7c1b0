// See gpt_config.h.
#include "models/gpt_config.h"

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace models {
namespace {

struct Preset {
  const char* name;
  GptConfig config;
};

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"gpt-1m", {.layers = 4, .hidden = 144, .heads = 4, .sequence = 128, .vocabulary = 256}},
      {"gpt-10m", {.layers = 6, .hidden = 368, .heads = 8, .sequence = 256, .vocabulary = 256}},
      {"gpt2", {.layers = 12, .hidden = 768, .heads = 12, .sequence = 1024, .vocabulary = 50257}},
      {"gpt2-small", {.layers = 12, .hidden = 768, .heads = 12, .sequence = 1024, .vocabulary = 50257}},
      {"gpt2-medium", {.layers = 24, .hidden = 1024, .heads = 16, .sequence = 1024, .vocabulary = 50257}},
      {"gpt2-large", {.layers = 36, .hidden = 1280, .heads = 20, .sequence = 1024, .vocabulary = 50257}},
      {"gpt2-xl", {.layers = 48, .hidden = 1600, .heads = 25, .sequence = 1024, .vocabulary = 50257}},
  };
  return all;
}

// Elements of all parameters, as int64 or, where they may not fit that, as double.
template <class T>
T parameters_of(const GptConfig& c) {
  const T hidden = c.hidden, block = 12 * hidden * hidden + 13 * hidden;
  return (c.tied_output ? 1 : 2) * c.vocabulary * hidden + c.sequence * hidden + c.layers * block + 2 * hidden;
}

}  // namespace

GptConfig GptConfig::preset(const std::string& name) {
  for (const Preset& preset : presets())
    if (name == preset.name) return preset.config;
  std::string names;
  for (const std::string& known : preset_names()) names += (names.empty() ? "" : ", ") + known;
  throw std::invalid_argument("[GptConfig::preset] got \"" + name + "\", expected one of " + names);
}

std::vector<std::string> GptConfig::preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

std::int64_t GptConfig::num_parameters() const { return parameters_of<std::int64_t>(*this); }

void GptConfig::validate() const {
  const auto check = [](bool good, const std::string& field, const std::string& got, const char* expected) {
    if (!good) throw std::invalid_argument("[GptConfig] got " + field + " " + got + ", expected " + expected);
  };
  for (const auto& [field, got] : std::initializer_list<std::pair<const char*, std::int64_t>>{
           {"layers", layers}, {"hidden", hidden}, {"sequence", sequence}, {"vocabulary", vocabulary}})
    check(got <= std::int64_t{1} << 31, field, std::to_string(got), "at most 2^31");
  check(layers >= 1, "layers", std::to_string(layers), "at least 1");
  check(hidden >= 1, "hidden", std::to_string(hidden), "at least 1");
  check(heads >= 1 && hidden % heads == 0, "heads", std::to_string(heads),
        ("a divisor of hidden = " + std::to_string(hidden)).c_str());
  check(sequence >= 1, "sequence", std::to_string(sequence), "at least 1");
  check(vocabulary >= 2, "vocabulary", std::to_string(vocabulary), "at least 2");
  check(parameters_of<double>(*this) <= 0x1p56, "parameters", std::to_string(parameters_of<double>(*this)),
        "at most 2^56, so that sizes in bytes fit 64 bits");
  check(dropout >= 0 && dropout < 1, "dropout", std::to_string(dropout), "from 0 up to but without 1");
  check(deviation > 0 && deviation < 1e30, "deviation", std::to_string(deviation), "a positive number");
}

}  // namespace models
