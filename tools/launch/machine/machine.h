// Capabilities of this machine, found by trying them: kernel services, direct I/O, GPUs, the libraries next to the
// program. `zero doctor` interprets them. Does not load torch or CUDA into this process.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero::launch {

struct CpuFacts {
  std::string model;
  std::vector<std::string> features;  // the kernel's names of those checked: avx2, avx512f, amx_bf16, ...
};
CpuFacts cpu_facts();

struct MemoryFacts {
  std::uint64_t total_bytes = 0, available_bytes = 0, swap_bytes = 0;
  std::uint64_t cgroup_limit_bytes = 0;  // 0: none
};
MemoryFacts memory_facts();

// NUMA nodes that have memory or cores; 1 if unknown.
int numa_nodes();

struct SpaceFacts {
  std::uint64_t total_bytes = 0, free_bytes = 0;
  int error = 0;  // errno
};
SpaceFacts space_of(const std::filesystem::path& folder);

// 0 if it works, else its errno.
int try_memfd();
int try_pidfd();
int try_io_uring();
// Creates, writes and removes a file in the folder.
int try_file_in(const std::filesystem::path& folder);
// Whether descendants of an ended rank are reparented to the launcher (child subreaper).
int try_subreaper();

struct DirectIo {
  int error = 0;  // errno of the first step that failed; `step` is its name
  std::string step;
  bool unnamed = false;  // O_TMPFILE works
  std::size_t alignment = 0;
  double write_bytes_per_s = 0, read_bytes_per_s = 0;
};
// Writes and reads `bytes` (a multiple of 1 MiB) bypassing the page cache, in an unnamed or immediately unlinked file.
DirectIo try_direct_io(const std::filesystem::path& folder, std::size_t bytes);

struct GpuFacts {
  std::string driver;  // version of the kernel driver; empty without one
  std::string error;   // why no GPU can be used
  std::vector<std::string> names;
  std::vector<std::uint64_t> bytes;
};
// Queries libcuda.so.1 in a child process, which is killed after `limit_s`.
GpuFacts gpu_facts(double limit_s = 20);

// The file that the loader would use for `library` of `program`: from DT_RPATH or DT_RUNPATH, LD_LIBRARY_PATH, then the
// system's folders. Empty if there is none or `program` is not an ELF file.
std::filesystem::path find_library(const std::filesystem::path& program, const std::string& library);

// The path of the running program.
std::filesystem::path own_path();
// The first file of that name in PATH, or empty.
std::filesystem::path in_path(const std::string& name);

}  // namespace zero::launch
