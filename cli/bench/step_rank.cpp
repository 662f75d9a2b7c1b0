// The steps of one rank and their timing (step_rank.h).
#include "cli/bench/step_rank.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <torch/torch.h>
#include <zero/zero.h>

#include <chrono>
#include <cmath>

#include "cli/bench/bench_gpt.h"
#include "cli/support/pss.h"
#include "cli/support/trace_text.h"

namespace zero::cli {
namespace {

constexpr std::uint64_t kDataSeed = 1;
constexpr std::int64_t kModelSeed = 1, kMemorySteps = 3, kTraceSteps = 5;
constexpr double kRate = 3e-4, kBeta1 = 0.9, kBeta2 = 0.95, kEpsilon = 1e-8, kDecay = 0.1;
constexpr double kClipping = 1.0;  // as in all programs of script/compare

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

c10::Device device_of(const StepTask& task, const Communicator& comm) {
  if (!task.on_gpu) return c10::kCPU;
  if (const auto why = why_no_gpu(comm); !why.empty()) throw ConfigError("[--device] got cuda, but " + why);
  return default_device(comm);
}

// A GPU works asynchronously: a part of a step ends when the GPU has finished it.
Clock::time_point now_on(c10::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
  return Clock::now();
}

// Memory between steps by purpose, and the peak of libtorch's allocator.
Json gpu_memory(const MemoryReport& memory) {
  Json rest;
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
    const auto purpose = static_cast<MemoryReport::Purpose>(p);
    rest[MemoryReport::name(purpose)] = memory.current(MemoryReport::Tier::Device, purpose);
  }
  return {{"booked_bytes", rest},
          {"allocated_bytes", memory.allocator->allocated},
          {"allocated_peak_bytes", memory.allocator->allocated_peak},
          {"reserved_peak_bytes", memory.allocator->reserved_peak},
          {"allocation_retries", memory.allocator->retries}};
}

// The same tokens for every configuration, different for every rank and step.
class Tokens {
 public:
  Tokens(const StepTask& task, int rank, int world, c10::Device device) : sequence_(task.gpt.sequence) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(kDataSeed);
    all_ = at::randint(0, task.gpt.vocabulary, {task.warmup + task.steps, world, task.batch, sequence_ + 1}, generator,
                       at::kLong)
               .select(1, rank)
               .to(device);
  }
  at::Tensor inputs(std::int64_t step) const { return of(step).narrow(1, 0, sequence_); }
  at::Tensor targets(std::int64_t step) const { return of(step).narrow(1, 1, sequence_); }

 private:
  at::Tensor of(std::int64_t step) const { return all_.select(0, step % all_.size(0)); }
  std::int64_t sequence_;
  at::Tensor all_;
};

Json training(const StepTask& task, const std::shared_ptr<Communicator>& comm) {
  const auto device = device_of(task, *comm);
  const Tokens tokens(task, comm->rank(), comm->size(), device);
  comm->barrier();  // all ranks have loaded shared data
  const auto before = pss_bytes();
  comm->barrier();
  auto model = make_gpt(task.gpt, kModelSeed);
  if (task.on_gpu) model->to(device);
  Engine engine(model, options_of(task), comm);
  std::vector<double> step_s, forward_s, backward_s, optimizer_s, losses;
  for (std::int64_t k = 0; k < task.warmup + task.steps; ++k) {
    const auto inputs = tokens.inputs(k), targets = tokens.targets(k);
    if (k == task.warmup) {
      comm->barrier();
      comm->reset_stats();
    }
    const auto start = now_on(device);
    auto loss = model->forward(inputs, targets);
    const auto forward = now_on(device);
    engine.backward(loss);
    const auto backward = now_on(device);
    engine.step();
    const auto end = now_on(device);
    losses.push_back(loss.item<double>());
    if (!std::isfinite(losses.back()))
      throw InternalError("[zero bench step] got loss " + std::to_string(losses.back()) + " in step " +
                              std::to_string(k) + ", expected a finite one",
                          ExitCode::kNumerical);
    if (k < task.warmup) continue;
    step_s.push_back(seconds(start, end));
    forward_s.push_back(seconds(start, forward));
    backward_s.push_back(seconds(forward, backward));
    optimizer_s.push_back(seconds(backward, end));
  }
  const auto sent = comm->stats();
  comm->barrier();
  if (task.on_gpu) engine.reset_peak_memory();
  PssSampler sampler;
  for (std::int64_t k = 0; k < kMemorySteps; ++k) {
    auto loss = model->forward(tokens.inputs(k), tokens.targets(k));
    engine.backward(loss);
    engine.step();
  }
  const auto peak = sampler.stop();
  Json peaks = Json::array();
  for (const auto& text : comm->all_gather_bytes(std::to_string(peak > before ? peak - before : 0)))
    peaks.push_back(std::stoull(text));
  Json result = {
      {"transport", comm->transport()},
      {"step_s", step_s},
      {"forward_s", forward_s},
      {"backward_s", backward_s},
      {"optimizer_s", optimizer_s},
      {"losses", losses},
      {"bytes_sent_per_step", static_cast<double>(sent.bytes_sent()) / static_cast<double>(task.steps)},
      {"bytes_across_hosts_per_step", static_cast<double>(sent.bytes_across_hosts) / static_cast<double>(task.steps)},
      {"peak_pss_bytes", peaks}};
  if (task.on_gpu) result["memory"] = gpu_memory(engine.memory());
  if (task.trace.empty()) return result;
  engine.start_trace(task.trace);
  for (std::int64_t k = 0; k < kTraceSteps; ++k) {
    auto loss = model->forward(tokens.inputs(k), tokens.targets(k));
    engine.backward(loss);
    engine.step();
  }
  const auto trace = engine.stop_trace();
  result["trace"] = trace_json(trace);
  result["trace_lines"] = trace_lines(trace);
  return result;
}

