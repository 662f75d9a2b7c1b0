// Page-aligned memory for transfers: mapped and touched once, registered with the I/O path once,
// used again by later buffers. Not copied into children made by fork.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "storage/io_path.h"

namespace zero::storage {

class IoBuffers {
 public:
  IoBuffers() = default;
  ~IoBuffers();
  IoBuffers(const IoBuffers&) = delete;
  IoBuffers& operator=(const IoBuffers&) = delete;

  // At least `bytes`; nullptr when the system has none.
  void* take(std::int64_t bytes);
  void give_back(void* data);
  // Registers what is and will be mapped with the path; nullptr: with none any more.
  void serve(IoPath* path);

 private:
  struct Piece {
    void* data;
    std::int64_t bytes;
    bool taken;
  };
  std::mutex mutex_;
  std::vector<Piece> pieces_;
  IoPath* path_ = nullptr;
};

}  // namespace zero::storage
