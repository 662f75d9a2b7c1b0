// See mapped_file.h. Errors have the path, the value and the requirement, so that commands can print them unchanged.
#include "apps/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace data {

void fail_file(const std::string& kind, const std::string& path, const std::string& got, const std::string& expected) {
  throw std::runtime_error("[" + kind + " " + path + "] got " + got + ", expected " + expected);
}

MappedFile::MappedFile(const std::string& path, const std::string& kind) {
  const auto fail = [&](const std::string& got, const std::string& expected) { fail_file(kind, path, got, expected); };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(std::strerror(errno), "a readable " + kind + " file");
  struct stat about {};
  int error = ::fstat(fd, &about) == 0 ? 0 : errno;
  void* memory = MAP_FAILED;
  const bool regular = error == 0 && S_ISREG(about.st_mode);
  if (regular && about.st_size > 0) {
    memory = ::mmap(nullptr, static_cast<std::size_t>(about.st_size), PROT_READ, MAP_SHARED, fd, 0);
    error = memory == MAP_FAILED ? errno : 0;
  }
  ::close(fd);
  if (error != 0) fail(std::strerror(error), "a readable " + kind + " file");
  if (!regular) fail(S_ISDIR(about.st_mode) ? "a directory" : "something that is not a file", "a " + kind + " file");
  if (about.st_size == 0) fail("an empty file", kind);
  data_ = static_cast<const std::uint8_t*>(memory);
  size_ = about.st_size;
}

MappedFile::~MappedFile() { ::munmap(const_cast<std::uint8_t*>(data_), static_cast<std::size_t>(size_)); }

}  // namespace data
