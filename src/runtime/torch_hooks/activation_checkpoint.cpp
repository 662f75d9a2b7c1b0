// Checkpointed segments with saved-tensor hooks: in forward, every saved tensor is replaced by the number of a slot.
// The first slot that backward requests reruns the segment, which fills the other slots.
//
// [Note: slots] A slot lives as long as the graph node that saved it, and releases its tensor when it is requested, so
// memory decreases during backward as without checkpointing. If requested twice (retained graph), the segment runs
// again. Parameters need no slot; they are kept by reference.
//
// [Note: nesting] The inputs of a segment are saved like other tensors, so those of an inner segment become slots of
// the outer one and are dropped and recomputed with it.
//
// [Note: kept results] A result of kept_in_checkpoint() is kept by all segments that are in their first run, and taken
// from the outermost one that is recomputed: an inner segment's first run happens again in it.
#include <zero/activation_checkpoint.h>
#include <zero/errors.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.h"
#include "torch_hooks/saved_tensors.h"

namespace zero {
namespace {

using Hooks = torch_hooks::SavedTensorHooks;
using torch_hooks::Recorder;
using torch_hooks::Recording;

// The random number generators that a segment may use: the CPU's and those of its inputs' devices.
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
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
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

// Ends the recomputation when all slots are filled. Not a std::exception, so that handlers in the segment do not catch
// it.
struct Enough {};

class Segment;

// A run of a segment in this thread, the first one or a recomputation.
struct Run {
  explicit Run(Segment* segment, bool again);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Segment* const segment;
  const bool again;
  std::size_t next = 0;  // of the segment's kept results
  Run* const outer;
};
thread_local Run* innermost = nullptr;

Run::Run(Segment* segment, bool again) : segment(segment), again(again), outer(innermost) { innermost = this; }
Run::~Run() { innermost = outer; }

// A result of kept_in_checkpoint(), and the states of the segment's generators after it if it drew.
struct KeptResult {
  std::shared_ptr<const void> value;
  std::vector<at::Generator> generators;
  std::vector<at::Tensor> states;
};

class Segment final : public std::enable_shared_from_this<Segment> {
 public:
  Segment(std::vector<at::Tensor> inputs, detail::CheckpointScope::Again again, bool may_stop)
      : again_(std::move(again)),
        may_stop_(may_stop),
        generators_(generators_for(inputs)),
        before_(states_of(generators_)) {
    std::optional<Recording> by_nobody;  // until the first run has ended, see keep_inputs()
    nested_ = Recording::active();
    if (!nested_) by_nobody.emplace(nullptr);
    for (const auto& input : inputs) {
      inputs_.emplace_back(input, /*is_output=*/false);
      versions_.push_back(input.defined() ? torch_hooks::SavedVersion(input) : torch_hooks::SavedVersion());
    }
  }

