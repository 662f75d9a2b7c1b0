// Checkpoints of an engine's state: Engine::save_checkpoint and load_checkpoint, with the file
// system as an argument. Which elements a rank has is the engine's answer; how they lie in files is
// the format's; this part brings the two together and keeps all ranks of one mind.
#pragma once
#include <string>
#include <vector>

#include "engine/dtypes.h"
#include "engine/state.h"
#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::checkpoint {

void save(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag);
// Reads and verifies everything before it changes anything. Returns the tag it took.
std::string load(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag);

// Every tensor of the model as a checkpoint holds it, without parts. The same on all ranks.
std::vector<formats::Tensor> tensors_of(engine::State& state);
// "F32"; throws ConfigError naming `name` for a type that files cannot hold.
std::string file_dtype(at::ScalarType type, const std::string& name);
std::string optimizer_name(config::OptimizerType type);

inline constexpr const char* kBuffer = "buffer";
// This rank's generator of random numbers on the CPU: private, kind "rank".
inline constexpr const char* kPrivate = "rank";
inline constexpr const char* kGenerator = "generator.cpu";

}  // namespace zero::checkpoint
