// A file as a text.
#pragma once
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace zero::test {

// The whole of a file; empty where there is none.
inline std::string file_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();  // by blocks, not characters
  return text.str();
}

}  // namespace zero::test
