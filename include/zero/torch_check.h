// Whether libtorch behaves as libzero relies on, beyond libtorch's documented interface.
#pragma once
#include <string>
#include <vector>

#include <zero/export.h>

namespace zero {

struct TorchCheck {
  std::string mechanism;
  std::string fault;  // empty: it works
};

// [local] Tries each mechanism with the libtorch of this process, on CPU tensors of a few elements, in some
// milliseconds; saved tensors only where the autograd engine is libtorch's own, which it is not in Python programs. The
// default generator is left as it was. For versions of torch that libzero was not tested with
// (ZERO_TESTED_TORCH in cmake/TorchVersions.cmake): with a fault results may be wrong.
ZERO_API std::vector<TorchCheck> check_torch();

}  // namespace zero
