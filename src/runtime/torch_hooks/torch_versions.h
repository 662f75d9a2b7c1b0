// What differs between the versions of libtorch that libzero builds with. cmake/TorchVersions.cmake has the list of
// them.
#pragma once
#include <torch/csrc/autograd/edge.h>

namespace zero::torch_hooks {

// How libtorch refers to a node of a graph: std::shared_ptr up to 2.12, c10::intrusive_ptr since 2.13.
using NodeReference = decltype(torch::autograd::Edge::function);

}  // namespace zero::torch_hooks
