// Long runs that must not leak: an Engine that is constructed repeatedly, and irregular use: forwards without a
// backward, exceptions in the middle of a pass, evaluation on one rank, frozen parameters. Ranks are processes over
// shared memory. Rank 0 trains the same model in plain libtorch, with the data of all ranks, and compares.
//
//   endurance remake|mischief [steps=N] [every=N] [stage=S] [ranks=N] [quiet=1]
//
// every: remake: steps of one Engine; both: steps between two measurements. Prints memory (PSS without files),
// descriptors and threads of the rank whose PSS is largest. Exit code 1 if they grow, if a value differs, or on an
// unexpected error.
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "support/shm_ranks.h"

namespace zero::test {
namespace {
namespace nn = torch::nn;

std::map<std::string, std::string> flags;
int number(const std::string& name, int otherwise) {
  const auto it = flags.find(name);
  return it == flags.end() ? otherwise : std::stoi(it->second);
}

constexpr double kRate = 0.02;
constexpr const char* kMischief = "mischief in the user's own code";

// Passes its input on; its backward throws.
struct ThrowingBackward : torch::autograd::Function<ThrowingBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error(kMischief);
  }
};

enum class Fault { None, InForward, InBackward };

// Every unit's shard is large enough to be read in place, so that one rank may evaluate alone.
struct Net : nn::Module {
  nn::ModuleList layers;
  Net() {
    for (const auto& [in, out] : {std::pair{32, 96}, std::pair{96, 96}, std::pair{96, 64}})
      layers->push_back(nn::Linear(in, out));
    register_module("layers", layers);
    at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(5);
    for (auto& p : parameters()) p.copy_(at::randn(p.sizes(), generator, at::TensorOptions()) * 0.1);
  }
  at::Tensor forward(at::Tensor x, Fault fault = Fault::None) {
    x = at::tanh(layers[0]->as<nn::Linear>()->forward(x));
    if (fault == Fault::InForward) throw std::runtime_error(kMischief);
    x = layers[1]->as<nn::Linear>()->forward(x);
    // Fails among the gradients, or at the start of backward if all earlier layers are frozen.
    const bool in_the_middle = x.requires_grad();
    if (fault == Fault::InBackward && in_the_middle) x = ThrowingBackward::apply(x);
    x = layers[2]->as<nn::Linear>()->forward(at::tanh(x));
    return fault == Fault::InBackward && !in_the_middle ? ThrowingBackward::apply(x) : x;
  }
};

at::Tensor loss_of(Net& net, int rank, int batch, Fault fault = Fault::None) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * batch + rank + 1));
  const auto x = at::randn({4, 32}, generator, at::TensorOptions());
  return (net.forward(x, fault) - x.repeat({1, 2})).pow(2).mean();
}

std::string json_of(int stage, int accumulation) {
  return R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "gradient_accumulation_steps": )" +
         std::to_string(accumulation) + R"(, "optimizer": {"type": "SGD", "params": {"lr": )" + std::to_string(kRate) +
         R"(}}, "zero_optimization": {"stage": )" + std::to_string(stage) + "}}";
}

// The same training in plain libtorch: gradients are means over ranks and micro-batches, and frozen parameters stay.
class Plain {
 public:
  Plain(int ranks, int accumulation) : ranks_(ranks), accumulation_(accumulation) {}
  Net& net() { return net_; }
  // The loss of rank 0.
  double add(int batch) {
    double first = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      auto loss = loss_of(net_, rank, batch);
      if (rank == 0) first = loss.item<double>();
      (loss / (ranks_ * accumulation_)).backward();
    }
    return first;
  }
  void step() {
    at::NoGradGuard no_grad;
    for (auto& p : net_.parameters())
      if (p.grad().defined() && p.requires_grad()) p.sub_(p.grad() * kRate);
    drop();
  }
  void drop() {
    for (auto& p : net_.parameters()) p.mutable_grad() = at::Tensor();
  }
  void take(const std::map<std::string, at::Tensor>& values) {
    at::NoGradGuard no_grad;
    for (auto& item : net_.named_parameters()) item.value().copy_(values.at(item.key()));
  }
  void compare(const std::map<std::string, at::Tensor>& values, const std::string& when) {
    for (const auto& item : net_.named_parameters()) {
      const auto expected = item.value().detach();
      const double apart = (values.at(item.key()) - expected).norm().item<double>() / expected.norm().item<double>();
      require(apart < 1e-5, when + ": " + item.key() + " is off by " + std::to_string(apart) + " of its length");
    }
  }

 private:
  const int ranks_, accumulation_;
  Net net_;
};

