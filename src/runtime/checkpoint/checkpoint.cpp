// The checkpoint calls of Engine, on the real file system.
#include "checkpoint/checkpoint.h"

#include "checkpoint/kept.h"
#include "checkpoint/weights.h"
#include "observe/trace.h"

namespace zero {

void Engine::save_checkpoint(const std::filesystem::path& dir, const std::string& tag, const SaveOptions& options) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Save, "save");
  checkpoint::save(*state_, formats::system_files(), dir.string(), tag, options);
}

std::string Engine::load_checkpoint(const std::filesystem::path& dir, const std::string& tag,
                                    const LoadOptions& options) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Load, "load");
  return checkpoint::load(*state_, formats::system_files(), dir.string(), tag, options, base::kept_memory());
}

void Engine::keep_snapshot(const std::filesystem::path& dir) {
  observe::TraceSpan memory(state_->parts.trace.trace(), observe::TraceKind::Save, "keep");
  checkpoint::keep_snapshot(*state_, formats::system_files(), base::kept_memory(), dir.string());
}

ExportReport Engine::export_weights(const std::filesystem::path& path, const ExportOptions& options) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Save, "export");
  return checkpoint::export_weights(*state_, formats::system_files(), path.string(), options);
}

ExportReport Engine::save_16bit_model(const std::filesystem::path& dir, const std::string& filename,
                                      bool exclude_frozen_parameters) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Save, "export");
  return checkpoint::save_16bit_model(*state_, formats::system_files(), dir.string(), filename,
                                      exclude_frozen_parameters);
}

ImportReport Engine::import_weights(const std::filesystem::path& path, const ImportOptions& options) {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Load, "import");
  return checkpoint::import_weights(*state_, formats::system_files(), path.string(), options);
}

ImportReport Engine::load_weights(const std::filesystem::path& path, const ImportOptions& options) {
  return import_weights(path, options);
}

bool Engine::checkpoint_pending() const { return state_->parts.progress.background != nullptr; }

std::string Engine::finish_checkpoint() {
  observe::TraceSpan files(state_->parts.trace.trace(), observe::TraceKind::Save, "finish");
  return checkpoint::finish_save(*state_);
}

std::string Engine::logical_hash() { return checkpoint::logical_hash(*state_); }

}  // namespace zero
