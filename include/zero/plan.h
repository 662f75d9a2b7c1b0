// Estimates a configuration without running it: bytes of one rank by tier and purpose, bytes sent per step, step time
// and what limits it, and which stages and offloads fit. Needs no libtorch, no model in memory and no other ranks; all
// calls are local. See docs/planner.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/memory_report.h>
#include <zero/options.h>

namespace zero {

// The micro-batch of one forward and backward.
struct PlanBatch {
  std::int64_t samples = 1;   // of PlanModel::sequence tokens
  std::int64_t segments = 0;  // checkpointed segments of layers; 0: no activation checkpointing
  std::int64_t element = 4;   // bytes of an activation
  bool gpu = true;
  // On a mesh, what this rank computes: tokens of a sample (0: all), fractions of heads, MLP width and vocabulary.
  std::int64_t tokens = 0;
  double heads = 1, inner = 1, vocabulary = 1;
  bool gathered_logits = true;  // it still has whole logits
};

// Receives the events of one forward and backward in their order: what a model allocates, releases and reads. Tensors
// are numbered from 0 on, a new number for each; parameters are numbered in the order of registration. All functions
// throw ConfigError for an invalid number.
class PlanPass {
 public:
  virtual ~PlanPass() = default;
  virtual void allocate(std::int64_t tensor, std::int64_t bytes) = 0;
  virtual void release(std::int64_t tensor) = 0;
  // An operator reads the parameters first .. first + count - 1.
  virtual void use(std::size_t first, std::size_t count) = 0;
  // The first run of a checkpointed segment. Its input is kept for the second run, on the configured tier.
  virtual void begin_segment(std::int64_t input) = 0;
  virtual void end_segment() = 0;
  // The second run of the last remaining segment begins; its input is back, as that tensor.
  virtual void rerun_segment(std::int64_t input) = 0;
  virtual void begin_backward() = 0;
  // Autograd has accumulated a parameter's gradient.
  virtual void gradient(std::size_t parameter, std::int64_t tensor) = 0;
  virtual void end_backward() = 0;
};

// The shape of a model. Parameter counts are exact for named models and for shapes, with biases and norms.
struct ZERO_API PlanModel {
  // Gpt: GPT-2's block with learned positions. Count: a number of parameters only; units and activations are those of a
  // GPT of about that size.
  enum class Kind { Gpt, Bert, T5, Llama, Count };
  Kind kind = Kind::Gpt;
  std::string name;  // may be empty
  std::int64_t layers = 0, hidden = 0, heads = 0, sequence = 1024, vocabulary = 50257;
  bool tied = true;             // the output layer shares the token embedding
  std::int64_t kv_heads = 0;    // Llama: number of key and value heads
  std::int64_t inner = 0;       // width of the MLP; 0: 4 * hidden
  std::int64_t head_width = 0;  // T5: 0: hidden / heads
  std::int64_t count = 0;       // Kind::Count: number of parameters
  // Describes the model's forward and backward, as models/gpt_pass.h does for the GPT of `zero train`. Without it,
  // units run one after the other and activations are estimated (docs/planner.md).
  std::function<void(const PlanModel&, const PlanBatch&, PlanPass&)> pass = nullptr;

  // "gpt2", "gpt2-medium", ..., "gpt3-175b", "bert-base", "t5-11b", "llama-3-70b", ...; ignores case, '_' and ' '.
  // Throws ConfigError with the most similar name.
  static PlanModel named(std::string_view name);
  static std::vector<std::string> names();
  static PlanModel of_count(double parameters);  // 1e5 to 1e15. Throws ConfigError.
  // The block `model` of a configuration, read as by `zero train`; the default is gpt-1m. Throws ConfigError.
  static PlanModel of_options(const Options& options);

  std::int64_t num_parameters() const;
  std::int64_t mlp_width() const { return inner > 0 ? inner : 4 * hidden; }
  // Throws ConfigError that names the invalid field.
  void validate() const;
};

// Compute speed of one rank in one precision. The time is the sum of work / speed. 0: unknown, adds no time.
struct PlanSpeed {
  double flops = 0;     // matrix multiplication, FLOP/s
  double elements = 0;  // norms, activations and loss, elements/s
  double heads = 0;     // attention without its matrix multiplications, (heads x tokens)/s
  double layer_s = 0;   // fixed time of one layer's operators, s
};

// Speed of one rank while all ranks of its host are active, in bytes/s and elements/s. 0: unknown, adds no time.
struct ZERO_API PlanProfile {
  std::string name = "no profile";
  int ranks = 0;  // ranks per host in the measurement; more ranks share its speed. 0: they do not
  PlanSpeed fp32, bf16, fp16;
  double link_bytes = 0;                   // between ranks of one host: payload that a rank sends in a collective
  double network_bytes = 0;                // between hosts
  double collective_s = 0;                 // fixed time of one collective, s
  double host_link_bytes = 0;              // PCIe of a GPU, one direction
  double device_update_elements = 0;       // optimizer step on the parameters' device
  double host_update_elements = 0;         // optimizer step in host memory
  double read_bytes = 0, write_bytes = 0;  // files of offloaded states, per host
  double step_s = 0;                       // fixed time of one step, s: hooks, norms, bookkeeping

