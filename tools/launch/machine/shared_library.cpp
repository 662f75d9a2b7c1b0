// Finds the library that the loader would use, without loading it. Reads the search folders from the program's dynamic
// section and checks every offset, because the file may be arbitrary.
#include <elf.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include "tools/launch/machine/machine.h"

namespace zero::launch {
namespace {

namespace fs = std::filesystem;

template <class T>
bool read_at(std::ifstream& in, std::uint64_t offset, T& value) {
  in.clear();
  in.seekg(static_cast<std::streamoff>(offset));
  in.read(reinterpret_cast<char*>(&value), sizeof value);
  return in.gcount() == static_cast<std::streamsize>(sizeof value);
}

std::string text_at(std::ifstream& in, std::uint64_t offset) {
  in.clear();
  in.seekg(static_cast<std::streamoff>(offset));
  std::string text;
  std::getline(in, text, '\0');
  return text.size() < 64 * 1024 ? text : "";
}

// DT_RPATH and DT_RUNPATH of a 64-bit file, unexpanded.
std::string run_paths(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  Elf64_Ehdr header{};
  if (!in || !read_at(in, 0, header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr))
    return "";
  std::vector<Elf64_Phdr> segments(header.e_phnum);
  for (std::size_t i = 0; i < segments.size(); ++i)
    if (!read_at(in, header.e_phoff + i * sizeof(Elf64_Phdr), segments[i])) return "";
  const auto offset_of = [&](std::uint64_t address) -> std::uint64_t {
    for (const Elf64_Phdr& s : segments)
      if (s.p_type == PT_LOAD && address >= s.p_vaddr && address - s.p_vaddr < s.p_filesz)
        return address - s.p_vaddr + s.p_offset;
    return 0;
  };
  std::uint64_t strings = 0;
  std::vector<std::uint64_t> wanted;
  for (const Elf64_Phdr& s : segments) {
    if (s.p_type != PT_DYNAMIC) continue;
    for (std::uint64_t i = 0; i < s.p_filesz / sizeof(Elf64_Dyn) && i < 4096; ++i) {
      Elf64_Dyn entry{};
      if (!read_at(in, s.p_offset + i * sizeof(Elf64_Dyn), entry) || entry.d_tag == DT_NULL) break;
      if (entry.d_tag == DT_STRTAB) strings = offset_of(entry.d_un.d_ptr);
      if (entry.d_tag == DT_RPATH || entry.d_tag == DT_RUNPATH) wanted.push_back(entry.d_un.d_val);
    }
  }
  std::string all;
  if (strings != 0)
    for (const std::uint64_t at : wanted) all += (all.empty() ? "" : ":") + text_at(in, strings + at);
  return all;
}

void add_folders(std::vector<fs::path>& folders, const std::string& list, const fs::path& origin) {
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ':');) {
    for (const char* word : {"${ORIGIN}", "$ORIGIN"}) {
      const std::size_t at = part.find(word);
      if (at != std::string::npos) part.replace(at, std::strlen(word), origin.string());
    }
    if (!part.empty()) folders.emplace_back(part);
  }
}

}  // namespace

fs::path find_library(const fs::path& program, const std::string& library) {
  std::error_code error;
  const fs::path whole = fs::canonical(program, error);
  if (error) return {};
  std::vector<fs::path> folders;
  add_folders(folders, run_paths(whole), whole.parent_path());
  if (const char* list = std::getenv("LD_LIBRARY_PATH")) add_folders(folders, list, "");
  for (const char* folder :
       {"/usr/local/lib", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"})
    folders.emplace_back(folder);
  for (const fs::path& folder : folders)
    if (fs::is_regular_file(folder / library, error)) return (folder / library).lexically_normal();
  return {};
}

fs::path own_path() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error);
}

fs::path in_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path file = fs::path(folder.empty() ? "." : folder) / name;
    std::error_code error;
    if (fs::is_regular_file(file, error) && access(file.c_str(), X_OK) == 0) return file;
  }
  return {};
}

}  // namespace zero::launch
