// Resources of this host: usable cores, GPU slots, a free port, and out-of-memory kills. GPUs are counted without a
// CUDA library.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zero::launch {

// Cores in this process's affinity mask, ascending.
std::vector<int> allowed_cores();
// How many of them the cgroup's CPU quota permits; at least 1.
int usable_cores();

// The entries of CUDA_VISIBLE_DEVICES, or "0", "1", ... for each /dev/nvidiaN if it is not set; empty without GPUs.
std::vector<std::string> gpu_slots();

// A TCP port on the loopback interface that is currently free. Throws IoError.
int free_port();

// Throws ConfigError if another program uses the port on the loopback interface.
void check_port(int port);

// Parses "1,3-5" to {1, 3, 4, 5}. Throws ConfigError naming `option`.
std::vector<int> parse_core_list(std::string_view text, std::string_view option);
// Divides the cores equally among `ranks` ranks, by NUMA node and with the hyperthreads of a core together. Throws
// ConfigError if there are fewer cores than ranks.
std::vector<std::vector<int>> deal_cores(std::vector<int> cores, int ranks);

// Number of processes of this cgroup that the kernel killed for lack of memory; 0 if unknown.
std::uint64_t oom_kill_count();
// The cgroup's memory limit in bytes; 0 if there is none.
std::uint64_t memory_limit_bytes();
// Available bytes of the cgroup, or of the host; 0 if unknown.
std::uint64_t free_memory_bytes();

// "20260103-141502-7f3a90c1d25e": local time and random digits.
std::string new_run_id();
// `bytes` random bytes as hexadecimal digits. Throws IoError.
std::string random_hex(int bytes);

}  // namespace zero::launch
