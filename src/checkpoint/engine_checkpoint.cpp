// Engine's checkpoint calls, on the real file system.
#include "checkpoint/engine_checkpoint.h"

#include "base/trace.h"

namespace zero {

void Engine::save_checkpoint(const std::filesystem::path& dir, const std::string& tag) {
  base::TraceSpan files(state_->trace(), base::TraceKind::Save, "save");
  checkpoint::save(*state_, checkpoint::system_files(), dir.string(), tag);
}

std::string Engine::load_checkpoint(const std::filesystem::path& dir, const std::string& tag) {
  base::TraceSpan files(state_->trace(), base::TraceKind::Load, "load");
  return checkpoint::load(*state_, checkpoint::system_files(), dir.string(), tag);
}

}  // namespace zero
