// What a libzero.MoE and the engine know of each other.
#pragma once
#include <zero/moe.h>

#include <memory>

namespace libzero {

// A libzero.MoE shares it with its mirror: the group that an Engine binds to the mirror reaches forward().
struct PyMoe {
  zero::MoeOptions options;
  std::shared_ptr<zero::Communicator> group;
};

}  // namespace libzero
