// See program_pass.h.
#include "engine/program_pass.h"

#include <ATen/ATen.h>

#include <utility>

#include "base/check.h"
#include "engine/backward_scope.h"
#include "torch_hooks/backward_task.h"

namespace zero::engine {

struct ProgramPass::Link {
  ProgramPass* pass = nullptr;  // null: the Engine has ended
  bool open = false;            // a pass of the program is under way
  int scaled = -1;              // the graph task whose loss was scaled
  int ended = -1;               // the graph task of the last pass
};

// Lives in the graph task.
struct ProgramPass::End {
  End(std::shared_ptr<Link> link, BackwardOptions options) : link(std::move(link)), options(options) {}
  ~End() {
    if (called || !link->open) return;
    link->open = false;
    if (link->pass != nullptr) link->pass->backward_.fail_program_pass();
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  void call() {
    called = true;
    link->open = false;
    if (link->pass != nullptr) link->pass->backward_.end_program_pass(options);
  }

  const std::shared_ptr<Link> link;
  const BackwardOptions options;
  bool called = false;
};

ProgramPass::ProgramPass(Parts& parts, Backward& backward)
    : p_(parts), backward_(backward), link_(std::make_shared<Link>()) {
  link_->pass = this;
}

ProgramPass::~ProgramPass() {
  link_->pass = nullptr;
  for (std::size_t g = 0; g < hooks_.size(); ++g)
    for (std::size_t i = 0; i < hooks_[g].size(); ++i)
      if (hooks_[g][i]) p_.binding().group(static_cast<int>(g)).members[i].tensor.remove_hook(*hooks_[g][i]);
}

void ProgramPass::accept() {
  if (!hooks_.empty()) return;
  const auto& groups = p_.binding().groups();
  hooks_.resize(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g]->members.size(); ++i) {
      const auto& tensor = groups[g]->members[i].tensor;
      hooks_[g].emplace_back();
      if (tensor.is_inference()) continue;
      const bool trained = tensor.requires_grad();
      if (!trained) tensor.set_requires_grad(true);  // a hook of a frozen parameter is called once it is not any more
      hooks_[g].back() = tensor.register_hook(
          [link = link_, g = static_cast<int>(g), i = static_cast<int>(i)](const at::Tensor& gradient) -> at::Tensor {
            return link->pass == nullptr ? at::Tensor() : link->pass->before_gradient(g, i, gradient);
          });
      if (!trained) tensor.set_requires_grad(false);
    }
  }
}

void ProgramPass::follow(const at::Tensor& output) {
  (void)output.register_hook([link = link_](const at::Tensor&) -> at::Tensor {
    auto* const pass = link->pass;
    if (pass == nullptr || pass->p_.progress.in_backward || BackwardScope::active()) return {};
    if (pass->reaches_parameters()) pass->begin();
    return {};
  });
}

at::Tensor ProgramPass::scale(const at::Tensor& loss) {
  auto scaled = loss.to(at::kFloat) * p_.scaler->scale();
  (void)scaled.register_hook([link = link_](const at::Tensor&) -> at::Tensor {
    link->scaled = torch_hooks::backward_number();
    return {};
  });
  return scaled;
}

bool ProgramPass::reaches_parameters() const {
  for (const auto& group : p_.binding().groups())
    for (std::size_t i = 0; i < group->members.size(); ++i)
      if (!group->gradients.excluded(i) && torch_hooks::accumulates_into(group->members[i].tensor)) return true;
  return torch_hooks::may_run_another();
}

at::Tensor ProgramPass::before_gradient(int group, int member, const at::Tensor& gradient) {
  const auto i = static_cast<std::size_t>(member);
  const auto& bound = p_.binding().group(group);
  if (p_.progress.in_backward ? !link_->open : BackwardScope::active()) return {};  // of a backward() of an Engine
  if (bound.gradients.excluded(i) || !torch_hooks::accumulates_into(bound.members[i].tensor)) return {};
  if (!p_.progress.in_backward) begin();
  return p_.accumulation() == 1 ? at::Tensor() : gradient / static_cast<double>(p_.accumulation());
}

void ProgramPass::begin() {
  const int task = torch_hooks::backward_number();
  p_.relay.keeping([&] {
    const auto where = p_.where("backward");
    if (p_.products)
      throw ConfigError(
          where + "loss.backward() was called with tensor parallelism. Hint: engine.backward(loss) in its place.");
    if (p_.job.settings.scales_loss() && link_->scaled != task)
      throw ConfigError(where +
                        "loss.backward() was called of a loss that is not scaled, in a run that scales it. Hint: "
                        "engine.backward(loss), or engine.scale(loss).backward().");
    if (task < link_->ended)
      throw ConfigError(where +
                        "gradients arrived after a backward() inside this one, of reentrant checkpointing. Hint: "
                        "use_reentrant=False, or engine.backward(loss) in place of loss.backward().");
  });
  const BackwardOptions options{.retain_graph = torch_hooks::keeps_graph() && !torch_hooks::creates_graph(),
                                .create_graph = torch_hooks::creates_graph()};
  backward_.begin_program_pass(options);
  link_->open = true;
  link_->ended = task;
  const auto end = std::make_shared<End>(link_, options);
  torch_hooks::at_end([end] { end->call(); });
}

}  // namespace zero::engine
