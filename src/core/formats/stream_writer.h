// Writes one file from front to back with several writes under way, bypassing the page cache where the file system can.
// Bytes are copied, so the caller's memory may change after append().
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "formats/files.h"

namespace zero::formats {

class StreamWriter {
 public:
  // begin: file offset of the first byte, a multiple of kDirectAlignment.
  StreamWriter(File& file, std::uint64_t begin);
  ~StreamWriter();  // waits for the writes under way
  StreamWriter(const StreamWriter&) = delete;
  StreamWriter& operator=(const StreamWriter&) = delete;

  // Memory for the next bytes, at most `bytes` of them; at least 1. Throws the error of an earlier write.
  char* room(std::size_t& bytes);
  // The bytes of room() are there.
  void advance(std::size_t bytes);
  // Writes the rest and waits. Throws the first error of a write.
  void finish();

 private:
  struct Buffer {
    AlignedMemory memory;
    std::uint64_t offset = 0;
    std::size_t filled = 0;
    bool ready = false;  // to be written
  };
  void loop();
  Buffer& next_free();

  File& file_;
  std::atomic<std::uint64_t>& moved_;  // of the thread that fills buffers
  std::uint64_t end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Buffer> buffers_;
  Buffer* current_ = nullptr;
  std::vector<Buffer*> waiting_;
  int under_way_ = 0;
  bool end_of_file_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;  // started when a buffer is full
};

}  // namespace zero::formats
