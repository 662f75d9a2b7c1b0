// `zero bench optimizer`: the time of one optimizer update over flat memory, by rule, job and threads, alternating with
// a triad for comparison. Every element of the result is compared with update_reference.h, bit for bit.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>
#include <torch/version.h>
#include <zero/library.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>

#include "lab/bench/bench.h"
#include "optim/update_reference.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/machine/machine.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/measurement.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace optimizer_bench {
namespace {

constexpr const char* kName = "bench optimizer";
// Values repeat with this period. It is prime, so threads and lanes do not see the same values, and small, so the
// reference is fast.
constexpr std::int64_t kPeriod = 65521;
constexpr std::int64_t kTriadElements = std::int64_t{1} << 25;  // 384 MiB for its three tensors: larger than any cache
constexpr double kLossScale = 65536;                            // 16-bit gradients are multiplied by it

struct Setup {
  double elements = 128e6;
  std::int64_t iterations = 10, warmup = 2;
  std::string threads, jobs = "fp32,bf16", rules = "adamw";
  std::int64_t numel() const { return static_cast<std::int64_t>(elements); }
};

// One rule with one kind of memory and one number of threads.
struct Series {
  std::string rule, job;
  int threads = 0;
  std::int64_t bytes_per_element = 0;  // bytes that a pass must transfer
  std::vector<double> seconds, triad;  // of the updates; bytes per second of the triads

  double elements_per_s(const Setup& setup) const { return setup.elements / quantile(seconds, 0.5); }
  double bytes_per_s(const Setup& setup) const {
    return elements_per_s(setup) * static_cast<double>(bytes_per_element);
  }
};

at::ScalarType dtype_of(const std::string& job) {
  return job == "bf16" ? at::kBFloat16 : job == "fp16" ? at::kHalf : at::kFloat;
}

template <class Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// `elements` values that repeat those of `period`.
at::Tensor repeated(const at::Tensor& period, std::int64_t elements) {
  auto all = at::empty({elements}, period.options());
  const auto rows = elements / kPeriod, whole = rows * kPeriod;
  if (rows > 0) all.narrow(0, 0, whole).view({rows, kPeriod}).copy_(period.expand({rows, kPeriod}));
  all.narrow(0, whole, elements - whole).copy_(period.narrow(0, 0, elements - whole));
  return all;
}

std::vector<float> values_of(const at::Tensor& tensor) {
  const auto fp32 = tensor.to(at::kFloat).contiguous();
  return {fp32.const_data_ptr<float>(), fp32.const_data_ptr<float>() + fp32.numel()};
}

class Triad {
 public:
  explicit Triad(std::int64_t elements)
      : a_(at::ones({elements})), b_(at::ones({elements})), sum_(at::zeros({elements})) {}
  // Bytes per second of sum = a + 3 b: 12 per element, the usual count.
  double run() {
    const double took = seconds_of([&] { at::add_out(sum_, a_, b_, 3.0); });
    return 12.0 * static_cast<double>(sum_.numel()) / took;
  }

 private:
  at::Tensor a_, b_, sum_;
};

// The flat memory of one job, and its expected contents after some updates.
class Job {
 public:
  Job(const std::string& rule, const std::string& dtype, std::int64_t elements)
      : rule_(rule),
        name_(dtype),
        optimizer_(Options::from_json(optim::update_configuration(rule), "zero bench optimizer")) {
    const bool fp32 = dtype == "fp32";
    factor_ = fp32 ? 1.0f : static_cast<float>(1 / kLossScale);
    at::manual_seed(1);
    first_master_ = at::randn({kPeriod});
    first_gradient_ = at::randn({kPeriod}).mul_(1e-3 / static_cast<double>(factor_)).to(dtype_of(dtype));
    tensors_.master = repeated(first_master_, elements);
    tensors_.gradient = repeated(first_gradient_, elements);
    tensors_.states = optimizer_.make_states(elements);
    if (!fp32) tensors_.parameter = at::zeros({elements}, dtype_of(dtype));
  }

  double update() {
    return seconds_of([&] { optimizer_.step(tensors_, factor_); });
  }

  // The gradient is read; master and states are read and written; the 16-bit parameter is written.
  std::int64_t bytes_per_element() const {
    const auto width = static_cast<std::int64_t>(tensors_.gradient.element_size());
    return width + 8 * (1 + static_cast<std::int64_t>(tensors_.states.size())) +
           (tensors_.parameter.defined() ? width : 0);
  }

