// Requests through io_uring. Only io_ring.cpp includes liburing; builds without it always throw.
#pragma once
#include <cstdint>
#include <memory>

#include "storage/io_path.h"
#include "storage/request_queue.h"

namespace zero::storage {

// One ring and one thread per settings.threads. Queue, settings and faults must outlive it. Throws IoError with the
// system's text if rings are unavailable.
std::unique_ptr<IoPath> make_io_ring(RequestQueue& queue, const IoSettings& settings, std::int64_t alignment,
                                     FaultSource* faults);

}  // namespace zero::storage
