// Parameters that tensor parallelism divides: this rank's part of a whole tensor, and the whole of all parts.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "engine/units.h"

namespace zero::comm {
class Group;
}

namespace zero::engine {

// A parameter's part `part`, contiguous; `whole` itself if the parameter is not cut. whole: of the parameter's shape,
// or flat.
at::Tensor part_of(const ModelParameter& parameter, const at::Tensor& whole, int part);
// [collective] The whole parameter of all parts of the tensor-parallel group, on every rank, in the shape of the whole.
// part: this rank's, of any shape.
at::Tensor whole_of(const ModelParameter& parameter, const at::Tensor& part, comm::Group& tensor_group);

}  // namespace zero::engine
