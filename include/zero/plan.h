// What a configuration would hold, send and take, before anything is started: bytes of one rank by tier and purpose,
// bytes sent in a step, the time of a step and what bounds it; which stage and offload fit. Nothing here needs
// libtorch, a model in memory, or other ranks. See docs/planner.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/memory_report.h>
#include <zero/options.h>

namespace zero {

struct PlanBatch {            // of one forward and backward
  std::int64_t samples = 1;   // of PlanModel::sequence tokens
  std::int64_t segments = 0;  // runs of layers whose activations are checkpointed; 0: none
  std::int64_t element = 4;   // bytes of an activation
  bool gpu = true;
};

// Is told of one forward and backward of a model, event after event: what it does to memory. Tensors have numbers, each
// given to one tensor, from 0 on; parameters are numbered in the order of registration. Functions throw ConfigError for
// numbers that cannot be.
class PlanPass {
 public:
  virtual ~PlanPass() = default;
  virtual void allocate(std::int64_t tensor, std::int64_t bytes) = 0;
  virtual void release(std::int64_t tensor) = 0;
  // An operator reads the parameters first .. first + count - 1.
  virtual void use(std::size_t first, std::size_t count) = 0;
  // A checkpointed segment's first run. Its input is kept for the second run, where the configuration says.
  virtual void begin_segment(std::int64_t input) = 0;
  virtual void end_segment() = 0;
  // The last of the segments that are left is about to run again; its input comes back as that tensor.
  virtual void rerun_segment(std::int64_t input) = 0;
  virtual void begin_backward() = 0;
  // A whole gradient, which autograd hands over.
  virtual void gradient(std::size_t parameter, std::int64_t tensor) = 0;
  virtual void end_backward() = 0;
};

// A model in numbers. Counts are exact for named models and for shapes, biases and norms included.
struct PlanModel {
  // Gpt: GPT-2's block, learned positions. Count: only a number of parameters, with the shape of a GPT of about that
  // size for its units and activations.
  enum class Kind { Gpt, Bert, T5, Llama, Count };
  Kind kind = Kind::Gpt;
  std::string name;  // empty: none
  std::int64_t layers = 0, hidden = 0, heads = 0, sequence = 1024, vocabulary = 50257;
  bool tied = true;             // output layer = token embedding
  std::int64_t kv_heads = 0;    // Llama: heads of keys and values
  std::int64_t inner = 0;       // width of the MLP; 0: 4 * hidden
  std::int64_t head_width = 0;  // T5: 0: hidden / heads
  std::int64_t count = 0;       // Kind::Count: parameters
  // The model's own description, for this shape: what `zero train`'s GPT has (models/gpt_pass.h). Without one, units
  // run one after the other and activations follow a rule (docs/planner.md).
  std::function<void(const PlanModel&, const PlanBatch&, PlanPass&)> pass = nullptr;

  // "gpt2", "gpt2-medium", ..., "gpt3-175b", "bert-base", "t5-11b", "llama-3-70b", ...; case, '_' and ' ' do not
  // matter. Throws ConfigError with the nearest name.
  static PlanModel named(std::string_view name);
  static std::vector<std::string> names();
  // 1e5 to 1e15 parameters. Throws ConfigError.
  static PlanModel of_count(double parameters);
  // The block `model` of a configuration as `zero train` reads it: its size, what is given, else gpt-1m. Throws
  // ConfigError.
  static PlanModel of_options(const Options& options);

  std::int64_t num_parameters() const;
  std::int64_t mlp_width() const { return inner > 0 ? inner : 4 * hidden; }
  // Throws ConfigError that names the number.
  void validate() const;
};

// What a recipe's forward and backward cost one rank: work / speed, added up. 0: unknown, counts as no time.
struct PlanSpeed {
  double flops = 0;     // FLOP a second in products of matrices
  double elements = 0;  // a second that norms, activations and loss handle
  double heads = 0;     // attention heads of a token a second, beside their products
  double layer_s = 0;   // of a layer's operators when there is next to nothing to compute
};

// How fast one rank is while all of a host's work; bytes and elements a second. 0: unknown, counts as no time.
struct PlanProfile {
  std::string name = "no profile";
  int ranks = 0;  // of a host when it was measured; more of them share its speeds. 0: they do not
  PlanSpeed fp32, bf16, fp16;
  double link_bytes = 0;                   // between ranks of a host: payload that a rank sends in a collective
  double network_bytes = 0;                // the same between hosts
  double collective_s = 0;                 // of one collective, beside its bytes
  double host_link_bytes = 0;              // PCIe of a GPU, one direction
  double device_update_elements = 0;       // the optimizer where the parameters are computed with
  double host_update_elements = 0;         // and in host memory
  double read_bytes = 0, write_bytes = 0;  // files of offloaded states, of a host
  double step_s = 0;                       // of a step, beside all that: hooks, norms, bookkeeping

