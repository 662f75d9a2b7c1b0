// Checkpointed segments by saved-tensor hooks: in forward every saved tensor becomes the number of
// a slot; the first slot that backward asks for runs the segment again, which fills the others.
//
// [Note: slots] A slot lives as long as the graph node that saved into it, and gives its tensor
// away when it is asked for: memory falls during backward as without checkpointing. Asked twice (a
// retained graph), the segment runs again. Parameters take no slot, they are kept by reference.
//
// [Note: nesting] The inputs of a segment are saved as autograd saves tensors, so those of an inner
// segment become slots of the outer one and are dropped and recomputed with it.
#include <zero/activation_checkpoint.h>
#include <zero/errors.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.h"
#include "torchglue/interception.h"

namespace zero {
namespace {

using Hooks = torch::autograd::SavedVariableHooks;

// Who answers when autograd saves a tensor in this thread.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual std::unique_ptr<Hooks> hooks() = 0;
};
thread_local Recorder* recorder = nullptr;

class Recording {
 public:
  explicit Recording(Recorder* now) : before_(std::exchange(recorder, now)) {}
  ~Recording() { recorder = before_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  Recorder* before_;
};

// Autograd asks the engine for hooks whenever a node saves a tensor; the public way, a stack of
// default hooks, takes Python objects only.
struct RecordingEngine final : torch::autograd::Engine {
  ~RecordingEngine() override { stop(); }
  std::unique_ptr<Hooks> get_default_saved_variable_hooks() override { return recorder ? recorder->hooks() : nullptr; }
};

torch::autograd::Engine& recording_engine() {
  static auto* engine = new RecordingEngine;  // never destroyed: its threads may outlive main
  return *engine;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    using torch::autograd::Engine;
    if (&Engine::get_default_engine() != &Engine::get_base_engine())
      throw ConfigError("[activation_checkpoint] got an autograd engine installed by someone else (an embedded Python with torch?), "
                        "expected libtorch's own. Hint: do without checkpointing in this process.");
    torch::autograd::set_default_engine_stub(&recording_engine);
  });
}

// The generators a segment may draw from: the CPU's and those of its inputs' devices.
std::vector<at::Generator> generators_for(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Generator> all{at::detail::getDefaultCPUGenerator()};
  for (const auto& input : inputs) {
    if (!input.defined() || input.device().is_cpu() || input.device().is_meta()) continue;
    auto generator = at::globalContext().defaultGenerator(input.device());
    if (std::find(all.begin(), all.end(), generator) == all.end()) all.push_back(std::move(generator));
  }
  return all;
}

std::vector<at::Tensor> states_of(const std::vector<at::Generator>& generators) {
  std::vector<at::Tensor> states;
  for (const auto& generator : generators) states.push_back(generator.get_state());
  return states;
}

void set_states(std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states) {
  for (std::size_t i = 0; i < generators.size(); ++i) generators[i].set_state(states[i]);
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

class GeneratorScope {
 public:
  GeneratorScope(std::vector<at::Generator>& generators, const std::vector<at::Tensor>& states)
      : generators_(generators), later_(states_of(generators)) {
    set_states(generators_, states);
  }
  ~GeneratorScope() { set_states(generators_, later_); }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  std::vector<at::Generator>& generators_;
  std::vector<at::Tensor> later_;
};

// Nothing is missing any more: leaves the recomputation. Not a std::exception, so that the
// segment's own handlers let it pass.
struct Enough {};

// A parameter, or a view of one: it is there in backward anyway.
bool is_parameter(const at::Tensor& tensor) {
  if (torchglue::is_intercepted(tensor)) return true;
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  return owner.is_leaf() && owner.requires_grad();
}

class Segment final : public std::enable_shared_from_this<Segment> {
 public:
  Segment(std::vector<at::Tensor> inputs, detail::CheckpointScope::Again again, bool may_stop)
      : again_(std::move(again)), may_stop_(may_stop), generators_(generators_for(inputs)), before_(states_of(generators_)) {
    for (const auto& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  // --- forward ---
  std::size_t add_slot(const at::Tensor& tensor) {
    slots_.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.device(), at::Tensor(), true});
    return slots_.size() - 1;
  }
  void end_forward() {
    open_ = false;
    after_ = states_of(generators_);
    if (equal(before_, after_)) generators_.clear(), before_.clear(), after_.clear();
  }

  // --- backward ---
  at::Tensor take(std::size_t index) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (open_)
      throw ConfigError("[activation_checkpoint] got a backward pass through a segment that is still running, expected it after the "
                        "segment. Hint: call autograd outside of the checkpointed function.");
    if (!slots_[index].value.defined()) recompute();
    return std::move(slots_[index].value);
  }
  void end_slot(std::size_t index) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    slots_[index].alive = false;
    slots_[index].value.reset();
  }
  // What the second run saves, in the same order.
  void refill(const at::Tensor& tensor) {
    if (next_ == slots_.size()) {
      ++next_;
      return;  // reported when the run has ended
    }
    if (next_ > slots_.size()) return;
    auto& slot = slots_[next_];
    if (tensor.sizes() != c10::IntArrayRef(slot.sizes) || tensor.scalar_type() != slot.dtype || tensor.device() != slot.device)
      throw ConfigError(base::join("[activation_checkpoint] got ", c10::toString(tensor.scalar_type()), " ", tensor.sizes(), " on ",
                                   tensor.device(), " as saved tensor ", next_, " of the second run, expected ",
                                   c10::toString(slot.dtype), " ", c10::IntArrayRef(slot.sizes), " on ", slot.device, kHint));
    if (slot.alive) slot.value = tensor.detach();
    ++next_;
    if (next_ == enough_) throw Enough{};
  }

 private:
  static constexpr const char* kHint =
      ". Hint: the function has to do the same both times; state it changes, or a branch on such state, belongs outside.";

  struct Slot {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    at::Tensor value;
    bool alive;
  };

  void recompute();

  std::recursive_mutex mutex_;
  detail::CheckpointScope::Again again_;
  bool may_stop_, open_ = true, running_ = false;
  std::vector<torch::autograd::SavedVariable> inputs_;
  at::ThreadLocalState modes_;  // grad mode, autocast and the like
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> before_, after_;  // their states around the first run; empty when it drew nothing
  std::vector<Slot> slots_;
  std::size_t next_ = 0, enough_ = 0;
};

