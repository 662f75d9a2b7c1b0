// The steps of one rank and their timing (step_rank.h).
#include "lab/bench/step_rank.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/fake_communicator.h>
#include <zero/library.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <optional>
#include <variant>

#include "base/gathered_values.h"
#include "lab/bench/bench_gpt.h"
#include "models/hf_config.h"
#include "models/llama.h"
#include "tools/support/gpt_json.h"
#include "tools/support/gpt_mesh.h"
#include "tools/support/gpt_segments.h"
#include "tools/support/mesh_traffic.h"
#include "tools/support/pss.h"
#include "tools/support/trace_text.h"

namespace zero::cli {
namespace step_rank_bench {
namespace {

constexpr std::uint64_t kDataSeed = 1;
constexpr std::int64_t kModelSeed = 1, kMemorySteps = 3, kTraceSteps = 5, kAloneSteps = 5;
constexpr double kRate = 3e-4, kBeta1 = 0.9, kBeta2 = 0.95, kEpsilon = 1e-8, kDecay = 0.1;
constexpr double kClipping = 1.0;  // as in all programs of script/compare

using Clock = std::chrono::steady_clock;

double seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Of this process: all its threads.
double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
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

// The same tokens for every configuration, different for every data-parallel rank and step. A sample has one token
// more than the model's sequence.
class Tokens {
 public:
  Tokens(const StepTask& task, const Mesh& mesh, c10::Device device) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(kDataSeed);
    all_ = at::randint(0, task.gpt.vocabulary,
                       {task.warmup + task.steps, mesh.size("dp"), task.batch, task.gpt.sequence + 1}, generator,
                       at::kLong)
               .select(1, mesh.rank("dp"))
               .to(device);
  }
  at::Tensor of(std::int64_t step) const { return all_.select(0, step % all_.size(0)); }