  // A profile as `zero bench profile` writes it (schema zero.profile/1; docs/planner.md). Throws ConfigError, IoError.
  static PlanProfile from_json(std::string_view text, std::string_view name = "<text>");
  std::string json() const;
};

struct PlanMachine {
  int hosts = 1, ranks_per_host = 1;
  bool gpu = true;  // false: ranks on CPUs, where device and host memory are one
  // Bytes; 0: no limit. On CPUs device_bytes limits what one rank holds in memory at all.
  std::uint64_t device_bytes = 0;    // of a rank
  std::uint64_t host_bytes = 0;      // of a host, for all of its ranks
  std::uint64_t file_bytes = 0;      // of a host
  std::uint64_t reserved_bytes = 0;  // of device_bytes, on a GPU: its context, libraries' workspaces, fragments
  // Shards that ranks of a host read in place (shared memory) instead of gathering copies: CPUs, one host.
  bool shared_memory = false;
  PlanProfile profile;
  int world() const { return hosts * ranks_per_host; }
};

struct PlanTraffic {                        // of one rank in one optimizer step; bytes
  std::uint64_t gathered = 0, reduced = 0;  // sent by gathers and publishing; by reductions
  std::uint64_t across_hosts = 0;           // of both
  double volume = 0;  // sent, in units of (N-1)/N times the compute copy: 2 or 3 (algorithms: 2x, 3x)
  std::uint64_t to_host = 0, from_host = 0;  // over a GPU's host link
  std::uint64_t read = 0, written = 0;       // of files
  std::uint64_t sent() const { return gathered + reduced; }
};

struct PlanWork {                             // of one rank in one optimizer step
  double flops = 0, elements = 0, heads = 0;  // of forward and backward (PlanSpeed)
  std::int64_t layers = 0;                    // that run, forward and backward together being one
  std::int64_t collectives = 0;
  std::int64_t updated = 0, updated_on_host = 0;  // parameters, those offloaded apart
};

struct PlanTime {  // seconds of one optimizer step; 0: the profile does not say
  double compute = 0, network = 0, host_link = 0, disk = 0, update = 0, other = 0;
  double step = 0;
  std::string bound;  // "compute", "network", "PCIe", "disk", "update"; empty: unknown
};

// One configuration on one machine.
struct Plan {
  int stage = 0;
  std::string offload = "none";  // none, cpu, nvme
  bool checkpointing = false;    // of activations, a segment a layer
  std::int64_t micro_batch = 1, accumulation = 1;
  MemoryReport memory;  // current: at rest between steps; peak: within a step
  bool fits = true;
  std::string misses;                    // the first tier of the machine that is too small: "device", "host", "file"
  std::string refusal;                   // with which an Engine refuses the budgets `memory`; empty: it does not
  std::int64_t largest_micro_batch = 0;  // of this model; 0: none fits
  std::int64_t largest_model = 0;  // parameters, shapes scaled, of this micro-batch; -1: no limit was given (either)
  PlanTraffic traffic;
  PlanWork work;
  PlanTime time;
};

// The bytes, traffic and time of what `options` say, on this machine. Throws ConfigError.
Plan plan(const PlanModel& model, const Options& options, const PlanMachine& machine);

// Which configurations plan_all compares; empty: all of them.
struct PlanChoices {
  std::vector<int> stages;            // 0..3
  std::vector<std::string> offloads;  // none, cpu, nvme
  std::vector<bool> checkpointing;
};
// Stage, then offload, then checkpointing; offload only where it applies (from stage 1 on). Everything else is as in
// `options`. With offload the optimizer's states, and at stage 3 the parameters, rest there; without, the budgets
// `memory` of `options` may move them, as an Engine does.
std::vector<Plan> plan_all(const PlanModel& model, const Options& options, const PlanMachine& machine,
                           const PlanChoices& choices = {});
// The one to take: of those that fit the fastest by the predicted step, and without a profile the first in an order of
// cost: no offload before cpu before nvme, no checkpointing before checkpointing, low stages first. -1: none fits.
int cheapest(const std::vector<Plan>& plans);
// A configuration file for `zero train`: `options` with the plan's stage, offload and checkpointing, and the model
// where it is a GPT. offload_folder: where files of nvme go.
std::string plan_config(const PlanModel& model, const Options& options, const Plan& plan,
                        const std::string& offload_folder);

// A table of a paper, recomputed by formulas and printed by the rule that gives the printed digits.
struct PaperTable {
  std::string name, title;
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes;
};
// "table1", "table2" (ZeRO), "infinity", "activations", "volumes", "examples", "estimator"
std::vector<std::string> paper_names();
// Throws ConfigError for another name.
std::vector<PaperTable> paper_tables(std::string_view name);

}  // namespace zero
