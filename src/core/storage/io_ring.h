// Requests over io_uring. liburing is seen by io_ring.cpp alone; without it at build time there is
// only the error.
#pragma once
#include <cstdint>
#include <memory>

#include "storage/io_path.h"
#include "storage/request_queue.h"

namespace zero::storage {

// One ring and one thread for each of settings.threads. Queue, settings and faults must outlive it.
// Throws IoError with the system's text where rings cannot be had.
std::unique_ptr<IoPath> make_io_ring(RequestQueue& queue, const IoSettings& settings, std::int64_t alignment,
                                     FaultSource* faults);

}  // namespace zero::storage
