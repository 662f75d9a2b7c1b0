// Splits the matrix products of unmodified modules over the ranks of a tensor-parallel group (Megatron-LM,
// 1909.08053). Each rank holds a part of a weight, and the module's product with it is changed:
//   Column: the output is a part of the whole's columns. The input's gradient is summed over the group.
//   Row: the input is a part. The output is summed over the group before the bias is added.
// An embedding whose rows are cut looks up its own rows and sums over the group. Any other operator that reads a part
// is an error, because its result would be wrong.
#pragma once
#include <ATen/core/Tensor.h>
#include <zero/communicator.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/random_region.h"
#include "sharding/cut_plan.h"
#include "torch_hooks/interception.h"
#include "torch_hooks/saved_tensors.h"

namespace zero::parallel {

// All collectives are over the group, in the order in which the module calls operators, which must be the same on all
// of its ranks. Use it from one thread at a time.
class SplitProducts final : public torch_hooks::CallHandler, public torch_hooks::SegmentListener {
 public:
  // device: of the parameters. shared_generator: the group's ranks are threads of one process.
  SplitProducts(std::shared_ptr<Communicator> group, at::Device device, bool shared_generator);

  struct Parameter {
    std::string name;
    sharding::ParameterCut cut;
  };
  // The parameter with this tag. Those without a cut and without sum_gradient need no handler.
  void add(int tag, Parameter parameter);

  // A forward begins; `compare`: the inputs of column products and embeddings are compared over the group.
  void begin_forward(bool compare) { compare_ = compare; }
  // The forward has ended or failed, or the generator is saved or loaded: releases the last input and ends open
  // regions.
  void end_forward() noexcept;
  // Whether the model is between a column and a row product, where tensors differ between ranks.
  bool in_region() const { return regions_.back()->is_open(); }
  // Whether other operators may read parts (engine.gathered_parameters()).
  void set_readable(bool readable) { readable_ = readable; }

  void handle(torch_hooks::OperatorCall& call, const Use* uses, std::size_t count) override;
  void before_kernel(int tag, const char* kernel) override;
  void begin_run() override;
  void end_run() noexcept override;

 private:
  struct Product;
  bool in_backward_formula(torch_hooks::OperatorCall& call, const Product* product, const Use* uses,
                           std::size_t count) const;
  const Parameter& at(int tag) const { return *parameters_[static_cast<std::size_t>(tag)]; }
  int parts() const { return group_->size(); }
  void column(torch_hooks::OperatorCall& call, const Product& product, const Parameter& weight);
  void row(torch_hooks::OperatorCall& call, const Product& product, const Parameter& weight);
  void embedding(torch_hooks::OperatorCall& call, const Parameter& weight);
  at::Tensor copied(const at::Tensor& x, const Parameter& weight);
  at::Tensor summed(const at::Tensor& y, const Parameter& weight);
  void require_tokens(const at::Tensor& x, const Parameter& weight) const;
  void compare(const at::Tensor& x, const Parameter& weight);
  void require_part_beside(torch_hooks::OperatorCall& call, const Product* product, const Parameter& bias) const;
  std::string holding(const Parameter& parameter) const;
  [[noreturn]] void refuse(const std::string& op, const Parameter& parameter) const;

  const std::shared_ptr<Communicator> group_;
  const at::Device device_;
  const bool shared_generator_;
  std::vector<std::optional<Parameter>> parameters_;  // by tag
  bool compare_ = false, readable_ = false;
  // The last input of a column product, and the same as an input of copy(): layers with one input share one node, whose
  // backward is one all-reduce.
  struct Input {
    at::Tensor x, copied;
    std::uint32_t version = 0;
    bool grad_mode = false;
  } last_;
  std::vector<std::unique_ptr<RandomRegion>> regions_;  // of the program, and of the runs of segments in it
};

}  // namespace zero::parallel
