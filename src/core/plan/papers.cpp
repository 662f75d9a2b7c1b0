// The tables of the papers. Every cell is computed by formulas.h and rounded by the rule that reproduces the printed
// value. Measured figures and misprints are the papers' own and are marked as such.
#include <zero/errors.h>
#include <zero/plan.h>

#include <cmath>
#include <cstdio>

#include "base/check.h"
#include "plan/formulas.h"

namespace zero {
namespace {

using namespace planning;
using Row = std::vector<std::string>;

constexpr double kGB = 1e9, kGiB = 1073741824.0, kTiB = 1024 * kGiB, kK = 1024;

// Rounds half away from zero to `digits` decimals; the addend compensates for the error of binary fractions.
std::string fixed(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, std::floor(value * scale + 0.5 + 1e-9) / scale);
  return text;
}

std::string without_zeros(std::string text) {
  if (text.find('.') == std::string::npos) return text;
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}
std::string short_fixed(double value, int digits) { return without_zeros(fixed(value, digits)); }
std::string whole(double value) { return fixed(value, 0); }
std::string grouped(double value) {
  auto text = whole(value);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<std::size_t>(at), 1, ',');
  return text;
}

// ZeRO, Table 1 rounds the first column by a different rule.
std::string table1_cell(double gigabytes, bool smallest_model) {
  if (smallest_model) return short_fixed(gigabytes, gigabytes >= 10 ? 1 : 2);
  if (gigabytes >= 100) return whole(std::floor(gigabytes));
  return short_fixed(gigabytes, 1);
}

PaperTable table1() {
  PaperTable table{"table1", "ZeRO (arXiv:1910.02054), Table 1: GB of model states a device", {"DP"}, {}, {}};
  const struct {
    const char* name;
    double parameters;
  } models[] = {{"7.5B", 7.5e9}, {"128B", 128e9}, {"1T", 1e12}};
  const char* const stages[] = {"os", "os+g", "os+g+p"};
  for (const auto& model : models)
    for (const auto* stage : stages) table.header.push_back(std::string(model.name) + " " + stage);
  bool fits[9] = {};
  for (const double ranks : {1.0, 4.0, 16.0, 64.0, 256.0, 1024.0}) {
    Row row{whole(ranks)};
    for (int m = 0; m < 3; ++m) {
      for (int stage = 1; stage <= 3; ++stage) {
        const double bytes = state_bytes(kMixedAdam, stage, models[m].parameters, ranks);
        auto cell = table1_cell(bytes / kGB, m == 0);
        bool& already = fits[3 * m + stage - 1];
        if (bytes <= 32 * kGB && !already) {
          already = true;
          cell += "*";
        }
        row.push_back(std::move(cell));
      }
    }
    table.rows.push_back(std::move(row));
  }
  table.notes = {"*: the fewest devices of a column that fit 32 GB.",
                 "16 bytes a parameter: 2 parameter, 2 gradient, 12 optimizer (fp32 master, momentum, variance).",
                 "7.5B: one decimal from 10 on, else two; 128B and 1T: whole numbers, cut, from 100 on, else one."};
  return table;
}

PaperTable table2() {
  PaperTable table{"table2",
                   "ZeRO (arXiv:1910.02054), Table 2: largest model on 32 GB devices, DP 64 inside MP",
                   {"MP", "GPUs", "baseline", "P_os", "P_os+g", "P_os+g+p", "measured baseline", "measured P_os"},
                   {},
                   {}};
  const Row measured[] = {{"1.3B", "6.2B"}, {"2.5B", "12.5B"}, {"5B", "25B"}, {"10B", "50B"}, {"20B", "100B"}};
  const auto billions = [](double value) {
    return value < 512 ? short_fixed(value, 1) + "B" : short_fixed(value / 1024, 1) + "T";
  };
  int i = 0;
  for (const double mp : {1.0, 2.0, 4.0, 8.0, 16.0}) {
    Row row{whole(mp), whole(64 * mp)};
    for (int stage = 0; stage <= 3; ++stage) {
      const double first = std::round(most_parameters(kMixedAdam, stage, 32 * kGB, 64) / kGB * 10) / 10;
      row.push_back(billions(first * mp));
    }
    row.insert(row.end(), measured[i].begin(), measured[i].end());
    ++i;
    table.rows.push_back(std::move(row));
  }
  table.notes = {"Rows below the first are multiples of what the first prints.",
                 "Measured by the authors: 65 % (baseline) and 82 % (P_os) of the theory, the rest being activations, "
                 "buffers and fragmentation."};
  return table;
}

