// Forward and backward of a model as seen from outside: what descriptions of a model call, and what a forecast
// implements. Nothing is computed.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "step/facts.h"

namespace zero::planning {

using step::Tier;

// Memory of a pass: it counts from its making until the last owner lets go.
class PassTensor {
 public:
  virtual ~PassTensor() = default;
};
using Tensor = std::shared_ptr<PassTensor>;

class PassSink {
 public:
  virtual ~PassSink() = default;
  virtual Tensor make(std::int64_t bytes) = 0;
  // What waits for backward leaves the device for a tier, and comes back from it.
  virtual void put_away(Tier tier, std::int64_t bytes) = 0;
  virtual void bring_back(Tier tier, std::int64_t bytes) = 0;
  // An operator reads these parameters: indices into the model's.
  virtual void use(std::span<const std::size_t> parameters) = 0;
  void use(std::initializer_list<std::size_t> parameters) { use(std::span(parameters.begin(), parameters.size())); }
  virtual void begin_backward() = 0;
  // Autograd hands a gradient over, which nobody else holds.
  virtual void gradient(std::size_t parameter, Tensor gradient) = 0;
  virtual void end_backward() = 0;
  virtual bool on_gpu() const = 0;
};

}  // namespace zero::planning
