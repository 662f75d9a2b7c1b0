// Replaces io_ring.cpp in builds without liburing.
#include "storage/io_ring.h"

#include <zero/errors.h>

namespace zero::storage {

std::unique_ptr<IoPath> make_io_ring(RequestQueue&, const IoSettings&, std::int64_t, FaultSource*) {
  throw IoError(
      "[SwapFile] got io_uring, expected threads: liburing was not found when libzero was built. Hint: "
      "install liburing-dev and build again.");
}

}  // namespace zero::storage
