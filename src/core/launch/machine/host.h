// What this host offers the ranks: usable cores, GPU slots, a free port, and whether the kernel
// ended something for lack of memory. GPUs are counted without any CUDA library.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zero::launch {

// Cores this process may run on (its affinity mask), ascending.
std::vector<int> allowed_cores();
// Of those, how many it can keep busy under the cgroup's CPU quota; at least 1.
int usable_cores();

// The entries of CUDA_VISIBLE_DEVICES, or "0", "1", ... for each /dev/nvidiaN when it is unset;
// empty without GPUs.
std::vector<std::string> gpu_slots();

// A TCP port on the loopback interface that was free a moment ago. Throws IoError.
int free_port();

// Throws ConfigError when another program has the port on the loopback interface.
void check_port(int port);

// "1,3-5" as {1, 3, 4, 5}. Throws ConfigError naming `option`.
std::vector<int> parse_core_list(std::string_view text, std::string_view option);
// The cores dealt out to `ranks` ranks in equal runs, NUMA node by node and hyperthreads of a core
// together. Throws ConfigError when there are fewer cores than ranks.
std::vector<std::vector<int>> deal_cores(std::vector<int> cores, int ranks);

// How often the kernel has killed a process of this cgroup for lack of memory; 0 when unknown.
std::uint64_t oom_kill_count();
// The cgroup's memory limit in bytes; 0 when there is none.
std::uint64_t memory_limit_bytes();
// Bytes the cgroup (or the host) can still give; 0 when unknown.
std::uint64_t free_memory_bytes();

// "20260103-141502-7f3a90c1d25e": local time and random digits.
std::string new_run_id();
// `bytes` random bytes as hexadecimal digits. Throws IoError.
std::string random_hex(int bytes);

}  // namespace zero::launch