Json compute(const StepTask& task, const std::shared_ptr<Communicator>& comm) {
  const auto device = device_of(task, *comm);
  const Tokens tokens(task, comm->rank(), comm->size(), device);
  auto model = make_gpt(task.gpt, kModelSeed);
  if (task.on_gpu) model->to(device);
  if (task.recipe == "bf16") model->to(at::kBFloat16);
  if (task.recipe == "fp16") model->to(at::kHalf);
  const auto share = (task.gpt.num_parameters() + comm->size() - 1) / comm->size();
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
  const auto parameters = at::zeros({share}, floats), gradients = at::full({share}, 1e-3, floats),
             exp_avg = at::zeros({share}, floats), exp_avg_sq = at::zeros({share}, floats);
  auto count = at::zeros({}, floats);
  std::vector<double> step_s, forward_s, backward_s, adamw_s;
  for (std::int64_t k = 0; k < task.warmup + task.steps; ++k) {
    const auto inputs = tokens.inputs(k), targets = tokens.targets(k);
    comm->barrier();  // so that no rank ever has the machine's memory bandwidth to itself
    const auto start = now_on(device);
    auto loss = model->forward(inputs, targets);
    const auto forward = now_on(device);
    loss.backward();
    const auto backward = now_on(device);
    model->zero_grad(/*set_to_none=*/true);
    comm->barrier();
    const auto update = now_on(device);
    {
      at::NoGradGuard no_grad;
      count += 1;
      at::_fused_adamw_({parameters}, {gradients}, {exp_avg}, {exp_avg_sq}, {}, {count}, kRate, kBeta1, kBeta2, kDecay,
                        kEpsilon,
                        /*amsgrad=*/false, /*maximize=*/false);
    }
    const auto end = now_on(device);
    if (k < task.warmup) continue;
    step_s.push_back(seconds(start, backward));
    forward_s.push_back(seconds(start, forward));
    backward_s.push_back(seconds(forward, backward));
    adamw_s.push_back(seconds(update, end));
  }
  return {{"step_s", step_s}, {"forward_s", forward_s}, {"backward_s", backward_s}, {"adamw_s", adamw_s}};
}

}  // namespace

Json StepTask::json() const {
  return {{"recipe", recipe},   {"on_gpu", on_gpu},
          {"stage", stage},     {"steps", steps},
          {"warmup", warmup},   {"batch", batch},
          {"threads", threads}, {"gpt", {gpt.layers, gpt.hidden, gpt.heads, gpt.sequence, gpt.vocabulary}},
          {"set", set},         {"trace", trace}};
}

StepTask StepTask::from(const Json& json) {
  StepTask task;
  json.at("recipe").get_to(task.recipe);
  json.at("on_gpu").get_to(task.on_gpu);
  json.at("stage").get_to(task.stage);
  json.at("steps").get_to(task.steps);
  json.at("warmup").get_to(task.warmup);
  json.at("batch").get_to(task.batch);
  json.at("threads").get_to(task.threads);
  json.at("set").get_to(task.set);
  json.at("trace").get_to(task.trace);
  const auto& shape = json.at("gpt");
  shape.at(0).get_to(task.gpt.layers);
  shape.at(1).get_to(task.gpt.hidden);
  shape.at(2).get_to(task.gpt.heads);
  shape.at(3).get_to(task.gpt.sequence);
  shape.at(4).get_to(task.gpt.vocabulary);
  return task;
}

Options options_of(const StepTask& task) {
  Json config = {
      {"train_micro_batch_size_per_gpu", task.batch},
      {"gradient_clipping", kClipping},
      {"optimizer",
       {{"type", "AdamW"},
        {"params",
         {{"lr", kRate}, {"betas", Json::array({kBeta1, kBeta2})}, {"eps", kEpsilon}, {"weight_decay", kDecay}}}}},
      {"zero_optimization", {{"stage", task.stage}}}};
  if (task.recipe != "fp32") config[task.recipe]["enabled"] = true;
  // With the default, 16, the first steps search for a scale that does not overflow.
  if (task.recipe == "fp16") config[task.recipe]["initial_scale_power"] = 12;
  return Options::from_json(config.dump(), "<zero bench step>", settings_of(task.set));
}

Json measure_step(const StepTask& task, const std::shared_ptr<Communicator>& comm) {
  at::set_num_threads(static_cast<int>(task.threads));
  return task.stage == StepTask::kCompute ? compute(task, comm) : training(task, comm);
}

}  // namespace zero::cli
