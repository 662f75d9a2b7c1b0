// Estimates a configuration without running it: bytes of one rank by tier and purpose, bytes sent per step, step time
// and what limits it, and which stages and offloads fit. Needs no libtorch, no model in memory and no other ranks; all
// calls are local. See docs/planner.md.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/memory_report.h>
#include <zero/options.h>
#include <zero/plan_model.h>

namespace zero {

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

  // Reads a profile written by `zero bench profile` (schema zero.profile/1; docs/planner.md). Throws ConfigError,
  // IoError.
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

struct PlanTraffic {                        // of one rank in one optimizer step, in bytes
  std::uint64_t gathered = 0, reduced = 0;  // sent by ZeRO's all-gathers; sent by its reductions
  // Sent between ranks that share a model, and between ranks that share a sequence: activations and their gradients.
  std::uint64_t tensor_parallel = 0, sequence_parallel = 0;
  std::uint64_t expert_parallel = 0;  // rows of tokens to experts and back, if all are chosen equally often
  std::uint64_t across_hosts = 0;     // of all
  double volume = 0;  // ZeRO's bytes / ((N-1)/N * bytes of the parameters): 2 or 3 (in the ZeRO paper 2x, 3x)
  std::uint64_t to_host = 0, from_host = 0;  // over a GPU's host link
  std::uint64_t read = 0, written = 0;       // of files
  std::uint64_t sent() const { return gathered + reduced + tensor_parallel + sequence_parallel + expert_parallel; }
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
  // Degrees of parallelism; tensor * sequence * data = ranks. parameters: elements of the model that a rank holds
  // before ZeRO shards them over data * sequence ranks (docs/parallelism.md).
  int tensor = 1, sequence = 1, data = 1;
  int expert = 1;  // ranks, of the data- and sequence-parallel ones, that share the experts of a layer
  std::int64_t parameters = 0;
  std::string offload = "none";  // none, cpu, nvme
  bool checkpointing = false;    // activation checkpointing with one segment per layer
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
  std::vector<std::string> notices;  // where the plan may differ from a run, in sentences
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
// A configuration file for `zero train`: `options` with the plan's stage, offload and checkpointing, and the model if
// it is a GPT. offload_folder: the folder for nvme files.
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
