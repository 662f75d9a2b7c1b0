// Overhead of the engine at world 1: one training step of the same GPT under the engine (any stage)
// and in a plain libtorch loop with libtorch's fused AdamW, with the same threads, interleaved in one run.
//
// Prints the ratio of the medians, of elapsed time and (for a busy machine) of processor time; the losses of both must
// be equal at every step.
//
//   overhead_bench [--layers 8] [--hidden 512] [--batch 1] [--steps 40] [--threads 1] [--stage 3] [--json]
#include <torch/torch.h>
#include <zero/zero.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "models/gpt.h"

namespace {
// ids: [batch, time + 1].
at::Tensor loss_of(models::Gpt& net, const at::Tensor& ids) {
  const auto time = ids.size(1) - 1;
  return net->forward(ids.narrow(1, 0, time), ids.narrow(1, 1, time));
}

struct Plain {
  models::Gpt net;
  std::vector<at::Tensor> data, exp_avg, exp_avg_sq, counts;
  std::vector<at::Tensor> parameters;
  explicit Plain(models::Gpt n) : net(std::move(n)), parameters(net->parameters()) {
    for (auto& p : parameters) {
      data.push_back(p.detach());
      exp_avg.push_back(at::zeros_like(p.detach()));
      exp_avg_sq.push_back(at::zeros_like(p.detach()));
      counts.push_back(at::zeros({}));
    }
  }
  double step(const at::Tensor& ids) {
    auto loss = loss_of(net, ids);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      grads.push_back(parameters[i].grad());
      counts[i] += 1;
    }
    at::_fused_adamw_(data, grads, exp_avg, exp_avg_sq, {}, counts, 3e-4, 0.9, 0.999, 0.01, 1e-8, false, false);
    for (auto& p : parameters) p.mutable_grad() = at::Tensor();
    return loss.item<double>();
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

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::int64_t> flag{{"--layers", 8}, {"--hidden", 512}, {"--batch", 1},
                                           {"--steps", 40}, {"--threads", 1},  {"--stage", 3}};
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else if (flag.count(argv[i]) == 0 || i + 1 == argc) {
      std::fprintf(stderr, "overhead_bench: %s %s\n", flag.count(argv[i]) == 0 ? "unknown option" : "no value for",
                   argv[i]);
      return 2;
    } else {
      flag[argv[i]] = std::atoll(argv[i + 1]);
      ++i;
    }
  }
  if (flag["--steps"] < 1) {
    std::fprintf(stderr, "overhead_bench: --steps has to be at least 1\n");
    return 2;
  }
  at::set_num_threads(static_cast<int>(flag["--threads"]));
  const auto make = [&] {
    torch::manual_seed(1);
    models::GptConfig shape;
    shape.layers = flag["--layers"];
    shape.hidden = flag["--hidden"];
    shape.heads = 8;
    shape.vocabulary = 8192;
    return models::Gpt(shape);
  };
  Plain plain(make());
  auto net = make();
  const auto options = zero::Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
          "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
          "zero_optimization": {"stage": )" +
      std::to_string(flag["--stage"]) + "}}");
  zero::Engine engine(net, options, zero::Communicator::local());
  std::vector<double> ours, theirs, ratios, our_processor, their_processor;
  int different = 0;
  struct Time {
    double elapsed, processor;
  };
  const auto timed = [](const std::function<double()>& fn, double* loss) -> Time {
    const auto start = std::chrono::steady_clock::now();
    const double processor = processor_ms();
    *loss = fn();
    return {std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count(),
            processor_ms() - processor};
  };
  for (int k = 0; k < flag["--steps"] + 3; ++k) {
    const auto ids = at::randint(0, 8192, {flag["--batch"], 129}, at::kLong);
    double a = 0, b = 0;
    Time t[2];
    const auto with = [&] {
      t[0] = timed(
          [&] {
            auto loss = loss_of(net, ids);
            engine.backward(loss);
            engine.step();
            return loss.item<double>();
          },
          &a);
    };
    const auto without = [&] { t[1] = timed([&] { return plain.step(ids); }, &b); };
    // Alternating the order cancels drifts of the machine.
    if (k % 2 == 0)
      with(), without();
    else
      without(), with();
    if (k < 3) continue;
    ours.push_back(t[0].elapsed);
    theirs.push_back(t[1].elapsed);
    ratios.push_back(t[0].elapsed / t[1].elapsed);
    our_processor.push_back(t[0].processor);
    their_processor.push_back(t[1].processor);
    if (a != b) {
      std::fprintf(stderr, "overhead_bench: step %d: losses differ by %g\n", k, a - b);
      ++different;
    }
  }
  const double engine_ms = median(ours), plain_ms = median(theirs);
  const double processor_ratio = median(our_processor) / median(their_processor);
  if (json) {
    std::printf(
        "{\"schema\": \"zero.bench.overhead/1\", \"stage\": %lld, \"steps\": %zu, \"threads\": %lld, \"engine_ms\": "
        "%.3f, "
        "\"plain_ms\": %.3f, \"ratio_of_medians\": %.4f, \"median_of_ratios\": %.4f, \"ratio_of_processor_medians\": "
        "%.4f, \"different_losses\": %d}\n",
        static_cast<long long>(flag["--stage"]), ours.size(), static_cast<long long>(flag["--threads"]), engine_ms,
        plain_ms, engine_ms / plain_ms, median(ratios), processor_ratio, different);
  } else {
    std::printf("stage %lld, world 1, %zu steps, %lld threads\n", static_cast<long long>(flag["--stage"]), ours.size(),
                static_cast<long long>(flag["--threads"]));
    std::printf("engine  %8.2f ms median\nplain   %8.2f ms median\n", engine_ms, plain_ms);
    std::printf("ratio   %8.4f of medians, %.4f median of the ratios, %.4f of processor time\n", engine_ms / plain_ms,
                median(ratios), processor_ratio);
  }
  return different == 0 ? 0 : 1;
}
