// New files that appear under their name when all of them are complete: written next to it, synced, renamed. Several
// processes may write ranges of the same files.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "formats/files.h"
#include "interchange/weights_layout.h"

namespace zero::interchange {

// Writes ranges of files that exist. Keeps a few of them open; synced whenever one is closed.
class OutputWriter {
 public:
  // `names`: in `folder`; may have folders in them ("zero/weight/fp32.pt").
  OutputWriter(formats::FsOps& fs, const std::string& folder, std::vector<std::string> names);
  void write(std::size_t file, std::uint64_t offset, const void* data, std::size_t bytes);
  void close();  // syncs what was written

 private:
  struct Open {
    std::size_t index;
    formats::File file;
  };
  formats::FsOps& fs_;
  std::string folder_;
  std::vector<std::string> names_;
  std::vector<Open> open_;
  formats::AlignedMemory buffer_;
};

// Creates a file at its full size, so that a full disk is met now, with its fixed bytes; synced.
void create_out_file(const formats::Folder& folder, const std::string& name, const OutFile& file);

class OutputFiles {
 public:
  enum class Kind { Folder, File };
  // Throws ConfigError that begins with `where` if `path` exists. Parent directories are made. replace: a file may
  // exist, and is replaced when the new one is complete.
  OutputFiles(formats::FsOps& fs, const std::string& path, Kind kind, const char* where, bool replace = false);
  // Removes what was not committed.
  ~OutputFiles();
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;

  // Creates the files at their full size, so that a full disk is met now, with their fixed bytes. A File has one.
  void create(const std::vector<OutFile>& files);
  // What other processes open: OutputWriter(fs, folder(), names()).
  std::string folder() const;
  const std::vector<std::string>& names() const { return names_; }
  // Everything is on disk and closed by all processes: it becomes visible, durably.
  void commit();

 private:
  void make_folders(const std::string& name);
  formats::Folder parent_;
  std::string name_, temporary_;
  Kind kind_;
  bool replace_;
  std::vector<std::string> names_, folders_;
  bool ours_ = false;
};

}  // namespace zero::interchange