PaperTable infinity() {
  PaperTable table{
      "infinity",
      "ZeRO-Infinity (arXiv:2104.07857), section 3: memory of large models (binary units, 1K = 1024)",
      {"params (T)", "layers", "hidden", "heads", "states TB", "act TB/node", "ckpt TB/node", "MSWM GB", "AWM GB"},
      {},
      {}};
  const double shapes[][3] = {{80, 10, 128}, {100, 20, 160}, {128, 25, 256}, {195, 64, 512}, {315, 160, 1024}};
  for (const auto& [layers, hidden, heads] : shapes) {
    Transformer m{layers, hidden * kK, heads, 1024, 1};
    const auto with_batch = [&m](double batch) {
      auto copy = m;
      copy.batch = batch;
      return copy;
    };
    Row row{fixed(m.parameters() / 1e12, 2), whole(layers), whole(hidden) + "K", whole(heads)};
    row.push_back(fixed(infinity_state_bytes(m) / kTiB, 2));
    row.push_back(fixed(infinity_activation_bytes(with_batch(64)) / kTiB, 2));
    row.push_back(fixed(checkpoint_bytes(with_batch(32)) / kTiB, 2));
    auto working = fixed(model_state_working_memory(m) / kGiB, 2);
    if (table.rows.empty()) working += "*";
    row.push_back(std::move(working));
    row.push_back(fixed(activation_working_memory(with_batch(4)) / kGiB, 2));
    table.rows.push_back(std::move(row));
  }
  table.notes = {
      "params = 12*L*h^2; states 20 bytes a parameter; sequence 1024; batch 32 a node (ckpt), 64 a node "
      "(act), 4 a GPU (AWM).",
      "MSWM = 16*h^2, AWM = b*s*ci*(16*h + 2*a*s) with ci = 1. *: the paper prints 1.95, which its formula does not "
      "give."};
  return table;
}

PaperTable infinity_bandwidth() {
  PaperTable table{"infinity",
                   "ZeRO-Infinity, section 4: efficiency by bandwidth at 70 TFLOP/s, sequence 1024",
                   {"data", "setting", "FLOP/byte", "GB/s", "efficiency"},
                   {},
                   {}};
  constexpr double kPeak = 70e12;
  const auto add = [&](const char* data, const std::string& setting, double intensity, double gigabytes) {
    table.rows.push_back({data, setting, whole(intensity), short_fixed(gigabytes, 1),
                          fixed(100 * efficiency(intensity, gigabytes * kGB, kPeak), 1) + " %"});
  };
  add("parameters, gradients", "b 1", intensity_of_parameters(1024, 1), 70);
  add("parameters, gradients", "b 1", intensity_of_parameters(1024, 1), 12);
  add("parameters, gradients", "b 8", intensity_of_parameters(1024, 8), 12);
  add("optimizer states", "b 2", intensity_of_optimizer(1024, 2), 1500);
  add("activation checkpoints", "h 2K", intensity_of_checkpoints(2 * kK), 2);
  add("activation checkpoints", "h 8K", intensity_of_checkpoints(8 * kK), 1);
  add("activation checkpoints", "h 8K", intensity_of_checkpoints(8 * kK), 3);
  const double needed = bandwidth_for(0.9, intensity_of_optimizer(1024, 2), kPeak);
  table.rows.push_back({"optimizer states", "b 2", whole(intensity_of_optimizer(1024, 2)), short_fixed(needed / kGB, 0),
                        "90 % needs it"});
  table.notes = {"efficiency = ait*bw / (ait*bw + peak); ait: s*b, s*b/4, 24*h*ci FLOP a byte."};
  return table;
}

PaperTable infinity_devices() {
  PaperTable table{"infinity",
                   "ZeRO-Infinity, section 4: what 512 devices need",
                   {"PFLOP/s a device", "slow memory GB/s", "together TB/s", "device links GB/s"},
                   {},
                   {}};
  // Scaled from the paper's figures for current devices: 3 GB/s to slow memory, 70 GB/s between devices.
  const double together = std::round(3.0 * 512 / 1000 * 10) / 10;
  for (const double times : {1.0, 10.0, 100.0})
    table.rows.push_back(
        {short_fixed(0.07 * times, 2), whole(3 * times), short_fixed(together * times, 1), whole(70 * times)});
  table.notes = {
      "One DGX-2 node: 0.5 TB of GPU, 1.5 TB of CPU memory, 28 TB NVMe; with all 16 GPUs reading, each has "
      "3.0 GB/s of CPU memory and 1.6 GB/s of NVMe."};
  return table;
}