// A tensor saved by the first run.
class SlotHooks final : public Hooks {
 public:
  explicit SlotHooks(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}
  ~SlotHooks() override {
    if (has_slot_) segment_->end_slot(slot_);
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    if (is_parameter(tensor)) {
      // detach(): an output that its own node keeps would be a cycle.
      parameter_ = tensor.detach();
      version_ = parameter_._version();
      segment_.reset();
      return;
    }
    slot_ = segment_->add_slot(tensor);
    has_slot_ = true;
  }
  at::Tensor call_unpack_hook() override {
    if (has_slot_) return segment_->take(slot_);
    if (static_cast<std::uint32_t>(parameter_._version()) != version_)
      throw ConfigError("[activation_checkpoint] got a parameter that was written in place between forward and backward, expected it "
                        "unchanged. Hint: step after backward.");
    return parameter_;
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::size_t slot_ = 0;
  bool has_slot_ = false;
  at::Tensor parameter_;
  std::uint32_t version_ = 0;
};

// A tensor saved by the second run, whose graph is thrown away.
class RefillHooks final : public Hooks {
 public:
  explicit RefillHooks(Segment* segment) : segment_(segment) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    if (!is_parameter(tensor)) segment_->refill(tensor);
  }
  at::Tensor call_unpack_hook() override {
    throw ConfigError("[activation_checkpoint] got a backward pass inside the second run of a segment, expected none");
  }

 private:
  Segment* segment_;
};

struct RefillRecorder final : Recorder {
  explicit RefillRecorder(Segment* s) : segment(s) {}
  std::unique_ptr<Hooks> hooks() override { return std::make_unique<RefillHooks>(segment); }
  Segment* segment;
};

void Segment::recompute() {
  ZERO_CHECK(!running_, "a checkpointed segment needs itself to be recomputed");
  std::vector<at::Tensor> inputs;
  try {
    for (const auto& input : inputs_) inputs.push_back(input.unpack());
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw ConfigError("[activation_checkpoint] got an input that was written in place after the segment ran, expected it unchanged (" +
                      text.substr(0, text.find('\n')) + ")");
  }
  const bool drew = !before_.empty();
  next_ = enough_ = 0;
  // With random numbers the whole segment runs, so that the generator's end can be compared.
  if (may_stop_ && !drew)
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (slots_[i].alive) enough_ = i + 1;
  struct Running {
    bool& flag;
    explicit Running(bool& f) : flag(f) { flag = true; }
    ~Running() { flag = false; }
  } running(running_);
  std::vector<at::Tensor> end;
  {
    at::ThreadLocalStateGuard modes(modes_);
    std::optional<GeneratorScope> generators;
    if (drew) generators.emplace(generators_, before_);
    RefillRecorder refill_recorder(this);
    Recording recording(&refill_recorder);
    try {
      again_(inputs);
    } catch (const Enough&) {
      return;
    }
    if (drew) end = states_of(generators_);
  }
  if (next_ != slots_.size())
    throw ConfigError(base::join("[activation_checkpoint] got ", next_ > slots_.size() ? "more" : std::to_string(next_),
                                 " saved tensors from the second run, expected ", slots_.size(), " as from the first", kHint));
  if (drew && !equal(end, after_))
    throw ConfigError(
        "[activation_checkpoint] got other random numbers in the second run than in the first, expected the same. Hint: another thread "
        "used the generator at the same time (ranks as threads share it: use one process a rank), or the function draws differently.");
}

}  // namespace

namespace detail {

struct CheckpointScope::State final : Recorder {
  std::shared_ptr<Segment> segment;
  std::optional<Recording> recording;
  std::unique_ptr<Hooks> hooks() override { return std::make_unique<SlotHooks>(segment); }
};

CheckpointScope::CheckpointScope(std::vector<at::Tensor> inputs, Again again, bool may_stop) {
  if (!at::GradMode::is_enabled()) return;
  install_engine();
  state_ = std::make_unique<State>();
  state_->segment = std::make_shared<Segment>(std::move(inputs), std::move(again), may_stop);
  state_->recording.emplace(state_.get());
}

CheckpointScope::~CheckpointScope() {
  if (!state_) return;
  state_->recording.reset();
  try {
    state_->segment->end_forward();
  } catch (...) {
    // Without the generator's state the segment counts as one whose numbers cannot be repeated.
  }
}

}  // namespace detail
}  // namespace zero