  // InternalError at the first element that differs from the reference.
  void check() const {
    const auto values = optim::reference_update(rule_, values_of(first_master_), values_of(first_gradient_), factor_,
                                                optimizer_.applied_steps());
    check("the master", tensors_.master, values.master);
    const auto names = optimizer_.state_names();
    for (std::size_t k = 0; k < names.size(); ++k) check(names[k], tensors_.states[k], values.states[k]);
    if (tensors_.parameter.defined()) check("the parameter", tensors_.parameter, values.master);
  }

 private:
  void check(const std::string& name, const at::Tensor& got, const std::vector<float>& values) const {
    const auto expected = at::tensor(values).to(got.scalar_type());
    const auto i = optim::first_difference(got.const_data_ptr(), expected.const_data_ptr(), got.numel(), kPeriod,
                                           static_cast<std::int64_t>(got.element_size()));
    if (i < 0) return;
    const auto at = [](const at::Tensor& tensor, std::int64_t k) {
      char text[32];
      std::snprintf(text, sizeof text, "%.9g", tensor[k].item<double>());
      return std::string(text);
    };
    throw InternalError("[zero bench optimizer] got " + at(got, i) + " in element " + std::to_string(i) + " of " +
                        name + " (" + rule_ + ", " + name_ + ", after " + std::to_string(optimizer_.applied_steps()) +
                        " updates), expected " + at(expected, i % kPeriod));
  }

  std::string rule_, name_;
  FlatOptimizer optimizer_;
  float factor_ = 1;
  at::Tensor first_master_, first_gradient_;
  FlatTensors tensors_;
};

// Measures all numbers of threads of one rule and job in turn, so that changes of the machine's speed affect all.
std::vector<Series> measure(const Setup& setup, const std::vector<int>& threads, const std::string& rule,
                            const std::string& dtype, Triad& triad) {
  at::set_num_threads(*std::max_element(threads.begin(), threads.end()));
  Job job(rule, dtype, setup.numel());
  std::vector<Series> all;
  for (const int count : threads) all.push_back({rule, dtype, count, job.bytes_per_element(), {}, {}});
  for (std::int64_t k = -setup.warmup; k < setup.iterations; ++k)
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto& series = all[k % 2 == 0 ? i : all.size() - 1 - i];
      at::set_num_threads(series.threads);
      const double rate = triad.run(), took = job.update();
      if (k < 0) continue;
      series.triad.push_back(rate);
      series.seconds.push_back(took);
    }
  job.check();
  return all;
}

void declare(Command& c, Setup& s) {
  c.section("What is measured");
  c.option("--elements", s.elements, "N", "parameters, all in one flat tensor (128e6)", 1, 1e12);
  c.option("--threads", s.threads, "LIST", "comma-separated (1 and all cores)");
  c.option("--jobs", s.jobs, "LIST",
           "fp32, bf16, fp16 (fp32,bf16): 16-bit gradients are unscaled and the "
           "parameters rounded to 16 bits in the same pass");
  c.option("--rules", s.rules, "LIST", "adamw, adam, sgd, adagrad, lion (adamw)");
  c.option("--iterations", s.iterations, "N", "measured updates each (10)", 1, 100000);
  c.option("--warmup", s.warmup, "N", "warm-up updates (2)", 0, 100000);
}

std::vector<int> threads_of(const Setup& setup) {
  const int cores = std::max(1, launch::usable_cores());
  if (setup.threads.empty()) return cores == 1 ? std::vector{1} : std::vector{1, cores};
  std::vector<int> counts;
  for (const char *at = setup.threads.data(), *end = at + setup.threads.size(); at <= end; ++at) {
    int count = 0;
    const auto [next, error] = std::from_chars(at, end, count);
    if (error != std::errc() || (next != end && *next != ',') || count < 1 || count > 1024 ||
        std::count(counts.begin(), counts.end(), count) > 0)
      throw ConfigError("[--threads] got \"" + setup.threads.substr(0, 80) +
                        "\", expected numbers from 1 to 1024, each once, with commas between");
    counts.push_back(count);
    at = next;
  }
  return counts;
}