  // --- forward ---
  std::size_t add_slot(const at::Tensor& tensor) {
    slots_.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.device(), torch_hooks::SavedVersion(tensor),
                      at::Tensor(), torch_hooks::SavedVersion(), true});
    return slots_.size() - 1;
  }
  void end_forward() {
    open_ = false;
    after_ = states_of(generators_);
    if (equal(before_, after_)) generators_.clear(), before_.clear(), after_.clear();
  }
  void begin_keeping() const {
    if (!nested_ && torch_hooks::saved_tensor_policy()) torch_hooks::saved_tensor_policy()->begin_segment();
  }
  // Called only now, because the first parameter used in the segment selects the thread's policy.
  void keep_inputs() {
    if (nested_ || !torch_hooks::saved_tensor_policy()) return;
    kept_ = torch_hooks::saved_tensor_policy()->end_segment();
    if (!kept_) return;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const auto tensor = inputs_[i].get_raw_data();
      // An input that was modified in place stays saved, so that backward reports the usual error.
      if (!tensor || !tensor->defined() || torch_hooks::is_parameter(*tensor) || !versions_[i].unchanged()) continue;
      if (auto hooks = kept_->input(*tensor)) inputs_[i].register_hooks(std::move(hooks));
    }
  }

  void keep(KeptResult result) { results_.push_back(std::move(result)); }
  const std::vector<at::Generator>& generators() const { return generators_; }

  // --- backward ---
  KeptResult& kept(std::size_t index) {
    if (index == results_.size())
      throw ConfigError(
          base::join("[activation_checkpoint] got more calls of kept_in_checkpoint in the second run, expected ",
                     results_.size(), " as in the first", kHint));
    return results_[index];
  }
  at::Tensor take(std::size_t index) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (open_)
      throw ConfigError(
          "[activation_checkpoint] got a backward pass through a segment that is still running, expected it after the "
          "segment. Hint: call autograd outside of the checkpointed function.");
    auto& slot = slots_[index];
    if (!slot.version.unchanged()) fail_for_write();
    if (!slot.value.defined()) recompute();
    if (!slot.value_version.unchanged()) fail_for_write();
    return std::move(slot.value);
  }
  void end_slot(std::size_t index) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    slots_[index].alive = false;
    slots_[index].value.reset();
  }
  // Takes the tensors that the recomputation saves, in the same order.
  void refill(const at::Tensor& tensor) {
    if (next_ == slots_.size()) {
      ++next_;
      return;  // reported when the run has ended
    }
    if (next_ > slots_.size()) return;
    auto& slot = slots_[next_];
    if (tensor.sizes() != c10::IntArrayRef(slot.sizes) || tensor.scalar_type() != slot.dtype ||
        tensor.device() != slot.device)
      throw ConfigError(base::join("[activation_checkpoint] got ", c10::toString(tensor.scalar_type()), " ",
                                   tensor.sizes(), " on ", tensor.device(), " as saved tensor ", next_,
                                   " of the second run, expected ", c10::toString(slot.dtype), " ",
                                   c10::IntArrayRef(slot.sizes), " on ", slot.device, kHint));
    if (slot.alive) {
      slot.value = tensor.detach();
      slot.value_version = torch_hooks::SavedVersion(slot.value);
    }
    ++next_;
    if (next_ == enough_) throw Enough{};
  }

 private:
  static constexpr const char* kHint =
      ". Hint: the function has to do the same both times; state it changes, or a branch on such state, belongs "
      "outside.";

  struct Slot {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    torch_hooks::SavedVersion version;  // in the first run
    at::Tensor value;
    torch_hooks::SavedVersion value_version;
    bool alive;
  };

  void recompute();
  [[noreturn]] static void fail_for_write() {
    throw ConfigError(
        "[activation_checkpoint] got a tensor that was written in place after an operation in the segment had saved it "
        "for backward, expected it unchanged. Hint: leave out the underscore: x = x.add(y) instead of x.add_(y).");
  }

  std::recursive_mutex mutex_;
  detail::CheckpointScope::Again again_;
  bool may_stop_, open_ = true, running_ = false, nested_ = false;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<torch_hooks::SavedVersion> versions_;     // of the inputs
  std::shared_ptr<torch_hooks::CheckpointFrame> kept_;  // null: the inputs are saved as usual
  at::ThreadLocalState modes_;                          // grad mode, autocast and others
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> before_,
      after_;  // generator states before and after the first run; empty if it drew no numbers
  std::vector<Slot> slots_;
  std::vector<KeptResult> results_;
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
    if (torch_hooks::is_parameter(tensor)) {
      // detach(): otherwise an output saved by its own node would form a cycle.
      parameter_ = tensor.detach();
      version_ = torch_hooks::SavedVersion(parameter_);
      segment_.reset();
      return;
    }
    slot_ = segment_->add_slot(tensor);
    has_slot_ = true;
  }
  at::Tensor call_unpack_hook() override {
    if (has_slot_) return segment_->take(slot_);
    if (!version_.unchanged())
      throw ConfigError(
          "[activation_checkpoint] got a parameter that was written in place between forward and backward, expected it "
          "unchanged. Hint: step after backward.");
    return parameter_;
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::size_t slot_ = 0;
  bool has_slot_ = false;
  at::Tensor parameter_;
  torch_hooks::SavedVersion version_;
};

