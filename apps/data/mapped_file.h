// A file as memory that is read only. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <string>

namespace data {

class MappedFile {
 public:
  // `kind` ("text") says in errors what the file should be. Throws std::runtime_error with path and reason if it is
  // missing, not a regular file or empty.
  explicit MappedFile(const std::string& path, const std::string& kind = "text");
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::uint8_t* data() const { return data_; }
  std::int64_t size() const { return size_; }

 private:
  const std::uint8_t* data_ = nullptr;
  std::int64_t size_ = 0;
};

// Throws std::runtime_error "[KIND PATH] got GOT, expected EXPECTED", the form of all errors about a data file.
[[noreturn]] void fail_file(const std::string& kind, const std::string& path, const std::string& got,
                            const std::string& expected);

}  // namespace data
