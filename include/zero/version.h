// The version of the library. CMake and the Python package read it here; tests/version_test.py compares the documents.
#pragma once

#define ZERO_VERSION_MAJOR 0
#define ZERO_VERSION_MINOR 2
#define ZERO_VERSION_PATCH 0
#define ZERO_VERSION "0.2.0"
