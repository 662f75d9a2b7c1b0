#include "parity/training.h"

#include <cstring>
#include <mutex>
#include <sstream>

namespace zero::test {

std::string json_of(const Training& s) {
  std::ostringstream out;
  out << R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": )" << s.accumulation
      << R"(, "gradient_clipping": )" << s.clip << R"(, "optimizer": )" << s.optimizer
      << R"(, "zero_optimization": {"stage": )" << s.stage;
  if (s.stage == 3) out << R"(, "stage3_prefetch_bucket_size": )" << (s.prefetch ? 50000000 : 0);
  out << s.zero << "}";
  if (s.recipe == "bf16") out << R"(, "bf16": {"enabled": true)" << s.block << "}";
  if (s.recipe == "fp16") out << R"(, "fp16": {"enabled": true, "initial_scale_power": 10)" << s.block << "}";
  out << s.extra << "}";
  return out.str();
}

at::ScalarType dtype_of(const Training& s) {
  return s.recipe == "bf16" ? at::kBFloat16 : s.recipe == "fp16" ? at::kHalf : at::kFloat;
}

Outcome train_rank(const Training& setup, const std::shared_ptr<Communicator>& comm) {
  const auto& task = problem(setup.problem);
  auto module = make_module(task);
  if (!setup.device.is_cpu()) module->to(setup.device);
  Engine engine(module, Options::from_json(json_of(setup)), comm);
  Outcome run;
  std::vector<at::Tensor> losses;  // read at the end: on a GPU a step would wait for them
  for (int step = 0; step < setup.steps; ++step) {
    comm->reset_stats();
    for (int micro = 0; micro < setup.accumulation; ++micro) {
      auto loss = loss_of(task, *module, comm->rank(), step * setup.accumulation + micro, dtype_of(setup));
      engine.backward(loss);
      losses.push_back(loss.detach());
      const auto result = engine.step();
      if (micro + 1 == setup.accumulation) {
        run.norms.push_back(result.grad_norm);
        run.overflows += result.overflow;
      }
    }
    if (step + 1 == setup.steps) run.stats.push_back(comm->stats());
  }
  for (int step = 0; step < setup.steps; ++step) {
    double sum = 0, total = 0;
    for (int micro = 0; micro < setup.accumulation; ++micro)
      sum += losses[static_cast<std::size_t>(step * setup.accumulation + micro)].item<double>() / setup.accumulation;
    for (const auto& text : comm->all_gather_bytes({reinterpret_cast<const char*>(&sum), sizeof sum})) {
      double part = 0;
      std::memcpy(&part, text.data(), sizeof part);
      total += part;
    }
    run.losses.push_back(total / comm->size());
  }
  run.hash = engine.state_hash();
  run.masters = engine.full_state_dict();
  return run;
}

Outcome train_threads(const Training& setup, const ThreadFaults& faults) {
  Outcome first;
  std::vector<CommStats> stats(static_cast<std::size_t>(setup.world));
  std::mutex mutex;
  run_ranks(setup.world, faults, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    auto run = train_rank(setup, comm);
    std::lock_guard<std::mutex> lock(mutex);
    stats[static_cast<std::size_t>(comm->rank())] = run.stats.front();
    if (comm->rank() == 0) first = std::move(run);
  });
  first.stats = std::move(stats);
  return first;
}

Outcome train_plain(const Training& setup) {
  at::set_num_threads(1);
  const auto& task = problem(setup.problem);
  std::vector<std::shared_ptr<torch::nn::Module>> replicas;
  for (int r = 0; r < setup.world; ++r) replicas.push_back(make_module(task));
  const auto named = replicas[0]->named_parameters();
  std::vector<std::string> names;
  std::vector<std::vector<at::Tensor>> params;
  // Tied parameters once, as the engine counts them.
  for (auto& replica : replicas) {
    std::vector<at::Tensor> unique;
    std::vector<std::string> unique_names;
    for (auto& item : replica->named_parameters()) {
      const auto same = [&](const at::Tensor& t) { return t.is_same(item.value()); };
      if (std::any_of(unique.begin(), unique.end(), same)) continue;
      unique.push_back(item.value());
      unique_names.push_back(item.key());
    }
    params.push_back(unique);
    names = unique_names;
  }
  const std::size_t count = names.size();
  std::vector<at::Tensor> exp_avg, exp_avg_sq, steps;
  for (const auto& p : params[0]) {
    exp_avg.push_back(at::zeros_like(p.detach()));
    exp_avg_sq.push_back(at::zeros_like(p.detach()));
    steps.push_back(at::zeros({}));
  }
  Outcome run;
  for (int step = 0; step < setup.steps; ++step) {
    double total = 0;
    for (int r = 0; r < setup.world; ++r) {
      for (int micro = 0; micro < setup.accumulation; ++micro) {
        auto loss =
            loss_of(task, *replicas[static_cast<std::size_t>(r)], r, step * setup.accumulation + micro, at::kFloat);
        total += loss.item<double>() / setup.accumulation / setup.world;
        if (setup.accumulation > 1) loss = loss * (1.0 / setup.accumulation);
        loss.backward();
      }
    }
    run.losses.push_back(total);
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    double squares = 0;
    for (std::size_t i = 0; i < count; ++i) {
      auto sum = at::zeros_like(params[0][i].detach());
      for (auto& replica : params)
        if (replica[i].grad().defined()) sum += replica[i].grad();
      squares += sum.to(at::kDouble).pow(2).sum().item<double>();
      grads.push_back(sum);
    }
    const double norm = std::sqrt(squares) / setup.world;
    run.norms.push_back(norm);
    double factor = 1.0 / setup.world;
    if (setup.clip > 0) factor /= std::max(1.0, (norm + 1e-6) / setup.clip);
    for (std::size_t i = 0; i < count; ++i) {
      auto& p = params[0][i];
      if (!p.requires_grad() || p.numel() == 0) continue;
      if (factor != 1.0) grads[i].mul_(static_cast<float>(factor));
      steps[i] += 1;
      auto data = p.detach();
      at::_fused_adamw_({data}, {grads[i]}, {exp_avg[i]}, {exp_avg_sq[i]}, {}, {steps[i]}, 0.01, 0.9, 0.999, 0.05, 1e-8,
                        false, false);
      for (std::size_t r = 1; r < params.size(); ++r) params[r][i].detach().copy_(data);
    }
    for (auto& replica : params)
      for (auto& p : replica) p.mutable_grad() = at::Tensor();
  }
  for (std::size_t i = 0; i < count; ++i) run.masters[names[i]] = params[0][i].detach().clone();
  return run;
}

double distance(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b, double floor) {
  double worst = a.size() == b.size() ? 0 : 1e9;
  for (const auto& [name, value] : a) {
    const auto it = b.find(name);
    if (it == b.end()) return 1e9;
    if (value.numel() == 0) continue;
    const auto relative = (value - it->second).abs() / (it->second.abs() + floor);
    worst = std::max(worst, relative.max().item<double>());
  }
  return worst;
}

bool equal_bits(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                std::string* first) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, value] : a) {
    const auto it = b.find(name);
    if (it != b.end() && at::equal(value, it->second)) continue;
    if (first) *first = name;
    return false;
  }
  return true;
}

}  // namespace zero::test
