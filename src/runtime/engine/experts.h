// Layers whose experts are divided over ranks (zero/moe.h): which of them this rank has, and what replaces the others.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <zero/mesh.h>
#include <zero/moe.h>

#include "comm/group.h"
#include "engine/units.h"
#include "torch_hooks/interception.h"

namespace zero::engine {

// The parameters of experts that other ranks have. They have no memory, and an operator that reads one throws.
class RemoteExperts final : public torch_hooks::UseListener {
 public:
  RemoteExperts() = default;
  ~RemoteExperts() override { release(); }
  // Frees the memory. ranks: of the run, that have the parameter.
  void add(const ModelParameter& parameter, const std::vector<int>& ranks);
  // Stops intercepting them; they stay without data.
  void release() noexcept;

  void before_use(const int* tags, int count, const char* op) override;
  void after_use(const int*, int) noexcept override {}
  bool before_write(int tag, const char* op) override;

 private:
  struct Entry {
    at::Tensor tensor;
    c10::Storage storage;
    std::string text;  // "expert 5 of layers.1.moe lives on ranks 1, 3"
  };
  std::vector<Entry> entries_;
};

// All layers of a model that divide their experts.
class Experts {
 public:
  // mesh must outlive it.
  Experts(const Mesh& mesh, torch::nn::Module& model, bool data_before_experts);
  ~Experts();
  Experts(const Experts&) = delete;
  Experts& operator=(const Experts&) = delete;

  // The ranks that share the experts of a layer, by place.
  comm::Group& expert_group(int ep_size) const { return *comm::group_of(*mesh_.experts(ep_size).expert); }

  // The layers may run from now on, until this object ends.
  void bind();
  // For a parameter of an expert of other ranks.
  void release(const ModelParameter& parameter);
  // [collective] Gives every rank the buffers of the experts that it does not run, as the ranks of its group have them.
  void share_buffers();

 private:
  std::vector<int> ranks_with(const ExpertParameter& parameter) const;

  const Mesh& mesh_;
  const bool data_before_experts_;
  std::vector<std::shared_ptr<torch::nn::Module>> layers_;
  RemoteExperts remote_;
};

}  // namespace zero::engine
