// The model's parameters as the step program sees them: groups of members. Points the members' storages into the
// program's buffers and exchanges their .grad.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/member_gradients.h"
#include "engine/torch_buffers.h"
#include "observe/trace.h"
#include "step/backend.h"

namespace zero::engine {

class ModelBinding final : public step::ModelOps {
 public:
  // All references must outlive it. `memory` is shared with gradients that the program keeps.
  ModelBinding(std::shared_ptr<EngineMemory> memory, const std::vector<step::GroupFacts>& groups,
               std::vector<std::vector<ModelParameter>> members, observe::Trace& trace);

  void bind(int group, step::View whole) override;
  void unbind(int group) override;
  void values_changed(int group) override;
  void set_gradient(int group, int member, step::View kept) override;
  void drop_gradients(int group) override;
  void release_gradient(step::View gradient) override;

  // The values of all members, flat, fp32, with zeros as padding.
  at::Tensor values(int group) const;
  // Points a member's storage into `whole`, or leaves it without data if that is empty.
  void attach(int group, std::size_t member, step::View whole);
  // The members of a sharded group stay without data and throw an explanation when read.
  void abandon(int group) noexcept;

  // A gradient that autograd left in a member's .grad, for the step program. peer_readable: see GradStorage::take().
  struct Arrived {
    step::View view;
    bool peer_readable;
  };
  // nullopt: no gradient, or the member is not trained. ConfigError if the kept gradient was replaced.
  std::optional<Arrived> take_gradient(int group, int member);
  // No effect if the step program has released it.
  void drop_arrived(const step::View& view) { memory_->buffers.drop(view.buffer); }

  struct Group {
    Group(const step::GroupFacts& facts, std::vector<ModelParameter> members);
    const step::GroupFacts& facts;
    const std::vector<ModelParameter> members;
    std::vector<c10::Storage>
        storages;  // the members' original storages; a storage that a program substitutes is not modified
    MemberGradients gradients;
    observe::TraceOperation whole_trace;
    std::int64_t cut_begin = 0;  // elements of the flat vector before it are equal on all tensor-parallel ranks
    bool bound = false;
  };
  Group& group(int index) { return *groups_[static_cast<std::size_t>(index)]; }
  const std::vector<std::unique_ptr<Group>>& groups() const { return groups_; }
  // A parameter of the whole model. An expert's is at the same place of the same group on all ranks of its expert
  // group, of which the rank `place` has it; the others have another expert there.
  struct Located {
    int group;
    std::size_t member;
    int place = -1;    // -1: every rank has the parameter
    std::string name;  // its first one
    bool here = true;  // whether this rank has it
  };
  // By its name or by that of a tied parameter.
  std::optional<Located> find(const std::string& name) const;
  // The same; ConfigError that starts with `where` if there is none.
  Located require(const std::string& where, const std::string& name) const;

 private:
  static void release(const Group& group, std::size_t member);

  const std::shared_ptr<EngineMemory> memory_;
  observe::Trace& trace_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::set<int> lent_blocks_;  // blocks in use as a .grad; returned with it
};

}  // namespace zero::engine