void expect_near(double got, double expected, const std::string& what) {
  require(std::abs(got - expected) <= 1e-5 * std::abs(expected),
          what + ": got " + std::to_string(got) + ", the plain loop has " + std::to_string(expected));
}

// --- resources of a process ---------------------------------------------------------------------

struct Held {
  double pss = 0, descriptors = 0, threads = 0;
};

double entries_of(const char* folder) {
  double count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

Held held_now() {
  Held held{0, entries_of("/proc/self/fd"), entries_of("/proc/self/task")};
  std::ifstream in("/proc/self/smaps_rollup");
  // Without files, because the share of libtorch's pages depends on other processes that use it.
  for (std::string line; std::getline(in, line);)
    if (line.rfind("Pss_Anon:", 0) == 0 || line.rfind("Pss_Shmem:", 0) == 0)
      held.pss += std::stod(line.substr(line.find(':') + 1)) * 1024;
  return held;
}

class Watch {
 public:
  explicit Watch(Comm comm) : comm_(std::move(comm)) {}
  // Of the rank with the highest memory; all ranks call it together.
  void note(int step) {
    const auto mine = held_now();
    Held most;
    for (const auto& text : comm_->all_gather_bytes({reinterpret_cast<const char*>(&mine), sizeof mine})) {
      Held one;
      std::memcpy(&one, text.data(), sizeof one);
      most = {std::max(most.pss, one.pss), std::max(most.descriptors, one.descriptors),
              std::max(most.threads, one.threads)};
    }
    noted_.push_back(most);
    if (comm_->rank() == 0 && number("quiet", 0) == 0) {
      std::printf("step %6d  PSS %8.2f MiB  descriptors %3.0f  threads %3.0f\n", step, most.pss / (1 << 20),
                  most.descriptors, most.threads);
      std::fflush(stdout);
    }
  }
  // Compares the last tenth with the second; the first includes one-time allocations.
  void judge() const {
    const auto tenth = std::max<std::size_t>(1, noted_.size() / 10);
    require(noted_.size() >= 3 * tenth, "too few measurements");
    const auto mean = [&](std::size_t from, double Held::*what) {
      double sum = 0;
      for (std::size_t i = 0; i < tenth; ++i) sum += noted_[from + i].*what;
      return sum / static_cast<double>(tenth);
    };
    const auto last = noted_.size() - tenth;
    const auto line = [&](const char* name, double Held::*what, double unit, double margin) {
      const double early = mean(tenth, what), late = mean(last, what);
      if (comm_->rank() == 0)
        std::printf("%-11s %.2f in the second tenth, %.2f in the last\n", name, early / unit, late / unit);
      require(late <= early + margin,
              std::string(name) + " grew from " + std::to_string(early / unit) + " to " + std::to_string(late / unit));
    };
#ifndef __SANITIZE_ADDRESS__  // which keeps freed memory for a while
    line("PSS (MiB)", &Held::pss, 1 << 20, 0.02 * mean(tenth, &Held::pss));
#endif
    line("descriptors", &Held::descriptors, 1, 0.5);
    line("threads", &Held::threads, 1, 0.5);
  }

 private:
  const Comm comm_;
  std::vector<Held> noted_;
};

// --- the two programs ---------------------------------------------------------------------------

void remake(const Comm& comm) {
  const int steps = number("steps", 10000), every = number("every", 100), stage = number("stage", 3);
  Watch watch(comm);
  std::map<std::string, at::Tensor> values;
  double first = 0, last = 0;
  for (int done = 0; done < steps; done += every) {
    auto net = std::make_shared<Net>();
    Plain plain(comm->size(), 1);
    if (comm->rank() == 0 && done > 0) {
      plain.take(values);
      at::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(values.at(item.key()));
    }
    Engine engine(net, Options::from_json(json_of(stage, 1)), comm);
    for (int step = done; step < done + every; ++step) {
      const auto loss = loss_of(*net, comm->rank(), step);
      engine.backward(loss);
      engine.step();
      last = loss.item<double>();
      if (step == 0) first = last;
      if (comm->rank() != 0) continue;
      const double expected = plain.add(step);
      plain.step();
      expect_near(last, expected, "the loss of step " + std::to_string(step));
    }
    watch.note(done + every);
    values = engine.full_state_dict();
    if (comm->rank() == 0) plain.compare(values, "after step " + std::to_string(done + every));
  }
  require(last < first, "the loss did not fall: " + std::to_string(first) + ", then " + std::to_string(last));
  watch.judge();
}

// With several ranks, all must have caught the same failure.
void discard(Engine& engine, int ranks) {
  if (ranks > 1) engine.discard_micro_batch();
}

// An exception of the user's code is rethrown unchanged.
template <class Body>
void expect_mischief(const Body& body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    require(contains(error.what(), kMischief), std::string("another error came back: ") + error.what());
    return;
  }
  require(false, "an exception of the user's code was swallowed");
}

