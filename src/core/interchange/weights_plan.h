// What an export writes and where, from the names, dtypes and shapes of a model. The same on all ranks. No file access.
#pragma once
#include <map>
#include <string>
#include <vector>

#include <zero/weights.h>

#include "interchange/names.h"
#include "interchange/torch_layout.h"
#include "interchange/weights_layout.h"

namespace zero::interchange {

struct WeightsPlan {
  Mapping mapping;  // of the tensors of the source that are exported; segments count all that were given
  // The tensors of the files, and which of the mapping's each is. Ties under all their names are further tensors.
  std::vector<OutTensor> tensors;
  std::vector<std::size_t> from;
  WeightsLayout layout;
  // Of the first files of the layout, if they are torch's: their tensors are those with places there, in order.
  std::vector<TorchLayout> torch;
  bool one_file = false;  // "pt": `layout` has one file, which is not in a directory
  std::vector<std::string> remarks;
};

// Weights (all kinds but optimizer states) of a source in the form that the options ask for. Throws ConfigError for
// options and names that do not fit. `label`: of the source.
WeightsPlan plan_weights(const std::vector<SourceTensor>& tensors, const std::map<std::string, std::string>& aliases,
                         const NameMap* map, const ExportOptions& options, const std::string& label);

// DeepSpeed's universal checkpoint: "latest_universal" and a directory with, per parameter, "zero/NAME/fp32.pt",
// "exp_avg.pt", ... Hyper-parameters are left to the configuration there. The same errors.
WeightsPlan plan_universal(const std::vector<SourceTensor>& tensors, const std::map<std::string, std::string>& aliases,
                           const SourceProgress& progress, const NameMap* map, const ExportOptions& options,
                           const std::string& label);

// What is written last into a torch file of the plan, by offset. crcs: CRC-32 of all tensors of the plan.
std::vector<std::pair<std::uint64_t, std::string>> closing_bytes(const WeightsPlan& plan, std::size_t file,
                                                                 const std::vector<std::uint32_t>& crcs);

// The dtype of a tensor in the files.
std::string exported_dtype(const SourceTensor& tensor, const ExportOptions& options);

// Throws InternalError (kNumerical) with the tensors whose values fp16 cannot hold, unless that is allowed or there are
// none.
void check_overflows(const std::map<std::string, std::int64_t>& overflows, const ExportOptions& options);

}  // namespace zero::interchange