// A tensor saved by the recomputation, whose graph is discarded.
class RefillHooks final : public Hooks {
 public:
  explicit RefillHooks(Segment* segment) : segment_(segment) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    if (!torch_hooks::is_parameter(tensor)) segment_->refill(tensor);
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
  struct Again {
    torch_hooks::CheckpointFrame* kept;
    explicit Again(torch_hooks::CheckpointFrame* k) : kept(k) {
      if (kept != nullptr) kept->begin_recompute();
    }
    void end() {
      if (auto* now = std::exchange(kept, nullptr)) now->end_again();
    }
  } again(kept_.get());
  std::vector<at::Tensor> inputs;
  try {
    for (const auto& input : inputs_) inputs.push_back(input.unpack());
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find("inplace") == std::string::npos) throw;
    throw ConfigError(
        "[activation_checkpoint] got an input that was written in place after the segment ran, expected it unchanged "
        "(" +
        text.substr(0, text.find('\n')) + ")");
  }
  const bool drew = !before_.empty();
  next_ = enough_ = 0;
  // If random numbers are drawn, the whole segment runs, so that the final generator state can be compared.
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
    std::optional<torch_hooks::SegmentRun> run(std::in_place);
    const Run replay(this, /*again=*/true);
    try {
      again_(inputs);
    } catch (const Enough&) {
      again.end();
      return;
    }
    run.reset();
    if (drew) end = states_of(generators_);
  }
  again.end();
  if (next_ != slots_.size())
    throw ConfigError(base::join("[activation_checkpoint] got ", next_ > slots_.size() ? "more" : std::to_string(next_),
                                 " saved tensors from the second run, expected ", slots_.size(), " as from the first",
                                 kHint));
  if (drew && !equal(end, after_))
    throw ConfigError(
        "[activation_checkpoint] got other random numbers in the second run than in the first, expected the same. "
        "Hint: another thread "
        "used the generator at the same time (ranks as threads share it: use one process a rank), or the function "
        "draws differently.");
}

}  // namespace

namespace detail {

struct CheckpointScope::State final : Recorder {
  std::shared_ptr<Segment> segment;
  std::optional<Recording> recording;
  std::optional<torch_hooks::SegmentRun> run;
  std::optional<Run> first;
  std::unique_ptr<Hooks> hooks() override { return std::make_unique<SlotHooks>(segment); }
};

CheckpointScope::CheckpointScope(std::vector<at::Tensor> inputs, Again again, bool may_stop) {
  if (!at::GradMode::is_enabled()) return;
  torch_hooks::install_engine();
  state_ = std::make_unique<State>();
  state_->segment = std::make_shared<Segment>(std::move(inputs), std::move(again), may_stop);
  state_->segment->begin_keeping();
  state_->recording.emplace(state_.get());
  state_->run.emplace();
  state_->first.emplace(state_->segment.get(), /*again=*/false);
}

void CheckpointScope::end() {
  if (!state_) return;
  const auto state = std::move(state_);
  state->first.reset();
  state->run.reset();
  state->recording.reset();
  state->segment->end_forward();
  state->segment->keep_inputs();
}

CheckpointScope::~CheckpointScope() {
  if (!state_) return;
  state_->first.reset();
  state_->run.reset();
  state_->recording.reset();
  try {
    state_->segment->end_forward();
  } catch (...) {
    // Without the generator's state, the segment is treated as not reproducible.
  }
}

std::shared_ptr<const void> kept_in_checkpoint(const std::function<std::shared_ptr<const void>()>& make) {
  const KeptResult* known = nullptr;
  for (auto* run = innermost; run != nullptr; run = run->outer)
    if (run->again) known = &run->segment->kept(run->next++);
  KeptResult result;
  if (known != nullptr) {
    result = *known;
    set_states(result.generators, result.states);
  } else if (innermost == nullptr) {
    return make();
  } else {
    result.generators = innermost->segment->generators();
    const auto before = states_of(result.generators);
    result.value = make();
    result.states = states_of(result.generators);
    if (equal(before, result.states)) result.generators.clear(), result.states.clear();
  }
  for (auto* run = innermost; run != nullptr; run = run->outer)
    if (!run->again) run->segment->keep(result);
  return result.value;
}

}  // namespace detail
}  // namespace zero
