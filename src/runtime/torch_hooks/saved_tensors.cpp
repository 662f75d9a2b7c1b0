#include "torch_hooks/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <utility>

#include <zero/errors.h>

#include "torch_hooks/interception.h"
#include "torch_hooks/torch_versions.h"

namespace zero::torch_hooks {
namespace {

thread_local std::shared_ptr<SavedTensorPolicy> current_keeping;
thread_local std::weak_ptr<SegmentListener> current_listener;
thread_local Recorder* recorder = nullptr;
thread_local bool silent = false;  // a Recording with nullptr is active

// The public interface for such hooks, a stack of default hooks, takes Python objects only. Only the hooks differ: the
// base engine runs the graphs, because libtorch starts the threads of a GPU once in a process, for the engine that
// needs them first.
struct RecordingEngine final : torch::autograd::Engine {
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodeReference graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return get_base_engine().execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }
  std::unique_ptr<SavedTensorHooks> get_default_saved_variable_hooks() override {
    if (recorder != nullptr) return recorder->hooks();
    return silent || !current_keeping ? nullptr : current_keeping->saved();
  }
};

torch::autograd::Engine& recording_engine() {
  static auto* engine = new RecordingEngine;  // never destroyed: a device's threads may outlive main
  return *engine;
}

}  // namespace

const std::shared_ptr<SavedTensorPolicy>& saved_tensor_policy() { return current_keeping; }

void set_saved_tensor_policy(std::shared_ptr<SavedTensorPolicy> now) {
  if (now) install_engine();
  current_keeping = std::move(now);
}

void set_segment_listener(std::weak_ptr<SegmentListener> listener) { current_listener = std::move(listener); }

SegmentRun::SegmentRun() : listener_(current_listener.lock()) {
  if (listener_) listener_->begin_run();
}

Recording::Recording(Recorder* now)
    : before_(std::exchange(recorder, now)), silent_before_(std::exchange(silent, now == nullptr)) {}
Recording::~Recording() {
  recorder = before_;
  silent = silent_before_;
}
bool Recording::active() { return recorder != nullptr; }

bool may_install_engine() {
  const auto& now = torch::autograd::Engine::get_default_engine();
  return &now == &torch::autograd::Engine::get_base_engine() || &now == &recording_engine();
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!may_install_engine())
      throw ConfigError(
          "[activation_checkpoint] got the autograd engine of Python, expected libtorch's own: "
          "activation_checkpointing "
          "and libzero.activation_offload work in C++ programs. Hint: torch.utils.checkpoint.checkpoint and "
          "torch.autograd.graph.save_on_cpu do it in Python programs.");
    torch::autograd::set_default_engine_stub(&recording_engine);
  });
}

bool is_parameter(const at::Tensor& tensor) {
  if (is_intercepted(tensor)) return true;
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  return owner.is_leaf() && owner.requires_grad();
}

SavedVersion::SavedVersion(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

}  // namespace zero::torch_hooks
