// See experts.h.
#include "engine/experts.h"

#include <torch/nn/module.h>

#include "base/check.h"
#include "parallel/mesh_degrees.h"
#include "torch_hooks/storage_access.h"

namespace zero::engine {

void RemoteExperts::add(const ModelParameter& parameter, const std::vector<int>& ranks) {
  const auto& expert = *parameter.expert;
  std::string text = base::join("expert ", expert.index, " of ", expert.layer.empty() ? "the model" : expert.layer,
                                " lives on rank", ranks.size() == 1 ? " " : "s ");
  for (std::size_t i = 0; i < ranks.size(); ++i) text += base::join(i == 0 ? "" : ", ", ranks[i]);
  const auto& tensor = parameter.tensor;
  tensor.set_data(torch_hooks::without_data(tensor.sizes(), tensor.scalar_type(), tensor.device()));
  torch_hooks::release_storage(tensor.storage(), "parameter " + parameter.name + " was read: " + text);
  entries_.push_back({tensor, tensor.storage(), std::move(text)});
  torch_hooks::intercept(tensor, this, static_cast<int>(entries_.size() - 1));
}

void RemoteExperts::release() noexcept {
  for (const auto& entry : entries_) torch_hooks::stop_intercepting(entry.tensor, entry.storage);
  entries_.clear();
}

void RemoteExperts::before_use(const int* tags, int, const char* op) {
  throw ConfigError(base::join("[Engine] ", op,
                               " reads a parameter of another rank: ", entries_[static_cast<std::size_t>(tags[0])].text,
                               ". Hint: engine.parameter_state(name) returns its values on every rank."));
}

bool RemoteExperts::before_write(int tag, const char* op) {
  before_use(&tag, 1, op);
  return false;
}

Experts::Experts(const Mesh& mesh, torch::nn::Module& model, bool data_before_experts)
    : mesh_(mesh), data_before_experts_(data_before_experts) {
  for (const auto& module : model.modules()) {
    const auto* const layer = dynamic_cast<const ExpertLayer*>(module.get());
    if (layer != nullptr && layer->ep_size() > 1) layers_.push_back(module);
  }
}

Experts::~Experts() {
  for (const auto& module : layers_) dynamic_cast<ExpertLayer&>(*module).bind(nullptr);
}

void Experts::bind() {
  for (const auto& module : layers_) {
    auto& layer = dynamic_cast<ExpertLayer&>(*module);
    layer.bind(mesh_.experts(layer.ep_size()).expert);
  }
}

void Experts::release(const ModelParameter& parameter) { remote_.add(parameter, ranks_with(*parameter.expert)); }

void Experts::share_buffers() {
  const at::NoGradGuard no_grad;
  for (const auto& module : layers_) {
    const auto& layer = dynamic_cast<const ExpertLayer&>(*module);
    auto& group = expert_group(layer.ep_size());
    const auto per_rank = layer.num_experts() / layer.ep_size();
    for (const auto& expert : module->named_children()["experts"]->named_children())
      for (const auto& buffer : expert.value()->buffers()) {
        if (!buffer.defined() || buffer.numel() == 0) continue;
        const auto place = static_cast<int>(std::stoll(expert.key()) / per_rank);
        const auto values = buffer.detach().contiguous();
        group.broadcast(values.view({-1}).view(at::kByte), place)->wait();
        if (place != group.rank()) buffer.detach().copy_(values);
      }
  }
}

std::vector<int> Experts::ranks_with(const ExpertParameter& parameter) const {
  std::vector<int> ranks;
  for (int n = 0; n < mesh_.size("dp_sp"); ++n)
    if (parallel::ExpertGrid::of(n, mesh_.size("dp_sp"), parameter.ep_size, data_before_experts_).place ==
        parameter.place())
      ranks.push_back(n * mesh_.size("tp") + mesh_.rank("tp"));
  return ranks;
}

}  // namespace zero::engine