 private:
  at::Tensor all_;
};

at::ScalarType dtype_of(const StepTask& task) {
  return task.recipe == "bf16" ? at::kBFloat16 : task.recipe == "fp16" ? at::kHalf : at::kFloat;
}

// Seconds of `calls` calls of one operation, each of `bytes` bytes sent, on memory that is not the transport's. With
// uneven parts ranks send different numbers of bytes; the calls are of their mean.
double time_alone(Communicator& group, const std::string& operation, std::int64_t calls, double bytes,
                  at::TensorOptions floats) {
  const std::int64_t ranks = group.size();
  double sum = 0;
  for (const auto of_rank : base::all_gather_values(group, std::round(bytes))) sum += of_rank;
  bytes = sum / static_cast<double>(ranks);
  const double whole = bytes * static_cast<double>(ranks) / static_cast<double>(ranks - 1);
  const auto part = std::max<std::int64_t>(
      1, std::llround((operation == "all_reduce" ? whole / 2 : whole) /
                      static_cast<double>(floats.dtype().itemsize() * static_cast<std::size_t>(ranks))));
  const auto all = at::zeros({part * ranks}, floats), other = at::zeros({part * ranks}, floats),
             mine = at::zeros({part}, floats);
  std::vector<double> seconds;
  for (std::int64_t k = 0; k <= kAloneSteps; ++k) {
    group.barrier();
    const auto start = Clock::now();
    for (std::int64_t call = 0; call < calls; ++call)
      (operation == "all_reduce"       ? group.all_reduce(all)
       : operation == "all_gather"     ? group.all_gather(all, mine)
       : operation == "reduce_scatter" ? group.reduce_scatter(mine, all)
                                       : group.all_to_all(other, all))
          ->wait();
    if (k > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return quantile(seconds, 0.5);
}

// What a step sends, by dimension and by operation.
void add_traffic(Json& result, const StepTask& task, const Mesh& mesh, const CommStats& sent) {
  const auto degrees = degrees_of(mesh);
  if (!degrees.share_samples()) return;
  const auto steps = static_cast<double>(task.steps);
  const auto axes = sent_between({}, sent, degrees);
  result["bytes_by_axis"] = {{"zero", static_cast<double>(axes.zero) / steps},
                             {"tensor_parallel", static_cast<double>(axes.tensor) / steps},
                             {"sequence_parallel", static_cast<double>(axes.sequence) / steps}};
  Json rows = Json::object();
  for (const auto& [name, row] : counted_between({}, sent, degrees)) {
    rows[name] = {{"calls", static_cast<double>(row.calls) / steps},
                  {"bytes_sent", static_cast<double>(row.bytes_sent) / steps}};
    const auto dot = name.find('.');
    const auto operation = name.substr(dot + 1);
    const bool known = operation == "all_reduce" || operation == "all_gather" || operation == "reduce_scatter" ||
                       operation == "all_to_all";
    if (dot == std::string::npos || !known) continue;
    const auto calls = static_cast<std::int64_t>(row.calls) / task.steps;
    rows[name]["alone_s"] =
        time_alone(*mesh.group(name.substr(0, dot)), operation, calls,
                   static_cast<double>(row.bytes_sent) / static_cast<double>(row.calls), dtype_of(task));
  }
  result["operations"] = rows;
}

models::Llama make_llama(const StepTask& task) {
  auto config = std::get<models::LlamaConfig>(models::hf_preset(task.llama).config);
  config.sequence = task.gpt.sequence;
  torch::manual_seed(static_cast<std::uint64_t>(kModelSeed));
  return models::Llama(config);
}

// The model that is trained: the GPT, whose computation a mesh may divide, or a Llama on whole samples.
class Trained {
 public:
  Trained(const StepTask& task, const Options& options, c10::Device device) : batch_(task.batch) {
    if (task.llama.empty()) {
      gpt_ = make_gpt(task.gpt, kModelSeed);
      place_segments(gpt_, segments_of(options, task.gpt));
    } else {
      llama_ = make_llama(task);
    }
    if (!device.is_cpu()) module()->to(device);
  }
  std::shared_ptr<torch::nn::Module> module() const {
    if (gpt_) return gpt_.ptr();
    return llama_.ptr();
  }
  void begin(const Mesh& mesh, const Options& options) {
    if (gpt_) share_.emplace(gpt_, mesh, options);
  }
  // samples: int64 [batch, sequence + 1].
  at::Tensor loss_of(const at::Tensor& samples) {
    if (share_) return share_->loss_of(samples);
    const auto tokens = samples.size(1) - 1;
    return llama_->loss(samples.narrow(1, 0, tokens), samples.narrow(1, 1, tokens));
  }
  void backward(Engine& engine, const at::Tensor& loss) {
    if (share_) return share_->backward(engine, loss, batch_);
    engine.backward(loss);
  }

 private:
  const std::int64_t batch_;
  models::Gpt gpt_{nullptr};
  models::Llama llama_{nullptr};
  std::optional<GptShare> share_;
};

Json training(const StepTask& task, const std::shared_ptr<Communicator>& comm) {
  const auto device = device_of(task, *comm);
  const auto options = options_of(task);
  const auto mesh = Mesh::of(options, comm);
  const Tokens tokens(task, *mesh, device);
  comm->barrier();  // all ranks have loaded shared data
  const auto before = pss_bytes();
  comm->barrier();
  Trained model(task, options, device);
  Engine engine(model.module(), options, mesh);
  model.begin(*mesh, options);
  std::vector<double> step_s, forward_s, backward_s, optimizer_s, losses, cpu_step_s, cpu_optimizer_s;
  for (std::int64_t k = 0; k < task.warmup + task.steps; ++k) {
    const auto samples = tokens.of(k);
    if (k == task.warmup) {
      comm->barrier();
      comm->reset_stats();
    }
    const auto cpu_start = processor_seconds();
    const auto start = now_on(device);
    auto loss = model.loss_of(samples);
    const auto forward = now_on(device);
    model.backward(engine, loss);
    const auto backward = now_on(device);
    const auto cpu_backward = processor_seconds();
    engine.step();
    const auto end = now_on(device);
    const auto cpu_end = processor_seconds();
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
    cpu_step_s.push_back(cpu_end - cpu_start);
    cpu_optimizer_s.push_back(cpu_end - cpu_backward);
  }
  const auto sent = comm->stats();
  comm->barrier();
  if (task.on_gpu || task.alone_of > 0) engine.reset_peak_memory();
  PssSampler sampler;
  for (std::int64_t k = 0; k < kMemorySteps; ++k) {
    auto loss = model.loss_of(tokens.of(k));
    model.backward(engine, loss);
    engine.step();
  }
  const auto peak = sampler.stop();
  const Json peaks = base::all_gather_values(*comm, peak > before ? peak - before : 0);
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
  if (task.alone_of > 0)
    result["alone"] = {{"device_peak_bytes", engine.memory().peak(MemoryReport::Tier::Device)},
                       {"cpu_step_s", spread_of(cpu_step_s)},
                       {"cpu_optimizer_s", spread_of(cpu_optimizer_s)}};
  if (task.on_gpu) result["memory"] = gpu_memory(engine.memory());
  add_traffic(result, task, *mesh, sent);
  if (task.trace.empty()) return result;
  engine.start_trace(task.trace);
  for (std::int64_t k = 0; k < kTraceSteps; ++k) {
    auto loss = model.loss_of(tokens.of(k));
    model.backward(engine, loss);
    engine.step();
  }
  const auto trace = engine.stop_trace();
  result["trace"] = trace_json(trace);
  result["trace_lines"] = trace_lines(trace);
  return result;
}

// Elements of x in another shape: cut off, or followed by zeros.
at::Tensor fitted(const at::Tensor& x, at::IntArrayRef shape) {
  const auto flat = x.reshape({-1});
  const auto wanted = c10::multiply_integers(shape);
  return (wanted <= flat.numel() ? flat.narrow(0, 0, wanted) : at::constant_pad_nd(flat, {0, wanted - flat.numel()}))
      .view(shape);
}

// Makes the plain model compute what this rank of the mesh does, without communication and so without meaning: its
// parts of the cut weights, and its heads over all tokens. The shapes are those of an Engine's model. Returns the rows
// of the vocabulary that are left.
std::int64_t keep_share(models::Gpt& model, const StepTask& task, const std::shared_ptr<Mesh>& mesh) {
  if (mesh->size("tp") > 1) {
    auto cut = make_gpt(task.gpt, kModelSeed);
    const Engine engine(cut, options_of(task), mesh);
    const auto parts = cut->named_parameters();
    for (auto& one : model->named_parameters())
      one.value().set_data(fitted(one.value().detach(), parts[one.key()].sizes()).clone());
  }
  const auto ranks = mesh->size("sp"), rank = mesh->rank("sp");
  if (ranks > 1) {
    const auto [begin, end] = mesh->tokens(task.gpt.sequence);
    model->first_position(begin);
    model->attend_by([=, tokens = task.gpt.sequence](const auto& local, const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v) {
      const auto heads = (rank + 1) * q.size(1) / ranks - rank * q.size(1) / ranks;
      // As after an exchange, [batch, tokens, heads, width] in memory.
      const auto mine = [&](const at::Tensor& x) {
        return fitted(x.transpose(1, 2), {x.size(0), tokens, heads, x.size(3)}).transpose(1, 2);
      };
      const auto mixed = local(mine(q), mine(k), mine(v)).transpose(1, 2);
      return fitted(mixed, {q.size(0), q.size(2), q.size(1), q.size(3)}).transpose(1, 2);
    });
  }
  return model->named_parameters()["token.weight"].size(0);
}

Json compute(const StepTask& task, const std::shared_ptr<Communicator>& comm) {
  const auto device = device_of(task, *comm);
  StepTask trained = task;  // an Engine's, for the shapes of its parts
  trained.stage = 0, trained.recipe = "fp32";
  const auto mesh = Mesh::of(options_of(trained), comm);
  const Tokens tokens(task, *mesh, device);
  auto model = make_gpt(task.gpt, kModelSeed);
  const auto vocabulary = keep_share(model, trained, mesh);
  if (task.on_gpu) model->to(device);
  if (task.recipe != "fp32") model->to(dtype_of(task));
  const auto [first, last] = mesh->tokens(task.gpt.sequence);
  const auto elements = elements_of(*model);
  const auto share = (elements + mesh->size("dp_sp") - 1) / mesh->size("dp_sp");
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
  const auto parameters = at::zeros({share}, floats), gradients = at::full({share}, 1e-3, floats),
             exp_avg = at::zeros({share}, floats), exp_avg_sq = at::zeros({share}, floats);
  auto count = at::zeros({}, floats);
  std::vector<double> step_s, forward_s, backward_s, adamw_s;
  for (std::int64_t k = 0; k < task.warmup + task.steps; ++k) {
    const auto samples = tokens.of(k).remainder(vocabulary);
    const auto inputs = samples.narrow(1, first, last - first), targets = samples.narrow(1, first + 1, last - first);
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
  return {{"step_s", step_s},
          {"forward_s", forward_s},
          {"backward_s", backward_s},
          {"adamw_s", adamw_s},
          {"elements", elements}};
}

}  // namespace
}  // namespace step_rank_bench

Json StepTask::json() const {
  using namespace step_rank_bench;
  return {{"recipe", recipe},
          {"on_gpu", on_gpu},
          {"stage", stage},
          {"steps", steps},
          {"warmup", warmup},
          {"batch", batch},
          {"threads", threads},
          {"gpt", gpt},
          {"llama", llama},
          {"set", set},
          {"trace", trace},
          {"alone_of", alone_of},
          {"mesh", {tensor_parallel, sequence_parallel, segments}}};
}

StepTask StepTask::from(const Json& json) {
  using namespace step_rank_bench;
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
  json.at("alone_of").get_to(task.alone_of);
  const auto& mesh = json.at("mesh");
  mesh.at(0).get_to(task.tensor_parallel);
  mesh.at(1).get_to(task.sequence_parallel);
  mesh.at(2).get_to(task.segments);
  json.at("gpt").get_to(task.gpt);
  json.at("llama").get_to(task.llama);
  return task;
}

Options options_of(const StepTask& task) {
  using namespace step_rank_bench;
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
  if (task.segments > 0) config["activation_checkpointing"]["number_checkpoints"] = task.segments;
  auto settings = settings_of(task.set);
  if (task.tensor_parallel > 0)
    settings.push_back({"tensor_parallel.autotp_size", std::to_string(task.tensor_parallel), "CLI --tensor-parallel"});
  if (task.sequence_parallel > 0)
    settings.push_back({"sequence_parallel_size", std::to_string(task.sequence_parallel), "CLI --sequence-parallel"});
  return with_heads_whole(Options::from_json(config.dump(), "<zero bench step>", std::move(settings)), task.gpt);
}

Json measure_step(const StepTask& task, const std::shared_ptr<Communicator>& ranks) {
  using namespace step_rank_bench;
  at::set_num_threads(static_cast<int>(task.threads));
  const auto comm = task.alone_of > 0 ? fake_communicator(0, static_cast<int>(task.alone_of)) : ranks;
  return task.stage == StepTask::kCompute ? compute(task, comm) : training(task, comm);
}

}  // namespace zero::cli
