// A process group of c10d's gloo, as a program makes it.
#pragma once
#include <zero/process_group.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace zero::test {

// Ranks meet at a new file.
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group(const std::string& file, int rank, int size,
                                                                std::chrono::milliseconds timeout) {
  auto store = c10::make_intrusive<c10d::FileStore>(file, size);
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), rank, size, std::move(options));
}

inline std::shared_ptr<Communicator> over_process_group(const std::string& file, int rank, int size,
                                                        std::chrono::milliseconds timeout) {
  auto comm = Communicator::from_process_group(process_group(file, rank, size, timeout));
  comm->set_timeout(timeout);
  return comm;
}

}  // namespace zero::test
