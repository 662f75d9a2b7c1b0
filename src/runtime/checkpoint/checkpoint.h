// Implements Engine::save_checkpoint and load_checkpoint, with the file system as an argument. Maps the engine's state
// pieces to the files of the format, and keeps all ranks consistent.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <zero/engine_types.h>

#include "base/kept_memory.h"
#include "engine/dtypes.h"
#include "engine/state.h"
#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::checkpoint {

// In the background if checkpoint.writer.decoupled is true.
void save(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag,
          const SaveOptions& options = {});
// [collective] Completes a save in the background. Returns the tag of the last save; "" if there was none, or if it has
// failed (libzero.save_errors "warn").
std::string finish_save(engine::State& state);
// Reads and verifies everything before it changes anything, unless the state is worth nothing yet. Returns the tag that
// was loaded. memory: where an earlier attempt may have kept a newer snapshot (kept.h), which a state that is worth
// nothing is loaded from if no tag and no option is given.
std::string load(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag,
                 const LoadOptions& options = {}, const base::KeptMemory& memory = {});

// The digest of what a checkpoint would hold (formats/digest.h). Collective.
std::string logical_hash(engine::State& state);

// What each tensor-parallel rank holds of a parameter; empty: it is not cut.
std::vector<std::vector<formats::Box>> slices_of(const engine::ModelParameter& member);
// All tensors of the model as checkpoints describe them, without parts. The same on all ranks.
std::vector<formats::Tensor> tensors_of(engine::State& state);
// The dtype in which forward reads each parameter, by name: "BF16".
std::map<std::string, std::string> dtypes_in_forward(engine::State& state);
// This rank's random number generator.
engine::StatePiece generator_piece(engine::State& state);
// Slices of the tensors that tensor-parallel ranks cut, by kind and name.
using Slices = std::map<std::pair<std::string, std::string>, std::vector<std::vector<formats::Box>>>;
Slices cut_slices(engine::State& state);
// A hash of the contents of each buffer among the pieces, one after the other.
std::string hashes_of_buffers(const std::vector<engine::StatePiece>& pieces);
// Whether buffer number `buffer` is equal on all ranks and stored once. Otherwise (running statistics) each rank stores
// its own. hashes: hashes_of_buffers() of all ranks.
bool is_shared(const std::vector<std::string>& hashes, std::size_t buffer);
// What is known of a checkpoint before its files are written. [local]
formats::Manifest manifest_of(engine::State& state);
// "F32"; throws ConfigError that names `name` for an unsupported dtype.
std::string file_dtype(at::ScalarType type, const std::string& name);

inline bool is_slot(const std::string& kind) { return kind.starts_with("opt."); }  // a state of the optimizer
inline constexpr const char* kBuffer = "buffer";
inline constexpr const char* kFrozen = "param";
inline constexpr const char* kPrivate = engine::kPrivateKind;
// This rank's random number generator on the CPU.
inline constexpr const char* kGenerator = "generator.cpu";

}  // namespace zero::checkpoint
