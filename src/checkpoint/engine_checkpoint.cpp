// Engine's checkpoint calls, on the real file system.
#include "checkpoint/engine_checkpoint.h"

namespace zero {

void Engine::save_checkpoint(const std::filesystem::path& dir, const std::string& tag) {
  checkpoint::save(*state_, checkpoint::system_files(), dir.string(), tag);
}

std::string Engine::load_checkpoint(const std::filesystem::path& dir, const std::string& tag) {
  return checkpoint::load(*state_, checkpoint::system_files(), dir.string(), tag);
}

}  // namespace zero
