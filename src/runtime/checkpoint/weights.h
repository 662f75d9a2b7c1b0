// Implements Engine::export_weights and import_weights, with the file system as an argument: the engine's masters in
// files of other libraries, without a gather. The files are those of core/interchange.
#pragma once
#include <string>
#include <vector>

#include <zero/weights.h>

#include "engine/state.h"
#include "formats/files.h"

namespace zero::checkpoint {

// [collective] Writes the weights as `options` ask for: masters of trained parameters, values of frozen ones, buffers
// of rank 0; "universal": the optimizer's states as well. Every rank converts the elements that it owns and writes them
// at their place in the files. Tensors whose elements change their order, or that tensor-parallel ranks cut, are put
// together by ranks in turn, in panels of at most 8 MiB in all. The files appear when all ranks are done. Throws on
// every rank: ConfigError if `path` exists, names do not fit or ranks differ in their arguments; IoError; InternalError
// (kNumerical) for values that fp16 cannot hold.
ExportReport export_weights(engine::State& state, formats::FsOps& fs, const std::string& path,
                            const ExportOptions& options);

// [collective] As Engine::save_16bit_model().
ExportReport save_16bit_model(engine::State& state, formats::FsOps& fs, const std::string& folder,
                              const std::string& name, bool exclude_frozen);

// [collective] Writes the weights in the dtype that the recipe computes in, as safetensors that transformers reads,
// into a directory that becomes visible later; they are on disk on return. Returns the names of the files. Between
// steps. Throws as export_weights(), with `where` in messages.
std::vector<std::string> write_weight_files(engine::State& state, formats::FsOps& fs, const std::string& folder,
                                            const char* where);

// [collective] Reads weights from any source, every rank the elements that it stores. Before the first step or between
// steps. Nothing changes before names, shapes, dtypes and ties are checked; an error after that makes the engine
// unusable. Throws on every rank: ConfigError with all differences of names and shapes, IoError (kCheckpoint).
ImportReport import_weights(engine::State& state, formats::FsOps& fs, const std::string& path,
                            const ImportOptions& options);

}  // namespace zero::checkpoint
