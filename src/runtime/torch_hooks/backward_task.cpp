#include "torch_hooks/backward_task.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <utility>

namespace zero::torch_hooks {

bool accumulates_into(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!node) return false;
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen != nullptr && !chosen->empty()) {  // autograd.grad(), or backward(inputs=...)
    const auto it = chosen->find(node.get());
    return it != chosen->end() && it->second.needed_;
  }
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(node.get()) != 0;
}

bool may_run_another() {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return (chosen == nullptr || chosen->empty()) && nodes != nullptr &&
         std::any_of(nodes->begin(), nodes->end(),
                     [](const auto* node) { return node->name().find("CheckpointFunction") != std::string::npos; });
}

int backward_number() { return torch::autograd::get_current_graph_task_id(); }
bool keeps_graph() { return torch::autograd::get_current_graph_task_keep_graph(); }
bool creates_graph() { return at::GradMode::is_enabled(); }

void at_end(std::function<void()> call) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(call));
}

}  // namespace zero::torch_hooks
