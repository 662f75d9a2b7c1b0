// Small queries to the operating system.
#pragma once
#include <string>

namespace zero::base {

// The host name; `fallback` if the system does not provide one.
std::string host_name(const char* fallback);

// The contents of a file of /proc or /sys; "" if it cannot be read.
std::string read_file(const std::string& path);

// Seconds of the steady clock. Only differences are meaningful.
double steady_seconds();

}  // namespace zero::base