void mischief(const Comm& comm) {
  const int steps = number("steps", 1000), every = number("every", 10), stage = number("stage", 3), accumulation = 2;
  Watch watch(comm);
  auto net = std::make_shared<Net>();
  Engine engine(net, Options::from_json(json_of(stage, accumulation)), comm);
  Plain plain(comm->size(), accumulation);  // trained by rank 0 alone, frozen by all
  std::mt19937 random(17);                  // the same on all ranks
  std::map<std::string, int> count;
  int batch = 0;
  const auto upset = [&] {
    const int rank = comm->rank(), kind = static_cast<int>(random() % 12), alone = static_cast<int>(random() % 97);
    ++batch;
    if (kind == 0) {
      ++count["forwards without a backward"];
      (void)loss_of(*net, rank, batch);
    } else if (kind == 1) {
      ++count["exceptions in forward"];
      expect_mischief([&] { (void)loss_of(*net, rank, batch, Fault::InForward); });
      discard(engine, comm->size());
    } else if (kind == 2) {
      ++count["exceptions in backward"];
      expect_mischief([&] { engine.backward(loss_of(*net, rank, batch, Fault::InBackward)); });
      discard(engine, comm->size());
    } else if (kind == 3) {
      ++count["evaluations on one rank"];
      at::NoGradGuard no_grad;
      if (rank == alone % comm->size()) (void)loss_of(*net, rank, batch);
    }
  };
  for (int step = 1; step <= steps; ++step) {
    for (int micro = 0; micro < accumulation; ++micro) {
      upset();
      // A failed backward may also drop the earlier micro-batches of its step.
      if (const auto kept = static_cast<int>(engine.micro_batches()); kept != micro) {
        require(kept == 0, "of " + std::to_string(micro) + " micro-batches " + std::to_string(kept) + " stayed");
        ++count["micro-batches dropped with a failed one"];
        plain.drop();
        micro = 0;
      }
      const auto loss = loss_of(*net, comm->rank(), ++batch);
      engine.backward(loss);
      const auto result = engine.step();
      require(result.updated == (micro + 1 == accumulation), "step() acted at the wrong time");
      if (comm->rank() != 0) continue;
      expect_near(loss.item<double>(), plain.add(batch), "the loss of step " + std::to_string(step));
    }
    if (comm->rank() == 0) plain.step();
    const auto kind = random() % 8, which = random();
    auto parameters = net->parameters(), others = plain.net().parameters();
    const auto chosen = which % (parameters.size() - 1);  // the last stays, so that a loss has a gradient
    if (kind == 0) {
      ++count["parameters frozen or thawed"];
      const bool frozen = parameters[chosen].requires_grad();
      parameters[chosen].set_requires_grad(!frozen);
      others[chosen].set_requires_grad(!frozen);
    } else if (kind == 1) {
      ++count["calls of zero_grad"];
      net->zero_grad(which % 2 == 0);
    } else if (kind == 2) {
      ++count["scopes"];
      auto scope = engine.gathered_parameters(which % 2 == 0);
    }
    if (step % every != 0) continue;
    watch.note(step);
    const auto values = engine.full_state_dict();
    if (comm->rank() == 0) plain.compare(values, "after step " + std::to_string(step));
  }
  if (comm->rank() == 0)
    for (const auto& [what, times] : count) std::printf("%5d %s\n", times, what.c_str());
  watch.judge();
}

}  // namespace
}  // namespace zero::test

int main(int argc, char** argv) {
  using namespace zero::test;
  const std::string what = argc > 1 ? argv[1] : "";
  for (int i = 2; i < argc; ++i) {
    const std::string text = argv[i];
    const auto at = text.find('=');
    if (at != std::string::npos) flags[text.substr(0, at)] = text.substr(at + 1);
  }
  if (what != "remake" && what != "mischief") {
    std::fprintf(stderr, "endurance: error: got %s, expected remake or mischief\n", what.c_str());
    return 2;
  }
  const int ranks = number("ranks", 2);
  const auto run_id = fresh_run_id();
  const auto body = what == "remake" ? remake : mischief;
  const auto ends = fork_ranks(
      ranks,
      [&](int rank) {
        at::set_num_threads(1);
        body(ranks == 1 ? zero::Communicator::local() : join_run(run_id, rank, ranks));
        std::fflush(stdout);
      },
      std::chrono::hours(4));
  const auto errors = errors_of(ends);
  std::fprintf(stderr, "%s", errors.c_str());
  return errors.empty() ? 0 : 1;
}
