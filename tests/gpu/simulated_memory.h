// The memory of the simulated GPU: device memory, which the host cannot touch, and pinned host memory, which it cannot
// touch while an operation of the device may use it. Both are mapped twice: at the address that the program sees, and
// at one that operations use. An access of the host that is not ordered is noted as a fault, and the page is opened.
// Thread-safe.
#pragma once
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gpu/happens_before.h"

namespace zero::test::simulated_gpu {

class Machine {
 public:
  static Machine& get();  // of this process: a forked child gets one of its own

  // Device memory for work on the stream; filled with NaNs. As libtorch's caching allocator, a freed block is used
  // again for the same stream at once, whatever other streams do with it.
  void* allocate_device(std::size_t bytes, int stream);
  void free_device(void* data);
  // The block is in use by that stream too (record_stream): it is not used again.
  void keep(void* data);
  // Page-aligned. A freed block is used again when no operation uses it.
  void* allocate_pinned(std::size_t bytes);
  void free_pinned(void* data);
  // The same; a fault if an operation may still use it.
  void free_host(void* data);

  bool is_device(const void* data) const { return device_.holds(data); }
  bool is_pinned(const void* data) const { return pinned_.holds(data); }
  // The address of the same byte for an operation; other addresses as they are.
  void* reach(const void* data) const;
  // reads(data, bytes), writes(...): for operation().
  static HappensBefore::Access reads(const void* data, std::int64_t bytes) { return access(data, bytes, false); }
  static HappensBefore::Access writes(const void* data, std::int64_t bytes) { return access(data, bytes, true); }

  // Host memory that is not pinned is left out.
  void operation(int stream, const std::string& name, std::vector<HappensBefore::Access> accesses);
  HappensBefore::Clock recorded(int stream);
  void stream_waits(int stream, const HappensBefore::Clock& clock);
  void host_waits(const HappensBefore::Clock& clock);
  void host_waits_for(int stream) { host_waits(recorded(stream)); }
  void host_waits_for_all();
  // Whether an event with this clock is reached: known to be, or as the setting says; who asks for the same again and
  // again sees it reached. A watchdog's answers tell the host's other threads nothing.
  bool query(const HappensBefore::Clock& clock);
  // The stream's last operation never ends, until release(): waits for it block, and queries say no.
  void hang(int stream);
  void release(int stream);

  std::size_t allocated() const { return allocated_; }
  std::size_t allocated_peak() const { return peak_; }
  void reset_peak() { peak_ = allocated_; }

  bool queries_are_reached = false;
  void add_fault(const std::string& text);
  std::vector<std::string> take_faults();
  std::vector<std::string> take_operations();

 private:
  struct Region {
    char* seen = nullptr;     // by the program
    char* reached = nullptr;  // by operations
    std::size_t used = 0;
    bool holds(const void* data) const { return data >= seen && data < seen + kBytes; }
  };
  struct Block {
    std::size_t bytes;
    int stream;
    bool kept;  // by record_stream
    bool live = true;
  };
  static constexpr std::size_t kBytes = std::size_t{16} << 30;

  Machine();
  static HappensBefore::Access access(const void* data, std::int64_t bytes, bool write) {
    return {reinterpret_cast<std::uintptr_t>(data), static_cast<std::size_t>(bytes), write};
  }
  static void on_fault(int signal, siginfo_t* info, void* context);
  bool fault_at(char* address, bool write);
  bool hangs(const HappensBefore::Clock& clock) const;
  void check_live(const std::string& name, const HappensBefore::Access& access);
  void close_pages(const HappensBefore::Access& access);
  void open_pages();
  void* cut(Region& region, std::size_t bytes);

  std::mutex mutex_;
  HappensBefore order_;
  Region device_, pinned_;
  std::map<void*, Block> blocks_;
  std::multimap<std::pair<int, std::size_t>, void*> free_device_;
  std::multimap<std::size_t, void*> free_pinned_;
  std::map<char*, int> pages_;           // closed pages of pinned memory, and their protection
  std::map<int, std::int64_t> hanging_;  // by stream, the number of the operation
  std::condition_variable released_;
  std::vector<std::string> faults_, operations_;
  std::size_t allocated_ = 0, peak_ = 0;
};

}  // namespace zero::test::simulated_gpu
