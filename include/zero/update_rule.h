// An optimizer of the program: an update rule that the Engine applies to its shards, in place of the configuration's
// optimizer. The Engine holds master parameters and states on every tier, clips, skips overflows and saves checkpoints.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/export.h>

namespace zero {

// What this rank updates of one parameter. The tensors are fp32, contiguous, where the states rest (the host, or a
// GPU), and valid during the call only. Scope::Elements: flat, of equal length, all or a part of the parameter.
// Scope::Whole: of the parameter's shape.
struct UpdatePiece {
  std::string parameter;            // its name in the model
  std::vector<std::int64_t> shape;  // of the whole parameter; with tensor parallelism of this rank's part
  std::int64_t begin = 0;           // of the first element in the flattened parameter
  int group = 0;                    // 0, or the number of its pattern in libzero.parameter_groups, from 1
  double lr = 0;                    // of that group
  std::int64_t count = 1;           // updates of this parameter, with this one; a frozen one counts none
  at::Tensor master;                // to be updated in place; in fp32 without offload it may be the parameter itself
  at::Tensor gradient;              // mean or sum over the ranks, unscaled and clipped. May be overwritten
  std::vector<at::Tensor> states;   // in the order of states(), to be updated in place. Zeros if count is 1
};

class ZERO_API UpdateRule {
 public:
  virtual ~UpdateRule();
  // For messages, and for checkpoints, which other rules cannot continue unless they have states of the same names.
  virtual std::string name() const = 0;
  // Names of a parameter's states per element besides the master, up to 8. They are in checkpoints as "opt.NAME".
  // Parameters with other states form units of their own.
  virtual std::vector<std::string> states(const std::string& parameter,
                                          const std::vector<std::int64_t>& shape) const = 0;
  // The learning rate of group 0, and of patterns without one, until a scheduler or Engine::set_lr() changes it.
  virtual double lr() const = 0;

  // Elements: new values of an element depend on its own old values and gradient, and on what is the same for the whole
  // parameter. Each rank updates its shard.
  // Whole: they depend on the whole parameter (Muon, LAMB, Adafactor). One rank, its owner, gets all of it for the
  // update: gradients, masters and states are sent to it, new masters and states are sent back. Not with states in
  // files, offload_optimizer.ratio, delayed_update, or a parameter that tensor parallelism cuts: ConfigError.
  enum class Scope { Elements, Whole };
  virtual Scope scope(const std::string& parameter, const std::vector<std::int64_t>& shape) const;
  // Of a Whole parameter: the work of its update in any unit, by which parameters are dealt to owners. Default: its
  // number of elements.
  virtual double cost(const std::string& parameter, const std::vector<std::int64_t>& shape) const;

  // A hash of the numbers that the next update uses. Ranks compare it before each update: ConfigError where they
  // differ.
  virtual std::uint64_t choices() const { return 0; }
  // Around all update() calls of a step that is not skipped. Called on every rank, also where it has nothing to update.
  virtual void begin_step() {}
  virtual void end_step() {}
  // Updates these pieces, of one unit or a part of one, all of the same scope. Called without grad mode, in the thread
  // of Engine::step(); with zero_optimization.delayed_update in another one. After an exception the Engine is unusable
  // on every rank.
  virtual void update(std::span<UpdatePiece> pieces) = 0;
};

}  // namespace zero