PaperTable activations_by_layer() {
  PaperTable table{"activations",
                   "Korthikanti+ (arXiv:2205.05198): bytes that a layer keeps, 16-bit; GPT-3 (96 layers, s 2048, b 1)",
                   {"mode", "bytes a layer", "t", "GB a layer", "GB, all layers"},
                   {},
                   {}};
  const Transformer gpt3{96, 12288, 96, 2048, 1};
  const auto add = [&](const char* mode, const char* formula, Keeping keeping, double t) {
    const double bytes = activation_bytes_of_layer(gpt3, keeping, t), all = bytes * gpt3.layers;
    table.rows.push_back({mode, formula, whole(t), fixed(bytes / kGB, 3), fixed(all / kGB, all < 10 * kGB ? 2 : 1)});
  };
  add("plain", "sbh(34 + 5as/h)", Keeping::All, 1);
  add("tensor parallel", "sbh(10 + 24/t + 5as/(ht))", Keeping::TensorParallel, 8);
  add("+ sequence parallel", "sbh/t(34 + 5as/h)", Keeping::SequenceParallel, 8);
  add("selective recompute", "34sbh/t", Keeping::Selective, 1);
  add("full recompute", "2sbh", Keeping::LayerInput, 1);
  add("full, split", "2sbh/t", Keeping::SplitLayerInput, 8);
  const auto ratio = [](double heads, double sequence, double hidden) { return 5 * heads * sequence / hidden; };
  table.notes = {base::join("5as/h: ", short_fixed(ratio(96, 2048, 12288), 1), " (a 96, s 2048, h 12288), ",
                            short_fixed(ratio(128, 2048, 20480), 1), " (a 128, s 2048, h 20480)."),
                 "Full recompute is one more forward: 4/3 of the arithmetic of a forward and two backwards, +33 %."};
  return table;
}

PaperTable activations_by_rule() {
  PaperTable table{"activations",
                   "ZeRO (arXiv:1910.02054), section 6.1: about 12*h*b*s*L elements; inputs of layers 2*b*s*h*L bytes",
                   {"model", "layers", "hidden", "batch", "GB by rule", "inputs GB", "inputs/16 GB"},
                   {},
                   {}};
  const struct {
    const char* name;
    Transformer model;
  } models[] = {{"1.5B", {48, 1600, 25, 1024, 32}}, {"100B", {125, 8192, 64, 1024, 32}}};
  for (const auto& [name, m] : models)
    table.rows.push_back({name, whole(m.layers), whole(m.hidden), whole(m.batch),
                          fixed(activation_bytes_by_rule(m) / kGB, 1),
                          fixed(checkpoint_bytes(m) / kGB, checkpoint_bytes(m) < 10 * kGB ? 2 : 1),
                          fixed(checkpoint_bytes(m) / 16 / kGB, 2)});
  table.notes = {
      "The paper says \"about 8 GB\" for 1.5B, with working memory, and 33 -> 2 GB for 100B: only the "
      "ratio 1/16 can be reproduced."};
  return table;
}

PaperTable volumes() {
  PaperTable table{"volumes",
                   "Bytes a rank sends in one step: 1,000,000 parameters, 4 ranks, 2 bytes each on the wire",
                   {"scheme", "formula", "k = 1", "k = 4", "of f*p*P, k = 1"},
                   {},
                   {}};
  const struct {
    const char *name, *formula;
    Scheme scheme;
  } schemes[] = {
      {"stage 0", "2f*S_r", Scheme::Stage0},
      {"stage 1", "f*S_r + f*S_p", Scheme::Stage1},
      {"stage 1, all-reduce", "2f*S_r + f*S_p", Scheme::Stage1AllReduce},
      {"stage 2", "k*f*S_r + f*S_p", Scheme::Stage2},
      {"stage 2, summed locally", "f*S_r + f*S_p", Scheme::Stage2Local},
      {"stage 3", "2k*f*S_p + k*f*S_r", Scheme::Stage3},
      {"stage 3, kept after forward", "k*f*S_p + k*f*S_r", Scheme::Stage3Kept},
      {"stage 3, gathered once a step", "f*S_p + k*f*S_r", Scheme::Stage3OncePerStep},
      {"stage 3, gradients kept whole", "2k*f*S_p + f*S_r", Scheme::Stage3LocalGradients},
  };
  for (const auto& [name, formula, scheme] : schemes) {
    const Volume one{2e6, 2e6, 4, 1}, four{2e6, 2e6, 4, 4};
    table.rows.push_back({name, formula, grouped(sent_bytes(scheme, one)), grouped(sent_bytes(scheme, four)),
                          short_fixed(sent_bytes(scheme, one) / (0.75 * 2e6), 2)});
  }
  table.notes = {"f = (N-1)/N; S_p, S_r = p*P, r*P; k = micro-batches of a step.",
                 base::join("Gradients of 4 bytes on the wire, stage 2, k = 1: ",
                            grouped(sent_bytes(Scheme::Stage2, {2e6, 4e6, 4, 1})),
                            ". One rank: ", grouped(sent_bytes(Scheme::Stage2, {2e6, 2e6, 1, 1})), ".")};
  return table;
}

