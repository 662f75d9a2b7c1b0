// Forwards the calls of Engine to State. Checkpoints are in src/runtime/checkpoint.
#include <zero/build.h>
#include <zero/build_generator.h>
#include <zero/engine.h>
#include <zero/program_steps.h>

#include <unistd.h>

#include <set>

#include "base/check.h"
#include "base/log.h"
#include "engine/state.h"
#include "torch_hooks/deferred_init.h"
#include "torch_hooks/divided_parameter.h"

namespace zero {

namespace {

// A forked child has the handles of the Engine's threads but not the threads, and must not contact the peers.
void end_unless_forked(engine::State* state, pid_t maker) {
  if (::getpid() == maker) delete state;
}

}  // namespace

Engine::Engine(ModuleHandle model, Options options, std::shared_ptr<Communicator> comm,
               std::shared_ptr<UpdateRule> rule)
    : state_(new engine::State(std::move(model.module), std::move(options), std::move(comm), nullptr, std::move(rule)),
             [maker = ::getpid()](engine::State* state) { end_unless_forked(state, maker); }) {}
Engine::Engine(ModuleHandle model, Options options, std::shared_ptr<Mesh> mesh, std::shared_ptr<UpdateRule> rule)
    : state_(new engine::State(std::move(model.module), std::move(options), mesh ? mesh->world() : nullptr, mesh,
                               std::move(rule)),
             [maker = ::getpid()](engine::State* state) { end_unless_forked(state, maker); }) {}
Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;

void Engine::backward(const at::Tensor& loss, const BackwardOptions& options) { state_->backward.run(loss, options); }
std::int64_t Engine::discard_micro_batch() { return state_->backward.discard_micro_batch(); }
at::Tensor Engine::gradient(const std::string& name) { return state_->gradients.get(name); }
OwnShard Engine::own_gradient(const std::string& name) { return state_->gradients.get_own(name); }
void Engine::set_gradient(const std::string& name, const at::Tensor& values) { state_->gradients.set(name, values); }
void Engine::set_own_gradient(const std::string& name, const at::Tensor& values) {
  state_->gradients.set_own(name, values);
}
std::int64_t Engine::micro_batches() const { return state_->parts.accumulated().micro_batches; }
void Engine::set_lr(int group, double lr) { state_->stepper.set_lr(group, lr); }
StepResult Engine::step() { return state_->stepper.step(); }
void Engine::flush() { state_->stepper.flush(); }
bool Engine::is_gradient_accumulation_boundary() const { return state_->stepper.at_boundary(); }
MemoryReport Engine::memory() const { return state_->memory(); }
void Engine::reset_peak_memory() { state_->reset_peak_memory(); }
GatheredParameters Engine::gathered_parameters(const std::vector<std::string>& names, bool modify) {
  return {state_, state_->scopes.begin({.names = names}, modify), modify};
}
GatheredParameters Engine::gather_all(bool modify) {
  return {state_, state_->scopes.begin({.all = true}, modify), modify};
}
GatheredParameters Engine::gather_module(const torch::nn::Module& module, bool modify) {
  return {state_, state_->scopes.begin({.module = &module}, modify), modify};
}
std::map<std::string, at::Tensor> Engine::full_state_dict() { return state_->exports.full_state_dict(); }
at::Tensor Engine::parameter_state(const std::string& parameter, const std::string& state) {
  return state_->states.get(parameter, state);
}
std::vector<std::string> Engine::state_names(const std::string& parameter) const {
  return state_->states.names(parameter);
}
OwnShard Engine::own_parameter_state(const std::string& parameter, const std::string& state) {
  return state_->states.get_own(parameter, state);
}
void Engine::set_parameter_state(const std::string& parameter, const std::string& state, const at::Tensor& values) {
  state_->states.set(parameter, state, values);
}
void Engine::set_own_parameter_state(const std::string& parameter, const std::string& state, const at::Tensor& values) {
  state_->states.set_own(parameter, state, values);
}
std::string Engine::state_hash() { return state_->exports.state_hash(); }
void Engine::start_trace(const std::filesystem::path& file, TraceSteps steps) {
  state_->trace.start(file.string(), steps);
}
TraceSummary Engine::stop_trace() { return state_->trace.stop(); }
void Engine::set_user_state(std::string json) { state_->user_state = std::move(json); }
std::string Engine::user_state() const { return state_->user_state; }
StepTimes Engine::times() const { return state_->parts.trace.times(); }
std::int64_t Engine::global_step() const { return state_->parts.program->steps(); }
std::int64_t Engine::skipped_steps() const { return state_->parts.progress.skipped_steps; }
std::int64_t Engine::global_samples() const { return state_->parts.progress.global_samples; }
std::int64_t Engine::accumulation_steps() const { return state_->parts.plan.batch.accumulation; }
std::int64_t Engine::micro_batch_size() const { return state_->parts.plan.batch.micro; }
double Engine::loss_scale() const { return state_->parts.scaler->scale(); }
double Engine::lr(int group) const { return state_->stepper.lr(group); }
int Engine::parameter_group(const std::string& name) const {
  const auto& parts = state_->parts;
  for (const auto& parameter : parts.plan.remote)
    if (parameter.name == name) return parts.optimizer->parameter_group_of(name, parameter.aliases);
  const auto found = parts.binding().require(parts.where("parameter_group"), name);
  auto aliases = parts.binding().group(found.group).members[found.member].aliases;
  aliases.push_back(name);
  return parts.optimizer->parameter_group_of(found.name, aliases);
}
const Options& Engine::options() const { return state_->job.options; }
const Mesh& Engine::mesh() const { return *state_->parts.ranks.mesh; }
std::shared_ptr<Mesh> Engine::shared_mesh() const { return state_->parts.ranks.mesh; }
Communicator& Engine::communicator() const { return *state_->job.communicator; }

std::vector<std::pair<std::string, std::int64_t>> Engine::units() const {
  std::vector<std::pair<std::string, std::int64_t>> result;
  for (const auto& group : state_->parts.groups) result.emplace_back(group.name, group.layout.numel());
  return result;
}

std::vector<std::string> Engine::unit_modules() const {
  std::set<std::string> paths;
  for (const auto& group : state_->parts.binding().groups())
    for (const auto& member : group->members)
      if (!member.unit.empty()) paths.insert(member.unit);
  return {paths.begin(), paths.end()};
}

GatheredParameters::GatheredParameters(std::shared_ptr<engine::State> state, std::vector<int> groups, bool modify)
    : state_(std::move(state)), groups_(std::move(groups)), modify_(modify) {}

GatheredParameters::GatheredParameters(GatheredParameters&&) noexcept = default;

void GatheredParameters::close() {
  if (auto state = std::move(state_)) state->scopes.end(groups_, modify_);
}

GatheredParameters::~GatheredParameters() {
  if (state_) state_->relay.report_if_unwinding();  // otherwise the end of the scope would wait for the peers
  try {
    close();
  } catch (const std::exception& e) {
    base::log(LogLevel::Error, std::string("gathered_parameters: ") + e.what());
  }
}

ProgramSteps::ProgramSteps(Engine& engine) : state_(engine.state_) {}
ProgramSteps::~ProgramSteps() = default;
void ProgramSteps::accept_backward() { state_->program_pass.accept(); }
void ProgramSteps::add_up() { state_->parts.progress.adds_up = state_->parts.plan.batch.accumulation == 1; }
double ProgramSteps::grad_norm() { return state_->stepper.grad_norm("grad_norm"); }
double ProgramSteps::clip_grad_norm(double max_norm) { return state_->stepper.clip_grad_norm(max_norm); }
void ProgramSteps::set_number(int group, const std::string& name, double value) {
  state_->stepper.set_number(group, name, value);
}
std::optional<double> ProgramSteps::take_clip() { return state_->parts.program->take_clip(); }
void ProgramSteps::discard_gradients() { state_->backward.discard_gradients(); }
void ProgramSteps::follow(const at::Tensor& output) { state_->program_pass.follow(output); }
at::Tensor ProgramSteps::scale(const at::Tensor& loss) { return state_->program_pass.scale(loss); }
void ProgramSteps::count_micro_batches(bool counts) {
  state_->parts.relay.keeping([&] {
    state_->checks.require_boundary("count_micro_batches");
    state_->parts.program->count_micro_batches(counts);
  });
}
void ProgramSteps::set_accumulation_steps(std::int64_t steps) {
  if (steps < 1) throw ConfigError(base::join("[Engine] accumulation steps: got ", steps, ", expected at least 1"));
  state_->parts.relay.keeping([&] {
    state_->checks.require_boundary("set_accumulation_steps");
    state_->parts.program->count_micro_batches(false);
    state_->parts.progress.accumulation = steps;
  });
}
void ProgramSteps::leave_out(const std::vector<std::string>& names) {
  state_->parts.relay.keeping([&] {
    state_->checks.require_boundary("leave_out");
    const std::set<std::string> chosen(names.begin(), names.end());
    for (const auto& group : state_->parts.binding().groups())
      for (std::size_t i = 0; i < group->members.size(); ++i)
        if (chosen.contains(group->members[i].name)) group->gradients.exclude(i);
  });
}

namespace detail {
struct DeferredScope::State {
  explicit State(c10::Device device) : recording(device) {}
  torch_hooks::DeferredRecording recording;
};
DeferredScope::DeferredScope(c10::Device device) : state_(std::make_unique<State>(device)) {}
DeferredScope::~DeferredScope() = default;
void lend_generator() { torch_hooks::lend_generator(); }
void take_generator() { torch_hooks::take_generator(); }
}  // namespace detail

at::Tensor deferred_values(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device, std::int64_t place,
                           std::function<void(const at::Tensor&)> fill) {
  return torch_hooks::deferred_values(sizes, dtype, device, place, std::move(fill));
}

at::Tensor divided_parameter(const at::Tensor& like, at::IntArrayRef sizes) {
  return torch_hooks::divided_parameter(sizes, at::TensorOptions().dtype(like.dtype()).device(like.device()));
}

}  // namespace zero