// At most 16 bytes per element in any job (fp32: 16; bf16: 12 + 2 + 2), plus the triad.
void require_memory(const Setup& setup) {
  const double needed = 16 * setup.elements + 12.0 * static_cast<double>(std::min(setup.numel(), kTriadElements));
  const auto facts = launch::memory_facts();
  const auto available = static_cast<double>(facts.available_bytes);
  if (needed > available)
    throw ConfigError("[--elements] got " + fixed(setup.elements, 0) + ", which take " +
                      report::human_bytes(static_cast<std::uint64_t>(needed)) + ", expected at most the " +
                      report::human_bytes(facts.available_bytes) + " of memory that are free. Hint: --elements " +
                      fixed(std::floor(available / 28e6) * 1e6, 0));
}

Json document_of(const Setup& setup, const std::vector<Series>& all) {
  Json about = machine();
  about["libtorch"] = TORCH_VERSION;
  Json document = {{"schema", "zero.bench.optimizer/1"},
                   {"machine", about},
                   {"elements", setup.numel()},
                   {"iterations", setup.iterations},
                   {"warmup", setup.warmup},
                   {"verified", "every element, every bit"},
                   {"runs", Json::array()}};
  for (const auto& series : all) {
    const double triad = quantile(series.triad, 0.5);
    document["runs"].push_back({{"rule", series.rule},
                                {"job", series.job},
                                {"threads", series.threads},
                                {"bytes_per_element", series.bytes_per_element},
                                {"time_s", spread_of(series.seconds)},
                                {"elements_per_s", series.elements_per_s(setup)},
                                {"bytes_per_s", series.bytes_per_s(setup)},
                                {"triad_bytes_per_s", triad},
                                {"bytes_per_s_over_triad", series.bytes_per_s(setup) / triad},
                                {"samples_s", series.seconds}});
  }
  return document;
}

std::string text_of(const Setup& setup, const std::vector<Series>& all, std::size_t columns) {
  using report::Align;
  std::string text = machine_line() + "\nlibzero " ZERO_VERSION ", libtorch " TORCH_VERSION "\n" +
                     report::human_count(setup.elements) + " parameters in one flat tensor; " +
                     std::to_string(setup.iterations) + " updates after " + std::to_string(setup.warmup) +
                     "; GB/s: bytes a perfect pass moves, by median\n\n";
  report::Table table({{"rule"},
                       {"job"},
                       {"threads", Align::Right},
                       {"median ms", Align::Right},
                       {"min", Align::Right},
                       {"p99", Align::Right},
                       {"M/s", Align::Right},
                       {"GB/s", Align::Right},
                       {"triad GB/s", Align::Right},
                       {"/triad", Align::Right}});
  const auto ms = [](double s) { return fixed(s * 1e3, 2); };
  for (const auto& series : all) {
    const double triad = quantile(series.triad, 0.5);
    table.row({series.rule, series.job, std::to_string(series.threads), ms(quantile(series.seconds, 0.5)),
               ms(quantile(series.seconds, 0)), ms(quantile(series.seconds, 0.99)),
               fixed(series.elements_per_s(setup) * 1e-6, 0), fixed(series.bytes_per_s(setup) * 1e-9, 1),
               fixed(triad * 1e-9, 1), fixed(series.bytes_per_s(setup) / triad, 2)});
  }
  return text + table.render(columns) + "\nall elements have the bits of a scalar reference\n";
}

}  // namespace
}  // namespace optimizer_bench

int bench_optimizer(int argc, char** argv) {
  using namespace optimizer_bench;
  Setup setup;
  Command command(kName, "time of one optimizer update on flat memory, compared with a triad; all elements are checked",
                  "[options]", "  zero bench optimizer --elements 128e6 --threads 1,2 --rules adamw,lion\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  if (setup.elements != std::floor(setup.elements))
    throw ConfigError("[--elements] got " + fixed(setup.elements, 3) + ", expected a whole number");
  const auto threads = threads_of(setup);
  const auto jobs = list_of("--jobs", setup.jobs, {"fp32", "bf16", "fp16"});
  const auto rules = list_of("--rules", setup.rules, optim::update_rules());
  require_memory(setup);
  install_log_sink(kName, global);

  at::NoGradGuard no_grad;
  Triad triad(std::min(setup.numel(), kTriadElements));
  std::vector<Series> all;
  for (const auto& rule : rules)
    for (const auto& job : jobs) {
      if (log_threshold(global) <= LogLevel::Info) print_note(kName, LogLevel::Info, rule + ", " + job);
      for (auto& series : measure(setup, threads, rule, job, triad)) all.push_back(std::move(series));
    }
  if (global.json) {
    print_result(document_of(setup, all).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    print_result(text_of(setup, all, static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
  }
  return 0;
}

}  // namespace zero::cli