PaperTable volumes_across_hosts() {
  PaperTable table{"volumes",
                   "Bytes across hosts for each byte of the model: FSDP (arXiv:2304.11277), 512 GPUs, 8 a host",
                   {"scheme", "formula", "of M"},
                   {},
                   {}};
  constexpr double kRanks = 512, kHost = 8;
  const auto add = [&](const char* name, const char* formula, double value) {
    table.rows.push_back({name, formula, fixed(value, 3)});
  };
  add("replicate", "2M(W-1)/W", 2 * (kRanks - 1) / kRanks);
  add("full shard", "3M(W-1)/W", 3 * (kRanks - 1) / kRanks);
  add("hybrid (paper)", "2M(W-1)/(GW)", 2 * (kRanks - 1) / (kHost * kRanks));
  add("hybrid (ring)", "2M(W-G)/(GW)", hybrid_across({1, 1, kRanks, 1}, kHost));
  return table;
}

PaperTable volumes_zeropp() {
  PaperTable table{"volumes",
                   "ZeRO++ (arXiv:2306.10209): bytes across hosts in units of M = 2P",
                   {"", "forward gather", "backward gather", "reduction", "sum"},
                   {},
                   {}};
  const auto add = [&](const char* name, double forward, double backward, double reduction) {
    table.rows.push_back({name, short_fixed(forward, 3) + "M", backward == 0 ? "0" : short_fixed(backward, 3) + "M",
                          short_fixed(reduction, 3) + "M", short_fixed(forward + backward + reduction, 3) + "M"});
  };
  constexpr double kInt8 = 8.0 / 16, kInt4 = 4.0 / 16, kScale = 4.0 / 256 / 2;  // one fp32 for 256 elements of 2 bytes
  add("ZeRO-3", 1, 1, 1);
  add("qwZ", kInt8, kInt8, 1);
  add("+ hpZ", kInt8, 0, 1);
  add("+ qgZ", kInt8, 0, kInt4);
  const double shard = state_bytes(kMixedAdam, 3, 100e9, 1024) / kGB, second = 2 * 100.0 / 16;
  table.notes = {base::join("With a scale for every 256 elements: ", fixed(kInt8 + kScale, 3), " and ",
                            fixed(kInt4 + kScale, 3), "."),
                 base::join("Second shards (hpZ), 100B on 1024 GPUs, 16 a host: ", fixed(shard, 4), " -> ",
                            fixed(shard + second, 4), " GB, ", fixed((shard + second) / shard, 1), "x, 1/",
                            whole(1600 / (shard + second)), " of a replica.")};
  return table;
}

