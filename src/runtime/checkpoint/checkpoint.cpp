// The checkpoint calls of Engine, on the real file system.
#include "checkpoint/checkpoint.h"

#include "observe/trace.h"

namespace zero {

void Engine::save_checkpoint(const std::filesystem::path& dir, const std::string& tag) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Save, "save");
  checkpoint::save(*state_, formats::system_files(), dir.string(), tag);
}

std::string Engine::load_checkpoint(const std::filesystem::path& dir, const std::string& tag) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Load, "load");
  return checkpoint::load(*state_, formats::system_files(), dir.string(), tag);
}

bool Engine::checkpoint_pending() const { return state_->parts.background != nullptr; }

std::string Engine::finish_checkpoint() {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Save, "finish");
  return checkpoint::finish_save(*state_);
}

std::string Engine::logical_hash() { return checkpoint::logical_hash(*state_); }

}  // namespace zero
