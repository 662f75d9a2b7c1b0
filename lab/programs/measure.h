// What overhead_bench and offload_bench share: their options, the model, and timing on a CPU or a GPU.
#pragma once
#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>
#include <zero/library.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "models/gpt.h"

namespace measure {

// Options with their defaults, "--name value", and --json.
class Flags {
 public:
  // The model's, device and recipe options are added to `defaults`.
  Flags(std::string program, std::map<std::string, std::string> defaults, int argc, char** argv)
      : program_(std::move(program)), values_(std::move(defaults)) {
    values_.insert({{"--layers", "8"}, {"--hidden", "512"}, {"--heads", "8"}, {"--vocabulary", "8192"}});
    values_.insert({{"--sequence", "128"}, {"--model", ""}, {"--batch", "1"}, {"--threads", "1"}});
    values_.insert({{"--device", "cpu"}, {"--recipe", "fp32"}, {"--clipping", "0"}, {"--turn", "1"}});
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], "--json") == 0) {
        json = true;
      } else if (values_.count(argv[i]) == 0 || i + 1 == argc) {
        wrong((values_.count(argv[i]) == 0 ? "unknown option " : "no value for ") + std::string(argv[i]));
      } else {
        values_[argv[i]] = argv[i + 1];
        ++i;
      }
    }
    among("--device", {"cpu", "cuda"});
    among("--recipe", {"fp32", "bf16"});
    if (number("--turn") < 1 || number("--steps") < 1) wrong("--steps and --turn have to be at least 1");
  }

  const std::string& text(const char* name) const { return values_.at(name); }
  long long number(const char* name) const { return std::atoll(text(name).c_str()); }
  bool on_gpu() const { return text("--device") == "cuda"; }
  bool bf16() const { return text("--recipe") == "bf16"; }
  bool json = false;

  void among(const char* name, const std::vector<std::string>& names) const {
    if (std::find(names.begin(), names.end(), text(name)) != names.end()) return;
    std::string expected;
    for (const auto& each : names) expected += (expected.empty() ? "" : ", ") + each;
    wrong(std::string(name) + ": got " + text(name) + ", expected one of " + expected);
  }
  [[noreturn]] void wrong(const std::string& what) const {
    std::fprintf(stderr, "%s: %s\n", program_.c_str(), what.c_str());
    std::exit(2);
  }

  models::GptConfig shape() const {
    if (!text("--model").empty()) return models::GptConfig::preset(text("--model"));
    models::GptConfig shape;
    shape.layers = number("--layers");
    shape.hidden = number("--hidden");
    shape.heads = number("--heads");
    shape.vocabulary = number("--vocabulary");
    shape.sequence = number("--sequence");
    return shape;
  }

  c10::Device device(const zero::Communicator& comm) const {
    if (!on_gpu()) return c10::kCPU;
    const auto why = zero::why_no_gpu(comm);
    if (!why.empty()) wrong("--device: got cuda, but " + why);
    return zero::default_device(comm);
  }

  // Of an engine with AdamW; `zero` has the keys of zero_optimization, `more` further keys with leading commas.
  zero::Options options(const std::string& zero, const std::string& more = "") const {
    return zero::Options::from_json(
        R"({"train_micro_batch_size_per_gpu": )" + text("--batch") + R"(, "gradient_clipping": )" + text("--clipping") +
        R"(, "bf16": {"enabled": )" + (bf16() ? "true" : "false") +
        R"(}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}}, "zero_optimization": {)" +
        zero + "}" + more + "}");
  }

  // [batch, time + 1].
  at::Tensor tokens(const models::GptConfig& shape, c10::Device device) const {
    return at::randint(0, shape.vocabulary, {number("--batch"), shape.sequence + 1}, at::kLong).to(device);
  }

 private:
  std::string program_;
  std::map<std::string, std::string> values_;
};

inline at::Tensor loss_of(models::Gpt& net, const at::Tensor& ids) {
  const auto time = ids.size(1) - 1;
  return net->forward(ids.narrow(1, 0, time), ids.narrow(1, 1, time));
}

inline double processor_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

struct Time {
  double elapsed = 0, processor = 0;  // ms of one step
};

// A turn of several steps. A GPU works asynchronously: the turn ends when it has finished.
inline Time timed_turn(c10::Device device, long long steps, const std::function<at::Tensor()>& step,
                       double* loss = nullptr) {
  const auto now = [&] {
    if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
    return std::chrono::steady_clock::now();
  };
  const auto start = now();
  const double processor = processor_ms();
  at::Tensor last;
  for (long long k = 0; k < steps; ++k) last = step();
  const auto each = static_cast<double>(steps);
  const auto elapsed = std::chrono::duration<double, std::milli>(now() - start).count() / each;
  const Time time{elapsed, (processor_ms() - processor) / each};
  if (loss != nullptr) *loss = last.item<double>();
  return time;
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline std::string list_of(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) {
    char number[32];
    std::snprintf(number, sizeof number, "%.4f", value);
    text += (text.empty() ? "" : ", ") + std::string(number);
  }
  return "[" + text + "]";
}

}  // namespace measure
