// What a load compares before it changes anything: whether a checkpoint fits the engine, what it says about the
// differences that do no harm, and what each tensor is read from. See load.cpp.
#pragma once
#include <map>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "formats/root_folder.h"

namespace zero::checkpoint {

// Tensors of a checkpoint by kind and name.
using Names = std::map<std::pair<std::string, std::string>, const formats::Tensor*>;
Names by_name(const std::vector<formats::Tensor>& tensors);
// The tensors of the checkpoint for this rank: shared ones and private ones.
Names stored_for(engine::State& state, const formats::Manifest& manifest);

// The stored tensor that a tensor is loaded from: that of its kind; for the master of a parameter that was frozen when
// saved, the parameter, and, of weights alone, the other way round. null: none, for the optimizer states of such a
// parameter.
const formats::Tensor* source_of(const Names& stored, const std::string& kind, const std::string& name,
                                 bool weights_only);
bool was_frozen(const Names& stored, const std::string& name);
bool same_layout(const Mesh& mesh, const formats::Manifest& manifest);

// Throw ConfigError that begins with `label`, the checkpoint. A checkpoint of weights only has none of the states that
// a run resumes from.
void require_resumable(const formats::Manifest& manifest, const std::string& label);
// Optimizers with the same states may take each other's: Adam and AdamW.
void require_same_slots(engine::State& state, const formats::Manifest& manifest, const std::string& label);
void require_private_buffers(const engine::Job& job, const formats::Manifest& manifest, const std::string& label);

// Parameters and buffers that LoadOptions::partial leaves out, by name.
struct LeftOut {
  std::set<std::string> kept;  // of the model: keep their values
  std::set<std::string> lost;  // of the checkpoint alone
};
// Throws ConfigError with all differences of names, shapes, dtypes and ties that are not left out.
LeftOut compare_models(engine::State& state, const formats::Manifest& manifest, const std::string& label,
                       const LoadOptions& options);

// Logs what differs and is taken nevertheless. On rank 0.
void tell_differences(engine::State& state, const formats::Manifest& manifest, const formats::Choice& choice,
                      const LoadOptions& options, const LeftOut& left_out);

}  // namespace zero::checkpoint
