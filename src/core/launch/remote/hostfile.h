// Hosts and their slots: the hostfile, --include and --exclude. Strict (docs/cli.md section 6): what
// DeepSpeed skips over is an error here, with its place. Pure text; starts nothing.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace zero::launch {

struct Host {
  std::string name;
  std::vector<int> slots;  // ascending
};

// The lines of a hostfile; `name` is shown in errors as name:line:col. Throws ConfigError.
std::vector<Host> parse_hostfile(std::string_view text, std::string_view name);
// Throws IoError when it cannot be read.
std::vector<Host> read_hostfile(const std::filesystem::path& path);

// NODE[@NODE...], NODE = HOST[:SLOT[,SLOT...]]. Order follows `hosts`, repeats are harmless.
// Throws ConfigError for a host or slot that is not there, a malformed part, and an empty result.
std::vector<Host> include_hosts(const std::vector<Host>& hosts, std::string_view filter);
std::vector<Host> exclude_hosts(const std::vector<Host>& hosts, std::string_view filter);

// localhost or a loopback address: other hosts cannot reach it.
bool is_loopback(std::string_view name);
// Whether the name means this machine: localhost, a loopback address, or the host's own name.
bool is_this_host(std::string_view name);

}  // namespace zero::launch
