// Events of a model's forward and backward. Model descriptions call this interface; dry runs implement it. Nothing is
// computed.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "step/facts.h"

namespace zero::planning {

using step::Tier;

// Memory of a pass, counted from its creation until its last reference is dropped.
class PassTensor {
 public:
  virtual ~PassTensor() = default;
};
using Tensor = std::shared_ptr<PassTensor>;

class PassSink {
 public:
  virtual ~PassSink() = default;
  virtual Tensor make(std::int64_t bytes) = 0;
  // A tensor saved for backward is offloaded to a tier, and fetched from it.
  virtual void put_away(Tier tier, std::int64_t bytes) = 0;
  virtual void bring_back(Tier tier, std::int64_t bytes) = 0;
  // An operator reads these parameters, given by index.
  virtual void use(std::span<const std::size_t> parameters) = 0;
  void use(std::initializer_list<std::size_t> parameters) { use(std::span(parameters.begin(), parameters.size())); }
  virtual void begin_backward() = 0;
  // Autograd delivers a gradient; there is no other reference to it.
  virtual void gradient(std::size_t parameter, Tensor gradient) = 0;
  virtual void end_backward() = 0;
  virtual bool on_gpu() const = 0;
};

}  // namespace zero::planning
