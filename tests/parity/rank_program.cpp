// One rank of a test, as a process: trains a problem, and on request dies, hangs or measures.
//
//   rank_program key=value ... [-- key=value ... [-- ...]]     behind each --: one more training, with the first keys
//   and these problem world recipe stage steps accumulation clip prefetch zero extra   as in Training fault=kill|exit|sleep
//   at=forward|backward|reduce|step|save  rank=R  step=S scope=1       after the last step a scope of all parameters
//   that could write and does not kinds=1       every kind of module at every stage (from first=S on): evaluation and a
//   modifying scope between the steps; prints
//                 "kind NAME accumulation A stage S hash H" for each
//   measure=pss   a model of about `million` million parameters; prints ledger and kernel bytes
//
// Prints the lines "sent B numel P groups G across A" (bytes of the last step, A of them to other hosts), "hash H" and
// "loss L" (the last) per rank. Errors go to stderr, the
// exit code is the error's.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <thread>

#include "parity/training.h"

namespace {
using namespace zero;
using namespace zero::test;

using Flags = std::map<std::string, std::string>;
Flags flags;
std::string flag(const std::string& name, const std::string& otherwise) {
  const auto it = flags.find(name);
  return it == flags.end() ? otherwise : it->second;
}
int number(const std::string& name, int otherwise) { return std::stoi(flag(name, std::to_string(otherwise))); }

Training training_of(int world) {
  Training training;
  training.problem = flag("problem", "gpt");
  training.world = world;
  training.recipe = flag("recipe", "fp32");
  training.stage = number("stage", 3);
  training.steps = number("steps", 20);
  training.accumulation = number("accumulation", 1);
  training.clip = std::stod(flag("clip", "0"));
  training.prefetch = number("prefetch", 1) != 0;
  training.zero = flag("zero", "");
  training.extra = flag("extra", "");
  return training;
}

void strike() {
  const auto fault = flag("fault", "");
  if (fault == "kill") kill(getpid(), SIGKILL);
  if (fault == "exit") _exit(3);
  if (fault == "sleep") std::this_thread::sleep_for(std::chrono::hours(1));
}

struct Faulty {
  int rank, step;
  std::string at;
  bool due(int now, const char* where) const { return at == where && now == step && rank == number("rank", -1); }
  void point(int now, const char* where) const {
    if (due(now, where)) strike();
  }
};

int train(const Training& training, const std::shared_ptr<Communicator>& comm) {
  const auto& task = problem(training.problem);
  auto module = make_module(task);
  Engine engine(module, Options::from_json(json_of(training)), comm);
  double last_loss = 0;
  const Faulty faulty{comm->rank(), number("step", 2), flag("at", "")};
  for (int step = 0; step < training.steps; ++step) {
    for (int micro = 0; micro < training.accumulation; ++micro) {
      auto loss = loss_of(task, *module, comm->rank(), step * training.accumulation + micro, dtype_of(training));
      last_loss = loss.item<double>();
      faulty.point(step, "forward");
      // Runs when backward begins, and when the gradient of the first unit's parameter arrives:
      // by then other units are being reduced.
      if (faulty.due(step, "backward")) loss.register_hook([](const at::Tensor&) { strike(); });
      if (faulty.due(step, "reduce")) module->parameters()[0].register_hook([](const at::Tensor&) { strike(); });
      engine.backward(loss);
      faulty.point(step, "step");
      engine.step();
    }
    if (step + 2 == training.steps) comm->reset_stats();
    faulty.point(step, "save");
    if (!flag("save", "").empty()) engine.save_checkpoint(flag("save", ""), "step-" + std::to_string(step));
  }
  // Of the last step alone.
  const auto stats = comm->stats();
  std::int64_t numel = 0;
  for (const auto& [name, group_numel] : engine.units()) numel += group_numel;
  std::printf("sent %llu numel %lld groups %zu across %llu\n", static_cast<unsigned long long>(stats.bytes_sent()),
              static_cast<long long>(numel), engine.units().size(),
              static_cast<unsigned long long>(stats.bytes_across_hosts));
  if (!flag("scope", "").empty()) {
    const auto before = engine.state_hash();
    { auto scope = engine.gathered_parameters(true); }
    std::printf("scope %s\n", engine.state_hash() == before ? "kept" : "CHANGED");
  }
  std::printf("hash %s\n", engine.state_hash().c_str());
  std::printf("loss %.17g\n", last_loss);
  return 0;
}

int train_kinds(const std::shared_ptr<Communicator>& comm) {
  for (const auto& task : problems()) {
    for (const int accumulation : {1, 2}) {
      for (int stage = number("first", 0); stage <= 3; ++stage) {
        Training training;
        training.stage = stage;
        if (stage == 3) training.zero = flag("zero", "");
        training.extra = flag("extra", "");
        training.accumulation = accumulation;
        training.clip = 0.05;
        auto module = make_module(task);
        Engine engine(module, Options::from_json(json_of(training)), comm);
        for (int step = 0; step < 4; ++step) {
          for (int micro = 0; micro < accumulation; ++micro) {
            engine.backward(loss_of(task, *module, comm->rank(), step * accumulation + micro, at::kFloat));
            engine.step();
          }
          at::NoGradGuard no_grad;
          loss_of(task, *module, comm->rank(), 100 + step, at::kFloat);
          if (step == 1) {
            auto scope = engine.gathered_parameters(true);
            module->parameters()[0].mul_(0.5 + comm->rank());  // rank 0's values count
          }
        }
        const auto hash = engine.state_hash();
        if (comm->rank() == 0)
          std::printf("kind %s accumulation %d stage %d hash %s\n", task.name.c_str(), accumulation, stage,
                      hash.c_str());
      }
    }
  }
  return 0;
}

std::uint64_t pss_bytes() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("Pss:", 0) == 0) return std::stoull(line.substr(4)) * 1024;
  return 0;
}

