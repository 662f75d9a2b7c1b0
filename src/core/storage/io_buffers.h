// Page-aligned memory for transfers. It is mapped, touched and registered with the I/O path once, and reused by later
// buffers. Not inherited by forked children.
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

  // At least `bytes`; nullptr if out of memory.
  void* take(std::int64_t bytes);
  void give_back(void* data);
  // Registers current and future memory with `path`; nullptr: unregisters.
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
