// Recognises the kind of someone's files and opens them: source.h.
#include "interchange/native_source.h"
#include "interchange/safetensors_source.h"

namespace zero::interchange {

std::unique_ptr<TensorSource> open_source(formats::FsOps& fs, const std::string& path, const SourceOptions& options) {
  if (const int fd = fs.open_folder(path.c_str()); fd >= 0) {
    (void)fs.close(fd);
    const auto folder = formats::Folder::open(fs, path);
    if (!has_safetensors(folder)) return open_native(fs, path, options);
  }
  return open_safetensors(fs, path, options);
}

}  // namespace zero::interchange