int measure(const Training& training, const std::shared_ptr<Communicator>& comm) {
  const std::int64_t width = number("width", 1024);
  const int layers = number("layers", 24);
  // Warm libtorch's own memory first, so that the difference is the engine's.
  {
    auto warm = torch::nn::Linear(64, 64);
    warm(at::ones({2, 64})).sum().backward();
  }
  const auto options = Options::from_json(json_of(training));
  const auto before = pss_bytes();
  comm->barrier();
  auto module = build([&] {
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i)
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, 4 * width).bias(false))),
          net->push_back(torch::nn::Linear(torch::nn::LinearOptions(4 * width, width).bias(false)));
    return net;
  });
  Engine engine(module, options, comm);
  for (int k = 0; k < 2; ++k) {
    auto x = at::ones({1, width}, dtype_of(training)) * 1e-3;
    engine.backward(module->forward(x).to(at::kFloat).pow(2).mean());
    engine.step();
  }
  engine.reset_peak_memory();
  comm->barrier();
  const auto after = pss_bytes();
  const auto memory = engine.memory();
  std::printf("ledger %llu pss %llu\n", static_cast<unsigned long long>(memory.current(MemoryReport::Tier::Device)),
              static_cast<unsigned long long>(after - before));
  comm->barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<Flags> runs(1);
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text == "--") {
      runs.push_back(runs.front());
      continue;
    }
    const auto at = text.find('=');
    runs.back()[text.substr(0, at)] = at == std::string::npos ? "" : text.substr(at + 1);
  }
  if (runs.size() > 1) runs.erase(runs.begin());
  at::set_num_threads(1);
  try {
    auto comm = Communicator::from_env();
    int code = 0;
    for (std::size_t i = 0; i < runs.size() && code == 0; ++i) {
      flags = runs[i];
      const auto training = training_of(comm->size());
      code = !flag("kinds", "").empty()     ? train_kinds(comm)
             : !flag("measure", "").empty() ? measure(training, comm)
                                            : train(training, comm);
    }
    std::fflush(stdout);
    return code;
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    std::fflush(stderr);
    _exit(static_cast<int>(e.code()));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "unexpected: %s\n", e.what());
    std::fflush(stderr);
    _exit(1);
  }
}
