// A source of tensors under other names and in another order: the view of a Mapping. Holds at most 16 MiB of a tensor.
#pragma once
#include <memory>

#include "interchange/names.h"

namespace zero::interchange {

// `mapping`: of the source's tensors. The source must outlive the view.
std::unique_ptr<TensorSource> named_source(TensorSource& source, Mapping mapping);

}  // namespace zero::interchange
