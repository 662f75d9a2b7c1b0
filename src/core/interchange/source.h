// A read-only set of tensors in files: a checkpoint of libzero, DeepSpeed, torch.distributed or torch, or a directory
// of safetensors. Only headers and tables are read when it is opened; elements are read by range. Nothing in a file is
// ever executed. No torch.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/files.h"

namespace zero::interchange {

struct SourceTensor {
  // "weight": of a file that does not say what it trains. Otherwise as in formats::Tensor: "master" (a trained
  // parameter), "param" (a frozen one), "buffer", "opt.exp_avg", ...
  std::string kind;
  std::string name;   // as stored, without the prefix of the container
  std::string dtype;  // the name that safetensors uses: "F32"
  std::vector<std::int64_t> shape;
};

// The loss scale of training in fp16: the state of optim::LossScaler, and its settings.
struct SourceScaler {
  bool dynamic = true;
  double scale = 1;
  std::int64_t hysteresis = 1;  // overflows until the scale is halved, including that one
  std::int64_t good = 0;        // the scale doubles after window - good further steps; -1: one more than window
  std::int64_t window = 1000, most_hysteresis = 2, smallest = 1;
  bool consecutive = false;  // a step without overflow restores hysteresis
};

// Hyper-parameters of an optimizer: "lr", "beta1", "beta2", "eps", "weight_decay", with the different values that its
// groups of parameters have.
using SourceSettings = std::map<std::string, std::set<double>>;

// Progress of the training that the files record.
struct SourceProgress {
  std::int64_t global_steps = 0, applied_steps = 0, skipped_steps = 0, global_samples = 0;
  std::string optimizer;                    // "Adam", "AdamW", ...; empty: unknown
  std::optional<SourceScaler> scaler = {};  // nothing: was not trained in fp16, or does not say
  SourceSettings settings = {};             // without those that the files do not say
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual const std::string& format() const = 0;  // "safetensors", "torch", "deepspeed", "dcp", "libzero"
  virtual const std::vector<SourceTensor>& tensors() const = 0;           // by kind and name; each once
  virtual const std::map<std::string, std::string>& aliases() const = 0;  // name of a tied tensor -> name stored
  virtual const std::optional<SourceProgress>& progress() const = 0;
  // One line each of what else the files hold, such as opaque pickled objects, for people.
  virtual const std::vector<std::string>& remarks() const = 0;
  // Elements [begin, begin + numel) in row-major order, in the tensor's dtype, by pread. Throws IoError (kCheckpoint)
  // with file, offset and what was expected.
  virtual void read(const SourceTensor& tensor, std::int64_t begin, std::int64_t numel, void* out) = 0;
};

struct SourceOptions {
  std::string tag;          // of a directory of checkpoints; empty: the newest complete one
  std::string key;          // of a nested dictionary in a torch file, such as "model" or "state_dict"
  std::string prefix;       // removed from every name; names without it are an error
  bool ignore_crc = false;  // of zip files
  bool weights = false;     // of a directory of checkpoints: the newest of weights only will do
  bool describe = false;    // a torch file without a dictionary of tensors is no error, but remarks
};
// The kind of file is recognised by its content. Throws IoError (kCheckpoint) if it is none of these.
std::unique_ptr<TensorSource> open_source(formats::FsOps& fs, const std::string& path,
                                          const SourceOptions& options = {});

// "deepspeed" or "dcp" for a directory with such checkpoints, "" for any other path. Throws nothing.
std::string foreign_checkpoints(formats::FsOps& fs, const std::string& path) noexcept;

}  // namespace zero::interchange
