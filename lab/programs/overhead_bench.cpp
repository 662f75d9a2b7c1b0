// Overhead of the engine at world 1: one training step of the same GPT under the engine (any stage) and in a plain
// libtorch loop with libtorch's fused AdamW, on one device, in turns in one run. With bf16 both keep fp32 masters.
//
// Prints the ratio of the medians, of elapsed time and (for a busy machine) of processor time. On the CPU, in fp32
// and without clipping, the losses of both must be equal at every step. Elsewhere libtorch's kernels round differently,
// and the largest difference is shown.
//
//   overhead_bench [--layers 8] [--hidden 512] [--heads 8] [--vocabulary 8192] [--sequence 128] [--model NAME]
//                  [--batch 1] [--steps 40] [--turn 1] [--threads 1] [--stage 3] [--recipe fp32|bf16] [--clipping 0]
//                  [--device cpu|cuda] [--world 1] [--kernels FILE] [--json]
//
// --world N: the engine is one rank of N whose peers do not exist (zero/fake_communicator.h): what sharding costs a
// rank in addition to communication. Its losses mean nothing then.
// --kernels FILE: then one more turn of the engine under libtorch's profiler, whose trace (Chrome's format) goes to
// FILE: kernels, copies and calls of CUDA on a GPU, operators on the CPU. lab/programs/kernel_list.py reads it.
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cmath>

#include <zero/fake_communicator.h>

#include "measure.h"

namespace {

constexpr int kWarmup = 3;
constexpr double kRate = 3e-4, kBeta1 = 0.9, kBeta2 = 0.999, kDecay = 0.01, kEpsilon = 1e-8;

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
    auto loss = measure::loss_of(net, ids);
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

// JSON has no infinity; losses of a rank without peers mean nothing anyway.
std::string difference_text(double difference) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", difference);
  return std::isfinite(difference) ? text : "null";
}

// The trace of one turn. Throws what libtorch throws where it has no profiler or cannot write the file.
void trace_turn(c10::Device device, long long steps, const std::function<at::Tensor()>& step, const std::string& file) {
  namespace profiler = torch::autograd::profiler;
  namespace impl = torch::profiler::impl;
  const std::set<impl::ActivityType> activities{device.is_cpu() ? impl::ActivityType::CPU : impl::ActivityType::CUDA};
  const impl::ProfilerConfig config(impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  measure::timed_turn(device, 1, step);  // the profiler's own first costs
  profiler::enableProfiler(config, activities);
  measure::timed_turn(device, steps, step);
  const auto result = profiler::disableProfiler();
  std::remove(file.c_str());
  result->save(file);
  // The profiler only logs that it could not write.
  if (std::FILE* written = std::fopen(file.c_str(), "r"))
    std::fclose(written);
  else
    throw std::runtime_error("the profiler wrote no " + file);
}

}  // namespace

