// Small questions to the operating system.
#pragma once
#include <string>

namespace zero::base {

// This machine's name; `fallback` if the system does not say.
std::string host_name(const char* fallback);

// The whole file, "" if it cannot be read: for files of /proc and /sys.
std::string read_file(const std::string& path);

// Seconds of the steady clock: only differences mean something.
double steady_seconds();

}  // namespace zero::base