PaperTable examples() {
  PaperTable table{"examples", "Worked examples of model states and training memory", {"what", "how", "value"}, {}, {}};
  const auto add = [&](const std::string& what, const std::string& how, const std::string& value) {
    table.rows.push_back({what, how, value});
  };
  const auto gb = [](double bytes) { return short_fixed(bytes / kGB, 1) + " GB"; };
  add("1e9 parameters, fp32", "4P", gb(4e9));
  add("1e9 parameters, 16-bit", "2P", gb(2e9));
  add("1e9 parameters, int8", "P", gb(1e9));
  add("1e9 parameters, states in training", "16P", gb(state_bytes(kMixedAdam, 0, 1e9, 1)));
  add("the same, fp32 Adam", "16P", gb(state_bytes(kFp32Adam, 0, 1e9, 1)));
  add("rule of thumb: all of training", "20 x 4P", gb(80e9));
  add("optimizer states, of weights", "fp32 Adam", short_fixed(kFp32Adam.optimizer / kFp32Adam.parameter, 1) + "x");
  add("optimizer states, of weights", "mixed Adam", short_fixed(kMixedAdam.optimizer / kMixedAdam.parameter, 1) + "x");
  for (const double ranks : {4.0, 8.0, 64.0})
    for (int stage = 1; stage <= 3; ++stage)
      add(base::join("saved by stage ", stage, ", N ", ranks), "16 / bytes",
          short_fixed(16 / state_bytes(kMixedAdam, stage, 1, ranks), 3) + "x");
  add("limit of stage 1", "16/4", "4x");
  add("limit of stage 2", "16/2", "8x");
  add("GPT-2 1.5B, 16-bit weights", "2P", gb(2 * 1.5e9));
  add("GPT-2 1.5B, states", "16P", gb(state_bytes(kMixedAdam, 0, 1.5e9, 1)));
  const double small = static_cast<double>(PlanModel::named("gpt2").num_parameters()), ranks = 4;
  const double masks = 12 * kK * kK;
  add("GPT-2 small, parameters", "", grouped(small));
  add("GPT-2 small, shard of 4", "P/4", grouped(small / ranks));
  add("stage 1, before the optimizer", "2P + 4P/N", fixed((2 * small + 4 * small / ranks) / kGiB, 3) + " GiB");
  add("stage 1, with the optimizer", "2P + 12P/N", fixed((2 * small + 12 * small / ranks) / kGiB, 3) + " GiB");
  add("12 masks of 1024 x 1024 bytes", "buffers count", fixed(masks / kGiB, 4) + " GiB");
  add("before, with buffers", "", fixed((2 * small + 4 * small / ranks + masks) / kGiB, 3) + " GiB");
  add("with the optimizer and buffers", "", fixed((2 * small + 12 * small / ranks + masks) / kGiB, 3) + " GiB");
  const double net = 512 * 512 + 512;
  add("512 x 512 and 512 x 1, fp32", "4P", grouped(4 * net) + " B");
  add("the same", "", short_fixed(4 * net / kK / kK, 9) + " MiB");
  add("with a 16-bit copy", "6P", short_fixed(6 * net / kK / kK, 10) + " MiB");
  table.notes = {"20 times the weights is a rule of thumb with activations and workspace, no formula."};
  return table;
}

PaperTable estimator() {
  PaperTable table{"estimator",
                   "DeepSpeed's estimators: 2851e6 parameters, largest layer 32e6, one node",
                   {"estimate", "GPUs", "device GiB", "host GiB"},
                   {},
                   {}};
  constexpr double kP = 2851e6, kLargest = 32e6;
  const auto add = [&](const char* name, double gpus, const Estimate& estimate) {
    table.rows.push_back({name, whole(gpus), fixed(estimate.device / kGiB, 2), fixed(estimate.host / kGiB, 2)});
  };
  using enum EstimateOffload;
  add("ZeRO-2, as documented", 8, deepspeed_estimate_zero2_documented(kP, 8, 1));
  add("ZeRO-2", 8, deepspeed_estimate_zero2(kP, 8, 1, None));
  add("ZeRO-2, optimizer offloaded", 8, deepspeed_estimate_zero2(kP, 8, 1, Optimizer));
  add("ZeRO-3", 8, deepspeed_estimate_zero3(kP, kLargest, 8, 1, None));
  add("ZeRO-3, optimizer offloaded", 8, deepspeed_estimate_zero3(kP, kLargest, 8, 1, Optimizer));
  add("ZeRO-3, optimizer offloaded", 1, deepspeed_estimate_zero3(kP, kLargest, 1, 1, Optimizer));
  add("ZeRO-3, both offloaded", 8, deepspeed_estimate_zero3(kP, kLargest, 8, 1, All));
  table.notes = {"Factor 1.5 for the host; these are estimates of another program, without activations."};
  return table;
}

struct Entry {
  const char* name;
  std::vector<PaperTable (*)()> tables;
};
const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = {
      {"table1", {table1}},
      {"table2", {table2}},
      {"infinity", {infinity, infinity_bandwidth, infinity_devices}},
      {"activations", {activations_by_layer, activations_by_rule}},
      {"volumes", {volumes, volumes_across_hosts, volumes_zeropp}},
      {"examples", {examples}},
      {"estimator", {estimator}},
  };
  return all;
}

}  // namespace

std::vector<std::string> paper_names() {
  std::vector<std::string> names;
  for (const auto& entry : entries()) names.emplace_back(entry.name);
  return names;
}

std::vector<PaperTable> paper_tables(std::string_view name) {
  for (const auto& entry : entries()) {
    if (name != entry.name) continue;
    std::vector<PaperTable> tables;
    for (const auto make : entry.tables) tables.push_back(make());
    return tables;
  }
  std::string names;
  for (const auto& known : paper_names()) names += (names.empty() ? "" : ", ") + known;
  throw ConfigError(base::join("[paper_tables] got \"", std::string(name), "\", expected one of ", names));
}

}  // namespace zero
