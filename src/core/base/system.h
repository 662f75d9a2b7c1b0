// Small questions to the operating system.
#pragma once
#include <filesystem>
#include <string>

namespace zero::base {

// This machine's name; `fallback` if the system does not say.
std::string host_name(const char* fallback);

// The whole file, "" if it cannot be read: for files of /proc and /sys.
std::string read_file(const std::string& path);

// The folder of the library or program that holds `address`; empty if the system does not say.
std::filesystem::path folder_of(const void* address);

// Where the plug-in library `name` belongs: beside libzero.so, or in the library folder of an installation whose
// program was linked with libzero's objects.
std::filesystem::path plugin_path(const char* name);

// Seconds of the steady clock: only differences mean something.
double steady_seconds();

}  // namespace zero::base