int main(int argc, char** argv) {
  const measure::Flags flag("overhead_bench",
                            {{"--steps", "40"}, {"--stage", "3"}, {"--world", "1"}, {"--kernels", ""}}, argc, argv);
  const double clipping = std::atof(flag.text("--clipping").c_str());
  const auto steps = flag.number("--steps"), per_turn = flag.number("--turn");
  const auto world = static_cast<int>(flag.number("--world"));
  const auto comm = world == 1 ? zero::Communicator::local() : zero::fake_communicator(0, world);
  const auto device = flag.device(*comm);
  at::set_num_threads(static_cast<int>(flag.number("--threads")));
  const auto shape = flag.shape();
  models::Gpt first(shape), net(shape);
  {
    torch::NoGradGuard no_grad;
    const auto from = first->parameters();
    const auto to = net->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  first->to(device, flag.bf16() ? at::kBFloat16 : at::kFloat);
  net->to(device);
  Plain plain(first, clipping);
  zero::Engine engine(net, flag.options(R"("stage": )" + flag.text("--stage")), comm);
  std::vector<double> ours, theirs, ratios, our_processor, their_processor;
  double difference = 0, first_difference = -1;
  const auto engine_step = [&](const at::Tensor& ids) {
    auto loss = measure::loss_of(net, ids);
    engine.backward(loss);
    engine.step();
    return loss.detach();
  };
  const auto timed = [&](const std::function<at::Tensor()>& step, double* loss) {
    return measure::timed_turn(device, per_turn, step, loss);
  };
  for (int k = 0; k < steps + kWarmup; ++k) {
    const auto ids = flag.tokens(shape, device);
    double a = 0, b = 0;
    measure::Time t[2];
    const auto with = [&] { t[0] = timed([&] { return engine_step(ids); }, &a); };
    const auto without = [&] { t[1] = timed([&] { return plain.step(ids); }, &b); };
    // Alternating the order cancels drifts of the machine.
    if (k % 2 == 0)
      with(), without();
    else
      without(), with();
    difference = std::max(difference, std::isfinite(a - b) ? std::abs(a - b) : HUGE_VAL);
    if (first_difference < 0) first_difference = difference;
    if (k < kWarmup) continue;
    ours.push_back(t[0].elapsed);
    theirs.push_back(t[1].elapsed);
    ratios.push_back(t[0].elapsed / t[1].elapsed);
    our_processor.push_back(t[0].processor);
    their_processor.push_back(t[1].processor);
  }
  using measure::median;
  const double engine_ms = median(ours), plain_ms = median(theirs);
  const double processor_ratio = median(our_processor) / median(their_processor);
  if (flag.json) {
    std::printf(
        "{\"schema\": \"zero.bench.overhead/2\", \"device\": \"%s\", \"recipe\": \"%s\", \"stage\": %lld, "
        "\"world\": %d, \"parameters_elements\": %lld, \"steps\": %zu, \"steps_per_turn\": %lld, \"threads\": %lld, "
        "\"engine_ms\": %.3f, \"plain_ms\": %.3f, \"ratio_of_medians\": %.4f, \"median_of_ratios\": %.4f, "
        "\"ratios\": %s, \"ratio_of_processor_medians\": %.4f, \"processor_ms\": [%.3f, %.3f], "
        "\"largest_difference_of_losses\": %s, \"first_difference_of_losses\": %s}\n",
        flag.text("--device").c_str(), flag.text("--recipe").c_str(), flag.number("--stage"), world,
        static_cast<long long>(shape.num_parameters()), ours.size(), per_turn, flag.number("--threads"), engine_ms,
        plain_ms, engine_ms / plain_ms, median(ratios), measure::list_of(ratios).c_str(), processor_ratio,
        median(our_processor), median(their_processor), difference_text(difference).c_str(),
        difference_text(first_difference).c_str());
  } else {
    std::printf("%s, %s, stage %lld, world %d, %zu turns of %lld steps, %lld threads\n", flag.text("--device").c_str(),
                flag.text("--recipe").c_str(), flag.number("--stage"), world, ours.size(), per_turn,
                flag.number("--threads"));
    std::printf("engine  %8.2f ms median\nplain   %8.2f ms median\n", engine_ms, plain_ms);
    std::printf("ratio   %8.4f of medians, %.4f median of the ratios, %.4f of processor time\n", engine_ms / plain_ms,
                median(ratios), processor_ratio);
    std::printf("losses  differ by up to %g, at first by %g\n", difference, first_difference);
  }
  if (const auto& file = flag.text("--kernels"); !file.empty()) {
    try {
      const auto ids = flag.tokens(shape, device);
      trace_turn(
          device, per_turn, [&] { return engine_step(ids); }, file);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "overhead_bench: --kernels: %s\n", error.what());
      return 1;
    }
  }
  const bool equal_rounding = world == 1 && !flag.on_gpu() && !flag.bf16() && clipping == 0;
  if (!equal_rounding || difference == 0) return 0;
  std::fprintf(stderr, "overhead_bench: losses differ by up to %g\n", difference);
  return 1;
}
