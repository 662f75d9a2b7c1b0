// Small queries to the operating system.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>

namespace zero::base {

// The host name; `fallback` if the system does not provide one.
std::string host_name(const char* fallback);

// The contents of a file of /proc or /sys; "" if it cannot be read.
std::string read_file(const std::string& path);

// A variable of the environment that is a whole decimal number from 0 to `most`; else -1.
std::int64_t number_in_env(const char* name, std::int64_t most);

// The folder of the library or program that holds `address`; empty if it is unknown.
std::filesystem::path folder_of(const void* address);

// Where the plug-in library `name` belongs: next to libzero.so, or in the library folder of an installation whose
// program was linked with libzero's objects.
std::filesystem::path plugin_path(const char* name);

// Where temporary files belong: TMPDIR, TMP, TEMP or TEMPDIR of the environment, else /tmp. It need not exist.
std::filesystem::path temporary_folder();

// "2026-01-31T12:00:00Z"
std::string utc_now();

// Seconds of the steady clock. Only differences are meaningful.
double steady_seconds();

}  // namespace zero::base
