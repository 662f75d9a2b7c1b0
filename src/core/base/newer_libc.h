// What glibc has got since 2.31 (the package for Python is built for it): functions that may be null there, and values
// for the kernel, which refuses those that it does not know.
#pragma once

#include <sys/mman.h>

#include <csignal>
#include <cstring>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

extern "C" {
__attribute__((weak)) const char* strerrorname_np(int error) noexcept;
__attribute__((weak)) const char* sigabbrev_np(int signal) noexcept;
}