  // Reads what `zero bench profile` writes (zero.profile/1; docs/planner.md). Throws ConfigError.
  static PlanProfile from_json(std::string_view text, std::string_view name = "<text>");
  std::string json() const;
};

struct PlanMachine {
  int hosts = 1, ranks_per_host = 1;
  bool gpu = true;  // false: ranks on CPUs, where device memory is host memory
  // Bytes; 0: no limit. On CPUs device_bytes limits all memory of a rank.
  std::uint64_t device_bytes = 0;    // per rank
  std::uint64_t host_bytes = 0;      // per host, for all of its ranks
  std::uint64_t file_bytes = 0;      // per host
  std::uint64_t reserved_bytes = 0;  // of device_bytes, on a GPU: context, library workspaces, fragmentation
  // Ranks of a host read each other's shards through shared memory instead of all-gathering copies. CPUs, one host.
  bool shared_memory = false;
  PlanProfile profile;
  int world() const { return hosts * ranks_per_host; }
};

struct PlanTraffic {                                         // of one rank in one optimizer step, in bytes
  std::uint64_t gathered = 0, reduced = 0;                   // sent by ZeRO's all-gathers; sent by its reductions
  std::uint64_t tensor_parallel = 0, sequence_parallel = 0;  // activations and their gradients, sent on these axes
  std::uint64_t across_hosts = 0;                            // of all
  double volume = 0;  // ZeRO's bytes / ((N-1)/N * bytes of the parameters): 2 or 3 (in the ZeRO paper 2x, 3x)
  std::uint64_t to_host = 0, from_host = 0;  // over a GPU's host link
  std::uint64_t read = 0, written = 0;       // of files
  std::uint64_t sent() const { return gathered + reduced + tensor_parallel + sequence_parallel; }
};

struct PlanWork {                             // of one rank in one optimizer step
  double flops = 0, elements = 0, heads = 0;  // of forward and backward; units of PlanSpeed
  std::int64_t layers = 0;                    // layers run; forward and backward count as one
  std::int64_t collectives = 0;
  std::int64_t updated = 0, updated_on_host = 0;  // parameters updated, on the device and on the host
};

struct PlanTime {  // seconds of one optimizer step; 0: unknown
  double compute = 0, network = 0, host_link = 0, disk = 0, update = 0, other = 0;
  double step = 0;
  std::string bound;  // "compute", "network", "PCIe", "disk", "update"; empty: unknown
};

// One configuration on one machine.
struct Plan {
  int stage = 0;
  int tensor = 1, sequence = 1, data = 1;  // degrees of parallelism; their product is the number of ranks
  std::int64_t parameters = 0;             // elements that a rank holds before ZeRO shards them
  std::string offload = "none";            // none, cpu, nvme
  bool checkpointing = false;              // activation checkpointing with one segment per layer
  std::int64_t micro_batch = 1, accumulation = 1;
  MemoryReport memory;  // current: between steps; peak: within a step
  bool fits = true;
  std::string misses;                    // the first tier that is too small: "device", "host", "file"
  std::string refusal;                   // the error of an Engine if the budgets `memory` are infeasible; else empty
  std::int64_t largest_micro_batch = 0;  // of this model; 0: none fits; -1: no limit was given
  std::int64_t largest_model = 0;        // parameters, for this micro-batch and scaled shapes; -1: no limit was given
  PlanTraffic traffic;
  PlanWork work;
  PlanTime time;
};

// Memory, traffic and time of `options` on this machine. Throws ConfigError.
ZERO_API Plan plan(const PlanModel& model, const Options& options, const PlanMachine& machine);

// The configurations that plan_all compares; empty: all.
struct PlanChoices {
  std::vector<int> stages;            // 0..3
  std::vector<std::string> offloads;  // none, cpu, nvme
  std::vector<bool> checkpointing;
};
// One plan per stage, offload and checkpointing, in this order of nesting. Offload is included from stage 1 on. All
// other settings are those of `options`. With offload, optimizer states, and at stage 3 parameters, are on that tier.
// Without it, the budgets `memory` of `options` may move them, as an Engine does.
ZERO_API std::vector<Plan> plan_all(const PlanModel& model, const Options& options, const PlanMachine& machine,
                                    const PlanChoices& choices = {});
// The index of the recommended plan, or -1 if none fits. With a profile: the fitting plan with the shortest predicted
// step. Without one: the first by no offload before cpu before nvme, no checkpointing before checkpointing, low stages
// first.
ZERO_API int cheapest(const std::vector<Plan>& plans);
// A file for `zero train`: `options` with what the plan chose, and the model if it is a GPT. offload_folder: for nvme.
ZERO_API std::string plan_config(const PlanModel& model, const Options& options, const Plan& plan,
                                 const std::string& offload_folder);

// A table of a paper, recomputed from formulas and rounded as printed.
struct PaperTable {
  std::string name, title;
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  std::vector<std::string> notes;
};
// "table1", "table2" (ZeRO), "infinity", "activations", "volumes", "examples", "estimator"
ZERO_API std::vector<std::string> paper_names();
// Throws ConfigError for another name.
ZERO_API std::vector<PaperTable> paper_tables(std::string_view name);

}  // namespace zero
