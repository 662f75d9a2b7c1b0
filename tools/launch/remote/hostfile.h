// Hosts and their slots: the hostfile, --include and --exclude. Strict (docs/cli.md section 6): lines that DeepSpeed
// skips are errors with a location. Text only; starts nothing.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace zero::launch {

struct Host {
  std::string name;
  std::vector<int> slots;  // ascending
  std::string user = {};   // of "USER@HOST": the name to log in with; empty: none was given
};

// Parses a hostfile; errors show `name` as name:line:col. Throws ConfigError.
std::vector<Host> parse_hostfile(std::string_view text, std::string_view name);
// Throws IoError if the file cannot be read.
std::vector<Host> read_hostfile(const std::filesystem::path& path);

// NODE[@NODE...], NODE = HOST[:SLOT[,SLOT...]]. The order is that of `hosts`; duplicates are ignored. Throws
// ConfigError for an unknown host or slot, a malformed filter, and an empty result.
std::vector<Host> include_hosts(const std::vector<Host>& hosts, std::string_view filter);
std::vector<Host> exclude_hosts(const std::vector<Host>& hosts, std::string_view filter);

// Whether the name is localhost or a loopback address, which other hosts cannot reach.
bool is_loopback(std::string_view name);
// Whether the name is this machine: localhost, a loopback address, or its host name.
bool is_this_host(std::string_view name);

}  // namespace zero::launch
