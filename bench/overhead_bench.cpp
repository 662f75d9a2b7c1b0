// Overhead of the engine at world 1: one training step of the same GPT under the engine (any stage) and in a plain
// libtorch loop with libtorch's fused AdamW, on one device, in turns in one run. With bf16 both keep fp32 masters.
//
// Prints the ratio of the medians, of elapsed time and (for a busy machine) of processor time. On the CPU, in fp32
// and without clipping, the losses of both must be equal at every step. Elsewhere libtorch's kernels round differently,
// and the largest difference is shown.
//
//   overhead_bench [--layers 8] [--hidden 512] [--heads 8] [--vocabulary 8192] [--sequence 128] [--model NAME]
//                  [--batch 1] [--steps 40] [--turn 1] [--threads 1] [--stage 3] [--recipe fp32|bf16] [--clipping 0]
//                  [--device cpu|cuda] [--json]
#include <ATen/DeviceAccelerator.h>
#include <torch/torch.h>
#include <zero/zero.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "models/gpt.h"

namespace {

constexpr int kWarmup = 3;
constexpr double kRate = 3e-4, kBeta1 = 0.9, kBeta2 = 0.999, kDecay = 0.01, kEpsilon = 1e-8;

// ids: [batch, time + 1].
at::Tensor loss_of(models::Gpt& net, const at::Tensor& ids) {
  const auto time = ids.size(1) - 1;
  return net->forward(ids.narrow(1, 0, time), ids.narrow(1, 1, time));
}

// The loop that a user of libtorch writes, with its functions for many tensors.
struct Plain {
  models::Gpt net;
  double clipping;
  std::vector<at::Tensor> parameters, data, masters, grads, exp_avg, exp_avg_sq, counts;
  Plain(models::Gpt n, double clip) : net(std::move(n)), clipping(clip), parameters(net->parameters()) {
    for (auto& p : parameters) {
      data.push_back(p.detach());
      masters.push_back(p.scalar_type() == at::kFloat ? data.back() : data.back().to(at::kFloat));
      exp_avg.push_back(at::zeros_like(masters.back()));
      exp_avg_sq.push_back(at::zeros_like(masters.back()));
      counts.push_back(at::zeros({}, masters.back().options()));
      if (has_masters()) grads.push_back(at::empty_like(masters.back()));
    }
  }
  bool has_masters() const { return parameters[0].scalar_type() != at::kFloat; }
  at::Tensor step(const at::Tensor& ids) {
    auto loss = loss_of(net, ids);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> raw;
    for (auto& p : parameters) raw.push_back(p.grad());
    if (has_masters())
      at::_foreach_copy_(grads, raw);
    else
      grads = raw;
    if (clipping > 0) {
      const auto norm = at::stack(at::_foreach_norm(grads)).norm();
      at::_foreach_mul_(grads, (clipping / (norm + 1e-6)).clamp_max(1.0));
    }
    at::_foreach_add_(counts, 1);
    at::_fused_adamw_(masters, grads, exp_avg, exp_avg_sq, {}, counts, kRate, kBeta1, kBeta2, kDecay, kEpsilon, false,
                      false);
    if (has_masters()) at::_foreach_copy_(data, masters);
    for (auto& p : parameters) p.mutable_grad() = at::Tensor();
    return loss.detach();
  }
};

double processor_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

[[noreturn]] void wrong(const std::string& text) {
  std::fprintf(stderr, "overhead_bench: %s\n", text.c_str());
  std::exit(2);
}

std::string list_of(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) {
    char number[32];
    std::snprintf(number, sizeof number, "%.4f", value);
    text += (text.empty() ? "" : ", ") + std::string(number);
  }
  return "[" + text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> flag{
      {"--layers", "8"},       {"--hidden", "512"}, {"--heads", "8"},    {"--vocabulary", "8192"}, {"--sequence", "128"},
      {"--model", ""},         {"--batch", "1"},    {"--steps", "40"},   {"--turn", "1"},          {"--threads", "1"},
      {"--stage", "3"},        {"--recipe", "fp32"}, {"--clipping", "0"}, {"--device", "cpu"}};
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else if (flag.count(argv[i]) == 0 || i + 1 == argc) {
      wrong((flag.count(argv[i]) == 0 ? "unknown option " : "no value for ") + std::string(argv[i]));
    } else {
      flag[argv[i]] = argv[i + 1];
      ++i;
    }
  }
  const auto number = [&](const char* name) { return std::atoll(flag[name].c_str()); };
  const auto steps = number("--steps"), per_turn = number("--turn");
  if (steps < 1 || per_turn < 1) wrong("--steps and --turn have to be at least 1");
  const bool on_gpu = flag["--device"] == "cuda", bf16 = flag["--recipe"] == "bf16";
  if (!on_gpu && flag["--device"] != "cpu") wrong("--device: got " + flag["--device"] + ", expected cpu or cuda");
  if (!bf16 && flag["--recipe"] != "fp32") wrong("--recipe: got " + flag["--recipe"] + ", expected fp32 or bf16");
  const double clipping = std::atof(flag["--clipping"].c_str());
  const auto comm = zero::Communicator::local();
  if (on_gpu && !zero::why_no_gpu(*comm).empty()) wrong("--device: got cuda, but " + zero::why_no_gpu(*comm));
  const c10::Device device = on_gpu ? zero::default_device(*comm) : c10::Device(c10::kCPU);
  at::set_num_threads(static_cast<int>(number("--threads")));
  models::GptConfig shape;
  if (!flag["--model"].empty()) {
    shape = models::GptConfig::preset(flag["--model"]);
  } else {
    shape.layers = number("--layers");
    shape.hidden = number("--hidden");
    shape.heads = number("--heads");
    shape.vocabulary = number("--vocabulary");
    shape.sequence = number("--sequence");
  }
  models::Gpt first(shape), net(shape);
  {
    torch::NoGradGuard no_grad;
    const auto from = first->parameters();
    const auto to = net->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  first->to(device, bf16 ? at::kBFloat16 : at::kFloat);
  net->to(device);
  Plain plain(first, clipping);
  const auto options = zero::Options::from_json(
      R"({"train_micro_batch_size_per_gpu": )" + flag["--batch"] + R"(, "gradient_clipping": )" + flag["--clipping"] +
      R"(, "bf16": {"enabled": )" + (bf16 ? "true" : "false") +
      R"(}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
          "zero_optimization": {"stage": )" + flag["--stage"] + "}}");
  zero::Engine engine(net, options, comm);
  std::vector<double> ours, theirs, ratios, our_processor, their_processor;
  double difference = 0;
  struct Time {
    double elapsed, processor;
  };
  // A GPU works asynchronously: a turn ends when it has finished.
  const auto now = [&] {
    if (on_gpu) at::accelerator::synchronizeDevice(device.index());
    return std::chrono::steady_clock::now();
  };
  const auto timed = [&](const std::function<at::Tensor()>& fn, double* loss) -> Time {
    const auto start = now();
    const double processor = processor_ms();
    at::Tensor last;
    for (std::int64_t k = 0; k < per_turn; ++k) last = fn();
    const auto each = static_cast<double>(per_turn);
    const auto elapsed = std::chrono::duration<double, std::milli>(now() - start).count() / each;
    *loss = last.item<double>();
    return {elapsed, (processor_ms() - processor) / each};
  };
  for (int k = 0; k < steps + kWarmup; ++k) {
    const auto ids = at::randint(0, shape.vocabulary, {number("--batch"), shape.sequence + 1}, at::kLong).to(device);
    double a = 0, b = 0;
    Time t[2];
    const auto with = [&] {
      t[0] = timed(
          [&] {
            auto loss = loss_of(net, ids);
            engine.backward(loss);
            engine.step();
            return loss.detach();
          },
          &a);
    };
    const auto without = [&] { t[1] = timed([&] { return plain.step(ids); }, &b); };
    // Alternating the order cancels drifts of the machine.
    if (k % 2 == 0)
      with(), without();
    else
      without(), with();
    difference = std::max(difference, std::isfinite(a - b) ? std::abs(a - b) : HUGE_VAL);
    if (k < kWarmup) continue;
    ours.push_back(t[0].elapsed);
    theirs.push_back(t[1].elapsed);
    ratios.push_back(t[0].elapsed / t[1].elapsed);
    our_processor.push_back(t[0].processor);
    their_processor.push_back(t[1].processor);
  }
  const double engine_ms = median(ours), plain_ms = median(theirs);
  const double processor_ratio = median(our_processor) / median(their_processor);
  if (json) {
    std::printf(
        "{\"schema\": \"zero.bench.overhead/2\", \"device\": \"%s\", \"recipe\": \"%s\", \"stage\": %lld, "
        "\"parameters_elements\": %lld, \"steps\": %zu, \"steps_per_turn\": %lld, \"threads\": %lld, "
        "\"engine_ms\": %.3f, \"plain_ms\": %.3f, \"ratio_of_medians\": %.4f, \"median_of_ratios\": %.4f, "
        "\"ratios\": %s, \"ratio_of_processor_medians\": %.4f, \"processor_ms\": [%.3f, %.3f], "
        "\"largest_difference_of_losses\": %.9g}\n",
        flag["--device"].c_str(), flag["--recipe"].c_str(), number("--stage"),
        static_cast<long long>(shape.num_parameters()), ours.size(), per_turn, number("--threads"), engine_ms, plain_ms,
        engine_ms / plain_ms, median(ratios), list_of(ratios).c_str(), processor_ratio, median(our_processor),
        median(their_processor), difference);
  } else {
    std::printf("%s, %s, stage %lld, world 1, %zu turns of %lld steps, %lld threads\n", flag["--device"].c_str(),
                flag["--recipe"].c_str(), number("--stage"), ours.size(), per_turn, number("--threads"));
    std::printf("engine  %8.2f ms median\nplain   %8.2f ms median\n", engine_ms, plain_ms);
    std::printf("ratio   %8.4f of medians, %.4f median of the ratios, %.4f of processor time\n", engine_ms / plain_ms,
                median(ratios), processor_ratio);
    std::printf("losses  differ by up to %g\n", difference);
  }
  const bool equal_rounding = !on_gpu && !bf16 && clipping == 0;
  if (!equal_rounding || difference == 0) return 0;
  std::fprintf(stderr, "overhead_bench: losses differ by up to %g\n", difference);
  return 1;
}
