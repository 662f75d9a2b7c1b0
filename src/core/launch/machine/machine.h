// What this machine can do, found by trying it: kernel services, direct I/O, GPUs, the libraries
// beside the program. Facts only; what they mean for a run is said by `zero doctor`.
// Nothing here loads torch or CUDA into this process.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero::launch {

struct CpuFacts {
  std::string model;
  std::vector<std::string> features;  // the kernel's words of those we ask for: avx2, avx512f, amx_bf16, ...
};
CpuFacts cpu_facts();

struct MemoryFacts {
  std::uint64_t total_bytes = 0, available_bytes = 0, swap_bytes = 0;
  std::uint64_t cgroup_limit_bytes = 0;  // 0: none
};
MemoryFacts memory_facts();

// NUMA nodes that have memory or cores; 1 where the kernel tells nothing.
int numa_nodes();

struct SpaceFacts {
  std::uint64_t total_bytes = 0, free_bytes = 0;
  int error = 0;  // errno
};
SpaceFacts space_of(const std::filesystem::path& folder);

// 0 when it works, else the errno it failed with.
int try_memfd();
int try_pidfd();
int try_io_uring();
// A file that is made, written and removed in the folder.
int try_file_in(const std::filesystem::path& folder);
// Whether what a rank has started comes to the launcher when the rank ends (a child subreaper).
int try_subreaper();

struct DirectIo {
  int error = 0;  // errno of the first step that failed, `step` its name
  std::string step;
  bool unnamed = false;  // O_TMPFILE works, too
  std::size_t alignment = 0;
  double write_bytes_per_s = 0, read_bytes_per_s = 0;
};
// Writes and reads `bytes` (a multiple of 1 MiB) past the page cache in a file that has no name or
// loses it at once.
DirectIo try_direct_io(const std::filesystem::path& folder, std::size_t bytes);

struct GpuFacts {
  std::string driver;  // version of the kernel's driver, empty without one
  std::string error;   // why none can be used
  std::vector<std::string> names;
  std::vector<std::uint64_t> bytes;
};
// Asks libcuda.so.1 in a child process, which is ended after `limit_s`.
GpuFacts gpu_facts(double limit_s = 20);

// The file that the loader would take for `library` when `program` needs it: DT_RPATH or DT_RUNPATH,
// LD_LIBRARY_PATH, then the system's folders. Empty when there is none or `program` is no ELF file.
std::filesystem::path find_library(const std::filesystem::path& program, const std::string& library);

// The running program's file.
std::filesystem::path own_path();
// The first file of that name in PATH, or empty.
std::filesystem::path in_path(const std::string& name);

}  // namespace zero::launch
